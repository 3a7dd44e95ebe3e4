"""Plans, shard records and manifests: the only truth about what is done.

A stage lives in `<root>/<stage>/<key>/`. Its plan is written first and fixes the shards; each shard's data is
written under a name that its content gives, then its record, create-only: that record is the commit. The manifest,
written last, says that the stage is complete. A listing may only disprove a record, never stand for one.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from infra import storage
from infra.errors import StageFailed
from infra.fingerprint import content_sha256
from infra.records import Shard, ShardRecord, StageRef, StageState, is_record
from infra.shards import (
    check_shard,
    commit_shard,
    fetch_shard,
    invalidate,
    load_object,
    read_record_files,
    read_shard,
    record_uri,
)

__all__ = [
    "Shard",
    "ShardRecord",
    "StageRef",
    "StageState",
    "check_shard",
    "commit_shard",
    "fetch_shard",
    "finish",
    "input_records",
    "inputs_sha256",
    "inspect",
    "invalidate",
    "read_content",
    "read_manifest",
    "read_plan",
    "read_record_files",
    "read_records",
    "read_shard",
    "record_uri",
    "records_of",
    "unnamed",
    "write_plan",
]


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
    found = load_object(storage.get(stage.plan_uri))
    if found is not None and found.get("content") != json.loads(body)["content"]:
        raise StageFailed(f"{stage.plan_uri} was written for another configuration; move it away and run again")
    standing = _shards_of(found, stage.uri)
    if standing:
        return standing
    # Torn. What the key hashes fixes the number and content of the shards, so the same plan is written again, and
    # neither the records that are there nor the plans of later stages can come to mean something else.
    storage.put(stage.plan_uri, body)
    return tuple(shards)


def read_plan(stage_uri: str) -> tuple[Shard, ...]:
    """The planned shards, or none when there is no readable plan of this key."""
    try:
        return _shards_of(load_object(storage.get(storage.join(stage_uri, "plan.json"))), stage_uri)
    except FileNotFoundError:
        return ()


def read_content(stage_uri: str) -> dict[str, Any]:
    """What a stage's key hashes, from its plan.

    Raises:
        StageFailed: the plan is absent or cannot be read.
    """
    body = storage.get_many([storage.join(stage_uri, "plan.json")]).values()
    found = next((load_object(data) for data in body), None)
    if found is None or not isinstance(found.get("content"), dict):
        raise StageFailed(f"{stage_uri} has no readable plan.json; run the pipeline's earlier stages again")
    return dict(found["content"])


def read_records(stage_uri: str, shards: Sequence[Shard] | None = None) -> dict[str, ShardRecord]:
    """Every valid record, by shard id: from the manifest where there is one, else from the records."""
    manifest = read_manifest(stage_uri)
    if manifest is not None:
        return records_of(manifest)
    return read_record_files(stage_uri, read_plan(stage_uri) if shards is None else shards)


def read_manifest(stage_uri: str) -> dict[str, Any] | None:
    """The manifest, or None when it is absent, torn, or another stage's."""
    try:
        found = load_object(storage.get(storage.join(stage_uri, "manifest.json")))
    except FileNotFoundError:
        return None
    if found is None or not _belongs(found, stage_uri) or not isinstance(found.get("shards"), list):
        return None
    return found if all(is_record(item, found["key"]) for item in found["shards"]) else None


def records_of(manifest: Mapping[str, Any]) -> dict[str, ShardRecord]:
    """The records that a manifest repeats, by shard id."""
    return {item["shard"]: ShardRecord.from_json(item) for item in manifest["shards"]}


def input_records(stage: StageRef, shards: Sequence[Shard]) -> dict[str, ShardRecord]:
    """The present record of every upstream shard that the shards read, by `<stage>/<shard>`."""
    found: dict[str, ShardRecord] = {}
    for upstream in sorted({name.split("/")[0] for shard in shards for name in shard.inputs}):
        for shard_id, record in read_records(stage.upstream_uri(upstream)).items():
            found[f"{upstream}/{shard_id}"] = record
    return found


def inputs_sha256(inputs: Mapping[str, ShardRecord]) -> str:
    """One hash of all inputs: another one as soon as any of them was made again with other content."""
    return content_sha256({name: record.fingerprint for name, record in inputs.items()})


