"""Processes that check and encode the shards of a stage of hidden states, as many as shards are in work.

    with BuildPool(checks, head_folder, folder, token=..., log_path=..., ahead=2) as pool:
        built = pool.build(responses, engine.staged(shard, samples, times), times)
        manifest.commit_shard(..., built.data, ...)

Each runs `infra/extraction/build_worker.py` under a guard. It gets the staged files by their paths, one at a time,
so that the staging's bound is what it is for a thread, and leaves the shard as a file beside them, to be committed
here: a process that is killed takes nothing with it but the shard it was at, which is made again.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import pickle
import sys
import threading
from collections.abc import Generator
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from infra import processes
from infra.errors import InfrastructureError
from infra.extraction.build_worker import Failure, Order, Say, Setup
from infra.extraction.rows import BuiltShard, samples_of
from infra.extraction.staged_states import Staged, StreamTimes
from infra.processes import GuardedProcess, log_tail
from infra.redaction import withheld
from infra.state_checks.checks import StateChecks

# As code, not as a file: a file's own folder would come first on the search path, and its names hide others'.
PROGRAM = "from infra.extraction.build_worker import main; main()"
HOME = Path(__file__).resolve().parents[2]
END_SECONDS = 5.0
# Of one sample, or of a start: the longest sample takes seconds, a large head that is read from afar a minute.
HANG_SECONDS = 900.0
EXIT_KILLED = 137


class BuildPool:
    """The processes of one stage. Thread-safe: each caller of `build` has one to itself.

    Args:
        checks: of the stage; the pool has it learn the norms of what is built.
        head_folder: the verifier's folder, for the check by its head; None without that check.
        folder: existing local folder for the files.
        token: name of this piece of work (`process_token`); what an earlier run of it left behind is ended first.
        log_path: file that the processes' output is appended to.
        ahead: processes that are started at once; more are where there is more to do at a time.
    """

    def __init__(
        self,
        checks: StateChecks,
        head_folder: Path | None,
        folder: Path,
        *,
        token: str,
        log_path: Path,
        ahead: int,
    ) -> None:
        self._checks = checks
        self._setup = Setup(checks.config, checks.meta, head_folder and head_folder.absolute())
        self._folder = folder.absolute()
        self._token = token
        self._log_path = log_path
        self._ahead = ahead
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._all: set[_Builder] = set()
        self._idle: list[_Builder] = []
        self._closed = False

    def __enter__(self) -> Self:
        processes.end_stale(self._token)
        try:
            with self._lock:
                self._idle = [self._start() for _ in range(self._ahead)]
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the processes. May be called while others wait in `build`, which then raises InfrastructureError."""
        with self._lock:
            self._closed = True
            builders = list(self._all)
        for builder in builders:
            builder.end()

    def wait_ready(self) -> None:
        """Wait until those that are idle have started. Raises InfrastructureError when one has died instead."""
        for builder in list(self._idle):
            builder.wait_ready()

    def build(self, responses: Any, staged: Generator[Staged | None], times: StreamTimes) -> BuiltShard:
        """The shard of these responses, as a file that the caller deletes. Blocks.

        Args:
            responses: table of `schemas.RESPONSES`.
            staged: of `samples_of(responses)`; it is closed in any case.
            times: those of `staged`; the wait for a process to be ready is added.
        Effects:
            The stage's checks learn the norms.
        Raises:
            InfrastructureError: the process has died or could not go on; at which sample is said.
            Exception: what `staged` raises.
        """
        path = self._folder / f"built-{next(self._numbers):06d}.parquet"
        with contextlib.closing(staged):
            builder = self._take()
            try:
                with times.waiting():
                    builder.wait_ready()
                built = builder.build(Order(responses, self._checks.norms.known(), path), staged)
            except BaseException:
                # It may be in the middle of the shard; another is started in its place when there is need.
                builder.end()
                with self._lock:
                    self._all.discard(builder)
                for left in self._folder.glob(f"{path.name}*"):
                    left.unlink(missing_ok=True)
                raise
            with self._lock:
                self._idle.append(builder)
        self._checks.learn([built.extra])
        return built

    def _take(self) -> _Builder:
        with self._lock:
            while self._idle:
                builder = self._idle.pop()
                if builder.lives:
                    return builder
                self._all.discard(builder)
            return self._start()

    def _start(self) -> _Builder:
        if self._closed:
            raise InfrastructureError("the processes that build shards were ended")
        builder = _Builder(self._setup, self._token, self._log_path)
        self._all.add(builder)
        return builder


class _Builder:
    """One process and the pipes to it."""

    def __init__(self, setup: Setup, token: str, log_path: Path) -> None:
        self._log_path = log_path
        self._ready = False
        self._at = "before its first sample"
        self._process = GuardedProcess.start(
            [sys.executable, "-c", PROGRAM],
            token=token,
            log_path=log_path,
            withhold=withheld(),
            stdin_pipe=True,
            stdout_pipe=True,
            cwd=HOME,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._orders = Connection(os.dup(self._process.stdin.fileno()), readable=False)
        self._replies = Connection(os.dup(self._process.stdout.fileno()), writable=False)
        self._send(setup)

    @property
    def lives(self) -> bool:
        return self._process.poll() is None

    def wait_ready(self) -> None:
        """Raises InfrastructureError when it does not get that far."""
        while not self._ready:
            self._ready = self._receive() is Say.READY

    def build(self, order: Order, staged: Generator[Staged | None]) -> BuiltShard:
        names = (f"at sample {sample.sample_id}" for sample in samples_of(order.responses))
        self._send(order)
        while (said := self._receive()) is Say.NEXT:
            answer = next(staged, None)
            self._at = next(names, "after its last sample")
            self._send(answer)
        if isinstance(said, Failure):
            raise InfrastructureError(
                f"a process that builds shards failed {self._at}: {said.reason}; see {self._log_path}"
            )
        built: BuiltShard = said
        self._at = "before its first sample"
        return built

    def end(self) -> None:
        self._process.stop()

    def _send(self, message: Any) -> None:
        with contextlib.suppress(OSError):  # found dead by `_receive`
            self._orders.send_bytes(pickle.dumps(message))

    def _receive(self) -> Any:
        """What it says next; what it logs is logged. One that says nothing for `HANG_SECONDS` is ended."""
        try:
            while self._replies.poll(HANG_SECONDS):
                said = pickle.loads(self._replies.recv_bytes())
                if not isinstance(said, logging.LogRecord):
                    return said
                logging.getLogger(said.name).handle(said)
        except (EOFError, OSError, pickle.UnpicklingError):
            raise self._ended() from None
        self.end()
        raise self._failed(f"said nothing for {HANG_SECONDS:g} s and was ended")

    def _ended(self) -> InfrastructureError:
        try:
            code = self._process.wait(END_SECONDS)
        except TimeoutError:
            return self._failed("closed its output")
        why = " (killed for want of memory?)" if code == EXIT_KILLED else ""
        return self._failed(f"ended with code {code}{why}")

    def _failed(self, how: str) -> InfrastructureError:
        lines = "".join(f"\n    {line}" for line in log_tail(self._log_path, offset=self._process.log_offset))
        return InfrastructureError(
            f"a process that builds shards, {self._at}, {how}. The end of {self._log_path}:{lines}"
        )
