"""What of an artifact root nobody needs any more, and its removal.

Garbage is: an object of a stage that no record names; a checkpoint that newer ones have replaced; a stage that no
run refers to; what killed writes have left in a local folder. Never: what a manifest names, what is younger than
`KEPT_SECONDS`, what is under a lease. Where it cannot be known, nothing is garbage: a run that cannot be read may
refer to every stage.

Removing a stage's garbage takes that stage's lease first and looks anew, so that it meets no run.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from infra import manifest, storage
from infra.leases import DEFAULT_TIMING, Lease, Timing, Waiter, current, lease_name, lease_uri
from infra.records import ShardRecord
from infra.references import KEY, Place, unreferenced
from infra.schemas import STAGES
from infra.shards import load_object
from infra.storage import ObjectInfo
from infra.training import checkpoint_files

logger = logging.getLogger("draftsmith.garbage")

KEPT_SECONDS = 24 * 3600.0
# A holder renews its lease every few seconds; clocks of machines and stores differ by less than this.
LIVE_LEASE_SECONDS = 3600.0

Listing = Mapping[str, ObjectInfo]


@dataclass(frozen=True)
class Item:
    """One thing to remove.

    Args:
        where: what it is, relative to the root.
        objects: names relative to the root, in the order of removal: first what makes the others count.
        stage: the stage it lies in; None for what lies in none.
        whole: it is all of that stage.
    """

    where: str
    reason: str
    size_bytes: int
    objects: tuple[str, ...]
    stage: Place | None
    whole: bool = False


@dataclass
class Survey:
    """What was found. `notes` say what was left alone, and why."""

    items: list[Item] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def size_bytes(self) -> int:
        return sum(item.size_bytes for item in self.items)


def survey(root: str, *, complete_stages: bool = False, now: float | None = None) -> Survey:
    """Find the garbage of a root; changes nothing.

    Args:
        complete_stages: complete stages that no run refers to are garbage too.
        now: seconds since the epoch; the present by default.
    """
    now = time.time() if now is None else now
    listing, found = storage.list_objects(root), Survey()
    stages = _stages(listing)
    live = {place for place in stages if _is_live(root, place, listing, now)}
    found.notes += [f"{stage}/{key} is under a lease; it is left alone" for stage, key in sorted(live)]
    free = _unneeded(root, listing, stages, live, complete_stages, now, found.notes)
    for place, objects in sorted(stages.items()):
        if place in free:
            found.items.append(_whole_stage(place, objects))
        elif place not in live:
            found.items += [
                item for item in _within(root, place, objects, found.notes) if _is_old(item, listing, now)
            ]
    found.items += _partials(root, live, now)
    return found


def remove(
    root: str,
    found: Survey,
    *,
    complete_stages: bool = False,
    now: float | None = None,
    timing: Timing = DEFAULT_TIMING,
) -> Iterator[Item]:
    """Remove the items of a survey that still are garbage, one stage after the other; yields what is gone."""
    now = time.time() if now is None else now
    by_stage: dict[Place | None, list[Item]] = defaultdict(list)
    for item in found.items:
        by_stage[item.stage].append(item)
    for place, items in by_stage.items():
        with contextlib.ExitStack() as stack:
            if place is not None:
                lease = _take(root, place, timing)
                if lease is None:
                    logger.warning("%s/%s is being worked on now; it is left alone.", *place)
                    continue
                stack.callback(lease.release)
                items = _still_garbage(root, place, items, complete_stages, now)
            for item in items:
                for name in item.objects:
                    storage.delete(storage.join(root, name))
                yield item
            if place is not None:
                _remove_empty_folders(storage.join(root, *place), before=math.inf)  # nobody writes there now
    for stage in STAGES:
        _remove_empty_folders(storage.join(root, stage), before=now - KEPT_SECONDS)


def _still_garbage(root: str, place: Place, items: list[Item], complete_stages: bool, now: float) -> list[Item]:
    """Those of the items that a new look finds again, now that the stage's lease is ours."""
    listing, notes = storage.list_objects(root), list[str]()
    stages = _stages(listing)
    objects = stages.get(place, {})
    live = {other for other in stages if other != place and _is_live(root, other, listing, now)}
    whole = place in _unneeded(root, listing, stages, live, complete_stages, now, notes)
    again = [_whole_stage(place, objects)] if whole else list(_within(root, place, objects, notes))
    known = {(item.where, item.whole) for item in items}
    kept = [item for item in again if (item.where, item.whole) in known and _is_old(item, listing, now)]
    # Hidden files are in no listing; under the lease nobody writes them any more.
    return kept + [item for item in items if item.reason == PARTIAL]


