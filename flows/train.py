"""Stage 5: the draft, trained and exported as a speculator."""

from __future__ import annotations

import asyncio

from prefect import flow

from flows.config import PipelineConfig
from flows.stage import Summary, close_stage, open_stage, resolve_stages, reused
from infra import manifest
from infra.extraction import resolve_layer_ids
from infra.manifest import Shard, StageRef
from infra.vocab import FILE_NAME as VOCAB_FILE
from tasks.export import EXPORTED_FILES, export_speculator
from tasks.train import train_draft
from tasks.verifier import materialize_verifier


@flow(name="train", flow_run_name="train {config.root}")
async def train(config: PipelineConfig) -> Summary:
    """Train a draft and export it. Reads `hidden_states` and `vocab`, writes `drafts`."""
    stages = await resolve_stages(config)
    stage = stages["drafts"]
    state = await open_stage(stage, plan_shards(stages))
    if state.complete:
        return reused(stage, state)
    if state.missing:
        verifier = await materialize_verifier(config.verifier)
        layers = tuple(resolve_layer_ids(config.extract, verifier))
        inputs = await asyncio.to_thread(manifest.input_records, stage, state.plan)
        trusted = config.verifier.trust_remote_code
        await train_draft(stage, config.train, verifier, layers, VOCAB_FILE, trusted)
        await export_speculator(stage, state.plan, inputs, config.train, verifier, layers, VOCAB_FILE, trusted)
    return await close_stage(stage)


def plan_shards(stages: dict[str, StageRef]) -> list[Shard]:
    """One record for each exported file; every one rests on all hidden states and on the vocabulary."""
    hidden = manifest.read_plan(stages["hidden_states"].uri)
    names = (*(f"hidden_states/{shard.shard}" for shard in hidden), "vocab/00000")
    return [Shard(f"{index:05d}", names, {"file": file}) for index, file in enumerate(EXPORTED_FILES)]
