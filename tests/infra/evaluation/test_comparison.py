from __future__ import annotations

import dataclasses
import math

import pytest

from infra.errors import ServerError, StageFailed
from infra.evaluation.comparison import Speedup, acceptance, check_length, speedup
from infra.evaluation.measurement import Measurement, Method
from tests.fakes.measurements import measurement

BASE = [1.0, 2.0, 3.0, 1.5, 2.5, 0.5, 1.0, 2.0]


def rounds(method: Method, ratios: list[float], latencies: list[float] = BASE) -> list[Measurement]:
    """One measurement a round, that many times as fast as `latencies`."""
    return [
        measurement(method, [seconds / ratio for seconds in latencies], round_index=index)
        for index, ratio in enumerate(ratios)
    ]


def test_acceptance_by_hand() -> None:
    found = acceptance(200, 600, 90, [60, 20, 10])
    assert found.length == pytest.approx(1.45, abs=1e-12)
    assert found.rate_per_position == (0.3, 0.1, 0.05)
    assert found.draft_rate == 0.15


@pytest.mark.parametrize("counts", [(3, 7, 1, 1), (977, 613, 211, 89), (10**9 + 7, 10**9, 123_456_789, 3)])
def test_length_is_one_plus_the_sum_of_the_rates(counts: tuple[int, ...]) -> None:
    num_drafts, *accepted = counts
    found = acceptance(num_drafts, 3 * num_drafts, sum(accepted), accepted)
    assert found.length is not None
    assert abs(found.length - 1 - sum(found.rate_per_position)) < 1e-9


def test_a_length_that_is_not_the_sum_of_its_rates_is_refused() -> None:
    check_length(1.3 + 9e-10, [0.2, 0.1])
    with pytest.raises(ServerError, match="not 1 \\+ the sum"):
        check_length(1.3 + 2e-9, [0.2, 0.1])


def test_nothing_drafted_has_no_acceptance() -> None:
    found = acceptance(0, 0, 0, [0, 0, 0])
    assert (found.length, found.rate_per_position, found.draft_rate) == (None, (), None)


def test_counters_that_disagree_are_refused() -> None:
    with pytest.raises(ServerError, match="91 tokens accepted, 90"):
        acceptance(200, 600, 91, [60, 20, 10])


def test_speedup_is_the_geometric_mean_of_ratios_within_rounds() -> None:
    # The machine is half as fast in round 1, for both sides: the ratio must not see it.
    slow = [2 * seconds for seconds in BASE]
    baseline = [measurement("none", BASE), measurement("none", slow, round_index=1)]
    ours = [
        measurement("eagle3", [s / 1.2 for s in BASE]),
        measurement("eagle3", [s / 1.5 for s in slow], round_index=1),
    ]
    found = speedup(ours, baseline)
    assert found.by_round == pytest.approx((1.2, 1.5))
    assert found.ratio == pytest.approx(math.sqrt(1.2 * 1.5))


def test_without_noise_the_interval_is_a_point() -> None:
    found = speedup(rounds("eagle3", [1.3] * 3), rounds("none", [1.0] * 3))
    assert (found.low, found.ratio, found.high) == pytest.approx((1.3, 1.3, 1.3))


def test_with_prompts_alike_the_interval_is_students_t_over_rounds() -> None:
    ratios = [1.20, 1.25, 1.30]
    found = speedup(rounds("eagle3", ratios), rounds("none", [1.0] * 3))
    logs = [math.log(ratio) for ratio in ratios]
    mean = sum(logs) / 3
    error = math.sqrt(sum((value - mean) ** 2 for value in logs) / 2) / math.sqrt(3)
    assert math.log(found.low) == pytest.approx(mean - 4.303 * error, rel=0.1)  # t(0.975; 2) = 4.303
    assert math.log(found.high) == pytest.approx(mean + 4.303 * error, rel=0.1)


def test_with_rounds_alike_the_interval_is_the_bootstrap_over_prompts() -> None:
    """Half of the prompts (equally long) gain nothing, half gain 2x: 16 of them leave a known standard error."""
    plain = [1.0] * 16
    gained = [1.0, 0.5] * 8
    found = speedup(
        [measurement("eagle3", gained, round_index=i) for i in range(3)],
        [measurement("none", plain, round_index=i) for i in range(3)],
    )
    assert found.ratio == pytest.approx(1 / 0.75)
    # Standard error of the mean time: sd 0.258 (n - 1) / sqrt(16) = 0.0645, relative to 0.75: 0.086.
    assert math.log(found.high / found.low) == pytest.approx(2 * 1.96 * 0.086, rel=0.1)


def test_the_interval_is_the_same_each_time() -> None:
    ours, baseline = rounds("eagle3", [1.1, 1.3, 1.2]), rounds("none", [1.0, 1.01, 0.99], BASE[::-1])
    assert speedup(ours, baseline) == speedup(ours, baseline)


def test_several_streams_are_compared_by_their_walls() -> None:
    ours = [measurement("eagle3", [s / 0.8 for s in BASE], concurrency=8, round_index=i) for i in range(2)]
    baseline = [measurement("none", BASE, concurrency=8, round_index=i) for i in range(2)]
    assert speedup(ours, baseline).ratio == pytest.approx(0.8)


def test_a_prompt_that_failed_on_one_side_leaves_both() -> None:
    ours, baseline = rounds("eagle3", [1.2, 1.2]), rounds("none", [1.0, 1.0])
    broken = dataclasses.replace(ours[0].requests[2], completion_token_ids=(), latency_seconds=1e6, error="refused")
    ours[0] = dataclasses.replace(ours[0], requests=(*ours[0].requests[:2], broken, *ours[0].requests[3:]))
    found = speedup(ours, baseline)
    assert math.isfinite(found.low)
    assert found.high / found.low < 10


def test_sides_that_do_not_match_are_refused() -> None:
    baseline = rounds("none", [1.0, 1.0])
    with pytest.raises(StageFailed, match="rounds"):
        speedup(rounds("eagle3", [1.2]), baseline)
    with pytest.raises(StageFailed, match="not the prompts"):
        speedup(rounds("eagle3", [1.2, 1.2], BASE[:4]), baseline)
    silent = [dataclasses.replace(item, requests=()) for item in baseline]
    with pytest.raises(StageFailed, match="not one token"):
        speedup(silent, silent)


@pytest.mark.parametrize(
    ("low", "high", "word"),
    [(1.01, 1.3, "faster"), (0.7, 0.99, "slower"), (0.9, 1.1, "no difference"), (1.0, 1.2, "no difference")],
)
def test_verdicts(low: float, high: float, word: str) -> None:
    assert Speedup(ratio=1.0, low=low, high=high, by_round=()).verdict == word
