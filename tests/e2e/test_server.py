"""The real vLLM under our server class: one request, its counters, its parent's sudden death, and an engine that
hangs."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

import httpx
import pytest

from infra.inference import GenerateConfig, generate_rows
from infra.processes import living, process_token
from infra.serving.config import ServersConfig
from infra.serving.pool import ServerPool
from infra.verifiers.verifier import VerifierConfig, materialize
from infra.vllm_server import VllmConfig, VllmServer, parse_counters, parse_progress
from tests.asking import prompts

pytestmark = pytest.mark.e2e

END_SECONDS = 15.0
NUM_SPECULATIVE_TOKENS = 2
START_SECONDS = 300.0
HANG_TIMEOUT_SECONDS = 20.0

# A parent as a flow's process is. It says where the server is and then only waits to be killed.
PARENT = """
import asyncio, json, logging, sys
from infra.vllm_server import VllmConfig, VllmServer, vllm_version
logging.basicConfig(level=logging.INFO)
model_path, log_path, token, speculative_config = sys.argv[1:]
config = VllmConfig(
    environment={"VLLM_CPU_KVCACHE_SPACE": "1"}, max_model_len=512, enforce_eager=True, startup_timeout_seconds=400
)

async def main():
    async with VllmServer(
        config,
        model_path=model_path,
        served_name="smoke",
        log_path=log_path,
        token=token,
        speculative_config=json.loads(speculative_config),
    ) as server:
        said = {"base_url": server.base_url, "api_key": server.api_key, "version": vllm_version(config)}
        print(json.dumps(said), flush=True)
        await asyncio.sleep(600)

