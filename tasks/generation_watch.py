"""What a person and a monitoring system see of a running generation, at a bounded rate."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator
from typing import Protocol

from infra.gauges import end_generation, show_generation
from infra.generation.progress import GenerationProgress
from infra.manifest import StageRef
from infra.vllm_metrics import ServerProgress
from tasks.progress import UPDATE_SECONDS, StageProgress

logger = logging.getLogger("draftsmith.generation_watch")

# Reading /metrics costs the server a little, and its load is an average over longer than this anyway.
SERVERS_EVERY_SECONDS = 10.0
# A server that is busy or gone must not hold up the display.
SERVERS_TIMEOUT_SECONDS = 5.0
LOG_EVERY_SECONDS = 300.0


class Servers(Protocol):
    """The servers of a stage as one (`infra.serving.pool.ServerPool`)."""

    @property
    def in_flight(self) -> int:
        """Requests that a server has now."""

    async def progress(self) -> list[ServerProgress]:
        """The load of each server that tells it."""


@contextlib.asynccontextmanager
async def watching(stage: StageRef, rows: GenerationProgress, servers: Servers) -> AsyncIterator[None]:
    """Shows `rows` in the UI, on the terminal, as gauges and now and then in the log, while the context lasts.

    Args:
        rows: counted by whoever makes the rows.
        servers: asked for their load every `SERVERS_EVERY_SECONDS`.
    """
    async with StageProgress(stage.stage, rows.num_rows, rows.rows_done, unit="rows") as progress:
        watcher = asyncio.create_task(_keep_showing(stage, rows, servers, progress))
        try:
            yield
        finally:
            watcher.cancel()
            await asyncio.gather(watcher, return_exceptions=True)  # a display that broke is no reason to fail
            _show(stage, rows, progress)
            end_generation(stage)


async def _keep_showing(
    stage: StageRef, rows: GenerationProgress, servers: Servers, progress: StageProgress
) -> None:
    next_servers = time.monotonic()
    next_log = next_servers + LOG_EVERY_SECONDS
    while True:
        now = time.monotonic()
        if not rows.rows_made and not servers.in_flight:
            rows.started = now  # no server is up yet: loading a large model is no part of the rate
        if now >= next_servers:
            next_servers = now + SERVERS_EVERY_SECONDS
            rows.see_servers(await _loads(servers))
        _show(stage, rows, progress)
        if now >= next_log:
            next_log = now + LOG_EVERY_SECONDS
            logger.info("%s.", progress.text())
        await asyncio.sleep(UPDATE_SECONDS)


def _show(stage: StageRef, rows: GenerationProgress, progress: StageProgress) -> None:
    rows.sample()
    show_generation(stage, rows)
    progress.at(rows.rows_done)
    progress.detail(str(rows), rows.eta_seconds)


async def _loads(servers: Servers) -> list[ServerProgress]:
    """What the servers tell in time; whatever goes wrong here must not stop the work."""
    try:
        async with asyncio.timeout(SERVERS_TIMEOUT_SECONDS):
            return await servers.progress()
    except Exception as error:
        logger.debug("The servers do not tell their load: %r", error)
        return []
