"""Measure the speculator against no speculation and n-gram, and write what came out."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE

from infra import manifest
from infra.evaluation.agreement import Parting, score_partings
from infra.evaluation.config import Draft, Note
from infra.evaluation.drafts import fetch_draft
from infra.evaluation.findings import DataFigures, main_rows
from infra.evaluation.losslessness import PromptScorer
from infra.evaluation.measurement import EvaluateConfig, EvaluationPrompt, Measurement, Slot, measure
from infra.evaluation.results import (
    acceptance_parquet,
    acceptance_rows,
    agreements,
    completed,
    request_notes,
    result_rows,
    results_parquet,
)
from infra.inference import CompletionClient
from infra.locations import cache_folder
from infra.manifest import Shard, ShardRecord, StageRef
from infra.promotion.gate import Decision, PromoteConfig, decide
from infra.promotion.pointer import Pointer
from infra.reports.plots import acceptance_png, context_png, history_png, speedup_png
from infra.reports.report import (
    ACCEPTANCE_PLOT,
    CONTEXT_PLOT,
    HISTORY_PLOT,
    SPEEDUP_PLOT,
    TRAINING_PLOT,
    Report,
    Served,
    report_markdown,
)
from infra.reports.training_plots import training_png, training_points
from infra.tables import read_table
from infra.vllm_server import VllmServer
from tasks.export import METRICS_FILE
from tasks.policy import in_thread, retried_task, with_clean_errors
from tasks.progress import StageProgress

RESULTS_FILE = "results.parquet"
ACCEPTANCE_FILE = "acceptance.parquet"
REPORT_FILE = "report.md"
PLOTS = (ACCEPTANCE_PLOT, SPEEDUP_PLOT, TRAINING_PLOT, CONTEXT_PLOT, HISTORY_PLOT)
FILES = (RESULTS_FILE, ACCEPTANCE_FILE, REPORT_FILE, *PLOTS)


@dataclass(frozen=True)
class Measured:
    """All that was measured.

    Attributes:
        gaps_nats: how nearly tokens tie where greedy answers part.
        notes: what is to be said of how it was taken.
    """

    measurements: Sequence[Measurement]
    gaps_nats: Mapping[Parting, float]
    notes: Sequence[Note]


@retried_task(name="fetch-speculator", run_name="fetch {draft.label}", timeout_seconds=3600)
@in_thread
def fetch_speculator(draft: Draft) -> Path:
    """The speculator as a local folder, every file checked against its record (of a foreign one: its hash).

    Raises:
        InputError: it is not there, or was changed since the run began.
        DamagedShard: a file is absent or is not what was committed.
    """
    folder = cache_folder() / "speculators" / draft.key
    fetch_draft(draft, folder)
    return folder


@task(
    name="measure",
    task_run_name="{slot} round {slot.round_index}",
    timeout_seconds=4 * 3600,
    cache_policy=NO_CACHE,
)
@with_clean_errors
async def measure_slot(
    server: VllmServer,
    client: CompletionClient,
    prompts: Sequence[EvaluationPrompt],
    slot: Slot,
    config: EvaluateConfig,
    dataset: str,
    progress: StageProgress,
) -> Measurement:
    """Run one way of decoding under one load for one round. A dead server is the flow's to mend."""
    measured = await measure(client, prompts, slot, config, server.counters, dataset=dataset)
    progress.advance()
    progress.detail(f"{slot}: {measured.output_tokens_per_second:.1f} tokens/s")
    return measured


@retried_task(name="score-differences", timeout_seconds=4 * 3600)
async def score_differences(
    server: VllmServer, measurements: Sequence[Measurement], config: EvaluateConfig
) -> dict[Parting, float]:
    """How nearly tokens tie where greedy answers part, by the server without speculation."""
    async with PromptScorer(server, config.request_timeout_seconds) as scorer:
        return await score_partings(scorer, agreements(measurements))


