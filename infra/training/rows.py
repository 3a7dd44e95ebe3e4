"""The EAGLE-3 training forward pass over the rows that are trained on, and no others.

It computes what `speculators.models.eagle3.core.Eagle3DraftModel.forward` computes, with the same modules and
parameters (a test compares the two), but spares what the loss never sees:

- Rows of the prompt only serve as keys and values of the first TTT step. Everything else (queries, MLP, the
  language-model head and the verifier's logits) is made for trained rows alone.
- Attention runs sample by sample: no packed-length-squared scores, and a later TTT step adds one score a row (its
  own key of that step) instead of a block that is masked but for its diagonal.
- Logits are never held as a whole (`infra.training.losses`).

On CPU this is several times faster than the packed forward pass; on GPUs the library's compiled pass is used.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from infra.training.batch import PackedBatch
from infra.training.losses import TargetDistribution, chunked_kl


@dataclass(frozen=True)
class RowPlan:
    """Which rows of a batch are computed.

    Args:
        rows: [num_rows], indices into the batch, ascending; contiguous where the loss_mask of a sample is.
        spans: per sample: first and last+1 of its tokens in the batch, first and last+1 of its rows in `rows`.
        valid: [ttt_steps, num_rows], whether row i has a target at TTT step s: `rows[i] + s` is in the same sample
            and is `rows[i + s]`, and its loss_mask is set.
        masks: per sample [rows, tokens] additive causal mask.
    """

    rows: Tensor
    spans: tuple[tuple[int, int, int, int], ...]
    valid: Tensor
    masks: tuple[Tensor, ...]


def plan_rows(batch: PackedBatch, ttt_steps: int) -> RowPlan:
    """Choose the rows whose prediction, at some TTT step, is trained on."""
    device = batch.input_ids.device
    num_tokens = batch.num_tokens
    documents = batch.document_ids
    needed = torch.zeros(num_tokens, dtype=torch.bool, device=device)
    trained = []
    for step in range(ttt_steps):
        ahead = torch.zeros(num_tokens, dtype=torch.bool, device=device)
        reach = num_tokens - step
        if reach > 0:
            same_sample = documents[:reach] == documents[step:]
            ahead[:reach] = batch.loss_mask[step:] & same_sample
        trained.append(ahead)
        needed |= ahead
    rows = needed.nonzero().squeeze(1)
    valid = torch.stack(trained)[:, rows]
    spans: list[tuple[int, int, int, int]] = []
    masks: list[Tensor] = []
    ends = torch.tensor(batch.lengths, device=device).cumsum(0)
    row_ends = torch.searchsorted(rows, ends).tolist()
    token_start = row_start = 0
    for token_stop, row_stop in zip(ends.tolist(), row_ends, strict=True):
        spans.append((token_start, token_stop, row_start, row_stop))
        places = rows[row_start:row_stop, None]
        blocked = torch.arange(token_start, token_stop, device=device)[None] > places
        masks.append(torch.zeros(blocked.shape, device=device).masked_fill_(blocked, float("-inf")))
        token_start, row_start = token_stop, row_stop
    return RowPlan(rows, tuple(spans), valid, tuple(masks))


@dataclass
class StepSums:
    """Sums of one TTT step, to be divided by counts over all ranks and packs."""

    loss: Tensor  # differentiable: the weighted sum
    correct: Tensor  # [num_rows]
    valid: Tensor  # [num_rows]


def forward_rows(
    model: Any,
    batch: PackedBatch,
    plan: RowPlan,
    row_weights: Sequence[Tensor],
) -> list[StepSums]:
    """Run the draft over the planned rows for each TTT step.

    Args:
        model: an Eagle3DraftModel.
        row_weights: for each TTT step [num_rows], the weight of a row's loss; zero where it has no target.
    """
    target = _targets(model, batch.verifier_last_hidden_states[plan.rows])
    hidden = _combine(model, batch.hidden_states)  # [num_tokens, hidden_size]
    caches: list[_LayerCache] = [_LayerCache(plan) for _ in model.layers]
    steps: list[StepSums] = []
    for step, weights in enumerate(row_weights):
        if step == 0:
            input_ids, positions = batch.input_ids, batch.position_ids
        else:
            places = (plan.rows + step).clamp(max=batch.num_tokens - 1)
            input_ids = batch.input_ids[places]
            positions = batch.position_ids[plan.rows] + step
        hidden = _decode(model, hidden, input_ids, positions, plan, caches, first=step == 0)
        normed = model.norm(hidden)  # [num_rows, hidden_size]
        if model.config.norm_output:
            hidden = normed
        loss, correct = chunked_kl(_compute_dtype(normed), model.lm_head.weight, target, step, weights)
        steps.append(StepSums(loss, correct, plan.valid[step]))
    return steps


def _compute_dtype(rows: Tensor) -> Tensor:
    """Autocast reaches no custom function: cast to the type it would have used."""
    kind = rows.device.type
    return rows.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else rows


@torch.no_grad()
def _targets(model: Any, last_hidden: Tensor) -> TargetDistribution:
    """The verifier's distribution at each row, over the draft vocabulary."""
    if not torch.is_autocast_enabled(last_hidden.device.type):
        last_hidden = last_hidden.to(model.fc.weight.dtype)
    return TargetDistribution(model.verifier_lm_head(model.verifier_norm(last_hidden)))


