"""One process of the trainer among the others."""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Sequence
from types import FrameType

import torch
import torch.distributed as dist
from torch import Tensor

from infra.machine import usable_cores
from infra.training.config import TrainConfig


class Ranks:
    """This process among the ranks; one process alone needs no process group.

    Tensors on a GPU travel by NCCL. Votes and bytes are on the CPU and travel by gloo, so no GPU is waited for.
    """

    def __init__(self) -> None:
        self.rank = int(os.environ.get("RANK", "0"))
        self.world = int(os.environ.get("WORLD_SIZE", "1"))
        self.cuda = torch.cuda.is_available()
        local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        self.device = torch.device("cuda", local_rank) if self.cuda else torch.device("cpu")
        if self.cuda:
            torch.cuda.set_device(self.device)
        if self.world > 1:
            dist.init_process_group("cpu:gloo,cuda:nccl" if self.cuda else "gloo")

    def sum(self, values: Tensor) -> Tensor:
        """The sum over all ranks; a new tensor on the CPU."""
        if self.world == 1:
            return values.cpu().clone()
        shared = values.clone()
        dist.all_reduce(shared)
        return shared.cpu()

    def any(self, value: bool) -> bool:
        return bool(self.sum(torch.tensor(float(value))) > 0)

    def largest(self, values: Sequence[float]) -> list[float]:
        """Of each value the largest over all ranks; they travel by gloo, so no GPU is waited for."""
        shared = torch.tensor(values, dtype=torch.float64)
        if self.world > 1:
            dist.all_reduce(shared, op=dist.ReduceOp.MAX)
        return shared.tolist()

    def peak_memory(self) -> tuple[str, float]:
        """The name of its field in a line of metrics, and the most GiB that tensors of this rank's GPU have taken
        at a time; without a GPU, that this process has."""
        if self.cuda:
            return "peak_gpu_memory_gib", torch.cuda.max_memory_allocated(self.device) / 2**30
        kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return "peak_process_memory_gib", kib / 2**20

    def barrier(self) -> None:
        self.any(False)

    def share_bytes(self, data: bytes | None) -> bytes:
        """Rank 0's bytes, on every rank."""
        if self.world == 1:
            assert data is not None
            return data
        size = self.sum(torch.tensor(len(data) if data is not None else 0))
        buffer = torch.zeros(int(size), dtype=torch.uint8)
        if data is not None:
            buffer = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        dist.broadcast(buffer, src=0)
        return buffer.numpy().tobytes()

    def gather_bytes(self, data: bytes) -> list[bytes]:
        """Every rank's bytes, in the order of the ranks, on every rank."""
        if self.world == 1:
            return [data]
        sizes = torch.zeros(self.world, dtype=torch.int64)
        sizes[self.rank] = len(data)
        sizes = self.sum(sizes)
        mine = torch.zeros(int(sizes.max()), dtype=torch.uint8)
        mine[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        parts = [torch.empty_like(mine) for _ in range(self.world)]
        dist.all_gather(parts, mine)
        return [part[:size].numpy().tobytes() for part, size in zip(parts, sizes.tolist(), strict=True)]


class StopRequest:
    """Set by SIGTERM; the loop looks at it after each step."""

    def __init__(self) -> None:
        self.asked = False
        signal.signal(signal.SIGTERM, self._ask)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self.asked = True


def set_up_threads(config: TrainConfig, ranks: Ranks) -> None:
    """Share the cores among this machine's ranks.

    Where a GPU trains, the input processes have them: what the host computes then is small, and an operation in
    many threads ends with the last of them to get a core.
    """
    local_world = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    cores = 1 if ranks.cuda else usable_cores() // local_world
    torch.set_num_threads(config.num_threads or max(1, cores))
    # Adam's averages of weights that hardly move decay into denormals, on which CPUs are many times slower.
    torch.set_flush_denormal(True)
