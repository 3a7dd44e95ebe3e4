"""A speculator counts only when vLLM drafts with it and still says what the verifier alone would say."""

from __future__ import annotations

import json
import os
import sys
import uuid
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from infra import vllm_server
from infra.drafts.smoke_serve import GREEDY, MAX_TOKENS, NUM_REQUESTS, SmokeServe, serve_once, smoke_prompts
from infra.errors import ServerError, StageFailed
from infra.evaluation.config import EvaluateConfig
from infra.fingerprint import stage_content
from infra.locations import project_home
from infra.manifest import StageRef
from infra.processes import living, process_token
from infra.verifiers.verifier import Verifier
from infra.vllm_config import VllmConfig
from infra.vllm_metrics import SpeculationCounters, parse_counters
from tasks.smoke_serve import PURPOSE, smoke_serve
from tests.asking import prompt, wait_until
from tests.fakes.openai_server import FakeOpenAIServer, Reply

TIE_NATS = 0.5


@dataclass
class Server:
    """The fake as `serve_once` sees a server."""

    fake: FakeOpenAIServer
    api_key: str = "key"
    served_name: str = "verifier"

    @property
    def base_url(self) -> str:
        return self.fake.base_url

    async def counters(self) -> SpeculationCounters:
        async with httpx.AsyncClient(trust_env=False) as client:
            page = await client.get(self.base_url.removesuffix("/v1") + "/metrics")
        return parse_counters(page.text)


@pytest.fixture
async def fake(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[FakeOpenAIServer]:
    monkeypatch.setattr("infra.evaluation.measurement.COUNTER_INTERVAL_SECONDS", 0.001)
    async with FakeOpenAIServer() as server:
        server.speculates = True
        yield server


async def served(fake: FakeOpenAIServer) -> SmokeServe:
    return await serve_once(Server(fake), smoke_prompts([]), tie_nats=TIE_NATS, timeout_seconds=5.0)


async def test_a_good_one_passes_with_its_near_ties_counted(fake: FakeOpenAIServer) -> None:
    fake.gap_nats = lambda tokens, place: 0.25 if place == len(tokens) - 2 else 0.0
    found = await served(fake)
    num_tokens = len(b"an answer") + 1
    assert (found.num_requests, found.num_tokens) == (NUM_REQUESTS, NUM_REQUESTS * num_tokens)
    assert found.num_near_ties == NUM_REQUESTS
    assert found.largest_gap_nats == pytest.approx(0.25)
    assert found.acceptance_length == 3.0
    assert len(fake.scored) == NUM_REQUESTS


async def test_requests_are_greedy_together_and_free_of_penalties(fake: FakeOpenAIServer) -> None:
    async def until_all_are_there() -> None:
        await wait_until(lambda: fake.max_in_flight == NUM_REQUESTS, 4)

    fake.hold = until_all_are_there
    await served(fake)
    assert fake.max_in_flight == NUM_REQUESTS
    for body in fake.bodies:
        assert body.items() >= GREEDY.items()
        assert "seed" not in body
    assert GREEDY["repetition_penalty"] == 1.0


async def test_a_token_that_is_not_the_verifiers_fails_it_wherever_it_stands(fake: FakeOpenAIServer) -> None:
    asked: list[int] = []

    def one_wrong(tokens: list[int], place: int) -> float:
        asked.append(place)
        return 0.75 if len(fake.scored) == 4 and place == len(tokens) - 1 else 0.0

    fake.gap_nats = one_wrong
    with pytest.raises(StageFailed, match=r"1 of 100 tokens .* \(token 10 of answer 4 the first, by 0.75\)"):
        await served(fake)
    assert asked


async def test_one_that_nothing_is_drafted_with_fails(fake: FakeOpenAIServer) -> None:
    fake.speculates = False
    with pytest.raises(StageFailed, match="drafts nothing"):
        await served(fake)


async def test_a_refused_request_fails_it_and_a_dead_server_is_none_of_its_fault(fake: FakeOpenAIServer) -> None:
    fake.reply = lambda _prompt, _nth: Reply(status=400, error="shape mismatch")
    with pytest.raises(StageFailed, match=r"refuses request .*shape mismatch"):
        await served(fake)
    fake.reply = lambda _prompt, _nth: Reply()
    fake.scoring = (500, b"engine dead")
    with pytest.raises(ServerError, match="engine dead"):
        await served(fake)


async def test_an_answer_that_fills_the_context_is_scored_without_its_last_token(fake: FakeOpenAIServer) -> None:
    fake.reply = lambda _prompt, _nth: Reply(text="cut", finish_reason="length")
    found = await served(fake)
    assert found.num_tokens == NUM_REQUESTS * len(b"cut")
    fake.reply = lambda _prompt, _nth: Reply(text="x" * (MAX_TOKENS - 1), finish_reason="length")
    assert (await served(fake)).num_tokens == NUM_REQUESTS * MAX_TOKENS


def test_the_shortest_held_out_prompts_are_asked_first_turns_only() -> None:
    rows = [prompt("x" * length) for length in range(30, 15, -1)]
    rows += [rows[0], {**prompt("a"), "messages": json.dumps([{"role": "user", "content": text} for text in "ab"])}]
    chosen = smoke_prompts(rows)
    assert len(chosen) == NUM_REQUESTS
    assert [one[-1]["content"] for one in chosen[:2]] == ["x" * 16, "x" * 17]
    assert [len(one) for one in chosen] == [1] * NUM_REQUESTS
    few = smoke_prompts(rows[:3])
    assert [len(one[0]["content"]) for one in few[:3]] == [28, 29, 30]
    assert len({one[0]["content"] for one in few}) == NUM_REQUESTS


# --- the task: a real process in vLLM's place ---

# As vLLM's interpreter it gets `-m vllm.entrypoints.openai.api_server --host … --port … --served-model-name …`.
STAND_IN = r"""
import asyncio, json, os, sys
from pathlib import Path
sys.path.insert(0, os.environ["FAKE_HOME"])
from tests.fakes.openai_server import FakeOpenAIServer
Path(os.environ["FAKE_FOLDER"], "argv.json").write_text(json.dumps(sys.argv))
options = dict(zip(sys.argv[3:], sys.argv[4:]))
exec(os.environ["FAKE_FAULT"])

async def main():
    server = FakeOpenAIServer(
        model=options["--served-model-name"], api_key=os.environ["VLLM_API_KEY"], port=int(options["--port"])
    )
    server.speculates = True
    server.gap_nats = lambda tokens, place: float(os.environ["FAKE_GAP"])
    async with server:
        await asyncio.Event().wait()

asyncio.run(main())
"""


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StageRef]:
    monkeypatch.setenv("DRAFTSMITH_CACHE", str(tmp_path))
    monkeypatch.setattr(vllm_server, "POLL_SECONDS", 0.05)
    path = tmp_path / "python"
    path.write_text(f"#!{sys.executable}\n{STAND_IN}")
    path.chmod(0o755)
    content = stage_content("drafts", 1, {"test": uuid.uuid4().hex}, {}, {})
    stage = StageRef(str(tmp_path), "drafts", content)
    yield stage
    left = living(process_token(stage.uri, PURPOSE))
    for pid in left:
        os.kill(pid, 9)
    assert left == []


