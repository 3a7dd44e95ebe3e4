"""An EAGLE-3 draft that training starts from: whether it fits, and its weights under our parameters' names.

Two layouts are read: speculators' own, and the original one (`LlamaForCausalLMEagle3`), which goes through
speculators' converter. Whatever differs in shape or in the order of norms is refused by name. The vocabulary may
differ: rows of the head are found by the verifier's token ids.
"""

from __future__ import annotations

import json
import logging
import re
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from infra.drafts.start_draft import FIELD, token_ids
from infra.drafts.vocab import VocabMap
from infra.errors import InputError
from infra.folders import tensor_files
from infra.training.algorithm import trainable_parameters
from infra.training.config import DraftSpec, TrainSpec
from infra.training.eagle3_model import build_model, layer_config

logger = logging.getLogger("draftsmith.training")

HEAD, EMBEDDINGS = "lm_head.weight", "embed_tokens.weight"
# What the config says of a layer that must be as it is in this verifier's draft.
_SIZES = (
    "vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim",
    "hidden_act",
)  # fmt: skip
# The same weights mean something else with other positions, but training gets over that.
_TOLERATED = ("rope_parameters", "rms_norm_eps")
# Where the norms sit; the fields have the same names in TrainConfig.
_NORMS = ("norm_before_residual", "fc_norm", "norm_output")
# In a checkpoint, but not trained: vocabulary maps, and the verifier's own weights.
_NOT_TRAINED = re.compile(r"d2t|t2d|embed_tokens\.weight|lm_head\.weight|verifier_.*|.*rotary_emb\.inv_freq")
# Heads or embeddings that differ by more than bf16 rounding were trained, or are another revision's.
_ROUNDING = 0.01


