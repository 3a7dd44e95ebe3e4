"""One objective over all ranks: replicated (DistributedDataParallel) or sharded (FSDP2).

A parameter is what the optimizer steps: whole under DDP, a DTensor that holds this rank's shard under FSDP2.
`whole` and `fit` are the way between that and plain tensors, which checkpoints hold; so a checkpoint does not know
how many ranks wrote it, or how.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from infra.training.config import TrainConfig
from infra.training.ranks import Ranks


class Distributed:
    """The objective as each rank calls it.

    Args:
        objective: on the rank's device. FSDP2 shards its trainable parameters in place, so the optimizer must be
            made after this. Frozen ones (embeddings and heads of the verifier) stay whole on each rank.
    """

    def __init__(self, objective: nn.Module, config: TrainConfig, ranks: Ranks) -> None:
        self.objective = objective
        self._called: Any = objective
        self._sharded = ranks.world > 1 and config.distribution == "fsdp2"
        if self._sharded:
            self._called = _shard(objective, config, ranks)
        elif ranks.world > 1:
            ids = [ranks.device.index] if ranks.cuda else None
            # Gradients are views of the buckets that travel: one copy of them less.
            self._called = DistributedDataParallel(
                objective, device_ids=ids, broadcast_buffers=False, gradient_as_bucket_view=True
            )

    def __call__(self, *arguments: Any) -> Any:
        return self._called(*arguments)

    def accumulating(self, last: bool) -> AbstractContextManager[None]:
        """Around forward and backward of one pack: gradients travel between ranks with the last one of a step."""
        if self._sharded:
            self._called.set_requires_gradient_sync(last)
            # Weights stay whole from one pack of the step to the next.
            self._called.set_reshard_after_backward(last)
        elif self._called is not self.objective and not last:
            return self._called.no_sync()  # type: ignore[no-any-return]
        return contextlib.nullcontext()

    @contextlib.contextmanager
    def alone(self) -> Iterator[Any]:
        """The objective for forward passes that need no other rank: ranks may make unequal numbers of them."""
        if self._sharded:
            self._called.unshard()
        yield self.objective
        if self._sharded:
            self._called.reshard()


def _shard(objective: nn.Module, config: TrainConfig, ranks: Ranks) -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    low = config.precision == "bf16" and ranks.cuda
    return fully_shard(
        objective,
        mesh=init_device_mesh(ranks.device.type, (ranks.world,)),
        mp_policy=MixedPrecisionPolicy(
            param_dtype=torch.bfloat16 if low else None, reduce_dtype=torch.float32, cast_forward_inputs=False
        ),
        ignored_params={value for value in objective.parameters() if not value.requires_grad},
    )


def whole(value: Tensor) -> Tensor:
    """All of a parameter or of an optimizer's average, on this device. Every rank must call it."""
    value = value.detach()
    return value.full_tensor() if isinstance(value, DTensor) else value


def fit(value: Tensor, like: Tensor) -> Tensor:
    """This rank's part of a whole tensor, as `like` holds it: the inverse of `whole`; talks to no other rank."""
    value = value.to(like.device)
    if isinstance(like, DTensor) and value.shape == like.shape:
        return distribute_tensor(value, like.device_mesh, like.placements, src_data_rank=None)
    return value
