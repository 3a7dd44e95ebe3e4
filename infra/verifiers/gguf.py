"""Verifiers in GGUF files: converted once into an ordinary safetensors checkpoint."""

from __future__ import annotations

import contextlib
import fcntl
import importlib.metadata
import json
import logging
import os
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from infra import folders
from infra.errors import InfrastructureError, InputError
from infra.locations import cache_folder, package_files
from infra.verifiers.gguf_header import read_metadata

logger = logging.getLogger("draftsmith.verifier")

# Raised when `_convert` writes something else for the same GGUF file; part of the revision.
RECIPE_VERSION = 1
# GGUF names its pre-tokenizer; transformers (5.19) takes plain GPT-2's for every Llama. SmolLM's splits digits off
# first, which shows where several blanks stand before a number.
_SPLITS_DIGITS = frozenset({"smollm"})


def find_gguf(package: str, field: str) -> Path:
    """The GGUF file that an installed package carries; the package is not imported.

    Raises:
        InputError: the package is not installed, or has no GGUF file, or several.
    """
    try:
        found = package_files(package, ".gguf")
    except (importlib.metadata.PackageNotFoundError, ValueError) as error:
        raise InputError(field, f"the package {package!r} is not installed here; install it with pip") from error
    if len(found) != 1:
        raise InputError(field, f"the package {package!r} carries {len(found)} GGUF files; exactly one is needed")
    return found[0]


def gguf_revision(gguf: Path) -> str:
    """sha256 of the file and the version of the recipe; known before the conversion."""
    return f"{folders.file_sha256(gguf)}-recipe{RECIPE_VERSION}"


def gguf_config(gguf: Path, field: str) -> dict[str, Any]:
    """The model's shape and chat template, from the file's metadata, under transformers' names.

    Raises:
        InputError: the file cannot be read, or does not say.
    """
    try:
        metadata = read_metadata(gguf)
    except ValueError as error:
        raise InputError(field, str(error)) from error
    architecture = metadata.get("general.architecture")
    return {
        "hidden_size": metadata.get(f"{architecture}.embedding_length"),
        "num_hidden_layers": metadata.get(f"{architecture}.block_count"),
        "vocab_size": metadata.get(f"{architecture}.vocab_size", metadata.get("tokenizer.ggml.tokens")),
        "max_position_embeddings": metadata.get(f"{architecture}.context_length"),
        "rope_scaling": {"factor": metadata.get(f"{architecture}.rope.scaling.factor")},
        "chat_template": metadata.get("tokenizer.chat_template"),
    }


def convert_once(gguf: Path, revision: str, field: str) -> Path:
    """The converted checkpoint in `$DRAFTSMITH_CACHE/verifiers/<revision>`, made now if it is not there whole.

    Two processes may call this at once: the second waits and takes what the first made.

    Raises:
        InputError: transformers cannot convert this GGUF file.
        InfrastructureError: the cache folder cannot be written.
    """
    target = _target(revision)
    if folders.is_sealed(target):
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _locked(target):
            if not folders.is_sealed(target):
                _replace(gguf, target, field)
    except OSError as error:
        raise InfrastructureError(f"the verifier could not be written to {target}: {error}") from error
    return target


def converted(revision: str) -> Path | None:
    """The converted checkpoint, where there is one; its weights are not looked at."""
    return target if (target := _target(revision)).is_dir() else None


def _target(revision: str) -> Path:
    return cache_folder() / "verifiers" / revision


@contextlib.contextmanager
def _locked(target: Path) -> Iterator[None]:
    """One conversion at a time; the kernel drops the lock when its holder dies."""
    with target.with_name(f".{target.name}.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _replace(gguf: Path, target: Path, field: str) -> None:
    for left_over in target.parent.glob(f".{target.name}.*.partial"):
        shutil.rmtree(left_over, ignore_errors=True)  # of a process that was killed: we hold the lock
    if target.exists():
        logger.warning("The verifier in %s is torn; converting it again.", target)
    else:
        logger.info("Converting %s into %s, once; this takes about half a minute.", gguf.name, target)
    staged, old = (target.with_name(f".{target.name}.{uuid.uuid4().hex[:12]}.partial") for _ in range(2))
    try:
        staged.mkdir()
        _convert(gguf, staged, field)
        folders.seal(staged)
        if target.exists():
            os.rename(target, old)
        os.rename(staged, target)
    finally:
        shutil.rmtree(staged, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)


def _convert(gguf: Path, folder: Path, field: str) -> None:
    """Dequantize to bf16 and save as transformers would have saved the original model.

    Effects: writes config.json, generation_config.json, model.safetensors and the tokenizer's files to `folder`.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()  # three bars for two seconds; our log line says what happens
    origin: dict[str, Any] = {"gguf_file": gguf.name, "local_files_only": True}
    try:
        model = AutoModelForCausalLM.from_pretrained(
            gguf.parent, **origin, quantization_config=GgufConfig(dequantize=True), dtype=torch.bfloat16
        )
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, **origin)
    except (ValueError, KeyError, NotImplementedError) as error:
        brief = str(error).split("\n")[0]
        raise InputError(field, f"transformers cannot convert {gguf.name}: {brief}") from error
    # Else save_pretrained refuses ("dequantized") or writes that the weights are still quantized.
    model.hf_quantizer = None
    model.config.__dict__.pop("quantization_config", None)
    model.save_pretrained(folder)
    _mend_tokenizer(tokenizer, gguf, model.config.max_position_embeddings)
    tokenizer.save_pretrained(folder)
    _edit(folder / "config.json", drop=["_model_name_or_path", "quantization_config"])
    _edit(folder / "tokenizer_config.json", drop=["is_local", "local_files_only"])
    # Token ids only: a sampling default here would silently become vLLM's.
    ids = {name: getattr(model.config, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    (folder / "generation_config.json").write_text(json.dumps({**ids, "do_sample": False}, indent=2) + "\n")
    for path in folder.iterdir():  # safetensors makes its file private; the cache may be shared
        path.chmod((folder / "config.json").stat().st_mode)


def _mend_tokenizer(tokenizer: Any, gguf: Path, max_position_embeddings: int) -> None:
    from tokenizers import pre_tokenizers

    tokenizer.model_max_length = max_position_embeddings
    if read_metadata(gguf).get("tokenizer.ggml.pre") in _SPLITS_DIGITS:
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
            ]
        )


def _edit(path: Path, drop: list[str]) -> None:
    content = json.loads(path.read_text(encoding="utf-8"))
    kept = {key: value for key, value in content.items() if key not in drop}
    path.write_text(json.dumps(kept, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
