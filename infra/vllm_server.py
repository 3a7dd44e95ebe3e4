"""A vLLM server of our own: its command line, its start, and its end.

vLLM lives in an environment of its own (its pins and Prefect's exclude each other), so it is only ever spoken to as
a process and over HTTP, on the loopback interface, with an API key that is made anew for each start.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx

from infra.errors import InputError, ServerError
from infra.processes import GuardedProcess, end_stale, log_tail
from infra.redaction import learn_secret, withheld
from infra.serving.client import server_client
from infra.serving.load_progress import LoadReport, refusal
from infra.vllm_config import VllmConfig, engine_environment, engine_flags, server_flags, vllm_version
from infra.vllm_metrics import ServerProgress, SpeculationCounters, parse_counters, parse_progress

__all__ = [
    "ServerProgress",
    "SpeculationCounters",
    "VllmConfig",
    "VllmServer",
    "engine_environment",
    "engine_flags",
    "parse_counters",
    "parse_progress",
    "vllm_version",
]

HOST = "127.0.0.1"
API_KEY_VARIABLE = "VLLM_API_KEY"  # read by vLLM itself: a key on the command line would show in the process list
EXIT_USAGE = 2  # of argparse: a flag is unknown or its value wrong, which no retry mends
POLL_SECONDS = 0.5
REQUEST_TIMEOUT_SECONDS = 30.0

logger = logging.getLogger("draftsmith.vllm_server")


class VllmServer:
    """An OpenAI-compatible vLLM server, up from entering this async context to leaving it. For one use.

    Args:
        model_path: local folder of the model (or its hub id).
        served_name: what clients call the model; holds no local path.
        log_path: file that the server's output is appended to.
        token: name of this piece of work (`process_token`); what an earlier run of it left behind is ended first.
        speculative_config: vLLM's `--speculative-config`; None serves the model alone.
        trust_remote_code: let vLLM run code that comes with the model.

    Raises, on entering:
        InputError: vLLM's interpreter is not there, or vLLM does not know a flag.
        ServerError: the server ended while starting, or was not ready in time; the message holds its last errors.
    """

    def __init__(
        self,
        config: VllmConfig,
        *,
        model_path: str | Path,
        served_name: str,
        log_path: str | Path,
        token: str,
        speculative_config: Mapping[str, Any] | None = None,
        trust_remote_code: bool = False,
    ) -> None:
        self.served_name = served_name
        self.log_path = Path(log_path)
        self.api_key = secrets.token_urlsafe(24)
        learn_secret(self.api_key, "the API key")
        self.base_url = ""  # http://127.0.0.1:PORT/v1, once started
        # The command line without host and port, which differ from start to start.
        self.flags = [
            *server_flags(config, model_path=model_path, trust_remote_code=trust_remote_code),
            *("--served-model-name", served_name, "--disable-uvicorn-access-log"),
        ]
        if speculative_config is not None:
            self.flags += ["--speculative-config", json.dumps(speculative_config, sort_keys=True)]
        self._config = config
        self._token = token
        self._environment = engine_environment(config, model_path=model_path)
        self._process: GuardedProcess | None = None
        self._client = server_client(self.api_key, REQUEST_TIMEOUT_SECONDS)

    async def __aenter__(self) -> Self:
        interpreter = self._config.interpreter()
        if stale := await asyncio.to_thread(end_stale, self._token):
            logger.warning("Ended processes %s, which an earlier run had left behind.", stale)
        try:
            try:
                await self._start(interpreter, hold_port=True)
            except _PortTakenError as error:
                logger.warning("%s Starting it once more, on another port.", error)
                await self._stop()
                await self._start(interpreter, hold_port=False)
        except BaseException:
            await self.__aexit__(None, None, None)
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            await self._stop()
        finally:
            await self._client.aclose()

    def alive(self) -> bool:
        """Whether the server's process runs; not whether its engine gets on (see `progress`)."""
        return self._process is not None and self._process.poll() is None

    async def metrics_text(self) -> str:
        """The /metrics page.

        Raises:
            ServerError: the server did not answer.
        """
        try:
            response = await self._client.get(f"{self._root}/metrics")
            response.raise_for_status()
        except httpx.HTTPError as error:
            raise self.failure(f"does not give its metrics ({error!r})") from error
        return response.text

    async def counters(self) -> SpeculationCounters:
        """Counters of speculative decoding since the start."""
        return parse_counters(await self.metrics_text())

    async def progress(self) -> ServerProgress:
        """Token counts and load, by which to tell a server that works from one that hangs."""
        return parse_progress(await self.metrics_text())

    def failure(self, problem: str) -> ServerError:
        """An error about this server, with the last errors of its log."""
        lines = "".join(f"\n    {line}" for line in self._log_tail())
        return ServerError(f"The vLLM server of {self.served_name} {problem}. The end of {self.log_path}:{lines}")

    def _log_tail(self) -> list[str]:
        offset = self._process.log_offset if self._process else 0
        return log_tail(self.log_path, offset=offset) or ["(nothing)"]

    @property
    def _root(self) -> str:
        return self.base_url.removesuffix("/v1")

    async def _start(self, interpreter: Path, *, hold_port: bool) -> None:
        with socket.socket() as holder:
            # Bound but not listening: nobody is given this port until vLLM, which like us sets SO_REUSEADDR,
            # binds it some seconds from now.
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            holder.bind((HOST, 0))
            port = int(holder.getsockname()[1])
            if not hold_port:
                holder.close()
            self.base_url = f"http://{HOST}:{port}/v1"
            command = [str(interpreter), "-m", "vllm.entrypoints.openai.api_server"]
            command += ["--host", HOST, "--port", str(port), *self.flags]
            logger.info("Starting vLLM for %s; its log is %s.", self.served_name, self.log_path)
            self._process = GuardedProcess.start(
                command,
                token=self._token,
                log_path=self.log_path,
                env={**self._environment, API_KEY_VARIABLE: self.api_key},
                withhold=withheld(),
            )
            await self._wait_until_ready(self._process)

    async def _wait_until_ready(self, process: GuardedProcess) -> None:
        started = time.monotonic()
        limit_seconds = self._config.startup_timeout_seconds
        loading = LoadReport(self.log_path, process.log_offset)
        while True:
            code = process.poll()
            if code == EXIT_USAGE:
                raise InputError("vllm", f"vLLM refuses its flags: {self._log_tail()[-1]}")
            if code is not None:
                if refused := refusal(loading.log_text()):
                    raise InputError(
                        "vllm", f"vLLM refuses its configuration: {refused} The log is {self.log_path}"
                    )
                error = self.failure(f"ended with code {code} while starting")
                taken = "address already in use" in str(error).lower()
                raise _PortTakenError(str(error)) if taken else error
            if await self._answers():
                break
            waited_seconds = time.monotonic() - started
            if waited_seconds > limit_seconds:
                raise self.failure(f"was not ready after {limit_seconds:.0f} s (vllm.startup_timeout_seconds)")
            if (news := loading.news()) is not None:
                logger.info(
                    "%s is starting, %.0f s of at most %.0f s: %s",
                    *(self.log_path.stem, waited_seconds, limit_seconds, news),
                )
            await asyncio.sleep(POLL_SECONDS)
        logger.info(
            "vLLM serves %s at %s after %.0f s.", self.served_name, self.base_url, time.monotonic() - started
        )

    async def _answers(self) -> bool:
        """Whether the server is up, and is ours: it knows our key and our model."""
        try:
            health = await self._client.get(f"{self._root}/health")
            models = await self._client.get(f"{self.base_url}/models")
        except httpx.HTTPError:
            return False
        return (
            health.status_code == 200
            and models.status_code == 200
            and self.served_name in [model["id"] for model in models.json()["data"]]
        )

    async def _stop(self) -> None:
        if self._process is not None:
            # The thread goes on to the end even when this task is cancelled once more.
            await asyncio.shield(asyncio.to_thread(self._process.stop))


class _PortTakenError(ServerError):
    """Another process took the port before the server could."""
