"""A small local verifier and data set whose revisions a test can change."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from flows.config import PipelineConfig


def write_model(folder: Path, number: int) -> None:
    """A folder that is a checkpoint by its form; another number is another revision of it."""
    model = folder / "model"
    model.mkdir(exist_ok=True)
    shape = {"hidden_size": 8, "num_hidden_layers": 8, "vocab_size": 64, "max_position_embeddings": 128}
    written = folder / "written"  # renamed once it is whole: a look may come at any time
    written.write_text(json.dumps({"model_type": "llama", **shape}))
    written.replace(model / "config.json")
    save_file({"weight": torch.full((4,), float(number))}, written)
    written.replace(model / "model.safetensors")


def config_of(folder: Path, **fields: Any) -> PipelineConfig:
    """The smoke profile with that verifier, one data set and a root below the folder."""
    prompts = folder / "prompts.jsonl"
    if not prompts.exists():
        prompts.write_text("".join(json.dumps({"prompt": f"Question {number}?"}) + "\n" for number in range(8)))
    fields = {
        "profile": "smoke",
        "root": str(folder / "root"),
        "verifier": {"model": str(folder / "model")},
        "prompts": {"sources": [{"file": str(prompts)}], "heldout_prompts": 2},
        **fields,
    }
    return PipelineConfig.model_validate(fields)
