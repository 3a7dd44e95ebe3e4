"""Samples of a hidden_states stage, in an order that is a pure function of (seed, epoch).

The whole schedule of a run follows from an index of the samples (where each lies, how long it is): step k takes
the packs [k * global_batch, (k + 1) * global_batch) of an endless stream, one epoch after the other, and rank r of
w takes every w-th of them. So a position in the data is a step number, every rank has the same number of steps, and
the number of ranks does not change what is learnt.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from infra.fingerprint import sha256_hex
from infra.hidden_states import EncodedSample
from infra.training.batch import PackedBatch, align_sample, concatenate
from infra.training.config import TrainConfig
from infra.training.sample_index import IndexedSample, build_index, index_from_json, index_to_json
from infra.training.shard_store import ShardStore

__all__ = [
    "IndexedSample",
    "Pack",
    "PackJob",
    "Packs",
    "Schedule",
    "ShardStore",
    "StepBatch",
    "StepLoader",
    "build_index",
    "encoded_sample",
    "index_from_json",
    "index_to_json",
    "make_pack",
    "noisy",
    "read_sample",
]

# Packs that stay open for shorter samples while an epoch is packed.
OPEN_PACKS = 32

Pack = tuple[IndexedSample, ...]


class Schedule:
    """Which samples each step takes."""

    def __init__(self, index: Sequence[IndexedSample], config: TrainConfig) -> None:
        self._config = config
        self._train = [sample for sample in index if not sample.validation]
        self._epochs: dict[int, list[Pack]] = {}
        self._starts = [0]
        validation = [sample for sample in index if sample.validation]
        self.validation: list[Pack] = _fill(validation, config.total_seq_len)
        per_epoch = len(self._packs(0))
        self.num_steps = config.num_steps or max(1, round(config.epochs * per_epoch / config.global_batch))

    def packs_of_step(self, step: int) -> list[Pack]:
        """All packs of step `step` (counted from 0), over all ranks."""
        batch = self._config.global_batch
        return [self._pack(number) for number in range(step * batch, (step + 1) * batch)]

    def epoch_of_step(self, step: int) -> int:
        number = step * self._config.global_batch
        self._pack(number)
        return max(epoch for epoch, start in enumerate(self._starts) if start <= number)

    def _pack(self, number: int) -> Pack:
        while self._starts[-1] <= number:
            self._starts.append(self._starts[-1] + len(self._packs(len(self._starts) - 1)))
        epoch = max(epoch for epoch, start in enumerate(self._starts) if start <= number)
        return self._packs(epoch)[number - self._starts[epoch]]

    def _packs(self, epoch: int) -> list[Pack]:
        if epoch not in self._epochs:
            if len(self._epochs) > 2:
                self._epochs.clear()
            self._epochs[epoch] = self._pack_epoch(epoch)
        return self._epochs[epoch]

    def _pack_epoch(self, epoch: int) -> list[Pack]:
        """Shuffle the shards, then the samples of a few neighbouring shards among themselves; fill packs."""
        order = random.Random(f"{self._config.seed}:{epoch}")
        by_shard: dict[int, list[IndexedSample]] = {}
        for sample in self._train:
            by_shard.setdefault(sample.shard, []).append(sample)
        shards = sorted(by_shard)
        order.shuffle(shards)
        window = self._config.shuffle_window_shards
        packs: list[Pack] = []
        for start in range(0, len(shards), window):
            samples = [sample for shard in shards[start : start + window] for sample in by_shard[shard]]
            order.shuffle(samples)
            filled = _fill(samples, self._config.total_seq_len)
            order.shuffle(filled)
            packs.extend(filled)
        return packs


def _fill(samples: Sequence[IndexedSample], num_tokens: int) -> list[Pack]:
    """First fit over a bounded number of open packs."""
    closed: list[list[IndexedSample]] = []
    opened: list[tuple[int, list[IndexedSample]]] = []
    for sample in samples:
        for place, (room, pack) in enumerate(opened):
            if sample.num_tokens <= room:
                pack.append(sample)
                opened[place] = (room - sample.num_tokens, pack)
                break
        else:
            opened.append((num_tokens - sample.num_tokens, [sample]))
            if len(opened) > OPEN_PACKS:
                fullest = min(range(len(opened)), key=lambda place: opened[place][0])
                closed.append(opened.pop(fullest)[1])
    return [tuple(pack) for pack in [*closed, *(pack for _, pack in opened)]]


@dataclass(frozen=True)
class PackJob:
    """One pack that is to be made, a pure function of the config and the stage.

    Args:
        samples: what lies in it, in order.
        noise_share: see TrainConfig.state_noise; 0 for none.
        noise_seed: of that noise.
    """

    samples: Pack
    noise_share: float = 0.0
    noise_seed: int = 0


class Packs(Protocol):
    """Packs to be gone through once, in order. What a pack holds is valid until the next one is asked for."""

    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[PackedBatch]: ...


@dataclass(frozen=True)
class StepBatch:
    """What one rank computes in one step.

    Args:
        packs: its packed sequences.
        num_loss_tokens: trained tokens of the step over all ranks.
        num_tokens: tokens of the step over all ranks.
        validation: this rank's packs of the validation samples where the step is followed by a validation, else
            none.
    """

    packs: Packs
    num_loss_tokens: int
    num_tokens: int
    validation: Packs = ()


class StepLoader:
    """Makes the batches of one rank from the store."""

    def __init__(self, store: ShardStore, schedule: Schedule, config: TrainConfig, rank: int, world: int) -> None:
        self.store = store
        self.config = config
        self._schedule = schedule
        self._rank = rank
        self._world = world

    def load(self, step: int) -> StepBatch:
        """The batch of step `step`, without validation."""
        return self.batch_of(step, [make_pack(self.store, job) for job in self.jobs(step)])

    def validation(self) -> list[PackedBatch]:
        """This rank's packs of the validation samples."""
        return [make_pack(self.store, job) for job in self.validation_jobs()]

    def batch_of(self, step: int, packs: Packs, validation: Packs = ()) -> StepBatch:
        samples = [sample for pack in self._schedule.packs_of_step(step) for sample in pack]
        num_loss_tokens = sum(sample.num_loss_tokens for sample in samples)
        return StepBatch(packs, num_loss_tokens, sum(sample.num_tokens for sample in samples), validation)

    def jobs(self, step: int) -> list[PackJob]:
        """This rank's packs of a step."""
        packs = self._schedule.packs_of_step(step)
        share, seed = self.config.state_noise, self.config.seed
        return [
            PackJob(packs[place], share, int(sha256_hex(f"{seed}:{step}:{place}".encode())[:12], 16))
            for place in range(self._rank, len(packs), self._world)
        ]

    def validation_jobs(self) -> list[PackJob]:
        return [PackJob(pack) for pack in self._schedule.validation[self._rank :: self._world]]

    def validates_after(self, step: int) -> bool:
        """Whether the loop measures on the validation samples after step `step` (counted from 0)."""
        return (step + 1) % self.config.validate_every_steps == 0 or step + 1 == self._schedule.num_steps

    def shards_of_step(self, step: int) -> list[int]:
        """Shards that any rank reads for a step, in the order of first use."""
        packs: Iterable[Pack] = self._schedule.packs_of_step(step)
        return list(dict.fromkeys(sample.shard for pack in packs for sample in pack))


