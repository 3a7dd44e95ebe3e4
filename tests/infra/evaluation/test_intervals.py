"""Intervals against what is known of the distributions they estimate."""

from __future__ import annotations

import math

import numpy as np
import pytest

from infra.evaluation.intervals import (
    generator,
    log_interval,
    prompt_draws,
    quantile_interval,
    ratio_interval,
    round_spread,
)


def test_a_ratios_interval_is_that_of_the_normal_distribution_where_it_is_one() -> None:
    """Half of 64 prompts accept 1 of 10 drafts, half 3 of 10: the standard error of the mean is 0.1 / sqrt(63)."""
    numerators, denominators = np.array([1, 3] * 32), np.full(64, 10)
    interval = ratio_interval(numerators, denominators, prompt_draws(64, generator()))
    assert interval is not None
    assert sum(interval) / 2 == pytest.approx(0.2, abs=0.002)
    assert interval[1] - interval[0] == pytest.approx(2 * 1.96 * 0.1 / math.sqrt(63), rel=0.08)


def test_prompts_that_drafted_nothing_tell_nothing() -> None:
    draws = prompt_draws(3, generator())
    assert ratio_interval(np.array([1, 0, 0]), np.array([4, 0, 0]), draws) is None
    interval = ratio_interval(np.array([1, 2, 0]), np.array([4, 4, 0]), draws)
    assert interval is not None
    assert interval[0] < 3 / 8 < interval[1]


def test_an_interval_keeps_to_what_the_ratio_can_be() -> None:
    draws = prompt_draws(2, generator())
    low, high = ratio_interval(np.array([0, 9]), np.array([10, 10]), draws, most=1.0) or (None, None)
    assert (low, high) == (0.0, 1.0)
    assert (ratio_interval(np.array([0, 9]), np.array([10, 10]), draws) or (0, 0))[1] > 1.0


def test_alike_prompts_leave_no_doubt() -> None:
    interval = ratio_interval(np.full(8, 3), np.full(8, 10), prompt_draws(8, generator()))
    assert interval == pytest.approx((0.3, 0.3))


def test_rounds_scatter_as_students_t() -> None:
    logs = np.log([1.0, 1.1, 1.2])
    spread = round_spread([1.0, 1.1, 1.2], generator(), 20_000)
    error = logs.std(ddof=1) / math.sqrt(3)
    assert np.quantile(spread, 0.975) == pytest.approx(4.303 * error, rel=0.1)  # t(0.975; 2)
    assert not round_spread([1.0], generator()).any()


def test_an_interval_holds_its_figure() -> None:
    assert log_interval(2.0, np.full(100, 0.3)) == pytest.approx((2.0, 2.0 * math.exp(0.3)))


def test_quantiles_pool_prompts_and_rounds_and_leave_failed_requests_out() -> None:
    values = np.array([[1.0, 1.0], [2.0, 2.0], [3.0, math.nan], [4.0, 4.0]])
    found = quantile_interval(values, 0.5, prompt_draws(4, generator()), generator())
    assert found is not None
    point, (low, high) = found
    assert point == pytest.approx(np.quantile([1, 1, 2, 2, 3, 4, 4], 0.5))
    assert low < point < high
    assert quantile_interval(np.full((2, 2), math.nan), 0.5, prompt_draws(2, generator()), generator()) is None


def test_a_medians_interval_covers_the_true_median_about_as_often_as_it_says() -> None:
    rng = np.random.default_rng(7)
    draws, hits = prompt_draws(40, generator(), 300), 0
    for _ in range(100):
        values = np.exp(rng.normal(size=(40, 1)))  # the median is 1
        found = quantile_interval(values, 0.5, draws, generator())
        assert found is not None
        hits += found[1][0] <= 1.0 <= found[1][1]
    assert 88 <= hits <= 100
