"""The bounded client of the OpenAI API: many requests in flight, and rows told apart from servers.

Two things go wrong and must not be taken for one another. A ROW that cannot be made (refused by the server, or
spoiled each time it is tried) is a `RowFailure` and becomes a row with an error. A SERVER that is gone (nothing
listens, or it cannot even answer one token) is a `ServerError`: no row is to blame, and the stage starts a new one.
Where the evidence does not tell, the client asks the server for one token (`CompletionClient.probe`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Annotated, Any, Protocol, Self

from pydantic import Field

from infra.config import Config
from infra.errors import ServerError
from infra.generation.completion_endpoint import CompletionEndpoint, NotConnected, TimedOut, Trouble
from infra.generation.responses import Completion, RowFailure

logger = logging.getLogger("draftsmith.completion_client")

PROBE_TIMEOUT_SECONDS = 120.0
# Beside the window's own connections, for probes.
SPARE_CONNECTIONS = 8

_PROBE_MESSAGES = [{"role": "user", "content": "Say yes."}]
_PROBE_SAMPLING = {"temperature": 0.0, "max_tokens": 1}


class ClientConfig(Config):
    """How a server is asked. None of it changes what is written."""

    concurrency: Annotated[int, Field(ge=1)] = 128
    """Requests in flight over the whole stage."""
    timeout_seconds: Annotated[float, Field(gt=0)] = 1800.0
    """Longest one request may take; a long thought on a busy server takes many minutes."""
    max_attempts: Annotated[int, Field(ge=1)] = 4
    """Requests sent for one row before it counts as failed, those that timed out included."""
    backoff_seconds: Annotated[float, Field(gt=0)] = 1.0
    """Wait before the second attempt; doubled for each one after it, with jitter."""
    max_backoff_seconds: Annotated[float, Field(gt=0)] = 60.0
    """Longest such wait. A server's own Retry-After is honoured up to timeout_seconds."""
    gone_after_seconds: Annotated[float, Field(gt=0)] = 20.0
    """A server that cannot be connected to for this long counts as gone."""


class Served(Protocol):
    """What the client must know of a server (`infra.vllm_server.VllmServer` has it)."""

    base_url: str
    api_key: str
    served_name: str


