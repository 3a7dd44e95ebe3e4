"""Prometheus gauges of a running generation, all named `draftsmith_*`.

They are in prometheus_client's default registry, which is what Prefect serves with PREFECT_CLIENT_METRICS_ENABLED.
"""

from __future__ import annotations

from prometheus_client import Gauge

from infra.generation_progress import GenerationProgress
from infra.manifest import StageRef

_LABELS = ("root", "stage", "key")

ROWS = Gauge("draftsmith_rows", "Rows there, by status (ok, truncated, failed)", (*_LABELS, "status"))
ROWS_LEFT = Gauge("draftsmith_rows_left", "Rows still to be made", _LABELS)
ROWS_PER_SECOND = Gauge("draftsmith_rows_per_second", "Rows finished, over the last minute", _LABELS)
TOKENS_PER_SECOND = Gauge("draftsmith_tokens_per_second", "Tokens generated, over the last minute", _LABELS)
REQUESTS_RUNNING = Gauge("draftsmith_requests_running", "Requests in the servers' batches", _LABELS)
REQUESTS_WAITING = Gauge("draftsmith_requests_waiting", "Requests that wait for room in them", _LABELS)
KV_CACHE_USAGE = Gauge("draftsmith_kv_cache_usage", "Share (0 to 1) of the fullest key-value cache", _LABELS)
ETA_SECONDS = Gauge("draftsmith_eta_seconds", "Seconds until the last row, at the rate so far", _LABELS)

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


def end_generation(stage: StageRef) -> None:
    """Take away what holds only while the stage runs; the counts of rows stay."""
    for gauge in _MOMENTARY:
        gauge.remove(*_labels(stage))


def _labels(stage: StageRef) -> tuple[str, str, str]:
    return stage.root, stage.stage, stage.key