asyncio.run(main())
"""


@pytest.fixture(scope="module")
def model_path() -> str:
    return os.environ.get("DRAFTSMITH_TEST_MODEL") or str(materialize(VerifierConfig()).path)


@pytest.fixture
def token() -> Iterator[str]:
    value = process_token("test", uuid.uuid4().hex)
    yield value
    for pid in living(value):
        os.kill(pid, signal.SIGKILL)


def test_serves_counts_and_dies_with_its_parent(model_path: str, token: str, tmp_path: Path) -> None:
    log_path = tmp_path / "server.log"
    # Looks for the prompt's last tokens earlier in the prompt: a repetitive prompt makes it draft.
    speculative_config = {
        "method": "ngram",
        "num_speculative_tokens": NUM_SPECULATIVE_TOKENS,
        "prompt_lookup_max": 4,
        "prompt_lookup_min": 1,
    }
    arguments = [model_path, str(log_path), token, json.dumps(speculative_config)]
    parent = subprocess.Popen([sys.executable, "-c", PARENT, *arguments], stdout=subprocess.PIPE, text=True)
    try:
        assert parent.stdout is not None
        line = parent.stdout.readline()
        assert line, f"the server did not start: {log_path.read_text()[-3000:]}"
        said = json.loads(line)
        _check_request_and_counters(said["base_url"], said["api_key"])
        _check_secrecy(said["api_key"], token, log_path)
        assert said["version"] in log_path.read_text()
    finally:
        parent.kill()
        parent.wait()
    killed = time.monotonic()
    while living(token) and time.monotonic() - killed < END_SECONDS:
        time.sleep(0.1)
    assert living(token) == []
    while not refused(said["base_url"]):  # its sockets are closed after its memory is given back
        assert time.monotonic() - killed < END_SECONDS, "its port is still open"
        time.sleep(0.1)


def refused(base_url: str) -> bool:
    try:
        httpx.get(f"{base_url}/models", trust_env=False)
    except httpx.ConnectError:
        return True
    except httpx.TransportError:  # ended in the middle of it
        return False
    return False


def _check_request_and_counters(base_url: str, api_key: str) -> None:
    with httpx.Client(headers={"Authorization": f"Bearer {api_key}"}, trust_env=False, timeout=120) as client:
        metrics_url = base_url.removesuffix("/v1") + "/metrics"
        before = client.get(metrics_url).text
        request = {
            "model": "smoke",
            "messages": [{"role": "user", "content": "Repeat: one two three one two three one two three"}],
            "max_tokens": 40,
            "temperature": 0.0,
            "return_token_ids": True,
        }
        answer = client.post(f"{base_url}/chat/completions", json=request).raise_for_status().json()
        usage = answer["usage"]
        wanted = parse_progress(before).num_generation_tokens + usage["completion_tokens"]
        deadline = time.monotonic() + 30
        while True:  # vLLM books its last step a moment after the answer is out
            after = client.get(metrics_url).text
            seen = parse_progress(after)
            idle = (seen.num_requests_running, seen.num_requests_waiting) == (0, 0)
            if (idle and seen.num_generation_tokens >= wanted) or time.monotonic() > deadline:
                break
            time.sleep(0.2)
    assert len(answer["prompt_token_ids"]) == usage["prompt_tokens"] > 0
    assert len(answer["choices"][0]["token_ids"]) == usage["completion_tokens"] > 0
    counted = parse_counters(after) - parse_counters(before)
    assert counted.num_drafts > 0
    assert counted.num_drafts <= counted.num_draft_tokens <= NUM_SPECULATIVE_TOKENS * counted.num_drafts
    assert len(counted.accepted_per_position) == NUM_SPECULATIVE_TOKENS
    assert sum(counted.accepted_per_position) == counted.num_accepted_tokens
    progress = parse_progress(after)
    generated = progress.num_generation_tokens - parse_progress(before).num_generation_tokens
    assert generated == usage["completion_tokens"]
    assert progress.num_prompt_tokens >= usage["prompt_tokens"]
    assert (progress.num_requests_running, progress.num_requests_waiting) == (0, 0)
    assert progress.kv_cache_usage is not None
    assert 0.0 <= progress.kv_cache_usage <= 1.0


def _check_secrecy(api_key: str, token: str, log_path: Path) -> None:
    pids = living(token)
    assert len(pids) >= 3, "the engine is not found by its token: has setproctitle wiped its environment?"
    for pid in pids:
        with suppress(OSError):  # ended since it was listed
            assert api_key.encode() not in Path(f"/proc/{pid}/cmdline").read_bytes()
    assert api_key not in log_path.read_text()


@pytest.mark.slow
async def test_case_7_an_engine_that_hangs_is_replaced_and_the_shard_completes(
    model_path: str, token: str, tmp_path: Path
) -> None:
    """The engine's processes are stopped (SIGSTOP): the API server lives on, and its /health says 200."""
    vllm = VllmConfig(environment={"VLLM_CPU_KVCACHE_SPACE": "1"}, max_model_len=512, enforce_eager=True)
    launch = partial(
        VllmServer, vllm, model_path=model_path, served_name="smoke", log_path=tmp_path / "log", token=token
    )
    config = GenerateConfig(concurrency=4, temperature=0, seed=None, max_tokens=48)
    limits = ServersConfig(hang_timeout_seconds=HANG_TIMEOUT_SECONDS)
    rows_there: list[str] = []
    async with ServerPool([launch], config, limits) as pool:
        (replica,) = pool.replicas
        shard = asyncio.create_task(
            generate_rows(pool, prompts(16), config, on_row=lambda row: rows_there.append(row["sample_id"]))
        )
        await _until(lambda: len(rows_there) >= 2 or shard.done(), START_SECONDS)
        server = replica.server
        assert isinstance(server, VllmServer)
        root = server.base_url.removesuffix("/v1")
        before = living(token)
        for pid in before:
            if _has_engine(pid):
                os.kill(pid, signal.SIGSTOP)
        stopped = time.monotonic()
        await asyncio.sleep(5)
        there = len(rows_there)
        async with httpx.AsyncClient(trust_env=False, timeout=60) as client:
            assert (await client.get(f"{root}/health")).status_code == 200
            assert (await client.get(f"{root}/metrics")).status_code == 200
        await _until(lambda: not replica.serving, HANG_TIMEOUT_SECONDS + 15)
        told_seconds = time.monotonic() - stopped
        assert len(rows_there) == there < 16
        rows = await asyncio.wait_for(shard, START_SECONDS)
        assert set(living(token)).isdisjoint(before), "the hung one has ended"
    print(f"declared lost {told_seconds:.1f} s after the stop (limit {HANG_TIMEOUT_SECONDS:g} s)")
    assert told_seconds >= HANG_TIMEOUT_SECONDS - 5
    assert {row["status"] for row in rows} <= {"ok", "truncated"}
    assert sorted(rows_there) == sorted(f"id-p{number}" for number in range(16)), "each row once"
    assert living(token) == []


def _has_engine(pid: int) -> bool:
    try:
        name = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return False  # ended since it was listed
    return name.startswith(("VLLM::EngineCore", "VLLM::Worker"))


async def _until(condition: Callable[[], bool], seconds: float) -> None:
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110 - a process's doing, no event of ours
            await asyncio.sleep(0.1)
