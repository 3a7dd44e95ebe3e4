"""What a person and the trackers see of a running training: the trainer's own lines, shown at a bounded rate."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any
from uuid import UUID

from prefect.artifacts import acreate_markdown_artifact
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import ArtifactUpdate

from infra.tracking.curves import TrainingCurves
from infra.tracking.trackers import Trackers
from tasks.progress import StageProgress

logger = logging.getLogger("draftsmith.train")

# Some 15 kB to the Prefect server, drawn in a millisecond.
CURVES_SECONDS = 15.0
UI_TIMEOUT_SECONDS = 10.0
CURVES_KEY = "drafts-curves"


@contextlib.asynccontextmanager
async def watching(trackers: Trackers, metrics_path: Path) -> AsyncIterator[TrainingWatch]:
    """Shows a training in the UI, on the terminal and to the trackers while the context lasts.

    Args:
        metrics_path: the trainer's file, which holds all lines that stand whenever it says `start`.
    """
    watch = TrainingWatch(trackers, metrics_path)
    try:
        yield watch
    finally:
        await watch.close()


class TrainingWatch:
    """Takes the lines of `infra.training.progress` one after another."""

    def __init__(self, trackers: Trackers, metrics_path: Path) -> None:
        self._trackers = trackers
        self._metrics_path = metrics_path
        self._progress: StageProgress | None = None
        self._curves: TrainingCurves | None = None
        self._artifact: UUID | None = None
        self._shown = ""
        self._warned = False
        self._publisher: asyncio.Task[None] | None = None
        self._done = False

    async def see(self, said: Mapping[str, Any]) -> None:
        """Show one line."""
        match said["kind"]:
            case "start":
                await self._begin(said["num_steps"], said["from_step"])
            case "train" | "validation" if self._curves is not None:
                self._curves.add(said)
                self._trackers.log(said)
                self._say(said)
            case "plateau":
                logger.info("Training ends early, after step %d: %s.", said["step"], said["why"])
            case "done":
                self._done = True

    async def _begin(self, num_steps: int, from_step: int) -> None:
        """The trainer has started, or torchrun has started it again."""
        lines = await asyncio.to_thread(_lines_until, from_step, self._metrics_path)
        self._curves = TrainingCurves(num_steps)
        for line in lines:
            self._curves.add(line)
        self._trackers.begin(lines)
        logger.info("Training from step %d of %d.", from_step, num_steps)
        if self._progress is None:
            self._progress = await StageProgress("drafts", num_steps, from_step, unit="steps").__aenter__()
            self._publisher = asyncio.create_task(self._keep_publishing())
        self._progress.at(from_step)

    def _say(self, said: Mapping[str, Any]) -> None:
        assert self._progress is not None
        if said["kind"] == "validation":
            logger.info(
                "Step %d: validation loss %.3f, predicted acceptance length %.2f.",
                said["step"],
                said["loss"],
                said["acceptance_length"],
            )
            return
        self._progress.at(said["step"])
        self._progress.detail(
            f"loss {said['loss']:.3f}, accuracy {said['accuracy_per_ttt_step'][0]:.2f}, "
            f"{said['tokens_per_second']:.0f} tokens/s, input wait {said['input_wait_seconds']:.1f} s"
        )

    async def _keep_publishing(self) -> None:
        while True:
            await asyncio.sleep(CURVES_SECONDS)
            await self._publish()

    async def _publish(self) -> None:
        """Send the curves where they have changed. A UI that cannot be reached must not stop the work."""
        assert self._curves is not None
        text = self._curves.markdown()
        if text == self._shown:
            return
        try:
            async with asyncio.timeout(UI_TIMEOUT_SECONDS):
                await self._send(text)
            self._shown = text
        except Exception as error:
            level = logging.DEBUG if self._warned else logging.WARNING
            logger.log(level, "The curves could not be shown in the UI (%s); training goes on.", error)
            self._warned = True

    async def _send(self, text: str) -> None:
        if self._artifact is None:
            self._artifact = await acreate_markdown_artifact(
                text, key=CURVES_KEY, description="Loss and predicted acceptance of the draft in training"
            )
            return
        async with get_client() as client:
            await client.update_artifact(self._artifact, ArtifactUpdate(data=text))

    async def close(self) -> None:
        """Show the last state; returns when the trackers have it."""
        if self._publisher is not None:
            self._publisher.cancel()
            await asyncio.gather(self._publisher, return_exceptions=True)
            await self._publish()
        if self._progress is not None:
            await self._progress.__aexit__(None, None, None)
        await asyncio.to_thread(self._trackers.close, self._done)


def _lines_until(step: int, path: Path) -> list[dict[str, Any]]:
    """The lines that stand when the trainer starts from `step`; it may have appended some that it says too."""
    try:
        text = path.read_text()
    except FileNotFoundError:
        return []
    whole = (json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n"))
    return [line for line in whole if line["step"] <= step]
