"""What is wrong in a root is a problem; what is only there besides is a note."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from flows.cli import EXIT_DONE, EXIT_FAILED, main
from infra import manifest, storage
from infra.fingerprint import sha256_hex, stage_content
from infra.manifest import Shard, StageRef
from infra.promotion.gate import PromoteConfig
from infra.promotion.pointer import promote
from infra.training.checkpoint_files import COMMIT_FILE, SHARED_FILES, STATE_FILE, CheckpointRef
from infra.verify import verify
from tests.fakes.result_rows import NEW, measured
from tests.infra.promotion.test_pointer import entry


def make_stage(root: Path, stage: str = "prompts", count: int = 2, **config: object) -> StageRef:
    made = StageRef(str(root), stage, stage_content(stage, 1, dict(config), {}, {}))
    for shard in manifest.write_plan(made, [Shard(f"{number:05d}") for number in range(count)]):
        data = f"rows of {shard.shard}".encode()
        manifest.commit_shard(made, shard, data, rows=1, status_counts={"ok": 1}, inputs={})
    manifest.finish(made, {})
    return made


def make_checkpoint(
    stage: StageRef, step: int, epoch: int = 1, *, commit: bool = True, best: CheckpointRef | None = None
) -> Path:
    folder = Path(CheckpointRef(step, epoch).uri(stage.uri))
    state = {"step": step, "kept_best": None if best is None else asdict(best)}
    files = {name: f"{name} of {step}".encode() for name in SHARED_FILES}
    files[STATE_FILE] = json.dumps(state).encode()
    for name, data in files.items():
        storage.put(str(folder / name), data)
    said = {name: {"size_bytes": len(data), "sha256": sha256_hex(data)} for name, data in files.items()}
    if commit:
        storage.put(str(folder / COMMIT_FILE), json.dumps({"step": step, "files": said}).encode())
    return folder


def problems(root: Path) -> list[str]:
    return [found.where for found in verify(str(root)) if found.problem and not found.extra]


def extras(root: Path) -> list[str]:
    return [found.where for found in verify(str(root)) if found.extra]


def test_what_no_record_names_is_a_note_and_the_exit_code_stays(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stage = make_stage(tmp_path)
    place = f"prompts/{stage.key}"
    Path(stage.uri, "shards", "00001-0123456789ab.parquet").write_bytes(b"made twice")
    Path(stage.uri, "shards", "00007.json").write_text("{}")
    assert main(["verify", str(tmp_path)]) == EXIT_DONE
    out = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in out[:-1]] == [
        f"EXTRA {place}/shards/00007.json",
        f"EXTRA {place}/shards/00001-0123456789ab.parquet",
    ]
    assert out[-1] == "checked=2 problems=0 extra=2"
    assert main(["verify", str(tmp_path), "--json"]) == EXIT_DONE
    said = json.loads(capsys.readouterr().out)
    assert (said["checked"], said["problems"], len(said["extra"])) == (2, [], 2)


@pytest.mark.parametrize("complete", [True, False])
@pytest.mark.parametrize("damage", ["torn", "of another shard", "of another stage"])
def test_a_record_that_is_none_is_a_problem(tmp_path: Path, damage: str, complete: bool) -> None:
    stage, other = make_stage(tmp_path), make_stage(tmp_path / "other", seed=2)
    if not complete:
        Path(stage.manifest_uri).unlink()
    file = Path(manifest.record_uri(stage.uri, "00001"))
    source = {"torn": (stage, "00001"), "of another shard": (stage, "00000"), "of another stage": (other, "00001")}
    body = Path(manifest.record_uri(source[damage][0].uri, source[damage][1])).read_bytes()
    file.write_bytes(body[:-3] if damage == "torn" else body)
    assert problems(Path(stage.uri)) == [f"prompts/{stage.key} shard 00001"]


def test_a_manifest_of_other_shards_is_a_problem(tmp_path: Path) -> None:
    stage = make_stage(tmp_path)
    stated = json.loads(Path(stage.manifest_uri).read_text())
    Path(stage.manifest_uri).write_text(json.dumps({**stated, "shards": stated["shards"][:1]}))
    assert problems(tmp_path) == [f"prompts/{stage.key}"]
    Path(stage.manifest_uri).write_text(json.dumps({**stated, "key": "0" * 16}))
    assert problems(tmp_path) == [f"prompts/{stage.key}"]


def test_a_damaged_newest_checkpoint_is_a_problem_and_others_are_notes(tmp_path: Path) -> None:
    stage = make_stage(tmp_path, "drafts")
    place = f"drafts/{stage.key}/checkpoints"
    older, newest = make_checkpoint(stage, 100), make_checkpoint(stage, 200, epoch=2)
    make_checkpoint(stage, 300, epoch=2, commit=False)
    assert problems(tmp_path) == []
    assert extras(tmp_path) == [f"{place}/2/step-00000300"]
    (older / "state.json").unlink()
    assert problems(tmp_path) == []
    assert extras(tmp_path) == [f"{place}/2/step-00000300", f"{place}/1/step-00000100"]
    model = newest / "model.safetensors"
    model.write_bytes(model.read_bytes()[:-1] + b"?")
    assert problems(tmp_path) == [f"{place}/2/step-00000200"]


def test_a_damaged_or_absent_best_checkpoint_is_a_problem(tmp_path: Path) -> None:
    stage, best = make_stage(tmp_path, "drafts"), CheckpointRef(100, 1)
    place = f"drafts/{stage.key}/checkpoints/1/step-00000100"
    folder = make_checkpoint(stage, 100, best=best)
    make_checkpoint(stage, 200, best=best)
    make_checkpoint(stage, 300, best=best)
    assert problems(tmp_path) == []
    (folder / "model.safetensors").write_bytes(b"?")
    assert problems(tmp_path) == [place]
    (folder / COMMIT_FILE).unlink()
    assert problems(tmp_path) == [place]
    assert extras(tmp_path) == [place], "what is left of it"


def test_a_run_that_cannot_be_read_is_a_problem(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_stage(tmp_path)
    storage.put(str(tmp_path / "runs" / "one.json"), b'{"run_id": "one"}')
    assert problems(tmp_path) == []
    storage.put(str(tmp_path / "runs" / "two.json"), b'{"run_id": "tw')
    assert main(["verify", str(tmp_path)]) == EXIT_FAILED
    assert "PROBLEM runs/two.json" in capsys.readouterr().out


def test_a_torn_plan_does_not_hide_what_else_is_wrong(tmp_path: Path) -> None:
    stage = make_stage(tmp_path, count=3)
    Path(stage.plan_uri).write_bytes(b'{"stage": "pro')
    shards = sorted(Path(stage.uri, "shards").glob("00001-*"))
    shards[0].write_bytes(b"rows of 0000X")
    assert problems(tmp_path)[0] == f"prompts/{stage.key}"
    assert f"prompts/{stage.key} shard 00001" in problems(tmp_path)


def test_a_foreign_plan_is_a_problem(tmp_path: Path) -> None:
    stage, other = make_stage(tmp_path), make_stage(tmp_path / "other", seed=2)
    Path(stage.plan_uri).write_bytes(Path(other.plan_uri).read_bytes())
    assert problems(Path(stage.uri)) == [f"prompts/{stage.key}"]


def test_a_pointer_that_is_torn_or_points_to_nothing_is_a_problem(tmp_path: Path) -> None:
    make_stage(tmp_path)
    name = "speculators/org/model/promoted.json"
    storage.put(str(tmp_path / name), b'{"promoted"')
    assert problems(tmp_path) == [name]
    storage.delete(str(tmp_path / name))
    assert promote(str(tmp_path), "org/model", measured(), NEW, PromoteConfig(), entry(NEW)).moved
    assert problems(tmp_path) == [name]
    storage.put(str(tmp_path / "drafts" / NEW / "export" / "config.json"), b"{}")
    assert problems(tmp_path) == []
