"""Which stages of a root are referred to: by runs, by promoted speculators, and by the stages that read them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable

from infra import storage
from infra.shards import load_object

KEY = re.compile(r"\b[0-9a-f]{16}\b")

Place = tuple[str, str]  # stage and key


def unreferenced(
    root: str, names: Iterable[str], stages: Iterable[Place], removable: set[Place], notes: list[str]
) -> set[Place]:
    """Those of the removable stages that no run, no promoted speculator and no stage that is kept refers to.

    Args:
        names: every object of the root.
        stages: every stage of the root.
        notes: gets a line for what cannot be known; nothing is unreferenced then.
    """
    keys = _referenced_keys(root, names, notes)
    if keys is None:
        return set()
    free = {place for place in removable if place[1] not in keys}
    looked_at: set[Place] = set()
    while waiting := set(stages) - free - looked_at:
        for place in waiting:
            looked_at.add(place)
            keys_read = _read_by(root, place)
            if keys_read is None:
                notes.append(
                    f"the plan of {'/'.join(place)} cannot be read, so no stage is removed: it may need them"
                )
                return set()
            free = {other for other in free if other[1] not in keys_read}
    return free


def _referenced_keys(root: str, names: Iterable[str], notes: list[str]) -> set[str] | None:
    """Every key that a run or a promoted speculator mentions; None when one of them cannot be read."""
    said_by = [
        name
        for name in names
        if (name.startswith("runs/") and name.endswith(".json"))
        or (name.startswith("speculators/") and name.endswith("/promoted.json"))
    ]
    bodies = storage.get_many(storage.join(root, name) for name in said_by)
    keys: set[str] = set()
    for name in said_by:
        body = bodies.get(storage.join(root, name))
        said = load_object(body) if body is not None else None
        mentioned = set(KEY.findall(json.dumps(said)))
        if said is None or not mentioned:
            notes.append(f"{name} cannot be read, so no stage is removed: it may refer to any of them")
            return None
        keys |= mentioned
    return keys


def _read_by(root: str, place: Place) -> set[str] | None:
    """Keys of the stages that this one reads, or whose rows it keeps; None when its plan cannot be read."""
    uri = storage.join(root, *place, "plan.json")
    plan = load_object(storage.get_many([uri]).get(uri, b""))
    return set(KEY.findall(json.dumps(plan["content"]))) if plan and "content" in plan else None
