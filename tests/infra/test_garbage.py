"""Garbage is found, nothing else is, and a removal that is cut off anywhere leaves a root that is whole."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from flows.cli import EXIT_DONE, EXIT_WRONG_INPUT, main
from infra import garbage, manifest, storage
from infra.fingerprint import stage_content
from infra.garbage import KEPT_SECONDS, PARTIAL, Survey, remove, survey
from infra.leases import Lease, Timing, Waiter, lease_name
from infra.manifest import Shard, StageRef
from infra.promotion.gate import PromoteConfig
from infra.promotion.pointer import promote
from infra.training import checkpoint_files
from infra.training.checkpoint_files import CheckpointRef
from infra.verify import verify
from tests.fakes.result_rows import measured
from tests.infra.promotion.test_pointer import entry
from tests.infra.test_verify import make_checkpoint

QUICK = Timing(renew_seconds=0.1, takeover_seconds=0.4, poll_seconds=0.05)
TWO_DAYS = 2 * 24 * 3600


def make(
    root: Path, stage: str, upstream: tuple[StageRef, ...] = (), *, complete: bool = True, **config: object
) -> StageRef:
    keys = {one.stage: one.key for one in upstream}
    made = StageRef(str(root), stage, stage_content(stage, 1, dict(config), {}, keys))
    names = tuple(f"{one.stage}/00000" for one in upstream)
    exported = {"file": "export/config.json"} if stage == "drafts" else {}
    shards = manifest.write_plan(made, [Shard("00000", names, exported), Shard("00001", names)])
    inputs = manifest.input_records(made, shards)
    for shard in shards if complete else shards[:1]:
        data = f"{stage} {shard.shard} {config}".encode()
        manifest.commit_shard(made, shard, data, rows=1, status_counts={"ok": 1}, inputs=inputs)
    if complete:
        manifest.finish(made, {})
    return made


def refer(root: Path, *stages: StageRef, name: str = "runs/one.json") -> None:
    said = {"run_id": "one", "keys": {stage.stage: stage.key for stage in stages}}
    storage.put(str(root / name), json.dumps(said).encode())


def age(root: Path, seconds: float = TWO_DAYS) -> None:
    then = time.time() - seconds
    for path in [root, *root.rglob("*")]:
        os.utime(path, (then, then))


def found(root: Path, **options: bool) -> dict[str, str]:
    return {item.where: item.reason for item in survey(str(root), **options).items}


def place(stage: StageRef) -> str:
    return f"{stage.stage}/{stage.key}"


def orphan(stage: StageRef, name: str = "shards/00000-0123456789ab.parquet") -> Path:
    path = Path(stage.uri, name)
    storage.put(str(path), b"made twice")
    return path


def files(root: Path) -> set[str]:
    return {
        str(path.relative_to(root)) for path in root.rglob("*") if path.is_file() and "leases" not in path.parts
    }


def collect(root: Path, **options: bool) -> Survey:
    seen = survey(str(root), **options)
    assert [item.where for item in remove(str(root), seen, timing=QUICK, **options)] == [
        item.where for item in seen.items
    ]
    return seen


# --- objects of stages that stay ---


def test_only_what_no_record_names_is_garbage(tmp_path: Path) -> None:
    whole, half = make(tmp_path, "prompts"), make(tmp_path, "responses", complete=False)
    refer(tmp_path, whole, half)
    expected = {str(orphan(stage).relative_to(tmp_path)) for stage in (whole, half)}
    before = files(tmp_path) - expected
    age(tmp_path)
    assert set(found(tmp_path)) == expected
    collect(tmp_path)
    assert files(tmp_path) == before
    assert manifest.inspect(whole).complete
    assert found(tmp_path) == {}


def test_what_is_young_is_kept(tmp_path: Path) -> None:
    stage = make(tmp_path, "prompts")
    refer(tmp_path, stage)
    path = orphan(stage)
    age(tmp_path)
    os.utime(path, (time.time(), time.time() - KEPT_SECONDS + 60))
    assert found(tmp_path) == {}
    assert len(survey(str(tmp_path), now=time.time() + 120).items) == 1


def test_what_a_manifest_names_is_kept_though_its_record_is_lost(tmp_path: Path) -> None:
    stage = make(tmp_path, "prompts")
    refer(tmp_path, stage)
    Path(manifest.record_uri(stage.uri, "00001")).unlink()
    age(tmp_path)
    assert found(tmp_path) == {}


def test_what_a_record_of_no_planned_shard_names_is_kept(tmp_path: Path) -> None:
    stage = make(tmp_path, "prompts")
    refer(tmp_path, stage)
    record = json.loads(Path(manifest.record_uri(stage.uri, "00001")).read_text())
    extra = {**record, "shard": "00009", "data": "00009-0123456789ab.parquet"}
    storage.put(manifest.record_uri(stage.uri, "00009"), json.dumps(extra).encode())
    orphan(stage, "shards/00009-0123456789ab.parquet")
    age(tmp_path)
    assert found(tmp_path) == {}


@pytest.mark.parametrize("name", ["plan.json", "manifest.json"])
def test_in_a_stage_that_cannot_be_read_nothing_is_garbage(tmp_path: Path, name: str) -> None:
    stage = make(tmp_path, "prompts")
    refer(tmp_path, stage)
    orphan(stage)
    Path(stage.uri, name).write_text("{")
    age(tmp_path)
    seen = survey(str(tmp_path))
    assert seen.items == []
    assert any("cannot be read" in note and place(stage) in note for note in seen.notes)


def test_what_killed_writes_left_is_garbage(tmp_path: Path) -> None:
    stage = make(tmp_path, "prompts")
    refer(tmp_path, stage)
    left = Path(stage.uri, "shards", ".00000-ab.parquet.123456789abc.partial")
    left.write_bytes(b"half")
    (tmp_path / "runs" / ".one.json.123456789abc.partial").write_bytes(b"half")
    age(tmp_path)
    assert set(found(tmp_path).values()) == {PARTIAL}
    collect(tmp_path)
    assert not left.exists()
    assert list((tmp_path / "runs").iterdir()) == [tmp_path / "runs" / "one.json"]


# --- leases ---


def held(stage: StageRef) -> Lease:
    lease = Waiter(stage.root, lease_name(stage.stage, stage.key), timing=QUICK).try_take()
    assert lease is not None
    return lease


def test_a_stage_under_a_lease_is_left_alone(tmp_path: Path) -> None:
    stage, free = make(tmp_path, "prompts", complete=False), make(tmp_path, "prompts", complete=False, seed=1)
    refer(tmp_path, stage)
    orphan(stage)
    age(tmp_path)
    lease = held(stage)
    try:
        seen = survey(str(tmp_path))
        assert [item.where for item in seen.items] == [place(free)]
        assert any("lease" in note for note in seen.notes)
    finally:
        lease.release()
    assert len(found(tmp_path)) == 2
    path = Path(lease.uri)
    storage.put(str(path), path.read_bytes().replace(b'"released": true', b'"released": false'))
    assert len(found(tmp_path)) == 1
    age(path.parent, garbage.LIVE_LEASE_SECONDS + 60)
    assert len(found(tmp_path)) == 2, "its holder is long dead"


def test_work_that_begins_after_the_survey_stops_the_removal(tmp_path: Path) -> None:
    stage = make(tmp_path, "prompts", complete=False)
    refer(tmp_path, stage)
    path = orphan(stage)
    age(tmp_path)
    seen = survey(str(tmp_path))
    lease = held(stage)
    try:
        assert list(remove(str(tmp_path), seen, timing=QUICK)) == []
        assert path.exists()
    finally:
        lease.release()


def test_what_has_come_to_be_needed_since_the_survey_is_kept(tmp_path: Path) -> None:
    stage, other = make(tmp_path, "prompts", complete=False), make(tmp_path, "responses", complete=False)
    refer(tmp_path, stage)
    path = orphan(stage, "shards/00001-0123456789ab.parquet")
    age(tmp_path)
    seen = survey(str(tmp_path))
    assert {item.where for item in seen.items} == {str(path.relative_to(tmp_path)), place(other)}
    record = json.loads(Path(manifest.record_uri(stage.uri, "00000")).read_text())
    late = {**record, "shard": "00001", "data": path.name}
    storage.put(manifest.record_uri(stage.uri, "00001"), json.dumps(late).encode())
    refer(tmp_path, other, name="runs/two.json")
    before = files(tmp_path)
    assert list(remove(str(tmp_path), seen, timing=QUICK)) == []
    assert files(tmp_path) == before


# --- checkpoints ---


@pytest.mark.parametrize("complete", [True, False])
def test_superseded_checkpoints_are_garbage(tmp_path: Path, complete: bool) -> None:
    stage = make(tmp_path, "drafts", complete=complete)
    refer(tmp_path, stage)
    for step, epoch in ((100, 1), (200, 1), (250, 2), (300, 2)):
        make_checkpoint(stage, step, epoch)
    make_checkpoint(stage, 150, 1, commit=False)
    make_checkpoint(stage, 350, 2, commit=False)
    age(tmp_path)
    steps = {int(where[-8:]): reason for where, reason in found(tmp_path).items()}
    assert sorted(steps) == [100, 150, 200, *([250] if complete else []), 350]
    assert {step for step, reason in steps.items() if "never" in reason} == {150, 350}
    collect(tmp_path)
    assert [ref.step for ref in checkpoint_files.find(stage.uri)] == ([300] if complete else [300, 250])
    assert checkpoint_files.damage(stage.uri, checkpoint_files.find(stage.uri)[0]) is None
    assert not Path(stage.uri, "checkpoints", "1").exists(), "empty folders go too"


@pytest.mark.parametrize("complete", [True, False])
def test_the_best_checkpoint_stays_as_long_as_a_newest_one_names_it(tmp_path: Path, complete: bool) -> None:
    stage = make(tmp_path, "drafts", complete=complete)
    refer(tmp_path, stage)
    first, second = CheckpointRef(100, 1), CheckpointRef(300, 2)
    for step, best in ((100, first), (150, first), (200, first), (300, second), (350, second)):
        make_checkpoint(stage, step, 1 if step < 300 else 2, best=best)
    age(tmp_path)
    collect(tmp_path)
    kept = [ref.step for ref in checkpoint_files.find(stage.uri)]
    assert kept == [350, 300], "of a complete stage the best, of any the newest two"
    make_checkpoint(stage, 250, 1, best=first)
    make_checkpoint(stage, 400, 2, best=CheckpointRef(250, 1))
    age(tmp_path)
    collect(tmp_path)
    kept = [ref.step for ref in checkpoint_files.find(stage.uri)]
    assert kept == ([400, 250] if complete else [400, 350, 300, 250])


def test_where_a_newest_checkpoint_cannot_be_read_none_is_garbage(tmp_path: Path) -> None:
    stage = make(tmp_path, "drafts")
    refer(tmp_path, stage)
    for step in (100, 200, 300):
        folder = make_checkpoint(stage, step)
    (folder / "state.json").write_text('{"step"')
    age(tmp_path)
    assert found(tmp_path) == {}
    assert any("cannot be read" in note for note in survey(str(tmp_path)).notes)


# --- stages that no run refers to ---


def test_stages_that_nothing_refers_to_are_garbage_and_what_others_need_is_not(tmp_path: Path) -> None:
    prompts = make(tmp_path, "prompts")
    responses = make(tmp_path, "responses", (prompts,))
    old_prompts = make(tmp_path, "prompts", seed=1)
    old_responses = make(tmp_path, "responses", (old_prompts,), complete=False)
    promoted = make(tmp_path, "drafts")
    refer(tmp_path, responses)  # its prompts are needed too
    rows = measured(promoted.key)
    assert promote(str(tmp_path), "some", rows, promoted.key, PromoteConfig(), entry(promoted.key)).moved
    age(tmp_path)
    assert set(found(tmp_path)) == {place(old_responses)}
    assert any("1 complete" in note for note in survey(str(tmp_path)).notes)
    assert set(found(tmp_path, complete_stages=True)) == {place(old_responses), place(old_prompts)}
    collect(tmp_path, complete_stages=True)
    assert not Path(old_prompts.uri).exists()
    assert {one.where for one in verify(str(tmp_path)) if one.problem} == set()
    assert all(manifest.inspect(stage).complete for stage in (prompts, responses, promoted))


def test_a_complete_stage_that_is_kept_keeps_what_it_was_made_from(tmp_path: Path) -> None:
    prompts = make(tmp_path, "prompts", complete=False)
    make(tmp_path, "responses", (prompts,), complete=True)
    refer(tmp_path, make(tmp_path, "vocab"))
    age(tmp_path)
    assert found(tmp_path) == {}


def test_a_complete_stage_whose_manifest_cannot_be_read_is_kept(tmp_path: Path) -> None:
    torn = make(tmp_path, "prompts")
    refer(tmp_path, make(tmp_path, "vocab"))
    Path(torn.manifest_uri).write_bytes(b'{"shards": [')
    age(tmp_path)
    assert found(tmp_path, complete_stages=True) == {}
    notes = survey(str(tmp_path), complete_stages=True).notes
    assert f"the manifest of {place(torn)} cannot be read; the stage is kept" in notes


def test_a_folder_that_is_no_root_is_wrong_input(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    left = tmp_path / ".other.partial"
    left.write_bytes(b"not ours")
    (tmp_path / "something").write_bytes(b"x")
    age(tmp_path)
    assert main(["gc", str(tmp_path), "--delete"]) == EXIT_WRONG_INPUT
    assert "is no artifact root" in capsys.readouterr().err
    assert left.exists()


def test_a_stage_whose_rows_another_one_keeps_is_kept(tmp_path: Path) -> None:
    earlier = make(tmp_path, "responses")
    refer(tmp_path, make(tmp_path, "responses", redo_from=earlier.key))
    age(tmp_path)
    assert found(tmp_path, complete_stages=True) == {}


@pytest.mark.parametrize("body", [b'{"run_id": "o', b"[]", b'{"run_id": "one"}'])
@pytest.mark.parametrize("name", ["runs/two.json", "speculators/some/promoted.json"])
def test_a_run_that_cannot_be_read_may_refer_to_anything(tmp_path: Path, name: str, body: bytes) -> None:
    referred, free = make(tmp_path, "prompts"), make(tmp_path, "prompts", seed=1, complete=False)
    refer(tmp_path, referred)
    path = orphan(referred)
    age(tmp_path)
    assert len(found(tmp_path)) == 2
    storage.put(str(tmp_path / name), body)
    seen = survey(str(tmp_path), complete_stages=True)
    assert [item.where for item in seen.items] == [str(path.relative_to(tmp_path))]
    assert any(name in note for note in seen.notes)
    assert manifest.inspect(free).records


def test_a_stage_that_is_kept_and_cannot_be_read_may_need_any_other(tmp_path: Path) -> None:
    kept, _ = make(tmp_path, "responses"), make(tmp_path, "prompts", complete=False)
    refer(tmp_path, kept)
    Path(kept.plan_uri).write_text("{")
    age(tmp_path)
    assert found(tmp_path, complete_stages=True) == {}


def test_a_stage_with_anything_young_in_it_is_kept(tmp_path: Path) -> None:
    stage = make(tmp_path, "prompts", complete=False)
    refer(tmp_path, make(tmp_path, "vocab"))
    age(tmp_path)
    assert len(found(tmp_path)) == 1
    os.utime(manifest.record_uri(stage.uri, "00000"))
    assert found(tmp_path) == {}


# --- removal ---


def test_cut_off_anywhere_a_removal_leaves_nothing_that_counts_and_is_not_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    delete: Callable[[str], None] = storage.delete
    for deletions in range(40):
        root = tmp_path / str(deletions)
        stage = make(root, "drafts")
        make_checkpoint(stage, 100)
        refer(root, make(root, "vocab"))
        age(root)
        left = iter(range(deletions))

        def failing(uri: str, left: object = left) -> None:
            if next(left, None) is None:
                raise OSError("the node dies here")
            delete(uri)

        monkeypatch.setattr(storage, "delete", failing)
        seen = survey(str(root), complete_stages=True)
        try:
            list(remove(str(root), seen, complete_stages=True, timing=QUICK))
            break
        except OSError:
            monkeypatch.setattr(storage, "delete", delete)
            assert {one.where for one in verify(str(root)) if one.problem and not one.extra} == set(), deletions
            assert not manifest.inspect(stage).complete or deletions == 0
            age(root)
            if Path(stage.uri).exists():
                collect(root, complete_stages=True)
        monkeypatch.setattr(storage, "delete", delete)
        assert not Path(stage.uri).exists()
    assert deletions > 8


def test_the_command_lists_and_only_deletes_when_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stage = make(tmp_path, "prompts")
    refer(tmp_path, stage)
    path = orphan(stage)
    age(tmp_path)
    assert main(["gc", str(tmp_path)]) == EXIT_DONE
    item, totals, advice = capsys.readouterr().out.splitlines()
    assert item.split() == ["10", "bytes", f"{place(stage)}/shards/{path.name}:", "no", "record", "names", "it"]
    assert totals == "garbage=1 garbage_bytes=10 deleted=0 deleted_bytes=0"
    assert "--delete" in advice
    assert path.exists()
    assert main(["gc", str(tmp_path), "--delete", "--json"]) == EXIT_DONE
    said = json.loads(capsys.readouterr().out)
    assert [row["where"] for row in said["items"]] == said["deleted"] == [str(path.relative_to(tmp_path))]
    assert not path.exists()
    assert main(["gc", str(tmp_path / "absent")]) == EXIT_WRONG_INPUT


@pytest.mark.s3
def test_on_s3_it_is_the_same(s3_root: str) -> None:
    stage = StageRef(s3_root, "drafts", stage_content("drafts", 1, {}, {}, {}))
    free = StageRef(s3_root, "drafts", stage_content("drafts", 1, {"seed": 1}, {}, {}))
    for one in (stage, free):
        for shard in manifest.write_plan(one, [Shard("00000"), Shard("00001")])[: 1 if one is free else 2]:
            manifest.commit_shard(one, shard, b"rows", rows=1, status_counts={"ok": 1}, inputs={})
    manifest.finish(stage, {})
    storage.put(f"{s3_root}/runs/one.json", json.dumps({"keys": {"drafts": stage.key}}).encode())
    left = f"{stage.uri}/shards/00000-0123456789ab.parquet"
    storage.put(left, b"made twice")
    before = set(storage.list_sizes(stage.uri)) - {"shards/00000-0123456789ab.parquet"}
    assert survey(s3_root).items == []
    later = time.time() + TWO_DAYS
    seen = survey(s3_root, now=later)
    assert {item.where for item in seen.items} == {left.removeprefix(f"{s3_root}/"), place(free)}
    assert len(list(remove(s3_root, seen, now=later, timing=QUICK))) == 2
    assert set(storage.list_sizes(stage.uri)) == before
    assert storage.list_sizes(free.uri) == {}
