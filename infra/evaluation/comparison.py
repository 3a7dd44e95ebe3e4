"""Acceptance, and the speed-up over the baseline with its interval.

Counts are summed over everything and divided once. A speed-up is a ratio within ONE round: what slows the machine
for a while slows both sides of it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from infra.errors import ServerError, StageFailed
from infra.evaluation.intervals import Floats, generator, log_interval, round_spread
from infra.evaluation.measurement import Measurement

REPLICATES = 10_000
EXACT = 1e-9

FASTER = "faster"
SLOWER = "slower"
NO_DIFFERENCE = "no difference"


@dataclass(frozen=True)
class Speedup:
    """Ratio of output tokens per second to the baseline's, and its 95 % interval."""

    ratio: float
    low: float
    high: float
    by_round: tuple[float, ...]

    @property
    def verdict(self) -> str:
        """`faster`, `slower`, or `no difference` where the interval includes 1."""
        if self.low > 1.0:
            return FASTER
        return SLOWER if self.high < 1.0 else NO_DIFFERENCE


@dataclass(frozen=True)
class Acceptance:
    """What the verifier accepted of what was drafted (definitions: vLLM's counters, the project's glossary)."""

    length: float | None
    rate_per_position: tuple[float, ...]
    draft_rate: float | None


def acceptance(
    num_drafts: int, num_draft_tokens: int, num_accepted_tokens: int, accepted_per_position: Sequence[int]
) -> Acceptance:
    """Acceptance figures from vLLM's counters; all empty where nothing was drafted.

    rate_per_position[i] = drafts accepted through position i ÷ drafts, and length = 1 + accepted ÷ drafts
    = 1 + the sum of the rates, because a draft accepted through position i counts once in each position up to i.

    Raises:
        ServerError: the positions do not sum to the accepted tokens; read while the counters were moving.
    """
    if sum(accepted_per_position) != num_accepted_tokens:
        raise ServerError(
            f"vLLM's counters disagree: {num_accepted_tokens} tokens accepted, "
            f"{sum(accepted_per_position)} by position"
        )
    if num_drafts == 0:
        return Acceptance(None, (), None)
    rates = tuple(accepted / num_drafts for accepted in accepted_per_position)
    length = 1.0 + num_accepted_tokens / num_drafts
    check_length(length, rates)
    return Acceptance(length, rates, num_accepted_tokens / num_draft_tokens)


def check_length(length: float, rate_per_position: Sequence[float]) -> None:
    """Raise ServerError where an acceptance length is not 1 + the sum of its rates by position, to 1e-9."""
    if not abs(length - 1.0 - math.fsum(rate_per_position)) < EXACT:
        raise ServerError(f"acceptance length {length!r} is not 1 + the sum of its rates {rate_per_position}")


def speedup(method: Sequence[Measurement], baseline: Sequence[Measurement]) -> Speedup:
    """Speed-up of a method, both sides measured with the same prompts in the same rounds.

    The ratio is the geometric mean over rounds of (tokens/s of the method) ÷ (tokens/s of the baseline).

    The interval answers two doubts at once, and as few as 3 rounds are too few to resample:
    - Would other prompts have given another ratio? Prompts are resampled with replacement, 10,000 times, the same
      draw in every round and for both sides, since the same prompts ran everywhere (a paired cluster bootstrap;
      Efron and Tibshirani 1993, chapter 8). A replicate's speed is its tokens over its summed latencies. For one
      stream that is the wall time; for several it is the wall time times the number of streams, which cancels in
      the ratio.
    - Would another hour have given another ratio? Resampling 3 rounds has 10 outcomes and understates the variance
      by a third, so this part is Student's t with rounds − 1 degrees of freedom, scaled by the standard error of
      the rounds' log ratios.
    Each replicate adds a draw of both on the log scale; the interval is their 2.5 % and 97.5 % quantiles. With
    prompts all alike it is the t interval over rounds, with rounds all alike the bootstrap over prompts. The noise
    of single requests enters both parts, so it errs on the wide side, as two-way resampling does (Owen 2007, "The
    pigeonhole bootstrap"). One round alone has no second part: its interval speaks of prompts only.

    Raises:
        StageFailed: the two sides do not match in rounds or prompts, or a side gave no token.
    """
    pairs = _paired_rounds(method, baseline)
    by_round = [ours.output_tokens_per_second / theirs.output_tokens_per_second for ours, theirs in pairs]
    ratio = math.exp(float(np.log(by_round).mean()))
    rng = generator()
    spread = _prompt_spread(pairs, rng) + round_spread(by_round, rng, REPLICATES)
    low, high = log_interval(ratio, spread)
    return Speedup(ratio, low, high, tuple(by_round))


def _paired_rounds(
    method: Sequence[Measurement], baseline: Sequence[Measurement]
) -> list[tuple[Measurement, Measurement]]:
    ours = {measurement.round_index: measurement for measurement in method}
    theirs = {measurement.round_index: measurement for measurement in baseline}
    if not ours or sorted(ours) != sorted(theirs) or len(ours) != len(method) or len(theirs) != len(baseline):
        raise StageFailed(f"rounds of the two sides do not match: {sorted(ours)} and {sorted(theirs)}")
    pairs = [(ours[index], theirs[index]) for index in sorted(ours)]
    prompts = [request.sample_id for request in pairs[0][0].requests]
    for side in (side for pair in pairs for side in pair):
        if [request.sample_id for request in side.requests] != prompts:
            raise StageFailed(
                f"{side.way.name}, round {side.round_index}: not the prompts of the other measurements"
            )
        if side.output_tokens == 0:
            raise StageFailed(f"{side.way.name}, round {side.round_index}: not one token came out")
    return pairs


def _prompt_spread(pairs: Sequence[tuple[Measurement, Measurement]], rng: np.random.Generator) -> Floats:
    """Deviations of the mean log ratio when the prompts are drawn anew; shape [REPLICATES].

    Prompts that failed anywhere are left out of all sides, or the sides would not be paired.
    """
    sides = [side for pair in pairs for side in pair]
    kept = [
        index
        for index in range(len(sides[0].requests))
        if all(side.requests[index].error is None for side in sides)
    ]
    if len(kept) < 2:
        return np.zeros(REPLICATES)
    # [REPLICATES, prompts]: how often each prompt is drawn; the first row is the sample as it is.
    draws = rng.multinomial(len(kept), np.full(len(kept), 1.0 / len(kept)), size=REPLICATES)
    draws = np.vstack([np.ones((1, len(kept)), dtype=draws.dtype), draws])

    def log_speed(side: Measurement) -> Floats:  # [REPLICATES + 1]
        requests = [side.requests[index] for index in kept]
        tokens = draws @ np.array([len(request.completion_token_ids) for request in requests], dtype=np.float64)
        seconds = draws @ np.array([request.latency_seconds for request in requests], dtype=np.float64)
        return np.asarray(np.log(np.maximum(tokens, 1.0) / seconds))

    ratios = np.mean([log_speed(ours) - log_speed(theirs) for ours, theirs in pairs], axis=0)
    # Resampling n prompts understates their variance by (n - 1) / n.
    return np.asarray(ratios[1:] - ratios[0]) * math.sqrt(len(kept) / (len(kept) - 1))
