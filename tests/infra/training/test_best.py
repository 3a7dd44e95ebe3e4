"""The best checkpoint and the early stop: the same however often a run dies, on any step, in mid-write."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from infra import storage
from infra.errors import InputError
from infra.training import checkpoint, checkpoint_files, loop
from infra.training.best import Validations, why_exported
from infra.training.checkpoint_files import COMMIT_FILE, CheckpointRef
from infra.training.config import TrainConfig, TrainSpec
from infra.training.data import StepBatch
from infra.training.loop import Trainer, learning_rate
from infra.training.progress import Meter, parse
from infra.training.ranks import Ranks
from tests.fakes.training_run import write_spec

CONFIG = TrainConfig(
    num_steps=14, warmup_steps=2, total_seq_len=64, checkpoint_every_steps=3, log_every_steps=3,
    validation_share=0.2, validate_every_steps=2, num_threads=1,
    export_checkpoint="best", early_stop_patience=3, early_stop_min_gain=0.02,
)  # fmt: skip
# Step 8 is the best, but no gain over step 4 of more than 0.02; three without one end it after step 10.
LENGTHS = {2: 1.1, 4: 1.5, 6: 1.3, 8: 1.51, 10: 1.4, 12: 1.9, 14: 2.0}
BEST_STEP, END_STEP = 8, 10


class Died(Exception):
    """Stands for the death of the process."""


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def lengths(monkeypatch: pytest.MonkeyPatch) -> dict[int, float]:
    """The acceptance length that each validation finds; all else is as measured."""
    found, measured = dict(LENGTHS), loop.metrics_line

    def line(kind: str, step: int, *arguments: Any, **more: Any) -> dict[str, Any]:
        whole = measured(kind, step, *arguments, **more)
        return {**whole, "acceptance_length": found[step]} if kind == "validation" else whole

    monkeypatch.setattr(loop, "metrics_line", line)
    return found


def elsewhere(spec: TrainSpec, folder: Path) -> TrainSpec:
    return spec.model_copy(
        update={"draft_uri": str(folder / "draft"), "metrics_path": str(folder / "metrics.jsonl"), "lease_epoch": 1}
    )


def before_step(trainer: Trainer, act: Callable[[int], None]) -> Trainer:
    train_step = trainer._train_step

    def stepped(batch: StepBatch, meter: Meter) -> None:
        act(trainer.step)
        train_step(batch, meter)

    trainer._train_step = stepped
    return trainer


def run(spec: TrainSpec, dies_in_step: int = 0) -> str:
    def act(step: int) -> None:
        if step == dies_in_step:
            raise Died

    return before_step(Trainer(spec, Ranks()), act).run()


def kept_steps(spec: TrainSpec) -> list[int]:
    return [ref.step for ref in checkpoint_files.find(spec.draft_uri)]


def outcome(spec: TrainSpec) -> list[Any]:
    """Everything that an export is made of, but for the leases under which it was written."""
    newest = checkpoint.read_newest(spec.draft_uri, spec.inputs_sha256)
    assert newest is not None
    best = checkpoint.read_best(spec.draft_uri, newest)
    validations = Validations.from_json(newest.state["validations"]).to_json()
    lines = [json.loads(line) for line in newest.metrics.splitlines()]
    timeless = [{name: line.get(name) for name in ("kind", "step", "loss", "acceptance_length")} for line in lines]
    weights = [{name: value.numpy().tobytes() for name, value in one.weights.items()} for one in (newest, best)]
    return [newest.ref.step, best.ref.step, {**validations, "best": None}, timeless, weights]


@pytest.mark.seconds
@pytest.mark.usefixtures("lengths")
def test_it_ends_on_the_plateau_and_keeps_the_best(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spec = write_spec(tmp_path, CONFIG)
    assert run(spec) == "done"
    said = [found for line in capsys.readouterr().out.splitlines() if (found := parse(line))]
    (plateau,) = (one for one in said if one["kind"] == "plateau")
    assert plateau["step"] == END_STEP
    assert "3 validations in a row" in plateau["why"]
    assert kept_steps(spec) == [10, 9, 8]
    step, best_step, validations, lines, (newest, best) = outcome(spec)
    assert (step, best_step) == (END_STEP, BEST_STEP)
    assert newest != best
    assert validations["num"] == 5
    assert [line["step"] for line in lines if line["kind"] == "validation"] == [2, 4, 6, 8, 10]
    assert [line["step"] for line in lines if line["kind"] == "train"] == [3, 6, 9, 10], "those after the best too"
    found = checkpoint.read_newest(spec.draft_uri, "")
    assert found is not None
    why = why_exported(found.state, CONFIG)
    assert "1.5100" in why
    assert "of 5 validations" in why


@pytest.mark.seconds
@pytest.mark.usefixtures("lengths")
def test_an_early_stop_leaves_the_schedule_as_it_was(tmp_path: Path) -> None:
    spec = write_spec(tmp_path, CONFIG)
    assert run(spec) == "done"
    lines = [json.loads(line) for line in Path(spec.metrics_path).read_text().splitlines()]
    rates = {line["step"]: line["learning_rate"] for line in lines if line["kind"] == "train"}
    assert rates == {step: learning_rate(CONFIG, step - 1, 14) for step in (3, 6, 9, 10)}


@pytest.mark.seconds
@pytest.mark.usefixtures("lengths")
def test_killed_in_every_step_it_comes_to_the_same(tmp_path: Path) -> None:
    spec = write_spec(tmp_path, CONFIG)
    assert run(spec) == "done"
    again = elsewhere(spec, tmp_path / "again")
    for step in range(1, END_STEP + 1):
        with pytest.raises(Died):
            run(again.model_copy(update={"lease_epoch": step}), dies_in_step=step)
    assert run(again.model_copy(update={"lease_epoch": 99})) == "done"
    assert outcome(again) == outcome(spec)
    before = kept_steps(again), Path(again.metrics_path).read_text()
    assert run(again.model_copy(update={"lease_epoch": 100}), dies_in_step=11) == "done", "it had ended already"
    assert (kept_steps(again), Path(again.metrics_path).read_text()) == before


@pytest.mark.seconds
@pytest.mark.usefixtures("lengths")
@pytest.mark.parametrize("step", [4, BEST_STEP, END_STEP])
def test_a_best_that_was_not_finished_is_never_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    spec = write_spec(tmp_path, CONFIG)
    assert run(spec) == "done"
    again = elsewhere(spec, tmp_path / "again")
    torn = CheckpointRef(step, 1)
    put = storage.put

    def die_at_its_commit(uri: str, data: bytes) -> None:
        if uri == storage.join(torn.uri(again.draft_uri), COMMIT_FILE):
            raise Died
        put(uri, data)

    with monkeypatch.context() as patched:
        patched.setattr(storage, "put", die_at_its_commit)
        with pytest.raises(Died):
            run(again)
    assert torn not in checkpoint_files.find(again.draft_uri)
    assert run(again.model_copy(update={"lease_epoch": 2})) == "done"
    assert outcome(again) == outcome(spec)
    assert {ref.lease_epoch for ref in checkpoint_files.find(again.draft_uri) if ref.step >= step} == {2}


@pytest.mark.seconds
@pytest.mark.usefixtures("lengths")
def test_a_best_that_was_damaged_is_made_again(tmp_path: Path) -> None:
    spec = write_spec(tmp_path, CONFIG)
    assert run(spec) == "done"
    expected = outcome(spec)
    model = Path(CheckpointRef(BEST_STEP, 1).uri(spec.draft_uri), "model.safetensors")
    data = model.read_bytes()
    model.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    assert checkpoint.read_newest(spec.draft_uri, "") is None
    assert run(spec.model_copy(update={"lease_epoch": 2})) == "done"
    assert outcome(spec) == expected


@pytest.mark.seconds
def test_patience_alone_exports_the_last_and_keeps_no_best(tmp_path: Path, lengths: dict[int, float]) -> None:
    spec = write_spec(tmp_path, CONFIG.model_copy(update={"export_checkpoint": "last"}))
    assert run(spec) == "done"
    assert kept_steps(spec) == [10, 9]
    found = checkpoint.read_newest(spec.draft_uri, "")
    assert found is not None
    assert "training ended there" in why_exported(found.state, spec.train)
    lengths[10] = 1.6
    longer = elsewhere(spec, tmp_path / "longer")
    assert run(longer) == "done"
    assert kept_steps(longer) == [14, 12], "the last step is a checkpoint of its own"
    found = checkpoint.read_newest(longer.draft_uri, "")
    assert found is not None
    assert why_exported(found.state, spec.train) == "it is the last"


def test_without_validation_samples_neither_can_be_had(tmp_path: Path) -> None:
    spec = write_spec(tmp_path, CONFIG.model_copy(update={"validation_share": 1e-6}))
    with pytest.raises(InputError, match=r"^train.validation_share: 1e-06 of 40 samples is none"):
        Trainer(spec, Ranks())
    plain = {"export_checkpoint": "last", "early_stop_patience": None}
    Trainer(spec.model_copy(update={"train": spec.train.model_copy(update=plain)}), Ranks())


# --- what validations say ---


def after(lengths: Sequence[float], min_gain: float = 0.0) -> Validations:
    said = Validations()
    for step, length in enumerate(lengths, start=1):
        said = said.after(length, CheckpointRef(step, 1), min_gain)
    return said


@pytest.mark.parametrize(
    ("lengths", "min_gain", "best", "without_gain"),
    [
        ([], 0.0, None, 0),
        ([1.5], 0.0, 1, 0),
        ([1.5], 9.0, 1, 0),
        ([1.5, 1.5, 1.5], 0.0, 1, 2),
        ([1.5, 1.4, 1.6, 1.2], 0.0, 3, 1),
        ([1.5, 1.52, 1.51], 0.05, 2, 2),
        # Small steps add up to a gain.
        ([1.5, 1.53, 1.56, 1.57], 0.05, 4, 1),
    ],
)
def test_the_best_is_the_first_of_the_highest_and_a_gain_is_more_than_asked_for(
    lengths: list[float], min_gain: float, best: int | None, without_gain: int
) -> None:
    said = after(lengths, min_gain)
    assert (None if said.best is None else said.best.step) == best
    assert said.num_without_gain == without_gain
    assert said.num == len(lengths)
    for patience in (1, 2, 3):
        config = TrainConfig(early_stop_patience=patience)
        assert said.plateau(config) == (without_gain >= patience)
    assert not said.plateau(TrainConfig())


def test_it_comes_back_from_json_bit_for_bit() -> None:
    for said in (after([]), after([1 + 1 / 3, 1.1, 1.2], 0.1)):
        assert Validations.from_json(json.loads(json.dumps(said.to_json()))) == said
