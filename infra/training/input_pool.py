"""Input processes of one rank: they make packs ahead in a ring of slots, and have the next shards checked."""

from __future__ import annotations

import contextlib
import multiprocessing
from collections import deque
from collections.abc import Callable, Iterator
from multiprocessing.connection import wait
from typing import Any, NamedTuple

from infra.errors import DraftsmithError, InfrastructureError
from infra.training.batch import PackedBatch
from infra.training.data import PackJob
from infra.training.input_worker import make_packs, prepare_shards
from infra.training.pack_ring import PackLayout, PackRing
from infra.training.shard_store import ShardStore

# Beside one slot for each worker: one that the trainer reads, two that are ready.
SPARE_SLOTS = 3
END_SECONDS = 2.0


class MadePack(NamedTuple):
    """A pack in its slot, which is given back with `InputPool.release`."""

    slot: int
    batch: PackedBatch


class InputPool:
    """Makes packs, in order and as far ahead as there are slots. Its processes start with it, and end by `close`.

    Args:
        num_workers: processes that make packs; one more checks shards.

    Raises (from its methods):
        DamagedShard, StorageError, InputError: what a process met.
        InfrastructureError: a process has died.
    """

    def __init__(self, store: ShardStore, layout: PackLayout, num_workers: int) -> None:
        self.ring = PackRing(layout, num_workers + SPARE_SLOTS)
        self._jobs: Iterator[PackJob] = iter(())
        self._free = deque(range(self.ring.num_slots))
        self._in_order: deque[tuple[int, int]] = deque()  # number and slot of each pack that was not taken yet
        self._lengths: dict[int, tuple[int, ...]] = {}  # of those that are made, by number
        self._next_number = 0
        self._makers: list[_Child] = []
        self._checkers: list[_Child] = []
        try:
            for _ in range(num_workers):
                self._makers.append(_Child(make_packs, store.files, store.max_open, self.ring))
            self._checkers.append(_Child(prepare_shards, store.files))
        except BaseException:
            self.close()
            raise

    def begin(self, jobs: Iterator[PackJob]) -> None:
        """Have these made; they are gone through only as far as there are slots."""
        self._jobs = jobs
        self._send_jobs()

    def close(self) -> None:
        """End the processes. The ring's memory is given back when no pack looks at it any more."""
        for child in (*self._makers, *self._checkers):
            child.end()
        self.ring.close()

    def check_ahead(self, shards: list[int]) -> None:
        """Have these shards fetched and checked, in this order, while others are in use."""
        for shard in shards:
            self._checkers[0].send(shard)

    @property
    def in_work(self) -> bool:
        """Whether there is a pack that is being made, or made and not taken."""
        return bool(self._in_order)

    def take(self, *, wait_for_it: bool = True) -> MadePack | None:
        """The next pack in order; None when it need not be waited for and is not made yet, or there is none."""
        self._hear(0.0)
        while not self._in_order or self._in_order[0][0] not in self._lengths:
            if not wait_for_it:
                return None
            self._hear(None)
        number, slot = self._in_order.popleft()
        return MadePack(slot, self.ring.slots[slot].batch(self._lengths.pop(number)))

    def release(self, slot: int) -> None:
        """Nobody reads the slot any more."""
        self._free.append(slot)
        self._send_jobs()

    def _send_jobs(self) -> None:
        while self._free and (job := next(self._jobs, None)) is not None:
            idlest = min(self._makers, key=lambda child: child.num_open)
            slot = self._free.popleft()
            self._in_order.append((self._next_number, slot))
            idlest.send((self._next_number, slot, job))
            self._next_number += 1

    def _hear(self, timeout_seconds: float | None) -> None:
        """Take in what the processes say; waits until one says something, or dies."""
        children = [*self._makers, *self._checkers]
        by_handle: dict[Any, _Child] = {child.results: child for child in children}
        by_handle |= {child.process.sentinel: child for child in children}
        for handle in wait(list(by_handle), timeout_seconds):
            child = by_handle[handle]
            answer = child.receive()
            if answer is None:
                continue
            number, found = answer
            if isinstance(found, DraftsmithError):
                raise found
            self._lengths[number] = found


class _Child:
    """One process and the two pipes to it."""

    def __init__(self, work: Callable[..., None], *arguments: Any) -> None:
        # Not forked: this process may have threads, and a GPU.
        context = multiprocessing.get_context("spawn")
        its_tasks, self.tasks = context.Pipe(duplex=False)
        self.results, its_results = context.Pipe(duplex=False)
        self.num_open = 0
        self.process = context.Process(target=work, args=(its_tasks, its_results, *arguments), daemon=True)
        self.process.start()
        its_tasks.close()
        its_results.close()

    def send(self, task: Any) -> None:
        self.num_open += 1
        with contextlib.suppress(BrokenPipeError):  # found dead by `receive`
            self.tasks.send(task)

    def receive(self) -> tuple[int, Any] | None:
        """What it has said, if anything."""
        try:
            if self.results.poll():
                self.num_open -= 1
                answer: tuple[int, Any] = self.results.recv()
                return answer
        except (EOFError, OSError):
            pass
        else:
            if self.process.is_alive():
                return None
        self.process.join(END_SECONDS)
        raise InfrastructureError(
            f"an input process of the trainer (pid {self.process.pid}) ended with code {self.process.exitcode}, "
            "though nobody asked it to; was it killed for want of memory?"
        )

    def end(self) -> None:
        self.process.kill()  # it leaves nothing that is half done, and holds no lock that would outlive it
        self.process.join()
        self.tasks.close()
        self.results.close()