async def run_task(stage: StageRef, tmp_path: Path, *, fault: str = "", gap: float = 0.0) -> SmokeServe:
    environment = {
        "FAKE_HOME": str(project_home()), "FAKE_FOLDER": str(tmp_path), "FAKE_FAULT": fault, "FAKE_GAP": str(gap)
    }  # fmt: skip
    vllm = VllmConfig(
        python=str(tmp_path / "python"), environment=environment, extra_args=["--x"], startup_timeout_seconds=60.0
    )
    shape = {"hidden_size": 32, "num_hidden_layers": 4, "vocab_size": 96, "max_position_embeddings": 128}
    verifier = Verifier(name="the-verifier", revision="revision", path=tmp_path, **shape)
    evaluate = EvaluateConfig(num_speculative_tokens=5)
    arguments: Any = (stage, tmp_path / "export", smoke_prompts([]), verifier, vllm, evaluate, TIE_NATS, False)
    return await smoke_serve.fn(*arguments)


@pytest.mark.seconds
async def test_vllm_is_started_as_the_evaluation_starts_it_and_ends(stage: StageRef, tmp_path: Path) -> None:
    found = await run_task(stage, tmp_path)
    assert found.num_requests == NUM_REQUESTS
    argv = json.loads((tmp_path / "argv.json").read_text())
    assert {"--x", "--no-enable-prefix-caching"} < set(argv)
    speculation = json.loads(argv[argv.index("--speculative-config") + 1])
    assert speculation == {"method": "eagle3", "model": str(tmp_path / "export"), "num_speculative_tokens": 5}


@pytest.mark.seconds
async def test_one_that_vllm_cannot_load_shows_vllms_own_words(stage: StageRef, tmp_path: Path) -> None:
    with pytest.raises(ServerError, match=r"fc\.weight does not fit"):
        await run_task(stage, tmp_path, fault="raise ValueError('fc.weight does not fit')")


@pytest.mark.seconds
async def test_wrong_answers_end_the_server_too(stage: StageRef, tmp_path: Path) -> None:
    with pytest.raises(StageFailed, match="100 of 100 tokens"):
        await run_task(stage, tmp_path, gap=2.0)
