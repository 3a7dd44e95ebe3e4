"""`draftsmith gc ROOT`: list what of a root nobody needs any more, and remove it when told so."""

from __future__ import annotations

import argparse
import json
from typing import Any

from infra import storage
from infra.errors import InputError
from infra.garbage import Item, remove, survey
from infra.schemas import STAGES


def collect_garbage(options: argparse.Namespace) -> None:
    """Print a line for each item, with its size and why it is garbage, and the totals.

    Raises:
        InputError: it is no artifact root.
    """
    root: str = options.uri
    if not is_root(root):
        raise InputError(root, "is no artifact root: it holds no stage and no run")
    found = survey(root, complete_stages=options.complete_stages)
    gone: list[Item] = []
    if not options.json:
        for note in found.notes:
            print(f"NOTE {note}")
        for item in found.items:
            print(f"{item.size_bytes:14,} bytes  {item.where}: {item.reason}")
    if options.delete:
        gone += remove(root, found, complete_stages=options.complete_stages)
    if options.json:
        rows = [_row(item) for item in found.items]
        print(json.dumps({"items": rows, "notes": found.notes, "deleted": [item.where for item in gone]}))
        return
    removed = f"deleted={len(gone)} deleted_bytes={sum(item.size_bytes for item in gone)}"
    print(f"garbage={len(found.items)} garbage_bytes={found.size_bytes} {removed}")
    if found.items and not options.delete:
        print("Nothing was removed; add --delete for that.")


def is_root(root: str) -> bool:
    """Whether there is a stage or a run below it."""
    folders = {name.partition("/")[0] for name in storage.list_sizes(root)}
    return bool(folders & {*STAGES, "runs"})


def _row(item: Item) -> dict[str, Any]:
    return {
        "where": item.where,
        "reason": item.reason,
        "size_bytes": item.size_bytes,
        "objects": list(item.objects),
    }
