"""Whether greedy answers are the verifier's own, token by token, though a draft has guessed them.

Speculation may change how fast tokens come, never which. Two runs cannot simply be compared: where the two
likeliest tokens nearly tie, bf16 rounds one way or the other with the shape of the batch, and after the first
difference they have nothing in common. So the answer goes back to the server as a PROMPT. A pass over a prompt
neither drafts nor verifies guesses, so its log-probabilities are what decoding without speculation chooses by, and
every token is judged, those after a difference too, on one server and without a second one.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

import httpx

from infra.errors import ServerError, StageFailed
from infra.generation.completion_client import Served
from infra.serving.client import server_client


class PromptScorer:
    """Asks a vLLM server how likely it finds given tokens. An async context manager.

    Args:
        server: running; with prefix caching too, which such requests do not read.
        timeout_seconds: longest wait for one answer.
    """

    def __init__(self, server: Served, timeout_seconds: float) -> None:
        self._url = f"{server.base_url}/completions"
        self._model = server.served_name
        self._client = server_client(server.api_key, timeout_seconds)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._client.aclose()

    async def gaps_nats(self, prompt_token_ids: Sequence[int], completion_token_ids: Sequence[int]) -> list[float]:
        """How much less likely each token of a completion is than the likeliest one in its place.

        Returns:
            [num_completion_tokens] in nats: 0 for the likeliest token itself.

        Raises:
            ServerError: the server did not answer.
            StageFailed: it does not score prompts.
        """
        tokens = [*prompt_token_ids, *completion_token_ids]
        body = {
            "model": self._model,
            "prompt": tokens,
            "max_tokens": 1,
            "temperature": 0.0,
            "prompt_logprobs": 1,  # of the token that is there, and of the likeliest one
        }
        try:
            response = await self._client.post(self._url, json=body)
        except httpx.HTTPError as error:
            raise ServerError(f"{self._url} gives no answer ({error!r})") from error
        if response.status_code >= 500:
            raise ServerError(f"{self._url} answers HTTP {response.status_code}: {response.text[:300]}")
        if response.status_code != 200:
            raise StageFailed(f"vLLM does not score a prompt: HTTP {response.status_code}: {response.text[:300]}")
        try:
            return _gaps(response.json(), tokens, len(completion_token_ids))
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise StageFailed(f"vLLM does not score a prompt: its answer cannot be used ({error!r})") from error


def _gaps(answer: Any, tokens: Sequence[int], num_scored: int) -> list[float]:
    scored = answer["choices"][0]["prompt_logprobs"]
    if len(scored) != len(tokens):
        raise ValueError(f"{len(scored)} log-probabilities for {len(tokens)} tokens")
    gaps, first = list[float](), len(tokens) - num_scored
    for token, place in zip(tokens[first:], scored[first:], strict=True):
        own = float(place[str(token)]["logprob"])
        gaps.append(max(float(one["logprob"]) for one in place.values()) - own)
    return gaps
