"""Progress of a stage: an artifact in the Prefect UI, and a bar on the terminal when attached to one."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
import time
from types import TracebackType
from uuid import UUID

from prefect.artifacts import acreate_progress_artifact, aupdate_progress_artifact
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

logger = logging.getLogger("draftsmith.progress")

# An artifact update is a call to the server (about 15 ms): often enough for a person, rare enough to cost nothing.
UPDATE_SECONDS = 3.0


class StageProgress:
    """Counts what is done of `total` units; a background task publishes the counts at a bounded rate.

    Args:
        stage: the stage's name, which is also the artifact's key.
        total: number of units (shards, steps, rounds) the stage consists of.
        done: number of units that were done before.
        unit: what is counted, in the plural.
    """

    def __init__(self, stage: str, total: int, done: int = 0, unit: str = "shards") -> None:
        self._stage = stage
        self._total = max(total, 1)
        self._done = done
        self._unit = unit
        self._detail = ""
        self._eta_seconds: float | None = None
        self._artifact: UUID | None = None
        self._publisher: asyncio.Task[None] | None = None
        self._bar: Progress | None = None
        self._bar_id = TaskID(0)
        self._started = time.monotonic()
        self._done_before = done

    def advance(self, count: int = 1) -> None:
        self.at(self._done + count)

    def at(self, done: int) -> None:
        """Set the number of units done. Callable from any thread."""
        self._done = min(done, self._total)
        if self._bar is not None:
            self._bar.update(self._bar_id, completed=self._done)

    def detail(self, text: str, eta_seconds: float | None = None) -> None:
        """What a person would like to know beside the count: rows by status, tokens per second, loss.

        Args:
            eta_seconds: time left, where the caller knows better than the mean pace of the units so far.
        """
        self._detail = text
        self._eta_seconds = eta_seconds
        if self._bar is not None:
            self._bar.update(self._bar_id, description=f"{self._stage} {text}")

    async def __aenter__(self) -> StageProgress:
        if sys.stderr.isatty():
            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
            self._bar = Progress(*columns, console=Console(stderr=True), transient=True)
            self._bar_id = self._bar.add_task(self._stage, total=self._total, completed=self._done)
            self._bar.start()
        self._publisher = asyncio.create_task(self._publish())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._publisher is not None:
            self._publisher.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._publisher
        if self._bar is not None:
            self._bar.stop()
        if kind is None:
            await self._update()

    async def _publish(self) -> None:
        while True:
            await self._update()
            await asyncio.sleep(UPDATE_SECONDS)

    async def _update(self) -> None:
        percent = round(100.0 * self._done / self._total, 1)  # shown as it is
        try:
            if self._artifact is None:
                key = f"{self._stage.replace('_', '-')}-progress"
                self._artifact = await acreate_progress_artifact(percent, key=key, description=self.text())
            else:
                await aupdate_progress_artifact(self._artifact, percent, description=self.text())
        except Exception as error:  # a UI that cannot be reached must not stop the work
            logger.warning(
                "The progress of %s could not be shown in the UI (%s); the work goes on.", self._stage, error
            )

    def text(self) -> str:
        """All of it in one line: count, time left, detail."""
        made = self._done - self._done_before
        left = self._total - self._done
        eta_seconds = self._eta_seconds
        if eta_seconds is None and made:
            eta_seconds = (time.monotonic() - self._started) / made * left
        eta = f", about {_duration(eta_seconds)} left" if eta_seconds is not None and left else ""
        detail = f" · {self._detail}" if self._detail else ""
        return f"{self._stage}: {self._done} of {self._total} {self._unit}{eta}{detail}"


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
