"""The training loop: one process per rank, resumable at every step."""

from __future__ import annotations

import contextlib
import logging
import math
import threading
from collections.abc import Iterator
from pathlib import Path
from queue import Queue
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from infra import leases, storage
from infra.errors import InputError
from infra.training import checkpoint as checkpoints
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
from infra.training.eagle3 import SUM_COLUMNS, Eagle3Objective, build_model, trainable_parameters
from infra.training.optimizer import DraftOptimizer
from infra.training.progress import Meter, MetricsFile, metrics_line, say
from infra.training.ranks import Ranks, StopRequest, set_up_threads
from infra.vocab import VocabMap

logger = logging.getLogger("draftsmith.training")

PREFETCHED_STEPS = 3


def learning_rate(config: TrainConfig, step: int, num_steps: int) -> float:
    """Learning rate of step `step` (counted from 0)."""
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / (config.warmup_steps + 1)
    done = (step - config.warmup_steps) / max(1, num_steps - config.warmup_steps)
    low = config.final_learning_rate_ratio
    falls = {"cosine": 0.5 * (1 + math.cos(math.pi * done)), "linear": 1 - done, "constant": 1.0}
    share = falls[config.schedule] if config.schedule == "constant" else low + (1 - low) * falls[config.schedule]
    return config.learning_rate * share


def prefetch(loader: StepLoader, first: int, last: int) -> Iterator[StepBatch]:
    """Batches of the steps [first, last), made ahead in a thread."""
    queue: Queue[StepBatch | BaseException] = Queue(maxsize=PREFETCHED_STEPS)

    def make() -> None:
        try:
            for step in range(first, last):
                queue.put(loader.load(step))
        except BaseException as error:
            queue.put(error)

    threading.Thread(target=make, name="prefetch", daemon=True).start()
    for _ in range(first, last):
        item = queue.get()
        if isinstance(item, BaseException):
            raise item
        yield item


