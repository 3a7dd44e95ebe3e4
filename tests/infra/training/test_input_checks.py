"""A hidden_states stage that does not fit is refused in one line, by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from infra import manifest
from infra.errors import DamagedShard, InputError, StageFailed
from infra.fingerprint import stage_content
from infra.hidden_states import HiddenRow, HiddenStatesMeta, encode
from infra.manifest import Shard, StageRef
from infra.training.input_checks import check_hidden_states
from tests.fakes.training_run import HIDDEN_SIZE, LAYER_IDS, random_rows, write_stage

META = HiddenStatesMeta(LAYER_IDS, HIDDEN_SIZE, "revision")
FITTING: dict[str, Any] = {"verifier_revision": "revision", "hidden_size": HIDDEN_SIZE, "layer_ids": LAYER_IDS}


def test_what_fits_is_told(tmp_path: Path) -> None:
    stage = write_stage(str(tmp_path), [random_rows(2), random_rows(2)], META)
    assert check_hidden_states(stage, **FITTING) == META


@pytest.mark.parametrize(
    ("wanted", "said"),
    [
        ({"verifier_revision": "another"}, "extracted from verifier revision, but the draft is for another"),
        ({"hidden_size": 64}, "states of width 32, but the verifier's are 64 wide"),
        ({"layer_ids": (1, 3, 6)}, r"layers \[1, 2, 4, 6\], but the draft is to read \[1, 3\]"),
    ],
)
def test_a_stage_of_another_kind_is_refused(tmp_path: Path, wanted: dict[str, Any], said: str) -> None:
    stage = write_stage(str(tmp_path), [random_rows(2)], META)
    with pytest.raises(InputError, match=said) as caught:
        check_hidden_states(stage, **{**FITTING, **wanted})
    assert "\n" not in str(caught.value)


def test_shards_that_were_not_made_alike_are_refused(tmp_path: Path) -> None:
    stage = StageRef(str(tmp_path), "hidden_states", stage_content("hidden_states", 1, {}, {}, {}))
    shards = manifest.write_plan(stage, [Shard("00000"), Shard("00001")])
    for shard, revision in zip(shards, ("revision", "another"), strict=True):
        data = encode(random_rows(2), HiddenStatesMeta(LAYER_IDS, HIDDEN_SIZE, revision))
        manifest.commit_shard(stage, shard, data, rows=2, status_counts={"ok": 2}, inputs={})
    manifest.finish(stage, {})
    with pytest.raises(InputError, match="00001 has verifier_revision another where it is revision in 00000"):
        check_hidden_states(stage.uri, **FITTING)


def test_an_empty_stage_is_refused(tmp_path: Path) -> None:
    failed = HiddenRow("failed", "failed", "no answer", [], [], None)
    stage = StageRef(str(tmp_path), "hidden_states", stage_content("hidden_states", 1, {}, {}, {}))
    (shard,) = manifest.write_plan(stage, [Shard("00000")])
    manifest.commit_shard(stage, shard, encode([failed], META), rows=1, status_counts={"failed": 1}, inputs={})
    manifest.finish(stage, {})
    with pytest.raises(InputError, match="no sample that could be trained on"):
        check_hidden_states(stage.uri, **FITTING)


def test_an_unfinished_stage_and_a_torn_shard_are_told_apart(tmp_path: Path) -> None:
    with pytest.raises(StageFailed, match="manifest"):
        check_hidden_states(str(tmp_path / "nothing"), **FITTING)
    stage = write_stage(str(tmp_path), [random_rows(2)], META)
    (data,) = Path(stage, "shards").glob("*.parquet")
    data.write_bytes(data.read_bytes()[:-20])
    with pytest.raises(DamagedShard):
        check_hidden_states(stage, **FITTING)
