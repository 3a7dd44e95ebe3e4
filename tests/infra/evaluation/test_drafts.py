"""Which speculators are measured beside the new one, what they are called, and that they are what was asked for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from infra import manifest
from infra.errors import InputError
from infra.evaluation.config import EvaluateConfig
from infra.evaluation.drafts import draft_revisions, fetch_draft, new_draft, other_drafts, rival_notes
from infra.fingerprint import stage_content
from infra.manifest import Shard, StageRef

NEW, OLD = "0" * 16, "0123456789abcdef"


def drafts(references: list[str], rival: str | None = None, root: str = "/store") -> Any:
    return other_drafts(EvaluateConfig(drafts=tuple(references)), root, NEW, rival)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "their-draft"
    made.mkdir()
    (made / "config.json").write_text("{}")
    (made / "model.safetensors").write_bytes(b"weights")
    return made


def test_the_promoted_one_and_others_are_told_apart_by_their_labels() -> None:
    assert new_draft("/store", NEW).label == "eagle3"
    promoted, other = drafts(["promoted", OLD], rival="f" * 16)
    assert (promoted.label, promoted.key) == ("eagle3 promoted", "f" * 16)
    assert (other.label, other.key) == ("eagle3 01234567", OLD)
    assert other.uri == f"/store/drafts/{OLD}/export"
    assert other.portable == f"drafts/{OLD}/export"
    assert draft_revisions([other]) == {"draft/eagle3 01234567": OLD}


def test_none_is_measured_twice_nor_the_new_one_against_itself() -> None:
    assert [draft.label for draft in drafts(["promoted", OLD], rival=OLD)] == ["eagle3 promoted"]
    assert drafts([NEW]) == []
    assert drafts([]) == []


def test_without_a_promoted_one_the_report_says_so() -> None:
    config = EvaluateConfig(drafts=("promoted",))
    assert other_drafts(config, "/store", NEW, None) == []
    assert [note.kind for note in rival_notes(config, None)] == ["no_promoted"]
    assert rival_notes(config, OLD) == rival_notes(EvaluateConfig(), None) == []


def test_a_folder_is_known_by_its_content_and_never_by_its_path(folder: Path, tmp_path: Path) -> None:
    (draft,) = drafts([str(folder)])
    assert draft.label == "eagle3 their-draft"
    assert str(tmp_path) not in draft.portable + draft.key
    moved = folder.rename(tmp_path / "elsewhere")
    assert drafts([str(moved)])[0].key == draft.key
    (moved / "model.safetensors").write_bytes(b"other weights")
    assert drafts([str(moved)])[0].key != draft.key


def test_two_folders_of_one_name_are_refused(folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "below" / folder.name
    other.mkdir(parents=True)
    (other / "config.json").write_text('{"other": 1}')
    with pytest.raises(InputError, match="two drafts would be called 'eagle3 their-draft'"):
        drafts([str(folder), str(other)])


def test_what_holds_no_speculator_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"neither `promoted`, nor a key.*config\.json"):
        drafts([str(tmp_path)])


def test_a_folder_is_fetched_whole_and_refused_when_it_was_changed(folder: Path, tmp_path: Path) -> None:
    (draft,) = drafts([str(folder)])
    fetch_draft(draft, tmp_path / "cache")
    assert {path.name: path.read_bytes() for path in (tmp_path / "cache").iterdir()} == {
        "config.json": b"{}",
        "model.safetensors": b"weights",
    }
    (folder / "model.safetensors").write_bytes(b"others")
    with pytest.raises(InputError, match="changed since the run began"):
        fetch_draft(draft, tmp_path / "cache")


def test_a_stages_speculator_is_fetched_by_its_records(tmp_path: Path) -> None:
    root = tmp_path / "root"
    stage = StageRef(str(root), "drafts", stage_content("drafts", 1, {}, {}, {}))
    plan = [Shard("00000", extra={"file": "export/config.json"}), Shard("00001", extra={"file": "metrics.jsonl"})]
    manifest.write_plan(stage, plan)
    config = Path(stage.uri, "export", "config.json")
    draft = new_draft(str(root), stage.key)
    with pytest.raises(InputError, match="holds no speculator"):
        fetch_draft(draft, tmp_path / "cache")
    for shard in plan:
        manifest.commit_shard(stage, shard, b"{}", rows=0, status_counts={}, inputs={})
    fetch_draft(draft, tmp_path / "cache")
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["config.json"]
    assert json.loads(config.read_text()) == {}
