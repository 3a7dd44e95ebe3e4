"""The training loop: one process per rank, resumable at every step.

A run may be resumed on another number of ranks, or distributed in another way: the batches and their order are the
same. Only sums (of gradients, of norms) are then taken in another order, so what is learnt is equal up to rounding
and not bit for bit; ranks that the checkpoint has no random state of keep their own, which training does not draw
from.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from infra import leases, storage
from infra.errors import InfrastructureError
from infra.training import checkpoint as checkpoints
from infra.training.algorithm import Objective, trainable_parameters
from infra.training.algorithms import algorithm
from infra.training.batch import PackedBatch
from infra.training.best import Validations, ended_early, refuse_without_validation
from infra.training.checkpoint_files import CheckpointRef, withdraw_foreign
from infra.training.config import TrainConfig, TrainSpec
from infra.training.data import (
    Schedule,
    ShardStore,
    StepBatch,
    StepLoader,
    build_index,
    index_from_json,
    index_to_json,
)
from infra.training.distribution import Distributed, whole
from infra.training.feed import Feed, input_workers, timed
from infra.training.launch import check_batch
from infra.training.optimizer import DraftOptimizer
from infra.training.progress import Meter, MetricsFile, metrics_line, say
from infra.training.ranks import Ranks, StopRequest, set_up_threads

logger = logging.getLogger("draftsmith.training")

# The objective hears of the packs of so many steps, to choose the shapes that it computes.
EXPECTED_STEPS = 100


def learning_rate(config: TrainConfig, step: int, num_steps: int) -> float:
    """Learning rate of step `step` (counted from 0)."""
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / (config.warmup_steps + 1)
    done = (step - config.warmup_steps) / max(1, num_steps - config.warmup_steps)
    low = config.final_learning_rate_ratio
    falls = {"cosine": 0.5 * (1 + math.cos(math.pi * done)), "linear": 1 - done, "constant": 1.0}
    share = falls[config.schedule] if config.schedule == "constant" else low + (1 - low) * falls[config.schedule]
    return config.learning_rate * share


class Trainer:
    """One rank's part of a run.

    Args:
        spec: what to train, from what, to where.
        ranks: this process among the others.
    """

    def __init__(self, spec: TrainSpec, ranks: Ranks) -> None:
        config = spec.train
        check_batch(config, ranks.world)
        self.spec, self.config, self.ranks = spec, config, ranks
        self.stop = StopRequest()
        set_up_threads(config, ranks)
        store = ShardStore(
            spec.hidden_states_uri, config.shuffle_window_shards, int(config.shard_cache_gib * 2**30)
        )
        index = ranks.share_bytes(index_to_json(build_index(store, config)) if ranks.rank == 0 else None)
        self.index = index_from_json(index)
        self.schedule = Schedule(self.index, config)
        refuse_without_validation(config, len(self.index), bool(self.schedule.validation))
        self.loader = StepLoader(store, self.schedule, config, ranks.rank, ranks.world)
        self.feed = Feed(self.loader, ranks.device, input_workers(config, ranks.device))
        objective = algorithm(config).objective(spec, storage.get(spec.vocab_uri), cuda=ranks.cuda)
        some = range(min(EXPECTED_STEPS, self.schedule.num_steps))
        packs = [pack for step in some for pack in self.schedule.packs_of_step(step)]
        objective.expect([(sum(sample.num_loss_tokens for sample in pack), len(pack)) for pack in packs])
        objective.to(ranks.device)
        if ranks.cuda:
            settle(objective, ranks)
        self.objective = Distributed(objective, config, ranks)
        self.prepare = objective.prepare
        self.parameters = trainable_parameters(objective.model)
        self.optimizer = DraftOptimizer(config, self.parameters)
        self.sums = torch.zeros(objective.sums_shape, dtype=torch.float64, device=ranks.device)
        self.gradient_norm = torch.zeros(())
        self.step = 0
        self.validations = Validations()
        self.metrics: MetricsFile | None = None
        self.copies, self.writer = checkpoints.HostCopies(), checkpoints.CheckpointWriter()

    def run(self) -> Literal["done", "stopped", "superseded"]:
        """Train to the last step.

        Returns:
            `stopped` when a SIGTERM came first and a checkpoint was written, `superseded` when a later run holds
            the lease, before which no checkpoint may be written any more.
        """
        self._resume()
        train_samples = [sample for sample in self.index if not sample.validation]
        if self.ranks.rank == 0:
            say(
                "start",
                num_steps=self.schedule.num_steps,
                from_step=self.step,
                num_samples=len(train_samples),
                num_loss_tokens_per_epoch=sum(sample.num_loss_tokens for sample in train_samples),
                ranks=self.ranks.world,
            )
        try:
            outcome = self._train()
        finally:
            self.writer.wait()
        # No rank leaves the others while the last checkpoint is being written.
        self.ranks.barrier()
        return outcome

    def _train(self) -> Literal["done", "stopped", "superseded"]:
        first, last = self.step, self.schedule.num_steps
        if self._on_plateau():  # and was killed before it could end
            return "done"
        batches = self.feed.batches(first, last)
        meter = Meter()
        for self.step in range(first + 1, last + 1):
            with meter.waiting():
                batch = next(batches)
            self._train_step(batch, meter)
            meter.count(batch.num_tokens)
            at_end = self.step == last
            if self.step % self.config.log_every_steps == 0 or at_end:
                self._log_training(meter)
            if self.step % self.config.validate_every_steps == 0 or at_end:
                with meter.paused():
                    self._validate(batch.validation)
            if self._on_plateau():
                at_end = True
                if self.step % self.config.log_every_steps:
                    self._log_training(meter)
            stopping = self.ranks.any(self.stop.asked)
            if self.step % self.config.checkpoint_every_steps == 0 or at_end or stopping or self._is_best_to_keep():
                if self._superseded():
                    return "superseded"
                with meter.paused():
                    self._save()
            if at_end:
                break
            if stopping:
                return "stopped"
        return "done"

    def _train_step(self, batch: StepBatch, meter: Meter) -> None:
        last = len(batch.packs) - 1
        for number, pack in enumerate(timed(batch.packs, meter)):
            with self.objective.accumulating(number == last):
                loss, sums = self._objective(self.objective, pack, batch.num_loss_tokens)
                # The gradient is the mean over ranks, the loss is a sum over them.
                (loss * self.ranks.world).backward()  # type: ignore[no-untyped-call]
            self.sums += sums
        # Stays on the device: nothing of a step waits for it, until a line is logged.
        self.gradient_norm = torch.nn.utils.clip_grad_norm_(self.parameters.values(), self.config.max_gradient_norm)
        self.optimizer.step(learning_rate(self.config, self.step - 1, self.schedule.num_steps))

    def _objective(self, run: Callable[..., Any], pack: PackedBatch, num_loss_tokens: int) -> tuple[Tensor, Tensor]:
        low = self.config.precision == "bf16"
        with torch.autocast(self.ranks.device.type, dtype=torch.bfloat16, enabled=low):
            found: tuple[Tensor, Tensor] = run(self.prepare(pack).to(self.ranks.device), num_loss_tokens)
        return found

    def _log_training(self, meter: Meter) -> None:
        sums = self.ranks.sum(self.sums)
        self.sums.zero_()
        pace = meter.take()
        memory_field, memory_gib = self.ranks.peak_memory()
        # What one rank waits for, all wait for; and the fullest GPU is the one that runs out.
        input_wait_seconds, memory_gib = self.ranks.largest([pace.input_wait_seconds, memory_gib])
        gradient_norm = float(whole(self.gradient_norm))
        rate = learning_rate(self.config, self.step - 1, self.schedule.num_steps)
        if self.metrics is not None:
            self.metrics.append(
                metrics_line(
                    "train",
                    self.step,
                    sums,
                    self.config.ttt_step_loss_decay,
                    num_steps=self.schedule.num_steps,
                    epoch=self.schedule.epoch_of_step(self.step - 1),
                    learning_rate=rate,
                    gradient_norm=gradient_norm,
                    tokens_per_second=pace.tokens_per_second,
                    seconds=pace.seconds,
                    input_wait_seconds=input_wait_seconds,
                    **{memory_field: memory_gib},
                )
            )

    def _on_plateau(self) -> bool:
        """Whether training ends here, before its last planned step; the same on every rank."""
        ends = self.step < self.schedule.num_steps and self.validations.plateau(self.config)
        if ends and self.ranks.rank == 0:
            say("plateau", step=self.step, why=ended_early(self.validations, self.config))
        return ends

    def _kept_best(self) -> CheckpointRef | None:
        return self.validations.best if self.config.export_checkpoint == "best" else None

    def _is_best_to_keep(self) -> bool:
        """Whether the validation of this very step found what may be exported."""
        best = self._kept_best()
        return best is not None and best.step == self.step

    @torch.no_grad()
    def _validate(self, packs: Iterable[PackedBatch]) -> None:
        if not self.schedule.validation:
            return
        sums = torch.zeros_like(self.sums)
        with self.objective.alone() as objective:
            for pack in packs:
                sums += self._objective(objective, pack, max(1, pack.num_loss_tokens))[1]
        total = self.ranks.sum(sums)
        decay, num_steps = self.config.ttt_step_loss_decay, self.schedule.num_steps
        line = metrics_line("validation", self.step, total, decay, num_steps=num_steps)
        here = CheckpointRef(self.step, self.spec.lease_epoch)
        self.validations = self.validations.after(line["acceptance_length"], here, self.config.early_stop_min_gain)
        if self.metrics is not None:
            self.metrics.append(line)

    def _superseded(self) -> bool:
        """Whether the lease is under another epoch now. One rank looks, all are told."""
        elsewhere = False
        if self.ranks.rank == 0 and self.spec.lease_uri:
            held = leases.current(self.spec.lease_uri)
            if held is not None and held.epoch != self.spec.lease_epoch:
                logger.warning("%s holds the lease now (epoch %d); no checkpoint is written here", held, held.epoch)
                elsewhere = True
        return self.ranks.any(elsewhere)

    def _resume(self) -> None:
        spec = self.spec
        if self.ranks.rank == 0:
            withdraw_foreign(spec.draft_uri, spec.inputs_sha256, spec.lease_epoch)
        found = checkpoints.read_newest(spec.draft_uri, spec.inputs_sha256)
        text = ""
        if found is None and self.config.init_from is not None:
            raise InfrastructureError("the start draft's weights are not there whole; the next attempt writes them")
        if found is not None:
            checkpoints.restore(found, self.parameters, self.optimizer, self.ranks.rank)
            self.step = found.ref.step
            self.validations = Validations.from_json(found.state.get("validations", Validations().to_json()))
            text = found.metrics
            if self.ranks.rank == 0 and self.step > 0:
                values = [float.fromhex(value) for value in found.state["sums"]]
                # An earlier version's had other columns; the next line then misses the steps since its last one.
                if len(values) == self.sums.numel():
                    self.sums.copy_(torch.tensor(values, dtype=torch.float64).view_as(self.sums))
            logger.info("Going on from step %d of %d", self.step, self.schedule.num_steps)
        if self.ranks.rank == 0:
            self.metrics = MetricsFile(Path(spec.metrics_path), text)

    def _save(self) -> None:
        """Gather everything in rank 0's memory; it is written while training goes on."""
        self.writer.wait()
        config, spec = self.config, self.spec
        ref = CheckpointRef(self.step, spec.lease_epoch)
        gathered = self.ranks.sum(self.sums)
        # From here on rank 0 has the sums of all.
        self.sums.copy_(gathered if self.ranks.rank == 0 else torch.zeros_like(gathered))
        rank_states = self.ranks.gather_bytes(checkpoints.rank_state())
        keep = self.metrics is not None
        weights = self.copies.take(self.parameters, keep=keep)
        optimizer = self.copies.take(self.optimizer.tensors(), keep=keep)
        if self.metrics is None:
            return
        state = {
            "num_steps": self.schedule.num_steps,
            "ranks": self.ranks.world,
            "inputs_sha256": spec.inputs_sha256,
            # Hexadecimal floats come back bit for bit.
            "sums": [value.hex() for value in gathered.flatten().tolist()],
            "learning_rate": learning_rate(config, self.step - 1, self.schedule.num_steps),
            "validations": self.validations.to_json(),
            "kept_best": asdict(best) if (best := self._kept_best()) is not None else None,
        }
        text = self.metrics.text
        self.writer.start(
            lambda: checkpoints.write(spec.draft_uri, ref, weights, optimizer, state, text, rank_states)
        )


def settle(objective: Objective, ranks: Ranks) -> None:
    """Compile the objective, and take its fallback where that fails: on every rank, or on none.

    Effects:
        What compiled code needs is made here, so the first step takes no longer than the others.
    """
    for _ in range(3):
        problem = ""
        try:
            for batch in objective.examples():
                loss, _ = objective(objective.prepare(batch).to(ranks.device), batch.num_loss_tokens)
                torch.autograd.backward(loss)
        except Exception as error:
            problem = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            logger.warning("The %s forward pass cannot run here (%s).", objective.implementation, problem)
        objective.zero_grad()
        if not ranks.any(bool(problem)):
            break
        logger.warning("Training takes the %s forward pass instead.", objective.fallback)
        objective.implementation, objective.fallback = objective.fallback, "rows"
    torch.cuda.empty_cache()
