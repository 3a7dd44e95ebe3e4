"""The loop within one process: schedules, progress lines, and a stop between any two steps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from infra.errors import InputError, StageFailed
from infra.leases import Waiter
from infra.training import checkpoint, checkpoint_files
from infra.training.config import TrainConfig, TrainSpec
from infra.training.data import StepBatch
from infra.training.loop import Trainer, learning_rate
from infra.training.progress import PREFIX, Meter, parse
from infra.training.ranks import Ranks
from tests.fakes.training_run import write_spec

CONFIG = TrainConfig(
    num_steps=12, warmup_steps=2, total_seq_len=64, checkpoint_every_steps=5, log_every_steps=3,
    validation_share=0.2, validate_every_steps=6, num_threads=1,
)  # fmt: skip


@pytest.fixture(autouse=True)
def torch_settings() -> None:
    torch.set_num_threads(1)


def losses(spec: TrainSpec) -> list[tuple[str, int, float]]:
    lines = [json.loads(line) for line in Path(spec.metrics_path).read_text().splitlines()]
    return [(line["kind"], line["step"], line["loss"]) for line in lines]


def ask_to_stop_after(trainer: Trainer, step: int) -> None:
    train_step = trainer._train_step

    def stepped(batch: StepBatch, meter: Meter) -> None:
        train_step(batch, meter)
        trainer.stop.asked = trainer.step == step

    trainer._train_step = stepped


@pytest.mark.seconds
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_stopped_after_any_step_and_resumed_it_is_the_same(tmp_path: Path, optimizer: str) -> None:
    spec = write_spec(tmp_path, CONFIG.model_copy(update={"optimizer": optimizer}))
    assert Trainer(spec, Ranks()).run() == "done"
    whole = losses(spec)
    again = spec.model_copy(
        update={"draft_uri": str(tmp_path / "again"), "metrics_path": str(tmp_path / "again.jsonl")}
    )
    for stop_after in (4, 5, 11):
        trainer = Trainer(again, Ranks())
        ask_to_stop_after(trainer, stop_after)
        assert trainer.run() == "stopped"
        assert trainer.step == stop_after
    assert Trainer(again, Ranks()).run() == "done"
    assert losses(again) == whole


def test_a_checkpoint_of_other_hyper_parameters_is_refused(tmp_path: Path) -> None:
    spec = write_spec(tmp_path, CONFIG.model_copy(update={"num_steps": 2}))
    assert Trainer(spec, Ranks()).run() == "done"
    changed = spec.train.model_copy(update={"num_layers": 2, "num_steps": 3})
    with pytest.raises(StageFailed, match="other weights"):
        Trainer(spec.model_copy(update={"train": changed}), Ranks()).run()


def test_before_a_checkpoint_it_looks_whether_a_later_run_holds_the_lease(tmp_path: Path) -> None:
    root = str(tmp_path / "root")
    lease = Waiter(root, "drafts-key").try_take()
    assert lease is not None
    lease.release()
    spec = write_spec(tmp_path, CONFIG, lease_epoch=lease.epoch)
    spec = spec.model_copy(update={"lease_uri": lease.uri})
    trainer = Trainer(spec, Ranks())
    train_step = trainer._train_step

    def stepped(batch: StepBatch, meter: Meter) -> None:
        train_step(batch, meter)
        if trainer.step == 7:  # between the checkpoints of steps 5 and 10
            other = Waiter(root, "drafts-key").try_take()
            assert other is not None
            other.release()

    trainer._train_step = stepped
    assert trainer.run() == "superseded"
    assert trainer.step == 10
    assert [ref.step for ref in checkpoint_files.find(spec.draft_uri)] == [5]
    later = spec.model_copy(update={"lease_epoch": lease.epoch + 1})
    assert Trainer(later, Ranks()).run() == "done"
    assert [(ref.step, ref.lease_epoch) for ref in checkpoint_files.find(spec.draft_uri)] == [(12, 2), (10, 2)]


def test_checkpoints_of_inputs_that_were_made_anew_do_not_count(tmp_path: Path) -> None:
    spec = write_spec(tmp_path, CONFIG.model_copy(update={"num_steps": 7}), lease_epoch=1)
    before = spec.model_copy(update={"inputs_sha256": "before"})
    assert Trainer(before, Ranks()).run() == "done"
    after = spec.model_copy(update={"inputs_sha256": "after", "lease_epoch": 2})
    trainer = Trainer(after, Ranks())
    ask_to_stop_after(trainer, 5)
    assert trainer.run() == "stopped"
    assert [(ref.step, ref.lease_epoch) for ref in checkpoint_files.find(spec.draft_uri)] == [(5, 2)]
    found = checkpoint.read_newest(spec.draft_uri, "after")
    assert found is not None
    assert found.ref.step == 5
    assert checkpoint.read_newest(spec.draft_uri, "before") is None


def test_a_batch_that_the_ranks_cannot_share_is_refused(tmp_path: Path) -> None:
    ranks = Ranks()
    ranks.world = 2
    with pytest.raises(InputError, match="global_batch"):
        Trainer(write_spec(tmp_path, CONFIG), ranks)


@pytest.mark.parametrize(("schedule", "last"), [("cosine", 0.1), ("linear", 0.1), ("constant", 1.0)])
def test_the_learning_rate_rises_and_falls(schedule: str, last: float) -> None:
    config = TrainConfig(
        learning_rate=1.0, warmup_steps=10, schedule=schedule, final_learning_rate_ratio=0.1
    )  # fmt: skip
    rates = [learning_rate(config, step, 100) for step in range(101)]
    assert rates[:10] == sorted(rates[:10])
    assert rates[10] == pytest.approx(1.0)
    assert rates[100] == pytest.approx(last)
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert all(0 < rate <= 1 for rate in rates)


def test_each_line_says_how_it_goes(tmp_path: Path) -> None:
    spec = write_spec(tmp_path, CONFIG.model_copy(update={"num_steps": 6}))
    assert Trainer(spec, Ranks()).run() == "done"
    lines = [json.loads(line) for line in Path(spec.metrics_path).read_text().splitlines()]
    said = {
        "kind", "step", "num_steps", "loss", "loss_per_ttt_step", "accuracy_per_ttt_step",
        "full_accuracy_per_ttt_step", "acceptance_length",
    }  # fmt: skip
    how = {
        "epoch", "learning_rate", "gradient_norm", "tokens_per_second", "seconds", "input_wait_seconds",
        "peak_process_memory_gib",
    }  # fmt: skip
    assert [(line["kind"], set(line)) for line in lines] == [
        ("train", said | how), ("train", said | how), ("validation", said)
    ]  # fmt: skip
    assert 0.1 < lines[0]["peak_process_memory_gib"] < 100
    assert all(line[name] > 0 for line in lines[:2] for name in ("tokens_per_second", "seconds", "gradient_norm"))


def test_sums_of_an_earlier_version_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = write_spec(tmp_path, CONFIG.model_copy(update={"num_steps": 6}))
    trainer = Trainer(spec, Ranks())
    ask_to_stop_after(trainer, 4)
    assert trainer.run() == "stopped"

    def state(found: checkpoint.Checkpoint) -> dict[str, Any]:
        four_columns = [(1.0).hex()] * 4 * CONFIG.ttt_steps
        return {**json.loads(found.files["state.json"]), "sums": four_columns}

    monkeypatch.setattr(checkpoint.Checkpoint, "state", property(state))
    assert Trainer(spec, Ranks()).run() == "done"
    assert [step for kind, step, _ in losses(spec) if kind == "train"] == [3, 6]


def test_only_progress_lines_are_parsed() -> None:
    assert parse(PREFIX + '{"kind": "done", "step": 3}\n') == {"kind": "done", "step": 3}
    assert parse("Loading weights") is None
    assert parse(PREFIX + '{"kind": "do') is None
