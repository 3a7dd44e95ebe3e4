"""Where greedy answers part, how nearly the tokens tie there, and what is made of it."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest

from infra.errors import ServerError, StageFailed
from infra.evaluation.agreement import (
    FAULT,
    IDENTICAL,
    MAX_SCORED,
    NEAR_TIES,
    NOT_COMPARED,
    Agreement,
    Parting,
    agreement,
    compare_outputs,
    score_partings,
)
from tests.fakes.measurements import measurement

PROMPT = (1, 2, 3)


def test_outputs_are_compared_up_to_the_first_difference() -> None:
    reference = measurement("none", [1.0] * 4, outputs=[[1, 2, 3], [4, 5, 6, 7], [8, 9], [1]])
    ours = measurement("eagle3", [1.0] * 4, outputs=[[1, 2, 3], [4, 9, 6, 7], [8, 9, 10], [1]])
    found = compare_outputs(ours, reference)
    partings = (Parting(PROMPT, (4,), 9, 5), Parting(PROMPT, (8, 9), 10, None))
    assert found == Agreement(num_compared=4, num_tokens=3 + 2 + 3 + 1, partings=partings)
    assert (found.num_identical, found.first_differences) == (2, [1, 2])


def test_methods_are_held_against_the_same_round_and_the_baseline_against_its_first() -> None:
    answers = [[[1, 2]], [[1, 3]], [[1, 2]]]
    baseline = [measurement("none", [1.0], round_index=i, outputs=ids) for i, ids in enumerate(answers)]
    ours = [measurement("eagle3", [1.0], round_index=i, outputs=[[1, 2]]) for i in range(3)]
    assert agreement(ours, baseline).first_differences == [1]
    own = agreement(baseline, baseline)
    assert (own.num_compared, own.partings) == (2, (Parting(PROMPT, (1,), 3, 2),))
    sampled = [measurement("eagle3", [1.0], outputs=[[1, 2]], temperature=0.7)]
    assert agreement(sampled, baseline[:1]) == Agreement()


class Scorer:
    """Knows how much less likely each token is than the likeliest one, wherever it stands."""

    def __init__(self, gaps: dict[int, float]) -> None:
        self.gaps = gaps
        self.asked: list[tuple[tuple[int, ...], tuple[int, ...]]] = []

    async def gaps_nats(self, prompt_token_ids: Sequence[int], completion_token_ids: Sequence[int]) -> list[float]:
        self.asked.append((tuple(prompt_token_ids), tuple(completion_token_ids)))
        if completion_token_ids[-1] == 404:
            raise StageFailed("too long")
        if completion_token_ids[-1] == 500:
            raise ServerError("gone")
        return [self.gaps.get(token, 0.0) for token in completion_token_ids]


async def test_the_gap_is_that_of_the_less_likely_token_on_the_text_both_share() -> None:
    scorer = Scorer({5: 0.125, 9: 2.0})
    near, far = Parting(PROMPT, (4,), 5, 6), Parting(PROMPT, (4, 7), 8, 9)
    ended = Parting(PROMPT, (4, 7), 5, None)
    scored = await score_partings(scorer, [Agreement(4, 9, (near, far, ended)), Agreement(2, 2, (near,))])
    assert scored == {near: 0.125, far: 2.0, ended: 0.125}
    assert scorer.asked[:2] == [(PROMPT, (4, 5)), (PROMPT, (4, 6))]
    assert len(scorer.asked) == 5, "the same parting is scored once"


async def test_what_cannot_be_scored_is_no_number_but_a_dead_server_is_an_error() -> None:
    parting = Parting(PROMPT, (), 404, 5)
    scored = await score_partings(Scorer({}), [Agreement(1, 1, (parting,))])
    assert math.isnan(scored[parting])
    with pytest.raises(ServerError):
        await score_partings(Scorer({}), [Agreement(1, 1, (Parting(PROMPT, (), 500, 5),))])


async def test_a_broken_sampler_does_not_cost_a_pass_for_each_answer() -> None:
    many = tuple(Parting(PROMPT, (place,), 5, 6) for place in range(3 * MAX_SCORED))
    assert len(await score_partings(Scorer({}), [Agreement(len(many), 1, many)])) == MAX_SCORED


@pytest.mark.parametrize(
    ("gaps", "verdict"),
    [
        ([], IDENTICAL),
        ([0.125, 0.5], NEAR_TIES),
        ([0.125, math.nan], NEAR_TIES),
        ([0.125, 0.51], FAULT),
        ([math.nan, 9.0], FAULT),
        ([math.nan], NOT_COMPARED),
    ],
)
def test_only_more_than_a_near_tie_is_a_fault(gaps: list[float], verdict: str) -> None:
    partings = tuple(Parting(PROMPT, (place,), 5, 6) for place in range(len(gaps)))
    found = Agreement(10, 99, partings)
    scored = dict(zip(partings, gaps, strict=True))
    assert found.verdict(scored, tie_nats=0.5) == verdict
    assert [str(gap) for gap in found.gaps_nats(scored)] == [str(gap) for gap in gaps]
    assert Agreement().verdict({}, 0.5) == NOT_COMPARED
