"""However the draft is spread over ranks, it learns the same; and a checkpoint goes from one way to another."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from infra import storage
from infra.training import checkpoint, checkpoint_files
from infra.training.checkpoint_files import COMMIT_FILE
from infra.training.config import TrainConfig, TrainSpec
from infra.training.loop import Trainer
from infra.training.ranks import Ranks
from tests.fakes.training_run import write_spec

pytestmark = pytest.mark.kill

CONFIG = TrainConfig(
    num_steps=6, warmup_steps=2, total_seq_len=64, global_batch=2, precision="fp32", checkpoint_every_steps=3,
    log_every_steps=1, validation_share=0.2, validate_every_steps=3, num_threads=1,
)  # fmt: skip


def torchrun(spec: TrainSpec, path: Path) -> None:
    """Train on two gloo ranks."""
    path.write_text(spec.model_dump_json())
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*command, "-m", "infra.training", str(path)],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-3000:]


def losses(spec: TrainSpec) -> list[float]:
    lines = [json.loads(line) for line in Path(spec.metrics_path).read_text().splitlines()]
    return [value for line in lines for value in (line["loss"], *line["loss_per_ttt_step"])]


def newest(spec: TrainSpec) -> checkpoint.Checkpoint:
    found = checkpoint.read_newest(spec.draft_uri, spec.inputs_sha256)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("distribution", "optimizer"),
    [("ddp", "adamw"), ("fsdp2", "adamw"), pytest.param("fsdp2", "muon", marks=pytest.mark.slow)],
)
def test_two_ranks_learn_what_one_does(tmp_path: Path, distribution: str, optimizer: str) -> None:
    torch.set_num_threads(1)
    config = CONFIG.model_copy(update={"optimizer": optimizer})
    one = write_spec(tmp_path, config)
    assert Trainer(one, Ranks()).run() == "done"
    wanted = losses(one)
    changed: dict[str, Any] = {
        "train": config.model_copy(update={"distribution": distribution, "num_ranks": 2}),
        "draft_uri": str(tmp_path / "two"),
        "metrics_path": str(tmp_path / "two.jsonl"),
    }
    two = one.model_copy(update=changed)
    torchrun(two, tmp_path / "two.json")
    # torch's Muon orthogonalizes in bf16, sharded matrices in another order: a tenth of a step may part them.
    loss_share, weight_gap = (1e-4, 0.1 * config.learning_rate) if optimizer == "muon" else (1e-5, 1e-5)
    alike = pytest.approx(wanted, rel=loss_share, abs=5e-7)
    assert losses(two) == alike
    for name, value in newest(one).weights.items():
        assert torch.allclose(newest(two).weights[name], value, rtol=1e-5, atol=weight_gap), name

    # One rank goes on from what two have written.
    ref = checkpoint_files.find(two.draft_uri)[0]
    assert ref.step == 6
    storage.delete(storage.join(ref.uri(two.draft_uri), COMMIT_FILE))
    assert newest(two).state["ranks"] == 2
    trainer = Trainer(two.model_copy(update={"train": config, "lease_epoch": 2}), Ranks())
    assert trainer.run() == "done"
    assert losses(two) == alike
    assert checkpoint_files.find(two.draft_uri)[0].lease_epoch == 2


@pytest.mark.parametrize("distribution", ["ddp", "fsdp2"])
def test_two_ranks_end_early_after_the_same_step_and_keep_the_best(tmp_path: Path, distribution: str) -> None:
    torch.set_num_threads(1)
    changes: dict[str, Any] = {
        "num_steps": 40,
        "validate_every_steps": 2,
        "distribution": distribution,
        "num_ranks": 2,
        "export_checkpoint": "best",
        "early_stop_patience": 2,
        "early_stop_min_gain": 50.0,  # that nothing gains: the first validation and two more
    }
    spec = write_spec(tmp_path, CONFIG.model_copy(update=changes))
    torchrun(spec, tmp_path / "spec.json")
    found = newest(spec)
    assert found.ref.step == 6
    lines = [json.loads(line) for line in Path(spec.metrics_path).read_text().splitlines()]
    measured = {line["step"]: line["acceptance_length"] for line in lines if line["kind"] == "validation"}
    best = checkpoint.read_best(spec.draft_uri, found)
    assert best.ref.step == max(measured, key=lambda step: measured[step])
    assert best.weights.keys() == found.weights.keys()
