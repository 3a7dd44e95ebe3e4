"""Extraction: hidden states of whole conversations, out of an offline vLLM engine, into Parquet shards.

    with ExtractionEngine(config, vllm, verifier, log_path=..., token=...) as engine:
        for shard, responses in ...:
            results = engine.stream(shard, samples_of(responses))
            data, rows, status_counts = build_shard(responses, results, engine.meta)

The engine loads the verifier once and serves many shards. Its states come through files in a staging folder on the
local disk that this process owns: each is mapped, checked and deleted before the next request's are awaited.
"""

from __future__ import annotations

import itertools
import logging
import os
import shutil
import tempfile
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Annotated, Any, Literal, Self

from pydantic import Field
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from infra.config import CONTENT, Config
from infra.errors import InfrastructureError, InputError, ServerError
from infra.extract_process import ExtractProcess
from infra.extraction_rows import BuiltShard, ExtractResult, ExtractSample, build_shard, samples_of
from infra.hidden_states import HiddenStatesMeta
from infra.state_checks import states_problem
from infra.verifier import Verifier, default_layer_ids
from infra.vllm_config import VllmConfig

__all__ = [
    "BuiltShard",
    "ExtractConfig",
    "ExtractResult",
    "ExtractSample",
    "ExtractionEngine",
    "build_shard",
    "resolve_layer_ids",
    "samples_of",
]

WORKER = Path(__file__).resolve().parent / "extract_worker.py"
# One request is worked on while the next lies ready, so that the engine never waits for the checks here.
REQUESTS_IN_FLIGHT = 2
# Room that must stay free on the staging disk, beyond the states that are asked for.
STAGING_RESERVE_BYTES = 256 * 2**20
# The widest that vLLM keeps a state: float32.
MAX_BYTES_PER_VALUE = 4

logger = logging.getLogger("draftsmith.extraction")


class ExtractConfig(Config):
    """Which hidden states are extracted, and how."""

    layer_ids: Annotated[list[int] | None, CONTENT] = None
    """Layers whose states are kept, ascending, the last being the verifier's number of layers; the ones before it
    feed the draft. By default layer 2, the middle one, the third from the end, and the last."""
    encoding: Annotated[Literal["bf16"], CONTENT] = "bf16"
    """How the states are stored. `bf16`: as they are."""
    max_failed_share: float = Field(default=0.02, ge=0.0, le=1.0)
    """Share of the samples that may fail before the stage does."""
    tokens_per_request: int = Field(default=65_536, ge=1)
    """Tokens given to the engine at once. Bounds the staging folder to the states of two such requests; many small
    requests leave the engine half empty."""
    timeout_seconds: float = Field(default=3600.0, gt=0.0)
    """How long one request may take before the engine counts as hung and is ended."""
    staging_folder: str | None = None
    """Folder on a local disk for states on their way; by default the system's temporary folder."""


def resolve_layer_ids(config: ExtractConfig, verifier: Verifier) -> list[int]:
    """The layers to extract, checked against the verifier.

    Raises:
        InputError: they are not ascending ids of its layers that end with the last.
    """
    last = verifier.num_hidden_layers
    ids = config.layer_ids
    if ids is None:
        return default_layer_ids(last)
    ascending = all(one < other for one, other in itertools.pairwise(ids))
    if len(ids) < 2 or not ascending or ids[0] < 1 or ids[-1] != last:
        raise InputError(
            "extract.layer_ids",
            f"{ids} must be at least two ascending ids from 1 to {last}, the last of them {last}: "
            f"{verifier.name} has {last} layers",
        )
    return list(ids)


