"""One packed batch: whole samples laid end to end, aligned for EAGLE-3."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class PackedBatch:
    """Samples of one pack, end to end, without padding.

    Args:
        hidden_states: [num_tokens, num_aux_layers * hidden_size], the aux_hidden_states the draft reads.
        input_ids: [num_tokens], the token that follows each hidden state.
        loss_mask: [num_tokens], true where the row's prediction is trained on.
        position_ids: [num_tokens], counted from 1 in each sample.
        verifier_last_hidden_states: [num_tokens, hidden_size], before the verifier's final norm.
        lengths: number of tokens of each sample.
    """

    hidden_states: Tensor
    input_ids: Tensor
    loss_mask: Tensor
    position_ids: Tensor
    verifier_last_hidden_states: Tensor
    lengths: tuple[int, ...]

    @property
    def num_tokens(self) -> int:
        return int(self.input_ids.shape[0])

    @property
    def num_loss_tokens(self) -> int:
        return int(self.loss_mask.sum())

    @property
    def document_ids(self) -> Tensor:
        """[num_tokens], the number of the sample that each token belongs to."""
        lengths = torch.tensor(self.lengths, device=self.input_ids.device)
        return torch.repeat_interleave(torch.arange(len(self.lengths), device=lengths.device), lengths)

    def to(self, device: torch.device) -> PackedBatch:
        """The same batch on `device`."""
        names = ("hidden_states", "input_ids", "loss_mask", "position_ids", "verifier_last_hidden_states")
        return replace(self, **{name: getattr(self, name).to(device, non_blocking=True) for name in names})

    def with_noise(self, share: float, generator: torch.Generator) -> PackedBatch:
        """The same batch with uniform noise on the hidden states, `share` times the root mean square of each
        row's state of each layer.

        EAGLE trains with such noise (section 4.1 of https://arxiv.org/abs/2401.15077), because at serving time the
        draft's own states stand in for the verifier's.
        """
        hidden_size = self.verifier_last_hidden_states.shape[1]
        states = self.hidden_states.float().reshape(self.num_tokens, -1, hidden_size)
        scale = states.square().mean(dim=-1, keepdim=True).sqrt() * share
        noise = torch.rand(states.shape, generator=generator) * 2 - 1
        return replace(self, hidden_states=(states + noise * scale).flatten(1).to(self.hidden_states.dtype))

    def padded_to(self, num_tokens: int) -> PackedBatch:
        """The same batch with untrained rows appended, so that a compiled model sees one shape only."""
        missing = num_tokens - self.num_tokens
        if missing <= 0:
            return self

        def pad(rows: Tensor) -> Tensor:
            return torch.cat([rows, rows.new_zeros(missing, *rows.shape[1:])])

        return PackedBatch(
            pad(self.hidden_states),
            pad(self.input_ids),
            pad(self.loss_mask),
            pad(self.position_ids),
            pad(self.verifier_last_hidden_states),
            (*self.lengths, missing),
        )


def align_sample(
    input_ids: Tensor, loss_mask: Tensor, aux_hidden_states: Tensor, verifier_last_hidden_states: Tensor
) -> PackedBatch:
    """Line a sample up for EAGLE-3: row t has the state of token t, token t+1, and the verifier's view of t+2."""
    # What speculators.models.eagle3.data.shift_batch does (a test compares the two), in views: that package takes
    # seconds and half a gigabyte to import, in each of the processes that read samples.
    num_tokens = input_ids.shape[0]
    return PackedBatch(
        aux_hidden_states[:-1],
        input_ids[1:],
        loss_mask[1:],
        torch.arange(1, num_tokens),
        verifier_last_hidden_states[1:],
        (max(0, num_tokens - 1),),
    )


def concatenate(parts: Sequence[PackedBatch]) -> PackedBatch:
    """Lay batches end to end."""
    return PackedBatch(
        torch.cat([part.hidden_states for part in parts]),
        torch.cat([part.input_ids for part in parts]),
        torch.cat([part.loss_mask for part in parts]),
        torch.cat([part.position_ids for part in parts]),
        torch.cat([part.verifier_last_hidden_states for part in parts]),
        tuple(length for part in parts for length in part.lengths),
    )
