"""Extraction: hidden states of whole conversations, out of an offline vLLM engine, into Parquet shards.

    with ExtractionEngine(config, vllm, verifier, log_path=..., token=...) as engine:
        for shard, responses in ...:
            results = engine.stream(shard, samples_of(responses))
            data, rows, status_counts, extra = build_shard(responses, results, engine.meta, checks)

The engine loads the verifier once and serves many shards. Its states come through files in a staging folder that
this process owns (`infra.extraction.staging`): each is mapped, checked and deleted, and what lies there at once is
bounded. Who reads them in other processes (`infra.extraction.build_pool`) takes `engine.staged` instead.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import shutil
import threading
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch

from infra.errors import InfrastructureError, InputError, ServerError
from infra.extraction.config import ExtractConfig, engine_configs, resolve_layer_ids, states_meta
from infra.extraction.process import ExtractProcess
from infra.extraction.rows import BuiltShard, ExtractResult, ExtractSample, build_shard, samples_of
from infra.extraction.staged_states import Staged, StreamTimes, read_staged
from infra.extraction.staging import Staging
from infra.verifiers.verifier import Verifier
from infra.vllm_config import VllmConfig

__all__ = [
    "BuiltShard",
    "ExtractConfig",
    "ExtractResult",
    "ExtractSample",
    "ExtractionEngine",
    "StreamTimes",
    "build_shard",
    "engine_configs",
    "resolve_layer_ids",
    "samples_of",
]

WORKER = Path(__file__).resolve().parents[1] / "extract_worker.py"
# One request is worked on while the next lies ready, so that the engine never waits for the checks here.
REQUESTS_IN_FLIGHT = 2
# Tokens of one request at most: several batches of the engine (max_num_batched_tokens is 2,048 to 16,384), so that
# the end of a request, when the batch runs empty, costs little. More would only lie in the staging for longer.
MAX_REQUEST_TOKENS = 65_536
# Of a staged file beside its states: its header, and each id.
FILE_BYTES, ID_BYTES = 1024, 8

logger = logging.getLogger("draftsmith.extraction")


class ExtractionEngine:
    """An offline vLLM engine in a process of its own, up from entering this context to leaving it.

    Args:
        log_path: file that the process's output is appended to.
        token: name of this piece of work (`process_token`); what an earlier run of it left behind, processes and
            staged files, is ended and deleted first.
        staging: the stage's, open, where engines share it; by default the engine opens one of its own.
        trust_remote_code: let vLLM run code that comes with the model.
        worker: the program run with vLLM's interpreter; another one in tests only.

    Attributes:
        meta: what the shards built of its states say in their metadata.
        staging: of the states on their way; nothing of this engine's is left in it when it has stopped.

    Raises, on entering:
        InputError: the layer ids do not fit the verifier; vLLM is not there, or is of an untested version.
        ServerError: the engine ended while loading or was not ready in time; the message holds its last errors.
    """

    def __init__(
        self,
        config: ExtractConfig,
        vllm: VllmConfig,
        verifier: Verifier,
        *,
        log_path: str | Path,
        token: str,
        trust_remote_code: bool = False,
        worker: Path = WORKER,
        staging: Staging | None = None,
    ) -> None:
        self._config = config
        self._process = ExtractProcess(
            vllm, verifier.path, log_path=log_path, token=token, trust_remote_code=trust_remote_code, worker=worker
        )
        self.meta = states_meta(config, verifier)
        # What vLLM calls auto is never float32.
        bytes_per_value = 4 if vllm.dtype == "float32" else 2
        self._token_bytes = len(self.meta.layer_ids) * self.meta.hidden_size * bytes_per_value + ID_BYTES
        self._owns_staging = staging is None
        self.staging = staging or config.staging(token)
        self._folder = self.staging.folder / token
        self._numbers = itertools.count(1)
        self._reading = threading.Lock()  # held by the one caller that reads replies, for all
        self._books = threading.Lock()  # held for moments, around the rest
        self._replies: dict[int, dict[str, Any]] = {}
        self._given_up: set[int] = set()
        self._staged_bytes: dict[int, int] = {}  # what is taken for a request, less what was read of it
        self._stopped = False

    def __enter__(self) -> Self:
        try:
            self._process.end_stale()
            if self._owns_staging:
                self.staging.open()
            shutil.rmtree(self._folder, ignore_errors=True)  # of this engine's last life
            self._folder.mkdir(mode=0o700)
            self._process.start(list(self.meta.layer_ids))
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """End the engine and delete what is staged. May be called from another thread while `extract` waits, which
        then raises ServerError."""
        self._process.stop()
        with self._books:
            self._stopped = True
            staged_bytes = sum(self._staged_bytes.values())
            self._staged_bytes.clear()
        shutil.rmtree(self._folder, ignore_errors=True)
        self.staging.give_back(staged_bytes)
        if self._owns_staging:
            self.staging.close()

    def extract(self, shard: str, samples: Sequence[ExtractSample]) -> list[ExtractResult]:
        """All results of `stream` at once, in the order of `samples`. Blocks; same errors."""
        return list(self.stream(shard, samples))

    def stream(
        self, shard: str, samples: Sequence[ExtractSample], times: StreamTimes | None = None
    ) -> Iterator[ExtractResult]:
        """`staged`, read and checked here: a sample that cannot be extracted, or whose states fail a check, is a
        result with an error. Same errors."""
        # Of the thread that checks and encodes: there is one for each shard, and each with a team of its own would
        # have them spin against each other, and against an engine that computes on these cores.
        torch.set_num_threads(1)
        with contextlib.closing(self.staged(shard, samples, times)) as answers:
            for sample, staged in zip(samples, answers, strict=True):
                yield read_staged(sample, staged, self.meta)

    def staged(
        self, shard: str, samples: Sequence[ExtractSample], times: StreamTimes | None = None
    ) -> Generator[Staged]:
        """Extract the samples' states; one answer each, in their order. Blocks between them.

        Several threads may each have such a stream: while one's shard is encoded, the engine works for the others.
        Whoever reads it has read and deleted a file, and drops its states, when it takes the next: by then their
        room in the staging is given to others.

        Args:
            times: added to as the stream goes on.
        Raises:
            ServerError: the engine ended or took too long; the message holds its last errors.
            InputError: a sample has more states than the staging may ever hold.
            InfrastructureError: the staging disk has no room for the states.
        """
        waiting = deque(self._requests(samples))
        sent: deque[tuple[int, list[ExtractSample]]] = deque()
        held: deque[int] = deque()  # bytes of the results that the reader may still have: files gone, pages mapped
        num_failed, num_tokens, times = 0, 0, times or StreamTimes()
        try:
            while waiting or sent:
                while waiting and len(sent) < REQUESTS_IN_FLIGHT:
                    with times.waiting():
                        number = self._send(shard, waiting[0], wait=not sent and not held)
                    if number is None:
                        break  # the staging is full: what is in flight comes first
                    sent.append((number, waiting.popleft()))
                if not sent:
                    self.staging.give_back(held.popleft())
                    continue
                number, batch = sent[0]
                with times.waiting():
                    reply = self._receive(number, batch)
                num_tokens += reply["num_tokens"]
                times.engine_seconds += reply["seconds"]
                for sample, answer in zip(batch, reply["samples"], strict=True):
                    held.append(self._hold(number, sample))
                    error = answer.get("error")
                    num_failed += error is not None
                    yield Staged(None if error else answer["path"], error)
                    while len(held) > 1:
                        self.staging.give_back(held.popleft())
                sent.popleft()
                self._close(number)
        finally:
            for number, _ in sent:
                self._close(number)
            self.staging.give_back(sum(held))
        logger.info(
            "Shard %s: extracted %d of %d samples, %d tokens at %.0f tokens/s.",
            shard,
            len(samples) - num_failed,
            len(samples),
            num_tokens,
            num_tokens / max(times.engine_seconds, 1e-9),
        )

    def _requests(self, samples: Sequence[ExtractSample]) -> Iterator[list[ExtractSample]]:
        """Split samples, in order, into requests that keep to the bounds (or of one sample that exceeds them)."""
        most = min(self.staging.request_bytes, MAX_REQUEST_TOKENS * self._token_bytes)
        batch: list[ExtractSample] = []
        size_bytes = 0
        for sample in samples:
            if batch and size_bytes + self._file_bytes(sample) > most:
                yield batch
                batch, size_bytes = [], 0
            batch.append(sample)
            size_bytes += self._file_bytes(sample)
        if batch:
            yield batch

    def _file_bytes(self, sample: ExtractSample) -> int:
        """What the sample's staged file takes at most."""
        return len(sample.input_ids) * self._token_bytes + FILE_BYTES

    def _send(self, shard: str, batch: list[ExtractSample], *, wait: bool) -> int | None:
        """Hand a request to the engine and return its number; None when the staging is full and nobody waits."""
        size_bytes = sum(map(self._file_bytes, batch))
        if size_bytes > self.staging.limit_bytes:
            raise InputError(
                "extract.staging_gib",
                f"sample {batch[0].sample_id} of {len(batch[0].input_ids)} tokens has up to "
                f"{size_bytes / 2**30:.3g} GiB of states, more than the {self.staging.limit_bytes / 2**30:.3g} GiB "
                f"that may lie in {self.staging.folder.parent}; raise it",
            )
        if not self.staging.take(size_bytes, wait=wait):
            return None
        number = next(self._numbers)
        with self._books:
            if self._stopped:
                self.staging.give_back(size_bytes)
                raise ServerError("The extraction engine was stopped.")
            self._staged_bytes[number] = size_bytes
            self._request_folder(number).mkdir()
        try:
            self.staging.require_room(size_bytes)
        except InfrastructureError:
            self._forget(number)
            raise
        samples = [{"sample_id": sample.sample_id, "input_ids": list(sample.input_ids)} for sample in batch]
        folder = str(self._request_folder(number))
        self._process.send({"request": number, "shard": shard, "staging": folder, "samples": samples})
        return number

    def _receive(self, number: int, batch: list[ExtractSample]) -> dict[str, Any]:
        """The reply to request `number`; replies to other callers met on the way are kept for them."""
        with self._reading:
            while number not in self._replies:
                reply = self._process.receive(self._config.timeout_seconds)
                with self._books:
                    self._replies[reply["request"]] = reply
                    unwanted = reply["request"] in self._given_up
                if unwanted:
                    self._close(reply["request"])
        reply = self._replies[number]
        if [answer["sample_id"] for answer in reply["samples"]] != [sample.sample_id for sample in batch]:
            raise ServerError(f"The extraction engine answered request {number} with other samples than its own.")
        return reply

    def _close(self, number: int) -> None:
        """Forget request `number` and delete what is staged for it, at once or when its reply comes."""
        with self._books:
            answered = self._replies.pop(number, None) is not None
            self._given_up.discard(number) if answered else self._given_up.add(number)
        if answered:
            self._forget(number)

    def _forget(self, number: int) -> None:
        """Delete what is staged for request `number`, to which the engine writes no more."""
        shutil.rmtree(self._request_folder(number), ignore_errors=True)
        with self._books:
            size_bytes = self._staged_bytes.pop(number, 0)
        self.staging.give_back(size_bytes)

    def _hold(self, number: int, sample: ExtractSample) -> int:
        """Take one sample's bytes out of its request's account, for the caller to give back; returns them."""
        with self._books:
            if number not in self._staged_bytes:
                return 0  # stopped meanwhile, and all given back
            self._staged_bytes[number] -= self._file_bytes(sample)
        return self._file_bytes(sample)

    def _request_folder(self, number: int) -> Path:
        return self._folder / f"{number:06d}"
