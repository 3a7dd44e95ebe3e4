"""The batches of a rank, made ahead of the loop: in a thread where the CPU trains, in processes where a GPU does.

A GPU eats some 80,000 tokens/s, of states 2.6 GB/s at four layers of 4,096: more than one core reads, unpacks and
copies. There, processes make whole packs in a ring of pinned shared memory, and a copy stream uploads each into one
of two buffers on the device while the other is computed on. Host memory of one rank: (workers + 3) packs of
total_seq_len * layers * hidden_size * 2 bytes, and in each worker one sample before and after decoding.

Both ways give the same bits (a test).
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Generator, Iterable, Iterator
from dataclasses import replace
from queue import Queue

import torch

from infra.machine import usable_cores
from infra.training.batch import PackedBatch
from infra.training.config import TrainConfig
from infra.training.data import PackJob, StepBatch, StepLoader
from infra.training.input_pool import InputPool
from infra.training.pack_ring import PackLayout
from infra.training.progress import Meter
from infra.training.shards_ahead import ShardsAhead
from infra.training.uploads import Uploads

PREFETCHED_STEPS = 3
# Of one rank's cores, two stay with the trainer: one launches, one runs autograd.
TRAINER_CORES = 2
MAX_DEFAULT_WORKERS = 12


def input_workers(config: TrainConfig, device: torch.device) -> int:
    """Processes that make the packs of one rank; 0: a thread of the trainer's own does."""
    if config.input_workers is not None:
        return config.input_workers
    if device.type == "cpu":
        return 0
    cores = usable_cores() // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return max(1, min(MAX_DEFAULT_WORKERS, cores - TRAINER_CORES))


class Feed:
    """Makes batches ahead of the loop, once. Its processes start with it, before a model is compiled.

    Args:
        device: where the states of a pack are when it is handed over; its other tensors are on the CPU.
        workers: processes that make packs, 0 for a thread.
    """

    def __init__(self, loader: StepLoader, device: torch.device, workers: int) -> None:
        self._loader, self._device = loader, device
        self._pool: InputPool | None = None
        if workers:
            meta = loader.store.read_unchecked(0, lambda file: file.meta)
            widths = (len(meta.layer_ids) - 1) * meta.hidden_size, meta.hidden_size
            self._pool = InputPool(loader.store, PackLayout(loader.config.total_seq_len, *widths), workers)

    def batches(self, first: int, last: int) -> Generator[StepBatch, None, None]:
        """Batches of the steps [first, last); what makes them ends with the generator.

        Returns:
            Batches whose packs (first those of the step, then those of a validation) are gone through once, in
            order. With workers, what a pack holds is overwritten after the next one was asked for.

        Raises (from the iterator):
            DamagedShard: a shard does not match its record.
            InfrastructureError: an input process died, or the store did not answer.
        """
        if self._pool is None:
            return _from_thread(self._loader, first, last)
        return _from_processes(self._loader, self._pool, first, last, self._device)


def timed(packs: Iterable[PackedBatch], meter: Meter) -> Iterator[PackedBatch]:
    """The same packs; the time that each is waited for is metered."""
    source = iter(packs)
    while True:
        with meter.waiting():
            pack = next(source, None)
        if pack is None:
            return
        yield pack


def _from_thread(loader: StepLoader, first: int, last: int) -> Generator[StepBatch, None, None]:
    queue: Queue[StepBatch | BaseException] = Queue(maxsize=PREFETCHED_STEPS)

    def make() -> None:
        try:
            for step in range(first, last):
                queue.put(loader.load(step))
        except BaseException as error:
            queue.put(error)

    validation = loader.validation()
    threading.Thread(target=make, name="prefetch", daemon=True).start()
    for step in range(first, last):
        item = queue.get()
        if isinstance(item, BaseException):
            raise item
        yield replace(item, validation=validation) if loader.validates_after(step) else item


def _from_processes(
    loader: StepLoader, pool: InputPool, first: int, last: int, device: torch.device
) -> Generator[StepBatch, None, None]:
    ahead = ShardsAhead(loader, first, last, 2 * loader.config.shuffle_window_shards)
    with (
        contextlib.closing(pool),
        contextlib.closing(_on_gpu(pool, device) if device.type == "cuda" else _on_cpu(pool)) as source,
    ):
        pool.begin(_jobs(loader, first, last))
        for step in range(first, last):
            pool.check_ahead(ahead.at(step))
            packs = _Taken(source, len(loader.jobs(step)))
            validation = _Taken(source, len(loader.validation_jobs()) if loader.validates_after(step) else 0)
            yield loader.batch_of(step, packs, validation)
            packs.skip()
            validation.skip()


def _jobs(loader: StepLoader, first: int, last: int) -> Iterator[PackJob]:
    for step in range(first, last):
        yield from loader.jobs(step)
        if loader.validates_after(step):
            yield from loader.validation_jobs()


class _Taken:
    """The next `count` packs of a stream."""

    def __init__(self, source: Iterator[PackedBatch], count: int) -> None:
        self._source = source
        self._count = count
        self._left = count

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[PackedBatch]:
        while self._left:
            self._left -= 1
            yield next(self._source)

    def skip(self) -> None:
        """Pass over what was not asked for."""
        for _ in self:
            pass


def _on_gpu(pool: InputPool, device: torch.device) -> Generator[PackedBatch, None, None]:
    pool.ring.pin()
    yield from Uploads(pool, device).packs()


def _on_cpu(pool: InputPool) -> Generator[PackedBatch, None, None]:
    while True:
        made = pool.take()
        assert made is not None
        yield made.batch
        pool.release(made.slot)
