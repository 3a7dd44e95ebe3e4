"""Retries by type: what a retry can mend follows from the error tree, for every task alike."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine
from typing import Any, ParamSpec, TypeVar, cast

from prefect import Task, task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State

from infra.errors import InfrastructureError, LeaseLost, ServerError
from infra.redaction import clean_errors

P = ParamSpec("P")
R = TypeVar("R")

RETRIES = 3
RETRY_DELAYS_SECONDS = [2.0, 10.0, 30.0]
RETRY_JITTER = 0.5


def retried_task(
    *,
    name: str,
    run_name: str | None = None,
    timeout_seconds: float | None = None,
    restarts: bool = False,
    retries: int = RETRIES,
) -> Callable[[Callable[P, R]], Task[P, R]]:
    """A Prefect task under this project's retry policy.

    Retried in place is what may pass by itself: a store or a network that did not answer. Not wrong input, not a
    damaged shard (its own stage must redo it), not an unacceptable result, not what another run has taken over.

    Args:
        name: the task's name in the UI.
        run_name: template of its runs' names, filled from the parameters: `generate {shard.shard}`.
        timeout_seconds: longest run of one attempt; None where the work itself is bounded otherwise.
        restarts: the task starts a process itself, so a dead server or engine too is worth another attempt.
            Elsewhere the flow must start a new one first.
        retries: attempts after the first one.
    """
    made = task(
        name=name,
        task_run_name=run_name,
        timeout_seconds=timeout_seconds,
        cache_policy=NO_CACHE,  # the records in the store say what is done; Prefect's own cache can be stale
        retries=retries,
        retry_delay_seconds=RETRY_DELAYS_SECONDS[:retries],
        retry_jitter_factor=RETRY_JITTER,
        retry_condition_fn=_worth_restarting if restarts else _worth_retrying,
    )
    return lambda work: made(with_clean_errors(work))


def with_clean_errors(work: Callable[P, R]) -> Callable[P, R]:
    """The same coroutine function; Prefect shows the text of what it raises."""

    @functools.wraps(work)
    async def cleaned(*args: P.args, **kwargs: P.kwargs) -> Any:
        with clean_errors():
            return await cast(Any, work)(*args, **kwargs)

    return cast(Callable[P, R], cleaned)


def in_thread(work: Callable[P, R]) -> Callable[P, Coroutine[Any, Any, R]]:
    """Make a blocking function one that a task can await: it runs in a thread and the event loop goes on."""

    @functools.wraps(work)
    async def waited(*args: P.args, **kwargs: P.kwargs) -> R:
        return await asyncio.to_thread(work, *args, **kwargs)

    return waited


async def _worth_retrying(_task: Any, _run: Any, state: State[Any]) -> bool:
    error = await _error_of(state)
    return isinstance(error, InfrastructureError) and not isinstance(error, ServerError | LeaseLost)


async def _worth_restarting(_task: Any, _run: Any, state: State[Any]) -> bool:
    error = await _error_of(state)
    return isinstance(error, InfrastructureError) and not isinstance(error, LeaseLost)


async def _error_of(state: State[Any]) -> Any:
    return await state.aresult(raise_on_failure=False)
