"""The process of the extraction worker: its start, its JSON lines, and its end."""

from __future__ import annotations

import json
import logging
import queue
import threading
import time
from pathlib import Path
from typing import IO, Any

from infra import processes
from infra.errors import InputError, ServerError
from infra.extract_worker import refusal_of
from infra.processes import GuardedProcess, log_tail
from infra.redaction import withheld
from infra.vllm_config import VllmConfig, engine_environment, engine_flags, vllm_version

CHECK_SECONDS = 1.0
EXIT_WAIT_SECONDS = 30.0

logger = logging.getLogger("draftsmith.extraction")


def check_vllm(vllm: VllmConfig) -> None:
    """Raise InputError where vLLM is not there, or is of a version that extraction is not tested with."""
    if refusal := refusal_of(vllm_version(vllm), str(vllm.interpreter())):
        raise InputError("vllm.python", refusal)


class ExtractProcess:
    """Runs `infra/extract_worker.py` under a guard and speaks its protocol. For one start; stop from any thread.

    Args:
        model_path: the verifier's folder.
        log_path: file that the worker's output is appended to.
        token: name of this piece of work (`process_token`).
        worker: the program, run with vLLM's interpreter.
    """

    def __init__(
        self,
        vllm: VllmConfig,
        model_path: Path,
        *,
        log_path: str | Path,
        token: str,
        trust_remote_code: bool,
        worker: Path,
    ) -> None:
        self._vllm = vllm
        self._log_path = Path(log_path)
        self._token = token
        self._worker = worker
        self._flags = engine_flags(vllm, model_path=model_path, trust_remote_code=trust_remote_code)
        self._environment = engine_environment(vllm, model_path=model_path)
        self._process: GuardedProcess | None = None
        self._stopped = False
        # Threads stand between the pipes and the callers, so that no caller ever waits without a limit.
        self._to_worker: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._from_worker: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()

    def end_stale(self) -> None:
        """End the processes that an earlier run of this piece of work left behind."""
        if stale := processes.end_stale(self._token):
            logger.warning("Ended processes %s, which an earlier run had left behind.", stale)

    def start(self, layer_ids: list[int]) -> None:
        """Start the worker and wait until it has loaded the verifier.

        Raises:
            InputError: vLLM is not there, or is of a version that extraction is not tested with.
            ServerError: the worker ended while loading, or was not ready in time.
        """
        interpreter = self._vllm.interpreter()
        started = time.monotonic()
        logger.info("Loading the verifier for extraction; the engine's log is %s.", self._log_path)
        process = GuardedProcess.start(
            [str(interpreter), str(self._worker)],
            token=self._token,
            log_path=self._log_path,
            env=self._environment,
            withhold=withheld(),
            stdin_pipe=True,
            stdout_pipe=True,
        )
        self._process = process
        if self._stopped:
            process.stop()
            raise ServerError("The extraction engine was stopped before it was started.")
        assert process.stdin is not None
        assert process.stdout is not None
        for pump, pipe, lines in (
            (_write_lines, process.stdin, self._to_worker),
            (_read_lines, process.stdout, self._from_worker),
        ):
            threading.Thread(target=pump, args=(pipe, lines), name="draftsmith-extract", daemon=True).start()
        self.send({"engine_flags": self._flags, "layer_ids": layer_ids})
        reply = self.receive(self._vllm.startup_timeout_seconds)
        if "refused" in reply:
            raise InputError("vllm.python", str(reply["refused"]))
        logger.info(
            "The extraction engine (vLLM %s) is ready after %.0f s.", reply.get("ready"), time.monotonic() - started
        )

    def send(self, message: dict[str, Any]) -> None:
        """Queue one line for the worker; returns at once."""
        self._to_worker.put(json.dumps(message).encode() + b"\n")

    def receive(self, timeout_seconds: float) -> dict[str, Any]:
        """The worker's next line.

        Raises:
            ServerError: the worker has ended, or does not answer in time and is ended here.
        """
        process = self._process
        assert process is not None, "not started"
        deadline = time.monotonic() + timeout_seconds
        while True:
            try:
                line = self._from_worker.get(timeout=CHECK_SECONDS)
            except queue.Empty:
                # A killed guard may leave the pipe open in the hands of vLLM's own processes.
                if process.poll() is not None and self._from_worker.empty():
                    raise self._ended(process) from None
                if time.monotonic() > deadline:
                    error = self._failure(f"did not answer within {timeout_seconds:.0f} s and was ended")
                    process.stop()
                    raise error from None
                continue
            if line is None:
                self._from_worker.put(None)  # for whoever asks again
                raise self._ended(process)
            try:
                return dict(json.loads(line))
            except ValueError:
                raise self._failure(f"wrote a line that is no reply: {line[:200]!r}") from None

    def stop(self) -> None:
        """End the worker and all that it started. Callable again, and while another thread starts or receives."""
        self._stopped = True
        self._to_worker.put(None)
        if self._process is not None:
            self._process.stop()

    def _ended(self, process: GuardedProcess) -> ServerError:
        try:
            code = process.wait(EXIT_WAIT_SECONDS)
        except TimeoutError:
            process.stop()
            return self._failure("closed its output and was ended")
        return self._failure(f"ended with code {code}")

    def _failure(self, problem: str) -> ServerError:
        """An error about the worker, with the last errors of its log."""
        offset = self._process.log_offset if self._process else 0
        lines = "".join(f"\n    {line}" for line in log_tail(self._log_path, offset=offset))
        return ServerError(f"The extraction engine {problem}. The end of {self._log_path}:{lines}")


def _write_lines(pipe: IO[bytes], lines: queue.SimpleQueue[bytes | None]) -> None:
    while (line := lines.get()) is not None:
        try:
            pipe.write(line)
            pipe.flush()
        except (OSError, ValueError):  # the worker has ended, or its pipe was closed here: the reader tells
            return


def _read_lines(pipe: IO[bytes], lines: queue.SimpleQueue[bytes | None]) -> None:
    try:
        for line in pipe:
            lines.put(line)
    except (OSError, ValueError):
        pass  # closed here, by stop()
    lines.put(None)
