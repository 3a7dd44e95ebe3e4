"""The last step of a verifier alone: its final norm and its output head, mapped from the checkpoint.

Logits of any hidden state without loading the model: of a checkpoint of 600 GB the two or three tensors that are
needed are mapped, not read, and no modelling code runs. Layouts differ in names and in a few numbers of the config;
what is not recognised raises `UnknownHead`, so that nobody judges by a head that was guessed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from infra.folders import tensor_files
from infra.verifiers.verifier import text_config

# Wrapped models put a prefix before these; a dot, so that `vision_model.norm` is not taken for `model.norm`.
_PREFIX = r"(?:.*\.)?"
_NORMS = (
    "model.norm", "language_model.norm", "norm", "model.final_layernorm", "model.norm_f", "backbone.norm_f",
    "model.final_norm", "model.embedding_norm", "transformer.ln_f", "gpt_neox.final_layer_norm",
)  # fmt: skip
_HEADS = ("lm_head", "embed_out")
_EMBEDDINGS = (
    "model.embed_tokens", "language_model.embed_tokens", "embed_tokens", "backbone.embeddings", "transformer.wte",
)  # fmt: skip
# Parts of a checkpoint that have norms and heads of their own, which are not the text model's.
_OTHER_PARTS = re.compile(r"visual|vision|audio|speech|talker|code_predictor|mtp|layers\.\d|projector|connector")
# Families whose norm multiplies by (1 + weight), and those that come to their logits in a way of their own.
_ONE_PLUS = re.compile(r"(gemma|gemma2|gemma3|vaultgemma|recurrent_gemma|qwen3_next|qwen3_5|qwen3_5_moe)(_text)?")
_NOT_UNDERSTOOD = re.compile(r"nemotron.*|minicpm.*|mamba.*|hyperclovax.*|muse_glimmer.*|step3p7.*|minimax_m3.*")
# Fields that multiply or divide the logits, and those that cap them as cap * tanh(logits / cap).
_FACTORS = ("logit_scale", "lm_head_multiplier")
_DIVISORS = ("logits_scaling",)
_CAPS = ("final_logit_softcapping", "logits_soft_cap")
_FLOATS = (torch.bfloat16, torch.float16, torch.float32)


class UnknownHead(ValueError):
    """The checkpoint's norm or head was not found under any known name, or is stored in another way."""


@dataclass(frozen=True, kw_only=True)
class VerifierHead:
    """Final norm and head.

    Attributes:
        norm: [hidden] weight.
        norm_bias: [hidden], of a LayerNorm that has one.
        centred: LayerNorm (true) or RMSNorm (false).
        head: [vocab, hidden] weight.
        head_bias: [vocab], where there is one.
        factor: of the logits.
        cap: of the logits by tanh, applied after the factor.
    """

    norm: Tensor
    norm_bias: Tensor | None = None
    epsilon: float
    centred: bool = False
    head: Tensor
    head_bias: Tensor | None = None
    factor: float = 1.0
    cap: float | None = None

    @property
    def vocab_size(self) -> int:
        """Rows of the head: token ids are below."""
        return self.head.shape[0]

    @classmethod
    def open(cls, folder: Path) -> VerifierHead:
        """Map the head of a checkpoint folder (safetensors, with or without an index file).

        Raises:
            UnknownHead: it has none that is understood.
        """
        try:
            whole = json.loads((folder / "config.json").read_bytes())
            return cls._of({**whole, **text_config(whole)}, _Checkpoint(folder))
        except (OSError, ValueError, KeyError, SafetensorError) as error:
            if isinstance(error, UnknownHead):
                raise
            raise UnknownHead(f"its checkpoint cannot be read: {error!r}") from error

    @classmethod
    def _of(cls, config: Mapping[str, Any], checkpoint: _Checkpoint) -> VerifierHead:
        family = str(config.get("model_type"))
        if _NOT_UNDERSTOOD.fullmatch(family):
            raise UnknownHead(f"how the family {family} computes its logits is not known here")
        norm_name = checkpoint.find(_NORMS)
        head_name = checkpoint.find(_HEADS)
        # A head under another name than `.weight` is quantized, and no reason to take the embeddings for it.
        if head_name is None and config.get("tie_word_embeddings", True) and not checkpoint.has_any(_HEADS):
            head_name = checkpoint.find(_EMBEDDINGS)
        if norm_name is None or head_name is None:
            absent = "final norm" if norm_name is None else "output head"
            raise UnknownHead(f"its {absent} has no name that is known")
        epsilon, centred = _epsilon(config)
        norm = checkpoint.tensor(f"{norm_name}.weight").float()
        if _ONE_PLUS.fullmatch(family):
            norm = norm + 1.0
        head = checkpoint.tensor(f"{head_name}.weight")
        if norm.shape != (config["hidden_size"],) or head.shape[1:] != norm.shape:
            raise UnknownHead(f"its norm and head have shapes {list(norm.shape)} and {list(head.shape)}")
        norm_bias = checkpoint.tensor_if_there(f"{norm_name}.bias")
        return cls(
            norm=norm,
            norm_bias=None if norm_bias is None else norm_bias.float(),
            epsilon=epsilon,
            centred=centred,
            head=head,
            head_bias=checkpoint.tensor_if_there(f"{head_name}.bias"),
            factor=_factor(config),
            cap=next((float(config[name]) for name in _CAPS if config.get(name)), None),
        )

    def logits(self, states: Tensor) -> Tensor:
        """Float32 logits [positions, vocab] of states before the final norm [positions, hidden]."""
        return self.scaled(self.product(states))

    def product(self, states: Tensor) -> Tensor:
        """The first half of `logits`, in the head's own type.

        As the verifier computes it: near ties tie here as they do there.
        """
        states = states.float()
        if self.centred:
            states = states - states.mean(dim=-1, keepdim=True)
        states = states * torch.rsqrt(states.square().mean(dim=-1, keepdim=True) + self.epsilon) * self.norm
        if self.norm_bias is not None:
            states = states + self.norm_bias
        return torch.nn.functional.linear(states.to(self.head.dtype), self.head, self.head_bias)

    def scaled(self, product: Tensor) -> Tensor:
        """The second half: float32 logits, in memory of their own unless the product is float32 itself."""
        logits = product.float()
        if self.factor != 1.0:
            logits *= self.factor
        return logits if self.cap is None else torch.tanh(logits / self.cap) * self.cap


