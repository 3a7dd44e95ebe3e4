"""What the trainer says becomes the error that fits: another attempt, another stage's work, or none of ours."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from infra.errors import (
    DamagedShard,
    DraftsmithError,
    InfrastructureError,
    InputError,
    LeaseLost,
    ServerError,
    StorageError,
)
from infra.fingerprint import stage_content
from infra.manifest import StageRef
from infra.processes import process_token
from infra.trackers import Trackers
from infra.training.config import TrainConfig
from infra.training.launch import torchrun_command
from infra.training.progress import PREFIX
from tasks import policy
from tasks.train import _run_trainer
from tasks.training_watch import watching


async def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: dict[str, Any], code: int) -> int:
    """What comes of a trainer that says one line and ends."""
    monkeypatch.setenv("DRAFTSMITH_CACHE", str(tmp_path))
    trainer = tmp_path / "python"
    trainer.write_text(f"#!/bin/sh\necho '{PREFIX}{json.dumps(said)}'\nexit {code}\n")
    trainer.chmod(0o755)
    stage = StageRef(str(tmp_path), "drafts", stage_content("drafts", 1, {}, {}, {}))
    token = process_token("test", str(tmp_path))
    with monkeypatch.context() as patched:
        patched.setattr("infra.training.launch.sys", type("Sys", (), {"executable": str(trainer)}))
        async with watching(Trackers({}), tmp_path / "metrics.jsonl") as watch:
            return await _run_trainer(stage, TrainConfig(), str(tmp_path / "spec.json"), token, watch)


def test_several_nodes_find_one_another() -> None:
    config = TrainConfig(num_ranks=8, num_nodes=2, rendezvous_endpoint="first:29500", max_restarts=3)
    command = torchrun_command(config, "s3://bucket/spec.json", node_rank=1)
    assert {"--nnodes=2", "--node-rank=1", "--master-addr=first", "--master-port=29500"} < set(command)
    assert {"--nproc-per-node=8", "--max-restarts=3"} < set(command)
    assert command[-3:] == ["-m", "infra.training", "s3://bucket/spec.json"]
    with pytest.raises(InputError, match="rendezvous_endpoint"):
        torchrun_command(config.model_copy(update={"rendezvous_endpoint": "first"}), "spec.json")


async def test_the_last_step_is_returned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert await run(tmp_path, monkeypatch, {"kind": "done", "step": 60}, 0) == 60


@pytest.mark.parametrize(
    ("said", "kind"),
    [
        ({"kind": "superseded", "step": 10}, LeaseLost),
        ({"kind": "stopped", "step": 10}, InfrastructureError),
        ({"kind": "failed", "error_type": "StorageError", "message": "gone"}, InfrastructureError),
        (
            {
                "kind": "failed",
                "error_type": "DamagedShard",
                "message": "",
                "stage_uri": "u",
                "shard": "00000",
                "problem": "torn",
            },
            DamagedShard,
        ),
        ({"kind": "train", "step": 3}, InfrastructureError),
    ],
)
async def test_each_end_has_its_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: dict[str, Any], kind: type[DraftsmithError]
) -> None:
    with pytest.raises(DraftsmithError) as caught:
        await run(tmp_path, monkeypatch, said, 1)
    assert type(caught.value) is kind


@pytest.mark.parametrize(
    ("error", "retried", "restarted"),
    [
        (StorageError("gone"), True, True),
        (ServerError("dead"), False, True),
        (LeaseLost("taken"), False, False),
        (DamagedShard("u", "00000", "torn"), False, False),
    ],
)
async def test_what_another_run_has_taken_over_is_not_tried_again(
    monkeypatch: pytest.MonkeyPatch, error: Exception, retried: bool, restarted: bool
) -> None:
    async def error_of(state: Any) -> Any:
        return error

    monkeypatch.setattr(policy, "_error_of", error_of)
    state: Any = None
    assert await policy._worth_retrying(None, None, state) is retried
    assert await policy._worth_restarting(None, None, state) is restarted
