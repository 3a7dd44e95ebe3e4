"""What a config turns into, and what it refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from infra.errors import InputError
from infra.vllm_config import VllmConfig, engine_flags, vllm_version


def test_flags() -> None:
    config = VllmConfig(
        max_model_len=2048,
        enforce_eager=True,
        reasoning_parser="qwen3",
        tensor_parallel_size=8,
        model_args=["--quantization=fp8"],
        extra_args=["--max-num-seqs=64"],
    )
    flags = engine_flags(config, model_path="/models/m", trust_remote_code=True)
    expected = (
        "--model /models/m --dtype auto --tensor-parallel-size 8 --gpu-memory-utilization 0.9 --max-model-len 2048 "
        "--reasoning-parser qwen3 --enforce-eager --trust-remote-code --quantization=fp8 --max-num-seqs=64"
    )
    assert " ".join(flags) == expected
    assert config.content() == {
        "max_model_len": 2048,
        "reasoning_parser": "qwen3",
        "model_args": ["--quantization=fp8"],
    }


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"extra_args": ["--api_key=x"]}, "it is set for you"),
        ({"extra_args": ["--max-model-len", "5"]}, r"set vllm\.max_model_len"),
        ({"model_args": ["-tp=2"]}, r"set vllm\.tensor_parallel_size"),
        ({"environment": {"VLLM_API_KEY": "x"}}, "looks like a secret"),
        ({"environment": {"HF_TOKEN": "x"}}, "looks like a secret"),
        ({"gpu_memory_utilization": 1.5}, "less than or equal to 1"),
        ({"tensor_parallel": 2}, "not permitted"),
    ],
)
def test_wrong_configs_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        VllmConfig(**fields)


def test_interpreter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAFTSMITH_HOME", str(tmp_path))
    with pytest.raises(InputError, match=r"^vllm\.python: .*/\.venv-vllm/bin/python"):
        VllmConfig().interpreter()
    for name, program in (("with", "echo 0.32.0"), ("without", "true"), ("broken", "exit 1")):
        (tmp_path / name).write_text(f"#!/bin/sh\n{program}\n")
        (tmp_path / name).chmod(0o755)
    assert VllmConfig(python="with").interpreter() == tmp_path / "with"
    assert vllm_version(VllmConfig(python="with")) == "0.32.0"
    with pytest.raises(InputError, match="has no vLLM"):
        vllm_version(VllmConfig(python="without"))
    with pytest.raises(InputError, match="does not work"):
        vllm_version(VllmConfig(python="broken"))
