"""Whether vLLM can work with a verifier that lies on this machine, told before it is started.

A hub model is not asked, as its files may not be here yet. In doubt nothing is refused: vLLM itself is the judge.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from infra.errors import InputError
from infra.folders import read_json
from infra.verifiers import gguf as verifier_gguf
from infra.verifiers.verifier import (
    MODEL_FIELD,
    PACKAGE_PREFIX,
    VerifierConfig,
    VerifierShape,
    local_folder,
    text_config,
)
from infra.vllm_config import VllmConfig

# Whatever kind it is of; a custom one's code is named in tokenizer_config.json.
_TOKENIZERS = ("tokenizer*", "vocab*", "*.model", "*.spm", "*.tiktoken", "tekken*.json")
# Mistral's own tokenizers bring a template with them.
_TEMPLATES = ("chat_template*", "additional_chat_templates/*", "tekken*.json", "tokenizer.model.v*")
# Models of these types vLLM gives a template, or prompts by code of its own.
_NEED_NO_TEMPLATE = (
    *("blip", "clip", "colpali", "deepseek", "gpt_oss", "inkling", "kimi", "minicpm", "paligemma", "siglip"),
    "unlimited",
)
# Rotary embeddings whose declared length is the scaled one already.
_SCALED_ALREADY = ("llama3", "longrope", "su")
_ALLOW_LONG = "VLLM_ALLOW_LONG_MAX_MODEL_LEN"


def check_tokenizer(verifier: VerifierConfig, vllm: VllmConfig) -> None:
    """Raise InputError where no tokenizer lies in the verifier's folder, and none is named elsewhere."""
    folder = None if _is_package(verifier) else local_folder(verifier.model)
    if folder is None or _any_flag(vllm, "--token", "--skip-token") or _any_file(folder, _TOKENIZERS):
        return
    raise InputError(
        MODEL_FIELD,
        f"{folder} holds no tokenizer, such as a tokenizer.json; copy the model's beside the weights",
    )


def check_chat_template(verifier: VerifierConfig, vllm: VllmConfig) -> None:
    """Raise InputError where vLLM would refuse every conversation, as nothing says how the verifier reads one."""
    if _any_flag(vllm, "--chat-t", "--trust-request-chat", "--token"):
        return
    if _is_package(verifier):
        found = bool(_declared(verifier).get("chat_template"))
    else:
        folder = local_folder(verifier.model)
        found = folder is None or _any_file(folder, _TEMPLATES) or _names_template(folder)
    if not found:
        raise InputError(
            MODEL_FIELD,
            f"{verifier.model} has no chat template, without which vLLM answers no conversation; take the model's "
            "instruct version, or add --chat-template=FILE to vllm.model_args",
        )


def check_length(verifier: VerifierConfig, vllm: VllmConfig, shape: VerifierShape) -> None:
    """Raise InputError where `vllm.max_model_len` is more tokens than the verifier can take."""
    longest, allowed = vllm.max_model_len, (os.environ | vllm.environment).get(_ALLOW_LONG, "0")
    if longest is None or allowed.strip().lower() not in ("", "0", "false") or _any_flag(vllm, "--hf-", "--rope"):
        return
    if not _is_package(verifier) and local_folder(verifier.model) is None:
        return
    outer = _declared(verifier)
    inner = text_config(outer)
    lengths = [shape.max_position_embeddings * _rope_factor(inner)]
    lengths += [given for config in (outer, inner) if isinstance(given := config.get("model_max_length"), int)]
    if longest > max(lengths):
        raise InputError(
            "vllm.max_model_len",
            f"is {longest}, but {verifier.model} takes {max(lengths):.0f} tokens (max_position_embeddings); lower "
            f"it to that, or set {_ALLOW_LONG}=1 in vllm.environment",
        )


def _is_package(verifier: VerifierConfig) -> bool:
    return verifier.model.startswith(PACKAGE_PREFIX)


def _declared(verifier: VerifierConfig) -> dict[str, Any]:
    """What a verifier on this machine says of itself, as in config.json."""
    if _is_package(verifier):
        gguf = verifier_gguf.find_gguf(verifier.model.removeprefix(PACKAGE_PREFIX), MODEL_FIELD)
        return verifier_gguf.gguf_config(gguf, MODEL_FIELD)
    folder = local_folder(verifier.model)
    return {} if folder is None else read_json(folder / "config.json")


def _any_flag(vllm: VllmConfig, *beginnings: str) -> bool:
    flags = (flag.replace("_", "-") for flag in (*vllm.model_args, *vllm.extra_args))
    return any(flag.startswith(beginnings) for flag in flags)


def _any_file(folder: Path, patterns: tuple[str, ...]) -> bool:
    return any(True for pattern in patterns for _ in folder.glob(pattern))


def _names_template(folder: Path) -> bool:
    """Whether a file names a template, or leaves it to code."""
    tokenizer = read_json(folder / "tokenizer_config.json")
    if tokenizer.get("chat_template") or "auto_map" in tokenizer:
        return True
    if read_json(folder / "processor_config.json").get("chat_template"):
        return True
    return str(read_json(folder / "config.json").get("model_type")).startswith(_NEED_NO_TEMPLATE)


def _rope_factor(config: Mapping[str, Any]) -> float:
    """How many times its declared length a model may take: the largest that any of its layers declares."""
    found = 1.0
    for name in ("rope_scaling", "rope_parameters"):
        rope = config.get(name)
        parts = [rope, *rope.values()] if isinstance(rope, dict) else []
        for part in parts:
            if isinstance(part, dict) and part.get("rope_type", part.get("type")) not in _SCALED_ALREADY:
                factor = part.get("factor")
                found = max(found, factor) if isinstance(factor, int | float) else found
    return found