class ExtractionEngine:
    """An offline vLLM engine in a process of its own, up from entering this context to leaving it.

    Args:
        log_path: file that the process's output is appended to.
        token: name of this piece of work (`process_token`); what an earlier run of it left behind, processes and
            staged files, is ended and deleted first.
        trust_remote_code: let vLLM run code that comes with the model.
        worker: the program run with vLLM's interpreter; another one in tests only.

    Attributes:
        meta: what the shards built of its states say in their metadata.
        staging: folder of the states on their way; gone when the engine has stopped.

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
    ) -> None:
        self._config = config
        self._process = ExtractProcess(
            vllm, verifier.path, log_path=log_path, token=token, trust_remote_code=trust_remote_code, worker=worker
        )
        self.meta = HiddenStatesMeta(
            layer_ids=tuple(resolve_layer_ids(config, verifier)),
            hidden_size=verifier.hidden_size,
            verifier_revision=verifier.revision,
            encoding=config.encoding,
        )
        parent = Path(config.staging_folder or tempfile.gettempdir()).expanduser()
        self.staging = parent / f"draftsmith-extract-{token}"
        self._numbers = itertools.count(1)
        self._reading = threading.Lock()  # held by the one caller that reads replies, for all
        self._books = threading.Lock()  # held for moments, around the next two
        self._replies: dict[int, dict[str, Any]] = {}
        self._given_up: set[int] = set()

    def __enter__(self) -> Self:
        try:
            self._process.end_stale()
            self._renew_staging()
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
        shutil.rmtree(self.staging, ignore_errors=True)

    def extract(self, shard: str, samples: Sequence[ExtractSample]) -> list[ExtractResult]:
        """All results of `stream` at once, in the order of `samples`. Blocks; same errors."""
        return list(self.stream(shard, samples))

    def stream(self, shard: str, samples: Sequence[ExtractSample]) -> Iterator[ExtractResult]:
        """Extract the samples' states and check them; one result each, in their order. Blocks between them.

        A sample that cannot be extracted, or whose states fail a check, is a result with an error. Several threads
        may each have a stream: while one encodes its shard, the engine works for the other.

        Raises:
            ServerError: the engine ended or took too long; the message holds its last errors.
            InfrastructureError: the staging disk has no room for the states.
        """
        waiting = deque(_batches(samples, self._config.tokens_per_request))
        sent: deque[tuple[int, list[ExtractSample]]] = deque()
        num_failed, num_tokens, seconds = 0, 0, 0.0
        try:
            while waiting or sent:
                while waiting and len(sent) < REQUESTS_IN_FLIGHT:
                    batch = waiting.popleft()
                    sent.append((self._send(shard, batch), batch))
                number, batch = sent[0]
                reply = self._receive(number, batch)
                num_tokens += reply["num_tokens"]
                seconds += reply["seconds"]
                for sample, answer in zip(batch, reply["samples"], strict=True):
                    result = self._result(sample, answer)
                    num_failed += result.error is not None
                    yield result
                sent.popleft()
                self._close(number)
        finally:
            for number, _ in sent:
                self._close(number)
        logger.info(
            "Shard %s: extracted %d of %d samples, %d tokens at %.0f tokens/s.",
            shard,
            len(samples) - num_failed,
            len(samples),
            num_tokens,
            num_tokens / max(seconds, 1e-9),
        )

    def _send(self, shard: str, batch: list[ExtractSample]) -> int:
        """Hand a request to the engine and return its number."""
        self._require_room(sum(len(sample.input_ids) for sample in batch))
        samples = [{"sample_id": sample.sample_id, "input_ids": list(sample.input_ids)} for sample in batch]
        number = next(self._numbers)
        folder = self._folder(number)
        folder.mkdir()
        self._process.send({"request": number, "shard": shard, "staging": str(folder), "samples": samples})
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
            shutil.rmtree(self._folder(number), ignore_errors=True)

    def _result(self, sample: ExtractSample, answer: dict[str, str]) -> ExtractResult:
        """Map and check one sample's file. Effects: deletes the file."""
        states = None
        if error := answer.get("error"):
            error = f"vllm: {error}"
        else:
            path = answer["path"]
            try:
                error, states = self._checked(sample, load_file(path))
                os.unlink(path)  # its pages stay mapped for as long as the states are held
            except (OSError, SafetensorError, KeyError) as problem:
                error = f"vllm: the staged file cannot be read: {problem!r}"
        return ExtractResult(sample.sample_id, error, None if error else states)

    def _checked(self, sample: ExtractSample, staged: dict[str, Tensor]) -> tuple[str | None, Tensor]:
        states = staged["hidden_states"]  # [tokens, layers, hidden]
        ids = staged["token_ids"].tolist()
        if ids != list(sample.input_ids):
            return f"ids: vLLM saw {len(ids)} that are not the {len(sample.input_ids)} of the response", states
        if states.ndim != 3 or states.shape[2] != self.meta.hidden_size:
            return f"length: states of shape {list(states.shape)} from a verifier of width {self.meta.hidden_size}", states
        return states_problem(states, sample.input_ids, self.meta.layer_ids), states

    def _folder(self, number: int) -> Path:
        return self.staging / f"{number:06d}"

    def _renew_staging(self) -> None:
        try:
            if self.staging.exists():
                logger.warning("Deleting states in %s, which an earlier run had left behind.", self.staging)
                shutil.rmtree(self.staging)
            self.staging.mkdir(mode=0o700, parents=True)
        except OSError as error:
            raise InfrastructureError(f"The staging folder {self.staging} cannot be used: {error}") from error

    def _require_room(self, num_tokens: int) -> None:
        needed = num_tokens * len(self.meta.layer_ids) * self.meta.hidden_size * MAX_BYTES_PER_VALUE
        free = shutil.disk_usage(self.staging).free
        if free < needed + STAGING_RESERVE_BYTES:
            raise InfrastructureError(
                f"{self.staging} has {free / 2**20:.0f} MiB free, but the states of {num_tokens} tokens take up "
                f"to {needed / 2**20:.0f} MiB; free some, lower extract.tokens_per_request, or set "
                "extract.staging_folder."
            )


def _batches(samples: Sequence[ExtractSample], num_tokens: int) -> Iterator[list[ExtractSample]]:
    """Split samples, in order, into batches of at most `num_tokens` tokens (or of one sample that has more)."""
    batch: list[ExtractSample] = []
    size = 0
    for sample in samples:
        if batch and size + len(sample.input_ids) > num_tokens:
            yield batch
            batch, size = [], 0
        batch.append(sample)
        size += len(sample.input_ids)
    if batch:
        yield batch
