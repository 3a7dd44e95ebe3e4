"""What the rows of an evaluation mean, in words: the headline, the break-even, the warnings."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from infra.drafts.vocab import LOWEST_COVERAGE
from infra.evaluation.agreement import FAULT
from infra.evaluation.comparison import FASTER, NO_DIFFERENCE, SLOWER
from infra.evaluation.measurement import BASELINE

NEW_DRAFT = "eagle3"  # the label of the draft that the report is about
LOWEST_ACCEPTANCE_RATE = 0.05

Row = Mapping[str, Any]  # of infra.evaluation.results.RESULTS


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
    trained = main[0]["method"] == "eagle3"
    who = "The trained draft" if trained else f"Without a trained draft, {main[0]['label']}"
    text = f"**{who} makes {verifier} {_speed_words(main)} with {streams(main[0]['concurrency'])}.**"
    num_drafts = sum(row["num_drafts"] for row in main)
    if num_drafts and trained:  # ngram drafts in some steps only
        length = 1 + sum(row["num_accepted_tokens"] for row in main) / num_drafts
        text += f" Each step of the verifier yields {length:.2f} tokens instead of 1."
    others = [row for row in main_rows(rows) if row["concurrency"] != main[0]["concurrency"]]
    for concurrency in sorted({row["concurrency"] for row in others}):
        chosen = [row for row in others if row["concurrency"] == concurrency]
        text += f" With {streams(concurrency)} it is {_speed_words(chosen)}."
    return text


def break_even(rows: Sequence[Row]) -> float | None:
    """Requests in flight from which speculation no longer pays; None unless the speed-up falls through 1.

    Between two measured loads, the logarithm of the speed-up is taken as linear in that of the load.

    Args:
        rows: rows of one way of decoding on one data set at one temperature.
    """
    points = sorted((row["concurrency"], row["speedup"]) for row in rows)
    for (low, above), (high, below) in itertools.pairwise(points):
        if above > 1.0 >= below:
            share = math.log(above) / (math.log(above) - math.log(below))
            return float(low * (high / low) ** share)
    return None


def break_evens(rows: Sequence[Row]) -> list[str]:
    """Where the main way of decoding stops to pay, by data set, whether or not noise could explain it."""
    loads_of: dict[str, list[Row]] = {}
    for row in main_rows(rows):
        loads_of.setdefault(row["dataset"], []).append(row)
    found = {dataset: break_even(loads) for dataset, loads in loads_of.items()}
    return [
        f"near {even:.1f} requests in flight on {dataset}" for dataset, even in found.items() if even is not None
    ]


def warnings(rows: Sequence[Row], data: DataFigures) -> list[str]:
    """What a reader must know before using the figures, each with what to do about it."""
    found: list[str] = []
    for loads in sorted(series(rows).values(), key=lambda loads: loads[0]["label"] != NEW_DRAFT):
        found += _series_warnings(loads, _way(loads[0], rows))
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
    return found


def _series_warnings(loads: Sequence[Row], way: str) -> Iterable[str]:
    where = f"{way} on {loads[0]['dataset']}" + _warmth(loads[0])
    if failed := sum(row["num_failed"] for row in loads):
        yield f"{where}: {failed} requests failed and are left out."
    if loads[0]["method"] == BASELINE:
        return
    drafted = sum(row["num_draft_tokens"] for row in loads)
    rate = sum(row["num_accepted_tokens"] for row in loads) / drafted if drafted else None
    if rate is None:
        yield f"{where}: nothing was drafted, so there is no acceptance rate. Look at the server's flags."
    elif rate < LOWEST_ACCEPTANCE_RATE:
        advice = (
            "compare its auxiliary layers and verifier revision with those of the extraction"
            if loads[0]["method"] == "eagle3"
            else "the answers hardly repeat themselves, or this vLLM version speculates differently"
        )
        yield f"{where}: {percent(rate)} of the drafted tokens accepted, under 5 %: {advice}."
    if wrong := [row for row in loads if row["losslessness"] == FAULT]:
        beyond, compared = (sum(row[name] for row in wrong) for name in ("num_beyond_ties", "num_compared_outputs"))
        yield (
            f"{where}: {beyond} of {compared} answers part from those without a draft where no two tokens nearly "
            "tie. The serving stack is at fault, not the draft: do not serve this before the cause is known."
        )
    if loads[0]["method"] == "eagle3" and loads[0]["verdict"] == NO_DIFFERENCE:
        yield (
            f"{where}: with {streams(loads[0]['concurrency'])} the interval of the speed-up includes 1 "
            f"({loads[0]['speedup_low']:.2f} to {loads[0]['speedup_high']:.2f}). More `evaluate.rounds` and "
            "`evaluate.num_prompts` on an idle machine would tell."
        )
    yield from _slower(loads, where)


def _slower(loads: Sequence[Row], where: str) -> Iterable[str]:
    slower = [row for row in loads if row["verdict"] == SLOWER]
    if not slower:
        return
    text = ", ".join(f"{row['speedup']:.2f}x with {streams(row['concurrency'])}" for row in slower)
    even = break_even(loads)
    if even is not None:
        near = f"Break-even lies near {even:.1f} requests in flight, interpolated between the loads measured"
        hint = f"{near}: serve it below that."
    elif any(row["speedup"] > 1.0 for row in loads):
        hint = "It pays under higher loads only: serve it there."
    else:
        hint = f"No load was measured where it is faster. {_what_may_help(loads)}"
    yield f"{where} is slower than none: {text}. {hint}"


def _what_may_help(loads: Sequence[Row]) -> str:
    lengths = [row["acceptance_length"] for row in loads if row["acceptance_length"] is not None]
    if loads[0]["method"] != "eagle3" or not lengths:
        return "Do not serve it so."
    return (
        f"Acceptance length {max(lengths):.2f} is low for {loads[0]['num_speculative_tokens']} drafted tokens: "
        "train on more data or for more steps, and compare the training accuracy with the rates by position; or "
        "draft fewer."
    )


def series(rows: Sequence[Row]) -> dict[tuple[str, int, str, float], list[Row]]:
    """The rows of each way of decoding on each data set at each temperature, by load."""
    found: dict[tuple[str, int, str, float], list[Row]] = {}
    for row in rows:
        key = (row["label"], row["num_speculative_tokens"], row["dataset"], row["temperature"])
        found.setdefault(key, []).append(row)
    return {key: sorted(loads, key=lambda row: int(row["concurrency"])) for key, loads in found.items()}


def groups_by_way(rows: Sequence[Row], groups: Sequence[Row], group_by: str) -> dict[tuple[str, str], list[Row]]:
    """Acceptance by context bin (in order) or by domain, by way of decoding and data set.

    Of several temperatures the lowest, of several loads the one with the most drafts: the text is the same.

    Args:
        rows: of `infra.evaluation.results.RESULTS`, for the names of the ways; groups: of `groups.GROUPS`.
        group_by: `context` or `domain`.
    """
    names, found = ways(rows), dict[tuple[str, str], dict[tuple[float, int], list[Row]]]()
    for row in groups:
        if row["group_by"] == group_by:
            way = names[row["label"], row["num_speculative_tokens"]]
            loads = found.setdefault((way, row["dataset"]), {})
            loads.setdefault((row["temperature"], row["concurrency"]), []).append(row)
    chosen = {}
    for key, loads in found.items():
        coldest = min(temperature for temperature, _ in loads)
        alike = [some for (temperature, _), some in loads.items() if temperature == coldest]
        most = max(alike, key=lambda some: sum(row["num_drafts"] for row in some))
        chosen[key] = sorted(most, key=lambda row: (row["context_from"] or 0, str(row["group"])))
    return chosen


def ways(rows: Sequence[Row]) -> dict[tuple[str, int], str]:
    """The name of each way of decoding in the order of the rows: its label, and k where a label has several."""
    return {(row["label"], row["num_speculative_tokens"]): _way(row, rows) for row in rows}


def _way(row: Row, rows: Sequence[Row]) -> str:
    lengths = {other["num_speculative_tokens"] for other in rows if other["label"] == row["label"]}
    return f"{row['label']} k={row['num_speculative_tokens']}" if len(lengths) > 1 else str(row["label"])


def main_rows(rows: Sequence[Row]) -> list[Row]:
    """What the report is about: the new draft, or else the first way that drafts at all; of several draft lengths
    the fastest, of several temperatures the lowest."""
    labels = [row["label"] for row in rows if row["method"] != BASELINE]
    if not labels:
        return []
    chosen = [row for row in rows if row["label"] == (NEW_DRAFT if NEW_DRAFT in labels else labels[0])]
    coldest = min(row["temperature"] for row in chosen)
    chosen = [row for row in chosen if row["temperature"] == coldest]
    by_length: dict[int, list[Row]] = {}
    for row in chosen:
        by_length.setdefault(row["num_speculative_tokens"], []).append(row)
    return max(by_length.values(), key=lambda some: math.fsum(math.log(row["speedup"]) for row in some))


def lowest_load(rows: Sequence[Row]) -> list[Row]:
    """The main rows with the fewest requests in flight, one a data set; empty where only none ran."""
    main = main_rows(rows)
    lowest = min((row["concurrency"] for row in main), default=0)
    return [row for row in main if row["concurrency"] == lowest]


def _speed_words(rows: Sequence[Row]) -> str:
    """`1.22 times as fast (95 % interval 1.15 to 1.30)`; the range where there are several data sets."""
    if len(rows) > 1:
        ratios = sorted(row["speedup"] for row in rows)
        alike = sum(row["verdict"] == NO_DIFFERENCE for row in rows)
        unsure = f"; no difference on {alike} of {len(rows)}" if alike else ""
        return f"{ratios[0]:.2f} to {ratios[-1]:.2f} times as fast (depending on the data set{unsure})"
    row = rows[0]
    interval = f"95 % interval {row['speedup_low']:.2f} to {row['speedup_high']:.2f}"
    if row["verdict"] == NO_DIFFERENCE:
        return f"neither faster nor slower as far as can be told ({row['speedup']:.2f} times as fast, {interval})"
    slower = "" if row["verdict"] == FASTER else "slower: "
    return f"{slower}{row['speedup']:.2f} times as fast ({interval})"


def _warmth(row: Row) -> str:
    return f" at temperature {row['temperature']:g}" if row["temperature"] else ""


def streams(concurrency: int) -> str:
    """A load in words."""
    return "one request at a time" if concurrency == 1 else f"{concurrency} requests in flight"


def percent(share: float | None) -> str:
    """A share (0 to 1) as per cent with one decimal; nothing for None."""
    return "" if share is None else f"{100 * share:.1f} %"
