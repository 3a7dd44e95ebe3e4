"""Objects are whole or absent, and of two writers one wins."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from infra import storage
from infra.errors import InputError, StorageError


def test_put_get_list_delete(tmp_path: Path) -> None:
    root = str(tmp_path)
    storage.put(storage.join(root, "a/b.json"), b"one")
    storage.put(storage.join(root, "a/b.json"), b"two")
    assert storage.get(storage.join(root, "a/b.json")) == b"two"
    assert storage.list_sizes(root) == {"a/b.json": 3}
    storage.delete(storage.join(root, "a/b.json"))
    storage.delete(storage.join(root, "a/b.json"))
    assert not storage.exists(storage.join(root, "a/b.json"))
    with pytest.raises(FileNotFoundError):
        storage.get(storage.join(root, "a/b.json"))


def test_create_only_keeps_the_first_and_knows_its_own(tmp_path: Path) -> None:
    uri = storage.join(str(tmp_path), "record.json")
    assert storage.create(uri, b"first")
    assert storage.create(uri, b"first"), "the same bytes are one's own earlier write"
    assert not storage.create(uri, b"second")
    assert storage.get(uri) == b"first"


def test_eight_racing_writers_have_one_winner(tmp_path: Path) -> None:
    uri = storage.join(str(tmp_path), "record.json")
    won: list[int] = []
    barrier = threading.Barrier(8)

    def write(number: int) -> None:
        barrier.wait()
        if storage.create(uri, f"writer {number}".encode()):
            won.append(number)

    threads = [threading.Thread(target=write, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1
    assert storage.get(uri) == f"writer {won[0]}".encode()


def test_a_failed_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError("disk gone")

    monkeypatch.setattr("infra.storage_local.os.fsync", fail)
    with pytest.raises(StorageError, match="disk gone"):
        storage.put(storage.join(str(tmp_path), "a.bin"), b"data")
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_protocol_is_refused_by_name() -> None:
    with pytest.raises(InputError, match="root"):
        storage.get("gopher://x/y")
