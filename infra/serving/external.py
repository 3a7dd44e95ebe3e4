"""A server that somebody else runs: a URL that is waited for, asked, and left alone."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from types import TracebackType
from typing import Any, Self

import httpx

from infra.errors import InputError, ServerError
from infra.serving.client import server_client
from infra.serving.config import EXTERNAL_FIELD, KEY_FIELD

FIRST_WAIT_SECONDS = 1.0
MAX_WAIT_SECONDS = 30.0
METRICS_TIMEOUT_SECONDS = 30.0

logger = logging.getLogger("draftsmith.external_server")


class ExternalServer:
    """A vLLM or SGLang server at a URL, found sound on entering this async context. For one use.

    It is sound when it has the model and answers one token: a hung engine lists its models too.

    Args:
        base_url: ends in `/v1`.
        api_key: sent as a bearer token.
        served_name: what it calls the model.
        patience_seconds: how long it is waited for.

    Raises, on entering:
        InputError: it refuses the key, or has another model.
        ServerError: it was not sound in time; the message names the URL.
    """

    def __init__(self, base_url: str, api_key: str, served_name: str, *, patience_seconds: float) -> None:
        self.base_url = base_url
        self.api_key = api_key
        self.served_name = served_name
        self.max_model_len: int | None = None
        """What it says to be its longest sequence, in tokens, once entered; SGLang does not always say."""
        self._patience_seconds = patience_seconds
        timeout = httpx.Timeout(patience_seconds, connect=min(10.0, patience_seconds))
        self._client = server_client(api_key, timeout)

    async def __aenter__(self) -> Self:
        try:
            await self._wait_until_sound()
        except BaseException:
            await self._client.aclose()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._client.aclose()

    def alive(self) -> bool:
        """Always: there is no process of ours to look at."""
        return True

    def failure(self, problem: str) -> ServerError:
        """An error about this server."""
        return ServerError(f"The external server {self.base_url} {problem}")

    async def metrics_text(self) -> str:
        """The /metrics page.

        Raises:
            ServerError: it has none, or did not answer.
        """
        url = self.base_url.removesuffix("/v1") + "/metrics"
        try:
            response = await self._client.get(url, timeout=METRICS_TIMEOUT_SECONDS)
            response.raise_for_status()
        except httpx.HTTPError as error:
            raise self.failure(f"does not give its metrics ({error!r})") from error
        return response.text

    async def _wait_until_sound(self) -> None:
        began = time.monotonic()
        wait_seconds = FIRST_WAIT_SECONDS
        while True:
            left_seconds = self._patience_seconds - (time.monotonic() - began)
            problem = await self._problem(left_seconds)
            if problem is None:
                break
            left_seconds = self._patience_seconds - (time.monotonic() - began)
            if left_seconds <= 0:
                waited = f"{self._patience_seconds:g} s (generate.servers.external_patience_seconds)"
                raise self.failure(f"is not there after {waited}: {problem}")
            logger.warning("%s is waited for, %.0f s more at most: %s", self.base_url, left_seconds, problem)
            await asyncio.sleep(min(left_seconds, wait_seconds * random.uniform(0.5, 1.0)))
            wait_seconds = min(2 * wait_seconds, MAX_WAIT_SECONDS)
        logger.info("The external server %s answers for %s.", self.base_url, self.served_name)

    async def _problem(self, timeout_seconds: float) -> str | None:
        """What keeps the server from being used now; None when nothing does."""
        try:
            async with asyncio.timeout(max(timeout_seconds, 0.0)):
                self._check_model(await self._json("GET", "/models", None))
                one_token = {
                    "model": self.served_name,
                    "messages": [{"role": "user", "content": "Say yes."}],
                    "max_tokens": 1,
                }
                await self._json("POST", "/chat/completions", one_token)
        except httpx.HTTPStatusError as error:
            status = error.response.status_code
            if status in (401, 403):
                raise InputError(KEY_FIELD, f"{self.base_url} refuses the key (HTTP {status})") from None
            return f"HTTP {status}"
        except (httpx.HTTPError, ValueError, TimeoutError) as error:
            return str(error) or f"no answer ({type(error).__name__})"
        return None

    async def _json(self, method: str, path: str, body: dict[str, Any] | None) -> Any:
        response = await self._client.request(method, self.base_url + path, json=body)
        response.raise_for_status()
        return response.json()

    def _check_model(self, listing: Any) -> None:
        try:
            models = {str(model["id"]): model for model in listing["data"]}
        except (LookupError, TypeError) as error:
            raise ValueError(f"/models is no list of models: {error!r}") from error
        if self.served_name not in models:
            raise InputError(
                EXTERNAL_FIELD,
                f"{self.base_url} has no model {self.served_name!r}, only {', '.join(models)}; set "
                "generate.servers.external_model",
            )
        longest = models[self.served_name].get("max_model_len")
        self.max_model_len = longest if isinstance(longest, int) else None
