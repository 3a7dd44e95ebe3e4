"""The record is the commit; whatever is torn, absent, foreign or stale is found and redone."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from infra import manifest, storage
from infra.errors import DamagedShard, StageFailed
from infra.fingerprint import stage_content
from infra.manifest import Shard, StageRef


def ref(root: Path, stage: str = "prompts", upstream: dict[str, str] | None = None, **config: object) -> StageRef:
    return StageRef(str(root), stage, stage_content(stage, 1, dict(config), {}, upstream or {}))


def commit(
    stage: StageRef, shard: Shard, data: bytes | Path, inputs: dict[str, manifest.ShardRecord] | None = None
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


# --- foreign and torn objects, files instead of bytes, two writers ---


def changed(path: Path, **fields: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def test_a_record_of_another_shard_or_stage_is_none(tmp_path: Path) -> None:
    stage, other = ref(tmp_path), ref(tmp_path, seed=1)
    complete(stage, {"00000": b"a", "00001": b"b"})
    complete(other, {"00000": b"c", "00001": b"d"})
    for file in Path(other.uri, "shards").glob("00000*"):  # with its data: only the key tells
        Path(stage.uri, "shards", file.name).write_bytes(file.read_bytes())
    Path(stage.manifest_uri).unlink()
    state = manifest.inspect(stage)
    assert [shard.shard for shard in state.missing] == ["00000"]
    assert "cannot be read" in state.problems["00000"]


def test_a_record_under_another_shards_name_is_none(tmp_path: Path) -> None:
    stage = ref(tmp_path)
    complete(stage, {"00000": b"a", "00001": b"b"})
    body = Path(manifest.record_uri(stage.uri, "00000")).read_bytes()
    Path(manifest.record_uri(stage.uri, "00001")).write_bytes(body)
    Path(stage.manifest_uri).unlink()
    state = manifest.inspect(stage)
    assert [shard.shard for shard in state.missing] == ["00001"]
    assert "cannot be read" in state.problems["00001"]


@pytest.mark.parametrize(
    "fields", [{"key": "0" * 16}, {"stage": "responses"}, {"schema_version": 2}, {"shards": []}]
)
def test_a_foreign_manifest_says_nothing(tmp_path: Path, fields: dict[str, object]) -> None:
    stage = ref(tmp_path)
    complete(stage, {"00000": b"a"})
    changed(Path(stage.manifest_uri), **fields)
    assert not manifest.inspect(stage).complete
    manifest.finish(stage, {})
    assert manifest.inspect(stage).complete


def test_a_manifest_of_fewer_shards_than_the_plan_says_nothing(tmp_path: Path) -> None:
    stage = ref(tmp_path)
    complete(stage, {"00000": b"a", "00001": b"b"})
    stated = json.loads(Path(stage.manifest_uri).read_text())
    changed(Path(stage.manifest_uri), shards=stated["shards"][:1])
    assert manifest.inspect(stage).missing == []
    assert not manifest.inspect(stage).complete
    Path(manifest.record_uri(stage.uri, "00000")).unlink()
    state = manifest.inspect(stage)
    assert [shard.shard for shard in state.missing] == ["00000"]


def test_a_manifest_that_differs_from_the_records_is_written_anew(tmp_path: Path) -> None:
    stage = ref(tmp_path)
    complete(stage, {"00000": b"a"})
    record = json.loads(Path(manifest.record_uri(stage.uri, "00000")).read_text())
    stated = json.loads(Path(stage.manifest_uri).read_text())
    changed(Path(stage.manifest_uri), shards=[{**stated["shards"][0], "rows": 1000}])
    assert not manifest.inspect(stage).complete
    assert manifest.finish(stage, {})["shards"] == [record]
    assert manifest.inspect(stage).complete


@pytest.mark.parametrize("damage", ["cut", "no object", "a shard without its name"])
def test_a_torn_plan_is_written_again_and_its_records_stand(tmp_path: Path, damage: str) -> None:
    stage = ref(tmp_path)
    complete(stage, {"00000": b"a"})
    plan = Path(stage.plan_uri)
    if damage == "a shard without its name":
        changed(plan, shards=[{"inputs": []}])
    else:
        plan.write_text(plan.read_text()[:-20] if damage == "cut" else "[]")
    assert manifest.read_plan(stage.uri) == ()
    manifest.write_plan(stage, [Shard("00000")])
    assert manifest.inspect(stage).complete


def test_records_written_before_they_named_their_key_still_count(tmp_path: Path) -> None:
    stage = ref(tmp_path)
    complete(stage, {"00000": b"a"})
    file, stated = Path(manifest.record_uri(stage.uri, "00000")), json.loads(Path(stage.manifest_uri).read_text())
    record = {name: value for name, value in json.loads(file.read_text()).items() if name != "key"}
    file.write_text(json.dumps(record, indent=1, sort_keys=True) + "\n")
    changed(Path(stage.manifest_uri), shards=[record])
    assert json.loads(Path(stage.manifest_uri).read_text()) != stated
    assert manifest.inspect(stage).complete


def test_a_records_own_sha256_is_what_the_next_stage_names(tmp_path: Path) -> None:
    upstream = ref(tmp_path)
    complete(upstream, {"00000": b"a"})
    below = ref(tmp_path, "responses", {"prompts": upstream.key})
    (shard,) = manifest.write_plan(below, [Shard("00000", ("prompts/00000",))])
    record = commit(below, shard, b"row", manifest.input_records(below, [shard]))
    assert record.inputs["prompts/00000"] == storage.sha256(manifest.record_uri(upstream.uri, "00000"))


def test_a_file_is_committed_and_fetched_without_being_held_in_memory(tmp_path: Path) -> None:
    stage = ref(tmp_path / "root")
    shard = manifest.write_plan(stage, [Shard("00000")])[0]
    size_bytes = 64 * 2**20
    file = tmp_path / "large"
    with file.open("wb") as opened:
        for number in range(size_bytes // 2**20):
            opened.write(bytes([number]) * 2**20)
    tracemalloc.start()
    record = commit(stage, shard, file)
    manifest.fetch_shard(stage.uri, record, tmp_path / "copy")
    manifest.check_shard(stage.uri, record)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < size_bytes / 1.5
    assert record.size_bytes == size_bytes
    assert record.data.startswith(f"00000-{storage.sha256(str(file))[:12]}")
    assert storage.sha256(str(tmp_path / "copy")) == record.sha256
    assert commit(stage, shard, b"late") == record


def test_a_damaged_shard_is_not_fetched(tmp_path: Path) -> None:
    stage = ref(tmp_path / "root")
    complete(stage, {"00000": b"abc"})
    record = manifest.read_records(stage.uri)["00000"]
    target = tmp_path / "copy"
    target.write_bytes(b"of another time")
    Path(stage.uri, record.data_path).write_bytes(b"abd")
    for check in (
        lambda: manifest.fetch_shard(stage.uri, record, target),
        lambda: manifest.check_shard(stage.uri, record),
    ):
        with pytest.raises(DamagedShard, match="sha256"):
            check()
    Path(stage.uri, record.data_path).unlink()
    for check in (
        lambda: manifest.fetch_shard(stage.uri, record, target),
        lambda: manifest.check_shard(stage.uri, record),
    ):
        with pytest.raises(DamagedShard, match="not there"):
            check()
    assert target.read_bytes() == b"of another time"
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["copy"]


def test_who_comes_between_two_steps_of_a_commit_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second writer does all its work, the manifest too, before any one call to the store of the first."""
    calls = ["get_many", "exists", "size", "create", "delete", "put"]
    for name in calls:
        for named in (False, True):
            for place in range(6):
                stage = ref(tmp_path / f"{name}{named}{place}")
                extra = {"file": "vocab.safetensors"} if named else {}
                shard = manifest.write_plan(stage, [Shard("00000", extra=extra)])[0]
                real, count = getattr(storage, name), iter(range(1000))

                def interrupted(*args: Any, real: Any = real, count: Any = count, place: int = place,
                                stage: StageRef = stage, shard: Shard = shard, name: str = name) -> Any:  # fmt: skip
                    if next(count) == place:
                        monkeypatch.setattr(storage, name, real)
                        commit(stage, shard, b"second")
                        manifest.finish(stage, {"who": "second"})
                    return real(*args)

                monkeypatch.setattr(storage, name, interrupted)
                try:
                    commit(stage, shard, b"firsts")
                    manifest.finish(stage, {"who": "first"})
                except DamagedShard as damage:
                    assert named, "only a named file can be replaced under a record"
                    manifest.invalidate(damage.stage_uri, damage.shard)
                    commit(stage, shard, b"firsts")
                    manifest.finish(stage, {"who": "first"})
                monkeypatch.setattr(storage, name, real)
                assert manifest.inspect(stage).complete
                (record,) = manifest.read_records(stage.uri).values()
                assert manifest.read_shard(stage.uri, record) in (b"firsts", b"second")
                assert manifest.read_record_files(stage.uri, [shard]) == {"00000": record}


