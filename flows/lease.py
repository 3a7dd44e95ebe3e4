"""Hold a stage's lease while its flow works, and leave in good order when another copy has taken over."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
from collections.abc import AsyncIterator

from prefect.runtime import flow_run

from infra.errors import LeaseLost
from infra.leases import DEFAULT_TIMING, Holding, Lease, Timing, Waiter, lease_name
from infra.manifest import StageRef

logger = logging.getLogger("draftsmith.stage")

FLUSH_SECONDS = 5.0


@contextlib.asynccontextmanager
async def holding(stage: StageRef, timing: Timing = DEFAULT_TIMING) -> AsyncIterator[Lease]:
    """Wait for the stage's lease, hold it for as long as the context lasts, release it on any exit.

    When it is lost to another copy of this same flow run (this one was thought dead and the run went on elsewhere),
    the process ends at once and reports nothing: its report would end the run that the other copy goes on with.

    Raises:
        LeaseLost: another run has taken the lease; what ran inside was cancelled.
        StorageError: the store could not be asked for it.
    """
    run = await asyncio.to_thread(_root_run_id)
    lease = await _take(Waiter(stage.root, lease_name(stage.stage, stage.key), run, timing))
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    inside, cancelled = True, False

    def cancel_body() -> None:
        nonlocal cancelled
        if inside:
            cancelled = True
            task.cancel()

    def lost() -> None:
        _leave_if_same_run(lease.taken_by, run, stage)
        loop.call_soon_threadsafe(cancel_body)

    lease.when_lost(lost)
    try:
        yield lease
    except (asyncio.CancelledError, LeaseLost):
        inside = False
        await asyncio.to_thread(lease.renew)  # the trainer may have seen it before us
        others = task.uncancel() if cancelled else task.cancelling()
        if lease.taken_by is None or others:
            raise
        raise LeaseLost(
            f"{stage.stage}/{stage.key} was taken over by {lease.taken_by}; this run stops, that one goes on"
        ) from None
    finally:
        inside = False
        await asyncio.shield(asyncio.to_thread(lease.release))


async def _take(waiter: Waiter) -> Lease:
    while True:
        attempt = asyncio.ensure_future(asyncio.to_thread(waiter.try_take))
        try:
            lease = await asyncio.shield(attempt)
        except asyncio.CancelledError:
            attempt.add_done_callback(_give_back)  # the thread goes on and may still take it
            raise
        if lease is not None:
            return lease
        await asyncio.sleep(waiter.timing.poll_seconds)


def _give_back(attempt: asyncio.Future[Lease | None]) -> None:
    if not attempt.cancelled() and attempt.exception() is None and (lease := attempt.result()) is not None:
        threading.Thread(target=lease.release, daemon=True).start()


def _root_run_id() -> str:
    """The flow run that a person or a schedule started; a stage within the pipeline has one of its own below it.

    Empty outside of a flow run. It asks Prefect's server, so it blocks.
    """
    return str(flow_run.root_flow_run_id or "")


def _leave_if_same_run(taken_by: Holding | None, run: str, stage: StageRef) -> None:
    if taken_by is None or not run or taken_by.run != run:
        return
    logger.warning(
        "%s/%s: this copy of flow run %s was thought dead and goes on as %s. It ends here and reports no state.",
        stage.stage,
        stage.key,
        run,
        taken_by.owner,
    )
    _leave()


def _leave() -> None:
    """End this process now, whatever it does; the guards end its children. Logs are sent if that is quick."""
    from prefect.logging.handlers import APILogHandler

    flush = threading.Thread(target=APILogHandler().flush, daemon=True)
    flush.start()
    flush.join(FLUSH_SECONDS)
    os._exit(0)
