"""What a packed forward pass must know of a batch, made on the host so that the device never waits for it.

There are two shapes: every token a row, or `row_capacity` of them, which most packs of a run fit. So compiled code
is made twice and then serves every pack.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from infra.training.batch import PackedBatch

# Queries and keys of one block of an attention mask: the default, and the least, of flex_attention.
BLOCK = 128
# `row_capacity` is a multiple of this share of the tokens,
CAPACITY_STEPS = 16
# and as many of the packs fit it.
FITTING_SHARE = 0.9


@dataclass(frozen=True)
class BlockTable:
    """A block-sparse attention mask: query i sees the keys first[i] to last[i].

    Args:
        first, last: [num_queries] int32.
        kv_num_blocks, full_kv_num_blocks: [1, 1, query blocks] int32, how many key blocks are seen in part and in
            whole.
        kv_indices, full_kv_indices: [1, 1, query blocks, key blocks] int32, which ones; the rest is filler.
    """

    first: Tensor
    last: Tensor
    kv_num_blocks: Tensor
    kv_indices: Tensor
    full_kv_num_blocks: Tensor
    full_kv_indices: Tensor

    def to(self, device: torch.device) -> BlockTable:
        return replace(self, **{field.name: upload(getattr(self, field.name), device) for field in fields(self)})

    @functools.cached_property
    def flex(self) -> Any:
        """flex_attention's form of the mask."""
        from torch.nn.attention.flex_attention import BlockMask

        first, last = self.first, self.last

        def seen(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return (key >= first[query]) & (key <= last[query])

        return BlockMask.from_kv_blocks(
            self.kv_num_blocks,
            self.kv_indices,
            self.full_kv_num_blocks,
            self.full_kv_indices,
            BLOCK_SIZE=BLOCK,
            mask_mod=seen,
            seq_lengths=(len(first), self.kv_indices.shape[-1] * BLOCK),
        )


@dataclass(frozen=True)
class PackPlan:
    """Which rows of a padded batch are computed, and what they attend to.

    Args:
        num_tokens: tokens after padding.
        rows: [num_rows] indices of tokens, ascending, then filler; None where every token is a row.
        places: [num_tokens] row of each token, -1 where it is none; None as `rows`.
        valid: [ttt_steps, num_rows], whether row i has a target at TTT step s, which then is row i + s's own token.
        row_mask: keys (tokens) that each row sees.
        token_mask: keys that each token sees; None where it is not needed, or the same.
    """

    num_tokens: int
    rows: Tensor | None
    places: Tensor | None
    valid: Tensor
    row_mask: BlockTable
    token_mask: BlockTable | None

    def to(self, device: torch.device) -> PackPlan:
        return PackPlan(
            self.num_tokens,
            None if self.rows is None else upload(self.rows, device),
            None if self.places is None else upload(self.places, device),
            upload(self.valid, device),
            self.row_mask.to(device),
            None if self.token_mask is None else self.token_mask.to(device),
        )


def upload(values: Tensor, device: torch.device) -> Tensor:
    """The values on `device`, for its current stream.

    Through pinned memory, since a copy from other memory may wait for the device. By a stream of their own: copied
    by the current one, after what is computed before, they would meet the upload of the next pack's states, behind
    which the copy engine would keep them, and the device idle.
    """
    if device.type != "cuda" or values.is_cuda:
        return values.to(device, non_blocking=True)
    computing, uploading = torch.cuda.current_stream(device), _uploading(device)
    with torch.cuda.stream(uploading):
        found = values.pin_memory().to(device, non_blocking=True)
    found.record_stream(computing)
    computing.wait_stream(uploading)
    return found


@functools.cache
def _uploading(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def row_capacity(num_rows: Sequence[int], total_seq_len: int) -> int | None:
    """The number of rows that most packs fit; None where it would spare next to nothing.

    Args:
        num_rows: of each pack.
    """
    num_tokens = padded_tokens(total_seq_len)
    unit = -(-num_tokens // (CAPACITY_STEPS * BLOCK)) * BLOCK
    usual = sorted(num_rows)[int(FITTING_SHARE * (len(num_rows) - 1))]
    capacity = -(-usual // unit) * unit
    return capacity if capacity < num_tokens else None


def padded_tokens(total_seq_len: int) -> int:
    """Tokens of a pack with its padding: whole blocks."""
    return -(-total_seq_len // BLOCK) * BLOCK


def plan_pack(
    batch: PackedBatch, total_seq_len: int, ttt_steps: int, num_layers: int, capacity: int | None
) -> PackPlan:
    """Choose the rows whose prediction, at some TTT step, is trained on.

    Args:
        batch: its small tensors on the CPU; only its loss_mask and lengths are read.
        capacity: rows that are computed where they suffice (a multiple of BLOCK); None: every token is a row.
        num_layers: with more than one, all tokens pass the layers before the last at the first TTT step.
    """
    num_tokens = padded_tokens(max(total_seq_len, batch.num_tokens))
    trained = trained_rows(batch, num_tokens, ttt_steps)  # [ttt_steps, num_tokens]
    starts = torch.arange(num_tokens, dtype=torch.int32)
    starts[: batch.num_tokens] = torch.repeat_interleave(
        torch.tensor([0, *batch.lengths[:-1]]).cumsum(0), torch.tensor(batch.lengths)
    ).int()
    ends = torch.arange(num_tokens, dtype=torch.int32)
    found = trained.any(dim=0).nonzero().squeeze(1)
    num_rows = capacity or num_tokens
    if len(found) > num_rows or num_rows >= num_tokens:
        return PackPlan(num_tokens, None, None, trained, block_table(starts, ends, num_tokens), None)
    # Filler rows look at the last token alone; nothing is trained on them.
    rows = torch.full((num_rows,), num_tokens - 1)
    rows[: len(found)] = found
    first = torch.full((num_rows,), num_tokens - 1, dtype=torch.int32)
    first[: len(found)] = starts[found]
    valid = torch.zeros(ttt_steps, num_rows, dtype=torch.bool)
    valid[:, : len(found)] = trained[:, found]
    places = torch.full((num_tokens,), -1)
    places[found] = torch.arange(len(found))
    return PackPlan(
        num_tokens,
        rows,
        places,
        valid,
        block_table(first, rows.int(), num_tokens),
        block_table(starts, ends, num_tokens) if num_layers > 1 else None,
    )


def trained_rows(batch: PackedBatch, num_tokens: int, ttt_steps: int) -> Tensor:
    """[ttt_steps, num_tokens], whether token t + s of the same sample is trained on.

    Args:
        num_tokens: of the pack with its padding.
    """
    lengths = torch.tensor(batch.lengths)
    documents = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    trained = torch.zeros(ttt_steps, num_tokens, dtype=torch.bool)
    for step in range(min(ttt_steps, batch.num_tokens)):
        reach = batch.num_tokens - step
        trained[step, :reach] = batch.loss_mask[step:] & (documents[:reach] == documents[step:])
    return trained


def block_table(first: Tensor, last: Tensor, num_keys: int) -> BlockTable:
    """The mask in which query i sees the keys first[i] to last[i]; both counts are multiples of BLOCK."""
    starts = torch.arange(0, num_keys, BLOCK, dtype=torch.int32)
    low, high = first.view(-1, BLOCK, 1), last.view(-1, BLOCK, 1)
    seen = ((low < starts + BLOCK) & (high >= starts)).any(dim=1)  # [query blocks, key blocks]
    whole = ((low <= starts) & (high >= starts + BLOCK - 1)).all(dim=1)
    return BlockTable(first, last, *_ordered(seen & ~whole), *_ordered(whole))


def _ordered(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Counts [1, 1, query blocks] and indices [1, 1, query blocks, key blocks], the true ones first."""
    counts = blocks.sum(dim=-1, dtype=torch.int32)
    indices = blocks.int().argsort(dim=-1, descending=True, stable=True).int()
    return counts[None, None].contiguous(), indices[None, None].contiguous()