def test_who_finds_a_named_file_written_meanwhile_takes_the_record_that_came_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = ref(tmp_path, "vocab")
    shard = manifest.write_plan(stage, [Shard("00000", extra={"file": "vocab.safetensors"})])[0]
    create, second = storage.create, list[Any]()

    def late(uri: str, data: bytes) -> bool:
        if not second:
            second.append(None)
            second[0] = commit(stage, shard, b"second")
        return create(uri, data)

    monkeypatch.setattr(storage, "create", late)
    assert commit(stage, shard, b"firsts") == second[0]
    manifest.finish(stage, {})


def test_a_named_file_replaced_under_its_record_is_found_before_the_stage_counts(tmp_path: Path) -> None:
    stage = ref(tmp_path, "vocab")
    shard = manifest.write_plan(stage, [Shard("00000", extra={"file": "vocab.safetensors"})])[0]
    commit(stage, shard, b"mine")
    storage.put(storage.join(stage.uri, "vocab.safetensors"), b"your")
    with pytest.raises(DamagedShard, match=r"vocab\.safetensors"):
        manifest.finish(stage, {})
    assert not storage.exists(stage.manifest_uri)


def test_a_complete_stage_takes_one_manifest_and_one_listing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    upstream = ref(tmp_path)
    complete(upstream, {f"{number:05d}": b"a" for number in range(20)})
    below = ref(tmp_path, "responses", {"prompts": upstream.key})
    shards = manifest.write_plan(
        below, [Shard(f"{number:05d}", (f"prompts/{number:05d}",)) for number in range(20)]
    )
    inputs = manifest.input_records(below, shards)
    for shard in shards:
        commit(below, shard, b"b", inputs)
    manifest.finish(below, {})
    reads: list[str] = []
    for name in ("get", "list_sizes"):
        real = getattr(storage, name)
        monkeypatch.setattr(
            storage, name, lambda uri, name=name, real=real: reads.append(f"{name} {uri}") or real(uri)
        )
    monkeypatch.setattr(storage, "get_many", lambda uris: pytest.fail("no record may be read by itself"))
    assert manifest.inspect(below).complete
    assert sorted(reads) == sorted([
        f"get {below.plan_uri}", f"get {below.manifest_uri}", f"get {upstream.manifest_uri}", f"list_sizes {below.uri}",
    ])  # fmt: skip


@pytest.mark.s3
def test_on_s3_it_is_the_same(s3_root: str, tmp_path: Path) -> None:
    stage = StageRef(s3_root, "vocab", stage_content("vocab", 1, {}, {}, {}))
    shards = manifest.write_plan(stage, [Shard("00000"), Shard("00001", extra={"file": "vocab.safetensors"})])
    (tmp_path / "file").write_bytes(b"of a file")
    assert commit(stage, shards[0], tmp_path / "file") == commit(stage, shards[0], b"late")
    storage.put(f"{stage.uri}/vocab.safetensors", b"left by a crash")
    record = commit(stage, shards[1], tmp_path / "file")
    manifest.finish(stage, {})
    assert manifest.inspect(stage).complete
    manifest.fetch_shard(stage.uri, record, tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == b"of a file"
    storage.put(f"{stage.uri}/vocab.safetensors", b"not so")
    assert "vocab.safetensors has 6 bytes" in manifest.inspect(stage).problems["00001"]
    manifest.invalidate(stage.uri, "00001")
    commit(stage, shards[1], b"again")
    manifest.finish(stage, {})
    assert manifest.inspect(stage).complete
