"""Engines share the shards, die, are started again and given up, and nothing of them is left."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Callable
from functools import partial

import pytest

from infra.errors import InputError, ServerError, StageFailed, StorageError
from infra.extraction.pool import MAX_IDLE_LIVES, MAX_LOSSES, EnginePool, ShardQueue
from infra.records import Shard

SHARDS = [Shard(f"{number:05d}") for number in range(12)]


class Node:
    """Engines that count: `work` decides what becomes of a shard, `load` of a start."""

    def __init__(self, num_engines: int = 2, *, first_alone: bool = False) -> None:
        self.queue = ShardQueue(SHARDS, first_alone=first_alone)
        self.pool: EnginePool[int] = EnginePool(
            [partial(self.launch, number) for number in range(num_engines)], self.make, self.queue
        )
        self.starts: Counter[int] = Counter()
        self.running: Counter[int] = Counter()
        self.most_together: Counter[int] = Counter()
        self.up: set[int] = set()
        self.made: list[tuple[int, str]] = []
        self.work: Callable[[int, str], None] = lambda engine, shard: None
        self.load: Callable[[int], None] = lambda engine: None
        self.pace_seconds = {0: 0.002, 1: 0.002}

    @contextlib.asynccontextmanager
    async def launch(self, number: int) -> AsyncIterator[int]:
        self.starts[number] += 1
        await asyncio.sleep(0.001)
        self.load(number)
        self.up.add(number)
        try:
            yield number
        finally:
            self.up.discard(number)

    async def make(self, engine: int, shard: Shard) -> None:
        self.running[engine] += 1
        self.most_together[engine] = max(self.most_together[engine], self.running[engine])
        try:
            await asyncio.sleep(self.pace_seconds[engine])
            self.work(engine, shard.shard)
            self.made.append((engine, shard.shard))
        finally:
            self.running[engine] -= 1

    async def run(self) -> None:
        try:
            await asyncio.wait_for(self.pool.make_all(), 10)
        finally:
            assert self.up == set(), "an engine was left behind"
            assert self.running.total() == 0

    def each_once(self) -> bool:
        return sorted(shard for _, shard in self.made) == [shard.shard for shard in SHARDS]


async def test_a_quick_engine_takes_more_than_a_slow_one() -> None:
    node = Node()
    node.pace_seconds[1] = 0.5
    await node.run()
    assert node.each_once()
    share = Counter(engine for engine, _ in node.made)
    assert share[0] >= 8
    assert share[1] >= 1
    assert node.most_together == {0: 2, 1: 2}


async def test_an_engine_has_as_many_at_a_time_when_they_come_one_after_another() -> None:
    async def feed() -> AsyncIterator[Shard]:
        for shard in SHARDS:
            yield shard

    node = Node(num_engines=1)
    queue = ShardQueue(feed())
    pool = EnginePool([partial(node.launch, 0)], node.make, queue, shards_per_engine=lambda: 5)
    await asyncio.wait_for(pool.make_all(), 10)
    assert [shard for _, shard in node.made] == [shard.shard for shard in SHARDS]
    assert node.most_together == {0: 5}


async def test_the_first_shard_may_be_made_alone() -> None:
    node = Node(first_alone=True)

    def alone(engine: int, shard: str) -> None:
        assert node.made or node.running.total() == 1

    node.work = alone
    await node.run()
    assert node.each_once()
    assert node.made[0][1] == "00000"


async def test_a_dead_engine_costs_its_shards_in_flight_and_starts_again_while_others_go_on() -> None:
    node = Node()
    deaths = iter([True])

    def dies_once(engine: int, shard: str) -> None:
        if engine == 1 and next(deaths, False):
            raise ServerError("killed")

    node.work = dies_once
    await node.run()
    assert node.each_once()
    assert node.starts == {0: 1, 1: 2}


async def test_deaths_between_commits_do_not_count() -> None:
    node = Node(num_engines=1)
    tried: Counter[str] = Counter()

    def dies_first(engine: int, shard: str) -> None:
        tried[shard] += 1
        if tried[shard] == 1 and int(shard) % 2:
            raise ServerError("killed")

    node.work = dies_first
    await node.run()
    assert node.each_once()
    assert node.starts[0] == 1 + len(SHARDS) // 2 > MAX_IDLE_LIVES


async def test_an_engine_that_only_dies_is_given_up_and_the_last_one_ends_the_stage() -> None:
    node = Node()

    def one_dies(engine: int, shard: str) -> None:
        if engine == 1:
            raise ServerError("out of memory")

    node.work = one_dies
    await node.run()
    assert node.each_once()
    assert node.starts[1] <= MAX_IDLE_LIVES

    node = Node(num_engines=1)

    def dies(engine: int, shard: str) -> None:
        raise ServerError("out of memory")

    node.work = dies
    with pytest.raises(ServerError, match=r"No extraction engine is left\. out of memory"):
        await node.run()
    assert node.starts == {0: MAX_IDLE_LIVES}


async def test_an_engine_that_does_not_start_is_given_up() -> None:
    node = Node()

    def does_not_load(engine: int) -> None:
        if engine == 0:
            raise ServerError("no such GPU")

    node.load = does_not_load
    await node.run()
    assert node.each_once()
    assert node.starts == {0: 1, 1: 1}


async def test_a_shard_that_kills_engines_is_named() -> None:
    node = Node()

    def poisoned(engine: int, shard: str) -> None:
        if shard == "00011":
            raise ServerError("CUDA error")

    node.work = poisoned
    with pytest.raises(StageFailed, match=rf"shard 00011 was in flight {MAX_LOSSES} times .* CUDA error"):
        await node.run()
    assert len(node.made) == len(SHARDS) - 1


@pytest.mark.parametrize("error", [StageFailed("no"), InputError("a.b", "no"), StorageError("full")])
async def test_any_other_error_ends_the_stage_at_once(error: Exception) -> None:
    node = Node()

    def fails(engine: int, shard: str) -> None:
        if shard == "00003":
            raise error

    node.work = fails
    with pytest.raises(type(error)):
        await node.run()
    assert len(node.made) < 8


async def test_a_sibling_of_a_lost_shard_may_still_commit() -> None:
    node = Node(num_engines=1)

    def first_dies(engine: int, shard: str) -> None:
        if shard == "00000" and not node.made:
            node.pace_seconds[0] = 0.001
            raise ServerError("killed")

    node.work = first_dies
    await node.run()
    assert node.each_once(), "what it had committed was made again"


async def test_cancelled_it_leaves_nothing() -> None:
    node = Node()
    node.pace_seconds = {0: 60.0, 1: 60.0}
    running = asyncio.create_task(node.pool.make_all())
    while node.running.total() < 4:  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert node.up == set()
    assert node.running.total() == 0


async def test_engines_that_still_load_do_not_hold_up_the_end() -> None:
    node = Node()
    slow = asyncio.Event()

    @contextlib.asynccontextmanager
    async def never_ready() -> AsyncIterator[int]:
        try:
            await slow.wait()
            yield 1
        finally:
            slow.set()

    node.pool = EnginePool([partial(node.launch, 0), never_ready], node.make, node.queue)
    await node.run()
    assert node.each_once()
    assert slow.is_set(), "its start was ended"
