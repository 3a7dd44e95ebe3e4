"""All of the trainer that is particular to EAGLE-3: the model, the alignment of a sample, and the loss call."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from infra.training.batch import PackedBatch
from infra.training.config import TrainConfig
from infra.training.rows import forward_rows, plan_rows

if TYPE_CHECKING:
    from infra.vocab import VocabMap

# Columns of an objective's sums, one row per TTT step. `correct` counts rows whose guess, and all guesses of the
# TTT steps before it, are the verifier's own first choice; `total` those whose earlier guesses all were.
SUM_COLUMNS = ("loss", "rows", "correct", "total")


def build_model(
    config: TrainConfig,
    vocab: VocabMap,
    verifier_path: str,
    aux_hidden_state_layer_ids: tuple[int, ...],
    *,
    trust_remote_code: bool = False,
    attention: str = "eager",
) -> Any:
    """A draft with fresh weights (a pure function of the seed) and the verifier's embeddings and head.

    Args:
        attention: `eager`, or `simple_flex_attention` where the library's compiled pass runs (CUDA).

    Returns:
        An Eagle3DraftModel in fp32 whose trainable parameters require gradients.
    """
    import loguru
    from speculators.models.eagle3.core import Eagle3DraftModel
    from speculators.train.cli import create_transformer_layer_config

    # It warns that a model with tied embeddings has no head of its own, and that one file is not many.
    loguru.logger.disable("speculators.utils.loading")
    layer_config = create_transformer_layer_config(
        verifier_path,
        num_layers=config.num_layers,
        draft_arch="llama",
        hidden_act=None,
        sliding_window=0,
        full_attention_indices=list(range(config.num_layers)),
        trust_remote_code=trust_remote_code,
    )
    layer_config.sliding_window = None
    torch.manual_seed(config.seed)
    model = Eagle3DraftModel.from_training_args(
        layer_config,
        t2d=vocab.t2d,
        d2t=vocab.d2t,
        draft_vocab_size=vocab.draft_vocab_size,
        num_layers=config.num_layers,
        norm_before_residual=config.norm_before_residual,
        fc_norm=config.fc_norm,
        norm_output=config.norm_output,
        ttt_steps=config.ttt_steps,
        verifier_name_or_path=verifier_path,
        target_layer_ids=list(aux_hidden_state_layer_ids),
        draft_attn_impl=attention,
        trust_remote_code=trust_remote_code,
    ).float()
    model.lm_head.weight.requires_grad_(config.train_lm_head)
    return model


def trainable_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that a checkpoint holds, by name."""
    return {name: value for name, value in model.named_parameters() if value.requires_grad}


def align_sample(
    input_ids: Tensor, loss_mask: Tensor, aux_hidden_states: Tensor, verifier_last_hidden_states: Tensor
) -> PackedBatch:
    """Line a sample up for EAGLE-3: row t has the state of token t, token t+1, and the verifier's view of t+2."""
    from speculators.models.eagle3.data import shift_batch

    num_tokens = input_ids.shape[0]
    shifted = shift_batch(
        {
            "input_ids": input_ids,
            "hidden_states": aux_hidden_states,
            "verifier_last_hidden_states": verifier_last_hidden_states,
            "loss_mask": loss_mask,
            "lengths": torch.tensor([num_tokens]),
            "position_ids": torch.arange(num_tokens),
        }
    )
    return PackedBatch(
        shifted["hidden_states"],
        shifted["input_ids"],
        shifted["loss_mask"],
        shifted["position_ids"],
        shifted["verifier_last_hidden_states"],
        (int(shifted["lengths"]),),
    )


class Eagle3Objective(nn.Module):
    """The draft together with its loss, as one module: what DistributedDataParallel wraps.

    Args:
        model: an Eagle3DraftModel.
        implementation: `rows` or `library` (see TrainConfig.implementation).
    """

    def __init__(self, model: Any, config: TrainConfig, implementation: str) -> None:
        super().__init__()
        self.model = model
        self.config = config
        # The chunked loss is written for KL; every other loss goes through the library.
        self.rows = implementation == "rows" and config.loss == "kl_div"

    def forward(self, batch: PackedBatch, num_loss_tokens: int) -> tuple[Tensor, Tensor]:
        """One packed sequence.

        Args:
            num_loss_tokens: trained tokens of the whole optimizer step, over all packs and ranks: every token
                weighs the same, however the samples fell into packs.

        Returns:
            The loss (to be summed over packs and ranks), and sums [ttt_steps, len(SUM_COLUMNS)] in float64.
        """
        run = self._forward_rows if self.rows else self._forward_library
        return run(batch, num_loss_tokens)

    def _forward_rows(self, batch: PackedBatch, num_loss_tokens: int) -> tuple[Tensor, Tensor]:
        plan = plan_rows(batch, self.config.ttt_steps)
        decays = [self.config.ttt_step_loss_decay**step for step in range(self.config.ttt_steps)]
        weights = [plan.valid[step].float() * (decay / num_loss_tokens) for step, decay in enumerate(decays)]
        steps = forward_rows(self.model, batch, plan, weights)
        sums = torch.zeros(len(steps), len(SUM_COLUMNS), dtype=torch.float64)
        standing: Tensor | None = None
        for index, step in enumerate(steps):
            eligible = step.valid if standing is None else step.valid & standing
            standing = eligible & step.correct
            sums[index] = torch.stack(
                [
                    step.loss.detach() / decays[index] * num_loss_tokens,
                    step.valid.sum(),
                    standing.sum(),
                    eligible.sum(),
                ]
            ).double()
        return torch.stack([step.loss for step in steps]).sum(), sums

    def _forward_library(self, batch: PackedBatch, num_loss_tokens: int) -> tuple[Tensor, Tensor]:
        from speculators.losses import resolve_loss_config

        config = self.config
        share = batch.num_loss_tokens / num_loss_tokens
        documents = batch.document_ids
        padded = batch.padded_to(config.total_seq_len)
        documents = nn.functional.pad(documents, (0, padded.num_tokens - batch.num_tokens), value=-1)
        dtype = torch.bfloat16 if config.precision == "bf16" else torch.float32
        _, loss, metrics = self.model(
            padded.hidden_states.to(dtype)[None],
            padded.input_ids[None],
            documents[None],
            loss_mask=padded.loss_mask[None],
            position_ids=padded.position_ids[None],
            verifier_last_hidden_states=padded.verifier_last_hidden_states.to(dtype)[None],
            ttt_steps=config.ttt_steps,
            ttt_step_loss_decay=config.ttt_step_loss_decay,
            loss_config=resolve_loss_config(config.loss, "eager"),
        )
        rows = float(batch.num_loss_tokens)
        table = [
            [
                float(metrics[f"loss_{step}_sum"]) / config.ttt_step_loss_decay**step * rows,
                rows,
                float(metrics[f"cond_acc_{step}_sum"]),
                float(metrics[f"cond_acc_{step}_total"]),
            ]
            for step in range(config.ttt_steps)
        ]
        return loss * share, torch.tensor(table, dtype=torch.float64)
