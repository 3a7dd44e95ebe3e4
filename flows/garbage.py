"""`draftsmith gc` as a deployment: what of a root nobody needs any more, as a table in the UI."""

from __future__ import annotations

import asyncio
from typing import Any, cast

from prefect import flow
from prefect.artifacts import acreate_table_artifact
from prefect.states import Completed

from flows.config import PipelineConfig
from flows.credentials import use_credentials
from flows.gc import is_root
from flows.plain_errors import show_plain_errors
from infra.garbage import Item, remove, survey


@flow(name="gc", flow_run_name="gc {config.root}")
async def gc(config: PipelineConfig, delete: bool = False, complete_stages: bool = False) -> dict[str, Any]:
    """List what of the config's root nobody needs any more, and remove it when told so.

    Args:
        config: only its root and credentials are looked at.
        delete: remove what is listed; without it nothing changes.
        complete_stages: also complete stages that no run refers to.
    """
    show_plain_errors()
    await use_credentials(config)
    if not await asyncio.to_thread(is_root, config.root):
        return _ended("Empty", f"{config.root} holds no stage and no run", items=0, size_bytes=0, deleted=0)
    found = await asyncio.to_thread(survey, config.root, complete_stages=complete_stages)
    gone: list[Item] = []
    if delete:
        removed = remove(config.root, found, complete_stages=complete_stages)
        gone = await asyncio.to_thread(list, removed)
    rows = [{"where": item.where, "reason": item.reason, "size_bytes": item.size_bytes} for item in found.items]
    notes = "\n".join(f"- {note}" for note in found.notes)
    await acreate_table_artifact(rows, key="garbage", description=f"Garbage of {config.root}\n\n{notes}")
    told = f"{len(rows)} items of {found.size_bytes:,} bytes, {len(gone)} of them removed"
    return _ended("Completed", told, items=len(rows), size_bytes=found.size_bytes, deleted=len(gone))


def _ended(name: str, message: str, **data: int) -> dict[str, Any]:
    return cast(dict[str, Any], Completed(name=name, message=message, data=data))
