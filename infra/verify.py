"""Reread every shard below a URI and compare it with its record."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from infra import manifest, storage
from infra.errors import DamagedShard


@dataclass(frozen=True)
class Finding:
    """One thing `verify` looked at.

    Args:
        where: `<stage>/<key>` or `<stage>/<key> shard <id>`.
        problem: None when it is right, else what is wrong.
    """

    where: str
    problem: str | None


def verify(uri: str) -> Iterator[Finding]:
    """Check every stage at or below `uri` (an artifact root, a stage, or one stage's key), shard by shard."""
    for stage_uri in _stage_uris(uri):
        yield from _verify_stage(stage_uri)


def _stage_uris(uri: str) -> list[str]:
    """Folders that hold a plan or a manifest, at `uri` or below it."""
    folders = {
        name.rpartition("/")[0]
        for name in storage.list_sizes(uri)
        if name.rpartition("/")[2] in ("plan.json", "manifest.json")
    }
    return [storage.join(uri, folder) if folder else uri for folder in sorted(folders)]


def _verify_stage(stage_uri: str) -> Iterator[Finding]:
    where = "/".join(stage_uri.rstrip("/").split("/")[-2:])
    plan = manifest.read_plan(stage_uri)
    if not plan:
        yield Finding(where, "its plan cannot be read")
        return
    stated = manifest.read_manifest(stage_uri)
    has_manifest = storage.exists(storage.join(stage_uri, "manifest.json"))
    if has_manifest and stated is None:
        yield Finding(where, "its manifest cannot be read")
    records = manifest.read_record_files(stage_uri, plan)
    for item in stated["shards"] if stated else ():
        record = records.get(item["shard"])
        if record is None or record.to_json() != item:
            yield Finding(
                f"{where} shard {item['shard']}", "its record is absent or differs from the manifest's copy"
            )
    for record in records.values():
        try:
            manifest.read_shard(stage_uri, record)
            yield Finding(f"{where} shard {record.shard}", None)
        except DamagedShard as damage:
            yield Finding(f"{where} shard {record.shard}", damage.problem)
