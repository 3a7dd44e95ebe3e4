"""One place where the metrics of a training run are shown, as `infra.tracking.trackers` sees it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

Line = Mapping[str, Any]  # of infra.training.progress.metrics_line


class Tracker(Protocol):
    """One place where metrics are shown. Every method may raise; it is then left alone for the rest of the run."""

    def begin(self, lines: Sequence[Line]) -> None:
        """The run goes on from here: these lines stand, in order. Called again when the trainer starts anew."""

    def log(self, line: Line) -> None:
        """One more line."""

    def close(self, done: bool) -> None:
        """The trainer has ended; `done`: at its last step. An interrupted run is begun again by a later process."""


def scalars(line: Line) -> dict[str, float]:
    """The numbers of a line by name: `train/loss`, `validation/loss_per_ttt_step/1`."""
    found: dict[str, float] = {}
    for name, value in line.items():
        if name in ("kind", "step", "num_steps"):
            continue
        values = (
            {f"/{place}": item for place, item in enumerate(value, 1)} if isinstance(value, list) else {"": value}
        )
        found |= {
            f"{line['kind']}/{name}{place}": float(item)
            for place, item in values.items()
            if isinstance(item, int | float)
        }
    return found
