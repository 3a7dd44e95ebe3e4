"""One serve of a new speculator before it counts: vLLM drafts with it, and answers as the verifier alone would."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from infra.errors import StageFailed
from infra.evaluation.comparison import acceptance
from infra.evaluation.losslessness import PromptScorer
from infra.evaluation.measurement import settled_counters
from infra.generation.completion_client import ClientConfig, CompletionClient, Served
from infra.generation.conversations import split_turns
from infra.generation.responses import Completion, RowFailure
from infra.vllm_server import SpeculationCounters

NUM_REQUESTS = 10
MAX_TOKENS = 48
# A model's own defaults (generation_config.json) may hold penalties, under which greedy is not the likeliest token.
GREEDY = {
    "temperature": 0.0,
    "max_tokens": MAX_TOKENS,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}
QUESTIONS = (
    "Name three rivers of Europe and the seas that they end in.",
    "Write a Python function that tells whether a word is a palindrome.",
    "How does a bicycle stay upright?",
    "What is 17 times 23? Show the steps.",
    "Tell a short story about a lighthouse keeper.",
    "Explain to a child why it rains.",
    "List five words that rhyme with light.",
    "What is the difference between a list and a tuple in Python?",
    "Give a recipe for pancakes.",
    "Which planet is the largest, and how do we know?",
)

Messages = list[dict[str, Any]]


class CountingServer(Served, Protocol):
    """What is asked of a server here (`infra.vllm_server.VllmServer` has it)."""

    async def counters(self) -> SpeculationCounters: ...


@dataclass(frozen=True)
class SmokeServe:
    """What one serve has shown.

    Args:
        num_near_ties: tokens that were not the verifier's first choice, but as good as that.
        largest_gap_nats: how much less likely the least likely of them was.
        acceptance_length: as vLLM counted it over these requests.
    """

    num_requests: int
    num_tokens: int
    num_near_ties: int
    largest_gap_nats: float
    acceptance_length: float


def smoke_prompts(rows: Iterable[Mapping[str, Any]]) -> list[Messages]:
    """Ten prompts: the first turns of the shortest held-out ones, and plain questions where those are fewer.

    Args:
        rows: held-out ones of `schemas.PROMPTS`.
    """
    texts = sorted({row["messages"] for row in rows}, key=lambda text: (len(text), text))[:NUM_REQUESTS]
    plain: list[Messages] = [[{"role": "user", "content": question}] for question in QUESTIONS]
    return [*(split_turns(json.loads(text))[0] for text in texts), *plain][:NUM_REQUESTS]


async def serve_once(
    server: CountingServer, prompts: Sequence[Messages], *, tie_nats: float, timeout_seconds: float
) -> SmokeServe:
    """Ask a server that speculates with the new draft for greedy answers, all at once, and judge every token.

    Args:
        tie_nats: how much less likely than the verifier's first choice a token may be.
        timeout_seconds: longest wait for one answer.

    Raises:
        StageFailed: a request is refused, nothing was drafted, or a token is not the verifier's.
        ServerError: the server is gone.
    """
    before = await server.counters()
    config = ClientConfig(concurrency=len(prompts), timeout_seconds=timeout_seconds, max_attempts=2)
    async with CompletionClient.to(server, config) as client:
        answers = await _answers(client, prompts)
    counted = await settled_counters(server.counters) - before
    if counted.num_drafts == 0:
        raise StageFailed("vLLM has loaded the speculator but drafts nothing with it")
    gaps: list[list[float]] = []
    async with PromptScorer(server, timeout_seconds) as scorer:
        # One after another: vLLM makes the logits of a whole prompt at once, for which it has set no memory aside.
        for answer in answers:
            ids = answer.completion_token_ids
            if answer.finish_reason == "length" and len(ids) < MAX_TOKENS:
                ids = ids[:-1]  # the context is full, and vLLM wants room for one more token than it scores
            gaps.append(await scorer.gaps_nats(answer.prompt_token_ids, ids))
    refuse_wrong_tokens(gaps, tie_nats)
    positions = counted.accepted_per_position
    found = acceptance(counted.num_drafts, counted.num_draft_tokens, counted.num_accepted_tokens, positions)
    every = [gap for of_answer in gaps for gap in of_answer]
    return SmokeServe(
        num_requests=len(answers),
        num_tokens=len(every),
        num_near_ties=sum(gap > 0 for gap in every),
        largest_gap_nats=max(every, default=0.0),
        acceptance_length=found.length or 1.0,
    )


def refuse_wrong_tokens(gaps: Sequence[Sequence[float]], tie_nats: float) -> None:
    """Raise StageFailed when a token is further from the verifier's first choice than near-ties explain.

    Args:
        gaps: of each answer's tokens (`PromptScorer.gaps_nats`).
    """
    wrong = [
        (request, place, gap)
        for request, of_answer in enumerate(gaps, start=1)
        for place, gap in enumerate(of_answer, start=1)
        if not gap <= tie_nats
    ]
    if wrong:
        request, place, gap = wrong[0]
        raise StageFailed(
            f"served with the speculator, vLLM's greedy answers are not the verifier's own: {len(wrong)} of "
            f"{sum(map(len, gaps))} tokens are more than {tie_nats:g} nats less likely than its first choice "
            f"(token {place} of answer {request} the first, by {gap:.2f}), so vLLM's speculation is wrong for this "
            "pair, or its arithmetic is coarse (train.smoke_serve_tie_nats)"
        )


async def _answers(client: CompletionClient, prompts: Sequence[Messages]) -> list[Completion]:
    async def ask(number: int, messages: Messages) -> Completion:
        try:
            return await client.complete(messages, GREEDY, label=f"smoke request {number}")
        except RowFailure as failure:
            raise StageFailed(f"served with the speculator, vLLM refuses request {number}: {failure}") from failure

    try:
        async with asyncio.TaskGroup() as group:
            asked = [group.create_task(ask(number, one)) for number, one in enumerate(prompts, start=1)]
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from None
    return [task.result() for task in asked]
