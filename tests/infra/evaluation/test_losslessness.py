"""Every token of an answer is judged by the verifier's own pass over it; a server that cannot do that says so."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest

from infra.errors import ServerError, StageFailed
from infra.evaluation.losslessness import PromptScorer
from tests.fakes.openai_server import FakeOpenAIServer

PROMPT, COMPLETION = [5, 6, 7], [8, 9]


@dataclass
class Server:
    base_url: str
    api_key: str = "key"
    served_name: str = "verifier"


@pytest.fixture
async def fake() -> AsyncIterator[FakeOpenAIServer]:
    async with FakeOpenAIServer() as server:
        yield server


async def gaps(fake: FakeOpenAIServer, completion: list[int] = COMPLETION) -> list[float]:
    async with PromptScorer(Server(fake.base_url), timeout_seconds=5.0) as scorer:
        return await scorer.gaps_nats(PROMPT, completion)


async def test_the_likeliest_token_has_no_gap_and_others_theirs(fake: FakeOpenAIServer) -> None:
    assert await gaps(fake) == [0.0, 0.0]
    fake.gap_nats = lambda tokens, place: {1: 9.0, 4: 1.5}.get(place, 0.0)
    assert await gaps(fake) == pytest.approx([0.0, 1.5]), "the prompt's own tokens are not judged"
    assert await gaps(fake, []) == []


async def test_the_exact_ids_are_scored_and_nothing_is_sampled(fake: FakeOpenAIServer) -> None:
    await gaps(fake)
    (request,) = fake.scored
    assert request["prompt"] == PROMPT + COMPLETION
    assert (request["temperature"], request["max_tokens"], request["prompt_logprobs"]) == (0.0, 1, 1)


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        ((400, b'{"error": "no such thing"}'), StageFailed),
        ((500, b"engine dead"), ServerError),
        ((200, b"no JSON"), StageFailed),
        ((200, b'{"choices": []}'), StageFailed),
        ((200, b'{"choices": [{"prompt_logprobs": null}]}'), StageFailed),
        ((200, json.dumps({"choices": [{"prompt_logprobs": [None] * 4}]}).encode()), StageFailed),
        ((200, json.dumps({"choices": [{"prompt_logprobs": [None] * 5}]}).encode()), StageFailed),
        ((200, json.dumps({"choices": [{"prompt_logprobs": [None] + [{"1": {"logprob": 0}}] * 4}]}).encode()), StageFailed),
    ],
)  # fmt: skip
async def test_an_answer_that_cannot_be_used_is_told_apart_from_a_dead_server(
    fake: FakeOpenAIServer, answer: tuple[int, bytes], error: type[Exception]
) -> None:
    fake.scoring = answer
    with pytest.raises(error):
        await gaps(fake)


async def test_a_server_that_is_gone_is_one(fake: FakeOpenAIServer) -> None:
    await fake.stop()
    with pytest.raises(ServerError, match="gives no answer"):
        await gaps(fake)
