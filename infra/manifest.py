"""Plans, shard records and manifests: the only truth about what is done.

A stage lives in `<root>/<stage>/<key>/`. Its plan is written first and fixes the shards; each shard's data is
written under a name that its content gives, then its record, create-only: that record is the commit. The manifest,
written last, says that the stage is complete. A listing may only disprove a record, never stand for one.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from infra import storage
from infra.errors import DamagedShard, StageFailed
from infra.fingerprint import sha256_hex
from infra.records import RECORD_FIELDS, Shard, ShardRecord, StageRef, StageState

__all__ = [
    "Shard",
    "ShardRecord",
    "StageRef",
    "StageState",
    "commit_shard",
    "finish",
    "input_records",
    "inspect",
    "invalidate",
    "read_content",
    "read_manifest",
    "read_plan",
    "read_record_files",
    "read_records",
    "read_shard",
    "record_uri",
    "write_plan",
]


def record_uri(stage_uri: str, shard: str) -> str:
    return storage.join(stage_uri, "shards", f"{shard}.json")


def write_plan(stage: StageRef, shards: Sequence[Shard]) -> tuple[Shard, ...]:
    """Fix the stage's shards. The first plan written under a key stands; it is returned.

    Raises:
        StageFailed: the plan found there was made for other content (a key collision, or a foreign file).
    """
    plan = {
        "stage": stage.stage,
        "key": stage.key,
        "schema_version": stage.content["schema_version"],
        "content": stage.content,
        "shards": [shard.to_json() for shard in shards],
    }
    body = _dump(plan)
    if storage.create(stage.plan_uri, body):
        return tuple(shards)
    found = _load(storage.get(stage.plan_uri))
    if found is None:
        storage.put(stage.plan_uri, body)
        return tuple(shards)
    if found.get("content") != json.loads(body)["content"]:
        raise StageFailed(f"{stage.plan_uri} was written for another configuration; move it away and run again")
    return tuple(Shard.from_json(shard) for shard in found["shards"])


def read_plan(stage_uri: str) -> tuple[Shard, ...]:
    """The planned shards, or none when there is no readable plan."""
    try:
        found = _load(storage.get(storage.join(stage_uri, "plan.json")))
    except FileNotFoundError:
        return ()
    return tuple(Shard.from_json(shard) for shard in found["shards"]) if found else ()


def read_content(stage_uri: str) -> dict[str, Any]:
    """What a stage's key hashes, from its plan.

    Raises:
        StageFailed: the plan is absent or cannot be read.
    """
    body = storage.get_many([storage.join(stage_uri, "plan.json")]).values()
    found = next((_load(data) for data in body), None)
    if found is None or not isinstance(found.get("content"), dict):
        raise StageFailed(f"{stage_uri} has no readable plan.json; run the pipeline's earlier stages again")
    return dict(found["content"])


def read_records(stage_uri: str, shards: Sequence[Shard] | None = None) -> dict[str, ShardRecord]:
    """Every readable record, by shard id: from the manifest where there is one, else from the records."""
    manifest = read_manifest(stage_uri)
    if manifest is not None:
        return _records_of(manifest)
    return read_record_files(stage_uri, read_plan(stage_uri) if shards is None else shards)


def read_manifest(stage_uri: str) -> dict[str, Any] | None:
    """The manifest, or None when it is absent or cannot be read."""
    try:
        found = _load(storage.get(storage.join(stage_uri, "manifest.json")))
    except FileNotFoundError:
        return None
    if found is None or not isinstance(found.get("shards"), list):
        return None
    return found if all(_is_record(item) for item in found["shards"]) else None


def input_records(stage: StageRef, shards: Sequence[Shard]) -> dict[str, ShardRecord]:
    """The present record of every upstream shard that the shards read, by `<stage>/<shard>`."""
    found: dict[str, ShardRecord] = {}
    for upstream in sorted({name.split("/")[0] for shard in shards for name in shard.inputs}):
        for shard_id, record in read_records(stage.upstream_uri(upstream)).items():
            found[f"{upstream}/{shard_id}"] = record
    return found


def inspect(stage: StageRef) -> StageState:
    """What is done and what is missing: the manifest or the records, and one listing that may only disprove."""
    plan = read_plan(stage.uri)
    if not plan:
        return StageState((), {}, None, {})
    listing = storage.list_sizes(stage.uri)
    current_inputs = input_records(stage, plan)
    manifest = read_manifest(stage.uri)
    if manifest is not None and not _bears_out(manifest, listing):
        manifest = None
    found = _records_of(manifest) if manifest else read_record_files(stage.uri, plan)
    records: dict[str, ShardRecord] = {}
    problems: dict[str, str] = {}
    for shard in plan:
        record = found.get(shard.shard)
        problem = _disproof(shard, record, listing, current_inputs)
        if record is not None and problem is None:
            records[shard.shard] = record
        elif problem is not None:
            problems[shard.shard] = problem
    return StageState(plan, records, manifest if len(records) == len(plan) else None, problems)


def commit_shard(
    stage: StageRef,
    shard: Shard,
    data: bytes,
    *,
    rows: int,
    status_counts: Mapping[str, int],
    inputs: Mapping[str, ShardRecord],
    suffix: str = ".parquet",
    extra: Mapping[str, Any] | None = None,
) -> ShardRecord:
    """Write a shard's data, then its record. The first valid record stands; a second writer gets it back.

    Args:
        data: the whole object.
        inputs: present record of each of the shard's inputs (from `input_records`), the ones that were read.
        suffix: file ending of the data; unused where the plan names the `file`.
        extra: more fields of the record.
    """
    digest = sha256_hex(data)
    data_name = shard.extra.get("file") or f"{shard.shard}-{digest[:12]}{suffix}"
    record = ShardRecord(
        shard.shard,
        data_name,
        digest,
        len(data),
        rows,
        dict(status_counts),
        {name: inputs[name].fingerprint for name in shard.inputs},
        dict(extra or {}),
    )
    data_uri = storage.join(stage.uri, record.data_path)
    uri = record_uri(stage.uri, shard.shard)
    standing = _standing_record(stage.uri, uri, record)
    if standing is not None:
        return standing
    storage.delete(stage.manifest_uri)  # one that stands here repeats a record that is no longer valid
    if not storage.create(data_uri, data):
        storage.put(data_uri, data)
    if storage.create(uri, _dump(record.to_json())):
        return record
    standing = _standing_record(stage.uri, uri, record)
    if standing is not None:
        return standing
    storage.put(uri, _dump(record.to_json()))
    return record


def finish(
    stage: StageRef, provenance: Mapping[str, Any], extra: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Write the manifest of a stage all of whose shards are committed.

    Raises:
        StageFailed: a planned shard has no valid record.
    """
    state = inspect(stage)
    if state.missing or not state.plan:
        lacking = ", ".join(shard.shard for shard in state.missing[:5])
        raise StageFailed(f"{stage.uri} lacks shards {lacking or '(no plan)'}; run the same command again")
    records = [state.records[shard.shard] for shard in state.plan]
    statuses: Counter[str] = Counter()
    for record in records:
        statuses.update(record.status_counts)
    manifest = {
        "stage": stage.stage,
        "key": stage.key,
        "schema_version": stage.content["schema_version"],
        "shards": [record.to_json() for record in records],
        "totals": {
            "rows": sum(record.rows for record in records),
            "size_bytes": sum(record.size_bytes for record in records),
            "status_counts": dict(statuses),
        },
        "provenance": dict(provenance),
        **(extra or {}),
    }
    if not storage.create(stage.manifest_uri, _dump(manifest)):
        standing = read_manifest(stage.uri)
        if standing is not None and standing["shards"] == manifest["shards"]:
            return standing
        storage.put(stage.manifest_uri, _dump(manifest))
    return json.loads(_dump(manifest))  # type: ignore[no-any-return]


