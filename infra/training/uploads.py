"""Packs from the ring into two buffers on the GPU, by a stream of its own while the GPU computes."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from infra.training.batch import PackedBatch
from infra.training.input_pool import InputPool

NUM_BUFFERS = 2


class Upload(NamedTuple):
    """A pack whose states are on the device once `arrived` is."""

    batch: PackedBatch
    arrived: torch.cuda.Event
    buffer: int


class Uploads:
    """Uploads the packs of a pool in order.

    The states of the pack n lie in buffer n % 2, which is overwritten as soon as the device has done with the pack;
    the host never waits for that. The small tensors stay on the CPU, where a forward pass is planned.

    Args:
        pool: of packs; its ring is pinned already.
    """

    def __init__(self, pool: InputPool, device: torch.device) -> None:
        self._pool = pool
        self._device = device
        layout = pool.ring.layout
        widths = (layout.aux_width, layout.hidden_size)
        self._buffers: list[tuple[Tensor, ...]] = [
            tuple(torch.empty(layout.capacity, width, dtype=torch.bfloat16, device=device) for width in widths)
            for _ in range(NUM_BUFFERS)
        ]
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._stream.wait_stream(torch.cuda.current_stream(device))
        self._computed: list[torch.cuda.Event | None] = [None] * NUM_BUFFERS
        self._under_way: deque[tuple[torch.cuda.Event, int]] = deque()  # and the slot that is being read
        self._next_buffer = 0

    def packs(self) -> Generator[PackedBatch, None, None]:
        """The packs; what one holds is overwritten after the next one was asked for."""
        coming: Upload | None = None
        try:
            while True:
                current = coming or self._start(wait_for_it=True)
                assert current is not None
                torch.cuda.current_stream(self._device).wait_event(current.arrived)
                coming = self._start(wait_for_it=False)
                yield current.batch
                # All that reads this pack was launched by now.
                self._computed[current.buffer] = torch.cuda.current_stream(self._device).record_event()
        finally:
            self._stream.synchronize()

    def _start(self, *, wait_for_it: bool) -> Upload | None:
        """Begin the upload of the next pack; None when it is not made yet and need not be waited for."""
        self._release(wait=wait_for_it and not self._pool.in_work)
        made = self._pool.take(wait_for_it=wait_for_it)
        if made is None:
            return None
        buffer, self._next_buffer = self._next_buffer, (self._next_buffer + 1) % NUM_BUFFERS
        computed, host = self._computed[buffer], made.batch
        with torch.cuda.stream(self._stream):
            if computed is not None:
                self._stream.wait_event(computed)
            aux, last = (
                target[: host.num_tokens].copy_(source, non_blocking=True)
                for target, source in zip(
                    self._buffers[buffer], (host.hidden_states, host.verifier_last_hidden_states), strict=True
                )
            )
            arrived = self._stream.record_event()
        self._under_way.append((arrived, made.slot))
        # Copies of the small ones, since the slot is another pack's soon.
        batch = replace(
            host,
            hidden_states=aux,
            verifier_last_hidden_states=last,
            input_ids=host.input_ids.clone(),
            loss_mask=host.loss_mask.clone(),
            position_ids=host.position_ids.clone(),
        )
        return Upload(batch, arrived, buffer)

    def _release(self, *, wait: bool) -> None:
        """Give back the slots that were uploaded; wait for one where the pool has none to work on."""
        while self._under_way:
            arrived, slot = self._under_way[0]
            if wait:
                arrived.synchronize()
            elif not arrived.query():  # type: ignore[no-untyped-call]
                return
            self._under_way.popleft()
            self._pool.release(slot)
            wait = False
