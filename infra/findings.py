"""What the rows of an evaluation mean, in words: the headline, the break-even, the warnings."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from infra.comparison import FASTER, NO_DIFFERENCE, SLOWER
from infra.evaluation import BASELINE
from infra.vocab import LOWEST_COVERAGE

LOWEST_ACCEPTANCE_RATE = 0.05
# Near-ties in bf16 part two greedy answers about once in hundreds of tokens; a broken sampler within a few.
FEWEST_TOKENS_PER_DIFFERENCE = 30

Row = Mapping[str, Any]  # of infra.evaluation_results.RESULTS


@dataclass(frozen=True)
class DataFigures:
    """What the draft was trained on; None where a figure is not known.

    Attributes:
        num_tokens: tokens with hidden states; num_trained_tokens: those under the loss_mask.
        vocabulary_coverage: share (0 to 1) of trained tokens that the draft's vocabulary holds.
        trained_length_tokens: longest sequence in training; evaluated_length_tokens: longest in the evaluation,
            prompt and completion together.
    """

    num_tokens: int | None = None
    num_trained_tokens: int | None = None
    vocabulary_coverage: float | None = None
    draft_vocab_size: int | None = None
    verifier_vocab_size: int | None = None
    num_training_steps: int | None = None
    trained_length_tokens: int | None = None
    evaluated_length_tokens: int | None = None


def headline(rows: Sequence[Row], verifier: str) -> str:
    """What came out, for somebody who will read one sentence."""
    main = lowest_load(rows)
    if not main:
        return f"**{verifier} was measured without a draft only.**"
    who = "The trained draft" if main[0]["method"] == "eagle3" else f"Without a trained draft, {main[0]['method']}"
    load = streams(main[0]["concurrency"])
    text = f"**{who} makes {verifier} {_speed_words(main)} with {load}.**"
    num_drafts = sum(row["num_drafts"] for row in main)
    if num_drafts and main[0]["method"] == "eagle3":  # ngram drafts in some steps only
        length = 1 + sum(row["num_accepted_tokens"] for row in main) / num_drafts
        text += f" Each step of the verifier yields {length:.2f} tokens instead of 1."
    others = [row for row in _main_rows(rows) if row["concurrency"] != main[0]["concurrency"]]
    for concurrency in sorted({row["concurrency"] for row in others}):
        chosen = [row for row in others if row["concurrency"] == concurrency]
        text += f" With {streams(concurrency)} it is {_speed_words(chosen)}."
    return text


def break_even(rows: Sequence[Row]) -> float | None:
    """Requests in flight from which speculation no longer pays; None unless the speed-up falls through 1.

    Between two measured loads, the logarithm of the speed-up is taken as linear in that of the load.

    Args:
        rows: rows of one method and dataset.
    """
    points = sorted((row["concurrency"], row["speedup"]) for row in rows)
    for (low, above), (high, below) in itertools.pairwise(points):
        if above > 1.0 >= below:
            share = math.log(above) / (math.log(above) - math.log(below))
            return float(low * (high / low) ** share)
    return None


def warnings(rows: Sequence[Row], data: DataFigures) -> list[str]:
    """What a reader must know before using the figures, each with what to do about it."""
    found = [line for row in rows for line in _row_warnings(row)]
    found += _slow_warnings(rows)
    if data.vocabulary_coverage is not None and data.vocabulary_coverage < LOWEST_COVERAGE:
        found.append(
            f"The draft's vocabulary holds {percent(data.vocabulary_coverage)} of the trained tokens, under "
            f"{percent(LOWEST_COVERAGE)}: the rest can never be drafted. Raise "
            "`vocab.draft_vocab_size`."
        )
    trained, evaluated = data.trained_length_tokens, data.evaluated_length_tokens
    if trained is not None and evaluated is not None and trained < evaluated:
        found.append(
            f"Training saw sequences of at most {trained:,} tokens, the evaluation reached {evaluated:,}: "
            "acceptance beyond the trained length may be worse. Train on longer answers."
        )
    if any(row["num_rounds"] < 2 for row in rows):
        found.append("One round only: the intervals know nothing of the machine's noise. Set `evaluate.rounds`.")
    return list(dict.fromkeys(found))


def _row_warnings(row: Row) -> Iterable[str]:
    where = f"{row['method']} with {streams(row['concurrency'])} on {row['dataset']}"
    if row["num_failed"]:
        yield f"{where}: {row['num_failed']} requests failed and are left out."
    if row["method"] == BASELINE:
        return
    rate = row["draft_acceptance_rate"]
    if rate is None:
        yield f"{where}: nothing was drafted, so there is no acceptance rate. Look at the server's flags."
    elif rate < LOWEST_ACCEPTANCE_RATE:
        advice = (
            "compare its auxiliary layers and verifier revision with those of the extraction"
            if row["method"] == "eagle3"
            else "the answers hardly repeat themselves, or this vLLM version speculates differently"
        )
        yield f"{where}: {percent(rate)} of the drafted tokens accepted, under 5 %: {advice}."
    differences = len(row["first_differences"])
    if differences and row["num_compared_tokens"] < FEWEST_TOKENS_PER_DIFFERENCE * differences:
        every = row["num_compared_tokens"] / differences
        yield (
            f"{where}: answers part from those without a draft every {every:.0f} tokens. That is too often for "
            "near-ties: do not serve this before the cause is known."
        )


def _slow_warnings(rows: Sequence[Row]) -> Iterable[str]:
    series: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        series.setdefault((row["method"], row["dataset"]), []).append(row)
    for (method, dataset), loads in series.items():
        slower = [row for row in loads if row["verdict"] == SLOWER]
        if method == BASELINE or not slower:
            continue
        text = ", ".join(f"{row['speedup']:.2f}x with {streams(row['concurrency'])}" for row in slower)
        even = break_even(loads)
        where = "No load was measured where it is faster."
        if even is not None:
            where = f"Break-even lies near {even:.1f} requests in flight, interpolated between the loads measured."
        elif any(row["speedup"] > 1.0 for row in loads):
            where = "It pays under higher loads only."
        yield f"{method} is slower than none on {dataset}: {text}. {where}"


def _main_rows(rows: Sequence[Row]) -> list[Row]:
    """Rows of the method the report is about: eagle3, or else the first that drafts at all."""
    methods = [row["method"] for row in rows if row["method"] != BASELINE]
    if not methods:
        return []
    main = "eagle3" if "eagle3" in methods else methods[0]
    return [row for row in rows if row["method"] == main]


def lowest_load(rows: Sequence[Row]) -> list[Row]:
    """The main method's rows with the fewest requests in flight, one a dataset; empty where only none ran."""
    main = _main_rows(rows)
    lowest = min((row["concurrency"] for row in main), default=0)
    return [row for row in main if row["concurrency"] == lowest]


def _speed_words(rows: Sequence[Row]) -> str:
    """`1.22 times as fast (95 % interval 1.15 to 1.30)`; the range where there are several datasets."""
    if len(rows) > 1:
        ratios = sorted(row["speedup"] for row in rows)
        return f"{ratios[0]:.2f} to {ratios[-1]:.2f} times as fast, depending on the dataset,"
    row = rows[0]
    interval = f"95 % interval {row['speedup_low']:.2f} to {row['speedup_high']:.2f}"
    if row["verdict"] == NO_DIFFERENCE:
        return f"neither faster nor slower as far as can be told ({row['speedup']:.2f} times as fast, {interval})"
    slower = "" if row["verdict"] == FASTER else "slower: "
    return f"{slower}{row['speedup']:.2f} times as fast ({interval})"


def streams(concurrency: int) -> str:
    """A load in words."""
    return "one request at a time" if concurrency == 1 else f"{concurrency} requests in flight"


def percent(share: float | None) -> str:
    """A share (0 to 1) as per cent with one decimal; nothing for None."""
    return "" if share is None else f"{100 * share:.1f} %"
