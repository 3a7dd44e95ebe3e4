"""Whether a measured draft is fit to be promoted: the gate, decided from rows of results.parquet alone.

One rule for all minima: what must reach a figure must reach it with the lower end of its 95 % interval, in every
data set and temperature that was measured. A promoted speculator stays unless another one is shown to be no worse:
keeping what serves costs nothing.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field, PositiveInt

from infra.config import Config
from infra.evaluation.agreement import FAULT
from infra.evaluation.findings import streams
from infra.evaluation.intervals import generator, log_interval, round_spread

Row = Mapping[str, Any]  # of infra.evaluation.results.RESULTS
Setting = tuple[str, float, int]  # data set, temperature, requests in flight


class PromoteConfig(Config):
    """What a draft must show to be promoted. In no stage's key: another gate judges the same measurement anew."""

    min_acceptance_length: Annotated[float | None, Field(ge=1.0)] = None
    """Tokens that each step of the verifier must yield, under every load."""

    min_speedup: dict[PositiveInt, Annotated[float, Field(gt=0.0)]] = Field(default={})
    """By requests in flight: how many times as fast as without a draft it must be, such as `{1: 1.1, 8: 1.0}`."""

    not_worse_than: Literal["promoted"] | None = "promoted"
    """What it is held against: the speculator that is promoted, measured beside it (`evaluate.drafts`). Its pooled
    acceptance length must be no lower, its speed not shown to be lower under the loads of `min_speedup` (all, where
    that names none). null: against nothing, say after the verifier has changed."""


@dataclass(frozen=True)
class Decision:
    """What the gate says of a draft.

    Attributes:
        passes: it is fit to be promoted.
        reasons: all that speaks against it, or, where it passes, what it has shown; each a clause without a stop.
        num_speculative_tokens: tokens to draft per step, of those measured the fastest that passes (else the
            fastest).
        rows: the draft's rows with so many.
    """

    passes: bool
    reasons: tuple[str, ...]
    num_speculative_tokens: int | None = None
    rows: tuple[Row, ...] = ()


@dataclass(frozen=True)
class _Check:
    held: bool
    text: str


def decide(rows: Sequence[Row], draft: str, gate: PromoteConfig, promoted: str | None) -> Decision:
    """Hold a draft's rows against the gate.

    Args:
        rows: every row of one evaluation.
        draft: key of the drafts stage that is to be promoted.
        promoted: key of the one that is promoted now, another one; None where there is none.
    """
    ours = [row for row in rows if row["method"] == "eagle3" and row["draft"] == draft]
    if not ours:
        return Decision(False, ("the evaluation has not measured it",))
    rivals = [row for row in rows if promoted is not None and row["draft"] == promoted]
    decisions = []
    for tokens in sorted({row["num_speculative_tokens"] for row in ours}):
        chosen = tuple(row for row in ours if row["num_speculative_tokens"] == tokens)
        checks = [*_minima(chosen, gate), *_outputs(chosen)]
        if gate.not_worse_than is not None and promoted is not None:
            checks += _against_promoted(chosen, rivals, gate, promoted)
        against = tuple(check.text for check in checks if not check.held)
        shown = tuple(check.text for check in checks)
        decisions.append(Decision(not against, against or shown, tokens, chosen))
    return max(decisions, key=lambda decision: (decision.passes, _mean_speedup(decision.rows, gate)))


def _minima(ours: Sequence[Row], gate: PromoteConfig) -> Iterator[_Check]:
    if (least := gate.min_acceptance_length) is not None:
        row = min(ours, key=_lowest_length)
        length, held = row["acceptance_length"], _lowest_length(row) >= least
        shown = (
            "acceptance length 1, as nothing was drafted," if length is None else f"acceptance length {length:.2f}"
        )
        yield _Check(held, f"{shown} {_where(row)} ({_must_reach(row['acceptance_length_low'], least, held)})")
    for load, least in sorted(gate.min_speedup.items()):
        measured = [row for row in ours if row["concurrency"] == load]
        if not measured:
            yield _Check(False, f"not measured with {streams(load)} (asked for: {least:g} times as fast)")
            continue
        row = min(measured, key=lambda row: float(row["speedup_low"]))
        held = row["speedup_low"] >= least
        shown = f"{row['speedup']:.2f} times as fast {_where(row)}"
        yield _Check(held, f"{shown} ({_must_reach(row['speedup_low'], least, held)})")


