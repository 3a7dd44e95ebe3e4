"""Which shards of a stage this node makes while other nodes make others: blocks of the plan, leased one by one.

A block is a fixed run of shards of the plan. Whoever holds its lease makes those of them that are missing. A node
that dies leaves a lease that is no longer renewed, and whoever has nothing else to do takes it. So no node has a
share that only it can make, and nodes may come and go. As everywhere, records decide: of a block that two nodes
make, the first record of each shard stands.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

from infra import manifest
from infra.leases import DEFAULT_TIMING, Lease, Timing, Waiter, lease_name
from infra.records import Shard, StageRef, StageState


class Claims:
    """The blocks that this process holds of one stage. All of it waits for the store; call it from threads.

    Args:
        plan: the stage's shards.
        block_size: shards in a block; nodes that work together must have the same.
        run: id of the flow run that makes them.
    """

    def __init__(
        self,
        stage: StageRef,
        plan: Sequence[Shard],
        block_size: int,
        run: str = "",
        timing: Timing = DEFAULT_TIMING,
    ) -> None:
        self._stage = stage
        self._blocks = [plan[start : start + block_size] for start in range(0, len(plan), block_size)]
        names = [f"{lease_name(stage.stage, stage.key)}-{block[0].shard}-{block_size}" for block in self._blocks]
        self._waiters = [Waiter(stage.root, name, run, timing, says_waiting=False) for name in names]
        self._held: dict[int, Lease] = {}
        self._unmade: dict[int, set[str]] = {}
        self._lock = threading.Lock()  # of the two; not held while the store is asked

    def take(self) -> tuple[list[Shard], StageState]:
        """The missing shards of the next block that nobody else makes, and what the stage had just before.

        The list is empty where nothing is free now: all is made, or others are at it. One call at a time.

        Raises:
            StorageError, InputError: the store could not be asked.
        """
        state = manifest.inspect(self._stage)
        for number in self._candidates(state):
            lease = self._waiters[number].try_take()
            if lease is None:
                continue
            state = manifest.inspect(self._stage)  # who held it before may have made the last of it just now
            wanted = [shard for shard in self._blocks[number] if shard.shard not in state.records]
            if wanted:
                with self._lock:
                    self._held[number] = lease
                    self._unmade[number] = {shard.shard for shard in wanted}
                return wanted, state
            lease.release()
        return [], state

    def made(self, shard: Shard) -> None:
        """A taken shard is committed. With its last one, a block is given up."""
        with self._lock:
            for unmade in self._unmade.values():
                unmade.discard(shard.shard)
            whole = [number for number, unmade in self._unmade.items() if not unmade]
            leases = [self._held.pop(number) for number in whole]
            for number in whole:
                del self._unmade[number]
        for lease in leases:
            lease.release()

    def release(self) -> None:
        """Give up all blocks at once, so that others need not wait for them."""
        with self._lock:
            leases = list(self._held.values())
            self._held.clear()
            self._unmade.clear()
        for lease in leases:
            lease.release()

    def _candidates(self, state: StageState) -> list[int]:
        """Blocks with something missing that are not ours already."""
        return [
            number
            for number, block in enumerate(self._blocks)
            if number not in self._held and any(shard.shard not in state.records for shard in block)
        ]
