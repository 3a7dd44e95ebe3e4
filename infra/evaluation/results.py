"""From measurements to the rows of results.parquet and acceptance.parquet, the rounds combined."""

from __future__ import annotations

import io
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from infra import schemas
from infra.evaluation.agreement import NOT_COMPARED, Agreement, Parting, agreement
from infra.evaluation.comparison import acceptance, check_length, speedup
from infra.evaluation.config import Note, Way
from infra.evaluation.groups import GROUPS, accepted_by_prompt, group_rows, tells_all
from infra.evaluation.intervals import (
    Floats,
    Interval,
    generator,
    log_interval,
    prompt_draws,
    quantile_interval,
    ratio_interval,
    round_spread,
)
from infra.evaluation.measurement import BASELINE, EvaluateConfig, Measurement

Row = dict[str, Any]

_TIMES = ("ttft_seconds", "tpot_seconds")  # to the first token; per token after it
_SHARES = {"median": 0.5, "p95": 0.95}


def _times_fields() -> Iterator[pa.Field]:
    for name in _TIMES:
        for which in _SHARES:
            for end in ("", "_low", "_high"):  # null where the server does not tell
                yield pa.field(f"{name}_{which}{end}", pa.float64())


# What results.parquet holds beyond the contract. Counts rather than shares: they can be summed over rows.
RESULTS = pa.schema(
    [
        *schemas.EVALUATIONS,
        pa.field("verdict", pa.string(), nullable=False),  # faster, slower or no difference
        pa.field("draft_acceptance_rate", pa.float64()),  # null where nothing was drafted
        pa.field("num_failed", pa.int64(), nullable=False),
        pa.field("output_tokens", pa.int64(), nullable=False),
        pa.field("num_rounds", pa.int32(), nullable=False),
        pa.field("output_tokens_per_second_by_round", pa.list_(pa.float64()), nullable=False),
        pa.field("speedup_by_round", pa.list_(pa.float64()), nullable=False),
        pa.field("num_compared_outputs", pa.int64(), nullable=False),  # with those of none; 0 unless greedy
        pa.field("num_identical_outputs", pa.int64(), nullable=False),
        pa.field("num_compared_tokens", pa.int64(), nullable=False),  # up to and with the first difference
        pa.field("first_differences", pa.list_(pa.int32()), nullable=False),  # token positions, from 0
        pa.field("label", pa.string(), nullable=False),  # the way of decoding, unique but for the tokens drafted
        pa.field("draft_uri", pa.string()),  # eagle3: the folder served, relative to the root where it lies there
        pa.field("output_tokens_per_second_low", pa.float64(), nullable=False),
        pa.field("output_tokens_per_second_high", pa.float64(), nullable=False),
        pa.field("acceptance_length_low", pa.float64()),
        pa.field("acceptance_length_high", pa.float64()),
        pa.field("acceptance_rate_per_position_low", pa.list_(pa.float64()), nullable=False),
        pa.field("acceptance_rate_per_position_high", pa.list_(pa.float64()), nullable=False),
        pa.field("draft_acceptance_rate_low", pa.float64()),
        pa.field("draft_acceptance_rate_high", pa.float64()),
        *_times_fields(),
        pa.field("longest_tokens", pa.int32(), nullable=False),  # of a prompt with its answer
        pa.field("first_difference_gaps_nats", pa.list_(pa.float64()), nullable=False),  # NaN: not scored
        pa.field("num_beyond_ties", pa.int64(), nullable=False),
        pa.field("losslessness", pa.string(), nullable=False),  # identical, near-ties, fault or not compared
    ]
)


Cell = tuple[str, float, int]  # dataset, temperature, concurrency


def by_cell(measurements: Sequence[Measurement]) -> dict[Cell, dict[Way, list[Measurement]]]:
    """What can be compared with one another, and in it the rounds of each way of decoding in their order."""
    cells: dict[Cell, dict[Way, list[Measurement]]] = {}
    for measurement in sorted(measurements, key=lambda item: item.round_index):
        cell = measurement.dataset, measurement.sampling.temperature, measurement.concurrency
        cells.setdefault(cell, {}).setdefault(measurement.way, []).append(measurement)
    return dict(sorted(cells.items()))


def agreements(measurements: Sequence[Measurement]) -> list[Agreement]:
    """How far every way of decoding agrees with the baseline, for `agreement.score_partings`."""
    return [
        agreement(rounds, ways.get(Way(BASELINE), []))
        for ways in by_cell(measurements).values()
        for rounds in ways.values()
    ]


def result_rows(
    measurements: Sequence[Measurement],
    config: EvaluateConfig,
    *,
    vllm_version: str,
    flags: Mapping[str, str],
    scored: Mapping[Parting, float] | None = None,
) -> list[Row]:
    """One row of `RESULTS` per dataset, temperature, concurrency and way of decoding, the rounds combined.

    Args:
        flags: each server's command line by its way's name, without secrets.
        scored: the gaps where answers part (`agreement.score_partings`).

    Raises:
        StageFailed, ServerError: measurements that do not fit together (see `speedup`, `acceptance`).
    """
    return [
        {
            **_head(rounds[0]),
            "draft_uri": way.draft.portable if way.draft else None,
            "vllm_version": vllm_version,
            "flags": flags[way.name],
            **_figures(rounds, by_way.get(Way(BASELINE), [])),
            **_losslessness(rounds, by_way.get(Way(BASELINE), []), scored or {}, config),
        }
        for by_way in by_cell(measurements).values()
        for way, rounds in _in_order(by_way, config)
    ]