def make_pack(store: ShardStore, job: PackJob) -> PackedBatch:
    return noisy(concatenate([read_sample(store, sample) for sample in job.samples]), job)


def read_sample(store: ShardStore, where: IndexedSample) -> PackedBatch:
    """One aligned sample, in views of what was decoded."""
    sample = store.sample(where.shard, where.row)
    assert sample is not None, "failed rows are not indexed"
    cut = where.num_tokens + 1
    return align_sample(
        sample.input_ids[:cut].long(),
        sample.loss_mask[:cut],
        sample.aux_hidden_states[:cut],
        sample.verifier_last_hidden_states[:cut],
    )


def encoded_sample(store: ShardStore, where: IndexedSample) -> tuple[PackedBatch, EncodedSample]:
    """One aligned sample without its states (their widths are 0), and what they are to be decoded from.

    Row t of the sample has the auxiliary states of token t and the verifier's last ones of token t + 1.
    """
    sample = store.encoded(where.shard, where.row)
    assert sample is not None, "failed rows are not indexed"
    cut = where.num_tokens + 1
    absent = torch.empty(cut, 0, dtype=torch.bfloat16)
    return align_sample(sample.input_ids[:cut].long(), sample.loss_mask[:cut], absent, absent), sample


def noisy(batch: PackedBatch, job: PackJob) -> PackedBatch:
    if job.noise_share == 0:
        return batch
    return batch.with_noise(job.noise_share, torch.Generator().manual_seed(job.noise_seed))
