"""The optimizer of a draft, with a state that goes into safetensors.

Muon (https://kellerjordan.github.io/posts/muon/) for the matrices, AdamW for the rest, or AdamW for all; the split
is speculators' (`speculators.train.optimizers.split_named_params_for_muon`). Muon's step is scaled to the root mean
square of AdamW's (https://arxiv.org/abs/2502.16982), so that one learning rate serves both.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from infra.training.config import TrainConfig
from infra.training.distribution import fit

# Weights that are matrices but stand for tokens one by one.
TOKEN_MATRICES = ("embed_tokens", "lm_head")


class DraftOptimizer:
    """One or two torch optimizers that are stepped together.

    Args:
        parameters: the trainable parameters by name.
    """

    def __init__(self, config: TrainConfig, parameters: Mapping[str, nn.Parameter]) -> None:
        self.parameters = dict(parameters)
        matrices = [name for name, value in self.parameters.items() if value.dim() == 2]
        by_muon = {
            name
            for name in matrices
            if config.optimizer == "muon" and not any(part in name for part in TOKEN_MATRICES)
        }
        decayed = [self.parameters[name] for name in matrices if name not in by_muon]
        undecayed = [value for name, value in self.parameters.items() if name not in matrices]
        groups = [
            {"params": params, "weight_decay": decay}
            for params, decay in ((decayed, config.weight_decay), (undecayed, 0.0))
            if params
        ]
        self._optimizers: list[torch.optim.Optimizer] = [
            torch.optim.AdamW(groups, lr=config.learning_rate, betas=config.adam_betas, fused=True)
        ]
        if by_muon:
            self._optimizers.append(
                torch.optim.Muon(
                    [self.parameters[name] for name in matrices if name in by_muon],
                    lr=config.learning_rate,
                    weight_decay=config.weight_decay,
                    adjust_lr_fn="match_rms_adamw",
                )
            )

    def step(self, learning_rate: float) -> None:
        """Take one step at `learning_rate` and forget the gradients."""
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = learning_rate
            optimizer.step()
            optimizer.zero_grad()

    def tensors(self) -> dict[str, Tensor]:
        """The whole state, by `<parameter>|<name>`, as it lies on this rank (sharded where its parameter is)."""
        return {
            f"{name}|{key}": held.detach()
            for optimizer in self._optimizers
            for name, value in self.parameters.items()
            if value in optimizer.state
            for key, held in optimizer.state[value].items()
        }

    def load_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Put the state of `tensors()` back, each tensor whole."""
        for optimizer in self._optimizers:
            mine = {id(value) for group in optimizer.param_groups for value in group["params"]}
            for name, value in self.parameters.items():
                state = {
                    key.removeprefix(f"{name}|"): fit(held, value)
                    for key, held in tensors.items()
                    if key.startswith(f"{name}|")
                }
                if id(value) in mine and state:
                    optimizer.state[value] = state
