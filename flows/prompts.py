"""Stage 1: the prompts, split once into train and heldout."""

from __future__ import annotations

from typing import Any

from prefect import flow

from flows.config import PipelineConfig
from flows.stage import StageWork, Summary, run_stage
from tasks.prompts import write_prompts


@flow(name="prompts", flow_run_name="prompts {config.root}")
async def prompts(config: PipelineConfig) -> Summary:
    """Write the prompts of the config's sources; the verifier's tokenizer counts them where that is asked for."""
    return await run_stage(config, "prompts", None, make_prompts)


async def make_prompts(work: StageWork) -> dict[str, Any]:
    return await write_prompts(work.stage, work.config.prompts, work.config.verifier)
