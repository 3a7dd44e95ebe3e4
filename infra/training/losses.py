"""The training loss over logits that are never held as a whole.

With a draft vocabulary of 8,192 and three TTT steps the logits and their gradients are most of the memory traffic
of a step. So the loss takes the hidden states, makes the logits of a few rows at a time, and keeps only the
gradients (the idea of Liger's fused linear losses, https://arxiv.org/abs/2410.10989).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

# Rows whose logits are made at once: 128 rows of 8,192 float32 are 4 MiB, about what two cores cache.
CHUNK_ROWS = 128

ElementwiseLoss = Callable[[Tensor, Tensor], Tensor]


class TargetDistribution:
    """What the verifier would have said at each row, over the draft vocabulary.

    Args:
        logits: [num_rows, draft_vocab_size], the verifier's.
    """

    def __init__(self, logits: Tensor) -> None:
        logits = logits.float()
        self.probabilities = torch.softmax(logits, dim=-1)  # [num_rows, draft_vocab_size]
        self.token = logits.argmax(dim=-1)  # [num_rows]
        # sum p log p = sum p * logit - logsumexp; softmax's largest value is exp(largest logit - logsumexp).
        log_normalizer = logits.amax(dim=-1) - self.probabilities.amax(dim=-1).log()
        self.negative_entropy = torch.linalg.vecdot(self.probabilities, logits) - log_normalizer


class ChunkedKL(torch.autograd.Function):
    """sum_i weight_i * KL(p_i || softmax(hidden_i @ weight^T)), as `speculators.losses.eager.kl_div_loss` has it.

    The gradient for the logits is weight_i * (softmax - p_i); it is carried on to `hidden` and to the weight of
    the language-model head while the chunk is at hand.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,  # [num_rows, hidden_size]
        head: Tensor,  # [draft_vocab_size, hidden_size]
        target: TargetDistribution,
        shift: int,  # row i is compared with the target of row i + shift
        row_weights: Tensor,  # [num_rows]; zero where a row has no target
    ) -> tuple[Tensor, Tensor]:
        num_rows = hidden.shape[0]
        losses = hidden.new_zeros(num_rows, dtype=torch.float32)
        correct = torch.zeros(num_rows, dtype=torch.bool, device=hidden.device)
        head_low = head.detach().to(hidden.dtype)
        hidden_gradient = torch.zeros_like(hidden)
        head_gradient = torch.zeros_like(head) if head.requires_grad else None
        # The last rows have no row `shift` further on; their weight is zero.
        last = num_rows - shift
        for start in range(0, last, CHUNK_ROWS):
            stop = min(start + CHUNK_ROWS, last)
            aimed = slice(start + shift, stop + shift)
            probabilities = target.probabilities[aimed]
            logits = (hidden[start:stop] @ head_low.T).float()  # [chunk, draft_vocab_size]
            top = logits.amax(dim=-1)
            at_target = logits.gather(1, target.token[aimed, None]).squeeze(1)
            correct[start:stop] = at_target == top
            expected = torch.linalg.vecdot(probabilities, logits)
            draft = torch.softmax(logits, dim=-1)
            # logsumexp, from the two maxima that are at hand: softmax's largest value is exp(top - logsumexp).
            log_normalizer = top - draft.amax(dim=-1).log()
            losses[start:stop] = target.negative_entropy[aimed] - expected + log_normalizer
            gradient = draft.sub_(probabilities).mul_(row_weights[start:stop, None]).to(hidden.dtype)
            hidden_gradient[start:stop] = gradient @ head_low
            if head_gradient is not None:
                head_gradient += gradient.T @ hidden[start:stop]
        ctx.save_for_backward(hidden_gradient, head_gradient)
        ctx.mark_non_differentiable(correct)
        return (losses * row_weights).sum(), correct

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor | None, None, None, None]:
        hidden_gradient, head_gradient = ctx.saved_tensors
        scale = gradients[0]
        return (
            hidden_gradient * scale.to(hidden_gradient.dtype),
            None if head_gradient is None else head_gradient * scale,
            None,
            None,
            None,
        )


def chunked_kl(
    hidden: Tensor, head: Tensor, target: TargetDistribution, shift: int, row_weights: Tensor
) -> tuple[Tensor, Tensor]:
    """`ChunkedKL`: the weighted sum of the rows' KL, and whether each row's first choice is the target's."""
    loss, correct = ChunkedKL.apply(hidden, head, target, shift, row_weights)  # type: ignore[no-untyped-call]
    return loss, correct
