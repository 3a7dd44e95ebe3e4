"""What the tests of a real engine share: conversations of many lengths, and what Hugging Face computes of them."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from typing import Any

import torch
from transformers import AutoTokenizer

from infra.extraction.engine import ExtractResult, ExtractSample
from infra.locations import project_home
from infra.verifiers.verifier import Verifier

# The states are bf16, the reference is float32: relative differences of 0.003 to 0.02 are the rounding's.
TOLERANCE = 0.03
logger = logging.getLogger("draftsmith.tests")


def conversations(verifier: Verifier, lengths: Sequence[int]) -> list[ExtractSample]:
    """Questions strung together, each cut to its length in tokens (at most some 3,000); few begin alike."""
    lines = (project_home() / "deployments/prompts/general.jsonl").read_text(encoding="utf-8").splitlines()
    questions = [json.loads(line)["prompt"] for line in lines]
    tokenizer = AutoTokenizer.from_pretrained(verifier.path)
    samples = []
    for index, length in enumerate(lengths):
        first = index % len(questions)
        turned = questions[first:] + questions[:first]
        messages = [{"role": "user", "content": " ".join(turned)}]
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
        samples.append(ExtractSample(f"conversation-{index}", list(ids)[:length]))
    return samples


def reference_states(model: Any, input_ids: Sequence[int], layer_ids: Sequence[int]) -> torch.Tensor:
    """[tokens, layers, hidden] float32 of a Hugging Face forward pass; the last layer's before the final norm."""
    before_norm: list[torch.Tensor] = []
    hook = model.model.norm.register_forward_pre_hook(lambda module, args: before_norm.append(args[0]))
    with torch.inference_mode():
        ids = torch.tensor([list(input_ids)], device=model.device)
        found = model(ids, output_hidden_states=True).hidden_states
    hook.remove()
    states = [found[layer][0] for layer in layer_ids[:-1]]
    return torch.stack([*states, before_norm[0][0]], dim=1).cpu()


def assert_states_agree(
    model: Any, samples: Sequence[ExtractSample], results: Sequence[ExtractResult], layer_ids: Sequence[int]
) -> None:
    """Every sample's states are those of a Hugging Face forward pass, layer by layer and token by token."""
    worst = dict.fromkeys(layer_ids, 0.0)
    for asked, result in zip(samples, results, strict=True):
        assert result.error is None
        assert result.hidden_states is not None
        assert result.hidden_states.dtype == torch.bfloat16
        expected = reference_states(model, asked.input_ids, layer_ids)
        found = result.hidden_states.float()
        assert found.shape == expected.shape
        for position, layer in enumerate(layer_ids):
            difference = (found - expected)[:, position].norm() / expected[:, position].norm()
            assert difference < TOLERANCE, f"{asked.sample_id}, layer {layer}"
            # Token by token too: one misplaced slot would drown in the sum.
            apart = (found - expected)[:, position].norm(dim=-1) / expected[:, position].norm(dim=-1)
            assert apart.median() < TOLERANCE
            assert apart.max() < 0.3, f"{asked.sample_id}, layer {layer}, token {int(apart.argmax())}"
            worst[layer] = max(worst[layer], float(difference))
    largest = ", ".join(f"layer {layer} {difference:.4f}" for layer, difference in worst.items())
    logger.info("Largest relative difference of %d samples to Hugging Face: %s.", len(samples), largest)
