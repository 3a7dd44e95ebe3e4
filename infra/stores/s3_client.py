"""One S3 client for each process, and how a request is made: retried, bounded in time, its errors given a meaning.

Retries are made here and nowhere else, for each request by itself (those of s3fs and botocore are off), so their
sum is bounded: a store may be away for `RETRY_SECONDS`.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from functools import lru_cache
from typing import Any, Concatenate, ParamSpec, TypeVar

from tenacity import (
    AsyncRetrying,
    RetryCallState,
    retry_if_exception_type,
    stop_after_delay,
    wait_random_exponential,
)

from infra.errors import StorageError
from infra.stores.s3_errors import Unavailable, meaning

P = ParamSpec("P")
S = TypeVar("S")
T = TypeVar("T")

logger = logging.getLogger("draftsmith.storage")

RETRY_SECONDS = 120.0  # how long one request is tried; a store that restarts is back before
FIRST_WAIT_SECONDS = 0.2
LONGEST_WAIT_SECONDS = 8.0
CONNECT_TIMEOUT_SECONDS = 10
READ_TIMEOUT_SECONDS = 60
SAY_EVERY_SECONDS = 10.0

MAX_CONNECTIONS = 64

VARIABLES = (
    "AWS_ACCESS_KEY_ID",
    "AWS_SECRET_ACCESS_KEY",
    "AWS_SESSION_TOKEN",
    "AWS_PROFILE",
    "AWS_ENDPOINT_URL",
    "AWS_ENDPOINT_URL_S3",
    "AWS_DEFAULT_REGION",
)
ENDPOINT_VARIABLES = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")


async def request(
    fs: Any, uri: str, method: str, limit_seconds: float | None = None, /, **arguments: Any
) -> dict[str, Any]:
    """One request, repeated while the store does not answer, throttles or fails; its body, if any, read whole.

    Args:
        limit_seconds: how long it is tried; `RETRY_SECONDS` by default.
        arguments: of the client's method. A function as `Body` is called for each attempt, since a file is read up.


    Raises:
        FileNotFoundError, Refused, InputError, StorageError: what the last answer means.
    """

    async def attempt() -> dict[str, Any]:
        try:
            client = await fs.set_session()
            body = {"Body": arguments["Body"]()} if callable(arguments.get("Body")) else {}
            answer: dict[str, Any] = await getattr(client, method)(**{**arguments, **body})
            if "Body" in answer:
                async with answer["Body"] as stream:
                    answer["Body"] = await stream.read()
                if len(answer["Body"]) != answer["ContentLength"]:
                    raise Unavailable(f"{uri} was cut short")
            return answer
        except Exception as error:
            meant = meaning(uri, error)
            if meant is error:
                raise
            raise meant from error

    limit_seconds = RETRY_SECONDS if limit_seconds is None else limit_seconds
    retrying = AsyncRetrying(
        retry=retry_if_exception_type(Unavailable),
        wait=wait_random_exponential(multiplier=FIRST_WAIT_SECONDS, max=LONGEST_WAIT_SECONDS),
        stop=stop_after_delay(limit_seconds),
        before_sleep=_say,
        reraise=True,
    )
    try:
        return await retrying(attempt)
    except Unavailable as error:
        raise StorageError(f"{error} (tried for {limit_seconds:.0f} s)") from error


async def in_parallel(work: Callable[[S], Coroutine[Any, Any, T]], items: Iterable[S], at_once: int) -> list[T]:
    """The results in the items' order. The first error cancels the rest and is raised."""
    room = asyncio.Semaphore(at_once)

    async def one(item: S) -> T:
        async with room:
            return await work(item)

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(item)) for item in items]
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from None
    return [task.result() for task in tasks]


_last_said = 0.0


def _say(state: RetryCallState) -> None:
    """One line for whoever is on call, not one for each of many requests and attempts."""
    global _last_said
    now = time.monotonic()
    if state.attempt_number < 3 or now - _last_said < SAY_EVERY_SECONDS:
        return
    _last_said = now
    error = state.outcome.exception() if state.outcome else None
    logger.warning(
        "%s. It has been tried %d times in %.0f s and is tried again.",
        error,
        state.attempt_number,
        state.seconds_since_start or 0.0,
    )


def run(work: Callable[Concatenate[Any, P], Awaitable[T]], *arguments: P.args, **named: P.kwargs) -> T:
    from fsspec.asyn import sync

    fs = _filesystem(os.getpid(), _settings())
    result: T = sync(fs.loop, work, fs, *arguments, **named)
    return result


def _settings() -> str:
    """Changes with the credentials and the endpoint; a digest, so that no secret stands in a traceback."""
    return hashlib.sha256(repr([os.environ.get(name) for name in VARIABLES]).encode()).hexdigest()


@lru_cache(maxsize=8)
def _filesystem(process_id: int, settings: str) -> Any:
    """One client for each process (a forked child cannot use its parent's) and each set of credentials."""
    from s3fs import S3FileSystem

    own_endpoint = any(os.environ.get(name) for name in ENDPOINT_VARIABLES)
    return S3FileSystem(
        skip_instance_cache=True,
        use_listings_cache=False,
        config_kwargs={
            "s3": {"addressing_style": "path" if own_endpoint else "auto"},
            "connect_timeout": CONNECT_TIMEOUT_SECONDS,
            "read_timeout": READ_TIMEOUT_SECONDS,
            "max_pool_connections": MAX_CONNECTIONS,
            "retries": {"total_max_attempts": 1, "mode": "standard"},
        },
    )
