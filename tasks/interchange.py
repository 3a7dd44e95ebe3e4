"""One shard out of a speculators data folder: its responses, or its hidden states."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from infra import manifest
from infra.extraction.rows import build_shard, samples_of
from infra.generation.responses import status_counts, to_parquet
from infra.hidden_states import HiddenStatesMeta
from infra.interchange.folder import DataFolder
from infra.interchange.importing import ImportConfig, import_results, response_rows
from infra.manifest import Shard, ShardRecord, StageRef
from infra.state_checks.checks import StateChecks
from infra.tables import read_input
from tasks.policy import in_thread, retried_task
from tasks.progress import StageProgress


@retried_task(name="import-responses", run_name="import responses {shard.shard}")
@in_thread
def import_responses(
    stage: StageRef, shard: Shard, folder: DataFolder, config: ImportConfig, progress: StageProgress
) -> ShardRecord:
    """Commit the folder's rows of one shard as responses."""
    rows = response_rows(folder, config, *shard.extra["rows"])
    counts = status_counts(rows)
    record = manifest.commit_shard(stage, shard, to_parquet(rows), rows=len(rows), status_counts=counts, inputs={})
    progress.advance()
    return record


@retried_task(name="import-states", run_name="import states {shard.shard}")
async def import_states(
    stage: StageRef,
    shard: Shard,
    inputs: Mapping[str, ShardRecord],
    folder: DataFolder,
    start: int,
    meta: HiddenStatesMeta,
    checks: StateChecks,
    progress: StageProgress,
) -> ShardRecord:
    """Check and commit the states of one shard of imported responses, one row for each.

    Args:
        start: the shard's first row in the folder.
    """
    record = await asyncio.to_thread(_import_states, stage, shard, inputs, folder, start, meta, checks)
    progress.advance()
    return record


def _import_states(
    stage: StageRef,
    shard: Shard,
    inputs: Mapping[str, ShardRecord],
    folder: DataFolder,
    start: int,
    meta: HiddenStatesMeta,
    checks: StateChecks,
) -> ShardRecord:
    responses = read_input(stage, shard, inputs[shard.inputs[0]])
    index_of = {name: start + place for place, name in enumerate(responses["sample_id"].to_pylist())}
    samples = ((index_of[sample.sample_id], sample) for sample in samples_of(responses))
    built = build_shard(responses, import_results(folder, samples, meta.layer_ids), meta, checks)
    return manifest.commit_shard(
        stage,
        shard,
        built.data,
        rows=built.rows,
        status_counts=built.status_counts,
        inputs=inputs,
        extra=built.extra,
    )
