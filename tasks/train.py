"""Train a draft: torchrun under a guard, resumed from its checkpoints however often it is started."""

from __future__ import annotations

import asyncio
import logging
import shlex
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from infra import leases, storage
from infra.errors import DamagedShard, InfrastructureError, InputError, LeaseLost, StageFailed
from infra.gauges import show_training
from infra.locations import log_file
from infra.manifest import ShardRecord, StageRef, inputs_sha256
from infra.processes import GuardedProcess, end_stale, log_tail, process_token
from infra.redaction import withheld
from infra.tracking.trackers import trackers_of
from infra.training.config import TrainConfig, TrainSpec
from infra.training.input_checks import check_hidden_states
from infra.training.launch import torchrun_command
from infra.training.progress import parse
from infra.training.start import write_start
from infra.verifiers.verifier import Verifier
from tasks.child_log import child_log
from tasks.policy import retried_task
from tasks.training_watch import TrainingWatch, watching

logger = logging.getLogger("draftsmith.train")

# Kinds of lines that end a run (`infra.training.progress`).
ENDS = ("done", "stopped", "superseded", "failed")


@retried_task(name="train-draft", run_name="train {stage.key}", restarts=True)
async def train_draft(
    stage: StageRef,
    inputs: Mapping[str, ShardRecord],
    lease_epoch: int,
    config: TrainConfig,
    verifier: Verifier,
    layer_ids: tuple[int, ...],
    vocab_file: str,
    trust_remote_code: bool,
) -> int:
    """Train to the end, from the newest whole checkpoint where there is one.

    Args:
        inputs: present record of everything that is trained on.
        lease_epoch: of the stage's lease, which the caller holds.
        layer_ids: the extracted layer ids; the draft reads all but the last.
        vocab_file: name of the vocabulary map in its stage's folder.

    Returns:
        The last step, whose checkpoint is committed.

    Raises:
        InfrastructureError: the trainer died; the next attempt resumes.
        LeaseLost: the trainer saw that another run has taken the lease.
        InputError: the hidden states or the start draft do not fit, told before any GPU is taken.
        DamagedShard, InputError, StageFailed: as the trainer said.
    """
    await asyncio.to_thread(
        check_hidden_states,
        stage.upstream_uri("hidden_states"),
        verifier_revision=verifier.revision,
        hidden_size=verifier.hidden_size,
        layer_ids=layer_ids,
    )
    token = process_token(stage.uri, "train")
    await asyncio.to_thread(end_stale, token)
    with tempfile.TemporaryDirectory(prefix="draftsmith-train-") as folder:
        spec = TrainSpec(
            train=config,
            hidden_states_uri=stage.upstream_uri("hidden_states"),
            vocab_uri=f"{stage.upstream_uri('vocab')}/{vocab_file}",
            draft_uri=stage.uri,
            lease_epoch=lease_epoch,
            lease_uri=leases.lease_uri(stage.root, leases.lease_name(stage.stage, stage.key)),
            inputs_sha256=inputs_sha256(inputs),
            verifier_path=str(verifier.path),
            aux_hidden_state_layer_ids=layer_ids[:-1],
            metrics_path=str(Path(folder, "metrics.jsonl")),
            trust_remote_code=trust_remote_code,
        )
        if config.init_from is not None:
            await asyncio.to_thread(write_start, spec)
        # Several nodes read it where they read everything else.
        shared = storage.join(stage.uri, "trainer", f"{lease_epoch}.json")
        spec_uri = str(Path(folder, "spec.json")) if config.num_nodes == 1 else shared
        await asyncio.to_thread(storage.put, spec_uri, spec.model_dump_json().encode())
        async with watching(trackers_of(config, stage.key), Path(spec.metrics_path)) as watch:
            return await _run_trainer(stage, config, spec_uri, token, watch)


async def _run_trainer(
    stage: StageRef, config: TrainConfig, spec_uri: str, token: str, watch: TrainingWatch
) -> int:
    log = log_file(stage.stage, stage.key, "trainer")
    command = torchrun_command(config, spec_uri)
    for node in range(1, config.num_nodes):
        # The verifier must lie there under the same path as here.
        logger.warning("Start on node %d: %s", node, shlex.join(torchrun_command(config, spec_uri, node)))
    ranks = config.num_ranks * config.num_nodes
    logger.info("Training %s with %d rank(s); the log is %s.", stage.key, ranks, log)
    async with child_log(stage, "trainer"):
        process = GuardedProcess.start(
            command, token=token, log_path=log, withhold=withheld(needs_store=True), stdout_pipe=True
        )
        try:
            last = await _follow(stage, process, config.hang_timeout_seconds, watch)
            code = await asyncio.to_thread(process.wait)
        finally:
            await asyncio.shield(asyncio.to_thread(process.stop))
    if last.get("kind") == "done" and code == 0:
        return int(last["step"])
    if last.get("kind") == "failed":
        raise _said_by_trainer(last)
    if last.get("kind") == "superseded":
        raise LeaseLost(f"the trainer stopped at step {last['step']}: another run holds the lease of {stage.key}")
    if last.get("kind") == "stopped":
        raise InfrastructureError(f"the trainer was asked to stop at step {last['step']}; the next attempt resumes")
    tail = " | ".join(log_tail(log, offset=process.log_offset))
    raise InfrastructureError(f"the trainer ended with code {code}; the next attempt resumes. {log} says: {tail}")


async def _follow(
    stage: StageRef, process: GuardedProcess, hang_timeout_seconds: float, watch: TrainingWatch
) -> dict[str, Any]:
    """Show the trainer's lines until it closes its output; returns the last one that ends a run.

    Raises:
        InfrastructureError: it has said nothing for `hang_timeout_seconds`.
    """
    assert process.stdout is not None
    last: dict[str, Any] = {}
    try:
        while line := await asyncio.wait_for(asyncio.to_thread(process.stdout.readline), hang_timeout_seconds):
            said = parse(line.decode(errors="replace"))
            if said is None:
                continue
            await watch.see(said)
            if said["kind"] == "train":
                show_training(stage, said)
            if said["kind"] in ENDS:
                last = said
    except TimeoutError:
        raise InfrastructureError(
            f"the trainer has said nothing for {hang_timeout_seconds:g} s; it is ended, the next attempt resumes"
        ) from None
    return last


def _said_by_trainer(said: dict[str, Any]) -> Exception:
    """The trainer's own error, as the type it had there."""
    if said["error_type"] == "DamagedShard":
        return DamagedShard(said["stage_uri"], said["shard"], said["problem"])
    if said["error_type"] == "InputError":
        field, _, problem = said["message"].partition(": ")
        return InputError(field, problem)
    if said["error_type"] == "StageFailed":
        return StageFailed(said["message"])
    return InfrastructureError(said["message"])
