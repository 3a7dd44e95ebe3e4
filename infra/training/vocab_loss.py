"""KL divergence over a large draft vocabulary on a GPU, a few thousand rows of logits at a time.

Per TTT step the logits are written once and read by one fused reduction and one elementwise pass that writes their
gradient, which goes on through the language-model head at once: nothing of the size of the logits outlives its
chunk, and the backward pass only scales a [rows, hidden_size] tensor (the idea of Liger's fused linear losses,
https://arxiv.org/abs/2410.10989). On CPU `infra.training.losses` does the same in chunks that fit its caches.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# Logits of one chunk: large enough that both matrix products fill a GPU.
CHUNK_BYTES = 2**28


@dataclass(frozen=True)
class Targets:
    """What the verifier says at each row, over the draft vocabulary.

    Args:
        logits: [num_rows + ttt_steps - 1, draft_vocab_size]; the last ttt_steps - 1 rows are zero.
        log_normalizer: log of the sum of exponentials of each row of `logits`.
        negative_entropy: sum of p log p of each row.
        token: the first choice of each row.
    """

    logits: Tensor
    log_normalizer: Tensor
    negative_entropy: Tensor
    token: Tensor


def target_statistics(logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """log_normalizer, negative_entropy and token (see Targets) of logits [num_rows, draft_vocab_size]."""
    wide = logits.float()
    log_normalizer = torch.logsumexp(wide, dim=-1)
    expected = (torch.exp(wide - log_normalizer[:, None]) * wide).sum(dim=-1)
    return log_normalizer, expected - log_normalizer, logits.argmax(dim=-1)


def kl_of_chunk(
    logits: Tensor,  # [chunk, draft_vocab_size], the draft's
    target_logits: Tensor,  # [chunk, draft_vocab_size]
    log_normalizer: Tensor,  # [chunk], of target_logits
    negative_entropy: Tensor,  # [chunk]
    token: Tensor,  # [chunk]
    weights: Tensor,  # [chunk]
) -> tuple[Tensor, Tensor, Tensor]:
    """KL(target || draft) of each row, whether both have the same first choice, and the logits' gradient of the
    sum of weight * KL: weight * (softmax(logits) - softmax(target_logits))."""
    draft = logits.float()
    target = torch.exp(target_logits.float() - log_normalizer[:, None])
    draft_normalizer = torch.logsumexp(draft, dim=-1)
    losses = negative_entropy - (target * draft).sum(dim=-1) + draft_normalizer
    gradient = (torch.exp(draft - draft_normalizer[:, None]) - target) * weights[:, None]
    return losses, logits.argmax(dim=-1) == token, gradient.to(logits.dtype)


class HeadKL(torch.autograd.Function):
    """sum_i weight_i * KL(target_{i + shift} || softmax(hidden_i @ head^T)), and each row's correctness."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,  # [num_rows, hidden_size]
        head: Tensor,  # [draft_vocab_size, hidden_size], of hidden's type
        targets: Targets,
        shift: int,
        weights: Tensor,  # [num_rows] float32; zero where a row has no target
        kl: Callable[..., tuple[Tensor, Tensor, Tensor]],  # kl_of_chunk, compiled or not
    ) -> tuple[Tensor, Tensor]:
        num_rows = hidden.shape[0]
        losses = weights.new_empty(num_rows)
        correct = torch.empty(num_rows, dtype=torch.bool, device=hidden.device)
        hidden_gradient = torch.empty_like(hidden)
        head_gradient = torch.zeros_like(head, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        size = chunk_rows(num_rows, head.shape[0] * hidden.element_size())
        for start in range(0, num_rows, size):
            mine, aimed = slice(start, start + size), slice(start + shift, start + size + shift)
            logits = hidden[mine] @ head.T
            losses[mine], correct[mine], gradient = kl(
                logits,
                targets.logits[aimed],
                targets.log_normalizer[aimed],
                targets.negative_entropy[aimed],
                targets.token[aimed],
                weights[mine],
            )
            torch.mm(gradient, head, out=hidden_gradient[mine])
            if head_gradient is not None:
                head_gradient += gradient.T @ hidden[mine]
        ctx.save_for_backward(hidden_gradient, head_gradient)
        ctx.mark_non_differentiable(correct)
        return (losses * weights).sum(), correct

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor | None, None, None, None, None]:
        hidden_gradient, head_gradient = ctx.saved_tensors
        scale = gradients[0]
        head = None if head_gradient is None else (head_gradient * scale).to(hidden_gradient.dtype)
        return hidden_gradient * scale.to(hidden_gradient.dtype), head, None, None, None, None


def head_kl(
    hidden: Tensor,
    head: Tensor,
    targets: Targets,
    shift: int,
    weights: Tensor,
    kl: Callable[..., tuple[Tensor, Tensor, Tensor]],
) -> tuple[Tensor, Tensor]:
    """`HeadKL`: the weighted sum of the rows' KL, and whether each row's first choice is its target's."""
    loss, correct = HeadKL.apply(hidden, head, targets, shift, weights, kl)  # type: ignore[no-untyped-call]
    return loss, correct


def chunk_rows(num_rows: int, row_bytes: int) -> int:
    """The largest equal share of the rows whose logits fit CHUNK_BYTES (or one row)."""
    parts = min(num_rows, -(-num_rows * row_bytes // CHUNK_BYTES))
    while num_rows % parts:
        parts += 1
    return num_rows // parts
