"""The EAGLE-3 draft itself: speculators' model, with first weights that are a function of the seed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from infra.training.config import TrainConfig

if TYPE_CHECKING:
    from infra.drafts.vocab import VocabMap


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

    # It warns that a model with tied embeddings has no head of its own, and that one file is not many.
    loguru.logger.disable("speculators.utils.loading")
    layers = layer_config(config.num_layers, verifier_path, trust_remote_code=trust_remote_code)
    torch.manual_seed(config.seed)
    model = Eagle3DraftModel.from_training_args(
        layers,
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


def layer_config(num_layers: int, verifier_path: str, *, trust_remote_code: bool) -> Any:
    """The transformers config of the draft's layers: sizes, heads and positions are those of the verifier."""
    from speculators.train.cli import create_transformer_layer_config

    config = create_transformer_layer_config(
        verifier_path,
        num_layers=num_layers,
        draft_arch="llama",
        hidden_act=None,
        sliding_window=0,
        full_attention_indices=list(range(num_layers)),
        trust_remote_code=trust_remote_code,
    )
    config.sliding_window = None
    return config
