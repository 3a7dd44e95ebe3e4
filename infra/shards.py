"""Write and read one shard: its data, then its record, which is the commit."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from infra import storage
from infra.errors import DamagedShard
from infra.fingerprint import sha256_hex
from infra.records import Shard, ShardRecord, StageRef, is_record


def record_uri(stage_uri: str, shard: str) -> str:
    return storage.join(stage_uri, "shards", f"{shard}.json")


def commit_shard(
    stage: StageRef,
    shard: Shard,
    data: bytes | Path,
    *,
    rows: int,
    status_counts: Mapping[str, int],
    inputs: Mapping[str, ShardRecord],
    suffix: str = ".parquet",
    extra: Mapping[str, Any] | None = None,
) -> ShardRecord:
    """Write a shard's data, then its record. The first valid record stands; a second writer gets it back.

    Args:
        data: the whole object, or a local file, which is streamed: memory stays bounded whatever its size.
        inputs: present record of each of the shard's inputs (from `input_records`), the ones that were read.
        suffix: file ending of the data; unused where the plan names the `file`.
        extra: more fields of the record.
    """
    digest = storage.sha256(str(data)) if isinstance(data, Path) else sha256_hex(data)
    record = ShardRecord(
        shard.shard,
        shard.extra.get("file") or f"{shard.shard}-{digest[:12]}{suffix}",
        digest,
        data.stat().st_size if isinstance(data, Path) else len(data),
        rows,
        dict(status_counts),
        {name: inputs[name].fingerprint for name in shard.inputs},
        {"key": stage.key, **(extra or {})},
    )
    if (standing := _standing_record(stage, record)) is not None:
        return standing
    if storage.exists(stage.manifest_uri):
        # Either another writer has committed this shard meanwhile and finished the stage, or this manifest repeats
        # a record that is no longer valid.
        if (standing := _standing_record(stage, record)) is not None:
            return standing
        storage.delete(stage.manifest_uri)
    data_uri = storage.join(stage.uri, record.data_path)
    if not _create(data_uri, data):
        # Damaged, or a named file with other bytes: left by a crash, or by a writer whose record is there by now.
        if (standing := _standing_record(stage, record)) is not None:
            return standing
        _replace(data_uri, data)
    uri = record_uri(stage.uri, shard.shard)
    if storage.create(uri, record.body):
        return record
    if (standing := _standing_record(stage, record)) is not None:
        return standing
    storage.put(uri, record.body)
    return record


def read_shard(stage_uri: str, record: ShardRecord) -> bytes:
    """A shard's bytes, checked against its record.

    Raises:
        DamagedShard: the object is absent, or its bytes are not those that were committed.
    """
    try:
        data = storage.get(storage.join(stage_uri, record.data_path))
    except FileNotFoundError:
        raise _absent(stage_uri, record) from None
    if sha256_hex(data) != record.sha256:
        raise _changed(stage_uri, record)
    return data


def fetch_shard(stage_uri: str, record: ShardRecord, local_path: Path) -> None:
    """A shard as a local file, checked against its record; memory stays bounded whatever its size.

    The file is whole and checked, or not there at all.

    Raises:
        DamagedShard: the object is absent, or its bytes are not those that were committed.
    """
    staged = local_path.with_name(f"{local_path.name}.unchecked")
    try:
        storage.get_file(storage.join(stage_uri, record.data_path), staged)
        if storage.sha256(str(staged)) != record.sha256:
            raise _changed(stage_uri, record)
        staged.replace(local_path)
    except FileNotFoundError:
        raise _absent(stage_uri, record) from None
    finally:
        staged.unlink(missing_ok=True)


def check_shard(stage_uri: str, record: ShardRecord) -> None:
    """Read a shard in pieces and keep nothing of it.

    Raises:
        DamagedShard: the object is absent, or its bytes are not those that were committed.
    """
    try:
        found = storage.sha256(storage.join(stage_uri, record.data_path))
    except FileNotFoundError:
        raise _absent(stage_uri, record) from None
    if found != record.sha256:
        raise _changed(stage_uri, record)


def invalidate(stage_uri: str, shard: str) -> None:
    """Forget a damaged shard, so that the next inspection finds it missing.

    The manifest goes first: a crash in between leaves an incomplete stage, never a complete one with a hole.
    """
    storage.delete(storage.join(stage_uri, "manifest.json"))
    storage.delete(record_uri(stage_uri, shard))


def read_record_files(stage_uri: str, shards: Iterable[Shard]) -> dict[str, ShardRecord]:
    """Every valid record of the shards, from the record files themselves."""
    key, ids = (
        stage_uri.rstrip("/").rpartition("/")[2],
        {record_uri(stage_uri, one.shard): one.shard for one in shards},
    )
    found = {ids[uri]: parse_record(body, key, ids[uri]) for uri, body in storage.get_many(ids).items()}
    return {shard: record for shard, record in found.items() if record is not None}


def parse_record(body: bytes, key: str, shard: str) -> ShardRecord | None:
    """The record of that shard under that key; None when it is torn, or another stage's or shard's."""
    found = load_object(body)
    return ShardRecord.from_json(found) if is_record(found, key, shard) and found is not None else None


def load_object(body: bytes) -> dict[str, Any] | None:
    """A JSON object, or None when it cannot be read as one."""
    try:
        found = json.loads(body)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def _create(uri: str, data: bytes | Path) -> bool:
    return storage.create_file(uri, data) if isinstance(data, Path) else storage.create(uri, data)


def _replace(uri: str, data: bytes | Path) -> None:
    if isinstance(data, Path):
        storage.put_file(uri, data)
    else:
        storage.put(uri, data)


def _standing_record(stage: StageRef, made: ShardRecord) -> ShardRecord | None:
    """The record already there, if it is valid for the same inputs and its object has the recorded size."""
    uri = record_uri(stage.uri, made.shard)
    body = storage.get_many([uri]).get(uri)
    found = parse_record(body, stage.key, made.shard) if body is not None else None
    if found is None or dict(found.inputs) != dict(made.inputs):
        return None
    try:
        intact = storage.size(storage.join(stage.uri, found.data_path)) == found.size_bytes
    except FileNotFoundError:
        return None
    return found if intact else None


def _absent(stage_uri: str, record: ShardRecord) -> DamagedShard:
    return DamagedShard(stage_uri, record.shard, f"{record.data} is not there")


def _changed(stage_uri: str, record: ShardRecord) -> DamagedShard:
    return DamagedShard(stage_uri, record.shard, f"{record.data} does not match its record's sha256")
