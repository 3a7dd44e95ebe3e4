"""Which shards are fetched and checked before they are needed, so that neither stalls a step."""

from __future__ import annotations

from infra.training.data import StepLoader

# However small a stage is, no further: its order is worked out epoch by epoch.
MAX_STEPS_AHEAD = 1000


class ShardsAhead:
    """Goes through the steps [first, last) ahead of the loop.

    Args:
        limit: shards that are asked for and still to be used: two windows that are shuffled among themselves, the
            present one and the next.
    """

    def __init__(self, loader: StepLoader, first: int, last: int, limit: int) -> None:
        self._loader = loader
        self._next = first
        self._last = last
        self._limit = limit
        self._used_until: dict[int, int] = {}  # last step known to use a shard that was asked for

    def at(self, step: int) -> list[int]:
        """What to ask for when step `step` begins, in the order of use; each shard again in each epoch."""
        self._used_until = {shard: used for shard, used in self._used_until.items() if used >= step}
        asked: list[int] = []
        while self._next < min(self._last, step + MAX_STEPS_AHEAD) and len(self._used_until) < self._limit:
            for shard in self._loader.shards_of_step(self._next):
                if shard not in self._used_until:
                    asked.append(shard)
                self._used_until[shard] = self._next
            self._next += 1
        return asked
