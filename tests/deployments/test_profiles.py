"""The profiles under deployments/: right configs, checked without a network, each value with its reason."""

from __future__ import annotations

import re
import socket
from pathlib import Path
from typing import Any

import pytest
import yaml

from flows.config import PipelineConfig, load_config
from infra.prompts.samples import load_prompts

DEPLOYMENTS = Path(__file__).resolve().parents[2] / "deployments"
KIMI = ("kimi-k2.5-rtx6000", "kimi-k2.5-b300")
PROFILES = (*KIMI, "qwen3-8b-h200")
# A value on a line of its own: `name: value`, or a prompt source.
VALUE = re.compile(r"^\s*(?:[\w.]+:\s*[^\s#]|- \{)")


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a config was read over the network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


def profile(name: str) -> PipelineConfig:
    return load_config(str(DEPLOYMENTS / f"{name}.yaml"))


@pytest.mark.parametrize("name", PROFILES)
def test_a_profile_is_a_right_config_for_an_s3_root(name: str) -> None:
    config = profile(name)
    assert config.root.startswith("s3://")
    assert config.vllm.max_model_len is not None
    longest = max(source.max_prompt_tokens or 0 for source in config.prompts.sources)
    assert longest + config.generate.max_tokens < config.vllm.max_model_len, (
        "every prompt leaves room for an answer"
    )
    assert config.train.global_batch % config.train.num_ranks == 0
    assert config.generate.timeout_seconds >= 1800
    for streams, prompts in zip(config.evaluate.concurrency, config.evaluate.num_prompts, strict=True):
        assert streams <= prompts <= (config.prompts.heldout_prompts or 0)


@pytest.mark.parametrize("name", KIMI)
def test_kimi_is_loaded_and_read_as_it_must_be(name: str) -> None:
    config = profile(name)
    assert (config.vllm.tensor_parallel_size, config.train.num_ranks) == (8, 8)
    assert config.vllm.startup_timeout_seconds >= 45 * 60
    assert (config.vllm.reasoning_parser, config.vllm.tool_parser) == ("kimi_k2", "kimi_k2")
    assert config.verifier.trust_remote_code
    assert (config.generate.think_start_token_id, config.generate.think_end_token_id) == (163606, 163607)


def test_the_smaller_node_has_the_lower_numbers() -> None:
    small, large = map(profile, KIMI)
    assert small.generate.concurrency < large.generate.concurrency
    assert small.generate.max_tokens < large.generate.max_tokens
    assert (small.vllm.max_model_len or 0) < (large.vllm.max_model_len or 0)


def test_the_demo_on_a_gpu_has_prompts_for_its_load_and_memory_for_its_servers() -> None:
    config = profile("smoke-gpu")
    prompts = load_prompts(config.prompts, DEPLOYMENTS)
    assert len(prompts.train) >= 5000
    assert len(prompts.heldout) >= max(config.evaluate.num_prompts)
    assert config.vllm.gpu_memory_utilization * len(config.evaluate.methods) <= 0.9, "they stand side by side"
    assert not any(reasons for reasons in prompts.dropped.values()), "none is useless or there twice"


@pytest.mark.parametrize("name", [*PROFILES, "smoke-gpu"])
def test_each_value_has_its_reason(name: str) -> None:
    text = (DEPLOYMENTS / f"{name}.yaml").read_text(encoding="utf-8")
    lines = text.splitlines()
    for before, line in zip(["", *lines], lines, strict=False):
        if VALUE.match(line):
            assert " # " in line or before.lstrip().startswith("#"), line


@pytest.mark.parametrize("name", [*PROFILES, "smoke-gpu"])
def test_nothing_is_said_twice(name: str) -> None:
    """YAML takes the last of two equal keys without a word."""

    class Loader(yaml.SafeLoader):
        pass

    def mapping(loader: Any, node: Any) -> dict[str, Any]:
        keys = [loader.construct_object(key) for key, _ in node.value]
        assert len(keys) == len(set(keys)), keys
        return dict(loader.construct_pairs(node, deep=True))

    Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, mapping)
    assert yaml.load((DEPLOYMENTS / f"{name}.yaml").read_text(encoding="utf-8"), Loader)
