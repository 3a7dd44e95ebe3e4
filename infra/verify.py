"""Reread every shard below a URI and compare it with its record."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from infra import manifest, storage
from infra.errors import DamagedShard, StageFailed
from infra.manifest import Shard, ShardRecord
from infra.promotion.pointer import POINTER_FILE, read_pointer
from infra.training import checkpoint_files

STAGE_FILES = ("plan.json", "manifest.json")


@dataclass(frozen=True)
class Finding:
    """One thing `verify` looked at.

    Args:
        where: `<stage>/<key>`, `<stage>/<key> shard <id>`, or an object's name.
        problem: None when it is right, else what is wrong.
        extra: it is only there besides, and `problem` says why it does not count. `draftsmith gc` removes such, but
            for records.
    """

    where: str
    problem: str | None
    extra: bool = False


def verify(uri: str) -> Iterator[Finding]:
    """Check every stage at or below `uri` (an artifact root, a stage, or one stage's key), shard by shard.

    At a root the objects that say what runs have made are read too.
    """
    listing = storage.list_sizes(uri)
    for folder in sorted({name.rpartition("/")[0] for name in listing if name.rpartition("/")[2] in STAGE_FILES}):
        prefix = f"{folder}/" if folder else ""
        names = [name.removeprefix(prefix) for name in listing if name.startswith(prefix)]
        yield from _verify_stage(storage.join(uri, folder), names)
    runs = [name for name in listing if name.startswith("runs/") and name.endswith(".json")]
    for name, body in storage.get_many(storage.join(uri, name) for name in runs).items():
        if not _is_object(body):
            yield Finding(
                f"runs/{name.rpartition('/')[2]}", "it cannot be read, so nobody knows what that run made"
            )
    pointers = [name for name in listing if name.startswith("speculators/") and name.endswith(f"/{POINTER_FILE}")]
    for name in pointers:
        verifier = name.removeprefix("speculators/").removesuffix(f"/{POINTER_FILE}")
        try:
            export = f"{read_pointer(uri, verifier).history[-1].export}/config.json"
            if export not in listing:
                yield Finding(name, f"it points to {export}, which is not there")
        except StageFailed as error:
            yield Finding(name, str(error))


def _verify_stage(stage_uri: str, names: list[str]) -> Iterator[Finding]:
    where = "/".join(stage_uri.rstrip("/").split("/")[-2:])
    plan = manifest.read_plan(stage_uri)
    if not plan:
        yield Finding(where, "its plan cannot be read")
        plan = tuple(Shard(name[7:-5]) for name in sorted(names) if _is_record(name))  # what it must have had
    stated = manifest.read_manifest(stage_uri)
    copies = manifest.records_of(stated) if stated else {}
    records = manifest.read_record_files(stage_uri, plan)
    if stated is None and "manifest.json" in names:
        yield Finding(where, "its manifest cannot be read, or is of another stage")
    if stated is not None and list(copies) != [shard.shard for shard in plan]:
        yield Finding(where, "its manifest is of other shards than its plan")
    yield from _verify_shards(stage_uri, where, plan, records, copies, names)
    yield from _extra_objects(where, plan, records, copies, names)
    yield from _verify_checkpoints(stage_uri, where, names)


def _verify_shards(
    stage_uri: str,
    where: str,
    plan: Iterable[Shard],
    records: Mapping[str, ShardRecord],
    copies: Mapping[str, ShardRecord],
    names: list[str],
) -> Iterator[Finding]:
    for shard in plan:
        place, record = f"{where} shard {shard.shard}", records.get(shard.shard)
        if shard.shard in copies and record != copies[shard.shard]:
            yield Finding(place, "its record is absent or differs from the manifest's copy")
        elif record is None and f"shards/{shard.shard}.json" in names:
            yield Finding(place, "its record cannot be read, or is of another shard or stage")
        if record is not None:
            try:
                manifest.check_shard(stage_uri, record)
                yield Finding(place, None)
            except DamagedShard as damage:
                yield Finding(place, damage.problem)


def _extra_objects(
    where: str,
    plan: Iterable[Shard],
    records: Mapping[str, ShardRecord],
    copies: Mapping[str, ShardRecord],
    names: list[str],
) -> Iterator[Finding]:
    planned = {f"shards/{shard.shard}.json" for shard in plan}
    for name in sorted(names):
        if _is_record(name) and name not in planned:
            yield Finding(f"{where}/{name}", "a record of a shard that the plan does not have", extra=True)
    for name in manifest.unnamed(names, [*records.values(), *copies.values()]):
        yield Finding(f"{where}/{name}", "no record names it", extra=True)


def _verify_checkpoints(stage_uri: str, where: str, names: list[str]) -> Iterator[Finding]:
    prefix = f"{checkpoint_files.FOLDER}/"
    listing = [name.removeprefix(prefix) for name in names if name.startswith(prefix)]
    committed = checkpoint_files.committed(listing)
    needed = set(committed[:1])
    with contextlib.suppress(FileNotFoundError, ValueError):  # its damage is found below
        needed = checkpoint_files.with_their_best(stage_uri, committed[:1])
    for ref in sorted(needed - set(committed)):
        yield Finding(f"{where}/{prefix}{ref.folder}", "the best checkpoint so far is not there")
    for ref in checkpoint_files.folders(listing):
        place = f"{where}/{prefix}{ref.folder}"
        if ref not in committed:
            yield Finding(place, "it was never committed", extra=True)
        elif problem := checkpoint_files.damage(stage_uri, ref):
            # An older one stands in for a damaged newest one, or for one whose best is damaged, and so costs steps;
            # damage to others costs nothing.
            yield Finding(place, f"the checkpoint is damaged: {problem}", extra=ref not in needed)


def _is_record(name: str) -> bool:
    return name.startswith("shards/") and name.endswith(".json")


def _is_object(body: bytes) -> bool:
    try:
        return isinstance(json.loads(body), dict)
    except ValueError:
        return False
