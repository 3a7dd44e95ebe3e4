"""Stage 1: the prompts, split once into train and heldout."""

from __future__ import annotations

from prefect import flow

from flows.config import PipelineConfig
from flows.stage import Summary, close_stage, inspect, resolve_stages, reused
from tasks.prompts import write_prompts


@flow(name="prompts", flow_run_name="prompts {config.root}")
async def prompts(config: PipelineConfig) -> Summary:
    """Write the prompts of the config's sources. Reads nothing but the sources."""
    stage = (await resolve_stages(config))["prompts"]
    state = await inspect(stage)
    if state.complete:
        return reused(stage, state)
    extra = await write_prompts(stage, config.prompts)
    return await close_stage(stage, extra=extra)