def inspect(stage: StageRef) -> StageState:
    """What is done and what is missing: the manifest or the records, and one listing that may only disprove."""
    plan = read_plan(stage.uri)
    if not plan:
        return StageState((), {}, None, {})
    listing = storage.list_sizes(stage.uri)
    current_inputs = input_records(stage, plan)
    manifest = _manifest_of_plan(stage, plan)
    stated = records_of(manifest) if manifest else {}
    found = stated
    if not stated or not _bears_out(stated, listing):
        # Only what the listing has: half of a large stage's reads would be of records that are not there.
        found = read_record_files(stage.uri, [one for one in plan if f"shards/{one.shard}.json" in listing])
    records: dict[str, ShardRecord] = {}
    problems: dict[str, str] = {}
    for shard in plan:
        record = found.get(shard.shard)
        problem = _disproof(shard, record, listing, current_inputs)
        if record is not None and problem is None:
            records[shard.shard] = record
        elif problem is not None:
            problems[shard.shard] = problem
    complete = len(records) == len(plan) and records == stated
    return StageState(plan, records, manifest if complete else None, problems)


def finish(
    stage: StageRef, provenance: Mapping[str, Any], extra: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Write the manifest of a stage all of whose shards are committed.

    Raises:
        StageFailed: a planned shard has no valid record.
        DamagedShard: a named file is not what its record says.
    """
    state = inspect(stage)
    if state.missing or not state.plan:
        lacking = ", ".join(shard.shard for shard in state.missing[:5])
        raise StageFailed(f"{stage.uri} lacks shards {lacking or '(no plan)'}; run the same command again")
    records = [state.records[shard.shard] for shard in state.plan]
    for shard in state.plan:
        if "file" in shard.extra:
            # Content does not give this object its name, so a second writer may have replaced it under the record
            # of the first; once the stage is complete, nobody writes it any more.
            check_shard(stage.uri, state.records[shard.shard])
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
        standing = _manifest_of_plan(stage, state.plan)
        if standing is not None and standing["shards"] == manifest["shards"]:
            return standing
        storage.put(stage.manifest_uri, _dump(manifest))
    return json.loads(_dump(manifest))  # type: ignore[no-any-return]


def unnamed(names: Iterable[str], records: Iterable[ShardRecord]) -> list[str]:
    """Objects of a stage's folder that are none of its own files and that none of the records names.

    Checkpoints are left out: they have commits of their own.
    """
    named = {record.data_path for record in records}
    return sorted(
        name
        for name in names
        if name not in named
        and name not in ("plan.json", "manifest.json")
        and not name.startswith("checkpoints/")
        and not (name.startswith("shards/") and name.endswith(".json"))
    )


def _belongs(found: Mapping[str, Any], stage_uri: str) -> bool:
    """Whether a plan or manifest says that it is of the stage and key in whose folder it lies."""
    return [found.get("stage"), found.get("key")] == stage_uri.rstrip("/").split("/")[-2:]


def _shards_of(plan: Mapping[str, Any] | None, stage_uri: str) -> tuple[Shard, ...]:
    """The shards of a plan; none when it is torn or of another stage."""
    if plan is None or not _belongs(plan, stage_uri):
        return ()
    try:
        return tuple(Shard.from_json(shard) for shard in plan["shards"])
    except (KeyError, TypeError, AttributeError, ValueError):
        return ()


def _manifest_of_plan(stage: StageRef, plan: Sequence[Shard]) -> dict[str, Any] | None:
    """The manifest, if it is of the plan's shards and of this schema."""
    found = read_manifest(stage.uri)
    if found is None or found.get("schema_version") != stage.content["schema_version"]:
        return None
    return found if [item["shard"] for item in found["shards"]] == [shard.shard for shard in plan] else None


def _bears_out(stated: Mapping[str, ShardRecord], listing: Mapping[str, int]) -> bool:
    """Whether each record the manifest repeats also stands beside its shard, whole as far as its size tells."""
    return all(listing.get(f"shards/{shard}.json") == len(record.body) for shard, record in stated.items())


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


def _dump(value: Any) -> bytes:
    return (json.dumps(value, indent=1, sort_keys=True, ensure_ascii=False) + "\n").encode()