class CompletionClient:
    """Asks one server for completions, at most `concurrency` at a time, first come first served.

    An async context manager for one event loop. One client serves all shards of a stage; after a `ServerError` it
    is spent, and a new server gets a new one.

    Args:
        base_url: ends in `/v1`.
        api_key: sent as a bearer token.
        model: the served name.
    """

    def __init__(self, base_url: str, api_key: str, model: str, config: ClientConfig) -> None:
        self.config = config
        self.window = asyncio.Semaphore(config.concurrency)
        """The slots of the requests in flight."""
        self.turn = asyncio.Lock()
        """Held by the shard whose rows are taking slots, so that shards are finished in their order."""
        self._endpoint = CompletionEndpoint(
            base_url,
            api_key,
            model,
            timeout_seconds=config.timeout_seconds,
            max_connections=config.concurrency + SPARE_CONNECTIONS,
        )
        self._scopes: set[asyncio.Timeout] = set()
        self._gone: str | None = None
        self._gone_event = asyncio.Event()
        self._alive_at = time.monotonic()
        self._telling = asyncio.Lock()

    @classmethod
    def to(cls, server: Served, config: ClientConfig) -> Self:
        """A client of a running server."""
        return cls(server.base_url, server.api_key, server.served_name, config)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._endpoint.close()

    @property
    def in_flight(self) -> int:
        """Requests that hold a slot now, those that wait before another attempt included."""
        return len(self._scopes)

    @property
    def silent_seconds(self) -> float:
        """How long the server has had requests and answered none, for a watchdog; 0 while it has none."""
        return self._endpoint.silent_seconds

    @property
    def gone(self) -> str | None:
        """Why the server counts as gone; None while it does not."""
        return self._gone

    async def gone_within(self, seconds: float) -> bool:
        """Whether the server is declared gone within that time; returns as soon as it is."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._gone_event.wait()
        return self._gone is not None

    async def complete(
        self,
        messages: Sequence[Mapping[str, Any]],
        sampling: Mapping[str, Any],
        seed: int | None = None,
        *,
        label: str = "a request",
    ) -> Completion:
        """One completion of `messages`, waiting for a slot first.

        Args:
            messages: the conversation as the OpenAI API takes it.
            sampling: request fields by vLLM's names; must hold `temperature`.
            seed: not sent when None, nor with greedy sampling.
            label: what the log calls the request.

        Raises:
            RowFailure: this completion cannot be had.
            ServerError: the server is gone; other requests will fare no better.
        """
        async with self.window:
            return await self.complete_in_slot(messages, sampling, seed, label=label)

    async def complete_in_slot(
        self,
        messages: Sequence[Mapping[str, Any]],
        sampling: Mapping[str, Any],
        seed: int | None = None,
        *,
        label: str = "a request",
    ) -> Completion:
        """`complete` for a caller that already holds a slot of `window`."""
        body = self._endpoint.body(messages, sampling, seed)
        scope = asyncio.timeout(None)  # no limit of its own: only declare_gone ends it
        self._scopes.add(scope)
        try:
            async with scope:
                return await self._attempts(body, float(sampling["temperature"]), label)
        except TimeoutError:
            raise ServerError(self._gone) from None
        finally:
            self._scopes.discard(scope)

    def declare_gone(self, problem: str) -> None:
        """Ends every request in flight, and every later one, with `ServerError`; the first call counts."""
        if self._gone is not None:
            return
        self._gone = f"The server at {self._endpoint.base_url} is gone: {problem}"
        self._gone_event.set()
        logger.error("%s. %d requests in flight are given up.", self._gone, self.in_flight)
        for scope in self._scopes:
            scope.reschedule(asyncio.get_running_loop().time())

    async def probe(self, timeout_seconds: float = PROBE_TIMEOUT_SECONDS) -> None:
        """Asks for one token, past the window: `/health` may say 200 while the engine hangs, this cannot.

        Effects: a server that fails it is declared gone, unless it answered another request meanwhile.

        Raises:
            ServerError: the server is gone.
        """
        self._raise_if_gone()
        began = time.monotonic()
        try:
            async with asyncio.timeout(timeout_seconds):
                await self._endpoint.ask(self._endpoint.body(_PROBE_MESSAGES, _PROBE_SAMPLING, None), 0.0)
            self._alive_at = time.monotonic()
        except RowFailure:
            self._alive_at = time.monotonic()  # an answer, if no good one
        except (TimeoutError, Trouble) as trouble:
            if self._alive_at < began:
                why = str(trouble) or f"{timeout_seconds:g} s passed"
                self.declare_gone(f"it cannot answer one token ({why})")
        self._raise_if_gone()

    async def _attempts(self, body: bytes, temperature: float, label: str) -> Completion:
        """Asks until there is an answer or the retry policy ends."""
        began = time.monotonic()
        unreached_since: float | None = None
        attempts = 0
        while True:
            self._raise_if_gone()
            sent = time.monotonic()
            try:
                completion = await self._endpoint.ask(body, temperature)
                self._alive_at = time.monotonic()
                return completion
            except RowFailure:  # an answer too; of a server that sends no ids, every one
                self._alive_at = time.monotonic()
                raise
            except NotConnected as trouble:
                unreached_since = unreached_since or sent
                self._check_reachable(unreached_since, trouble)
                delay_seconds = self._delay_seconds(1, trouble)
            except Trouble as trouble:
                unreached_since = None
                attempts += 1
                await self._check_attempts(attempts, trouble, began, sent, temperature)
                delay_seconds = self._delay_seconds(attempts, trouble)
                logger.info(
                    "%s: attempt %d of %d brought no answer (%s); it is asked again in %.1f s.",
                    *(label, attempts, self.config.max_attempts, trouble, delay_seconds),
                )
            await asyncio.sleep(delay_seconds)

    def _raise_if_gone(self) -> None:
        if self._gone is not None:
            raise ServerError(self._gone)

    def _check_reachable(self, unreached_since: float, trouble: NotConnected) -> None:
        """Raises ServerError once a request has not reached the server for long, and no other has either."""
        if time.monotonic() - max(unreached_since, self._endpoint.contact_at) >= self.config.gone_after_seconds:
            self.declare_gone(f"not reached for {self.config.gone_after_seconds:g} s ({trouble})")
            self._raise_if_gone()

    async def _check_attempts(
        self, attempts: int, trouble: Trouble, began: float, sent: float, temperature: float
    ) -> None:
        """Raises RowFailure when the attempts are used up, ServerError when it is not the row's fault.

        A probe may queue behind long thoughts on a full server. So its limit is short only after a request that
        timed out itself, while all others were silent for as long.
        """
        last = attempts >= self.config.max_attempts
        timed_out = isinstance(trouble, TimedOut)
        if last or timed_out:
            async with self._telling:  # one probe for all who ask at the same time
                if self._alive_at < began:
                    await self.probe(PROBE_TIMEOUT_SECONDS if timed_out else self.config.timeout_seconds)
        if last:
            reason = f"given up after {attempts} attempts; the last: {trouble}"
            raise RowFailure(reason, temperature=temperature, latency_seconds=time.monotonic() - sent) from trouble

    def _delay_seconds(self, attempts: int, trouble: Trouble) -> float:
        """Exponential backoff with jitter; on top of Retry-After where the server sent one."""
        doubled = self.config.backoff_seconds * 2.0 ** (attempts - 1)
        jittered = min(self.config.max_backoff_seconds, doubled) * random.uniform(0.5, 1.0)
        if trouble.retry_after_seconds is None:
            return jittered
        return min(trouble.retry_after_seconds, self.config.timeout_seconds) + jittered
