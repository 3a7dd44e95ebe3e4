"""One HTTP request for one completion: what is sent, and which of four kinds of end it comes to.

A `Completion`; a `RowFailure`: asking again is no use; a `Trouble`: asking again may help; or a
`NotConnected`, which says nothing about the row. Nothing here waits, asks again, or limits
how many requests are in flight.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any

import aiohttp
import httpx2
import openai

from infra.errors import DraftsmithError
from infra.generation.responses import Completion, GarbledAnswer, RowFailure, parse_completion

CONNECT_TIMEOUT_SECONDS = 10.0
# Below vLLM's 5 s (VLLM_HTTP_TIMEOUT_KEEP_ALIVE): a connection is never reused while the server is closing it.
KEEPALIVE_SECONDS = 2.0
# The 4xx answers that say "later" (timeout, conflict, too early, too many); the others say "never".
LATER_STATUSES = frozenset({408, 409, 425, 429})


class Trouble(DraftsmithError):
    """One request brought no answer; another may."""

    def __init__(self, reason: str, retry_after_seconds: float | None = None) -> None:
        super().__init__(reason)
        self.retry_after_seconds = retry_after_seconds


class NotConnected(Trouble):
    """The server was never reached: no fault of the row."""


class TimedOut(Trouble):
    """No whole answer within the time limit."""


class CompletionEndpoint:
    """`/v1/chat/completions` of one server, over the OpenAI client with its own retries off.

    Args:
        base_url: ends in `/v1`.
        api_key: sent as a bearer token.
        model: the served name.
        timeout_seconds: longest one request may take, from sending to the last byte.
        max_connections: connections kept; requests beyond them would queue unseen.
    """

    def __init__(
        self, base_url: str, api_key: str, model: str, *, timeout_seconds: float, max_connections: int
    ) -> None:
        self.base_url = base_url
        self.contact_at = self._busy_since = time.monotonic()
        """When the server last answered anything over HTTP (time.monotonic)."""
        self._num_asked = 0
        self._model = model
        self._timeout_seconds = timeout_seconds
        # The client's own defaults, 600 s and two hidden retries, would make nine requests of a slow one.
        timeout = httpx2.Timeout(timeout_seconds, connect=CONNECT_TIMEOUT_SECONDS, pool=None)
        limits = httpx2.Limits(max_connections=max_connections, keepalive_expiry=KEEPALIVE_SECONDS)
        # aiohttp as transport takes a third of the default one's CPU time at 128 in flight. trust_env: a proxy that
        # the environment names is for the outside world, not for a server of ours.
        transport = openai.DefaultAioHttpClient(limits=limits, trust_env=False)
        self._openai = openai.AsyncOpenAI(
            base_url=base_url, api_key=api_key, timeout=timeout, max_retries=0, http_client=transport
        )

    @property
    def silent_seconds(self) -> float:
        """How long the server has had requests and answered none, not even with an error; 0 while it has none."""
        return time.monotonic() - max(self.contact_at, self._busy_since) if self._num_asked else 0.0

    async def close(self) -> None:
        await self._openai.close()

    def body(self, messages: Sequence[Mapping[str, Any]], sampling: Mapping[str, Any], seed: int | None) -> bytes:
        """The request's JSON. `sampling` holds fields by vLLM's names, `temperature` among them."""
        # vLLM's CPU engine dies of a seed under a speculative method, and greedy sampling has no use for one.
        seeded = {} if seed is None or sampling["temperature"] == 0 else {"seed": seed}
        fixed = {"model": self._model, "messages": messages, "n": 1, "stream": False}
        return json.dumps({"return_token_ids": True, **sampling, **seeded, **fixed}).encode()

    async def ask(self, body: bytes, temperature: float) -> Completion:
        """Sends one request.

        Raises:
            RowFailure: the server refuses it for good, or answers without sound token ids.
            Trouble: it brought no answer this time.
        """
        sent = time.monotonic()
        if not self._num_asked:
            self._busy_since = sent
        self._num_asked += 1
        try:
            # The OpenAI client's limit is on each read; this one is on the whole.
            async with asyncio.timeout(self._timeout_seconds + CONNECT_TIMEOUT_SECONDS):
                answer = await self._openai.post("/chat/completions", content=body, cast_to=httpx2.Response)
            self.contact_at = time.monotonic()
            latency_seconds = self.contact_at - sent
            return parse_completion(answer.content, temperature=temperature, latency_seconds=latency_seconds)
        except openai.APIStatusError as error:
            self.contact_at = time.monotonic()
            reason = f"HTTP {error.status_code}: {_server_words(error)}"
            if error.status_code >= 500 or error.status_code in LATER_STATUSES:
                raise Trouble(reason, retry_after_seconds(error.response.headers)) from error
            latency_seconds = self.contact_at - sent
            raise RowFailure(reason, temperature=temperature, latency_seconds=latency_seconds) from error
        except (openai.APIConnectionError, aiohttp.ClientError) as error:
            raise self._connection_trouble(error) from error
        except TimeoutError as error:
            raise self._timed_out() from error
        except GarbledAnswer as error:
            raise Trouble(str(error)) from error
        finally:
            self._num_asked -= 1

    def _connection_trouble(self, error: BaseException) -> Trouble:
        """What went wrong below HTTP, by the type of aiohttp's error at the root.

        The transport in between calls every lost connection a ConnectTimeout, so its own types do not tell.
        """
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, aiohttp.ClientError):
            cause = cause.__cause__
        if isinstance(cause, aiohttp.ClientConnectorError | aiohttp.ConnectionTimeoutError):
            return NotConnected(f"no connection: {cause}")
        if isinstance(cause, aiohttp.SocketTimeoutError):
            return self._timed_out()
        return Trouble(f"the connection was cut: {cause or error!r}")

    def _timed_out(self) -> TimedOut:
        return TimedOut(f"no whole answer within {self._timeout_seconds:g} s")


def _server_words(error: openai.APIStatusError) -> str:
    """The server's own reason."""
    if isinstance(error.body, dict) and error.body.get("message"):
        return str(error.body["message"])
    return str(error.body or error.message)


def retry_after_seconds(headers: Mapping[str, str]) -> float | None:
    """The Retry-After header: seconds or a date (RFC 9110, section 10.2.3). None without a sound one."""
    value = headers.get("retry-after")
    if value is None:
        return None
    try:
        return max(0.0, float(value))
    except ValueError:
        pass
    try:
        moment: datetime = parsedate_to_datetime(value)
        return max(0.0, float((moment - datetime.now(UTC)).total_seconds()))
    except (TypeError, ValueError):
        return None
