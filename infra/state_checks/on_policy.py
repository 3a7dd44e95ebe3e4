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
from typing import Annotated, Any, Literal, NamedTuple

import torch
from pydantic import Field, field_validator
from torch import Tensor

from infra.config import CONTENT, Config
from infra.state_checks.verifier_head import VerifierHead

# Positions that the head is read from memory for at once: 84 MB of bf16 logits for a vocabulary of 163,840.
_CHUNK_POSITIONS = 256
# Of these, logits that are worked on at once: what the passes over them touch fits a core's cache.
_VALUES_AT_ONCE = 2**18
# What a sound sample is judged by.
_FIRST_POSITIONS = 8
# Exponents `a` of the module's docstring: about shortfall / variance tells most.
_FLATTENINGS = (0.25, 0.5)
_COLUMNS = 6 + len(_FLATTENINGS)
# Of a token against the first choice. Less is nothing to a float32 sum, and an exponential that is no normal number
# would make each operation many times as slow.
_LEAST_LOG_WEIGHT = -80.0
# Lower temperatures, 0 too, are judged as this one: divided by less, the rounding of a logit (bf16 logits of 16 to
# 32 are 0.125 apart, quantized kernels differ more) would count as a shortfall.
LOWEST_TEMPERATURE = 0.2
# However sure the verifier is of its text, this share of its first choices is another's after rounding.
_MOST_EXPECTED = 0.98


class OnPolicyConfig(Config):
    """When a sample's text counts as not the verifier's own."""

    on_policy: Annotated[Literal["auto", "required", "off"], CONTENT] = "auto"
    """Whether the verifier's own head must predict the completions. `auto`: unless its checkpoint is of a layout
    that is not known (a quantized head), which is warned of; `required`: such a checkpoint is refused."""
    positions: Annotated[int, CONTENT, Field(ge=4)] = 32
    """Positions of a sample that are judged, drawn by its id, where its first eight leave a doubt; one costs
    2 * hidden size * vocabulary operations."""
    margin_nats: Annotated[float, CONTENT, Field(gt=0)] = 0.5
    """Least shortfall of the mean log-probability that is refused. Raise it for responses that were sampled with a
    repetition, presence or frequency penalty."""
    margin_top1: Annotated[float, CONTENT, Field(gt=0, lt=1)] = 0.15
    """Least shortfall of the share of most likely tokens that is refused."""
    evidence_nats: Annotated[float, CONTENT, Field(gt=0)] = 12.0
    """How unlikely the shortfall must be besides: sound samples are refused with a probability of exp(-this)."""
    stage_margin_nats: float = Field(default=0.15, gt=0)
    """Least shortfall of the mean log-probability over a whole shard or stage that is refused."""

    @field_validator("on_policy", mode="before")
    @classmethod
    def _off_in_yaml(cls, value: object) -> object:
        return "off" if value is False else value  # what YAML makes of a bare `off`


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

    @classmethod
    def of(cls, columns: Sequence[float]) -> OnPolicy:
        """Of its attributes in their order, the ratios last."""
        positions, top1, expected_top1, logprob, expected_logprob, variance, *ratios = columns
        return cls(positions, top1, expected_top1, logprob, expected_logprob, variance, tuple(ratios))

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


class Excerpt(NamedTuple):
    """What is judged of one sample.

    Args:
        states: [positions, hidden] before the final norm, in an order that is random itself: the first few are a
            sample of all.
        tokens: [positions], each the one that follows.
        temperature: that they were sampled at.
    """

    states: Tensor
    tokens: Tensor
    temperature: float

    @classmethod
    def of(
        cls,
        last_states: Tensor,
        input_ids: Sequence[int],
        loss_mask: Sequence[bool],
        temperature: float,
        seed: str,
        config: OnPolicyConfig,
    ) -> Excerpt:
        """Up to `config.positions` of a sample's tokens under the loss_mask.

        Args:
            last_states: [tokens, hidden].
            seed: chooses the positions: the sample's id.
        """
        written = [position for position in range(1, len(input_ids)) if loss_mask[position]]
        chosen = random.Random(seed).sample(written, min(len(written), config.positions))
        tokens = torch.tensor([input_ids[position] for position in chosen], dtype=torch.long)
        before = torch.tensor(chosen, dtype=torch.long) - 1
        return cls(last_states[before], tokens, max(temperature, LOWEST_TEMPERATURE))

    def first(self, count: int) -> Excerpt:
        return Excerpt(self.states[:count], self.tokens[:count], self.temperature)


