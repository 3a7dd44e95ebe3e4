"""Stage 5: the draft, trained and exported as a speculator."""

from __future__ import annotations

import asyncio

from prefect import flow

from flows.config import PipelineConfig
from flows.stage import Stages, StageWork, Summary, run_stage
from infra import manifest
from infra.extraction_config import resolve_layer_ids
from infra.manifest import Shard
from infra.trackers import check_trackers
from infra.verifier import Verifier
from infra.vocab import FILE_NAME as VOCAB_FILE
from tasks.export import EXPORTED_FILES, export_speculator
from tasks.train import train_draft
from tasks.verifier import materialize_verifier


@flow(name="train", flow_run_name="train {config.root}")
async def train(config: PipelineConfig) -> Summary:
    """Train a draft and export it. Reads `hidden_states` and `vocab`, writes `drafts`."""
    return await run_stage(config, "drafts", plan_shards, make_draft)


def plan_shards(stages: Stages) -> list[Shard]:
    """One record for each exported file; every one rests on all hidden states and on the vocabulary."""
    hidden = manifest.read_plan(stages["hidden_states"].uri)
    names = (*(f"hidden_states/{shard.shard}" for shard in hidden), "vocab/00000")
    return [Shard(f"{index:05d}", names, {"file": file}) for index, file in enumerate(EXPORTED_FILES)]


async def make_draft(work: StageWork) -> None:
    if not work.state.missing:
        return
    config, stage = work.config, work.stage
    check_trackers(config.train)
    verifier = await materialize_verifier(config.verifier)
    layers = await asyncio.to_thread(layers_of_states, work, verifier)
    inputs = await work.inputs()
    trusted = config.verifier.trust_remote_code
    await train_draft(stage, inputs, work.lease_epoch, config.train, verifier, layers, VOCAB_FILE, trusted)
    await export_speculator(stage, work.state.plan, inputs, config.train, verifier, layers, VOCAB_FILE, trusted)


def layers_of_states(work: StageWork, verifier: Verifier) -> tuple[int, ...]:
    """The layers whose states the draft is trained on, as their own manifest says; an old one does not."""
    states = manifest.read_manifest(work.stages["hidden_states"].uri) or {}
    stated = states.get("extraction", {}).get("layer_ids")
    return tuple(stated or resolve_layer_ids(work.config.extract, verifier))
