"""The EAGLE-3 training forward pass for GPUs: whole packs, fixed shapes, compiled piece by piece.

It computes what `speculators.models.eagle3.core.Eagle3DraftModel.forward` computes, with the same parameters (a
test compares the two). Where it is faster:

- Only rows that are trained on have queries, an MLP and logits; prompts are keys and values of the first TTT step.
- A token's embedding is the same at every TTT step, one row further on: its share of the first layer's queries,
  keys and values is computed once and shifted.
- Each weight is cast to bf16 once a step, and its gradient back once, not once for every TTT step.
- The attention of every TTT step runs over the first step's keys with one block mask, made on the host; the keys of
  later steps (one a row) join it through its log of normalizers, as in https://arxiv.org/abs/2112.05682.
- The loss holds a few thousand rows of logits (`infra.training.vocab_loss`).

Pieces are compiled one by one (the attention, what comes before and after it, the loss): each is a pure function of
tensors, so nothing is guarded but shapes, and no step waits for the device.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch._inductor.config
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from infra.training.batch import PackedBatch
from infra.training.packed_attention import attend, join, rotate
from infra.training.packed_plan import PackPlan
from infra.training.rows import StepSums
from infra.training.vocab_loss import Targets, head_kl, kl_of_chunk, target_statistics

MIXED_REDUCTIONS = False


def unsupported(model: Any) -> str | None:
    """Why this draft cannot take this forward pass; None where it can."""
    if any(name.endswith("bias") for name, _ in model.named_parameters()):
        return "its projections have biases"
    if model.input_norm is not None:
        return "it normalizes all auxiliary states together"
    if not all(isinstance(layer.mlp.act_fn, nn.SiLU) or _is_silu(layer.mlp.act_fn) for layer in model.layers):
        return "its activation is not SiLU"
    if model.uses_sliding_window_attn:
        return "it has sliding windows"
    return None


def _is_silu(function: Any) -> bool:
    return "silu" in type(function).__name__.lower() or "silu" in getattr(function, "__name__", "").lower()


class PackedForward:
    """Holds the compiled pieces and the frozen heads in the type they are used in.

    Args:
        dtype: type of all matrix products.
        compiled: whether pieces go through torch.compile (CUDA), or run as they are (tests).
        recompute: make an MLP's activations again in the backward pass instead of keeping them.
    """

    def __init__(self, dtype: torch.dtype, *, compiled: bool, recompute: bool = False) -> None:
        if compiled:
            # Each TTT step and number of rows is a variant of its own.
            torch._dynamo.config.recompile_limit = max(64, torch._dynamo.config.recompile_limit)
            # It splits graphs under DistributedDataParallel, and refuses flex_attention; pieces are small anyway.
            torch._dynamo.config.optimize_ddp = False
        self.dtype = dtype
        self.recompute = recompute
        self._piece = _compile if compiled else _as_it_is
        self._embeds = self._piece(_project_embeds)
        self._inputs = self._piece(_project_states)
        self._join = self._piece(join)
        self._outputs = self._piece(_finish_layer)
        self._norm = self._piece(_norm)
        self._kl = self._piece(kl_of_chunk)
        self._statistics = self._piece(target_statistics)
        self._heads: dict[str, tuple[Tensor, int, Tensor]] = {}

    def __call__(
        self, model: Any, batch: PackedBatch, plan: PackPlan, row_weights: Sequence[Tensor]
    ) -> list[StepSums]:
        """Run the draft over the planned rows for each TTT step.

        Args:
            model: an Eagle3DraftModel.
            batch: padded to plan.num_tokens, on the device.
            row_weights: for each TTT step [num_rows], the weight of a row's loss; zero where it has no target.
        """
        weights = [_LayerWeights(layer, index == 0, self.dtype) for index, layer in enumerate(model.layers)]
        targets = self._targets(model, batch, plan, len(row_weights))
        head = model.lm_head.weight
        head = head.to(self.dtype) if head.requires_grad else self._frozen("head", head)
        with torch.no_grad():
            embeds = model.embed_tokens(batch.input_ids)  # [num_tokens, hidden_size]
        embedded = self._embeds(embeds, weights[0].embeds_norm, weights[0].eps, weights[0].embeds_qkv)
        embedded_rows = _take(embedded, plan)
        hidden = self._combine(model, batch.hidden_states)
        positions = batch.position_ids if plan.rows is None else batch.position_ids[plan.rows]
        own: list[list[tuple[Tensor, Tensor]]] = [[] for _ in weights]
        keys: list[tuple[Tensor, Tensor]] = []
        steps: list[StepSums] = []
        for step, row_weight in enumerate(row_weights):
            if step == 0:
                hidden = self._first_step(model, weights, hidden, embedded, batch.position_ids, plan, keys)
            else:
                # [num_rows, ...]; rows without a row `step` further on have no target.
                shifted = functional.pad(embedded_rows[step:], (0, 0, 0, step))
                hidden = self._later_step(model, weights, hidden, shifted, positions + step, plan, keys, own)
            normed = self._norm(hidden, model.norm.weight, model.norm.variance_epsilon)
            if model.config.norm_output:
                hidden = normed
            loss, correct = head_kl(normed.to(self.dtype), head, targets, step, row_weight, self._kl)
            steps.append(StepSums(loss, correct, plan.valid[step]))
        return steps

    def _first_step(
        self,
        model: Any,
        weights: Sequence[_LayerWeights],
        hidden: Tensor,
        embedded: Tensor,
        positions: Tensor,
        plan: PackPlan,
        keys: list[tuple[Tensor, Tensor]],
    ) -> Tensor:
        """All tokens up to the last layer's keys, the rows from there on. Fills `keys`."""
        rotation = _rotation(model, positions)
        for index, weight in enumerate(weights):
            residual, query, key, value = self._inputs(
                hidden, embedded if index == 0 else None, *weight.inputs, *rotation
            )
            keys.append((key, value))
            mask = plan.row_mask
            if index + 1 < len(weights):
                mask = plan.token_mask or mask
            elif plan.rows is not None:
                residual, query = _take(residual, plan), _take(query[0].transpose(0, 1), plan)
                query = query.transpose(0, 1)[None]
            attended, _ = attend(query, key, value, mask, weight.scale)
            hidden = self._finish(residual, attended, weight)
        return hidden

    def _later_step(
        self,
        model: Any,
        weights: Sequence[_LayerWeights],
        hidden: Tensor,
        embedded: Tensor,
        positions: Tensor,
        plan: PackPlan,
        keys: Sequence[tuple[Tensor, Tensor]],
        own: Sequence[list[tuple[Tensor, Tensor]]],
    ) -> Tensor:
        """The rows alone: each sees the first step's tokens up to itself, and itself at each later step."""
        rotation = _rotation(model, positions)
        for index, weight in enumerate(weights):
            residual, query, key, value = self._inputs(
                hidden, embedded if index == 0 else None, *weight.inputs, *rotation
            )
            own[index].append((key, value))
            attended, normalizer = attend(query, *keys[index], plan.row_mask, weight.scale)
            own_keys, own_values = zip(*own[index], strict=True)
            joined = self._join(query, attended, normalizer, own_keys, own_values, weight.scale)
            hidden = self._finish(residual, joined, weight)
        return hidden

    def _finish(self, residual: Tensor, attended: Tensor, weight: _LayerWeights) -> Tensor:
        if self.recompute and torch.is_grad_enabled():
            found: Tensor = checkpoint(self._outputs, residual, attended, *weight.outputs, use_reentrant=False)
            return found
        return self._outputs(residual, attended, *weight.outputs)  # type: ignore[no-any-return]

    def _combine(self, model: Any, hidden_states: Tensor) -> Tensor:
        """[num_tokens, num_aux_layers * hidden_size] -> [num_tokens, hidden_size]."""
        hidden_states = hidden_states.to(self.dtype)
        if model.fc_norm is not None:
            parts = hidden_states.chunk(len(model.fc_norm), dim=-1)
            normed = [
                self._norm(part, norm.weight, norm.variance_epsilon)
                for norm, part in zip(model.fc_norm, parts, strict=True)
            ]
            hidden_states = torch.cat(normed, dim=-1)
        return functional.linear(hidden_states.to(self.dtype), model.fc.weight.to(self.dtype))

    @torch.no_grad()
    def _targets(self, model: Any, batch: PackedBatch, plan: PackPlan, ttt_steps: int) -> Targets:
        last = batch.verifier_last_hidden_states
        rows = (last if plan.rows is None else last[plan.rows]).to(self.dtype)
        normed = self._norm(rows, model.verifier_norm.weight, model.verifier_norm.variance_epsilon)
        head = self._frozen("verifier", model.verifier_lm_head.weight)
        logits = normed.new_empty(len(rows) + ttt_steps - 1, head.shape[0], dtype=self.dtype)
        torch.mm(normed.to(self.dtype), head.T, out=logits[: len(rows)])
        logits[len(rows) :] = 0
        return Targets(logits, *self._statistics(logits))

    def _frozen(self, name: str, weight: Tensor) -> Tensor:
        """The weight in the type of the products, made once for each content of it."""
        source, version, made = self._heads.get(name, (None, -1, weight))
        if source is not weight or version != weight._version:
            made = weight.detach().to(self.dtype)
            self._heads[name] = (weight, weight._version, made)
        return made


