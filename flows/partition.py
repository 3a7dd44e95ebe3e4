"""Help on this node with a stage that another run makes: a partition run, one of those in `nodes.count`."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

from prefect import flow
from prefect.runtime import flow_run

from flows.config import PipelineConfig
from flows.credentials import use_credentials
from flows.extract import extract_missing
from flows.generate import answer_missing
from flows.plain_errors import show_plain_errors
from flows.resolve import resolve
from flows.run_names import name_run
from flows.stage import StageWork, inspect, refuse_absent_upstream
from infra.errors import InputError, StageFailed

MAKERS = {"responses": answer_missing, "hidden_states": extract_missing}
Shared = Literal["responses", "hidden_states"]


@flow(name="partition", flow_run_name="partition {stage} {config.root}")
async def partition(config: PipelineConfig, stage: Shared) -> dict[str, Any]:
    """Make shards of a stage beside other nodes, until none is free any more.

    It takes no lease of the stage and writes no manifest: that is for the run it helps. Nor is it put back when it
    has crashed: that run starts another one. It may also be started by hand, to add a node.

    Args:
        config: of the run that it helps; another one would make another stage.

    Raises:
        InputError: the config imports its states.
        StageFailed: no run has begun that stage, or a stage before it is not complete.
    """
    show_plain_errors()
    if config.import_states is not None:
        raise InputError("import_states", "an import is not shared; leave it out, or start no partition run")
    await use_credentials(config)
    stages = await asyncio.to_thread(resolve, config)
    await name_run(f"partition of {stage}", config, stages)
    whole = stages[stage]
    await asyncio.to_thread(refuse_absent_upstream, stages, whole)
    state = await inspect(whole)
    if not state.plan:
        raise StageFailed(f"{whole.uri} has not been begun; start the pipeline, or the stage's own deployment")
    if state.missing:
        name = str(flow_run.get_id())[:8]
        await MAKERS[stage](StageWork(config, stages, whole, state, lease_epoch=0, partition=name))
    return {"stage": stage, "key": whole.key, "uri": whole.uri}
