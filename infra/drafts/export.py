"""From a finished training run to the checkpoint that `vllm serve` takes, and the contract it must keep.

vLLM reads the draft's layers, its vocabulary and its auxiliary layers from config.json alone; a wrong one there is
served without a word at an acceptance of 1 % (vllm#50170, vllm#43671). So nothing is accepted before it was read
back and compared with what the training read. vLLM takes the verifier from its own command line as long as the
draft comes in `--speculative-config`; `speculators_config.verifier.name_or_path` is only looked at when the draft's
folder itself is named as the model, so it can carry the verifier's name and no path of this machine.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from infra.drafts.vocab import VocabMap
from infra.errors import StageFailed
from infra.training.config import TrainConfig

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
EXPORT_FILES = (CONFIG_FILE, WEIGHTS_FILE)


@dataclass(frozen=True)
class ExportContract:
    """What the exported speculator must agree with.

    Args:
        extracted_layer_ids: of the hidden_states stage, ascending, the verifier's number of layers last.
        vocab: the map the draft was trained with.
        verifier_name: name of the verifier; no path.
        verifier_revision: its resolved revision.
        hidden_size: of the verifier.
        num_layers: decoder layers of the draft.
        ttt_steps: how far ahead the draft was trained to guess.
        norm_before_residual, fc_norm, norm_output: how the draft was trained (`TrainConfig`); vLLM does as
            config.json says, whatever the weights were trained for.
    """

    extracted_layer_ids: tuple[int, ...]
    vocab: VocabMap
    verifier_name: str
    verifier_revision: str
    hidden_size: int
    num_layers: int = 1
    ttt_steps: int = 3
    norm_before_residual: bool = True
    fc_norm: bool = False
    norm_output: bool = False

    @property
    def aux_hidden_state_layer_ids(self) -> list[int]:
        return list(self.extracted_layer_ids[:-1])


def export_draft(
    weights: Mapping[str, Tensor],
    train: TrainConfig,
    contract: ExportContract,
    verifier_path: str,
    folder: Path,
    *,
    trust_remote_code: bool = False,
) -> tuple[Path, ...]:
    """Write config.json and model.safetensors (bf16) into `folder` and check them.

    Args:
        weights: the trained weights by parameter name (`infra.training.checkpoint.Checkpoint.weights`).
        verifier_path: local folder of the verifier, for its embeddings and language-model head.
        folder: local; made if absent.

    Returns:
        The paths of `EXPORT_FILES`.

    Raises:
        StageFailed: the weights are not those of this config's draft, or the contract is broken.
    """
    from infra.training.algorithm import trainable_parameters
    from infra.training.eagle3_model import build_model

    model = build_model(
        train,
        contract.vocab,
        verifier_path,
        tuple(contract.aux_hidden_state_layer_ids),
        trust_remote_code=trust_remote_code,
    )
    parameters = trainable_parameters(model)
    if {name: value.shape for name, value in weights.items()} != {n: v.shape for n, v in parameters.items()}:
        raise StageFailed("the checkpoint holds other weights than this config's draft; train it anew")
    with torch.no_grad():
        for name, value in parameters.items():
            value.copy_(weights[name])
    folder.mkdir(parents=True, exist_ok=True)
    model.to(torch.bfloat16).save_pretrained(folder)
    path = folder / CONFIG_FILE
    path.write_text(json.dumps(_finished_config(json.loads(path.read_text()), contract), indent=2) + "\n")
    check_export(path.read_bytes(), (folder / WEIGHTS_FILE).read_bytes(), contract)
    return tuple(folder / name for name in EXPORT_FILES)


def check_export(config: bytes, weights: bytes, contract: ExportContract) -> None:
    """Compare an export, as bytes, with its contract.

    Raises:
        StageFailed: naming every breach.
    """
    try:
        found = json.loads(config)
        tensors = load(weights)
    except (ValueError, SafetensorError) as error:
        raise StageFailed(f"export refused: it cannot be read ({error})") from error
    breaches = [*_config_breaches(found, contract), *_weight_breaches(tensors, found, contract)]
    if breaches:
        raise StageFailed("export refused: " + "; ".join(breaches))


def _finished_config(config: dict[str, Any], contract: ExportContract) -> dict[str, Any]:
    """The library's config with the verifier named, not located."""
    verifier = config["speculators_config"]["verifier"]
    verifier["name_or_path"] = contract.verifier_name
    verifier["revision"] = contract.verifier_revision
    for part in (config, config["transformer_layer_config"]):
        part.pop("_name_or_path", None)
        part.pop("name_or_path", None)
    return config


