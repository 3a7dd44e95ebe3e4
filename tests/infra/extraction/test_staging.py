"""The staging's bound holds with many shards and streams, nobody starves, and nobody waits for ever."""

from __future__ import annotations

import os
import shutil
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

from infra.errors import InfrastructureError
from infra.extraction import staging as staging_module
from infra.extraction.staging import Staging
from tests.infra.extraction.test_engine import FILE, engine, sample


def opened(tmp_path: Path, limit_bytes: int | None = None, num_engines: int = 1) -> Staging:
    made = Staging("test", str(tmp_path), limit_bytes, num_engines)
    made.open()
    return made


def test_two_engines_of_two_streams_each_keep_to_the_bound(tmp_path: Path) -> None:
    shared = opened(tmp_path, 9 * FILE, num_engines=2)
    errors: list[str | None] = []
    most_bytes, ended = 0, threading.Event()

    def watch() -> None:
        nonlocal most_bytes
        while not ended.is_set():
            most_bytes = max(most_bytes, size_of(shared.folder))

    with ExitStack() as stack:
        engines = [
            stack.enter_context(engine(f"test-{uuid.uuid4().hex}", tmp_path, shared=shared)) for _ in range(2)
        ]

        def work(number: int) -> None:
            for shard in range(5):
                samples = [sample(f"s{shard}-{n}", 5 + 3 * n) for n in range(15)]
                errors.extend(result.error for result in engines[number % 2].stream(f"{shard:05d}", samples))

        threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        watcher = threading.Thread(target=watch)
        for thread in (watcher, *threads):
            thread.start()
        for thread in threads:
            thread.join(60)
        ended.set()
        watcher.join()
    assert errors == [None] * 4 * 5 * 15
    assert 0 < most_bytes <= shared.limit_bytes
    assert most_bytes <= shared.peak_bytes <= shared.limit_bytes
    assert shared.take(shared.limit_bytes, wait=False), "all was given back"
    shared.close()


def size_of(folder: Path) -> int:
    found = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                found += os.stat(os.path.join(parent, name)).st_size
            except FileNotFoundError:
                continue
    return found


def test_who_waits_comes_before_who_does_not(tmp_path: Path) -> None:
    shared = opened(tmp_path, 10)
    assert shared.take(6, wait=False)
    assert not shared.take(5, wait=False)
    order: list[int] = []

    def wait_for(size_bytes: int) -> None:
        shared.take(size_bytes, wait=True)
        order.append(size_bytes)

    first, second = (threading.Thread(target=wait_for, args=(size_bytes,)) for size_bytes in (9, 2))
    first.start()
    until(lambda: len(shared._waiting) == 1)
    second.start()
    until(lambda: len(shared._waiting) == 2)
    assert not shared.take(1, wait=False), "it would fit, but another one waits"
    assert order == []
    shared.give_back(6)
    first.join(10)
    assert order == [9]
    shared.give_back(9)
    second.join(10)
    assert order == [9, 2]
    assert shared.peak_bytes == 9


def until(reached: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not reached():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_by_default_eight_gib_or_half_of_a_smaller_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)
    for free, limit in ((2**40, 8 * 2**30), (2**30, 2**29)):
        monkeypatch.setattr(staging_module.shutil, "disk_usage", lambda path, free=free: usage._replace(free=free))
        assert opened(tmp_path).limit_bytes == limit
    assert opened(tmp_path, 2**31).limit_bytes == 2**31


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InfrastructureError, match=r"The staging folder .*file/.* cannot be used"):
        Staging("test", str(tmp_path / "file")).open()
