"""Whether the verifier wrote the text that its states belong to: its own head must predict each next token.

States that are shifted, of other text or of another layer, and responses of another model, all look sound by
themselves. But `head(norm(state))` at position t is the very distribution that token t+1 was drawn from, so it can
be tested whether it was.

**Sampled at temperature T.** Let p = softmax(logits / T) at a position, x = log p(token). For a token drawn from p,
x has mean -H (H the entropy of p), and a mean of x that lies far below is suspect. How far is chance is not left to
a standard error, since x has a long tail (one rare token among four) that a normal distribution knows nothing of:
for 0 < a < 1 the product over positions of

    p(token)^-a / sum_v p(v)^(1-a)

is a likelihood ratio (the token drawn from p flattened, proportional to p^(1-a), against p). Under p its mean is 1
whatever the text, so by Markov's inequality it exceeds exp(E) with a probability of at most exp(-E), for any number
of positions; so does its mean over some values of a. Its log is the evidence, in nats. For many positions it grows
like shortfall^2 / (2 variance), as a normal test does.

**Top-1.** The share of tokens that are the most likely one has the mean of max p. By Hoeffding (1963, theorem 1) a
share s below a mean m has a probability of at most exp(-n KL(s || m)): n KL is the evidence.

**Greedy text** is judged as if sampled at a low temperature. Text of a lower temperature than it is judged at, as
of top_p, top_k and min_p, has likelier tokens, which these one-sided tests allow; and among near ties, which
another batch or kernel breaks otherwise, every choice is a likely one. Penalties (repetition, presence, frequency)
make for less likely tokens, see `margin_nats`.

A sample is refused when the evidence and the size of the shortfall are both beyond the config's limits: the one
says that it is no chance, the other that it is no rounding.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor

from infra.config import CONTENT, Config
from infra.verifier_head import VerifierHead

# Positions whose logits are in memory at once: 21 MB of float32 for a vocabulary of 163,840.
_CHUNK_POSITIONS = 32
# Exponents `a` of the module's docstring: the small ones find a small shortfall of many positions.
_FLATTENINGS = (0.05, 0.2, 0.5)
# Lower temperatures, 0 too, are judged as this one: divided by less, the rounding of a logit (bf16 logits of 16 to
# 32 are 0.125 apart) would count as a shortfall.
LOWEST_TEMPERATURE = 0.1
# However sure the verifier is of its text, this share of its first choices is another's after rounding.
_MOST_EXPECTED = 0.98


class OnPolicyConfig(Config):
    """When a sample's text counts as not the verifier's own."""

    on_policy: Annotated[Literal["auto", "required", "off"], CONTENT] = "auto"
    """Whether the verifier's own head must predict the completions. `auto`: unless its checkpoint is of a layout
    that is not known (a quantized head), which is warned of; `required`: such a checkpoint is refused."""
    positions: Annotated[int, CONTENT, Field(ge=4)] = 32
    """Positions of a sample that are judged, drawn by its id; one costs 2 * hidden size * vocabulary operations."""
    margin_nats: Annotated[float, CONTENT, Field(gt=0)] = 0.5
    """Least shortfall of the mean log-probability that is refused. Raise it for responses that were sampled with a
    repetition, presence or frequency penalty."""
    margin_top1: Annotated[float, CONTENT, Field(gt=0, lt=1)] = 0.15
    """Least shortfall of the share of most likely tokens that is refused."""
    evidence_nats: Annotated[float, CONTENT, Field(gt=0)] = 12.0
    """How unlikely the shortfall must be besides: sound samples are refused with a probability of exp(-this)."""
    stage_margin_nats: float = Field(default=0.15, gt=0)
    """Least shortfall of the mean log-probability over a whole shard or stage that is refused."""


@dataclass(frozen=True)
class OnPolicy:
    """Sums over the judged positions of a sample, a shard or a stage.

    Attributes:
        positions: how many.
        top1: tokens that are the most likely one.
        expected_top1: what `top1` is expected to be.
        logprob: log-probability of the tokens, at the temperature they were sampled at.
        expected_logprob: what `logprob` is expected to be.
        variance: of `logprob`.
        ratios: log likelihood ratio for each of `_FLATTENINGS`.
    """

    positions: float = 0.0
    top1: float = 0.0
    expected_top1: float = 0.0
    logprob: float = 0.0
    expected_logprob: float = 0.0
    variance: float = 0.0
    ratios: tuple[float, ...] = (0.0,) * len(_FLATTENINGS)

    def __add__(self, other: OnPolicy) -> OnPolicy:
        return OnPolicy(
            self.positions + other.positions,
            self.top1 + other.top1,
            self.expected_top1 + other.expected_top1,
            self.logprob + other.logprob,
            self.expected_logprob + other.expected_logprob,
            self.variance + other.variance,
            tuple(mine + others for mine, others in zip(self.ratios, other.ratios, strict=True)),
        )

    @property
    def shortfall(self) -> float:
        """Nats a position by which the tokens are less likely than the verifier's own would be."""
        return (self.expected_logprob - self.logprob) / max(self.positions, 1.0)

    def to_json(self) -> dict[str, float]:
        """Means over the positions, for a shard's record."""
        count = max(self.positions, 1.0)
        return {
            "positions": int(self.positions),
            "top1": round(self.top1 / count, 5),
            "expected_top1": round(self.expected_top1 / count, 5),
            "mean_logprob": round(self.logprob / count, 5),
            "expected_logprob": round(self.expected_logprob / count, 5),
            "variance": round(self.variance / count, 5),
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> OnPolicy:
        """What a record says; without the ratios, which only a sample is judged by."""
        count = value["positions"]
        means = (value[name] for name in ("top1", "expected_top1", "mean_logprob", "expected_logprob", "variance"))
        return cls(count, *(count * mean for mean in means))


def measure(
    head: VerifierHead,
    last_states: Tensor,
    input_ids: Sequence[int],
    loss_mask: Sequence[bool],
    temperature: float,
    seed: str,
    config: OnPolicyConfig,
) -> OnPolicy:
    """What the verifier's head says of the tokens under the loss_mask, at up to `config.positions` of them.

    Args:
        last_states: [tokens, hidden], before the final norm.
        temperature: that the tokens were sampled at.
        seed: chooses the positions: the sample's id.
    """
    written = [position for position in range(1, len(input_ids)) if loss_mask[position]]
    chosen = sorted(random.Random(seed).sample(written, min(len(written), config.positions)))
    total = OnPolicy()
    for start in range(0, len(chosen), _CHUNK_POSITIONS):
        positions = torch.tensor(chosen[start : start + _CHUNK_POSITIONS])
        tokens = torch.tensor([input_ids[position] for position in positions.tolist()])
        logits = head.logits(last_states[positions - 1])  # [positions, vocab]
        total += _measured(logits, tokens, max(temperature, LOWEST_TEMPERATURE))
    return total


def problem(found: OnPolicy, config: OnPolicyConfig) -> str | None:
    """Why a sample's text is not the verifier's own; None if it may well be."""
    if not found.positions:
        return None
    top1, expected = found.top1 / found.positions, found.expected_top1 / found.positions
    unlikely = found.shortfall > config.margin_nats and _ratio_evidence(found) > config.evidence_nats
    elsewhere = expected - top1 > config.margin_top1 and _top1_evidence(found) > config.evidence_nats
    if not unlikely and not elsewhere:
        return None
    return f"off-policy: {said(found)}"


def total_problem(found: OnPolicy, config: OnPolicyConfig) -> str | None:
    """Why the samples of a shard or stage together are not the verifier's own; None if they may well be.

    Finds what no sample shows by itself: a shortfall below `margin_nats`, answers of a few tokens. So many
    positions are distributed normally enough.
    """
    if found.shortfall <= config.stage_margin_nats:
        return None
    evidence = found.positions * found.shortfall**2 / (2 * max(found.variance / found.positions, 1e-9))
    return said(found) if evidence > config.evidence_nats else None


def said(found: OnPolicy) -> str:
    """The statistics in words."""
    means = found.to_json()
    return (
        f"the verifier's own head gives the tokens a mean log-probability of {means['mean_logprob']:.2f}, and "
        f"{means['expected_logprob']:.2f} to text of its own; {means['top1']:.2f} of them are its first choice, "
        f"of its own text {means['expected_top1']:.2f} ({means['positions']} positions)"
    )


def _measured(logits: Tensor, tokens: Tensor, temperature: float) -> OnPolicy:
    """What softmax(logits [positions, vocab] / temperature) says of tokens [positions]."""
    logprobs = torch.log_softmax(logits / temperature, dim=-1)
    own = logprobs.gather(1, tokens[:, None]).squeeze(1)
    top = logprobs.amax(dim=-1)
    probs = logprobs.exp()
    mean = (probs * logprobs).sum(dim=-1)
    variance = (probs * logprobs.square()).sum(dim=-1) - mean.square()
    ratios = tuple(float((-a * own - ((1 - a) * logprobs).logsumexp(dim=-1)).sum()) for a in _FLATTENINGS)
    return OnPolicy(
        positions=float(len(tokens)),
        top1=float((own >= top).sum()),
        expected_top1=float(top.exp().sum()),
        logprob=float(own.sum()),
        expected_logprob=float(mean.sum()),
        variance=float(variance.clamp(min=0).sum()),
        ratios=ratios,
    )


def _ratio_evidence(found: OnPolicy) -> float:
    """Log of the mean likelihood ratio over the flattenings."""
    largest = max(found.ratios)
    return largest + math.log(sum(math.exp(ratio - largest) for ratio in found.ratios) / len(found.ratios))


def _top1_evidence(found: OnPolicy) -> float:
    """positions * KL(share found || share expected), of a share that is too small."""
    share, expected = found.top1 / found.positions, min(found.expected_top1 / found.positions, _MOST_EXPECTED)
    if share >= expected:
        return 0.0
    hits = share * math.log(share / expected) if share else 0.0
    return found.positions * (hits + (1 - share) * math.log((1 - share) / (1 - expected)))
