"""Where the metrics of a training run are shown besides its own file: TensorBoard, and what the config names.

They are told by the process that follows the trainer, each in a thread of its own: a tracker that hangs or fails
holds up neither the trainer nor the others. A run is the stage's key, whatever process trains it: at each start a
tracker is given all lines that stand, and is left without a line twice.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from queue import SimpleQueue

from infra.errors import InputError
from infra.locations import tracker_folder
from infra.tracking.mlflow import MlflowTracker
from infra.tracking.tensorboard import TensorBoardTracker
from infra.tracking.tracker import Line, Tracker
from infra.tracking.wandb import WandbTracker
from infra.training.config import TrainConfig

logger = logging.getLogger("draftsmith.trackers")

# What is still on its way to a server when the training ends is waited for so long; where it was interrupted, which
# may leave little time, the next process sends it.
CLOSE_SECONDS = 30.0
CLOSE_INTERRUPTED_SECONDS = 5.0
WANDB_KEY = "WANDB_API_KEY"


def check_trackers(config: TrainConfig) -> None:
    """Raise InputError where a tracker that the config names cannot be used here: its package or key is missing."""
    if config.wandb_project is not None:
        _require_package("wandb", "train.wandb_project")
        if WANDB_KEY not in os.environ and os.environ.get("WANDB_MODE") not in ("offline", "disabled"):
            raise InputError("train.wandb_project", f"needs the variable {WANDB_KEY} in the environment")
    if config.mlflow_tracking_uri is not None:
        _require_package("mlflow", "train.mlflow_tracking_uri")


def _require_package(name: str, field: str) -> None:
    if sys.modules.get(name) is None and importlib.util.find_spec(name) is None:
        command = f"{sys.executable} -m pip install {name}"
        raise InputError(field, f"needs the package {name}, which is not installed: {command}")


def trackers_of(config: TrainConfig, key: str) -> Trackers:
    """The trackers of one draft; what they need is imported in their threads.

    Args:
        key: of the drafts stage.
    """
    run = f"drafts-{key}"
    folder = tracker_folder("tensorboard", key)
    logger.info("TensorBoard shows this run with: tensorboard --logdir %s", folder)
    found: dict[str, Tracker] = {"TensorBoard": TensorBoardTracker(folder)}
    if config.wandb_project is not None:
        content = config.content()
        found["Weights & Biases"] = WandbTracker(config.wandb_project, run, content, tracker_folder("wandb", key))
    if config.mlflow_tracking_uri is not None:
        uri, experiment = config.mlflow_tracking_uri, config.mlflow_experiment
        found["MLflow"] = MlflowTracker(uri, experiment, run, config.content())
    return Trackers(found)


class Trackers:
    """Tells every tracker, in the order of the calls, without waiting for any.

    Args:
        trackers: by the name that a warning gives them.
    """

    def __init__(self, trackers: Mapping[str, Tracker]) -> None:
        self._told = [_InThread(name, tracker) for name, tracker in trackers.items()]

    def begin(self, lines: Sequence[Line]) -> None:
        standing = list(lines)
        self._tell(lambda tracker: tracker.begin(standing))

    def log(self, line: Line) -> None:
        self._tell(lambda tracker: tracker.log(line))

    def close(self, done: bool) -> None:
        """Wait until every tracker has all lines, within bounds; `done`: see Tracker.close."""
        self._tell(lambda tracker: tracker.close(done))
        until = time.monotonic() + (CLOSE_SECONDS if done else CLOSE_INTERRUPTED_SECONDS)
        for told in self._told:
            told.end(max(0.0, until - time.monotonic()))

    def _tell(self, call: Callable[[Tracker], None]) -> None:
        for told in self._told:
            told.calls.put(call)


class _InThread:
    """One tracker and its thread, which ends with the process whatever the tracker does."""

    def __init__(self, name: str, tracker: Tracker) -> None:
        self.calls: SimpleQueue[Callable[[Tracker], None] | None] = SimpleQueue()
        self._name = name
        self._tracker = tracker
        self._thread = threading.Thread(target=self._run, name=f"tracker {name}", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while (call := self.calls.get()) is not None:
            try:
                call(self._tracker)
            except Exception as error:
                said = " ".join(f"{type(error).__name__}: {error}".split())
                logger.warning("%s gets no more metrics of this run (%s); training goes on.", self._name, said)
                break

    def end(self, timeout_seconds: float) -> None:
        self.calls.put(None)
        self._thread.join(timeout_seconds)
        if self._thread.is_alive():
            logger.warning("%s has not taken all metrics in time; the rest is left.", self._name)
