"""Where the servers are: GPU sets, URLs and keys, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from infra.errors import InputError
from infra.extraction.config import ExtractConfig, engine_configs
from infra.generation.config import GenerateConfig
from infra.serving.config import ServersConfig, replica_configs
from infra.vllm_config import VllmConfig


def visible(servers: ServersConfig, vllm: VllmConfig) -> list[str | None]:
    return [config.environment.get("CUDA_VISIBLE_DEVICES") for config in replica_configs(servers, vllm)]


def test_gpus_are_shared_out_in_order_as_the_parallel_sizes_need(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    two_each = VllmConfig(tensor_parallel_size=2)
    assert visible(ServersConfig(), two_each) == [None], "one server has all that is visible"
    assert visible(ServersConfig(replicas=3), two_each) == ["0,1", "2,3", "4,5"]
    four_each = VllmConfig(tensor_parallel_size=2, pipeline_parallel_size=2)
    assert visible(ServersConfig(replicas=2), four_each) == ["0,1,2,3", "4,5,6,7"]
    assert visible(ServersConfig(replicas=2, gpu_sets=[[0, 4], ["GPU-a", "GPU-b"]]), two_each) == [
        "0,4",
        "GPU-a,GPU-b",
    ]


def test_only_visible_gpus_are_shared_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6")
    assert visible(ServersConfig(replicas=3), VllmConfig()) == ["4", "5", "6"]
    with pytest.raises(InputError, match=r"generate\.servers\.replicas: 2 of 2 GPUs each need 4, .* '4,5,6'"):
        replica_configs(ServersConfig(replicas=2), VllmConfig(tensor_parallel_size=2))
    named = VllmConfig(environment={"CUDA_VISIBLE_DEVICES": "0,1", "A": "b"})
    assert visible(ServersConfig(replicas=2), named) == ["0", "1"]
    assert replica_configs(ServersConfig(replicas=2), named)[0].environment["A"] == "b"


def test_a_base_url_gets_the_apis_path() -> None:
    servers = ServersConfig(external=["http://a:8000", "http://b:8000/v1/", "https://c/team/v1"])
    assert servers.external == ["http://a:8000/v1", "http://b:8000/v1", "https://c/team/v1"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"external": ["gpu7:8000"]}, "is no base URL"),
        ({"external": ["http://user:secret@a:8000"]}, "must hold no credentials"),
        ({"external": ["http://a:8000", "http://a:8000/v1"]}, "names a server twice"),
        ({"external": ["http://a:8000"], "replicas": 2}, "instead of replicas"),
        ({"external_key_variable": "sk-1234"}, "is no name of an environment variable"),
        ({"replicas": 2, "gpu_sets": [[0]]}, "1 sets for 2 replicas"),
        ({"replicas": 2, "gpu_sets": [[0, 1], [1, 2]]}, "gives a GPU twice"),
    ],
)
def test_wrong_servers_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        ServersConfig(**fields)


def test_the_key_is_in_the_environment_only(monkeypatch: pytest.MonkeyPatch) -> None:
    servers = ServersConfig(external=["http://a:8000"], external_key_variable="TEAM_KEY")
    monkeypatch.delenv("TEAM_KEY", raising=False)
    with pytest.raises(InputError, match="TEAM_KEY is not set"):
        servers.external_key()
    monkeypatch.setenv("TEAM_KEY", "sesame")
    assert servers.external_key() == "sesame"
    assert "sesame" not in servers.model_dump_json()


def test_where_the_servers_are_enters_no_key() -> None:
    assert GenerateConfig(servers=ServersConfig(external=["http://a:8000"], hang_timeout_seconds=9)).content() == {}
    assert GenerateConfig(servers=ServersConfig(replicas=4, max_restarts=1)).content() == {}


def test_engines_share_out_gpus_as_replicas_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    # An engine has no data parallelism: that is what several engines are.
    vllm = VllmConfig(tensor_parallel_size=2, data_parallel_size=4)
    shared_out = engine_configs(ExtractConfig(engines=2), vllm)
    assert [config.environment["CUDA_VISIBLE_DEVICES"] for config in shared_out] == ["0,1", "2,3"]
    with pytest.raises(InputError, match=r"extract\.engines: 3 of 2 GPUs each need 6, .* '0,1,2,3'"):
        engine_configs(ExtractConfig(engines=3), vllm)
    with pytest.raises(ValidationError, match="1 sets for 2 engines"):
        ExtractConfig(engines=2, gpu_sets=[[0]])
