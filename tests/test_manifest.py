"""The record is the commit; whatever is torn, absent, foreign or stale is found and redone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from infra import manifest, storage
from infra.errors import DamagedShard, StageFailed
from infra.fingerprint import stage_content
from infra.manifest import Shard, StageRef


def ref(root: Path, stage: str = "prompts", upstream: dict[str, str] | None = None, **config: object) -> StageRef:
    return StageRef(str(root), stage, stage_content(stage, 1, dict(config), {}, upstream or {}))


def commit(
    stage: StageRef, shard: Shard, data: bytes, inputs: dict[str, str] | None = None
) -> manifest.ShardRecord:
    return manifest.commit_shard(stage, shard, data, rows=1, status_counts={"ok": 1}, inputs=inputs or {})


def complete(stage: StageRef, bodies: dict[str, bytes]) -> None:
    shards = manifest.write_plan(stage, [Shard(name) for name in bodies])
    for shard in shards:
        commit(stage, shard, bodies[shard.shard])
    manifest.finish(stage, {})


def test_a_complete_stage_is_found_complete(tmp_path: Path) -> None:
    stage = ref(tmp_path)
    complete(stage, {"00000": b"a", "00001": b"bb"})
    state = manifest.inspect(stage)
    assert state.complete
    assert state.missing == []
    assert state.manifest is not None
    assert state.manifest["totals"] == {"rows": 2, "size_bytes": 3, "status_counts": {"ok": 2}}


def test_the_key_ignores_defaults_and_follows_content(tmp_path: Path) -> None:
    assert ref(tmp_path).key == ref(tmp_path / "elsewhere").key
    assert ref(tmp_path).key != ref(tmp_path, temperature=0.5).key
    assert len(ref(tmp_path).key) == 16


@pytest.mark.parametrize("damage", ["truncated data", "absent data", "truncated record", "absent record"])
def test_damage_makes_only_that_shard_missing(tmp_path: Path, damage: str) -> None:
    stage = ref(tmp_path)
    complete(stage, {"00000": b"aaaa", "00001": b"bbbb"})
    record = manifest.read_records(stage.uri)["00001"]
    data, file = Path(stage.uri, record.data_path), Path(manifest.record_uri(stage.uri, "00001"))
    target = data if "data" in damage else file
    if "truncated" in damage:
        target.write_bytes(target.read_bytes()[:-2])
    else:
        target.unlink()
    state = manifest.inspect(stage)
    assert not state.complete
    assert [shard.shard for shard in state.missing] == ["00001"]
    commit(stage, Shard("00001"), b"again")
    manifest.finish(stage, {})
    assert manifest.inspect(stage).complete
    assert manifest.read_shard(stage.uri, manifest.read_records(stage.uri)["00001"]) == b"again"


def test_a_truncated_manifest_costs_nothing_but_itself(tmp_path: Path) -> None:
    stage = ref(tmp_path)
    complete(stage, {"00000": b"a"})
    Path(stage.manifest_uri).write_bytes(b'{"shards": [')
    state = manifest.inspect(stage)
    assert not state.complete
    assert state.missing == []
    manifest.finish(stage, {})
    assert manifest.inspect(stage).complete


def test_a_flipped_byte_is_found_by_the_reader(tmp_path: Path) -> None:
    stage = ref(tmp_path)
    complete(stage, {"00000": b"abcdef"})
    record = manifest.read_records(stage.uri)["00000"]
    Path(stage.uri, record.data_path).write_bytes(b"abcdeg")
    with pytest.raises(DamagedShard) as caught:
        manifest.read_shard(stage.uri, record)
    manifest.invalidate(caught.value.stage_uri, caught.value.shard)
    assert [shard.shard for shard in manifest.inspect(stage).missing] == ["00000"]


def test_a_changed_input_makes_the_shard_stale(tmp_path: Path) -> None:
    upstream = ref(tmp_path)
    complete(upstream, {"00000": b"a", "00001": b"b"})
    below = ref(tmp_path, "responses", {"prompts": upstream.key})
    shards = manifest.write_plan(below, [Shard(name, (f"prompts/{name}",)) for name in ("00000", "00001")])
    inputs = manifest.input_records(below, shards)
    for shard in shards:
        commit(below, shard, b"row", inputs)
    manifest.finish(below, {})
    assert manifest.inspect(below).complete
    manifest.invalidate(upstream.uri, "00001")
    commit(upstream, Shard("00001"), b"other")
    manifest.finish(upstream, {})
    state = manifest.inspect(below)
    assert [shard.shard for shard in state.missing] == ["00001"]
    assert "has changed" in state.problems["00001"]


def test_the_first_record_stands(tmp_path: Path) -> None:
    stage = ref(tmp_path)
    manifest.write_plan(stage, [Shard("00000")])
    first = commit(stage, Shard("00000"), b"first")
    assert commit(stage, Shard("00000"), b"second") == first
    assert manifest.read_shard(stage.uri, first) == b"first"


def test_the_first_plan_stands_and_a_foreign_one_is_refused(tmp_path: Path) -> None:
    stage = ref(tmp_path)
    manifest.write_plan(stage, [Shard("00000")])
    assert [shard.shard for shard in manifest.write_plan(stage, [Shard("00000"), Shard("00001")])] == ["00000"]
    foreign = json.loads(Path(stage.plan_uri).read_text())
    foreign["content"]["config"] = {"other": 1}
    Path(stage.plan_uri).write_text(json.dumps(foreign))
    with pytest.raises(StageFailed, match="another configuration"):
        manifest.write_plan(stage, [Shard("00000")])


def test_named_files_are_replaced_only_without_a_valid_record(tmp_path: Path) -> None:
    stage = ref(tmp_path, "vocab")
    shard = manifest.write_plan(stage, [Shard("00000", extra={"file": "vocab.safetensors"})])[0]
    storage.put(storage.join(stage.uri, "vocab.safetensors"), b"left by a crash")
    record = commit(stage, shard, b"right")
    assert storage.get(storage.join(stage.uri, "vocab.safetensors")) == b"right"
    assert commit(stage, shard, b"late second writer") == record
    assert storage.get(storage.join(stage.uri, "vocab.safetensors")) == b"right"


def test_an_unfinished_stage_gets_no_manifest(tmp_path: Path) -> None:
    stage = ref(tmp_path)
    manifest.write_plan(stage, [Shard("00000"), Shard("00001")])
    commit(stage, Shard("00000"), b"a")
    with pytest.raises(StageFailed, match="00001"):
        manifest.finish(stage, {})