class _Checkpoint:
    """Tensors of a folder of safetensors, by name."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files = tensor_files(folder)

    def find(self, layouts: tuple[str, ...]) -> str | None:
        """The one tensor of the text model that ends in the first of `layouts` found, without its `.weight`.

        Raises:
            UnknownHead: several do, and which is the text model's is not clear.
        """
        for layout in layouts:
            pattern = re.compile(rf"({_PREFIX}{re.escape(layout)})\.weight")
            found = [match[1] for name in self._files if (match := pattern.fullmatch(name))]
            found = [name for name in found if not _OTHER_PARTS.search(name)]
            if len(found) > 1:
                raise UnknownHead(f"its checkpoint has several of {layout}: {', '.join(sorted(found))}")
            if found:
                return found[0]
        return None

    def has_any(self, layouts: tuple[str, ...]) -> bool:
        """Whether any tensor at all is of one of `layouts`."""
        pattern = re.compile(rf"{_PREFIX}({'|'.join(map(re.escape, layouts))})\..*")
        return any(pattern.fullmatch(name) for name in self._files if not _OTHER_PARTS.search(name))

    def tensor(self, name: str) -> Tensor:
        """The tensor, mapped.

        Raises:
            UnknownHead: it is stored quantized.
        """
        with safe_open(self._folder / self._files[name], framework="pt") as file:
            tensor: Tensor = file.get_tensor(name)
        if tensor.dtype not in _FLOATS:
            raise UnknownHead(f"{name} is stored as {tensor.dtype}")
        return tensor

    def tensor_if_there(self, name: str) -> Tensor | None:
        return self.tensor(name) if name in self._files else None


def _epsilon(config: Mapping[str, Any]) -> tuple[float, bool]:
    """(epsilon, whether the norm is a LayerNorm)."""
    for name, centred in (
        ("rms_norm_eps", False), ("layernorm_epsilon", False), ("norm_eps", False),
        ("layer_norm_eps", True), ("layer_norm_epsilon", True), ("norm_epsilon", True),
    ):  # fmt: skip
        if isinstance(value := config.get(name), float):
            return value, centred
    raise UnknownHead("its config gives no epsilon of the final norm")


def _factor(config: Mapping[str, Any]) -> float:
    factor = 1.0
    for name in _FACTORS:
        factor *= float(config.get(name) or 1.0)
    for name in _DIVISORS:
        factor /= float(config.get(name) or 1.0)
    return factor
