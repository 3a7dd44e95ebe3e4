"""Several servers asked as one: one window over all of them, and rows that outlive the server they were sent to.

Each server has a keeper: it starts the server (or waits for one that is there already), watches it, and begins
again when it is lost, while the others go on. A request goes to the server with the fewest in flight; one that was
in flight with a lost server goes to another, or waits for the next. Only when no server is left is the stage told.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from infra.errors import ServerError
from infra.generation.completion_client import ClientConfig, CompletionClient
from infra.generation.responses import Completion, RowFailure
from infra.serving.config import ServersConfig
from infra.serving.liveness import WatchedServer, watch
from infra.vllm_metrics import ServerProgress, parse_progress

logger = logging.getLogger("draftsmith.server_pool")

# A request that was in flight each time when so many servers were lost may be what kills them: it is not asked
# again. Not fewer: servers are lost for other causes too, with all that they had in flight.
MAX_SERVER_LOSSES = 3

Launch = Callable[[], AbstractAsyncContextManager[WatchedServer]]
"""Starts one server: a new context each time, up from entering it to leaving it. What it raises on entering gives
that server up (`ServerError`), or the whole pool (anything else: another server would fare no better)."""


@dataclass
class Replica:
    """One server's place in the pool; its number, from 1, stays through all its starts."""

    number: int
    launch: Launch
    server: WatchedServer | None = None
    client: CompletionClient | None = None
    given_up: ServerError | None = None

    @property
    def serving(self) -> bool:
        return self.client is not None and self.client.gone is None

    @property
    def in_flight(self) -> int:
        return self.client.in_flight if self.client is not None else 0


class ServerPool:
    """The servers of one stage, from entering this async context to leaving it. Does not wait for the first one:
    requests do.

    Args:
        launches: one for each server.
        config: of every client; its `concurrency` is that of all together.
        servers: when a server counts as lost, and how often it may be.
    """

    def __init__(self, launches: Sequence[Launch], config: ClientConfig, servers: ServersConfig) -> None:
        self.config = config
        self.window = asyncio.Semaphore(config.concurrency)
        """The slots of the requests in flight, over all servers."""
        self.turn = asyncio.Lock()
        """Held by the shard whose rows are taking slots, so that shards are finished in their order."""
        self.replicas = [Replica(number, launch) for number, launch in enumerate(launches, start=1)]
        self._servers = servers
        self._keepers: list[asyncio.Task[None]] = []
        self._fatal: Exception | None = None
        self._changed = asyncio.Event()

    async def __aenter__(self) -> Self:
        self._keepers = [asyncio.create_task(self._keep(replica)) for replica in self.replicas]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for keeper in self._keepers:
            keeper.cancel()
        await asyncio.gather(*self._keepers, return_exceptions=True)

    @property
    def in_flight(self) -> int:
        """Requests that a server has now, those that wait before another attempt included."""
        return sum(replica.in_flight for replica in self.replicas)

    async def progress(self) -> list[ServerProgress]:
        """Token counts and load of each server that is up and tells."""
        servers = [replica.server for replica in self.replicas if replica.server is not None]
        pages = await asyncio.gather(*(server.metrics_text() for server in servers), return_exceptions=True)
        return [parse_progress(page) for page in pages if isinstance(page, str)]

    async def complete_in_slot(
        self,
        messages: Sequence[Mapping[str, Any]],
        sampling: Mapping[str, Any],
        seed: int | None = None,
        *,
        label: str = "a request",
    ) -> Completion:
        """One completion from the least busy server, for a caller that holds a slot of `window`.

        Arguments and `RowFailure` as `CompletionClient.complete`.

        Raises:
            ServerError: no server is left.
        """
        for _ in range(MAX_SERVER_LOSSES):
            client = await self._least_busy()
            try:
                return await client.complete_in_slot(messages, sampling, seed, label=label)
            except ServerError:
                logger.debug("%s was in flight with a server that was lost; another one is asked.", label)
        reason = f"in flight when {MAX_SERVER_LOSSES} servers were lost"
        raise RowFailure(reason, temperature=float(sampling["temperature"]))

    async def _least_busy(self) -> CompletionClient:
        while True:
            if self._fatal is not None:
                raise self._fatal
            if all(replica.given_up is not None for replica in self.replicas):
                raise ServerError(f"No server is left. {self.replicas[-1].given_up}")
            serving = [replica.client for replica in self.replicas if replica.client and replica.serving]
            if serving:
                return min(serving, key=lambda client: client.in_flight)
            await self._changed.wait()

    def _tell(self) -> None:
        """Wakes whoever waits for a server."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def _keep(self, replica: Replica) -> None:
        """Starts a server again each time it is lost, until it is given up."""
        try:
            limit = self._servers.max_restarts
            for restart in range(1, limit + 1):
                problem = await self._serve(replica)
                logger.warning(
                    "Server %d is lost; its rows go to the others, and it is started again (%d of %d times): %s",
                    *(replica.number, restart, limit, problem),
                )
            problem = await self._serve(replica)
            raise ServerError(f"Server {replica.number} was lost {limit + 1} times, the last time: {problem}")
        except ServerError as error:
            replica.given_up = error
            left = sum(other.given_up is None for other in self.replicas)
            logger.error("Server %d is given up, %d are left: %s", replica.number, left, error)
        except Exception as error:
            self._fatal = error
        finally:
            self._tell()

    async def _serve(self, replica: Replica) -> str:
        """One life of a server. Returns why it is lost."""
        async with replica.launch() as server, CompletionClient.to(server, self.config) as client:
            replica.server, replica.client = server, client
            self._tell()
            try:
                return await watch(server, client, self._servers.hang_timeout_seconds)
            finally:
                replica.server = replica.client = None
