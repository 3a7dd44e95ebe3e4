"""What a config turns into, and what it refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from infra.errors import InputError
from infra.vllm_config import VllmConfig, engine_flags, portable_flags, server_flags, vllm_version


def test_flags() -> None:
    config = VllmConfig(
        max_model_len=2048,
        enforce_eager=True,
        reasoning_parser="qwen3",
        tensor_parallel_size=8,
        tool_parser="hermes",
        pipeline_parallel_size=2,
        data_parallel_size=4,
        model_args=["--quantization=fp8"],
        extra_args=["--max-num-seqs=64"],
    )
    flags = engine_flags(config, model_path="/models/m", trust_remote_code=True)
    expected = (
        "--model /models/m --dtype auto --tensor-parallel-size 8 --pipeline-parallel-size 2 "
        "--gpu-memory-utilization 0.9 --max-model-len 2048 --reasoning-parser qwen3 --enforce-eager --trust-remote-code "
        "--quantization=fp8 --max-num-seqs=64"
    )
    assert " ".join(flags) == expected
    of_server = " --data-parallel-size 4 --enable-auto-tool-choice --tool-call-parser hermes"
    assert " ".join(server_flags(config, model_path="/models/m", trust_remote_code=True)) == expected + of_server
    assert config.gpus_per_server == 64
    assert config.content() == {
        "max_model_len": 2048,
        "reasoning_parser": "qwen3",
        "tool_parser": "hermes",
        "model_args": ["--quantization=fp8"],
    }


def test_generation_stops_one_token_before_what_extraction_takes() -> None:
    """A prompt as long as max_model_len is refused: the extraction engine must be able to add a token."""
    config = VllmConfig(max_model_len=2048)
    assert "--max-model-len 2047" in " ".join(server_flags(config.for_generation(), model_path="m"))
    assert "--max-model-len 2048" in " ".join(engine_flags(config, model_path="m"))
    assert VllmConfig().for_generation() == VllmConfig()


def test_the_evaluations_key_knows_fields_that_came_later_only_when_they_are_set() -> None:
    later = {"tool_parser", "pipeline_parallel_size", "data_parallel_size"}
    described = VllmConfig().how_served()
    assert described == VllmConfig().model_dump(exclude={"python", "startup_timeout_seconds", *later})
    assert VllmConfig(data_parallel_size=2).how_served() == described | {"data_parallel_size": 2}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"extra_args": ["--api_key=x"]}, "it is set for you"),
        ({"extra_args": ["--max-model-len", "5"]}, r"set vllm\.max_model_len"),
        ({"model_args": ["-tp=2"]}, r"set vllm\.tensor_parallel_size"),
        ({"extra_args": ["-dp", "2"]}, r"set vllm\.data_parallel_size"),
        ({"extra_args": ["--enable-auto-tool-choice"]}, r"set vllm\.tool_parser"),
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


def test_flags_lose_their_local_paths() -> None:
    arguments = ["--model", "/cache/v/rev", "--speculative-config", '{"model": "/cache/v/rev/draft", "k": 3}']
    names = {"/cache/v/rev": "SmolLM2", "/cache/v/rev/draft": "draft:0123"}
    assert portable_flags(arguments, names) == (
        '--model SmolLM2 --speculative-config \'{"model": "draft:0123", "k": 3}\''
    )
