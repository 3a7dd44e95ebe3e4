"""Rows of the hidden_states stage: from a responses shard to samples, and with their results to a shard."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from infra.hidden_states import HiddenRow, HiddenStatesMeta, encode, payload_problem
from infra.schemas import STATUS_FAILED

logger = logging.getLogger("draftsmith.extraction")


@dataclass(frozen=True)
class ExtractSample:
    """What is asked of the engine: the states of all of `input_ids`."""

    sample_id: str
    input_ids: Sequence[int]


@dataclass(frozen=True)
class ExtractResult:
    """What came of one sample: states that passed every check, or the reason why there are none.

    Args:
        hidden_states: [tokens, layers, hidden], mapped from a file that is already deleted, so that its pages are
            the kernel's to reclaim and its disk space is free once this is dropped; None where `error` is given.
    """

    sample_id: str
    error: str | None
    hidden_states: Tensor | None


class BuiltShard(NamedTuple):
    """A shard ready to be committed."""

    data: bytes
    rows: int
    status_counts: dict[str, int]


def samples_of(responses: Any) -> list[ExtractSample]:
    """The samples to extract of a responses table (`schemas.RESPONSES`): all that did not fail, in its order."""
    columns = responses.select(["sample_id", "status", "input_ids"]).to_pylist()
    return [ExtractSample(row["sample_id"], row["input_ids"]) for row in columns if row["status"] != STATUS_FAILED]


def build_shard(responses: Any, results: Iterable[ExtractResult], meta: HiddenStatesMeta) -> BuiltShard:
    """A hidden_states shard out of a responses shard: one row for each of its rows.

    Holds the states of one sample at a time where `results` is a stream; the encoded shard is in memory whole.

    Args:
        responses: table of `schemas.RESPONSES`.
        results: those of `samples_of(responses)`, in that order.
    Raises:
        ValueError: the results are not those of these responses.
    """
    counts: Counter[str] = Counter()
    failures: list[str] = []

    def rows() -> Iterator[HiddenRow]:
        remaining = iter(results)
        columns = ["sample_id", "status", "error", "input_ids", "loss_mask"]
        for response in responses.select(columns).to_pylist():
            failed = response["status"] == STATUS_FAILED
            row = _failed_response(response) if failed else _hidden_row(response, next(remaining, None), meta)
            counts[row.status] += 1
            if row.error is not None and not failed:
                failures.append(f"{row.sample_id}: {row.error}")
            yield row
        if next(remaining, None) is not None:
            raise ValueError("more results than responses")

    try:
        data = encode(rows(), meta)
    finally:
        if isinstance(results, Generator):
            results.close()  # a stream given up half-way gives up its requests now, not when it is collected
    if failures:
        logger.warning(
            "%d samples have no hidden states and become failed rows; the first: %s", len(failures), failures[0]
        )
    return BuiltShard(data, sum(counts.values()), dict(counts))


def _failed_response(response: dict[str, Any]) -> HiddenRow:
    error = f"response failed: {response['error']}"
    return HiddenRow(response["sample_id"], STATUS_FAILED, error, [], [], None)


def _hidden_row(response: dict[str, Any], result: ExtractResult | None, meta: HiddenStatesMeta) -> HiddenRow:
    sample_id, input_ids = response["sample_id"], response["input_ids"]
    if result is None or result.sample_id != sample_id:
        raise ValueError(f"no result for {sample_id}, but one for {result and result.sample_id}")
    error = result.error or payload_problem(len(input_ids), meta)
    return HiddenRow(
        sample_id=sample_id,
        status=STATUS_FAILED if error else response["status"],
        error=error,
        input_ids=input_ids,
        loss_mask=response["loss_mask"],
        hidden_states=None if error else result.hidden_states,
    )
