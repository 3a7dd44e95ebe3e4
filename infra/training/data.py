"""Samples of a hidden_states stage, in an order that is a pure function of (seed, epoch).

The whole schedule of a run follows from an index of the samples (where each lies, how long it is): step k takes
the packs [k * global_batch, (k + 1) * global_batch) of an endless stream, one epoch after the other, and rank r of
w takes every w-th of them. So a position in the data is a step number, every rank has the same number of steps, and
the number of ranks does not change what is learnt.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from threading import Lock

import torch

from infra import manifest
from infra.errors import DamagedShard, StageFailed
from infra.fingerprint import sha256_hex
from infra.hidden_states import HiddenSample, HiddenStatesFile, HiddenStatesMeta
from infra.schemas import STATUS_FAILED
from infra.training.batch import PackedBatch, concatenate
from infra.training.config import TrainConfig
from infra.training.eagle3 import align_sample

# Packs that stay open for shorter samples while an epoch is packed.
OPEN_PACKS = 32


@dataclass(frozen=True)
class IndexedSample:
    """Where a sample lies and what it holds after alignment.

    Args:
        shard: position of its shard in the stage.
        row: its row there.
        num_tokens: rows of the aligned sample, cut to total_seq_len.
        num_loss_tokens: how many of them are trained on.
        validation: whether it only measures.
    """

    shard: int
    row: int
    num_tokens: int
    num_loss_tokens: int
    validation: bool


class ShardStore:
    """Shards of a stage, checked against their records, the last few of them kept in memory.

    Raises (from its methods):
        DamagedShard: a shard does not match its record, or cannot be decoded.
        StageFailed: the stage is not complete, or its shards are not of one kind.
    """

    def __init__(self, stage_uri: str, max_shards: int) -> None:
        if manifest.read_manifest(stage_uri) is None:
            raise StageFailed(f"{stage_uri} has no manifest; finish that stage before training")
        records = manifest.read_records(stage_uri)
        self.stage_uri = stage_uri
        self.records = [records[shard] for shard in sorted(records)]
        self._max_shards = max_shards
        self._held: OrderedDict[int, HiddenStatesFile] = OrderedDict()
        self._first: tuple[str, HiddenStatesMeta] | None = None  # the shard that the others must be like
        self._lock = Lock()

    def file(self, shard: int) -> HiddenStatesFile:
        """The open shard at position `shard`."""
        with self._lock:
            if shard not in self._held:
                record = self.records[shard]
                data = manifest.read_shard(self.stage_uri, record)
                try:
                    self._held[shard] = HiddenStatesFile(data)
                except ValueError as error:
                    raise DamagedShard(self.stage_uri, record.shard, str(error)) from error
                self._require_like_the_first(record.shard, self._held[shard].meta)
                while len(self._held) > self._max_shards:
                    self._held.popitem(last=False)
            self._held.move_to_end(shard)
            return self._held[shard]

    def sample(self, shard: int, row: int) -> HiddenSample:
        """The sample of row `row`, which did not fail, of the shard at position `shard`."""
        try:
            sample = self.file(shard).sample(row)
        except ValueError as error:
            raise DamagedShard(self.stage_uri, self.records[shard].shard, str(error)) from error
        assert sample is not None, "failed rows are not indexed"
        return sample

    def _require_like_the_first(self, shard: str, meta: HiddenStatesMeta) -> None:
        """Shards copied between stages must not be trained on: their states mean different things."""
        self._first = self._first or (shard, meta)
        first, expected = self._first
        for field in fields(meta):
            found, wanted = getattr(meta, field.name), getattr(expected, field.name)
            if found != wanted:
                raise StageFailed(
                    f"{self.stage_uri} shard {shard}: {field.name} is {found!r}, but {wanted!r} in shard {first}; "
                    "all shards of a stage must be alike, so delete the stage and extract it again"
                )


def build_index(store: ShardStore, config: TrainConfig) -> list[IndexedSample]:
    """Read every shard once; failed samples and those without a trained token are left out."""
    found = []
    for shard in range(len(store.records)):
        rows = store.file(shard).rows()
        columns = (rows[name].to_pylist() for name in ("status", "input_ids", "loss_mask"))
        for row, (status, input_ids, loss_mask) in enumerate(zip(*columns, strict=True)):
            cut = loss_mask[1 : config.total_seq_len + 1]
            if status != STATUS_FAILED and any(cut):
                held_back = _is_validation(input_ids[: loss_mask.index(True)], config)
                found.append(IndexedSample(shard, row, len(cut), sum(cut), held_back))
    if all(sample.validation for sample in found):
        raise StageFailed(f"{store.stage_uri} has no sample to train on")
    return found


def index_to_json(index: Sequence[IndexedSample]) -> bytes:
    return json.dumps([list(asdict(sample).values()) for sample in index]).encode()


def index_from_json(data: bytes) -> list[IndexedSample]:
    return [IndexedSample(*values) for values in json.loads(data)]


def _is_validation(prompt: list[int], config: TrainConfig) -> bool:
    """By a hash of the prompt's tokens, so that all samples of one prompt fall on the same side."""
    digest = hashlib.sha256(f"{config.seed}:{prompt}".encode()).digest()
    return int.from_bytes(digest[:8], "big") < config.validation_share * 2**64


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
class StepBatch:
    """What one rank computes in one step.

    Args:
        packs: its packed sequences.
        num_loss_tokens: trained tokens of the step over all ranks.
        num_tokens: tokens of the step over all ranks.
    """

    packs: list[PackedBatch]
    num_loss_tokens: int
    num_tokens: int


class StepLoader:
    """Makes the batches of one rank from the store."""

    def __init__(self, store: ShardStore, schedule: Schedule, config: TrainConfig, rank: int, world: int) -> None:
        self._store = store
        self._schedule = schedule
        self._config = config
        self._rank = rank
        self._world = world

    def load(self, step: int) -> StepBatch:
        """The batch of step `step`, a pure function of the config and the stage."""
        packs = self._schedule.packs_of_step(step)
        mine = range(self._rank, len(packs), self._world)
        made = [self._noisy(self._make(packs[place]), step, place) for place in mine]
        samples = [sample for pack in packs for sample in pack]
        return StepBatch(
            made, sum(sample.num_loss_tokens for sample in samples), sum(sample.num_tokens for sample in samples)
        )

    def validation(self) -> list[PackedBatch]:
        """This rank's packs of the validation samples."""
        return [self._make(pack) for pack in self._schedule.validation[self._rank :: self._world]]

    def _make(self, pack: Pack) -> PackedBatch:
        return concatenate([self._sample(sample) for sample in pack])

    def _sample(self, where: IndexedSample) -> PackedBatch:
        sample = self._store.sample(where.shard, where.row)
        cut = where.num_tokens + 1
        return align_sample(
            sample.input_ids[:cut].long(),
            sample.loss_mask[:cut],
            sample.aux_hidden_states[:cut],
            sample.verifier_last_hidden_states[:cut],
        )

    def _noisy(self, batch: PackedBatch, step: int, place: int) -> PackedBatch:
        if self._config.state_noise == 0:
            return batch
        seed = int(sha256_hex(f"{self._config.seed}:{step}:{place}".encode())[:12], 16)
        return batch.with_noise(self._config.state_noise, torch.Generator().manual_seed(seed))
