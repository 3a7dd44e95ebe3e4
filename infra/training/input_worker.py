"""What an input process does: make packs in shared memory, or have shards fetched and checked ahead.

Started by `infra.training.input_pool` (multiprocessing's spawn); it uses no GPU. Packs do not travel: a message
says which samples belong into which slot of the ring, the answer how long they are. The process ends when its
parent is gone, however that ended; a signal meant for the trainer (SIGTERM: finish the step, write a checkpoint)
leaves it be.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection, wait

import torch

from infra.allocator import keep_freed_memory
from infra.errors import DraftsmithError, InfrastructureError
from infra.training.data import PackJob, encoded_sample, noisy
from infra.training.pack_ring import PackBuffers, PackRing
from infra.training.shard_store import ShardFiles, ShardStore

# Shards that are fetched or checked at once, ahead of those that decode: a core hashes 0.4 to 2 GB/s.
CHECKS_AT_ONCE = 4
PARENT_CHECK_SECONDS = 1.0
# The trainer launches the GPU's work: where cores are scarce, it goes first.
NICENESS = 10


def make_packs(tasks: Connection, results: Connection, files: ShardFiles, max_open: int, ring: PackRing) -> None:
    """Answer each (number, slot, job) of `tasks` with (number, lengths), or with an error, until `tasks` ends.

    Args:
        max_open: see ShardStore.
    """
    _begin()
    store = ShardStore(files.stage_uri, max_open, files=files)
    with contextlib.suppress(EOFError, BrokenPipeError):
        while True:
            number, slot, job = tasks.recv()
            try:
                results.send((number, fill(ring.slots[slot], store, job)))
            except Exception as error:
                results.send((number, portable(error)))


def prepare_shards(tasks: Connection, results: Connection, files: ShardFiles) -> None:
    """Fetch and check each shard of `tasks`; answer with the errors only."""
    _begin()
    lock = threading.Lock()

    def check(shard: int) -> None:
        try:
            files.prepare(shard)
        except Exception as error:
            with lock, contextlib.suppress(BrokenPipeError):
                results.send((shard, portable(error)))

    with ThreadPoolExecutor(CHECKS_AT_ONCE) as pool, contextlib.suppress(EOFError):
        while True:
            pool.submit(check, tasks.recv())


def fill(slot: PackBuffers, store: ShardStore, job: PackJob) -> tuple[int, ...]:
    """Make a pack in its slot, one sample at a time. Returns the samples' lengths."""
    lengths: list[int] = []
    for sample in job.samples:
        part, encoded = encoded_sample(store, sample)
        slot.write(sum(lengths), part, encoded)
        lengths.append(part.num_tokens)
    batch = slot.batch(tuple(lengths))
    changed = noisy(batch, job)
    if changed is not batch:
        batch.hidden_states.copy_(changed.hidden_states)
    return batch.lengths


def portable(error: Exception) -> DraftsmithError:
    """The error as it may cross to another process."""
    if isinstance(error, DraftsmithError):
        return error
    return InfrastructureError(f"an input process failed with {type(error).__name__}: {error}")


def _begin() -> None:
    torch.set_num_threads(1)
    os.nice(NICENESS)
    keep_freed_memory()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, args=(os.getppid(),), daemon=True).start()


def _end_with_parent(parent_pid: int) -> None:
    """By the pipe that only the parent holds; or by its pid, where a fork of the parent still holds it."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    while os.getppid() == parent_pid and not wait([parent.sentinel], PARENT_CHECK_SECONDS):
        pass
    os._exit(1)