@retried_task(name="write-evaluation", timeout_seconds=3600)
@in_thread
def write_evaluation(
    stage: StageRef,
    plan: Sequence[Shard],
    inputs: Mapping[str, ShardRecord],
    config: EvaluateConfig,
    measured: Measured,
    served: Served,
    gate: PromoteConfig | None,
    pointer: Pointer,
) -> list[dict[str, Any]]:
    """Commit the tables, the report and its plots; returns the rows of the results.

    Args:
        gate, pointer: what the report says of promotion is held against these.
    """
    taken = measured.measurements
    rows = result_rows(
        taken, config, vllm_version=served.vllm_version, flags=served.flags, scored=measured.gaps_nats
    )
    groups = acceptance_rows(taken, config)
    longest = max(row["longest_tokens"] for row in rows)
    data = dataclasses.replace(data_figures(stage), evaluated_length_tokens=longest)
    notes = [*measured.notes, *request_notes(taken)]
    decision = gate_decision(rows, served.draft_key, gate, pointer)
    report = Report(rows, served, data, groups, notes, decision, pointer.history)
    bodies = {
        RESULTS_FILE: results_parquet(rows),
        ACCEPTANCE_FILE: acceptance_parquet(groups),
        REPORT_FILE: report_markdown(report).encode(),
        ACCEPTANCE_PLOT: acceptance_png(rows),
        SPEEDUP_PLOT: speedup_png(rows),
        TRAINING_PLOT: training_plot(stage.upstream_uri("drafts")),
        CONTEXT_PLOT: context_png(rows, groups),
        HISTORY_PLOT: history_png(pointer.history, main_rows(rows)),
    }
    counts = {RESULTS_FILE: len(rows), ACCEPTANCE_FILE: len(groups)}
    for shard in plan:
        name = shard.extra["file"]
        manifest.commit_shard(stage, shard, bodies[name], rows=counts.get(name, 0), status_counts={}, inputs=inputs)
    return rows


def gate_decision(
    rows: Sequence[Mapping[str, Any]], draft: str | None, gate: PromoteConfig | None, pointer: Pointer
) -> Decision | None:
    """What the gate says of the new draft against the one that is promoted, where that is another one."""
    if gate is None or draft is None:
        return None
    now = pointer.promoted
    return decide(rows, draft, gate, now.draft if now and now.draft != draft else None)


def training_plot(drafts_uri: str) -> bytes:
    """The loss plot of a trained draft, from the metrics kept with it."""
    records = {record.data: record for record in manifest.read_records(drafts_uri).values()}
    text = manifest.read_shard(drafts_uri, records[METRICS_FILE]).decode()
    return training_png(training_points(text), training_points(text, kind="validation"))


def data_figures(stage: StageRef) -> DataFigures:
    """What the draft was trained on, from the records of the stages before."""
    drafts_uri = stage.upstream_uri("drafts")
    drafts = manifest.StageRef(stage.root, "drafts", manifest.read_content(drafts_uri))
    hidden = list(manifest.read_records(drafts.upstream_uri("hidden_states")).values())
    (vocab,) = manifest.read_records(drafts.upstream_uri("vocab")).values()
    exported = next(iter(manifest.read_records(drafts_uri).values()))
    return DataFigures(
        num_tokens=sum(record.extra["num_tokens"] for record in hidden),
        num_trained_tokens=sum(record.extra["num_loss_tokens"] for record in hidden),
        vocabulary_coverage=vocab.extra["coverage"],
        draft_vocab_size=vocab.rows,
        verifier_vocab_size=vocab.extra["verifier_vocab_size"],
        num_training_steps=exported.extra["num_steps"],
        trained_length_tokens=max(record.extra["longest_tokens"] for record in hidden),
    )


def read_results(evaluations_uri: str) -> list[dict[str, Any]]:
    """The rows of a committed results.parquet, of an earlier version's too: the key may be the same."""
    records = {record.data: record for record in manifest.read_records(evaluations_uri).values()}
    return [completed(row) for row in read_table(evaluations_uri, records[RESULTS_FILE]).to_pylist()]


def read_report(evaluations_uri: str) -> str:
    """The text of a committed report.md."""
    records = {record.data: record for record in manifest.read_records(evaluations_uri).values()}
    return manifest.read_shard(evaluations_uri, records[REPORT_FILE]).decode()