def acceptance_rows(measurements: Sequence[Measurement], config: EvaluateConfig) -> list[Row]:
    """Rows of `GROUPS`: acceptance by context length and by domain; none where vLLM does not tell."""
    return [
        row
        for by_way in by_cell(measurements).values()
        for way, rounds in _in_order(by_way, config)
        if way.method != BASELINE
        for row in group_rows(rounds, _head(rounds[0]), config)
    ]


def request_notes(measurements: Sequence[Measurement]) -> list[Note]:
    """What is to be said where vLLM's figures of single requests are missing or do not sum to its counters."""
    drafting = [measurement for measurement in measurements if measurement.way.method != BASELINE]
    untold = sorted({measurement.way.name for measurement in drafting if not tells_all(measurement)})
    if not untold:
        return []
    text = (
        f"Of {', '.join(untold)} vLLM's figures of single requests are missing or do not sum to its counters: "
        "there is no acceptance by context or domain, and acceptance has no interval."
    )
    return [Note("no_request_metrics", text)]


def _in_order(
    by_way: Mapping[Way, list[Measurement]], config: EvaluateConfig
) -> list[tuple[Way, list[Measurement]]]:
    """As the config names the methods; drafts and numbers of tokens as they were measured."""
    return sorted(by_way.items(), key=lambda item: config.methods.index(item[0].method))


def _head(measurement: Measurement) -> Row:
    way = measurement.way
    return {
        "label": way.label,
        "method": way.method,
        "draft": way.draft.key if way.draft else None,
        "dataset": measurement.dataset,
        "temperature": measurement.sampling.temperature,
        "concurrency": measurement.concurrency,
        "num_speculative_tokens": way.num_speculative_tokens,
    }


def _figures(rounds: Sequence[Measurement], baseline: Sequence[Measurement]) -> Row:
    counters = [measurement.counters for measurement in rounds]
    num_drafts = sum(item.num_drafts for item in counters)
    num_draft_tokens = sum(item.num_draft_tokens for item in counters)
    num_accepted_tokens = sum(item.num_accepted_tokens for item in counters)
    positions = max(len(item.accepted_per_position) for item in counters)
    padded = [(*item.accepted_per_position, *[0] * positions)[:positions] for item in counters]
    accepted_per_position = [sum(column) for column in zip(*padded, strict=True)]
    accepted = acceptance(num_drafts, num_draft_tokens, num_accepted_tokens, accepted_per_position)
    output_tokens = sum(measurement.output_tokens for measurement in rounds)
    tokens_per_second = output_tokens / sum(measurement.wall_seconds for measurement in rounds)
    low, high = _speed_interval(rounds, tokens_per_second)
    measured = speedup(rounds, baseline)
    answered = [request for measurement in rounds for request in measurement.requests if request.error is None]
    return {
        "num_requests": sum(measurement.num_requests for measurement in rounds),
        "num_drafts": num_drafts,
        "num_draft_tokens": num_draft_tokens,
        "num_accepted_tokens": num_accepted_tokens,
        "accepted_per_position": accepted_per_position if num_drafts else [],
        "acceptance_length": accepted.length,
        "acceptance_rate_per_position": list(accepted.rate_per_position),
        "draft_acceptance_rate": accepted.draft_rate,
        "output_tokens_per_second": tokens_per_second,
        "output_tokens_per_second_low": low,
        "output_tokens_per_second_high": high,
        "speedup": measured.ratio,
        "speedup_low": measured.low,
        "speedup_high": measured.high,
        "verdict": measured.verdict,
        "num_failed": sum(len(measurement.requests) - measurement.num_requests for measurement in rounds),
        "output_tokens": output_tokens,
        "num_rounds": len(rounds),
        "output_tokens_per_second_by_round": [item.output_tokens_per_second for item in rounds],
        "speedup_by_round": list(measured.by_round),
        "longest_tokens": max((request.num_tokens for request in answered), default=0),
        **_acceptance_intervals(rounds, len(accepted.rate_per_position)),
        **_times(rounds),
    }


def _speed_interval(rounds: Sequence[Measurement], tokens_per_second: float) -> Interval:
    """Of output tokens per second: a replicate's speed is its tokens over its summed latencies (see `speedup`)."""
    tokens, seconds = np.zeros(len(rounds[0].requests)), np.zeros(len(rounds[0].requests))
    for measurement in rounds:
        for prompt, request in enumerate(measurement.requests):
            if request.error is None:
                tokens[prompt] += len(request.completion_token_ids)
                seconds[prompt] += request.latency_seconds
    rng = generator()
    spread = round_spread([measurement.output_tokens_per_second for measurement in rounds], rng)
    num_prompts = int((tokens > 0).sum())
    if num_prompts > 1:
        draws = prompt_draws(len(tokens), rng)
        drawn = np.log(np.maximum(draws @ tokens, 1.0) / np.maximum(draws @ seconds, 1e-9))
        deviations = drawn - np.log(tokens.sum() / seconds.sum())
        spread = spread + deviations * np.sqrt(num_prompts / (num_prompts - 1))
    return log_interval(tokens_per_second, spread)