@dataclass(frozen=True)
class StartDraft:
    """A start draft as its config.json and the headers of its weights describe it.

    Args:
        original: whether it is in the original layout.
        layer: transformers config of its layers.
        layer_ids: the layers whose states it reads, where it says so.
        norms: where its norms sit, by TrainConfig's names, and `norm_before_fc`.
        shapes: of all its tensors, by speculators' names.
    """

    folder: Path
    original: bool
    layer: Any
    layer_ids: tuple[int, ...] | None
    norms: Mapping[str, bool]
    shapes: Mapping[str, tuple[int, ...]]

    @classmethod
    def open(cls, folder: Path) -> StartDraft:
        """Read config and headers.

        Raises:
            InputError: it is no EAGLE-3 draft in either layout.
        """
        try:
            config = json.loads((folder / "config.json").read_bytes())
            shapes = {_renamed(name): shape for name, shape in _shapes(folder)}
            return cls._of(folder, config, shapes)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError) as error:
            raise InputError(FIELD, f"the start draft cannot be read as an EAGLE-3 draft: {error}") from error

    @classmethod
    def _of(cls, folder: Path, config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> StartDraft:
        kind = config.get("speculators_model_type")
        if kind not in (None, "eagle3"):
            raise InputError(FIELD, f"the start draft is a {kind} draft, but train.algorithm is eagle3")
        if not {"fc.weight", "layers.0.hidden_norm.weight"} <= set(shapes):
            raise InputError(
                FIELD,
                "the start draft is neither an EAGLE-3 checkpoint of speculators nor one in the original layout "
                "(LlamaForCausalLMEagle3)",
            )
        original = kind is None
        told = config.get("eagle_aux_hidden_state_layer_ids")
        if original and not told:  # where vLLM reads it too
            told = (config.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
        return cls(
            folder=folder,
            original=original,
            layer=_layer(folder, config, original=original),
            layer_ids=tuple(told) if told else None,
            norms={name: bool(config.get(name, False)) for name in (*_NORMS, "norm_before_fc")},
            shapes=shapes,
        )

    @property
    def num_aux_layers(self) -> int:
        return self.shapes["fc.weight"][1] // int(self.layer.hidden_size)


def check_start(spec: DraftSpec, folder: Path, verifier_vocab_size: int) -> tuple[StartDraft, Tensor]:
    """The start draft and its `token_ids`, after all was looked at that needs no weights of the verifier.

    Raises:
        InputError: the start draft does not fit; the line names the config's field.
    """
    start = StartDraft.open(folder)
    _refuse_other_layer(start, spec)
    _refuse_other_inputs(start, spec)
    _refuse_other_norms(start, spec)
    return start, token_ids(folder, verifier_vocab_size)


def start_weights(spec: TrainSpec, folder: Path, vocab: VocabMap) -> dict[str, Tensor]:
    """The trainable weights of this config's draft as the start draft has them, fp32, by parameter name.

    Rows of the head whose tokens the start draft lacks are the verifier's.

    Raises:
        InputError: the start draft does not fit; the line names the config's field.
    """
    start, start_ids = check_start(spec, folder, vocab.verifier_vocab_size)
    model = build_model(
        spec.train,
        vocab,
        spec.verifier_path,
        spec.aux_hidden_state_layer_ids,
        trust_remote_code=spec.trust_remote_code,
    )
    parameters = {name: value.detach() for name, value in trainable_parameters(model).items()}
    _refuse_other_weights(start, parameters, len(start_ids))
    with tempfile.TemporaryDirectory(prefix="draftsmith-start-") as converted:
        source = _converted(start, spec, Path(converted)) if start.original else folder
        tensors = _tensors(source, {*parameters, HEAD, EMBEDDINGS} & set(start.shapes))
    known, rows = _rows_of(start_ids, vocab)
    logger.info(
        "%d of %d draft tokens (%.1f %%) were in the start draft's vocabulary of %d.",
        len(rows),
        len(known),
        100 * len(rows) / len(known),
        len(start_ids),
    )
    head = model.lm_head.weight.detach().clone()
    if HEAD in tensors:
        if HEAD not in parameters:
            _warn_of_other("head", tensors[HEAD][rows], head[known], "; train.train_lm_head would start from it")
        head[known] = tensors[HEAD][rows]
    if EMBEDDINGS in tensors:
        _warn_of_other("embeddings", tensors[EMBEDDINGS], model.embed_tokens.weight.detach(), "")
    return {name: head if name == HEAD else tensors[name] for name in parameters}


def _refuse_other_layer(start: StartDraft, spec: DraftSpec) -> None:
    """Raise InputError unless the start draft's layers are made like this one's."""
    num_layers = spec.train.num_layers
    wanted = layer_config(num_layers, spec.verifier_path, trust_remote_code=spec.trust_remote_code)
    for size in _SIZES:
        found, ours = getattr(start.layer, size, None), getattr(wanted, size)
        if found != ours:
            raise InputError(FIELD, f"the start draft has {size} {found}, but this verifier's has {ours}")
    if start.layer.num_hidden_layers != num_layers:
        raise InputError(
            "train.num_layers", f"is {num_layers}, but the start draft has {start.layer.num_hidden_layers}"
        )
    for field in _TOLERATED:
        if (found := getattr(start.layer, field, None)) != (ours := getattr(wanted, field, None)):
            logger.warning(
                "The start draft has %s %s, this one %s; training has to get over that.", field, found, ours
            )


def _refuse_other_inputs(start: StartDraft, spec: DraftSpec) -> None:
    """Raise InputError unless the start draft reads the same states of the verifier as this one."""
    from speculators.models.utils import get_verifier_config

    field, ours = "extract.layer_ids", spec.aux_hidden_state_layer_ids
    if start.num_aux_layers != len(ours):
        raise InputError(
            field,
            f"the start draft reads {start.num_aux_layers} layers, but {len(ours)} are extracted beside the "
            "verifier's last",
        )
    depth = get_verifier_config(spec.verifier_path, trust_remote_code=spec.trust_remote_code).num_hidden_layers
    theirs = start.layer_ids or (2, depth // 2, depth - 3)  # vLLM's and speculators' default
    if theirs != ours:
        raise InputError(
            field,
            f"the start draft reads layers {list(theirs)}, but {list(ours)} are extracted beside the verifier's "
            f"last; give [{', '.join(map(str, theirs))}, {depth}]",
        )


def _refuse_other_norms(start: StartDraft, spec: DraftSpec) -> None:
    """Raise InputError unless the start draft has its norms where this one has."""
    if start.norms["norm_before_fc"]:
        raise InputError(FIELD, "the start draft has a norm_before_fc, which drafts here do not have")
    for norm in _NORMS:
        theirs, ours = start.norms[norm], getattr(spec.train, norm)
        if theirs != ours:
            raise InputError(
                f"train.{norm}", f"is {str(ours).lower()}, but must be {str(theirs).lower()} as in the start draft"
            )


def _refuse_other_weights(start: StartDraft, parameters: Mapping[str, Tensor], num_tokens: int) -> None:
    """Raise InputError unless the start draft has this draft's weights, all of them and no others."""
    wanted = {name: tuple(value.shape) for name, value in parameters.items() if name != HEAD}
    if HEAD in start.shapes:
        wanted[HEAD] = (num_tokens, int(start.layer.hidden_size))
    absent = sorted(set(wanted) - set(start.shapes))
    foreign = sorted(name for name in start.shapes if name not in wanted and not _NOT_TRAINED.fullmatch(name))
    other = [name for name in wanted if name in start.shapes and start.shapes[name] != wanted[name]]
    if absent:
        raise InputError(FIELD, f"the start draft lacks {', '.join(absent)}")
    if foreign:
        raise InputError(FIELD, f"the start draft has weights that drafts here do not have: {', '.join(foreign)}")
    if other:
        shapes = (f"{name} of shape {list(start.shapes[name])}, not {list(wanted[name])}" for name in other)
        raise InputError(FIELD, f"the start draft has {', '.join(shapes)}")


def _rows_of(start_ids: Tensor, vocab: VocabMap) -> tuple[Tensor, Tensor]:
    """Which of our tokens the start draft has [draft_vocab_size] bool, and the rows of those in its head."""
    row_of = torch.full((vocab.verifier_vocab_size,), -1)
    row_of[start_ids] = torch.arange(len(start_ids))
    rows = row_of[vocab.token_ids]
    known = rows >= 0
    return known, rows[known]


def _warn_of_other(what: str, theirs: Tensor, ours: Tensor, remedy: str) -> None:
    """Say where weights that are not trained differ, which the start draft was trained with."""
    if theirs.shape == ours.shape and len(ours):
        share = float((theirs - ours).norm() / ours.norm())
        if share > _ROUNDING:
            logger.warning(
                "The start draft's %s differs from the verifier's by %.0f %%; the verifier's is used%s.",
                *(what, 100 * share, remedy),
            )


def _converted(start: StartDraft, spec: TrainSpec, folder: Path) -> Path:
    """The start draft in speculators' layout, written to `folder`."""
    import loguru
    from speculators.convert.eagle.eagle3_converter import Eagle3Converter

    if not (start.folder / "model.safetensors").is_file():  # the converter would unpickle another file
        raise InputError(FIELD, "a start draft in the original layout must lie in one file, model.safetensors")
    loguru.logger.disable("speculators.convert")
    try:
        Eagle3Converter().convert(
            start.folder,
            folder,
            spec.verifier_path,
            validate=False,
            norm_before_residual=start.norms["norm_before_residual"],
            eagle_aux_hidden_state_layer_ids=list(spec.aux_hidden_state_layer_ids),
        )
    except (ValueError, KeyError, RuntimeError, NotImplementedError, OSError) as error:
        raise InputError(FIELD, f"speculators cannot convert the start draft: {error}") from error
    return folder


def _tensors(folder: Path, names: Iterable[str]) -> dict[str, Tensor]:
    """Tensors of a checkpoint in speculators' layout, fp32.

    Raises:
        InputError: one is quantized, or holds values that are not finite.
    """
    files, found = tensor_files(folder), {}
    for name in sorted(names):
        with safe_open(folder / files[name], framework="pt") as file:
            tensor = file.get_tensor(name)
        if not tensor.is_floating_point() or tensor.element_size() < 2:
            raise InputError(FIELD, f"{name} is stored as {tensor.dtype}; give a draft that is not quantized")
        if not bool(tensor.isfinite().all()):
            raise InputError(FIELD, f"{name} holds values that are not finite")
        found[name] = tensor.float()
    return found


def _layer(folder: Path, config: Mapping[str, Any], *, original: bool) -> Any:
    """Transformers config of the draft's layers, with the defaults that its config.json leaves out."""
    if original:
        from transformers import LlamaConfig

        return LlamaConfig.from_dict(dict(config))
    from speculators.models.eagle3 import Eagle3SpeculatorConfig

    return Eagle3SpeculatorConfig.from_pretrained(folder).transformer_layer_config


def _shapes(folder: Path) -> Iterable[tuple[str, tuple[int, ...]]]:
    files = tensor_files(folder)
    for file_name in sorted(set(files.values())):
        with safe_open(folder / file_name, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 (safe_open is no mapping)
                yield name, tuple(file.get_slice(name).get_shape())


def _renamed(name: str) -> str:
    """A tensor of the original layout as speculators calls it."""
    return re.sub(r"^midlayer\.", "layers.0.", name)
