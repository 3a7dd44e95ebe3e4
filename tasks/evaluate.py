"""Measure the speculator against no speculation and n-gram, and write what came out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE

from infra import manifest, storage
from infra.evaluation import EvaluateConfig, EvaluationPrompt, Measurement, Slot, measure
from infra.evaluation_results import result_rows, results_parquet
from infra.findings import DataFigures
from infra.inference import CompletionClient
from infra.locations import cache_folder
from infra.manifest import Shard, ShardRecord, StageRef
from infra.plots import acceptance_png, speedup_png, training_png, training_points
from infra.report import ACCEPTANCE_PLOT, SPEEDUP_PLOT, TRAINING_PLOT, Report, Served, report_markdown
from infra.tables import read_table
from infra.vllm_server import VllmServer
from tasks.export import EXPORT_FOLDER, METRICS_FILE
from tasks.policy import in_thread, retried_task
from tasks.progress import StageProgress

RESULTS_FILE = "results.parquet"
REPORT_FILE = "report.md"
FILES = (RESULTS_FILE, REPORT_FILE, ACCEPTANCE_PLOT, SPEEDUP_PLOT, TRAINING_PLOT)


@retried_task(name="fetch-speculator", run_name="fetch speculator {drafts_uri}", timeout_seconds=3600)
@in_thread
def fetch_speculator(drafts_uri: str, records: Sequence[ShardRecord]) -> Path:
    """The exported speculator as a local folder, every file checked against its record.

    Raises:
        DamagedShard: a file is absent or is not what was committed.
    """
    folder = cache_folder() / "speculators" / drafts_uri.rstrip("/").rsplit("/", 1)[-1]
    folder.mkdir(parents=True, exist_ok=True)
    for record in records:
        if not record.data.startswith(f"{EXPORT_FOLDER}/"):
            continue
        path = folder / record.data.removeprefix(f"{EXPORT_FOLDER}/")
        if not path.exists() or storage.sha256(str(path)) != record.sha256:
            manifest.fetch_shard(drafts_uri, record, path)
    return folder


@task(
    name="measure",
    task_run_name="{slot.method} x{slot.concurrency} round {slot.round_index}",
    timeout_seconds=4 * 3600,
    cache_policy=NO_CACHE,
)
async def measure_slot(
    server: VllmServer,
    client: CompletionClient,
    prompts: Sequence[EvaluationPrompt],
    slot: Slot,
    config: EvaluateConfig,
    dataset: str,
    progress: StageProgress,
) -> Measurement:
    """Run one method under one load for one round. A dead server is the flow's to mend, with all its rounds."""
    measured = await measure(client, prompts, slot, config, server.counters, dataset=dataset)
    progress.advance()
    progress.detail(f"{slot.method} x{slot.concurrency}: {measured.output_tokens_per_second:.1f} tokens/s")
    return measured


@retried_task(name="write-evaluation", timeout_seconds=3600)
@in_thread
def write_evaluation(
    stage: StageRef,
    plan: Sequence[Shard],
    inputs: Mapping[str, ShardRecord],
    config: EvaluateConfig,
    measurements: Sequence[Measurement],
    served: Served,
) -> list[dict[str, Any]]:
    """Commit results.parquet, the report and its plots; returns the rows of the results."""
    rows = result_rows(
        measurements, config, draft_key=served.draft_key, vllm_version=served.vllm_version, flags=served.flags
    )
    bodies = {
        RESULTS_FILE: results_parquet(rows),
        REPORT_FILE: report_markdown(Report(rows, served, data=data_figures(stage, measurements))).encode(),
        ACCEPTANCE_PLOT: acceptance_png(rows),
        SPEEDUP_PLOT: speedup_png(rows),
        TRAINING_PLOT: training_plot(stage.upstream_uri("drafts")),
    }
    for shard in plan:
        name = shard.extra["file"]
        count = len(rows) if name == RESULTS_FILE else 0
        manifest.commit_shard(stage, shard, bodies[name], rows=count, status_counts={}, inputs=inputs)
    return rows


def training_plot(drafts_uri: str) -> bytes:
    """The loss plot of a trained draft, from the metrics kept with it."""
    records = {record.data: record for record in manifest.read_records(drafts_uri).values()}
    text = manifest.read_shard(drafts_uri, records[METRICS_FILE]).decode()
    return training_png(training_points(text), training_points(text, kind="validation"))


def data_figures(stage: StageRef, measurements: Sequence[Measurement]) -> DataFigures:
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
    """The rows of a committed results.parquet."""
    records = {record.data: record for record in manifest.read_records(evaluations_uri).values()}
    return read_table(evaluations_uri, records[RESULTS_FILE]).to_pylist()  # type: ignore[no-any-return]


def read_report(evaluations_uri: str) -> str:
    """The text of a committed report.md."""
    records = {record.data: record for record in manifest.read_records(evaluations_uri).values()}
    return manifest.read_shard(evaluations_uri, records[REPORT_FILE]).decode()
