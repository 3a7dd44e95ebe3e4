"""The whole pipeline: prompts -> responses -> hidden states -> vocabulary -> draft -> evaluation -> promotion."""

from __future__ import annotations

import logging
from typing import Any, Literal

from prefect import flow

from flows.config import PipelineConfig
from flows.evaluate import evaluate
from flows.extract import extract
from flows.generate import generate
from flows.lineage import lineage
from flows.notices import tell_promotion
from flows.outcome import publish_outcome
from flows.prompts import prompts
from flows.stage import Summary, redo_damaged_shards
from flows.train import train
from flows.vocab import vocab
from infra.verifiers.verifier import verifier_name
from tasks.promote import promote_draft

logger = logging.getLogger("draftsmith.promotion")

STAGE_FLOWS = {
    "prompts": prompts,
    "responses": generate,
    "hidden_states": extract,
    "vocab": vocab,
    "drafts": train,
    "evaluations": evaluate,
}
StageName = Literal["prompts", "responses", "hidden_states", "vocab", "drafts", "evaluations"]


@flow(name="speculator-pipeline", flow_run_name="speculator-pipeline {config.root}")
async def speculator_pipeline(config: PipelineConfig, until: StageName = "evaluations") -> dict[str, Any]:
    """Train and measure a draft for the config's verifier, and promote it where it passes the config's gate; every
    stage reuses what is already there.

    Args:
        until: the last stage to make.

    Raises:
        InputError: among others, where a stage could not use the config when its turn came.
    """
    async with lineage(config, until) as run:
        run.stages = await run_stages(config, until)
        if config.promote is not None and until == "evaluations":
            verifier = verifier_name(config.verifier)
            run.promotion = await promote_draft(config.root, verifier, run.keys, config.promote, run.run_id)
            logger.info("%s", run.promotion)
            tell_promotion(verifier, promoted=run.promotion.promoted, said=str(run.promotion))
        return await publish_outcome(run)


@redo_damaged_shards
async def run_stages(config: PipelineConfig, until: StageName) -> list[Summary]:
    names = list(STAGE_FLOWS)
    return [await STAGE_FLOWS[name](config) for name in names[: names.index(until) + 1]]
