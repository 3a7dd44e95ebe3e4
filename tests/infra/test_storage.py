"""Objects are whole or absent, and of two writers one wins: in a folder and on a real S3 server alike."""

from __future__ import annotations

import errno
import hashlib
import os
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from infra import storage
from infra.errors import InputError, StorageError
from infra.stores import s3 as storage_s3

NUM_WRITERS = 8
SMALLEST_PART_BYTES = 5 * 2**20  # of S3


@pytest.fixture
def large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that goes in three parts, the last one shorter."""
    monkeypatch.setattr(storage_s3, "PART_BYTES", SMALLEST_PART_BYTES)
    monkeypatch.setattr(storage_s3, "ONE_REQUEST_BYTES", SMALLEST_PART_BYTES)
    path = tmp_path / "large.bin"
    path.write_bytes(random.Random(7).randbytes(2 * SMALLEST_PART_BYTES + 12345))
    return path


def race(write: Callable[[int], bool]) -> list[int]:
    """Numbers of those of `NUM_WRITERS` simultaneous writers that won."""
    won: list[int] = []
    barrier = threading.Barrier(NUM_WRITERS)

    def one(number: int) -> None:
        barrier.wait()
        if write(number):
            won.append(number)

    threads = [threading.Thread(target=one, args=(number,)) for number in range(NUM_WRITERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return won


def test_put_get_list_delete(any_root: str) -> None:
    uri = storage.join(any_root, "a/b.json")
    assert storage.list_sizes(any_root) == {}
    storage.put(uri, b"one")
    storage.put(uri, b"two!")
    assert storage.get(uri) == b"two!"
    assert storage.size(uri) == 4
    assert storage.exists(uri)
    assert storage.list_sizes(any_root) == {"a/b.json": 4}
    assert storage.list_sizes(storage.join(any_root, "a")) == {"b.json": 4}
    storage.delete(uri)
    storage.delete(uri)
    assert not storage.exists(uri)
    assert storage.list_sizes(any_root) == {}
    for read in (storage.get, storage.size, storage.sha256, lambda uri: storage.get_range(uri, 0, 1)):
        with pytest.raises(FileNotFoundError):
            read(uri)


def test_empty_objects_are_objects(any_root: str, tmp_path: Path) -> None:
    uri = storage.join(any_root, "empty")
    storage.put(uri, b"")
    storage.get_file(uri, tmp_path / "empty")
    assert storage.get(uri) == (tmp_path / "empty").read_bytes() == b""
    assert storage.sha256(uri) == hashlib.sha256(b"").hexdigest()
    assert not storage.create(uri, b"something")


def test_a_listing_says_when_and_has_no_neighbours(any_root: str) -> None:
    began = time.time()
    storage.put(storage.join(any_root, "stage/one"), b"1")
    storage.put(storage.join(any_root, "stage-other/two"), b"2")
    storage.put(storage.join(any_root, "stage/.hidden"), b"3")
    listed = storage.list_objects(storage.join(any_root, "stage"))
    assert list(listed) == ["one"]
    assert began - 2 < listed["one"].modified_at < time.time() + 2  # S3 gives whole seconds


def test_a_listing_has_more_than_one_page(any_root: str) -> None:
    names = [f"{index:04d}" for index in range(1203)]
    threads = [
        threading.Thread(
            target=lambda part: [storage.put(storage.join(any_root, name), b"x") for name in part],
            args=(names[start::8],),
        )
        for start in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(storage.list_sizes(any_root)) == names
    assert len(storage.get_many(storage.join(any_root, name) for name in [*names, "absent"])) == len(names)


def test_create_only_keeps_the_first_and_knows_its_own(any_root: str) -> None:
    uri = storage.join(any_root, "record.json")
    assert storage.create(uri, b"first")
    assert storage.create(uri, b"first"), "the same bytes are one's own earlier write"
    assert not storage.create(uri, b"second")
    assert storage.get(uri) == b"first"


def test_compare_and_set_asks_for_what_was_read(any_root: str) -> None:
    uri = storage.join(any_root, "lease.json")
    assert not storage.compare_and_set(uri, b"1", b"0"), "there is none"
    assert storage.compare_and_set(uri, b"1", None)
    assert not storage.compare_and_set(uri, b"2", None)
    assert storage.compare_and_set(uri, b"2", b"1")
    assert not storage.compare_and_set(uri, b"3", b"1")
    assert storage.compare_and_set(uri, b"2", b"1"), "what it already holds is one's own earlier write"
    assert storage.get(uri) == b"2"


@pytest.mark.parametrize("round_number", range(3))
def test_racing_creators_have_one_winner(any_root: str, round_number: int) -> None:
    uri = storage.join(any_root, "record.json")
    won = race(lambda number: storage.create(uri, f"writer {number}".encode()))
    assert len(won) == 1
    assert storage.get(uri) == f"writer {won[0]}".encode()


@pytest.mark.parametrize("round_number", range(3))
def test_racing_compare_and_set_has_one_winner(any_root: str, round_number: int) -> None:
    uri = storage.join(any_root, "lease.json")
    storage.put(uri, b"before")
    won = race(lambda number: storage.compare_and_set(uri, f"writer {number}".encode(), b"before"))
    assert len(won) == 1
    assert storage.get(uri) == f"writer {won[0]}".encode()


def test_no_increment_is_lost(any_root: str) -> None:
    uri = storage.join(any_root, "counter")
    storage.put(uri, b"0 by nobody")

    def add_one(number: int) -> bool:
        while True:
            found = storage.get(uri)
            count = int(found.split()[0]) + 1
            if storage.compare_and_set(uri, f"{count} by {number}".encode(), found):
                return True

    assert len(race(add_one)) == NUM_WRITERS
    assert storage.get(uri).split()[0] == str(NUM_WRITERS).encode()


def test_files_go_up_and_down(any_root: str, large: Path, tmp_path: Path) -> None:
    uri = storage.join(any_root, "shards/large.bin")
    with pytest.raises(FileNotFoundError):
        storage.get_file(uri, tmp_path / "back.bin")
    storage.put_file(uri, large)
    storage.get_file(uri, tmp_path / "back.bin")
    assert (tmp_path / "back.bin").read_bytes() == large.read_bytes() == storage.get(uri)
    assert storage.sha256(uri) == hashlib.sha256(large.read_bytes()).hexdigest() == storage.sha256(str(large))
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_file()) == ["back.bin", "large.bin"]


def test_a_large_file_is_created_only_once(any_root: str, large: Path, tmp_path: Path) -> None:
    uri = storage.join(any_root, "large.bin")
    other = tmp_path / "other.bin"
    other.write_bytes(large.read_bytes()[:-1] + b"!")
    assert storage.create_file(uri, large)
    assert storage.create_file(uri, large), "the same bytes are one's own earlier write"
    assert not storage.create_file(uri, other)
    assert not storage.create(uri, other.read_bytes())
    assert storage.sha256(uri) == storage.sha256(str(large))


def test_racing_creators_of_a_large_object_have_one_winner(
    any_root: str, large: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage_s3, "ONE_REQUEST_BYTES", 2**30)  # as a shard is written
    uri = storage.join(any_root, "large.bin")
    body = large.read_bytes()
    won = race(lambda number: storage.create(uri, body + bytes([number])))
    assert len(won) == 1
    assert storage.get(uri)[-1] == won[0]


def test_a_root_that_works_is_left_as_it_was(any_root: str) -> None:
    storage.put(storage.join(any_root, "there"), b"1")
    storage.check_root(any_root)
    assert storage.list_sizes(any_root) == {"there": 1}


# --- folders ---


@pytest.mark.parametrize(
    ("number", "expected"), [(errno.ENOSPC, StorageError), (errno.EIO, StorageError), (errno.EROFS, InputError)]
)
def test_a_failed_write_leaves_nothing_and_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, expected: type[Exception]
) -> None:
    def fail(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("infra.stores.local.os.fsync", fail)
    with pytest.raises(expected, match=rf"a\.bin cannot be written: {os.strerror(number)}"):
        storage.put(storage.join(str(tmp_path), "a.bin"), b"data")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_a_file_is_wrong_input(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    for root in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(InputError, match=r"^root: .*file"):
            storage.check_root(str(root))


def test_a_store_without_create_only_writes_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def overwrite(uri: str, data: bytes) -> bool:
        storage.put(uri, data)
        return True

    monkeypatch.setattr(storage, "create", overwrite)
    with pytest.raises(InputError, match="create-only"):
        storage.check_root(str(tmp_path))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("uri", ["gopher://x/y", "s3://", "s3://bucket", "s3:///key"])
def test_what_is_no_address_is_refused_by_name(uri: str) -> None:
    with pytest.raises(InputError, match="root"):
        storage.get(uri)


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="no /proc here")
def test_a_folder_where_none_can_be_made_is_wrong_input() -> None:
    with pytest.raises(InputError, match=r"^root: /proc/draftsmith cannot be made"):
        storage.check_root("/proc/draftsmith")


def test_a_range_of_an_object(any_root: str) -> None:
    uri = storage.join(any_root, "data")
    storage.put(uri, bytes(range(100)))
    assert storage.get_range(uri, 0, 1) == b"\0"
    assert storage.get_range(uri, 90, 10) == bytes(range(90, 100))
    for start, length in ((95, 10), (100, 1)):
        with pytest.raises(ValueError, match="ends"):
            storage.get_range(uri, start, length)
