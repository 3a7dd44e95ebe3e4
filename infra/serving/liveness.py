"""Whether a server gets on with its work, told by its token counters: `/health` says 200 for a hung engine too.

(vllm#39863, vllm#36451.) A server that has requests while no token moves is lost. So is one engine of several that
does so, even while the others work.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Protocol

from infra.errors import ServerError
from infra.generation.completion_client import CompletionClient, Served
from infra.vllm_metrics import EngineWork, parse_engines

MAX_LOOK_SECONDS = 5.0
LOOKS_PER_TIMEOUT = 20
METRICS_TIMEOUT_SECONDS = 15.0

_WHOLE = "the server"


class WatchedServer(Served, Protocol):
    """What the watch must know of a server."""

    def alive(self) -> bool:
        """Whether its process runs, as far as we can tell."""

    def failure(self, problem: str) -> ServerError:
        """An error about it."""

    async def metrics_text(self) -> str:
        """Its /metrics page; raises ServerError where it does not come."""


class StallWatch:
    """Compares one look at a server's counters with those before. Knows no clock and no network."""

    def __init__(self, timeout_seconds: float) -> None:
        self._timeout_seconds = timeout_seconds
        self._moved: dict[str, tuple[int, float]] = {}  # tokens, and when that number was new or nothing was to do

    def problem(self, engines: Mapping[str, EngineWork], *, silent_seconds: float, now: float) -> str | None:
        """What is wrong with the server, if anything.

        Args:
            engines: its counters by engine; nothing where it did not give them this time. A server that never
                gave any is not judged: its requests' own time limits tell.
            silent_seconds: how long it has had requests of ours and answered none; 0 without any.
            now: seconds of any clock that only goes forward.
        """
        for name, engine in engines.items():
            self._note(f"engine {name}", engine.num_tokens, engine.num_requests_running > 0, now)
        if engines:
            tokens = sum(engine.num_tokens for engine in engines.values())
            self._note(_WHOLE, tokens, silent_seconds > 0, now)
        for name, (_, since) in self._moved.items():
            still_seconds = now - since
            if name == _WHOLE or not engines:  # an unread page says nothing of a single engine
                still_seconds = min(still_seconds, silent_seconds)
            if still_seconds >= self._timeout_seconds:
                return f"{name} has requests, and no token has moved for {still_seconds:.0f} s (a hang)"
        return None

    def _note(self, name: str, tokens: int, busy: bool, now: float) -> None:
        if not busy or name not in self._moved or self._moved[name][0] != tokens:
            self._moved[name] = tokens, now


async def watch(server: WatchedServer, client: CompletionClient, hang_timeout_seconds: float) -> str:
    """Looks at a server until it is lost, and returns why.

    Effects: declares it gone to its client, so that every request in flight ends at once.
    """
    stall = StallWatch(hang_timeout_seconds)
    look_seconds = min(MAX_LOOK_SECONDS, hang_timeout_seconds / LOOKS_PER_TIMEOUT)
    while not await client.gone_within(look_seconds):
        if not await asyncio.to_thread(server.alive):  # it may have to sweep up after a killed guard
            client.declare_gone(str(server.failure("has ended")))
            continue
        engines = await _engines(server, timeout_seconds=min(METRICS_TIMEOUT_SECONDS, hang_timeout_seconds / 2))
        problem = stall.problem(engines, silent_seconds=client.silent_seconds, now=time.monotonic())
        if problem is not None:
            client.declare_gone(problem)
    return client.gone or ""


async def _engines(server: WatchedServer, timeout_seconds: float) -> dict[str, EngineWork]:
    try:
        async with asyncio.timeout(timeout_seconds):
            return parse_engines(await server.metrics_text())
    except (ServerError, TimeoutError):
        return {}
