"""Nodes share a stage's shards: blocks that one at a time holds, and that others take when it has died or gone."""

from __future__ import annotations

import asyncio
import os
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flows import nodes
from flows.nodes import Feed
from flows.stage import StageWork
from infra import manifest, storage
from infra.claims import Claims
from infra.fingerprint import stage_content
from infra.leases import Owner, Timing, current, lease_uri
from infra.manifest import Shard, StageRef

PLAN = [Shard(f"{number:05d}") for number in range(7)]
CALM = Timing(renew_seconds=3600, takeover_seconds=60, poll_seconds=2)


@pytest.fixture
def stage(tmp_path: Path) -> StageRef:
    found = StageRef(str(tmp_path), "responses", stage_content("responses", 1, {}, {}, {}))
    manifest.write_plan(found, PLAN)
    return found


@pytest.fixture(autouse=True)
def every_block_is_given_up() -> Iterator[None]:
    yield
    held = [thread for thread in threading.enumerate() if thread.name.startswith("lease ")]
    for thread in held:
        thread.join(10.0)  # one that was released ends soon, though not at once
    assert not [thread.name for thread in held if thread.is_alive()]


def commit(stage: StageRef, shard: Shard) -> None:
    manifest.commit_shard(stage, shard, shard.shard.encode(), rows=1, status_counts={"ok": 1}, inputs={})


def names(shards: list[Shard]) -> list[str]:
    return [shard.shard[-1] for shard in shards]


def test_two_nodes_never_hold_one_block(stage: StageRef) -> None:
    one, two = (Claims(stage, PLAN, 3, run, CALM) for run in ("one", "two"))
    assert [names(node.take()[0]) for node in (one, two, one, two)] == [list("012"), list("345"), ["6"], []]
    for shard in PLAN[:3]:
        commit(stage, shard)
        one.made(shard)
    taken, state = two.take()
    assert taken == []
    assert list(state.records) == ["00000", "00001", "00002"]
    commit(stage, PLAN[3])
    two.release()  # as on a failure, after one shard of its block
    assert names(one.take()[0]) == list("45")
    one.release()


def test_a_block_whose_holder_has_died_is_free(stage: StageRef) -> None:
    one, two = (Claims(stage, PLAN, 7, run, CALM) for run in ("one", "two"))
    assert one.take()[0] == PLAN
    assert two.take()[0] == []
    child = subprocess.Popen(["true"])
    child.wait()
    uri = lease_uri(stage.root, f"responses-{stage.key}-00000-7")
    held = current(uri)
    assert held is not None
    assert held.owner == Owner.here()
    storage.put(uri, replace(held, owner=replace(held.owner, pid=child.pid, started=1)).to_bytes())
    assert two.take()[0] == PLAN
    one.release()
    assert Claims(stage, PLAN, 7, "three", CALM).take()[0] == [], "the late release of the old holder frees nothing"
    two.release()


# --- the feed ---


def work_on(stage: StageRef, count: int, *, partition: str = "") -> StageWork:
    config: Any = SimpleNamespace(nodes=SimpleNamespace(count=count))
    return StageWork(config, {}, stage, manifest.inspect(stage), 1, partition)


async def everything(feed: Feed, stage: StageRef) -> list[str]:
    made = []
    async for shard in feed:
        await asyncio.sleep(0.001)
        commit(stage, shard)
        await feed.made(shard)
        made.append(shard)
    return names(made)


async def test_alone_it_gives_what_is_missing_and_takes_no_lease(stage: StageRef) -> None:
    commit(stage, PLAN[2])
    async with Feed(work_on(stage, 1), 2) as feed:
        assert await feed.begin()
        assert await everything(feed, stage) == list("013456")
    assert not os.path.exists(os.path.join(stage.root, "leases"))


async def test_the_first_run_waits_for_the_others_and_a_partition_run_does_not(
    stage: StageRef, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nodes, "LOOK_SECONDS", 0.01)
    seen: list[int] = []
    slow = Claims(stage, PLAN, 2, "slow", CALM)
    assert names(slow.take()[0]) == list("01")
    async with (
        Feed(work_on(stage, 3), 2, lambda state: seen.append(len(state.records))) as first,
        Feed(work_on(stage, 3, partition="two"), 2) as helper,
    ):
        assert await first.begin()
        assert await helper.begin()
        whole = asyncio.create_task(everything(first, stage))
        helped = await asyncio.wait_for(everything(helper, stage), 10)
        await asyncio.sleep(0.05)
        assert not whole.done(), "two shards are still being made elsewhere"
        commit(stage, PLAN[0])
        slow.release()  # its node has given up after one of them
        assert sorted(await asyncio.wait_for(whole, 10) + helped) == list("123456")
    assert not manifest.inspect(stage).missing
    assert seen == sorted(seen)
    assert seen[-1] == len(PLAN)
    async with Feed(work_on(stage, 3, partition="two"), 2) as late:
        assert not await late.begin(), "a node without work need not load a model"
