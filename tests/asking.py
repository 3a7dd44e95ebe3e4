"""What the tests of generation share: prompts, quick time limits, and one prompt through a spoiled server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

from infra.generation.completion_client import ClientConfig, CompletionClient
from infra.inference import GenerateConfig, generate_rows
from tests.fakes.openai_server import FakeOpenAIServer, Reply

QUICK: dict[str, Any] = {"backoff_seconds": 0.01, "timeout_seconds": 5.0, "gone_after_seconds": 0.3}
PROBE = "Say yes."
"""The prompt by which the client asks for one token."""


def prompt(name: str, **sampling: Any) -> dict[str, Any]:
    return {
        "sample_id": f"id-{name}",
        "messages": json.dumps([{"role": "user", "content": name}]),
        "dataset": "test",
        "domain": "general",
        "split": "train",
        "sampling": json.dumps(sampling),
    }


def prompts(count: int, shard: str = "p") -> list[dict[str, Any]]:
    return [prompt(f"{shard}{index}") for index in range(count)]


def connect(server: FakeOpenAIServer, **changes: Any) -> CompletionClient:
    return CompletionClient(server.base_url, "key", server.model, ClientConfig(**(QUICK | changes)))


async def one_row(reply: Reply, **changes: Any) -> dict[str, Any]:
    """The row of one prompt whose every request gets `reply`."""
    config = GenerateConfig(**(QUICK | changes))
    async with FakeOpenAIServer() as server, CompletionClient(server.base_url, "key", "verifier", config) as client:
        server.script("hello", reply)
        (row,) = await generate_rows(client, [prompt("hello")], config)
        server_saw = server.requests["hello"]
    return row | {"requests": server_saw}


def assert_failed(row: dict[str, Any], *words: str) -> None:
    assert row["status"] == "failed"
    assert (row["input_ids"], row["loss_mask"]) == ([], [])
    assert (row["num_prompt_tokens"], row["num_completion_tokens"]) == (0, 0)
    for word in words:
        assert word in row["error"]


async def wait_until(condition: Callable[[], bool], timeout_seconds: float = 10.0) -> None:
    """Waits for something another task brings about."""
    async with asyncio.timeout(timeout_seconds):
        while not condition():  # noqa: ASYNC110 - what is waited for has no event
            await asyncio.sleep(0.01)