# --- whole stages ---


def _unneeded(
    root: str,
    listing: Listing,
    stages: Mapping[Place, Listing],
    live: set[Place],
    complete_stages: bool,
    now: float,
    notes: list[str],
) -> set[Place]:
    """Stages that nothing refers to, nobody works on, and nobody has written to for a while."""
    old = {place for place, objects in stages.items() if all(_is_old_object(one, now) for one in objects.values())}
    free = unreferenced(root, listing, stages, old - live, notes)
    finished = {place for place in free if "manifest.json" in stages[place]}
    unknown = {place for place in finished if manifest.read_manifest(storage.join(root, *place)) is None}
    if unknown:
        notes += [
            f"the manifest of {'/'.join(place)} cannot be read; the stage is kept" for place in sorted(unknown)
        ]
        free = unreferenced(root, listing, stages, free - unknown, [])
        finished &= free
    if not finished or complete_stages:
        return free
    notes.append(f"{len(finished)} complete stages that no run refers to are kept; --complete-stages removes them")
    # What they were made from stays with them.
    return unreferenced(root, listing, stages, free - finished, [])


def _whole_stage(place: Place, objects: Listing) -> Item:
    def order(name: str) -> tuple[int, str]:
        if name == "manifest.json":
            return 0, name
        if name.rpartition("/")[2] == checkpoint_files.COMMIT_FILE:
            return 1, name
        if name.startswith("shards/") and name.endswith(".json"):
            return 2, name
        return (4 if name == "plan.json" else 3), name  # with its plan gone, nobody would know what the rest is

    state = "complete" if "manifest.json" in objects else "unfinished"
    return _item(place, "", f"{state} stage that no run refers to", sorted(objects, key=order), objects, whole=True)


# --- what a stage that stays does not need ---


def _within(root: str, place: Place, objects: Listing, notes: list[str]) -> Iterator[Item]:
    where, stage_uri = "/".join(place), storage.join(root, *place)
    if not manifest.read_plan(stage_uri):
        notes.append(f"the plan of {where} cannot be read, so nothing in it is removed")
        return
    stated = manifest.read_manifest(stage_uri)
    if stated is None and "manifest.json" in objects:
        notes.append(f"the manifest of {where} cannot be read, so nothing in it is removed")
        return
    copies = list(manifest.records_of(stated).values()) if stated else []
    unnamed = manifest.unnamed(objects, copies)
    if unnamed:  # most complete stages have none, and their thousands of records need no reading
        unnamed = manifest.unnamed(unnamed, _all_records(stage_uri, objects))
    for name in unnamed:
        yield _item(place, name, "no record names it", [name], objects)
    yield from _checkpoints(root, place, objects, stated is not None, notes)


def _all_records(stage_uri: str, objects: Iterable[str]) -> Iterator[ShardRecord]:
    """Every record file that can be read, those of no planned shard too."""
    names = [name for name in objects if name.startswith("shards/") and name.endswith(".json")]
    for body in storage.get_many(storage.join(stage_uri, name) for name in names).values():
        with contextlib.suppress(KeyError, TypeError):
            yield ShardRecord.from_json(load_object(body) or {})


