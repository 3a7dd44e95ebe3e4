"""One run on Weights & Biases, gone on with at each resume. The package is imported only where it is asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from infra.tracking.tracker import Line, scalars


class WandbTracker:
    """A run with the stage's id in a project.

    It takes no step that lies before its last one, so what a resumed trainer does again is passed over: the same
    steps give the same figures.

    Args:
        run: its id and name.
        config: hyper-parameters to show.
        folder: where the package keeps what it has not sent yet.
    """

    def __init__(self, project: str, run: str, config: Mapping[str, Any], folder: Path) -> None:
        self._project, self._name, self._config, self._folder = project, run, dict(config), folder
        self._run: Any = None
        self._logged: set[tuple[str, int]] = set()  # kind and step, by this process

    def begin(self, lines: Sequence[Line]) -> None:
        if self._run is None:
            import wandb

            self._folder.mkdir(parents=True, exist_ok=True)
            self._run = wandb.init(
                project=self._project,
                id=self._name,
                name=self._name,
                resume="allow",
                config=self._config,
                dir=str(self._folder),
                # It would send along what this process prints.
                settings=wandb.Settings(console="off", silent=True),
            )
        for line in lines:
            self.log(line)

    def log(self, line: Line) -> None:
        here = (line["kind"], line["step"])
        if line["step"] >= self._run.step and here not in self._logged:
            self._run.log(scalars(line), step=line["step"])
            self._logged.add(here)

    def close(self, done: bool) -> None:
        if self._run is not None:
            self._run.finish(exit_code=0 if done else 1)