def _combine(model: Any, hidden_states: Tensor) -> Tensor:
    """[num_tokens, num_aux_layers * hidden_size] -> [num_tokens, hidden_size], as the library does."""
    if not torch.is_autocast_enabled(hidden_states.device.type):
        hidden_states = hidden_states.to(model.fc.weight.dtype)
    if model.input_norm is not None:
        hidden_states = model.input_norm(hidden_states)
    if model.fc_norm is not None:
        chunks = hidden_states.chunk(len(model.fc_norm), dim=-1)
        hidden_states = torch.cat([norm(part) for norm, part in zip(model.fc_norm, chunks, strict=True)], dim=-1)
    combined: Tensor = model.fc(hidden_states)
    return combined


class _LayerCache:
    """Keys and values of one layer: of every token at the first TTT step, of the rows alone at later ones."""

    def __init__(self, plan: RowPlan) -> None:
        self.plan = plan
        self.keys: list[Tensor] = []  # first [num_tokens, kv_heads, head_dim], then [num_rows, kv_heads, head_dim]
        self.values: list[Tensor] = []


def _decode(
    model: Any,
    hidden: Tensor,
    input_ids: Tensor,
    positions: Tensor,
    plan: RowPlan,
    caches: list[_LayerCache],
    *,
    first: bool,
) -> Tensor:
    """All decoder layers of one TTT step; returns [num_rows, hidden_size].

    At the first step `hidden` has all tokens: layers before the last keep them all, because the next layer needs
    their keys; the last one drops to the rows. Later steps have rows only.
    """
    with torch.no_grad():
        embeds = model.embed_tokens(input_ids)
    cos, sin = (part.squeeze(0) for part in model.rotary_emb(hidden, positions[None]))  # [tokens, head_dim]
    last = len(model.layers) - 1
    for index, (layer, cache) in enumerate(zip(model.layers, caches, strict=True)):
        if index == 0:
            states = layer.hidden_norm(hidden)
            residual = states if layer.norm_before_residual else hidden
            states = torch.cat([layer.input_layernorm(embeds).to(states.dtype), states], dim=-1)
        else:
            residual = hidden
            states = layer.input_layernorm(hidden)
        rows = plan.rows if first and index == last else None
        attended = _attend(layer.self_attn, states, cos, sin, cache, rows, first=first)
        hidden = (residual if rows is None else residual[rows]) + attended
        hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
    return hidden