class _LayerWeights:
    """One decoder layer's weights, its matrices in the type of the products."""

    def __init__(self, layer: Any, first: bool, dtype: torch.dtype) -> None:
        attention = layer.self_attn
        self.eps = layer.input_layernorm.variance_epsilon
        self.scale = attention.scaling
        qkv = torch.cat([part.weight.to(dtype) for part in (attention.q_proj, attention.k_proj, attention.v_proj)])
        self.embeds_norm = layer.input_layernorm.weight
        width = qkv.shape[1] // 2
        self.embeds_qkv, states_qkv = (qkv[:, :width], qkv[:, width:]) if first else (qkv, qkv)
        norms = [getattr(attention, f"{name}_norm", None) for name in ("q", "k")]
        self.inputs = (
            layer.hidden_norm.weight if first else layer.input_layernorm.weight,
            states_qkv,
            [None if norm is None else norm.weight for norm in norms],
            self.eps,
            attention.q_proj.weight.shape[0],
            attention.head_dim,
            first and layer.norm_before_residual,
        )
        self.outputs = (
            attention.o_proj.weight.to(dtype),
            layer.post_attention_layernorm.weight,
            self.eps,
            layer.mlp.gate_proj.weight.to(dtype),
            layer.mlp.up_proj.weight.to(dtype),
            layer.mlp.down_proj.weight.to(dtype),
        )