def measure(head: VerifierHead, excerpts: Sequence[Excerpt], config: OnPolicyConfig) -> list[OnPolicy]:
    """What the verifier's head says of each excerpt.

    A sample that leaves no doubt at its first few positions is judged by them alone, any other by all.
    Samples are measured together, since the head is read from memory once for all positions of a chunk.
    """
    found = _looks(head, [excerpt.first(_FIRST_POSITIONS) for excerpt in excerpts], evidence=False)
    doubtful = [index for index, look in enumerate(found) if _doubtful(look, config)]
    for index, look in zip(
        doubtful, _looks(head, [excerpts[index] for index in doubtful], evidence=True), strict=True
    ):
        found[index] = look
    return found


def _looks(head: VerifierHead, excerpts: Sequence[Excerpt], *, evidence: bool) -> list[OnPolicy]:
    """Sums over all positions of each; the ratios are left 0 where no evidence is asked for."""
    if not any(len(excerpt.tokens) for excerpt in excerpts):
        return [OnPolicy() for _ in excerpts]
    states = torch.cat([excerpt.states for excerpt in excerpts])
    tokens = torch.cat([excerpt.tokens for excerpt in excerpts])
    counts = torch.tensor([len(excerpt.tokens) for excerpt in excerpts])
    temperatures = torch.tensor([excerpt.temperature for excerpt in excerpts]).repeat_interleave(counts)
    owners = torch.arange(len(excerpts)).repeat_interleave(counts)
    sums = torch.zeros(len(excerpts), _COLUMNS, dtype=torch.float64)
    for start in range(0, len(tokens), _CHUNK_POSITIONS):
        chunk = slice(start, start + _CHUNK_POSITIONS)
        columns = head.product(states[chunk]), tokens[chunk], temperatures[chunk]
        rows = max(1, _VALUES_AT_ONCE // head.vocab_size)
        parts = zip(*(torch.split(column, rows) for column in columns), strict=True)
        measured = torch.cat([_measured(head.scaled(part), *more, evidence=evidence) for part, *more in parts])
        sums.index_add_(0, owners[chunk], measured)
    return [OnPolicy.of(row) for row in sums.tolist()]


def _doubtful(found: OnPolicy, config: OnPolicyConfig) -> bool:
    """Whether all of a sample's positions must be looked at: half of what would be refused shows."""
    missing_top1 = (found.expected_top1 - found.top1) / max(found.positions, 1.0)
    return found.shortfall > config.margin_nats / 2 or missing_top1 > config.margin_top1 / 2


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


def _measured(logits: Tensor, tokens: Tensor, temperatures: Tensor, *, evidence: bool) -> Tensor:
    """What softmax(logits [positions, vocab] / temperatures [positions]) says of tokens [positions].

    Over a large vocabulary the passes over the logits cost about as much as the head's own product. So there is one
    exponential of each, in place, and only the evidence takes roots of it.

    Effects: overwrites logits.
    Returns: the columns of `OnPolicy.of`, [positions, columns] float64.
    """
    scaled = logits.div_(temperatures[:, None])
    scaled -= scaled.amax(dim=-1, keepdim=True)
    own = scaled.gather(1, tokens[:, None]).squeeze(1)
    scaled.clamp_(min=_LEAST_LOG_WEIGHT)
    weights = scaled.exp()  # [positions, vocab], 1 for the first choice
    total = weights.sum(dim=-1)
    log_total = total.log()
    logprob = own - log_total
    ratios = [torch.zeros_like(own)] * len(_FLATTENINGS)
    if evidence:
        roots = weights.sqrt()
        sums = (roots * roots.sqrt()).sum(dim=-1), roots.sum(dim=-1)  # of weights^(1 - a), for each flattening
        ratios = [
            -a * logprob - (flattened.log() - (1 - a) * log_total)
            for a, flattened in zip(_FLATTENINGS, sums, strict=True)
        ]
    mean = weights.mul_(scaled).sum(dim=-1) / total  # of the logits less the largest, in expectation
    variance = weights.mul_(scaled).sum(dim=-1) / total - mean.square()
    first_choice = (own == 0).float()
    columns = [torch.ones_like(own), first_choice, 1 / total, logprob, mean - log_total, variance.clamp(min=0)]
    return torch.stack([*columns, *ratios], dim=1).double()


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
