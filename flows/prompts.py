"""Stage 1: the prompts, split once into train and heldout."""

from __future__ import annotations

from typing import Any

from prefect import flow

from flows.config import PipelineConfig
from flows.stage import StageWork, Summary, run_stage
from infra import manifest
from infra.manifest import StageRef
from infra.prompts.samples import HELDOUT
from infra.tables import read_table
from tasks.prompts import write_prompts


@flow(name="prompts", flow_run_name="prompts {config.root}")
async def prompts(config: PipelineConfig) -> Summary:
    """Write the prompts of the config's sources; the verifier's tokenizer counts them where that is asked for."""
    return await run_stage(config, "prompts", None, make_prompts)


async def make_prompts(work: StageWork) -> dict[str, Any]:
    return await write_prompts(work.stage, work.config.prompts, work.config.verifier)


def heldout_rows(prompts: StageRef) -> list[dict[str, Any]]:
    """The held-out prompts that are there, rows of `schemas.PROMPTS`."""
    records = manifest.read_records(prompts.uri)
    planned = [shard.shard for shard in manifest.read_plan(prompts.uri) if shard.extra["split"] == HELDOUT]
    return [
        row for shard in planned if shard in records for row in read_table(prompts.uri, records[shard]).to_pylist()
    ]