def _norm(states: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root mean square norm, as Hugging Face's Llama has it."""
    wide = states.float()
    normed = wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
    return weight * normed.to(states.dtype)


def _project_embeds(embeds: Tensor, norm: Tensor, eps: float, qkv: Tensor) -> Tensor:
    """What the embeddings give to the first layer's queries, keys and values: [num_tokens, queries + 2 * keys]."""
    return functional.linear(_norm(embeds, norm, eps).to(qkv.dtype), qkv)


def _project_states(
    hidden: Tensor,  # [num_states, hidden_size]
    embedded: Tensor | None,  # [num_states, queries + 2 * keys], in the first layer
    norm: Tensor,
    qkv: Tensor,
    head_norms: Sequence[Tensor | None],
    eps: float,
    query_width: int,
    head_dim: int,
    norm_before_residual: bool,
    cos: Tensor,
    sin: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The residual [num_states, hidden_size], and query, key and value [1, heads, num_states, head_dim]."""
    normed = _norm(hidden, norm, eps)
    projected = functional.linear(normed.to(qkv.dtype), qkv)
    if embedded is not None:
        projected = projected + embedded
    heads = projected.view(len(projected), -1, head_dim)
    query_heads = query_width // head_dim
    key_heads = (heads.shape[1] - query_heads) // 2
    query, key, value = torch.split(heads, [query_heads, key_heads, key_heads], dim=1)
    turned = [
        rotate(part if weight is None else _norm(part, weight, eps), cos, sin).to(qkv.dtype)
        for part, weight in zip((query, key), head_norms, strict=True)
    ]
    query, key, value = (part.transpose(0, 1).contiguous()[None] for part in (*turned, value))
    return normed if norm_before_residual else hidden, query, key, value


def _finish_layer(
    residual: Tensor,  # [num_states, hidden_size]
    attended: Tensor,  # [1, heads, num_states, head_dim]
    output: Tensor,
    norm: Tensor,
    eps: float,
    gate: Tensor,
    up: Tensor,
    down: Tensor,
) -> Tensor:
    """Everything of a layer after its attention: [num_states, hidden_size]."""
    hidden = residual + functional.linear(attended[0].transpose(0, 1).flatten(1), output)
    normed = _norm(hidden, norm, eps).to(gate.dtype)
    return hidden + functional.linear(
        functional.silu(functional.linear(normed, gate)) * functional.linear(normed, up), down
    )


def _rotation(model: Any, positions: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin [num_states, head_dim], in float32."""
    with torch.no_grad():
        like = torch.empty(0, device=positions.device)
        cos, sin = model.rotary_emb(like, positions[None])
    return cos[0], sin[0]


class _TakeRows(torch.autograd.Function):
    """states[rows]; its gradient is a lookup too, not a sum of scattered rows."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, rows: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(places)
        return states[rows]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (places,) = ctx.saved_tensors
        taken = gradients[0][places.clamp(min=0)]
        kept = (places >= 0).view(-1, *[1] * (taken.dim() - 1))
        return taken * kept, None, None


def _take(states: Tensor, plan: PackPlan) -> Tensor:
    """[num_tokens, ...] -> [num_rows, ...]"""
    if plan.rows is None:
        return states
    found: Tensor = _TakeRows.apply(states, plan.rows, plan.places)  # type: ignore[no-untyped-call]
    return found


@functools.cache
def _compile(function: Callable[..., Any]) -> Callable[..., Any]:
    # https://github.com/pytorch/pytorch/issues/175250: since 2.10 a norm's two backward reductions are fused into
    # kernels that may need more shared memory than there is.
    known = hasattr(torch._inductor.config.triton, "mix_order_reduction")
    options: dict[str, Any] = {"triton.mix_order_reduction": MIXED_REDUCTIONS} if known else {}
    return torch.compile(function, dynamic=False, fullgraph=True, options=options)


def _as_it_is(function: Callable[..., Any]) -> Callable[..., Any]:
    return function
