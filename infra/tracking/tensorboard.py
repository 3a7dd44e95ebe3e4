"""TensorBoard's event files of one training run, always made from the lines that stand."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from infra.tracking.tracker import Line, scalars

FLUSH_SECONDS = 10


class TensorBoardTracker:
    """Event files in a folder of this machine.

    A resumed trainer does again the steps after its checkpoint, perhaps on another node. So each start writes the
    folder anew: no step is there twice, and none that no longer stands.

    Args:
        folder: of this run alone.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._writer: Any = None

    def begin(self, lines: Sequence[Line]) -> None:
        self.close(done=False)
        logging.getLogger("tensorboard").setLevel(logging.WARNING)
        from torch.utils.tensorboard import SummaryWriter

        self._folder.mkdir(parents=True, exist_ok=True)
        for old in self._folder.glob("events.out.tfevents.*"):
            old.unlink(missing_ok=True)
        # A TensorBoard that shows the folder already is told to forget all steps from 0 on.
        self._writer = SummaryWriter(str(self._folder), purge_step=0, flush_secs=FLUSH_SECONDS)
        for line in lines:
            self.log(line)
        self._writer.flush()

    def log(self, line: Line) -> None:
        for name, value in scalars(line).items():
            self._writer.add_scalar(name, value, line["step"])

    def close(self, done: bool) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()
