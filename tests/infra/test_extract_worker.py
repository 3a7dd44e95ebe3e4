"""What the extraction worker does by itself; with vLLM it is tested in tests/e2e and tests/gpu."""

from __future__ import annotations

import json
import os
import queue
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from infra.extract_worker import _answer, _Request


class Answered:
    """`_answer` in a thread, as the worker has it, and what it replies."""

    def __init__(self) -> None:
        self.finished: queue.SimpleQueue[_Request | None] = queue.SimpleQueue()
        read_end, write_end = os.pipe()
        self._replies = os.fdopen(read_end)
        self._thread = threading.Thread(
            target=_answer, args=(os.fdopen(write_end, "w"), self.finished), daemon=True
        )
        self._thread.start()

    def next(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self._replies.readline())
        return found

    def end(self) -> None:
        self.finished.put(None)
        self._thread.join(10)
        assert not self._thread.is_alive()


@pytest.fixture
def answered() -> Iterator[Answered]:
    answered = Answered()
    yield answered
    answered.end()


def request(number: int, *paths: Path) -> _Request:
    now = time.monotonic()
    results = [{"sample_id": path.name, "path": str(path)} for path in paths]
    return _Request(number, f"{number:05d}", now, results, num_tokens=7, deadline=now + 60)


def test_a_request_is_answered_as_its_last_file_comes_whatever_others_wait_for(
    answered: Answered, tmp_path: Path
) -> None:
    late, first, second = (tmp_path / name for name in ("late", "first", "second"))
    answered.finished.put(request(1, late))
    answered.finished.put(request(2, first, second))
    second.touch()
    first.touch()
    reply = answered.next()
    assert (reply["request"], reply["shard"], reply["num_tokens"]) == (2, "00002", 7)
    assert [sample["path"] for sample in reply["samples"]] == [str(first), str(second)]
    late.touch()
    assert answered.next()["request"] == 1


def test_what_could_not_be_written_is_an_error_of_its_sample(answered: Answered, tmp_path: Path) -> None:
    there, lost = tmp_path / "there", tmp_path / "lost"
    there.touch()
    (tmp_path / "lost.error").write_text("OSError: no space left")
    answered.finished.put(request(1, there, lost))
    assert answered.next()["samples"] == [
        {"sample_id": "there", "path": str(there)},
        {"sample_id": "lost", "error": "the hidden states could not be written: OSError: no space left"},
    ]


def test_what_does_not_come_is_given_up(answered: Answered, tmp_path: Path) -> None:
    missing = request(1, tmp_path / "missing")
    missing.deadline = time.monotonic()
    answered.finished.put(missing)
    (sample,) = answered.next()["samples"]
    assert sample["error"].startswith("the hidden states were not written within")
