"""What the trainer tells: lines of a local metrics file, and the same lines on standard output.

A line on standard output begins with `PREFIX` and goes on with one JSON object; `parse` reads it. Kinds:

- `start`: `num_steps`, `from_step` (0, or the checkpoint's), `num_samples`, `num_loss_tokens_per_epoch`, `ranks`
- `train`, `validation`: one logged step, see `metrics_line`
- `stopped`: `step`; a SIGTERM was answered with a checkpoint, the same command resumes there (exit code
  `EXIT_RESUME` of the trainer's own process; torchrun makes 1 of any exit that is not 0)
- `superseded`: `step`; a later run holds the lease, so this one ended without a checkpoint
- `plateau`: `step`, `why`; training ends after this step, before its last planned one
- `done`: `step`; the last step's checkpoint is committed
- `failed`: `error_type`, `message`, and `stage_uri`, `shard`, `problem` for a DamagedShard
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

PREFIX = "DRAFTSMITH-TRAINING "
# EX_TEMPFAIL of sysexits.h: stopped on request, everything saved; run the same command again.
EXIT_RESUME = 75


def parse(line: str) -> dict[str, Any] | None:
    """The object of a progress line, or None for any other output."""
    if not line.startswith(PREFIX):
        return None
    try:
        found = json.loads(line.removeprefix(PREFIX))
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def say(kind: str, **fields: Any) -> None:
    """Print one progress line."""
    print(PREFIX + json.dumps({"kind": kind, **fields}), flush=True, file=sys.stdout)


def metrics_line(kind: str, step: int, sums: Tensor, decay: float, **more: Any) -> dict[str, Any]:
    """One line of metrics.

    Args:
        sums: [ttt_steps, 5] of infra.training.eagle3.SUM_COLUMNS, over all ranks.

    Returns:
        `kind`, `step`, `loss` (weighted over the TTT steps, as optimized), `loss_per_ttt_step`,
        `accuracy_per_ttt_step` (conditional: of the rows guessed right so far, the share guessed right here too),
        `full_accuracy_per_ttt_step` (of all rows, the share guessed right here and at every TTT step before),
        `acceptance_length` (1 + the expected run of right guesses, were every row to start a draft), and `more`.
        The counts of each accuracy are over the rows of its sum: a draft that is right everywhere has 1.0 at every
        TTT step.
    """
    losses, conditional, full = [], [], []
    standing, length = 1.0, 1.0
    for loss, rows, correct, total, judged in sums.tolist():
        losses.append(loss / max(rows, 1.0))
        conditional.append(correct / max(total, 1.0))
        full.append(correct / max(judged, 1.0))
        standing *= conditional[-1]
        length += standing
    return {
        "kind": kind,
        "step": step,
        "loss": sum(loss * decay**index for index, loss in enumerate(losses)),
        "loss_per_ttt_step": losses,
        "accuracy_per_ttt_step": conditional,
        "full_accuracy_per_ttt_step": full,
        "acceptance_length": length,
        **more,
    }


class MetricsFile:
    """The metrics so far, on disk and in memory (a checkpoint carries them, so another node can go on)."""

    def __init__(self, path: Path, text: str = "") -> None:
        self.path = path
        self.text = text
        path.parent.mkdir(parents=True, exist_ok=True)
        # What was logged after the checkpoint will be computed, and logged, again.
        path.write_text(text)

    def append(self, line: dict[str, Any]) -> None:
        written = json.dumps(line) + "\n"
        self.text += written
        with self.path.open("a") as file:
            file.write(written)
        fields = {name: value for name, value in line.items() if name != "kind"}
        say(line["kind"], **fields)


class Pace(NamedTuple):
    """Of the steps since the last line of metrics, validation and checkpoints left out."""

    tokens_per_second: float
    seconds: float
    input_wait_seconds: float


class Meter:
    """Tokens and waiting since the last line of metrics, validation and checkpoints left out."""

    def __init__(self) -> None:
        self._reset()

    def _reset(self) -> None:
        self._since = time.monotonic()
        self._left_out_seconds = 0.0
        self._waited_seconds = 0.0
        self._num_tokens = 0

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        start = time.monotonic()
        yield
        self._waited_seconds += time.monotonic() - start

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        start = time.monotonic()
        yield
        self._left_out_seconds += time.monotonic() - start

    def count(self, num_tokens: int) -> None:
        self._num_tokens += num_tokens

    def take(self) -> Pace:
        """The pace since the last call."""
        seconds = time.monotonic() - self._since - self._left_out_seconds
        taken = Pace(self._num_tokens / max(seconds, 1e-9), seconds, self._waited_seconds)
        self._reset()
        return taken
