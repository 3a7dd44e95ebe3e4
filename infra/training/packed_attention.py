"""Attention of a packed batch: block-sparse over the first TTT step's keys, joined by each row's own later keys."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from infra.training.packed_plan import BlockTable


def attend(query: Tensor, key: Tensor, value: Tensor, mask: BlockTable, scale: float) -> tuple[Tensor, Tensor]:
    """Attention under a block-sparse mask.

    Args:
        query: [1, heads, num_queries, head_dim].
        key, value: [1, kv_heads, num_keys, head_dim].

    Returns:
        The mixed values, as `query`, and the log of each query's sum of exponentials [1, heads, num_queries].
    """
    run = _attend_flex if query.is_cuda else attend_dense
    return run(query, key, value, mask, scale)


def attend_dense(
    query: Tensor, key: Tensor, value: Tensor, mask: BlockTable, scale: float
) -> tuple[Tensor, Tensor]:
    """The same with all scores in memory: the reference, and the way on devices without flex_attention."""
    group = query.shape[1] // key.shape[1]
    key, value = (part.repeat_interleave(group, dim=1) for part in (key, value))
    scores = (query @ key.transpose(-1, -2)).float() * scale  # [1, heads, num_queries, num_keys]
    places = torch.arange(key.shape[2], device=key.device)
    seen = (places >= mask.first[:, None]) & (places <= mask.last[:, None])
    scores = scores.masked_fill(~seen, float("-inf"))
    normalizer = torch.logsumexp(scores, dim=-1)
    return torch.exp(scores - normalizer[..., None]).to(value.dtype) @ value, normalizer


def _attend_flex(
    query: Tensor, key: Tensor, value: Tensor, mask: BlockTable, scale: float
) -> tuple[Tensor, Tensor]:
    from torch.nn.attention.flex_attention import AuxRequest

    attended, more = _flex()(
        query,
        key,
        value,
        block_mask=mask.flex,
        scale=scale,
        enable_gqa=query.shape[1] != key.shape[1],
        return_aux=AuxRequest(lse=True),
    )
    return attended, more.lse


@functools.cache
def _flex() -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False)


def join(
    query: Tensor,  # [1, heads, num_rows, head_dim]
    attended: Tensor,  # as query: the mix of the first TTT step's values
    normalizer: Tensor,  # [1, heads, num_rows], log of the sum of exponentials of its scores
    own_keys: Sequence[Tensor],  # of each later step [1, kv_heads, num_rows, head_dim]: each row's own
    own_values: Sequence[Tensor],
    scale: float,
) -> Tensor:
    """Softmax over the first step's keys and each row's own later ones together (as `query`).

    Parts of a softmax are joined by their normalizers (https://arxiv.org/abs/2112.05682, section 3).
    """
    _, heads, num_rows, head_dim = query.shape
    kv_heads = own_keys[0].shape[1]
    grouped = (1, kv_heads, heads // kv_heads, num_rows, head_dim)
    wide = query.reshape(grouped).float()
    scores = [normalizer.reshape(grouped[:-1])]  # each [1, kv_heads, group, num_rows]
    scores += [(wide * key[:, :, None].float()).sum(dim=-1) * scale for key in own_keys]
    weights = torch.stack(scores).softmax(dim=0)[..., None]
    mixed = attended.reshape(grouped).float() * weights[0]
    for weight, value in zip(weights[1:], own_values, strict=True):
        mixed = mixed + value[:, :, None].float() * weight
    return mixed.reshape(query.shape).to(attended.dtype)


def rotate(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding of [num_states, heads, head_dim], in the half-split form of Hugging Face."""
    half = states.shape[-1] // 2
    turned = torch.cat([-states[..., half:], states[..., :half]], dim=-1)
    return states * cos[:, None] + turned * sin[:, None]
