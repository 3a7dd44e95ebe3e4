"""Where a run that is put back after each crash stops.

A Crashed run goes back in the queue by itself (deployments/automations/), as the same flow run. One that crashes
again and again without committing anything would do so for ever: its own start counts that, and fails. Failed runs
are not put back.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Mapping
from typing import Any

from prefect.context import FlowRunContext

from flows.config import PipelineConfig
from infra import storage
from infra.errors import StageFailed
from infra.manifest import StageRef

# However much each attempt commits: a node that dies this often in one run is for a person to look at.
MAX_ATTEMPTS = 100

_RECORD = re.compile(r"shards/\d+\.json")
_CHECKPOINT = re.compile(r"checkpoints/.*step-(\d+)/COMMITTED\.json")


async def refuse_crash_loop(config: PipelineConfig, stages: Mapping[str, StageRef]) -> None:
    """Count this attempt of a deployment's run; does nothing in other runs, or in a stage within a pipeline.

    Raises:
        StageFailed: it is one attempt too many.
    """
    context = FlowRunContext.get()
    run = context.flow_run if context else None
    if run is None or run.deployment_id is None:
        return
    if run.run_count > MAX_ATTEMPTS:
        raise StageFailed(
            f"this run has been started {run.run_count} times and is not put back once more; "
            "see in the Prefect UI why it crashes, then start a new run: it goes on from what is committed"
        )
    await asyncio.to_thread(count_attempt, config, stages, str(run.id))


def count_attempt(config: PipelineConfig, stages: Mapping[str, StageRef], run_id: str) -> None:
    """Remember how far this attempt found the stages, and how many before it found the same.

    Effects: writes `<root>/attempts/<run id>.json`.

    Raises:
        StageFailed: `max_idle_attempts` attempts in a row have committed nothing new.
    """
    uri = storage.join(config.root, "attempts", f"{run_id}.json")
    found, before = committed(stages), _read(uri)
    idle = int(before["idle_attempts"]) + 1 if before.get("committed") == found else 0
    storage.put(uri, json.dumps({"run_id": run_id, "committed": found, "idle_attempts": idle}).encode())
    if idle >= config.max_idle_attempts:
        raise StageFailed(
            f"the last {idle} attempts of this run died and committed nothing, so it is not put back once more. "
            "The logs on the nodes that ran it say what killed them (memory, disk, a driver?); when that is "
            "mended, start a new run with the same config: it goes on from what is committed"
        )


def committed(stages: Mapping[str, StageRef]) -> dict[str, int]:
    """For each stage the number of its shard records plus the step of its newest checkpoint: one listing each."""
    return {name: _progress(storage.list_sizes(stage.uri)) for name, stage in stages.items()}


def _progress(listing: Mapping[str, int]) -> int:
    steps = [int(found[1]) for path in listing if (found := _CHECKPOINT.fullmatch(path))]
    return sum(bool(_RECORD.fullmatch(path)) for path in listing) + max(steps, default=0)


def _read(uri: str) -> dict[str, Any]:
    """What the attempt before has left; nothing when there was none, or it cannot be read."""
    body = storage.get_many([uri]).get(uri, b"")
    try:
        found = json.loads(body)
        return found if isinstance(found["idle_attempts"], int) else {}
    except (ValueError, KeyError, TypeError):
        return {}