def read_shard(stage_uri: str, record: ShardRecord) -> bytes:
    """A shard's bytes, checked against its record.

    Raises:
        DamagedShard: the object is absent, or its bytes are not those that were committed.
    """
    try:
        data = storage.get(storage.join(stage_uri, record.data_path))
    except FileNotFoundError:
        raise DamagedShard(stage_uri, record.shard, f"{record.data} is not there") from None
    if sha256_hex(data) != record.sha256:
        raise DamagedShard(stage_uri, record.shard, f"{record.data} does not match its record's sha256")
    return data


def invalidate(stage_uri: str, shard: str) -> None:
    """Forget a damaged shard, so that the next inspection finds it missing.

    The manifest goes first: a crash in between leaves an incomplete stage, never a complete one with a hole.
    """
    storage.delete(storage.join(stage_uri, "manifest.json"))
    storage.delete(record_uri(stage_uri, shard))


def _records_of(manifest: Mapping[str, Any]) -> dict[str, ShardRecord]:
    return {item["shard"]: ShardRecord.from_json(item) for item in manifest["shards"]}


def read_record_files(stage_uri: str, shards: Sequence[Shard]) -> dict[str, ShardRecord]:
    """Every readable record of the shards, from the record files themselves."""
    bodies = storage.get_many(record_uri(stage_uri, shard.shard) for shard in shards)
    records = (_parse_record(body) for body in bodies.values())
    return {record.shard: record for record in records if record is not None}


def _bears_out(manifest: Mapping[str, Any], listing: Mapping[str, int]) -> bool:
    """Whether each record the manifest repeats also stands beside its shard, whole as far as its size tells."""
    return all(
        listing.get(f"shards/{shard}.json") == len(_dump(record.to_json()))
        for shard, record in _records_of(manifest).items()
    )


def _standing_record(stage_uri: str, uri: str, made: ShardRecord) -> ShardRecord | None:
    """The record already there, if it is valid for the same inputs and its object has the recorded size."""
    body = storage.get_many([uri]).get(uri)
    found = _parse_record(body) if body is not None else None
    if found is None or dict(found.inputs) != dict(made.inputs):
        return None
    try:
        intact = storage.size(storage.join(stage_uri, found.data_path)) == found.size_bytes
    except FileNotFoundError:
        return None
    return found if intact else None


def _disproof(
    shard: Shard, record: ShardRecord | None, listing: Mapping[str, int], current_inputs: Mapping[str, ShardRecord]
) -> str | None:
    if record is None:
        return "its record cannot be read" if f"shards/{shard.shard}.json" in listing else None
    if record.data_path not in listing:
        return f"{record.data} is not there"
    if listing[record.data_path] != record.size_bytes:
        return f"{record.data} has {listing[record.data_path]} bytes, its record says {record.size_bytes}"
    for name in shard.inputs:
        present = current_inputs.get(name)
        if present is None or record.inputs.get(name) != present.fingerprint:
            return f"its input {name} has changed"
    return None


def _is_record(value: Any) -> bool:
    return isinstance(value, dict) and all(name in value for name in RECORD_FIELDS)


def _parse_record(body: bytes) -> ShardRecord | None:
    found = _load(body)
    return ShardRecord.from_json(found) if _is_record(found) and found is not None else None


def _dump(value: Any) -> bytes:
    return (json.dumps(value, indent=1, sort_keys=True, ensure_ascii=False) + "\n").encode()


def _load(body: bytes) -> dict[str, Any] | None:
    try:
        found = json.loads(body)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None
