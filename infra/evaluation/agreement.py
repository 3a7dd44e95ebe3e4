"""Whether greedy answers stay the same under speculation, and where they part, how nearly the two tokens tied.

Two greedy runs part without any fault where two logits nearly tie in bf16 and another batch shape rounds them the
other way; what comes after says nothing. So of each pair of answers the first difference is judged, by the
baseline's server: it scores the text up to there as a prompt, which no draft has part in
(`infra.evaluation.losslessness`).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from infra.errors import StageFailed
from infra.evaluation.measurement import BASELINE, Measurement

logger = logging.getLogger("draftsmith.evaluation")

IDENTICAL = "identical"
NEAR_TIES = "near-ties"
FAULT = "fault"
NOT_COMPARED = "not compared"

# Each takes one or two passes over a prompt; a broken sampler parts every answer, and these show it.
MAX_SCORED = 64


@dataclass(frozen=True)
class Parting:
    """The first difference of two answers to one prompt.

    Attributes:
        shared: what both gave before.
        ours, theirs: the token that each gave there; None where that answer had ended.
    """

    prompt_token_ids: tuple[int, ...]
    shared: tuple[int, ...]
    ours: int | None
    theirs: int | None

    @property
    def position(self) -> int:
        """Among the answer's tokens, from 0."""
        return len(self.shared)


@dataclass(frozen=True)
class Agreement:
    """How far two ways of decoding gave the same tokens.

    Attributes:
        num_compared: pairs of answers.
        num_tokens: tokens compared, up to and with each pair's first difference.
        partings: of the pairs that differ.
    """

    num_compared: int = 0
    num_tokens: int = 0
    partings: tuple[Parting, ...] = ()

    @property
    def num_identical(self) -> int:
        return self.num_compared - len(self.partings)

    @property
    def first_differences(self) -> list[int]:
        return [parting.position for parting in self.partings]

    def __add__(self, other: Agreement) -> Agreement:
        return Agreement(
            self.num_compared + other.num_compared,
            self.num_tokens + other.num_tokens,
            self.partings + other.partings,
        )

    def gaps_nats(self, scored: Mapping[Parting, float]) -> list[float]:
        """The gap at each parting (`score_partings`); NaN where it was not scored."""
        return [scored.get(parting, math.nan) for parting in self.partings]

    def verdict(self, scored: Mapping[Parting, float], tie_nats: float) -> str:
        """`identical`, `near-ties`, `fault` or `not compared`.

        Args:
            tie_nats: how far apart two tokens may be that tie.
        """
        if not self.num_compared:
            return NOT_COMPARED
        if not self.partings:
            return IDENTICAL
        gaps = self.gaps_nats(scored)
        if any(gap > tie_nats for gap in gaps):
            return FAULT
        return NOT_COMPARED if all(math.isnan(gap) for gap in gaps) else NEAR_TIES


def agreement(rounds: Sequence[Measurement], baseline: Sequence[Measurement]) -> Agreement:
    """A way of decoding against the baseline round by round; the baseline against its own first round, as a
    yardstick. Nothing is compared that was sampled.
    """
    if not rounds[0].sampling.greedy:
        return Agreement()
    if rounds[0].way.method == BASELINE:
        pairs = [(measurement, rounds[0]) for measurement in rounds[1:]]
    else:
        pairs = list(zip(rounds, baseline, strict=True))
    return sum((compare_outputs(ours, reference) for ours, reference in pairs), Agreement())


def compare_outputs(ours: Measurement, reference: Measurement) -> Agreement:
    """Compare two measurements' answers prompt by prompt; failed requests are left out."""
    theirs = {request.sample_id: request for request in reference.requests if request.error is None}
    total = Agreement()
    for request in ours.requests:
        other = theirs.get(request.sample_id)
        if request.error is not None or other is None:
            continue
        mine, yours = request.completion_token_ids, other.completion_token_ids
        place = _first_difference(mine, yours)
        if place is None:
            total += Agreement(1, len(mine))
        else:
            ids = [answer[place] if place < len(answer) else None for answer in (mine, yours)]
            parting = Parting(request.prompt_token_ids, mine[:place], *ids)
            total += Agreement(1, place + 1, (parting,))
    return total


def _first_difference(ours: Sequence[int], theirs: Sequence[int]) -> int | None:
    for position, (mine, other) in enumerate(zip(ours, theirs, strict=False)):
        if mine != other:
            return position
    return None if len(ours) == len(theirs) else min(len(ours), len(theirs))


class Scorer(Protocol):
    """What tells how likely tokens are: `infra.evaluation.losslessness.PromptScorer`."""

    async def gaps_nats(
        self, prompt_token_ids: Sequence[int], completion_token_ids: Sequence[int]
    ) -> list[float]: ...


async def score_partings(scorer: Scorer, agreements: Iterable[Agreement]) -> dict[Parting, float]:
    """The gap between the two tokens of each parting, in nats: how much less likely the less likely one of them is
    than the likeliest token there. Of each agreement the first `MAX_SCORED` are scored.

    Args:
        scorer: of the baseline's server.

    Raises:
        ServerError: the server is gone.
    """
    gaps: dict[Parting, float] = {}
    for found in agreements:
        for parting in found.partings[:MAX_SCORED]:
            if parting not in gaps:
                gaps[parting] = await _gap_nats(scorer, parting)
    return gaps


async def _gap_nats(scorer: Scorer, parting: Parting) -> float:
    found = []
    for token in (parting.ours, parting.theirs):
        if token is None:
            continue
        try:
            found.append((await scorer.gaps_nats(parting.prompt_token_ids, (*parting.shared, token)))[-1])
        except StageFailed as error:  # too long to be scored, as an answer that fills the context is
            logger.warning("Token %d of an answer could not be scored: %s", parting.position, error)
            return math.nan
    return max(found)
