"""What the loop asks of a kind of draft. All that is particular to one sits in its own module (`eagle3`)."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from infra.training.batch import PackedBatch
from infra.training.config import DraftSpec, TrainSpec


class Prepared(Protocol):
    """A packed batch, ready for `Objective.forward` but for its device."""

    @property
    def num_loss_tokens(self) -> int:
        """Trained tokens of this pack."""

    def to(self, device: torch.device) -> Prepared:
        """The same on `device`, without waiting for it."""


class Objective(nn.Module):
    """A draft together with its loss, as one module: what DistributedDataParallel or FSDP2 wraps.

    Args:
        model: the draft, from speculators; its parameters that require gradients are trained and saved.
        sums_shape: of the sums, [ttt_steps, columns], which `progress.metrics_line` reads.
        implementation: the forward pass that is taken.
        fallback: the one to take when compiling that one fails.
    """

    model: Any
    sums_shape: tuple[int, int]
    implementation: str
    fallback: str

    @abstractmethod
    def prepare(self, batch: PackedBatch) -> Prepared:
        """What `forward` takes, of a batch whose small tensors are on the CPU."""

    @abstractmethod
    def forward(self, pack: Any, num_loss_tokens: int) -> tuple[Tensor, Tensor]:
        """One packed sequence.

        Args:
            pack: from `prepare`, on the device.
            num_loss_tokens: trained tokens of the whole optimizer step, over all packs and ranks: every token
                weighs the same, however the samples fell into packs.

        Returns:
            The loss (to be summed over packs and ranks), and sums of `sums_shape` in float64. Both stay on the
            device.
        """

    def expect(self, packs: Sequence[tuple[int, int]]) -> None:
        """Hear what is coming before the first batch does: trained tokens and samples of each pack of an epoch."""

    @abstractmethod
    def examples(self) -> list[PackedBatch]:
        """Batches on the CPU, one for each shape that the forward pass takes."""


class Algorithm(Protocol):
    """One kind of draft."""

    def objective(self, spec: TrainSpec, vocab: bytes, *, cuda: bool) -> Objective:
        """The draft with its first weights, a pure function of the spec, on the CPU.

        Args:
            vocab: the vocabulary map's file.
            cuda: whether it will run on a GPU.
        """

    def check_start(self, spec: DraftSpec, folder: Path, verifier_vocab_size: int) -> None:
        """Raise InputError as `start_weights`, as far as the verifier's config.json alone can tell."""

    def start_weights(self, spec: TrainSpec, folder: Path, vocab: bytes) -> dict[str, Tensor]:
        """The trainable weights of a draft that training starts from, fp32, by parameter name.

        Args:
            folder: the start draft's config.json and safetensors weights.
            vocab: the vocabulary map's file.

        Raises:
            InputError: it is no draft of this kind, or not of this config's shape.
        """


def trainable_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that a checkpoint holds, by name."""
    return {name: value for name, value in model.named_parameters() if value.requires_grad}
