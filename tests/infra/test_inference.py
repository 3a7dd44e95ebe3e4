"""Shards of prompts through a server that misbehaves on command: the window, resuming, and every row accounted for."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from pydantic import ValidationError

from infra.errors import ServerError, StageFailed
from infra.generation.progress import GenerationProgress
from infra.inference import (
    CompletionClient,
    GenerateConfig,
    PartialShard,
    generate_rows,
)
from tests.asking import QUICK, assert_failed, connect, prompt, prompts, wait_until
from tests.fakes.openai_server import FakeOpenAIServer, Reply

# --- what is asked


async def test_the_request_carries_the_sampling_the_samples_own_seed_and_asks_for_ids() -> None:
    config = GenerateConfig(temperature=0.6, top_p=0.95, max_tokens=99, extra_body={"top_k": 20}, **QUICK)
    rows = [prompt("a"), prompt("b", temperature=1.0, max_tokens=5), prompt("c", temperature=0)]
    async with FakeOpenAIServer() as server, CompletionClient(server.base_url, "key", "verifier", config) as client:
        made = await generate_rows(client, rows, config)
        sent = {body["messages"][0]["content"]: body for body in server.bodies}
    assert [row["temperature"] for row in made] == [0.6, 1.0, 0.0]
    wanted = {"temperature": 0.6, "top_p": 0.95, "max_tokens": 99, "top_k": 20, "seed": config.sample_seed("id-a")}
    fixed = {"model": "verifier", "n": 1, "stream": False, "return_token_ids": True}
    assert sent["a"] == wanted | fixed | {"messages": [{"role": "user", "content": "a"}]}
    assert (sent["b"]["temperature"], sent["b"]["max_tokens"], sent["b"]["top_p"]) == (1.0, 5, 0.95)
    assert sent["b"]["seed"] != sent["a"]["seed"]
    assert "seed" not in sent["c"]
    assert GenerateConfig(seed=None).sample_seed("id-a") is None


def test_only_what_changes_the_rows_is_content() -> None:
    how = GenerateConfig(concurrency=4, timeout_seconds=9, max_attempts=2, max_failed_share=0.5)
    assert how.content() == {}
    assert GenerateConfig(temperature=0.0, extra_body={"top_k": 1}).content() == {
        "temperature": 0.0,
        "extra_body": {"top_k": 1},
    }


@pytest.mark.parametrize(
    "wrong", [{"temperature": -1}, {"concurrency": 0}, {"extra_body": {"n": 2}}, {"extra_body": {"temperature": 1}}]
)
def test_a_wrong_config_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        GenerateConfig(**wrong)


async def test_a_prompt_that_is_no_json_is_a_failed_row() -> None:
    async with FakeOpenAIServer() as server, connect(server) as client:
        rows = [prompt("a") | {"messages": "{"}, prompt("b") | {"sampling": "nothing"}, prompt("c")]
        made = await generate_rows(client, rows, GenerateConfig())
    assert [row["status"] for row in made] == ["failed", "failed", "ok"]
    assert_failed(made[0], "no JSON")


# --- the window


async def test_the_window_is_full_and_never_more_over_all_shards() -> None:
    """Six shards of ten rows at once: the server answers only while 8 requests are there, until all 60 have come.

    A slot left empty, at a shard's end for example, would stop everything.
    """
    num_tasks = []

    async def until_full() -> None:
        num_tasks.append(len(asyncio.all_tasks()))
        await wait_until(lambda: server.in_flight == 8 or server.requests.total() == 60)

    async with FakeOpenAIServer() as server, connect(server, concurrency=8) as client:
        server.hold = until_full
        shards = [prompts(10, shard=f"{shard}-") for shard in "abcdef"]
        made = await asyncio.gather(*(generate_rows(client, rows, GenerateConfig()) for rows in shards))
        order = [body["messages"][0]["content"] for body in server.bodies]
    assert server.max_in_flight == 8
    assert max(num_tasks) < 6 + 8 + 8 + 10  # shards, requests, the fake's connections, and some more: not 60
    assert [row["sample_id"] for rows in made for row in rows] == [
        row["sample_id"] for rows in shards for row in rows
    ]
    # Slots are given in order; requests of one window may overtake each other on their way.
    asked = [row["sample_id"].removeprefix("id-") for rows in shards for row in rows]
    assert all(abs(order.index(name) - asked.index(name)) < 8 for name in asked)


async def test_the_next_shard_starts_while_the_last_row_of_this_one_runs() -> None:
    async with FakeOpenAIServer() as server, connect(server, concurrency=4, timeout_seconds=120) as client:
        server.script("a4", Reply(hang=True))
        slow = asyncio.create_task(generate_rows(client, prompts(5, "a"), GenerateConfig()))
        await asyncio.sleep(0)
        rows = await generate_rows(client, prompts(50, "b"), GenerateConfig())
        assert len(rows) == 50
        assert not slow.done()
        slow.cancel()
        with pytest.raises(asyncio.CancelledError):
            await slow


async def test_a_cancelled_shard_frees_its_slots() -> None:
    slow = FakeOpenAIServer(lambda _p, _n: Reply(latency_seconds=0.2))
    async with slow as server, connect(server, concurrency=2) as client:
        shard = asyncio.create_task(generate_rows(client, prompts(20), GenerateConfig()))
        await asyncio.sleep(0.1)
        shard.cancel()
        with pytest.raises(asyncio.CancelledError):
            await shard
        assert (client.in_flight, client.turn.locked()) == (0, False)
        assert len(await generate_rows(client, prompts(2, "q"), GenerateConfig())) == 2


# --- a lost server


async def test_a_killed_server_keeps_the_finished_rows_and_the_next_one_makes_the_rest() -> None:
    config = GenerateConfig(**QUICK, concurrency=4)
    partial, progress = PartialShard(), GenerationProgress(num_rows=30)
    first = FakeOpenAIServer(lambda name, _n: Reply(hang=name in ("p7", "p8")))
    second = FakeOpenAIServer()
    async with first, connect(first, concurrency=4) as client:
        running = asyncio.create_task(
            generate_rows(client, prompts(30), config, on_row=progress.add, partial=partial)
        )
        await wait_until(lambda: progress.rows_done == 28)
        await first.stop()
        with pytest.raises(ServerError):
            await running
    async with second, connect(second) as client:
        rows = await generate_rows(client, prompts(30), config, on_row=progress.add, partial=partial)
    assert [row["sample_id"] for row in rows] == [f"id-p{index}" for index in range(30)]
    assert second.requests == {"p7": 1, "p8": 1}
    assert progress.rows_by_status == {"ok": 30}


# --- the whole


async def test_a_stage_that_cannot_be_accepted_any_more_stops_early() -> None:
    without_ids = FakeOpenAIServer(lambda _p, _n: Reply(token_ids=None))
    async with without_ids as server, connect(server, concurrency=2) as client:
        progress = GenerationProgress(num_rows=100, max_failed_share=0.05)
        with pytest.raises(StageFailed, match="6 of 100 rows"):
            await generate_rows(client, prompts(100), GenerateConfig(), on_row=progress.add)
    assert server.requests.total() < 12


def test_progress_tells_rate_and_time_left() -> None:
    progress = GenerationProgress(num_rows=40)
    assert progress.eta_seconds is None
    progress.started -= 10
    for _ in range(10):
        progress.add({"status": "ok", "num_completion_tokens": 50})
    assert progress.tokens_per_second == pytest.approx(50, rel=0.1)
    assert progress.eta_seconds == pytest.approx(30, rel=0.1)
