"""From measurements to the rows of results.parquet, the rounds combined."""

from __future__ import annotations

import dataclasses
import io
import json
import shlex
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from infra import schemas
from infra.comparison import Agreement, acceptance, compare_outputs, speedup
from infra.evaluation import BASELINE, EvaluateConfig, Measurement, Method, RequestResult
from infra.fingerprint import canonical_json
from infra.vllm_server import SpeculationCounters

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
    ]
)


def result_rows(
    measurements: Sequence[Measurement],
    config: EvaluateConfig,
    *,
    draft_key: str | None,
    vllm_version: str,
    flags: Mapping[str, str],
) -> list[dict[str, Any]]:
    """One row of `RESULTS` per dataset, concurrency and method, the rounds combined.

    Args:
        draft_key: key of the drafts stage; written in the eagle3 rows.
        flags: each server's command line, without secrets.

    Raises:
        StageFailed, ServerError: measurements that do not fit together (see `speedup`, `acceptance`).
    """
    grouped: dict[tuple[str, int], dict[Method, list[Measurement]]] = {}
    for measurement in sorted(measurements, key=lambda item: item.round_index):
        load = grouped.setdefault((measurement.dataset, measurement.concurrency), {})
        load.setdefault(measurement.method, []).append(measurement)
    rows = []
    for (dataset, concurrency), by_method in sorted(grouped.items()):
        baseline = by_method.get(BASELINE, [])
        for method in (method for method in config.methods if method in by_method):
            rows.append(
                {
                    "method": method,
                    "draft": draft_key if method == "eagle3" else None,
                    "dataset": dataset,
                    "temperature": config.temperature,
                    "concurrency": concurrency,
                    "num_speculative_tokens": 0 if method == BASELINE else config.num_speculative_tokens,
                    "vllm_version": vllm_version,
                    "flags": flags[method],
                    **_figures(by_method[method], baseline, config),
                }
            )
    return rows


def _figures(
    rounds: Sequence[Measurement], baseline: Sequence[Measurement], config: EvaluateConfig
) -> dict[str, Any]:
    counters = [measurement.counters for measurement in rounds]
    num_drafts = sum(item.num_drafts for item in counters)
    num_draft_tokens = sum(item.num_draft_tokens for item in counters)
    num_accepted_tokens = sum(item.num_accepted_tokens for item in counters)
    positions = max(len(item.accepted_per_position) for item in counters)
    padded = [(*item.accepted_per_position, *[0] * positions)[:positions] for item in counters]
    accepted_per_position = [sum(column) for column in zip(*padded, strict=True)]
    accepted = acceptance(num_drafts, num_draft_tokens, num_accepted_tokens, accepted_per_position)
    output_tokens = sum(measurement.output_tokens for measurement in rounds)
    measured = speedup(rounds, baseline)
    agreement = _agreement(rounds, baseline) if config.temperature == 0.0 else Agreement()
    return {
        "num_requests": sum(measurement.num_requests for measurement in rounds),
        "num_drafts": num_drafts,
        "num_draft_tokens": num_draft_tokens,
        "num_accepted_tokens": num_accepted_tokens,
        "accepted_per_position": accepted_per_position if num_drafts else [],
        "acceptance_length": accepted.length,
        "acceptance_rate_per_position": list(accepted.rate_per_position),
        "draft_acceptance_rate": accepted.draft_rate,
        "output_tokens_per_second": output_tokens / sum(measurement.wall_seconds for measurement in rounds),
        "speedup": measured.ratio,
        "speedup_low": measured.low,
        "speedup_high": measured.high,
        "verdict": measured.verdict,
        "num_failed": sum(len(measurement.requests) - measurement.num_requests for measurement in rounds),
        "output_tokens": output_tokens,
        "num_rounds": len(rounds),
        "output_tokens_per_second_by_round": [item.output_tokens_per_second for item in rounds],
        "speedup_by_round": list(measured.by_round),
        "num_compared_outputs": agreement.num_compared,
        "num_identical_outputs": agreement.num_identical,
        "num_compared_tokens": agreement.num_tokens,
        "first_differences": list(agreement.first_differences),
    }


def _agreement(rounds: Sequence[Measurement], baseline: Sequence[Measurement]) -> Agreement:
    """A method against the baseline round by round; the baseline against its own first round, as a yardstick."""
    if rounds[0].method == BASELINE:
        pairs = [(measurement, rounds[0]) for measurement in rounds[1:]]
    else:
        pairs = list(zip(rounds, baseline, strict=True))
    return sum((compare_outputs(ours, reference) for ours, reference in pairs), Agreement())


def median_first_difference(row: Mapping[str, Any]) -> float | None:
    """Median token position at which answers part from the baseline's; None where all are identical."""
    return statistics.median(row["first_differences"]) if row["first_differences"] else None


def results_parquet(rows: Sequence[Mapping[str, Any]]) -> bytes:
    """results.parquet: the rows of `result_rows` under the schema `RESULTS`.

    Raises:
        ValueError: a row lacks a column, has one too many, or has null where none may be.
    """
    for row in rows:
        if set(row) != set(RESULTS.names):
            raise ValueError(f"columns of a result differ from the schema: {sorted(set(row) ^ set(RESULTS.names))}")
    table = pa.Table.from_pylist([dict(row) for row in rows], schema=RESULTS)
    for field in RESULTS:
        if not field.nullable and table.column(field.name).null_count:
            raise ValueError(f"column {field.name} has a null")
    sink = io.BytesIO()
    pq.write_table(table, sink)
    return sink.getvalue()


def portable_flags(arguments: Sequence[str], names: Mapping[str, str]) -> str:
    """A server's command line as one string without this machine's paths, fit for keys, rows and reports.

    Args:
        arguments: the command line, as `VllmServer.flags` gives it.
        names: what to write in place of each local path, for example {verifier.path: verifier.name}.
    """
    portable = []
    for argument in arguments:
        for path in sorted(names, key=len, reverse=True):  # a folder must not eat the front of a longer path
            argument = argument.replace(path, names[path])
        portable.append(argument)
    return shlex.join(portable)


def measurements_json(measurements: Sequence[Measurement]) -> bytes:
    """The raw measurements, token ids included, so that a round once taken can be kept and combined later."""
    return canonical_json([dataclasses.asdict(measurement) for measurement in measurements])


def measurements_from_json(data: bytes) -> list[Measurement]:
    """What `measurements_json` wrote."""
    return [_measurement(item) for item in json.loads(data)]


def _measurement(item: dict[str, Any]) -> Measurement:
    counters = item["counters"]
    accepted_per_position = tuple(counters["accepted_per_position"])
    requests = tuple(
        RequestResult(**{**request, "completion_token_ids": tuple(request["completion_token_ids"])})
        for request in item["requests"]
    )
    counted = SpeculationCounters(**{**counters, "accepted_per_position": accepted_per_position})
    return Measurement(**{**item, "counters": counted, "requests": requests})
