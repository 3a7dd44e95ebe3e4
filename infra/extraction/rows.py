"""Rows of the hidden_states stage: from a responses shard to samples, and with their results to a shard."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from infra.hidden_states import (
    HiddenRow,
    HiddenStatesMeta,
    encode,
    encoding_error,
    fail_rows,
    payload_problem,
    state_bytes,
    write,
)
from infra.schemas import STATUS_FAILED
from infra.state_checks.checks import ShardChecks, StateChecks
from infra.state_checks.verdict import FailedChecks

logger = logging.getLogger("draftsmith.extraction")


@dataclass(frozen=True)
class ExtractSample:
    """What is asked of the engine: the states of all of `input_ids`."""

    sample_id: str
    input_ids: Sequence[int]


@dataclass(frozen=True)
class ExtractResult:
    """What came of one sample: states that a model may have computed (`states_problem`), or why there are none.

    Args:
        hidden_states: [tokens, layers, hidden], mapped from a file that is already deleted, so that its pages are
            the kernel's to reclaim and its disk space is free once this is dropped; None where `error` is given.
    """

    sample_id: str
    error: str | None
    hidden_states: Tensor | None


class BuiltShard(NamedTuple):
    """A shard ready to be committed.

    Args:
        data: its bytes, or the local file it was built into.
        extra: for its record: `num_tokens`, `num_loss_tokens` and `longest_tokens` of the rows with states,
            `failed_checks`, `layer_norms`, `on_policy`, `state_bytes`, `encoding_error`.
    """

    data: bytes | Path
    rows: int
    status_counts: dict[str, int]
    extra: dict[str, Any]


def samples_of(responses: Any) -> list[ExtractSample]:
    """The samples to extract of a responses table (`schemas.RESPONSES`): all that did not fail, in its order."""
    columns = responses.select(["sample_id", "status", "input_ids"]).to_pylist()
    return [ExtractSample(row["sample_id"], row["input_ids"]) for row in columns if row["status"] != STATUS_FAILED]


def build_shard(
    responses: Any,
    results: Iterable[ExtractResult],
    meta: HiddenStatesMeta,
    checks: StateChecks,
    path: Path | None = None,
) -> BuiltShard:
    """A hidden_states shard out of a responses shard: one row for each of its rows.

    Holds the states of one sample at a time where `results` is a stream. The encoded shard is in memory (without a
    `path`) whole, and there twice where samples are refused when all are through: by the verifier's head, or by a
    first shard's own norms.

    Args:
        responses: table of `schemas.RESPONSES`.
        results: those of `samples_of(responses)`, in that order.
        checks: of the stage.
        path: local file to build it into.
    Raises:
        ValueError: the results are not those of these responses.
    """
    judge = checks.shard()
    shard = _Tally()
    try:
        rows = shard.counted(_rows(responses, results, meta, judge))
        data: bytes | Path
        if path is None:
            data = encode(rows, meta)
        else:
            write(rows, meta, path)
            data = path
    finally:
        if isinstance(results, Generator):
            results.close()  # a stream given up half-way gives up its requests now, not when it is collected
    if late := judge.late_problems():
        data = fail_rows(data, late)
        shard.fail(late)
    shard.failed.warn()
    extra = {**shard.extra(), **judge.close(), "state_bytes": state_bytes(data)}
    if (error := encoding_error(data)) is not None:
        extra["encoding_error"] = error
    return BuiltShard(data, sum(shard.statuses.values()), dict(shard.statuses), extra)


class _Tally:
    """Counts of a shard's rows: what their record says beside the checks' own figures."""

    def __init__(self) -> None:
        self.statuses: Counter[str] = Counter()
        self.failed = FailedChecks()
        self._tokens: dict[str, tuple[str, int, int]] = {}  # status, tokens, tokens under the mask, by sample

    def counted(self, rows: Iterable[HiddenRow]) -> Iterator[HiddenRow]:
        for row in rows:
            self.statuses[row.status] += 1
            if row.error is None:
                self._tokens[row.sample_id] = (row.status, len(row.input_ids), sum(row.loss_mask))
            else:
                self.failed.add(row.sample_id, row.error)
            yield row

    def fail(self, errors: Mapping[str, str]) -> None:
        """Rows that were counted with states have none after all."""
        for sample_id, error in errors.items():
            status, *_ = self._tokens.pop(sample_id)
            self.statuses[status] -= 1
            self.statuses[STATUS_FAILED] += 1
            self.failed.add(sample_id, error)
        self.statuses = +self.statuses

    def extra(self) -> dict[str, Any]:
        return {
            "num_tokens": sum(tokens for _, tokens, _ in self._tokens.values()),
            "num_loss_tokens": sum(trained for *_, trained in self._tokens.values()),
            "longest_tokens": max((tokens for _, tokens, _ in self._tokens.values()), default=0),
            "failed_checks": self.failed.to_json(),
        }


def _rows(
    responses: Any, results: Iterable[ExtractResult], meta: HiddenStatesMeta, judge: ShardChecks
) -> Iterator[HiddenRow]:
    remaining = iter(results)
    columns = ["sample_id", "status", "error", "input_ids", "loss_mask", "temperature"]
    for response in responses.select(columns).to_pylist():
        if response["status"] == STATUS_FAILED:
            error = f"response failed: {response['error']}"
            yield HiddenRow(response["sample_id"], STATUS_FAILED, error, [], [], None)
        else:
            yield _hidden_row(response, next(remaining, None), meta, judge)
    if next(remaining, None) is not None:
        raise ValueError("more results than responses")


def _hidden_row(
    response: dict[str, Any], result: ExtractResult | None, meta: HiddenStatesMeta, judge: ShardChecks
) -> HiddenRow:
    sample_id, input_ids = response["sample_id"], response["input_ids"]
    if result is None or result.sample_id != sample_id:
        raise ValueError(f"no result for {sample_id}, but one for {result and result.sample_id}")
    error = result.error
    if error is None and (problem := payload_problem(len(input_ids), meta)):
        error = f"length: {problem}"
    if error is None and result.hidden_states is not None:
        error = judge.problem(response, result.hidden_states)
    return HiddenRow(
        sample_id=sample_id,
        status=STATUS_FAILED if error else response["status"],
        error=error,
        input_ids=input_ids,
        loss_mask=response["loss_mask"],
        hidden_states=None if error else result.hidden_states,
    )
