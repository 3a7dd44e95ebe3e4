"""What the trainer says becomes the error that fits: another attempt, another stage's work, or none of ours."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from infra.drafts.start_draft import StartConfig
from infra.drafts.vocab import FILE_NAME
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
from infra.hidden_states import HiddenRow, HiddenStatesMeta
from infra.manifest import StageRef
from infra.processes import process_token
from infra.tracking.trackers import Trackers
from infra.training.config import TrainConfig
from infra.training.launch import torchrun_command
from infra.training.progress import PREFIX
from infra.verifiers.verifier import Verifier
from tasks import policy
from tasks import train as task
from tasks.train import _run_trainer
from tasks.training_watch import watching
from tests.fakes.start_draft import random_weights, write_speculator
from tests.fakes.training_run import (
    HIDDEN_SIZE,
    LAYER_IDS,
    NUM_LAYERS,
    VERIFIER_VOCAB_SIZE,
    random_rows,
    vocabulary,
    write_stage,
    write_verifier,
)


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
    config = TrainConfig(
        num_ranks=8, num_nodes=2, global_batch=16, rendezvous_endpoint="first:29500", max_restarts=3
    )
    command = torchrun_command(config, "s3://bucket/spec.json", node_rank=1)
    assert {"--nnodes=2", "--node-rank=1", "--master-addr=first", "--master-port=29500"} < set(command)
    assert {"--nproc-per-node=8", "--max-restarts=3"} < set(command)
    assert command[-3:] == ["-m", "infra.training", "s3://bucket/spec.json"]
    alone = torchrun_command(TrainConfig(num_ranks=8, global_batch=8), "/private/spec.json")
    assert {"--rdzv-conf=store_type=file", "--rdzv-endpoint=/private/spec.json.rendezvous"} < set(alone)
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
        (
            {"kind": "train", "step": 3, "loss": 2.0, "tokens_per_second": 9.0, "input_wait_seconds": 0.0},
            InfrastructureError,
        ),
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


# --- before torchrun ---

META = HiddenStatesMeta(LAYER_IDS, HIDDEN_SIZE, "revision")


class TorchrunStarts(Exception):
    """The trainer would be started now."""


async def begin(
    root: Path,
    monkeypatch: pytest.MonkeyPatch,
    *metas: HiddenStatesMeta,
    rows: list[list[HiddenRow]] | None = None,
    layer_ids: tuple[int, ...] = LAYER_IDS,
    config: TrainConfig | None = None,
    verifier_path: Path = Path("unread"),
) -> None:
    """The whole task over a stage of these shards, up to where it starts torchrun."""

    async def starts(*_: Any) -> int:
        raise TorchrunStarts

    monkeypatch.setattr(task, "_run_trainer", starts)
    monkeypatch.setenv("DRAFTSMITH_CACHE", str(root / "cache"))
    states = write_stage(str(root), rows or [random_rows(2), random_rows(2)], *metas)
    upstream = {"hidden_states": states.rpartition("/")[2], "vocab": "0123456789abcdef"}
    stage = StageRef(str(root), "drafts", stage_content("drafts", 1, {}, {}, upstream))
    Path(stage.upstream_uri("vocab")).mkdir(parents=True)
    Path(stage.upstream_uri("vocab"), FILE_NAME).write_bytes(vocabulary().to_bytes())
    verifier = Verifier(
        name="tiny",
        revision="revision",
        path=verifier_path,
        hidden_size=HIDDEN_SIZE,
        num_hidden_layers=NUM_LAYERS,
        vocab_size=VERIFIER_VOCAB_SIZE,
        max_position_embeddings=128,
    )
    await task.train_draft.fn(stage, {}, 1, config or TrainConfig(), verifier, layer_ids, FILE_NAME, False)


async def test_states_that_fit_are_trained_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TorchrunStarts):
        await begin(tmp_path, monkeypatch, META)


FAILED = HiddenRow("failed", "failed", "no answer", [], [], None)


@pytest.mark.parametrize(
    ("metas", "rows", "layer_ids", "says"),
    [
        pytest.param(
            [replace(META, verifier_revision="another")],
            None,
            LAYER_IDS,
            "was extracted from verifier another, but the draft is for revision",
            id="of another verifier",
        ),
        pytest.param(
            [META, replace(META, encoding="fp8_e4m3")],
            None,
            LAYER_IDS,
            "00001 has encoding fp8_e4m3 where it is bf16 in 00000",
            id="of mixed encodings",
        ),
        pytest.param([META], [[FAILED]], LAYER_IDS, "no sample that could be trained on", id="empty"),
        pytest.param([META], [[]], LAYER_IDS, "no sample that could be trained on", id="without any row"),
        pytest.param(
            [META], None, (1, 3, 4, 6), "has the states of layers [1, 2, 4, 6], but the draft is to read [1, 3, 4]",
            id="of other layers",
        ),
        pytest.param([replace(META, layer_ids=(1, 2, 6))], [random_rows(2, num_layers=3)], LAYER_IDS, "[1, 2, 6]", id="of fewer layers"),
    ],
)  # fmt: skip
async def test_states_that_do_not_fit_are_one_clear_line_before_torchrun(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    metas: list[HiddenStatesMeta],
    rows: list[list[HiddenRow]] | None,
    layer_ids: tuple[int, ...],
    says: str,
) -> None:
    with pytest.raises(InputError) as caught:
        await begin(tmp_path, monkeypatch, *metas, rows=rows, layer_ids=layer_ids)
    assert str(caught.value).startswith("hidden_states: ")
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


async def test_a_start_draft_is_read_or_refused_before_torchrun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, config = write_verifier(tmp_path / "verifier"), TrainConfig()
    weights = random_weights(config, vocabulary(), str(path))
    draft = write_speculator(tmp_path / "draft", config, vocabulary(), str(path), weights)
    config = config.model_copy(update={"init_from": StartConfig(draft=str(draft))})
    fits, does_not = tmp_path / "fits", tmp_path / "does not"
    with pytest.raises(TorchrunStarts):
        await begin(fits, monkeypatch, META, config=config, verifier_path=path)
    (begun,) = Path(fits, "drafts").glob("*/checkpoints/1/step-00000000/COMMITTED.json")
    assert begun.exists()
    with pytest.raises(InputError, match=r"^train\.num_layers: is 2, but the start draft has 1$"):
        await begin(
            does_not,
            monkeypatch,
            META,
            config=config.model_copy(update={"num_layers": 2}),
            verifier_path=path,
        )
    assert not Path(does_not, "drafts").exists()