class Trainer:
    """One rank's part of a run.

    Args:
        spec: what to train, from what, to where.
        ranks: this process among the others.
    """

    def __init__(self, spec: TrainSpec, ranks: Ranks) -> None:
        config = spec.train
        if config.global_batch % ranks.world:
            raise InputError(
                "train.global_batch", f"{config.global_batch} is not a multiple of the {ranks.world} ranks"
            )
        self.spec, self.config, self.ranks = spec, config, ranks
        self.stop = StopRequest()
        set_up_threads(config, ranks)
        store = ShardStore(spec.hidden_states_uri, config.shuffle_window_shards)
        index = ranks.share_bytes(index_to_json(build_index(store, config)) if ranks.rank == 0 else None)
        self.index = index_from_json(index)
        self.schedule = Schedule(self.index, config)
        self.loader = StepLoader(store, self.schedule, config, ranks.rank, ranks.world)
        self.validation = self.loader.validation()
        self._build()
        self.sums = torch.zeros(config.ttt_steps, len(SUM_COLUMNS), dtype=torch.float64)
        self.step = 0
        self.metrics: MetricsFile | None = None

    def _build(self) -> None:
        spec, config = self.spec, self.config
        kind = config.implementation
        if kind == "auto":
            kind = "library" if self.ranks.cuda else "rows"
        model = build_model(
            config,
            VocabMap.from_bytes(storage.get(spec.vocab_uri)),
            spec.verifier_path,
            spec.aux_hidden_state_layer_ids,
            trust_remote_code=spec.trust_remote_code,
            attention="simple_flex_attention" if self.ranks.cuda else "eager",
        )
        objective = Eagle3Objective(model.to(self.ranks.device), config, kind)
        self.parameters = trainable_parameters(model)
        self.objective: nn.Module = objective
        if self.ranks.world > 1:
            ids = [self.ranks.device.index] if self.ranks.cuda else None
            self.objective = DistributedDataParallel(objective, device_ids=ids, broadcast_buffers=False)
        self.optimizer = DraftOptimizer(config, self.parameters)

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
        first, last = self.step, self.schedule.num_steps
        batches = prefetch(self.loader, first, last)
        meter = Meter()
        for self.step in range(first + 1, last + 1):
            with meter.waiting():
                batch = next(batches)
            self._train_step(batch)
            meter.count(batch.num_tokens)
            at_end = self.step == last
            if self.step % self.config.log_every_steps == 0 or at_end:
                self._log_training(meter)
            if self.step % self.config.validate_every_steps == 0 or at_end:
                with meter.paused():
                    self._validate()
            stopping = self.ranks.any(self.stop.asked)
            if self.step % self.config.checkpoint_every_steps == 0 or at_end or stopping:
                if self._superseded():
                    return "superseded"
                with meter.paused():
                    self._save()
            if stopping and not at_end:
                return "stopped"
        return "done"

    def _train_step(self, batch: StepBatch) -> None:
        for number, pack in enumerate(batch.packs):
            # Gradients travel between ranks once a step, with the last pack.
            quiet = self.ranks.world > 1 and number + 1 < len(batch.packs)
            held: Any = self.objective.no_sync() if quiet else contextlib.nullcontext()  # type: ignore[operator]
            with held:
                loss, sums = self._objective(pack.to(self.ranks.device), batch.num_loss_tokens)
                # DistributedDataParallel takes the mean over ranks, the loss is a sum over them.
                (loss * self.ranks.world).backward()  # type: ignore[no-untyped-call]
            self.sums += sums
        torch.nn.utils.clip_grad_norm_(self.parameters.values(), self.config.max_gradient_norm)
        self.optimizer.step(learning_rate(self.config, self.step - 1, self.schedule.num_steps))

    def _objective(self, pack: Any, num_loss_tokens: int) -> tuple[Tensor, Tensor]:
        low = self.config.precision == "bf16"
        with torch.autocast(self.ranks.device.type, dtype=torch.bfloat16, enabled=low):
            found: tuple[Tensor, Tensor] = self.objective(pack, num_loss_tokens)
        return found

    def _log_training(self, meter: Meter) -> None:
        sums = self.ranks.sum(self.sums)
        self.sums.zero_()
        tokens_per_second, input_wait_seconds = meter.take()
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
                    tokens_per_second=tokens_per_second,
                    input_wait_seconds=input_wait_seconds,
                )
            )

    @torch.no_grad()
    def _validate(self) -> None:
        if not self.schedule.validation:
            return
        sums = torch.zeros_like(self.sums)
        for pack in self.validation:
            sums += self._bare(pack)
        sums = self.ranks.sum(sums)
        if self.metrics is not None:
            self.metrics.append(
                metrics_line(
                    "validation",
                    self.step,
                    sums,
                    self.config.ttt_step_loss_decay,
                    num_steps=self.schedule.num_steps,
                )
            )

    def _bare(self, pack: Any) -> Tensor:
        """Without DistributedDataParallel: ranks may have different numbers of validation packs."""
        module = self.objective.module if isinstance(self.objective, DistributedDataParallel) else self.objective
        low = self.config.precision == "bf16"
        with torch.autocast(self.ranks.device.type, dtype=torch.bfloat16, enabled=low):
            _, sums = module(pack.to(self.ranks.device), max(1, pack.num_loss_tokens))
        found: Tensor = sums
        return found

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
        if found is not None:
            checkpoints.restore(found, self.parameters, self.optimizer, self.ranks.rank)
            self.step = found.ref.step
            text = found.metrics
            if self.ranks.rank == 0:
                values = [float.fromhex(value) for value in found.state["sums"]]
                self.sums = torch.tensor(values, dtype=torch.float64).view_as(self.sums)
            logger.info("Resuming from step %d of %d", self.step, self.schedule.num_steps)
        if self.ranks.rank == 0:
            self.metrics = MetricsFile(Path(spec.metrics_path), text)

    def _save(self) -> None:
        ref = CheckpointRef(self.step, self.spec.lease_epoch)
        gathered = self.ranks.sum(self.sums)
        self.sums = gathered if self.ranks.rank == 0 else torch.zeros_like(self.sums)
        checkpoints.write_rank_file(self.spec.draft_uri, ref, self.ranks.rank)
        self.ranks.barrier()
        if self.metrics is not None:
            state = {
                "num_steps": self.schedule.num_steps,
                "ranks": self.ranks.world,
                "inputs_sha256": self.spec.inputs_sha256,
                # Hexadecimal floats come back bit for bit.
                "sums": [value.hex() for value in self.sums.flatten().tolist()],
                "learning_rate": learning_rate(self.config, self.step - 1, self.schedule.num_steps),
            }
            checkpoints.write(
                self.spec.draft_uri,
                ref,
                self.parameters,
                self.optimizer,
                state,
                self.metrics.text,
                self.ranks.world,
            )
        self.ranks.barrier()
