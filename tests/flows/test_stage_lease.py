"""A stage's flow that loses its lease: to another run it gives way, to another copy of itself it leaves silently."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from flows import lease as flow_lease
from flows.lease import holding
from infra import leases, storage
from infra.errors import LeaseLost
from infra.fingerprint import stage_content
from infra.leases import Holding, Lease, Timing, current, lease_name, lease_uri
from infra.manifest import StageRef

QUICK = Timing(renew_seconds=0.05, takeover_seconds=5, poll_seconds=0.05)

COPY = """
import asyncio, sys
from flows import lease
from infra.fingerprint import stage_content
from infra.leases import Timing
from infra.manifest import StageRef
lease._root_run_id = lambda: "the run"
async def main():
    stage = StageRef(sys.argv[1], "vocab", stage_content("vocab", 1, {}, {}, {}))
    async with lease.holding(stage, Timing(0.05, 5, 0.05)):
        print("held", flush=True)
        await asyncio.sleep(60)
asyncio.run(main())
"""


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StageRef:
    monkeypatch.setattr(flow_lease, "_root_run_id", lambda: "the run")
    return StageRef(str(tmp_path), "vocab", stage_content("vocab", 1, {}, {}, {}))


def uri(stage: StageRef) -> str:
    return lease_uri(stage.root, lease_name(stage.stage, stage.key))


def seize(stage: StageRef, run: str) -> None:
    """Another node takes the lease, between two renewals and not within one."""
    while True:
        body = storage.get(uri(stage))
        found = Holding.from_bytes(body)
        assert found is not None
        away = replace(found.owner, host="node-7")
        theirs = replace(found, epoch=found.epoch + 1, holder="theirs", run=run, owner=away)
        if storage.compare_and_set(uri(stage), theirs.to_bytes(), body):
            return


async def test_it_is_held_inside_and_released_outside(stage: StageRef) -> None:
    async with holding(stage, QUICK) as lease:
        found = current(uri(stage))
        assert found is not None
        assert (found.run, found.epoch, found.released) == ("the run", lease.epoch, False)
    assert current(uri(stage)).released
    with pytest.raises(ZeroDivisionError):
        async with holding(stage, QUICK):
            raise ZeroDivisionError
    assert current(uri(stage)).released


async def test_lost_to_another_run_the_work_is_cancelled_and_the_error_says_to_whom(stage: StageRef) -> None:
    cancelled = False

    async def body() -> None:
        nonlocal cancelled
        async with holding(stage, QUICK):
            seize(stage, "another run")
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                cancelled = True
                raise

    with pytest.raises(LeaseLost, match=r"node-7 \(flow run another run\)"):
        await asyncio.wait_for(body(), 30)
    assert cancelled
    assert not current(uri(stage)).released
    await asyncio.sleep(0.2)  # and nothing is cancelled later


async def test_lost_by_what_the_trainer_says_is_the_same(stage: StageRef) -> None:
    async def body() -> None:
        async with holding(stage, replace(QUICK, renew_seconds=3600)):
            seize(stage, "another run")
            raise LeaseLost("the trainer says so")

    with pytest.raises(LeaseLost, match="another run"):
        await body()


async def test_a_cancellation_from_outside_stays_one(stage: StageRef) -> None:
    inside = asyncio.Event()

    async def body() -> None:
        async with holding(stage, QUICK):
            inside.set()
            await asyncio.sleep(60)

    task = asyncio.create_task(body())
    await asyncio.wait_for(inside.wait(), 30)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert current(uri(stage)).released


async def test_cancelled_while_it_is_lost_it_is_cancelled(stage: StageRef) -> None:
    inside = asyncio.Event()

    async def body() -> None:
        async with holding(stage, replace(QUICK, renew_seconds=3600)):
            seize(stage, "another run")
            inside.set()
            await asyncio.sleep(60)

    task = asyncio.create_task(body())
    await asyncio.wait_for(inside.wait(), 30)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_the_next_one_waits_and_may_be_cancelled_while_it_does(stage: StageRef) -> None:
    async def second() -> int:
        async with holding(stage, QUICK) as lease:
            return lease.epoch

    async with holding(stage, QUICK):
        waiting = asyncio.create_task(second())
        impatient = asyncio.create_task(second())
        await asyncio.sleep(0.3)
        assert not waiting.done()
        impatient.cancel()
        with pytest.raises(asyncio.CancelledError):
            await impatient
    assert await asyncio.wait_for(waiting, 30) == 2


async def test_cancelled_in_the_middle_of_taking_it_is_given_back(
    stage: StageRef, monkeypatch: pytest.MonkeyPatch
) -> None:
    try_take = leases.Waiter.try_take
    taking, go_on = threading.Event(), threading.Event()

    def slowly(waiter: leases.Waiter) -> Lease | None:
        taking.set()
        assert go_on.wait(30)
        return try_take(waiter)

    monkeypatch.setattr(leases.Waiter, "try_take", slowly)

    async def body() -> None:
        async with holding(stage, QUICK):
            raise AssertionError("it was cancelled before")

    task = asyncio.create_task(body())
    assert await asyncio.to_thread(taking.wait, 30)
    task.cancel()
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    for _ in range(500):
        if (found := current(uri(stage))) is not None and found.released:
            return
        await asyncio.sleep(0.02)
    raise AssertionError("the lease stayed taken")


@pytest.mark.seconds
def test_a_superseded_copy_of_the_same_run_leaves_without_a_word_to_prefect(stage: StageRef) -> None:
    copy = subprocess.Popen(
        [sys.executable, "-c", COPY, stage.root], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert copy.stdout is not None
        assert copy.stdout.readline() == "held\n"
        body = json.loads(storage.get(uri(stage)))
        body = {**body, "epoch": 2, "holder": "theirs", "owner": {**body["owner"], "host": "node-7"}}
        while True:
            now = storage.get(uri(stage))
            if storage.compare_and_set(uri(stage), json.dumps(body).encode(), now):
                break
        _, err = copy.communicate(timeout=30)
        assert copy.returncode == 0
        assert "thought dead" in err
        assert "Traceback" not in err
    finally:
        copy.kill()
        copy.wait()
