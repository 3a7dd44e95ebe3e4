"""95 % intervals of measured figures: prompts drawn anew, and the rounds' own scatter.

Prompts are what a bootstrap can resample (a cluster bootstrap: a prompt is drawn with all its rounds; Efron and
Tibshirani 1993, chapter 8). Rounds are too few for that, so their part is Student's t.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Counts = npt.NDArray[np.int64]
Interval = tuple[float, float]

CONFIDENCE = 0.95
RANDOM_SEED = 20_240_229  # the same measurements give the same interval
REPLICATES = 2_000

_TAILS = ((1.0 - CONFIDENCE) / 2.0, (1.0 + CONFIDENCE) / 2.0)


def generator() -> np.random.Generator:
    return np.random.default_rng(RANDOM_SEED)


def prompt_draws(num_prompts: int, rng: np.random.Generator, replicates: int = REPLICATES) -> Counts:
    """[replicates, num_prompts]: how often each prompt is drawn when as many are drawn with replacement."""
    return rng.multinomial(num_prompts, np.full(num_prompts, 1.0 / num_prompts), size=replicates)


def round_spread(by_round: Sequence[float], rng: np.random.Generator, replicates: int = REPLICATES) -> Floats:
    """Deviations of the mean of the rounds' logarithms, [replicates]; zeros where one round tells nothing."""
    if len(by_round) < 2:
        return np.zeros(replicates)
    error = float(np.log(by_round).std(ddof=1)) / math.sqrt(len(by_round))
    return np.asarray(error * rng.standard_t(len(by_round) - 1, size=replicates))


def log_interval(point: float, spread: Floats) -> Interval:
    """The interval around a positive figure whose logarithm may deviate by `spread`; it always holds the figure."""
    low, high = np.quantile(spread, _TAILS)
    return point * math.exp(min(float(low), 0.0)), point * math.exp(max(float(high), 0.0))


def ratio_interval(
    numerators: Counts, denominators: Counts, draws: Counts, most: float = math.inf
) -> Interval | None:
    """The interval of a ratio of two sums over prompts, such as accepted tokens over drafts.

    Args:
        numerators, denominators: [num_prompts].
        draws: of `prompt_draws`.
        most: the highest that the ratio can be; the lowest is 0.

    Returns:
        None where fewer than two prompts have a denominator.
    """
    num_prompts = int((denominators > 0).sum())
    if num_prompts < 2:
        return None
    point = numerators.sum() / denominators.sum()
    below = draws @ denominators
    ratios = (draws @ numerators)[below > 0] / below[below > 0]
    # Resampling n prompts understates their variance by (n - 1) / n.
    spread = (ratios - point) * math.sqrt(num_prompts / (num_prompts - 1))
    low, high = np.quantile(point + spread, _TAILS)
    return max(min(float(low), float(point)), 0.0), min(max(float(high), float(point)), most)


def quantile_interval(
    values: Floats, share: float, draws: Counts, rng: np.random.Generator
) -> tuple[float, Interval] | None:
    """A quantile of positive values over all prompts and rounds, and its interval.

    Args:
        values: [num_prompts, rounds]; NaN where a request has none.
        share: 0.5 is the median.
        draws: of `prompt_draws`.

    Returns:
        None where there is no value. With one prompt the interval speaks of rounds only.
    """
    present = np.isfinite(values)
    if not present.any():
        return None
    point = float(np.quantile(values[present], share))
    by_round = [float(np.quantile(row[row_present], share)) for row, row_present in _rounds(values, present)]
    order = np.argsort(values[present], kind="stable")
    ordered = values[present][order]
    prompts = np.nonzero(present)[0][order]  # the prompt of each value
    reached = np.cumsum(draws[:, prompts], axis=1)  # [replicates, num_values]
    total = reached[:, -1:]
    places = (reached < np.maximum(share * total, 1.0)).sum(axis=1)
    drawn = ordered[np.minimum(places, len(ordered) - 1)][total[:, 0] > 0]
    num_prompts = int(present.any(axis=1).sum())
    spread = np.zeros(len(draws))
    if num_prompts > 1 and len(drawn):
        deviations = np.log(drawn / ordered[min(int(np.ceil(share * len(ordered))) - 1, len(ordered) - 1)])
        spread = np.resize(deviations * math.sqrt(num_prompts / (num_prompts - 1)), len(draws))
    return point, log_interval(point, spread + round_spread(by_round, rng, len(draws)))


def _rounds(values: Floats, present: npt.NDArray[np.bool_]) -> list[tuple[Floats, npt.NDArray[np.bool_]]]:
    return [(values[:, index], present[:, index]) for index in range(values.shape[1]) if present[:, index].any()]
