"""Hand-made measurements for the tests of evaluation, comparison and report."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from infra.evaluation.config import Draft, Sampling, Way
from infra.evaluation.measurement import EvaluateConfig, Measurement, Method, RequestResult
from infra.evaluation.results import result_rows
from infra.vllm_metrics import RequestFigures, SpeculationCounters

DRAFT = Draft(
    "eagle3", "0123456789abcdef", "/store/drafts/0123456789abcdef/export", "drafts/0123456789abcdef/export"
)
WAYS = {"none": Way("none"), "ngram": Way("ngram", 3), "eagle3": Way("eagle3", 3, DRAFT)}
FLAGS = {"none": "--model verifier", "ngram k=3": "--model verifier --x", "eagle3 k=3": "--model verifier --y"}

NO_COUNTERS = SpeculationCounters(num_drafts=0, num_draft_tokens=0, num_accepted_tokens=0, accepted_per_position=())


def counters(num_drafts: int, *accepted_per_position: int) -> SpeculationCounters:
    return SpeculationCounters(
        num_drafts=num_drafts,
        num_draft_tokens=num_drafts * len(accepted_per_position),
        num_accepted_tokens=sum(accepted_per_position),
        accepted_per_position=accepted_per_position,
    )


def measurement(
    method: Method | Way,
    latencies: Sequence[float],
    *,
    round_index: int = 0,
    concurrency: int = 1,
    counted: SpeculationCounters = NO_COUNTERS,
    outputs: Sequence[Sequence[int]] | None = None,
    dataset: str = "questions",
    temperature: float = 0.0,
    figures: Sequence[RequestFigures | None] | None = None,
) -> Measurement:
    """One stream's worth of requests, ten tokens each unless `outputs` says more; the wall is the latencies' sum."""
    tokens = outputs or [range(10)] * len(latencies)
    requests = tuple(
        RequestResult(f"p{index}", latency, tuple(ids), prompt_token_ids=(1, 2, 3), figures=told)
        for index, (latency, ids, told) in enumerate(
            zip(latencies, tokens, figures or [None] * len(latencies), strict=True)
        )
    )
    wall_seconds = sum(latencies) / concurrency
    way = method if isinstance(method, Way) else WAYS[method]
    sampling = Sampling(temperature)
    return Measurement(way, dataset, concurrency, round_index, wall_seconds, counted, requests, sampling)


def example_measurements(temperature: float = 0.0) -> list[Measurement]:
    """Three methods under two loads: eagle3 1.25 times as fast alone and 0.8 times with 8 in flight."""
    ratios: dict[tuple[Method, int], float] = {("ngram", 1): 1.0, ("eagle3", 1): 1.25}
    ratios |= {("ngram", 8): 0.9, ("eagle3", 8): 0.8, ("none", 1): 1.0, ("none", 8): 1.0}
    counted = {"none": NO_COUNTERS, "ngram": counters(100, 5, 3, 1), "eagle3": counters(1000, 385, 141, 69)}
    noise = (1.0, 1.01, 0.99)
    return [
        measurement(
            method,
            [drift * second / ratio for second in (1.0, 1.1, 0.9, 1.2) * 2],
            round_index=round_index,
            concurrency=concurrency,
            counted=counted[method],
            temperature=temperature,
        )
        for (method, concurrency), ratio in ratios.items()
        for round_index, drift in enumerate(noise)
    ]


def example_rows(config: EvaluateConfig | None = None, **changed: Any) -> list[dict[str, Any]]:
    """Rows of `example_measurements`, at the config's first temperature."""
    config = config or EvaluateConfig()
    asked = config.temperature[0]
    taken = example_measurements(asked if isinstance(asked, float) else 0.7)
    rows = result_rows(taken, config, vllm_version="0.32.0", flags=FLAGS)
    return [row | changed for row in rows]
