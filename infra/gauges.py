"""Prometheus gauges of a running stage, all named `draftsmith_*`.

They are in prometheus_client's default registry, which is what Prefect serves with PREFECT_CLIENT_METRICS_ENABLED.
deployments/monitoring/ holds a Grafana dashboard of them.
"""

from __future__ import annotations

import shutil
import subprocess
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from prometheus_client import REGISTRY, Gauge
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from infra.generation.progress import GenerationProgress
from infra.manifest import ShardRecord, StageRef

_LABELS = ("root", "stage", "key")

ROWS = Gauge("draftsmith_rows", "Rows there, by status (ok, truncated, failed)", (*_LABELS, "status"))
ROWS_LEFT = Gauge("draftsmith_rows_left", "Rows still to be made", _LABELS)
ROWS_PER_SECOND = Gauge("draftsmith_rows_per_second", "Rows finished, over the last minute", _LABELS)
TOKENS_PER_SECOND = Gauge(
    "draftsmith_tokens_per_second", "Tokens generated, extracted or trained, over the last minute or so", _LABELS
)
REQUESTS_RUNNING = Gauge("draftsmith_requests_running", "Requests in the servers' batches", _LABELS)
REQUESTS_WAITING = Gauge("draftsmith_requests_waiting", "Requests that wait for room in them", _LABELS)
KV_CACHE_USAGE = Gauge("draftsmith_kv_cache_usage", "Share (0 to 1) of the fullest key-value cache", _LABELS)
ETA_SECONDS = Gauge("draftsmith_eta_seconds", "Seconds until the last row, at the rate so far", _LABELS)
STEP = Gauge("draftsmith_step", "Optimizer steps done", _LABELS)
LOSS = Gauge("draftsmith_loss", "Training loss, over the last steps", _LABELS)
INPUT_WAIT_SECONDS = Gauge(
    "draftsmith_input_wait_seconds", "Seconds that training waited for data, of its last report's steps", _LABELS
)

_MOMENTARY = (
    ROWS_PER_SECOND,
    TOKENS_PER_SECOND,
    REQUESTS_RUNNING,
    REQUESTS_WAITING,
    KV_CACHE_USAGE,
    ETA_SECONDS,
)


def show_generation(stage: StageRef, progress: GenerationProgress) -> None:
    """Set every gauge of the stage; what is not known is left as it was."""
    labels = _labels(stage)
    for status, count in progress.rows_by_status.items():
        ROWS.labels(*labels, status).set(count)
    ROWS_LEFT.labels(*labels).set(progress.num_rows - progress.rows_done)
    ROWS_PER_SECOND.labels(*labels).set(progress.rows_per_second)
    TOKENS_PER_SECOND.labels(*labels).set(progress.tokens_per_second_now)
    if progress.eta_seconds is not None:
        ETA_SECONDS.labels(*labels).set(progress.eta_seconds)
    if progress.servers is not None:
        REQUESTS_RUNNING.labels(*labels).set(progress.servers.num_requests_running)
        REQUESTS_WAITING.labels(*labels).set(progress.servers.num_requests_waiting)
        if progress.servers.kv_cache_usage is not None:
            KV_CACHE_USAGE.labels(*labels).set(progress.servers.kv_cache_usage)


def show_extraction(
    stage: StageRef, records: Iterable[ShardRecord], num_rows: int, tokens_per_second: float | None
) -> None:
    """Set the gauges of a stage of hidden states.

    Args:
        records: of the shards that are committed.
        num_rows: of the whole stage.
        tokens_per_second: None while it is not known.
    """
    labels, rows = _labels(stage), Counter[str]()
    for record in records:
        rows.update(record.status_counts)
    for status, count in rows.items():
        ROWS.labels(*labels, status).set(count)
    ROWS_LEFT.labels(*labels).set(num_rows - rows.total())
    if tokens_per_second is not None:
        TOKENS_PER_SECOND.labels(*labels).set(tokens_per_second)


def show_training(stage: StageRef, said: Mapping[str, Any]) -> None:
    """Set the gauges of training from one of the trainer's reports."""
    labels = _labels(stage)
    STEP.labels(*labels).set(said["step"])
    LOSS.labels(*labels).set(said["loss"])
    TOKENS_PER_SECOND.labels(*labels).set(said["tokens_per_second"])
    INPUT_WAIT_SECONDS.labels(*labels).set(said["input_wait_seconds"])


class GpuMemory(Collector):
    """Memory of this node's GPUs, asked of nvidia-smi whenever somebody reads the gauges."""

    def collect(self) -> Iterator[GaugeMetricFamily]:
        used = GaugeMetricFamily("draftsmith_gpu_memory_used_bytes", "Memory in use, by GPU", labels=["gpu"])
        total = GaugeMetricFamily("draftsmith_gpu_memory_total_bytes", "Memory there is, by GPU", labels=["gpu"])
        for gpu, used_mib, total_mib in _gpu_memory():
            used.add_metric([gpu], float(used_mib) * 2**20)
            total.add_metric([gpu], float(total_mib) * 2**20)
        yield from (used, total)


def _gpu_memory() -> list[list[str]]:
    """Index, MiB in use and MiB in all of each GPU; none where the driver does not answer."""
    query = ["nvidia-smi", "--query-gpu=index,memory.used,memory.total", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=5, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    lines = [[part.strip() for part in line.split(",")] for line in done.stdout.splitlines()]
    return [line for line in lines if len(line) == 3 and all(part.isdecimal() for part in line)]


if shutil.which("nvidia-smi"):
    REGISTRY.register(GpuMemory())


def end_generation(stage: StageRef) -> None:
    """Take away what holds only while the stage runs; the counts of rows stay."""
    for gauge in _MOMENTARY:
        gauge.remove(*_labels(stage))


def _labels(stage: StageRef) -> tuple[str, str, str]:
    return stage.root, stage.stage, stage.key