def _config_breaches(config: Mapping[str, Any], contract: ExportContract) -> Iterator[str]:
    layer = config.get("transformer_layer_config") or {}
    speculators = config.get("speculators_config") or {}
    verifier = speculators.get("verifier") or {}
    methods = speculators.get("proposal_methods") or [{}]
    expected = [
        ("speculators_model_type", config.get("speculators_model_type"), "eagle3"),
        ("dtype", config.get("dtype"), "bfloat16"),
        ("model_type", layer.get("model_type"), "llama"),
        # With the defaults that vLLM has for them.
        ("norm_before_residual", config.get("norm_before_residual", True), contract.norm_before_residual),
        ("fc_norm", config.get("fc_norm", False), contract.fc_norm),
        ("norm_output", config.get("norm_output", False), contract.norm_output),
        ("norm_before_fc", config.get("norm_before_fc", False), False),
        ("target_hidden_size", config.get("target_hidden_size") or contract.hidden_size, contract.hidden_size),
        (
            "eagle_aux_hidden_state_layer_ids",
            config.get("eagle_aux_hidden_state_layer_ids"),
            contract.aux_hidden_state_layer_ids,
        ),
        ("draft_vocab_size", config.get("draft_vocab_size"), contract.vocab.draft_vocab_size),
        ("vocab_size", layer.get("vocab_size"), contract.vocab.verifier_vocab_size),
        ("hidden_size", layer.get("hidden_size"), contract.hidden_size),
        ("num_hidden_layers", layer.get("num_hidden_layers"), contract.num_layers),
        ("speculative_tokens", methods[0].get("speculative_tokens"), contract.ttt_steps),
        ("verifier.name_or_path", verifier.get("name_or_path"), contract.verifier_name),
        ("verifier.revision", verifier.get("revision"), contract.verifier_revision),
    ]
    for name, found, wanted in expected:
        if found != wanted:
            yield f"{CONFIG_FILE} has {name} {found!r}, not {wanted!r}"
    for name, value in _strings(config):
        if value.startswith(("/", "~", "file:", "./", "../")):
            yield f"{CONFIG_FILE} names a path of this machine at {name}: {value}"


def _weight_breaches(
    tensors: Mapping[str, Tensor], config: Mapping[str, Any], contract: ExportContract
) -> Iterator[str]:
    vocab = contract.vocab
    reduced = vocab.draft_vocab_size != vocab.verifier_vocab_size
    try:
        shapes = _shapes(config.get("transformer_layer_config") or {}, contract)
    except KeyError as error:
        yield f"{CONFIG_FILE} lacks transformer_layer_config.{error.args[0]}"
        return
    if reduced:
        shapes |= {"d2t": (vocab.draft_vocab_size,), "t2d": (vocab.verifier_vocab_size,)}
    for name, shape in shapes.items():
        # vLLM does not notice that one is absent (llama_eagle3's load_weights does not tell what it has loaded).
        if name not in tensors:
            yield f"{WEIGHTS_FILE} lacks {name}"
        elif tuple(tensors[name].shape) != shape:
            yield f"{name} has shape {list(tensors[name].shape)}, not {list(shape)}"
    for name in sorted(set(tensors) - set(shapes)):
        if not name.endswith(".bias"):
            yield f"{WEIGHTS_FILE} has {name}, which is no part of such a draft"
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and tensor.dtype != torch.bfloat16:
            yield f"{name} is {tensor.dtype}, not bfloat16"
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            yield f"{name} holds values that are not finite"
    if reduced and {"d2t", "t2d"} <= set(tensors):
        yield from _map_breaches(tensors["d2t"], tensors["t2d"], vocab)


def _shapes(layer: Mapping[str, Any], contract: ExportContract) -> dict[str, tuple[int, ...]]:
    """Shape of each weight, as the draft's own config has them.

    Raises:
        KeyError: the config lacks what they follow from.
    """
    vocab, hidden = contract.vocab, contract.hidden_size
    num_aux = len(contract.aux_hidden_state_layer_ids)
    inner, heads = int(layer["intermediate_size"]), int(layer["num_attention_heads"])
    head_dim = int(layer.get("head_dim") or hidden // heads)
    queries, keys = heads * head_dim, int(layer.get("num_key_value_heads") or heads) * head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, num_aux * hidden),
        "norm.weight": (hidden,),
        "embed_tokens.weight": (vocab.verifier_vocab_size, hidden),
        "lm_head.weight": (vocab.draft_vocab_size, hidden),
        "layers.0.hidden_norm.weight": (hidden,),
    }
    if contract.fc_norm:
        shapes |= {f"fc_norm.{number}.weight": (hidden,) for number in range(num_aux)}
    for number in range(contract.num_layers):
        # The first layer reads the token beside the state.
        read = 2 * hidden if number == 0 else hidden
        of_layer: dict[str, tuple[int, ...]] = {
            "input_layernorm": (hidden,),
            "post_attention_layernorm": (hidden,),
            "self_attn.q_proj": (queries, read),
            "self_attn.k_proj": (keys, read),
            "self_attn.v_proj": (keys, read),
            "self_attn.o_proj": (hidden, queries),
            "mlp.gate_proj": (inner, hidden),
            "mlp.up_proj": (inner, hidden),
            "mlp.down_proj": (hidden, inner),
        }
        shapes |= {f"layers.{number}.{name}.weight": shape for name, shape in of_layer.items()}
    return shapes


def _map_breaches(d2t: Tensor, t2d: Tensor, vocab: VocabMap) -> Iterator[str]:
    if not torch.equal(d2t.long(), vocab.d2t) or not torch.equal(t2d.bool(), vocab.t2d):
        yield "d2t and t2d are not the vocabulary map's"
    try:
        VocabMap(d2t.long(), t2d.bool(), vocab.counts).check()
    except StageFailed as error:
        yield str(error)


def _strings(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """Every string of a JSON value with the dotted name of its place."""
    if isinstance(value, str):
        yield name, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _strings(item, f"{name}.{key}" if name else str(key))
    elif isinstance(value, Sequence):
        for place, item in enumerate(value):
            yield from _strings(item, f"{name}[{place}]")
