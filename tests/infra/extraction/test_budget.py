"""Bytes and hours of a stage, from its measured shards; what is refused, and what the manifest says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from infra import storage
from infra.errors import StageFailed
from infra.extraction.budget import Budget, Measured, readable, shards_at_a_time, stage_totals
from infra.extraction.config import ExtractConfig
from infra.fingerprint import stage_content
from infra.manifest import ShardRecord, StageRef

STAGE = StageRef("/data/root", "hidden_states", stage_content("hidden_states", 1, {}, {}, {}))
INPUTS = {
    f"responses/{number:05d}": ShardRecord(f"{number:05d}", "x", "0", size_bytes, 4, {"ok": 4}, {})
    for number, size_bytes in enumerate((100, 300, 600))
}


def record(number: int, **extra: Any) -> ShardRecord:
    known = {"num_tokens": 1000, "extract_seconds": 2.0, "encode_seconds": 0.5}
    known["state_bytes"] = {"raw": 8_000_000, "stored": 4_000_000}
    name = f"{number:05d}"
    inputs = {f"responses/{name}": "sha"}
    return ShardRecord(name, f"{name}-x", "0", 4_100_000, 4, {"ok": 4}, inputs, known | extra)


def failed(count: int) -> dict[str, Any]:
    return {"count": count, "samples": ["a"]}


def budget(room_bytes: int | None, **config: Any) -> Budget:
    measured = Measured.of([record(0)], INPUTS)
    assert measured is not None
    left = [INPUTS["responses/00001"], INPUTS["responses/00002"]]
    return Budget.of(measured, left, ExtractConfig(encoding="bf16_split", **config), room_bytes)


def test_what_is_left_follows_from_the_size_of_the_responses() -> None:
    found = budget(10**12)
    assert (found.tokens_left, found.bytes_per_token, found.tokens_per_second) == (9000, 4100.0, 500.0)
    assert str(found) == (
        "9,000 of 10,000 tokens left, 4,100 bytes each as bf16_split: 36.9 MB of 41 MB; 500 tokens/s: 1 min; "
        "1.0 TB are free"
    )
    found.require_room(STAGE)


def test_more_engines_are_so_much_faster_until_encoding_is_slower(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: range(4))
    assert budget(None, engines=4).tokens_per_second == 2000
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: range(1))
    assert budget(None, engines=8).tokens_per_second == 2000, "0.5 s of one core each"
    assert " with 8 engines: " in str(budget(None, engines=8))


@pytest.mark.parametrize(
    ("said", "encode_seconds", "cores", "engines", "limit_bytes", "free_bytes", "wanted"),
    [
        (5, 0.5, 1, 1, 1, 1, 5),  # as the config says
        (None, 0.5, 16, 1, 10**12, 10**12, 4),
        (None, 9.0, 16, 1, 10**12, 10**12, 12),  # twice: five are built while the engine computes one
        (None, 9.0, 2, 1, 10**12, 10**12, 2),
        (None, 90.0, 16, 2, 10**12, 10**12, 8),  # all cores
        (None, 90.0, 16, 1, 3 * 4_100_000, 10**12, 3),  # as the staging holds
        (None, 90.0, 16, 1, 1, 10**12, 2),
        (None, 90.0, 16, 1, 10**12, 4 * (256 * 2**20 + 5 * 500 * 8000), 4),  # as the memory holds
        (None, 90.0, 16, 1, 10**12, 1, 2),
    ],
)
def test_an_engine_has_as_many_shards_as_keep_it_busy(
    monkeypatch: pytest.MonkeyPatch,
    said: int | None,
    encode_seconds: float,
    cores: int,
    engines: int,
    limit_bytes: int,
    free_bytes: int,
    wanted: int,
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: range(cores))
    monkeypatch.setattr("infra.extraction.budget.free_memory_bytes", lambda: free_bytes)
    config = ExtractConfig(shards_per_engine=said, engines=engines)
    slow = [record(number, encode_seconds=1000.0) for number in range(5)]  # the first ones of a run
    recent = [record(number, encode_seconds=encode_seconds, longest_tokens=500) for number in range(8)]
    assert shards_at_a_time(config, slow + recent, limit_bytes) == wanted
    assert shards_at_a_time(config, [], limit_bytes) == (said or 2)


def test_a_root_without_room_is_refused_in_one_line_and_an_unknown_one_is_not() -> None:
    with pytest.raises(
        StageFailed, match=r"/data/root cannot hold what is left: 9,000 of .* 36 MB are free"
    ) as caught:
        budget(36_000_000).require_room(STAGE)
    assert "\n" not in str(caught.value)
    unknown = budget(None)
    unknown.require_room(STAGE)
    assert "how much the root can hold is not known" in str(unknown)


def test_records_that_tell_nothing_are_not_measured() -> None:
    before = ShardRecord("00000", "x", "0", 1, 4, {"ok": 4}, {"responses/00000": "sha"}, {"num_tokens": 7})
    assert Measured.of([before, record(1, num_tokens=0)], INPUTS) is None
    assert Measured.of([before, record(1)], INPUTS) == Measured.of([record(1)], INPUTS)


def test_the_manifest_sums_over_the_shards() -> None:
    judged = {"positions": 32, "top1": 0.5, "expected_top1": 0.5, "mean_logprob": -1.0}
    judged |= {"expected_logprob": -1.0, "variance": 1.0}
    records = [
        record(0, failed_checks={"norms": failed(1)}, on_policy=judged),
        record(1, failed_checks={"norms": failed(2), "ids": failed(1)}, on_policy=judged | {"top1": 1.0}),
    ]
    found = stage_totals(records, INPUTS, "bf16_split", [2, 30], 77)["extraction"]
    assert found["on_policy"]["positions"] == 64
    assert found["on_policy"]["top1"] == 0.75
    del found["on_policy"]
    assert found == {
        "layer_ids": [2, 30],
        "encoding": "bf16_split",
        "num_tokens": 2000,
        "raw_bytes": 16_000_000,
        "stored_bytes": 8_000_000,
        "peak_staging_bytes": 77,
        "failed_checks": {"ids": failed(1), "norms": {"count": 3, "samples": ["a", "a"]}},
        "tokens_per_second": 500.0,
        "encode_mb_per_s": 16.0,
    }


def test_the_room_of_a_root(tmp_path: Path) -> None:
    free_bytes = storage.free_bytes(str(tmp_path / "not" / "yet" / "there"))
    assert free_bytes is not None
    assert free_bytes > 0
    assert storage.free_bytes("s3://bucket/prefix") is None


@pytest.mark.parametrize(
    ("size_bytes", "said"), [(0, "0 B"), (999, "999 B"), (1500, "1.5 KB"), (41e6, "41 MB"), (3.4e12, "3.4 TB")]
)
def test_readable(size_bytes: float, said: str) -> None:
    assert readable(size_bytes) == said