def _checkpoints(root: str, place: Place, objects: Listing, complete: bool, notes: list[str]) -> Iterator[Item]:
    """All but the newest, two of them while training goes on, and the best that they name. Of a complete stage one
    stays (or the last and the best), from which a damaged export is made again without training anew."""
    prefix = f"{checkpoint_files.FOLDER}/"
    folders = checkpoint_files.folders(name.removeprefix(prefix) for name in objects if name.startswith(prefix))
    committed = [ref for ref, files in folders.items() if checkpoint_files.COMMIT_FILE in files]
    newest = committed[: 1 if complete else checkpoint_files.KEPT_CHECKPOINTS]
    try:
        kept = checkpoint_files.with_their_best(storage.join(root, *place), newest)
    except (FileNotFoundError, ValueError):
        notes.append(f"a newest checkpoint of {'/'.join(place)} cannot be read, so no other of its is removed")
        return
    for ref, files in folders.items():
        if ref not in kept:
            reason = "superseded checkpoint" if ref in committed else "checkpoint that was never committed"
            ordered = sorted(files, key=lambda name: (name != checkpoint_files.COMMIT_FILE, name))
            folder = prefix + ref.folder
            yield _item(place, folder, reason, [f"{folder}/{name}" for name in ordered], objects)


# --- what killed writes left ---

PARTIAL = "left by a write that was killed"


def _partials(root: str, live: set[Place], now: float) -> Iterator[Item]:
    """Hidden files of a local root; a store of objects has none."""
    folder = _local(root)
    if folder is None:
        return
    for path in sorted(folder.rglob(".*.partial")):
        with contextlib.suppress(FileNotFoundError):
            stat, name = path.stat(), path.relative_to(folder).as_posix()
            parts = name.split("/")
            place = (parts[0], parts[1]) if len(parts) > 2 and parts[0] in STAGES else None
            if place not in live and _is_old_object(ObjectInfo(stat.st_size, stat.st_mtime), now):
                yield Item(name, PARTIAL, stat.st_size, (name,), place)


def _remove_empty_folders(uri: str, before: float) -> None:
    """Remove folders below and at `uri` that hold nothing and were last written to before that time.

    A store of objects has no folders.
    """
    top = _local(uri)
    if top is None:
        return
    # Seen before any is removed: a removal is a write to the folder above.
    old = [parent for parent, _, _ in os.walk(top) if os.path.getmtime(parent) < before]
    for folder in reversed(old):
        with contextlib.suppress(OSError):  # not empty
            os.rmdir(folder)


# --- small things ---


def _stages(listing: Listing) -> dict[Place, dict[str, ObjectInfo]]:
    """The objects of each stage's folder, by their names within it."""
    found: dict[Place, dict[str, ObjectInfo]] = defaultdict(dict)
    for name, info in listing.items():
        stage, _, rest = name.partition("/")
        key, _, inside = rest.partition("/")
        if stage in STAGES and KEY.fullmatch(key) and inside:
            found[stage, key][inside] = info
    return dict(found)


def _is_live(root: str, place: Place, listing: Listing, now: float) -> bool:
    name = lease_name(*place)
    info = listing.get(f"leases/{name}.json")
    if info is None or now - info.modified_at > LIVE_LEASE_SECONDS:
        return False
    held = current(lease_uri(root, name))
    return held is None or not held.released


def _take(root: str, place: Place, timing: Timing) -> Lease | None:
    """The stage's lease; None when its holder lives. One that died without releasing it is waited for."""
    waiter = Waiter(root, lease_name(*place), timing=timing)
    deadline = time.monotonic() + timing.takeover_seconds + 2 * timing.poll_seconds
    while (lease := waiter.try_take()) is None and time.monotonic() < deadline:
        time.sleep(timing.poll_seconds)
    return lease


def _item(
    place: Place, name: str, reason: str, objects: Iterable[str], infos: Listing, whole: bool = False
) -> Item:
    names = list(objects)
    size_bytes = sum(infos[each].size_bytes for each in names)
    folder = "/".join(place)
    return Item(
        storage.join(folder, name), reason, size_bytes, tuple(f"{folder}/{each}" for each in names), place, whole
    )


def _is_old(item: Item, listing: Listing, now: float) -> bool:
    return all(name in listing and _is_old_object(listing[name], now) for name in item.objects)


def _is_old_object(info: ObjectInfo, now: float) -> bool:
    return now - info.modified_at > KEPT_SECONDS


def _local(root: str) -> Path | None:
    return None if root.startswith("s3://") else Path(root.removeprefix("file://"))
