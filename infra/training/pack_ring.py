"""Packs in memory that several processes share: written by the input workers, read by the trainer.

The ring has a fixed number of slots, each with room for one full pack; that bounds the memory. It is anonymous
(memfd): it has no name that could be left behind, and the size of /dev/shm does not limit it.
"""

from __future__ import annotations

import logging
import mmap
import os
from dataclasses import dataclass, fields
from multiprocessing.reduction import DupFd
from typing import Any

import torch
from torch import Tensor

from infra.hidden_states import EncodedSample
from infra.training.batch import PackedBatch

logger = logging.getLogger("draftsmith.training")

# 1 MB of four layers of 4,096 channels.
TOKENS_AT_ONCE = 32
# Each tensor begins at a cache line.
_ALIGNMENT_BYTES = 64


@dataclass(frozen=True)
class PackBuffers:
    """Room for a pack of `capacity` tokens: the tensors of a PackedBatch, on one device."""

    hidden_states: Tensor
    input_ids: Tensor
    loss_mask: Tensor
    position_ids: Tensor
    verifier_last_hidden_states: Tensor

    def write(self, start: int, part: PackedBatch, encoded: EncodedSample) -> None:
        """Put a sample to its place in the pack, its states decoded in parts that stay in a core's cache.

        Args:
            part, encoded: from `encoded_sample`.
        """
        end = start + part.num_tokens
        for name in ("input_ids", "loss_mask", "position_ids"):
            getattr(self, name)[start:end].copy_(getattr(part, name))
        # One more token than there are rows: the first has no last state here, and the last no auxiliary one.
        for first in range(0, part.num_tokens + 1, TOKENS_AT_ONCE):
            aux, last = encoded.states(slice(first, min(first + TOKENS_AT_ONCE, part.num_tokens + 1)))
            place = start + first
            aux_rows = self.hidden_states[place : min(place + len(aux), end)]
            aux_rows.copy_(aux[: len(aux_rows)])
            skipped = 1 if first == 0 else 0
            self.verifier_last_hidden_states[place - 1 + skipped : place - 1 + len(last)].copy_(last[skipped:])

    def batch(self, lengths: tuple[int, ...]) -> PackedBatch:
        """The first sum(lengths) tokens, in views."""
        num_tokens = sum(lengths)
        views = {entry.name: getattr(self, entry.name)[:num_tokens] for entry in fields(self)}
        return PackedBatch(**views, lengths=lengths)


@dataclass(frozen=True)
class PackLayout:
    """Where in a slot what lies.

    Args:
        capacity: tokens of the longest pack.
        aux_width: width of the auxiliary hidden states.
        hidden_size: width of the verifier's last hidden states.
    """

    capacity: int
    aux_width: int
    hidden_size: int

    @property
    def size_bytes(self) -> int:
        """Bytes of a slot: whole pages."""
        used = sum(_aligned(size) for _, _, _, size in self._tensors())
        return -(-used // mmap.PAGESIZE) * mmap.PAGESIZE

    def over(self, memory: Tensor) -> PackBuffers:
        """The buffers in `memory` [size_bytes] uint8."""
        views, start = {}, 0
        for name, dtype, shape, size in self._tensors():
            views[name] = memory[start : start + size].view(dtype).view(shape)
            start += _aligned(size)
        return PackBuffers(**views)

    def _tensors(self) -> list[tuple[str, torch.dtype, tuple[int, ...], int]]:
        """Name, type, shape and bytes of each."""
        rows = self.capacity
        return [
            ("hidden_states", torch.bfloat16, (rows, self.aux_width), 2 * rows * self.aux_width),
            ("verifier_last_hidden_states", torch.bfloat16, (rows, self.hidden_size), 2 * rows * self.hidden_size),
            ("input_ids", torch.int64, (rows,), 8 * rows),
            ("position_ids", torch.int64, (rows,), 8 * rows),
            ("loss_mask", torch.bool, (rows,), rows),
        ]


class PackRing:
    """The slots, as this process sees them.

    It may be an argument of a process that is being started, and is the same ring there.

    Args:
        descriptor: of the memory that another process made; None makes it.
    """

    def __init__(self, layout: PackLayout, num_slots: int, descriptor: int | None = None) -> None:
        self.layout = layout
        self.num_slots = num_slots
        size_bytes = layout.size_bytes * num_slots
        if descriptor is None:
            descriptor = os.memfd_create("draftsmith-packs")
            os.ftruncate(descriptor, size_bytes)
        self.descriptor = descriptor
        self._memory = torch.frombuffer(mmap.mmap(descriptor, size_bytes), dtype=torch.uint8)
        self._pinned = False
        starts = range(0, size_bytes, layout.size_bytes)
        self.slots = [layout.over(self._memory[start : start + layout.size_bytes]) for start in starts]

    def pin(self) -> None:
        """Let the GPU read the slots by itself; takes their memory at once instead of with their first use."""
        size_bytes = self._memory.numel()
        code = int(_cuda().cudaHostRegister(self._memory.data_ptr(), size_bytes, 0))
        self._pinned = code == 0
        if not self._pinned:
            logger.warning(
                "%.1f GiB of input buffers could not be pinned (CUDA error %d); uploads to the GPU will be slower.",
                size_bytes / 2**30,
                code,
            )

    def __reduce__(self) -> tuple[Any, ...]:
        return _attached, (self.layout, self.num_slots, DupFd(self.descriptor))

    def close(self) -> None:
        """Give the memory back once nobody looks at it any more."""
        if self._pinned:
            _cuda().cudaHostUnregister(self._memory.data_ptr())
            self._pinned = False
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


def _cuda() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def _attached(layout: PackLayout, num_slots: int, duplicate: Any) -> PackRing:
    return PackRing(layout, num_slots, duplicate.detach())


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
