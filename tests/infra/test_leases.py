"""Who may take a lease, when, and how a holder learns that it has been replaced."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from infra import leases, storage
from infra.errors import StorageError
from infra.leases import DEFAULT_TIMING, Holding, Lease, Owner, Timing, Waiter, current, lease_uri

NEVER = Timing(renew_seconds=3600, takeover_seconds=60, poll_seconds=2)
# Forty renewals may be late in a row: a busy disk holds one up for half a second.
QUICK = Timing(renew_seconds=0.05, takeover_seconds=2.0, poll_seconds=0.05)
HOLDER = """
import sys, time
from infra.leases import Waiter, Timing
assert Waiter(sys.argv[1], "drafts-0", "run-1", Timing(renew_seconds=0.1)).try_take()
print("held", flush=True)
time.sleep(60)
"""


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def uri(tmp_path: Path) -> str:
    return lease_uri(str(tmp_path), "drafts-0")


@pytest.fixture(autouse=True)
def no_thread_stays() -> Iterator[None]:
    yield
    for thread in threading.enumerate():
        if thread.name.startswith("lease ") and "stays" not in thread.name:
            thread.join(10.0)  # one that was released ends soon, though not at once
            assert not thread.is_alive(), "a test must release its leases"


def waiter(uri: str, run: str = "", timing: Timing = NEVER, clock: Callable[[], float] = time.monotonic) -> Waiter:
    return Waiter(str(Path(uri).parents[1]), "drafts-0", run, timing, clock)


def take(uri: str, run: str = "", timing: Timing = NEVER) -> Lease:
    lease = waiter(uri, run, timing).try_take()
    assert lease is not None
    return lease


@contextlib.contextmanager
def taken(uri: str, run: str = "", timing: Timing = NEVER) -> Iterator[Lease]:
    lease = take(uri, run, timing)
    try:
        yield lease
    finally:
        lease.release()
        lease._thread.join()


def seize(uri: str, run: str = "other") -> Holding:
    """Another machine takes the lease, as it would after a long silence; between two renewals, not within one."""
    while True:
        body = storage.get(uri)
        found = Holding.from_bytes(body)
        assert found is not None
        away = replace(found.owner, host="elsewhere")
        theirs = replace(found, epoch=found.epoch + 1, holder="theirs", run=run, owner=away)
        if storage.compare_and_set(uri, theirs.to_bytes(), body):
            return theirs


def eventually(condition: Callable[[], bool], timeout_seconds: float = 5.0) -> bool:
    deadline = time.monotonic() + timeout_seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def test_each_taking_raises_the_epoch_and_a_release_lets_the_next_one_in(uri: str) -> None:
    with taken(uri) as lease:
        assert lease.epoch == 1
        assert waiter(uri).try_take() is None
    with taken(uri) as lease:
        assert lease.epoch == 2


def test_of_eight_that_try_at_once_one_holds_it(uri: str) -> None:
    won: list[Lease] = []
    barrier = threading.Barrier(8)

    def attempt() -> None:
        one = waiter(uri)
        barrier.wait()
        if (lease := one.try_take()) is not None:
            won.append(lease)

    threads = [threading.Thread(target=attempt) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1
    won[0].release()
    won[0]._thread.join()


@pytest.mark.seconds
def test_it_is_renewed_and_so_never_taken(uri: str) -> None:
    with taken(uri, timing=QUICK) as lease:
        other = waiter(uri, timing=QUICK)
        until = time.monotonic() + 2 * QUICK.takeover_seconds
        while time.monotonic() < until:
            assert other.try_take() is None
            time.sleep(QUICK.poll_seconds)
        assert not lease.lost
        found = current(uri)
        assert found is not None
        assert found.renewed > 3


def test_a_holder_that_stays_silent_is_replaced_by_the_waiters_own_clock(uri: str) -> None:
    theirs = Holding(4, replace(Owner.here(), host="elsewhere"), "run-1", "theirs")
    storage.put(uri, theirs.to_bytes())
    clock = Clock()
    one = waiter(uri, clock=clock)
    assert one.try_take() is None
    for _ in range(29):
        clock.now += 2
        assert one.try_take() is None
    storage.put(uri, replace(theirs, renewed=1).to_bytes())  # it lives: the watch begins anew
    for _ in range(30):
        clock.now += 2
        assert one.try_take() is None
    clock.now += 2
    lease = one.try_take()
    assert lease is not None
    assert lease.epoch == 5
    lease.release()
    lease._thread.join()


def test_time_in_which_nobody_could_look_does_not_count(uri: str) -> None:
    storage.put(uri, Holding(1, replace(Owner.here(), host="elsewhere"), "", "theirs").to_bytes())
    clock = Clock()
    one = waiter(uri, clock=clock)
    assert one.try_take() is None
    clock.now += 600  # the store was away, for the holder too
    assert one.try_take() is None


def test_a_dead_process_of_this_machine_is_replaced_at_once(uri: str) -> None:
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(Path(uri).parents[1])], stdout=subprocess.PIPE, text=True
    )
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        one = waiter(uri)
        assert one.try_take() is None
        os.kill(holder.pid, signal.SIGKILL)
        assert eventually(lambda: Owner.is_dead(current(uri).owner))
        lease = one.try_take()  # not reaped yet: a zombie is dead too
        assert lease is not None
        lease.release()
        lease._thread.join()
    finally:
        holder.kill()
        holder.wait()


@pytest.mark.parametrize("field", ["host", "boot_id", "pid_namespace"])
def test_of_a_process_elsewhere_nothing_is_known(field: str) -> None:
    gone = replace(Owner.here(), started=1)
    assert gone.is_dead()
    assert not replace(gone, **{field: "elsewhere"}).is_dead()
    assert not Owner.here().is_dead()


def test_a_replaced_holder_knows_at_its_next_renewal(uri: str) -> None:
    told = threading.Event()
    with taken(uri, timing=QUICK) as lease:
        lease.when_lost(told.set)
        theirs = seize(uri)
        assert told.wait(5)
        assert lease.lost
        assert lease.taken_by == theirs
    assert current(uri) == theirs, "a lost lease is not released"


def test_who_asks_late_is_told_too_and_once(uri: str) -> None:
    calls: list[int] = []
    with taken(uri) as lease:
        seize(uri)
        lease.renew()
        lease.when_lost(lambda: calls.append(1))
        lease.renew()
        lease._tell()  # the renewing thread, which saw it at the same moment
    assert calls == [1]


def test_a_store_that_is_away_is_waited_out(uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    swap, away = storage.compare_and_set, True

    def broken(*args: bytes) -> bool:
        if away:
            raise StorageError("gone")
        return swap(*args)

    with taken(uri) as lease:
        monkeypatch.setattr(storage, "compare_and_set", broken)
        lease.renew()
        assert not lease.lost
        away = False
        lease.renew()
        found = current(uri)
        assert found is not None
        assert found.renewed == 1


def test_ones_own_write_that_was_sent_twice_is_no_loss(uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    swap = storage.compare_and_set

    def twice(*args: bytes) -> bool:
        swap(*args)
        return swap(*args)

    with taken(uri) as lease:
        monkeypatch.setattr(storage, "compare_and_set", twice)
        lease.renew()
        assert not lease.lost
        lease.renew()
        assert current(uri).renewed == 2


@pytest.mark.parametrize("body", [None, b'{"epoch": 3', b'{"epoch": "x"}'])
def test_a_lease_that_was_removed_or_torn_is_put_back(uri: str, body: bytes | None) -> None:
    with taken(uri) as lease:
        storage.delete(uri) if body is None else storage.put(uri, body)
        lease.renew()
        lease.renew()
        assert not lease.lost
        assert current(uri).epoch == 1


def test_waiting_and_taking_over_are_told(uri: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "draftsmith.leases")
    storage.put(uri, Holding(1, replace(Owner.here(), host="node-7"), "run-1", "theirs").to_bytes())
    clock = Clock()
    one = waiter(uri, clock=clock)
    for _ in range(31):
        assert one.try_take() is None
        clock.now += 2 - 0.1
    clock.now += 10
    lease = one.try_take()
    assert lease is not None
    lease.release()
    lease._thread.join()
    first, last = caplog.messages
    assert "node-7 (flow run run-1)" in first
    assert "60 s" in first
    assert "has not renewed it" in last


def test_renewing_is_well_within_the_time_to_take_over() -> None:
    assert DEFAULT_TIMING.renew_seconds * 3 <= DEFAULT_TIMING.takeover_seconds
    assert leases.lease_name("drafts", "0f") == "drafts-0f"


def test_in_a_folder_and_on_s3_it_is_the_same(any_root: str) -> None:
    first = Waiter(any_root, "drafts-0", "run-1", NEVER).try_take()
    assert first is not None
    second = Waiter(any_root, "drafts-0", "run-2", NEVER)
    assert second.try_take() is None
    for _ in range(3):
        first.renew()
    found = current(first.uri)
    assert found is not None
    assert (found.renewed, found.run) == (3, "run-1")
    away = replace(found, epoch=2, holder="theirs", run="run-3")
    storage.put(first.uri, away.to_bytes())
    first.renew()
    assert first.taken_by == away
    first.release()
    storage.put(first.uri, replace(away, released=True).to_bytes())
    lease = second.try_take()
    assert lease is not None
    assert lease.epoch == 3
    lease.release()
    for one in (first, lease):
        one._thread.join()
