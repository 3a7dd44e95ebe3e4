"""Stage 5: the draft, trained, exported as a speculator, and served once before it counts."""

from __future__ import annotations

import asyncio
import logging
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from prefect import flow

from flows.config import PipelineConfig
from flows.prompts import heldout_rows
from flows.stage import Stages, StageWork, Summary, run_stage
from infra import manifest
from infra.drafts.smoke_serve import SmokeServe, smoke_prompts
from infra.drafts.vocab import FILE_NAME as VOCAB_FILE
from infra.errors import ServerError, StageFailed
from infra.extraction.config import resolve_layer_ids
from infra.manifest import Shard
from infra.tracking.trackers import check_trackers
from infra.verifiers.verifier import Verifier
from tasks.export import EXPORTED_FILES, Exported, commit_speculator, export_speculator
from tasks.smoke_serve import smoke_serve
from tasks.train import train_draft
from tasks.verifier import materialize_verifier

logger = logging.getLogger("draftsmith.train")

NOT_EXPORTED = "the speculator is not exported (train.smoke_serve: false would export it all the same)"
# A draft that is served as it was trained reaches most of what was predicted, on other prompts too.
EXPECTED_SHARE = 0.25


@flow(name="train", flow_run_name="train {config.root}")
async def train(config: PipelineConfig) -> Summary:
    """Train a draft and export it. Reads `hidden_states` and `vocab`, writes `drafts`."""
    return await run_stage(config, "drafts", plan_shards, make_draft)


def plan_shards(stages: Stages) -> list[Shard]:
    """One record for each exported file; every one rests on all hidden states and on the vocabulary."""
    hidden = manifest.read_plan(stages["hidden_states"].uri)
    names = (*(f"hidden_states/{shard.shard}" for shard in hidden), "vocab/00000")
    return [Shard(f"{index:05d}", names, {"file": file}) for index, file in enumerate(EXPORTED_FILES)]


async def make_draft(work: StageWork) -> dict[str, Any] | None:
    """Train, export, let vLLM serve the export once, and commit it. Returns what of that the manifest keeps."""
    if not work.state.missing:
        return None
    config, stage = work.config, work.stage
    check_trackers(config.train)
    verifier = await materialize_verifier(config.verifier)
    layers = await asyncio.to_thread(layers_of_states, work, verifier)
    inputs = await work.inputs()
    trusted = config.verifier.trust_remote_code
    await train_draft(stage, inputs, work.lease_epoch, config.train, verifier, layers, VOCAB_FILE, trusted)
    with tempfile.TemporaryDirectory(prefix="draftsmith-export-") as folder:
        exported = await export_speculator(
            stage, inputs, config.train, verifier, layers, VOCAB_FILE, trusted, Path(folder)
        )
        served = await served_once(work, verifier, exported) if config.train.smoke_serve else None
        await commit_speculator(stage, work.state.plan, inputs, exported)
    predicted = {"predicted_acceptance_length": exported.predicted_acceptance_length}
    return {"export": exported.said() | predicted, "smoke_serve": None if served is None else asdict(served)}


async def served_once(work: StageWork, verifier: Verifier, exported: Exported) -> SmokeServe:
    """Let vLLM serve the speculator.

    Raises:
        StageFailed: vLLM does not load it, or does not answer as the verifier alone would.
    """
    config = work.config
    prompts = smoke_prompts(await asyncio.to_thread(heldout_rows, work.stages["prompts"]))
    try:
        served = await smoke_serve(
            work.stage,
            exported.speculator,
            prompts,
            verifier,
            config.vllm,
            config.evaluate,
            config.train.smoke_serve_tie_nats,
            config.verifier.trust_remote_code,
        )
    except ServerError as error:
        raise StageFailed(f"{NOT_EXPORTED}: vLLM does not serve it. {error}") from error
    except StageFailed as error:
        raise StageFailed(f"{NOT_EXPORTED}: {error}") from error
    predicted = exported.predicted_acceptance_length
    if predicted is not None and served.acceptance_length - 1 < EXPECTED_SHARE * (predicted - 1):
        logger.warning(
            "The speculator's acceptance length is %.2f over %d requests, where %.2f was predicted. Other prompts "
            "may explain it; so may a draft that reads other layers, or another verifier, than in training.",
            served.acceptance_length,
            served.num_requests,
            predicted,
        )
    return served


def layers_of_states(work: StageWork, verifier: Verifier) -> tuple[int, ...]:
    """The layers whose states the draft is trained on, as their own manifest says; an old one does not."""
    states = manifest.read_manifest(work.stages["hidden_states"].uri) or {}
    stated = states.get("extraction", {}).get("layer_ids")
    return tuple(stated or resolve_layer_ids(work.config.extract, verifier))