def _attend(
    attention: Any,
    states: Tensor,
    cos: Tensor,
    sin: Tensor,
    cache: _LayerCache,
    rows: Tensor | None,
    *,
    first: bool,
) -> Tensor:
    """Self-attention of one layer and TTT step, sample by sample."""
    dim = attention.head_dim
    asking = states if rows is None else states[rows]
    queries = _heads(attention, "q", asking, dim)  # [num_queries, heads, head_dim]
    keys = _heads(attention, "k", states, dim)  # [num_states, kv_heads, head_dim]
    values = attention.v_proj(states).view(states.shape[0], -1, dim)
    query_cos, query_sin = (cos, sin) if rows is None else (cos[rows], sin[rows])
    queries = _rotate(queries, query_cos, query_sin) * attention.scaling
    cache.keys.append(_rotate(keys, cos, sin))
    cache.values.append(values)
    outputs = []
    for span, mask in zip(cache.plan.spans, cache.plan.masks, strict=True):
        token_start, token_stop, row_start, row_stop = span
        if first and rows is None:
            # A layer before the last: every token asks.
            size = token_stop - token_start
            mask = torch.full((size, size), float("-inf"), device=mask.device).triu_(1)
            row_start, row_stop = token_start, token_stop
        outputs.append(_attend_sample(queries[row_start:row_stop], cache, token_start, token_stop, row_start, mask))
    attended = torch.cat(outputs)  # [num_queries, heads * head_dim]
    projected: Tensor = attention.o_proj(attended)
    return projected


def _attend_sample(
    queries: Tensor, cache: _LayerCache, token_start: int, token_stop: int, row_start: int, mask: Tensor
) -> Tensor:
    """One sample: its tokens' keys of the first step, and each row's own key of every later step."""
    count, heads, dim = queries.shape
    kv_heads = cache.keys[0].shape[1]
    group = heads // kv_heads
    asked = queries.reshape(count, kv_heads, group, dim).permute(1, 2, 0, 3)  # [kv_heads, group, count, dim]
    keys = cache.keys[0][token_start:token_stop].transpose(0, 1)  # [kv_heads, tokens, dim]
    values = cache.values[0][token_start:token_stop].transpose(0, 1)
    scores = torch.bmm(asked.reshape(kv_heads, group * count, dim), keys.transpose(1, 2))
    tokens = token_stop - token_start
    scores = scores.view(kv_heads, group, count, tokens).float() + mask  # [kv_heads, group, count, tokens]
    parts = [scores]
    own = slice(row_start, row_start + count)
    for later in cache.keys[1:]:
        own_key = later[own].transpose(0, 1)[:, None]  # [kv_heads, 1, count, dim]
        parts.append((asked * own_key).sum(dim=-1, keepdim=True).float())
    weights = torch.softmax(torch.cat(parts, dim=-1), dim=-1).to(values.dtype)
    mixed = torch.bmm(weights[..., :tokens].reshape(kv_heads, group * count, tokens), values)
    mixed = mixed.view(kv_heads, group, count, dim)
    for place, later in enumerate(cache.values[1:]):
        own_value = later[own].transpose(0, 1)[:, None]
        mixed = mixed + weights[..., tokens + place, None] * own_value
    return mixed.permute(2, 0, 1, 3).reshape(count, heads * dim)


def _heads(attention: Any, name: str, states: Tensor, dim: int) -> Tensor:
    """Project to heads; a Qwen-style attention also normalizes them."""
    projected: Tensor = getattr(attention, f"{name}_proj")(states).view(states.shape[0], -1, dim)
    norm = getattr(attention, f"{name}_norm", None)
    if norm is not None:
        projected = norm(projected)
    return projected


def _rotate(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding, in the half-split form of Hugging Face."""
    half = states.shape[-1] // 2
    turned = torch.cat([-states[..., half:], states[..., :half]], dim=-1)
    return states * cos[:, None].to(states.dtype) + turned * sin[:, None].to(states.dtype)
