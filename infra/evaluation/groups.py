"""Acceptance by context length and by domain, from what vLLM says of each request and step.

The counters on /metrics are of the whole server. With `--per-request-spec-decode-metrics=detailed` vLLM 0.32 also
says in each answer how many tokens were drafted and accepted in each step that verified a draft, from the same
place in its scheduler, so both sums must agree (`tells_all`). Where every step drafted, as eagle3 does, the steps
before one say how long its context was. ngram drafts only where the text repeats: its steps have no known place.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from infra.evaluation.comparison import acceptance
from infra.evaluation.config import EvaluateConfig
from infra.evaluation.intervals import Counts, generator, prompt_draws, ratio_interval
from infra.evaluation.measurement import Measurement, RequestResult

CONTEXT = "context"
DOMAIN = "domain"
Row = dict[str, Any]

# Where more of the drafts have no known place, a bin's others would be a choice of their own.
MAX_UNPLACED_SHARE = 0.05

GROUPS = pa.schema(
    [
        pa.field("label", pa.string(), nullable=False),
        pa.field("method", pa.string(), nullable=False),
        pa.field("draft", pa.string()),
        pa.field("dataset", pa.string(), nullable=False),
        pa.field("temperature", pa.float64(), nullable=False),
        pa.field("concurrency", pa.int32(), nullable=False),
        pa.field("num_speculative_tokens", pa.int32(), nullable=False),
        pa.field("group_by", pa.string(), nullable=False),  # context or domain
        pa.field("group", pa.string(), nullable=False),
        pa.field("context_from", pa.int64()),  # tokens before the drafted ones; null for domains
        pa.field("context_to", pa.int64()),  # exclusive; null in the last bin too
        pa.field("num_requests", pa.int64(), nullable=False),
        pa.field("num_drafts", pa.int64(), nullable=False),
        pa.field("num_draft_tokens", pa.int64(), nullable=False),
        pa.field("num_accepted_tokens", pa.int64(), nullable=False),
        pa.field("accepted_per_position", pa.list_(pa.int64()), nullable=False),
        pa.field("acceptance_length", pa.float64(), nullable=False),
        pa.field("acceptance_length_low", pa.float64()),  # null where one prompt only
        pa.field("acceptance_length_high", pa.float64()),
        pa.field("acceptance_rate_per_position", pa.list_(pa.float64()), nullable=False),
    ]
)


def tells_all(measurement: Measurement) -> bool:
    """Whether what vLLM said of the requests sums to what its counters said of the server."""
    told = [request.figures for request in measurement.requests if request.figures is not None]
    if len(told) != measurement.num_requests:
        return False
    counted = measurement.counters
    # A failed request's steps are in the counters alone.
    failed = len(measurement.requests) > measurement.num_requests
    sums = (
        sum(len(figures.accepted) for figures in told),
        sum(sum(figures.drafted) for figures in told),
        sum(sum(figures.accepted) for figures in told),
    )
    return failed or sums == (counted.num_drafts, counted.num_draft_tokens, counted.num_accepted_tokens)


def accepted_by_prompt(rounds: Sequence[Measurement], num_positions: int) -> tuple[Counts, Counts, Counts]:
    """Drafts, drafted tokens and drafts accepted through each position, by prompt over all rounds.

    Returns:
        [num_prompts], [num_prompts] and [num_prompts, num_positions].
    """
    num_prompts = len(rounds[0].requests)
    drafts, drafted = np.zeros(num_prompts, np.int64), np.zeros(num_prompts, np.int64)
    accepted = np.zeros((num_prompts, num_positions), np.int64)
    for measurement in rounds:
        for prompt, request in enumerate(measurement.requests):
            if request.figures is not None:
                drafts[prompt] += len(request.figures.accepted)
                drafted[prompt] += sum(request.figures.drafted)
                for count in request.figures.accepted:
                    accepted[prompt, :count] += 1
    return drafts, drafted, accepted


def step_contexts(request: RequestResult) -> list[int] | None:
    """Tokens before the drafted ones in each step that verified a draft; None where they are not known.

    An answer's first step gives one token; each one after it, if it drafted, what it accepted and one more.
    """
    if request.figures is None or not request.figures.accepted:
        return None
    contexts, context = [], len(request.prompt_token_ids) + 1
    for count in request.figures.accepted:
        contexts.append(context)
        context += count + 1
    end = len(request.prompt_token_ids) + len(request.completion_token_ids)
    # vLLM drops what the last step accepted beyond the answer's end.
    return contexts if contexts[-1] < end <= context else None


@dataclass(frozen=True)
class _Step:
    """One draft that was verified."""

    prompt: int
    round_index: int
    domain: str
    context: int | None
    accepted: int
    drafted: int


@dataclass(frozen=True)
class _Group:
    group_by: str
    group: str
    context_from: int | None = None
    context_to: int | None = None


def group_rows(rounds: Sequence[Measurement], head: Mapping[str, Any], config: EvaluateConfig) -> list[Row]:
    """Rows of `GROUPS` of one way of decoding under one load; none where vLLM does not tell.

    Args:
        rounds: with the same prompts in each.
        head: the columns that all of them share.
    """
    if not all(tells_all(measurement) for measurement in rounds):
        return []
    steps = list(_steps(rounds))
    grouped: dict[_Group, list[_Step]] = {}
    if sum(step.context is None for step in steps) <= MAX_UNPLACED_SHARE * len(steps):
        placed = [step for step in steps if step.context is not None]
        for step in sorted(placed, key=lambda step: step.context or 0):
            grouped.setdefault(_bin(step.context or 0, config.context_bins), []).append(step)
    for step in sorted(steps, key=lambda step: step.domain):
        grouped.setdefault(_Group(DOMAIN, step.domain), []).append(step)
    draws = prompt_draws(len(rounds[0].requests), generator())
    return [{**head, **_figures(group, chosen, draws)} for group, chosen in grouped.items()]


def _steps(rounds: Sequence[Measurement]) -> Iterator[_Step]:
    for measurement in rounds:
        for prompt, request in enumerate(measurement.requests):
            if request.figures is None:
                continue
            accepted, drafted = request.figures.accepted, request.figures.drafted
            contexts: Sequence[int | None] = step_contexts(request) or [None] * len(accepted)
            for context, kept, proposed in zip(contexts, accepted, drafted, strict=True):
                yield _Step(prompt, measurement.round_index, request.domain, context, kept, proposed)


def _bin(context: int, edges: Sequence[int]) -> _Group:
    place = bisect.bisect_right(edges, context)
    low = edges[place - 1] if place else 0
    if place == len(edges):
        return _Group(CONTEXT, f"{low}+", low)
    return _Group(CONTEXT, f"{low}-{edges[place] - 1}", low, edges[place])


def _figures(group: _Group, steps: Sequence[_Step], draws: Counts) -> Row:
    accepted_per_position = [
        sum(step.accepted > place for step in steps) for place in range(max(step.drafted for step in steps))
    ]
    num_accepted, num_drafted = sum(step.accepted for step in steps), sum(step.drafted for step in steps)
    found = acceptance(len(steps), num_drafted, num_accepted, accepted_per_position)
    prompts = np.array([step.prompt for step in steps])
    accepted = np.bincount(prompts, [step.accepted for step in steps], minlength=draws.shape[1])
    drafts = np.bincount(prompts, minlength=draws.shape[1])
    interval = ratio_interval(accepted.astype(np.int64), drafts, draws, most=len(accepted_per_position))
    return {
        **dataclasses.asdict(group),
        "num_requests": len({(step.prompt, step.round_index) for step in steps}),
        "num_drafts": len(steps),
        "num_draft_tokens": num_drafted,
        "num_accepted_tokens": num_accepted,
        "accepted_per_position": accepted_per_position,
        "acceptance_length": found.length,
        "acceptance_length_low": None if interval is None else 1.0 + interval[0],
        "acceptance_length_high": None if interval is None else 1.0 + interval[1],
        "acceptance_rate_per_position": list(found.rate_per_position),
    }
