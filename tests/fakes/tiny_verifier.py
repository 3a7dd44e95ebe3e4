"""A Llama of random weights that knows what it says next, its own answers, and its states over them."""

from __future__ import annotations

import copy
import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

LAYER_IDS = (1, 3, 5, 7)
HIDDEN_SIZE, VOCAB_SIZE = 32, 200
PROMPT_TOKENS, COMPLETION_TOKENS, MOST_ANSWERS = 12, 40, 40


@dataclass(frozen=True)
class Answered:
    """A response's row, as far as the checks read it, and the true states [tokens, layers, hidden]."""

    response: dict[str, Any]
    states: torch.Tensor


@functools.cache
def tiny_model(seed: int = 0) -> LlamaForCausalLM:
    config = LlamaConfig(
        hidden_size=HIDDEN_SIZE,
        vocab_size=VOCAB_SIZE,
        intermediate_size=64,
        num_hidden_layers=LAYER_IDS[-1],
        num_attention_heads=2,
        initializer_range=0.25,
        tie_word_embeddings=False,
    )
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config).eval()
        model.model.norm.weight.uniform_(0.5, 1.5)
        model.lm_head.weight.mul_(4.0)  # sharp enough that a token is expected at 1 or 2 nats
        for depth, layer in enumerate(model.model.layers):  # each layer's states are longer than the last one's
            layer.mlp.down_proj.weight.mul_(2.0**depth)
    return model


def save(model: LlamaForCausalLM, folder: Path) -> Path:
    model.save_pretrained(folder)
    return folder


def answers(temperature: float, count: int, *, seed: int = 0) -> list[Answered]:
    """What the model of `seed` answers to the same random prompts, and the states of model 0 over it.

    The responses are the caller's own to change, the states are shared.
    """
    return [Answered(copy.deepcopy(each.response), each.states) for each in _answers(temperature, seed)[:count]]


@functools.cache
@torch.no_grad()
def _answers(temperature: float, seed: int) -> list[Answered]:
    generator = torch.Generator().manual_seed(int(100 * temperature))
    ids = torch.randint(VOCAB_SIZE, (MOST_ANSWERS, PROMPT_TOKENS), generator=generator)
    for _ in range(COMPLETION_TOKENS):
        logits = tiny_model(seed)(ids).logits[:, -1].float()
        if temperature:
            following = torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)
        else:
            following = logits.argmax(-1, keepdim=True)
        ids = torch.cat([ids, following], dim=1)
    states = states_of(tiny_model(), ids)
    return [
        Answered(
            {
                "sample_id": f"t{temperature}-{index}",
                "status": "ok",
                "error": None,
                "input_ids": row,
                "loss_mask": [position >= PROMPT_TOKENS for position in range(len(row))],
                "temperature": temperature,
            },
            states[index],
        )
        for index, row in enumerate(ids.tolist())
    ]


def states_of(model: LlamaForCausalLM, ids: torch.Tensor) -> torch.Tensor:
    """[samples, tokens, layers, hidden] bf16 of ids [samples, tokens]; the last layer's before the final norm."""
    last: list[torch.Tensor] = []
    hook = model.model.norm.register_forward_pre_hook(lambda module, inputs: last.append(inputs[0]))
    with torch.no_grad():
        hidden = model(ids, output_hidden_states=True).hidden_states
    hook.remove()
    return torch.stack([*(hidden[layer] for layer in LAYER_IDS[:-1]), last[0]], dim=2).bfloat16()