def _acceptance_intervals(rounds: Sequence[Measurement], num_positions: int) -> Row:
    """From the drafts of each prompt: empty where vLLM does not tell them, or there is one prompt only."""
    length: Interval | None = None
    rate: Interval | None = None
    positions: list[Interval] = []
    if num_positions and all(tells_all(measurement) for measurement in rounds):
        drafts, drafted, accepted = accepted_by_prompt(rounds, num_positions)
        draws = prompt_draws(len(drafts), generator())
        length = ratio_interval(accepted.sum(axis=1), drafts, draws, most=num_positions)
        rate = ratio_interval(accepted.sum(axis=1), drafted, draws, most=1.0)
        found = [ratio_interval(accepted[:, place], drafts, draws, most=1.0) for place in range(num_positions)]
        positions = [interval for interval in found if interval is not None]
    return {
        "acceptance_length_low": None if length is None else 1.0 + length[0],
        "acceptance_length_high": None if length is None else 1.0 + length[1],
        "draft_acceptance_rate_low": None if rate is None else rate[0],
        "draft_acceptance_rate_high": None if rate is None else rate[1],
        "acceptance_rate_per_position_low": [low for low, _ in positions],
        "acceptance_rate_per_position_high": [high for _, high in positions],
    }


def _times(rounds: Sequence[Measurement]) -> Row:
    """Median and 95th percentile of the time to the first token, and per token after it, over all requests."""
    found: Row = {}
    draws = prompt_draws(len(rounds[0].requests), generator())
    for name in _TIMES:
        values: Floats = np.array(
            [
                [_or_nan(getattr(request.figures, name, None)) for request in measurement.requests]
                for measurement in rounds
            ]
        ).T
        for which, share in _SHARES.items():
            figure = quantile_interval(values, share, draws, generator())
            point, (low, high) = (None, (None, None)) if figure is None else figure
            found |= {f"{name}_{which}": point, f"{name}_{which}_low": low, f"{name}_{which}_high": high}
    return found


def _or_nan(value: float | None) -> float:
    return float("nan") if value is None or value <= 0 else value


def _losslessness(
    rounds: Sequence[Measurement],
    baseline: Sequence[Measurement],
    scored: Mapping[Parting, float],
    config: EvaluateConfig,
) -> Row:
    found = agreement(rounds, baseline)
    gaps = found.gaps_nats(scored)
    return {
        "num_compared_outputs": found.num_compared,
        "num_identical_outputs": found.num_identical,
        "num_compared_tokens": found.num_tokens,
        "first_differences": found.first_differences,
        "first_difference_gaps_nats": gaps,
        "num_beyond_ties": sum(gap > config.tie_nats for gap in gaps),
        "losslessness": found.verdict(scored, config.tie_nats),
    }


def median_first_difference(row: Mapping[str, Any]) -> float | None:
    """Median token position at which answers part from the baseline's; None where all are identical."""
    return statistics.median(row["first_differences"]) if row["first_differences"] else None


def completed(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row that an earlier version may have written, with the columns that came later: empty, and a label."""
    later: dict[str, Any] = {field.name: [] if pa.types.is_list(field.type) else None for field in RESULTS}
    return {**later, "label": row["method"], "num_beyond_ties": 0, "losslessness": NOT_COMPARED, **row}


def results_parquet(rows: Sequence[Mapping[str, Any]]) -> bytes:
    """results.parquet: the rows of `result_rows` under the schema `RESULTS`.

    Raises:
        ValueError: a row lacks a column, has one too many, or has null where none may be.
        ServerError: an acceptance length is not what its rates by position say.
    """
    return _parquet(rows, RESULTS)


def acceptance_parquet(rows: Sequence[Mapping[str, Any]]) -> bytes:
    """acceptance.parquet: the rows of `acceptance_rows` under the schema `GROUPS`. Raises as `results_parquet`."""
    return _parquet(rows, GROUPS)


def _parquet(rows: Sequence[Mapping[str, Any]], schema: pa.Schema) -> bytes:
    for row in rows:
        if set(row) != set(schema.names):
            raise ValueError(f"columns of a result differ from the schema: {sorted(set(row) ^ set(schema.names))}")
        if row["acceptance_length"] is not None:
            check_length(row["acceptance_length"], row["acceptance_rate_per_position"])
    table = pa.Table.from_pylist([dict(row) for row in rows], schema=schema)
    for field in schema:
        if not field.nullable and table.column(field.name).null_count:
            raise ValueError(f"column {field.name} has a null")
    sink = io.BytesIO()
    pq.write_table(table, sink)
    return sink.getvalue()