def _outputs(ours: Sequence[Row]) -> Iterator[_Check]:
    wrong = [row for row in ours if row["losslessness"] == FAULT]
    if wrong:
        yield _Check(False, f"answers differ from those without a draft {_where(wrong[0])}, by more than near-ties")


def _against_promoted(
    ours: Sequence[Row], rivals: Sequence[Row], gate: PromoteConfig, promoted: str
) -> Iterator[_Check]:
    if not rivals:
        yield _Check(False, f"{promoted}, which is promoted, was not measured beside it (`evaluate.drafts`)")
        return
    tokens = ours[0]["num_speculative_tokens"]
    alike = {_setting(row): row for row in rivals if row["num_speculative_tokens"] == tokens}
    pairs = [(row, alike[_setting(row)]) for row in ours if _setting(row) in alike]
    if not pairs:
        yield _Check(False, f"{promoted}, which is promoted, was measured under none of its loads")
        return
    mine, theirs = (_pooled_length(side) for side in zip(*pairs, strict=True))
    held = mine >= theirs
    reach = f"{_reach(held)} the {theirs:.3f} of {promoted}, which is promoted"
    yield _Check(held, f"acceptance length {mine:.3f} over all ({reach})")
    held_to = [pair for pair in pairs if not gate.min_speedup or pair[0]["concurrency"] in gate.min_speedup]
    for row, (ratio, high) in ((row, _speed_ratio(row, rival)) for row, rival in held_to):
        if high < 1.0:
            text = f"{ratio:.2f} times as fast as {promoted}, which is promoted, {_where(row)}"
            yield _Check(False, f"{text} (its 95 % interval's upper end, {_told_from(1.0, high)}, must reach 1)")


def _speed_ratio(ours: Row, theirs: Row) -> tuple[float, float]:
    """Speed against the other draft's, and the upper end of its 95 % interval over rounds. Prompts are not drawn
    anew: both sides answered the same ones."""
    name = "output_tokens_per_second_by_round"
    by_round = [mine / other for mine, other in zip(ours[name], theirs[name], strict=True)]
    ratio = statistics.geometric_mean(by_round)
    return ratio, log_interval(ratio, round_spread(by_round, generator()))[1]


def _pooled_length(rows: Sequence[Row]) -> float:
    drafts = sum(row["num_drafts"] for row in rows)
    return 1.0 + sum(row["num_accepted_tokens"] for row in rows) / drafts if drafts else 1.0


def _mean_speedup(rows: Sequence[Row], gate: PromoteConfig) -> float:
    held_to = [row for row in rows if row["concurrency"] in gate.min_speedup] or rows
    return math.fsum(math.log(row["speedup"]) for row in held_to) / len(held_to)


def _lowest_length(row: Row) -> float:
    """The interval's lower end, or the figure itself where the servers gave none for an interval."""
    found = (row["acceptance_length_low"], row["acceptance_length"], 1.0)
    return float(next(value for value in found if value is not None))


def _must_reach(low: float | None, least: float, held: bool) -> str:
    """Which end of an interval counts: a figure that reaches its minimum may still be refused."""
    end = "" if low is None else f"its 95 % interval's lower end, {_told_from(least, low)}, "
    return f"{end}{_reach(held)} {least:g}"


def _reach(held: bool) -> str:
    return "reaches" if held else "must reach"


def _told_from(least: float, end: float) -> str:
    """An interval's end with two decimals, as tables have it, or with as many as tell it from its minimum: 1.196
    would read as reaching 1.2."""
    texts = (f"{end:.{digits}f}" for digits in range(2, 9))
    return next((text for text in texts if (float(text) >= least) == (end >= least)), str(end))


def _where(row: Row) -> str:
    warmth = f", temperature {row['temperature']:g}" if row["temperature"] else ""
    return f"with {streams(row['concurrency'])} on {row['dataset']}{warmth}"


def _setting(row: Row) -> Setting:
    return row["dataset"], row["temperature"], row["concurrency"]
