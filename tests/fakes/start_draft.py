"""Drafts that training can start from, in speculators' layout and in the original one, made in a second."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from infra import manifest
from infra.drafts.export import CONFIG_FILE, WEIGHTS_FILE, ExportContract, export_draft
from infra.drafts.vocab import VocabMap
from infra.fingerprint import stage_content
from infra.manifest import Shard, StageRef
from infra.training.algorithm import trainable_parameters
from infra.training.config import TrainConfig
from infra.training.eagle3_model import build_model
from tests.fakes.training_run import HIDDEN_SIZE, LAYER_IDS, VERIFIER_VOCAB_SIZE


def map_of(tokens: Iterable[int]) -> VocabMap:
    """A vocabulary of these tokens."""
    ids = torch.tensor(sorted(tokens))
    t2d = torch.zeros(VERIFIER_VOCAB_SIZE, dtype=torch.bool)
    t2d[ids] = True
    return VocabMap(ids - torch.arange(len(ids)), t2d, t2d.long())


def random_weights(train: TrainConfig, vocab: VocabMap, verifier: str, seed: int = 3) -> dict[str, Tensor]:
    """Weights of a draft that bf16 holds exactly."""
    parameters = trainable_parameters(build_model(train, vocab, verifier, LAYER_IDS[:-1]))
    draw = torch.Generator().manual_seed(seed)
    return {name: torch.randn(value.shape, generator=draw).bfloat16().float() for name, value in parameters.items()}


def write_speculator(
    folder: Path, train: TrainConfig, vocab: VocabMap, verifier: str, weights: Mapping[str, Tensor]
) -> Path:
    """A draft as our export writes it."""
    contract = ExportContract(
        LAYER_IDS,
        vocab,
        "tiny",
        "0123abcd",
        HIDDEN_SIZE,
        num_layers=train.num_layers,
        ttt_steps=train.ttt_steps,
        norm_before_residual=train.norm_before_residual,
        fc_norm=train.fc_norm,
        norm_output=train.norm_output,
    )
    export_draft(weights, train, contract, verifier, folder)
    return folder


def write_original(folder: Path, speculator: Path, **config: Any) -> Path:
    """The same draft in the original EAGLE-3 layout: a flat config, and `midlayer` for its one layer."""
    folder.mkdir(parents=True)
    tensors = load_file(speculator / WEIGHTS_FILE)
    save_file(
        {name.replace("layers.0.", "midlayer."): value for name, value in tensors.items()}, folder / WEIGHTS_FILE
    )
    flat = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": HIDDEN_SIZE,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "hidden_act": "silu",
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "vocab_size": VERIFIER_VOCAB_SIZE,
        "draft_vocab_size": len(tensors["lm_head.weight"]),
        "torch_dtype": "bfloat16",
        "tie_word_embeddings": False,
        "eagle_aux_hidden_state_layer_ids": list(LAYER_IDS[:-1]),
    }
    (folder / CONFIG_FILE).write_text(json.dumps({**flat, **config}))
    return folder


def write_drafts_stage(root: str, speculator: Path) -> str:
    """A complete drafts stage that has exported this draft. Returns the URI of its export."""
    stage = StageRef(root, "drafts", stage_content("drafts", 1, {}, {}, {}))
    files = {f"export/{name}": speculator / name for name in (CONFIG_FILE, WEIGHTS_FILE)}
    files["metrics.jsonl"] = speculator / CONFIG_FILE
    plan = manifest.write_plan(stage, [Shard(f"{n:05d}", (), {"file": file}) for n, file in enumerate(files)])
    for shard in plan:
        manifest.commit_shard(stage, shard, files[shard.extra["file"]], rows=0, status_counts={}, inputs={})
    manifest.finish(stage, {})
    return f"{stage.uri}/export"
