"""Several engines make one stage's shards: a queue that all take from, and engines that are started again.

Each engine takes the next shard as soon as it has room, so a slow or late one costs the others nothing. One that
dies costs its shards in flight: they go back to the front of the queue, and it is started again while the others go
on. Only when no engine is left is the stage told.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from collections.abc import AsyncIterable, Awaitable, Callable, Collection, Coroutine, Iterable
from contextlib import AbstractAsyncContextManager
from typing import Any, Generic, TypeVar

from infra.errors import ServerError, StageFailed
from infra.records import Shard

logger = logging.getLogger("draftsmith.extraction")

# An engine that dies so often in a row and commits nothing in between will not be mended by another start.
MAX_IDLE_LIVES = 3
# A shard that was in flight each time when engines died so often may be what kills them. Not fewer: engines die for
# other causes too, with whatever they have in flight.
MAX_LOSSES = 5

E = TypeVar("E")
Launch = Callable[[], AbstractAsyncContextManager[E]]
"""Starts one engine: a new context each time, up from entering it to leaving it. What it raises on entering gives
that engine up (`ServerError`), or ends the stage (anything else: another engine would fare no better)."""
Make = Callable[[E, Shard], Awaitable[None]]
"""Makes and commits one shard. A ServerError says that the engine is lost; anything else ends the stage."""


class ShardQueue:
    """The shards that are still to be made. For one event loop.

    Args:
        shards: all of them, or what gives one after another; the next is asked for when none is waiting.
        first_alone: hold back all others until the first one is made, which is to be measured.
    """

    def __init__(self, shards: Iterable[Shard] | AsyncIterable[Shard], *, first_alone: bool = False) -> None:
        self._source = shards if isinstance(shards, AsyncIterable) else None
        self._waiting = deque(() if isinstance(shards, AsyncIterable) else shards)
        self._in_flight = 0
        self._first_alone = first_alone
        self._losses: Counter[str] = Counter()
        self._changed = asyncio.Event()

    @property
    def all_made(self) -> bool:
        return not self._waiting and not self._in_flight and self._source is None

    async def fill(self) -> None:
        """Ask for shards until there are no more; runs beside those who take them."""
        if self._source is None:
            return
        async for shard in self._source:
            self._waiting.append(shard)
            self._tell()
            while self._waiting:
                await self.changed()
        self._source = None
        self._tell()

    def take(self) -> Shard | None:
        """The next shard; None where there is none now, though one may come back (`changed`)."""
        if not self._waiting or (self._first_alone and self._in_flight):
            return None
        self._in_flight += 1
        shard = self._waiting.popleft()
        if self._source is not None:
            self._tell()
        return shard

    def made(self) -> None:
        """One of those taken is committed."""
        self._in_flight -= 1
        self._first_alone = False
        self._tell()

    def give_back(self, shard: Shard, error: ServerError) -> None:
        """A shard whose engine has died is the next one to be taken.

        Raises:
            StageFailed: too many engines have died with it.
        """
        self._losses[shard.shard] += 1
        if self._losses[shard.shard] == MAX_LOSSES:
            raise StageFailed(
                f"shard {shard.shard} was in flight {MAX_LOSSES} times when an engine died, and may be what kills "
                f"them. {error}"
            ) from error
        self._in_flight -= 1
        self._waiting.appendleft(shard)
        self._tell()

    def changed(self) -> Coroutine[Any, Any, bool]:
        """Waits until a shard comes, is made or comes back, counted from this call, whenever it is awaited."""
        return self._changed.wait()

    def _tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


class EnginePool(Generic[E]):
    """The engines of one stage.

    Args:
        launches: one for each engine; its number, from 0, stays through all its lives.
        make: what is done with a shard.
        shards_per_engine: how many one engine is to have at a time, asked anew whenever one is made.
    """

    def __init__(
        self,
        launches: Iterable[Launch[E]],
        make: Make[E],
        queue: ShardQueue,
        shards_per_engine: Callable[[], int] = lambda: 2,
    ) -> None:
        self._launches = list(launches)
        self._make = make
        self._queue = queue
        self._shards_per_engine = shards_per_engine
        self._num_left = len(self._launches)

    async def make_all(self) -> None:
        """Make every shard of the queue. All engines start at once, so that they read a large model together.

        Raises:
            ServerError: no engine is left.
            Exception: the first other error of `make`, of a launch or of the queue. Every engine has ended then.
        """
        if self._queue.all_made:
            return
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._queue.fill())
                keepers = [group.create_task(self._keep(number)) for number in range(len(self._launches))]
                while not self._queue.all_made:
                    await self._queue.changed()
                for keeper in keepers:  # which wait for another shard, or are still loading
                    keeper.cancel()
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None

    async def _keep(self, number: int) -> None:
        """Starts an engine again each time it dies, until it is given up."""
        num_idle_lives = 0
        while True:
            num_made = 0
            try:
                async with self._launches[number]() as engine:
                    num_made, problem = await self._live(engine)
            except ServerError as error:
                return self._give_up(number, error)
            num_idle_lives = 0 if num_made else num_idle_lives + 1
            if num_idle_lives == MAX_IDLE_LIVES:
                return self._give_up(number, problem)
            logger.warning(
                "Extraction engine %d is lost after %d shards; those in flight go back to the queue, and it is "
                "started again: %s",
                *(number, num_made, problem),
            )

    def _give_up(self, number: int, error: ServerError) -> None:
        """Raises ServerError when this was the last engine."""
        self._num_left -= 1
        if not self._num_left:
            raise ServerError(f"No extraction engine is left. {error}") from error
        logger.error("Extraction engine %d is given up, %d are left: %s", number, self._num_left, error)

    async def _live(self, engine: E) -> tuple[int, ServerError]:
        """One life of an engine: the number of shards that it made, and why it is lost."""
        running: dict[asyncio.Task[None], Shard] = {}
        num_made, lost = 0, None
        try:
            while running or lost is None:
                while lost is None and len(running) < self._shards_per_engine() and (shard := self._queue.take()):
                    running[asyncio.create_task(_call(self._make, engine, shard))] = shard
                for task in await self._next_done(running):
                    shard, error = running.pop(task), task.exception()
                    if error is None:
                        num_made += 1
                        self._queue.made()
                    elif isinstance(error, ServerError):
                        lost = error  # the others end by themselves; what they can still commit shall not be lost
                        self._queue.give_back(shard, error)
                    else:
                        raise error
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
        return num_made, lost

    async def _next_done(self, running: Collection[asyncio.Task[None]]) -> list[asyncio.Task[None]]:
        """Waits until something has ended or the queue has changed; those that have ended."""
        changed = asyncio.create_task(self._queue.changed())
        try:
            await asyncio.wait({*running, changed}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            changed.cancel()
        return [task for task in running if task.done()]


async def _call(make: Make[E], engine: E, shard: Shard) -> None:
    await make(engine, shard)
