"""Every prompt accounted for: a seeded mix of all that a server can do wrong, and what the policy says of each."""

from __future__ import annotations

import asyncio
import io
import random
from collections import Counter
from dataclasses import dataclass

import pyarrow.parquet as pq
import pytest

from infra.generation.progress import GenerationProgress
from infra.generation.responses import status_counts, to_parquet
from infra.inference import CompletionClient, GenerateConfig, generate_rows
from tests.asking import PROBE, QUICK, prompts
from tests.fakes.openai_server import FakeOpenAIServer, Reply, completion_body

MAX_ATTEMPTS = 4
SHARD_SIZE = 60
BIG_BYTES = 10_000_000


def big_body() -> bytes:
    """A sound answer of 10 MB, most of it thinking."""
    reply = Reply(reasoning="BIG", token_ids=[1, 2, 3], completion_tokens=3)
    body = completion_body({"messages": [{"content": "q"}], "model": "verifier", "return_token_ids": True}, reply)
    return body.replace(b"BIG", b"x" * BIG_BYTES)


# Asked again.
FAULTS = {
    "429": Reply(status=429, headers={"Retry-After": "0.05"}),
    "500": Reply(status=500),
    "503": Reply(status=503),
    "cut in mid-body": Reply(cut=True, text="x" * 1000),
    "dropped": Reply(drop=True),
    "garbage": Reply(body=b'{"choices": [{"mess'),
    "other JSON": Reply(body=b"[[]]"),
    "given up by the engine": Reply(finish_reason="abort"),
}
# Asked again after the time limit; `/health` says 200 all the while.
HANG = Reply(hang=True)
# The row, at once: (reply, status).
ENDS = {
    "good": (Reply(), "ok"),
    "reasoning": (Reply(reasoning="hm"), "ok"),
    "reasoning_content": (Reply(reasoning="hm", reasoning_field="reasoning_content"), "ok"),
    "null content": (Reply(text=None, reasoning="hm"), "ok"),
    "cut by max_tokens": (Reply(finish_reason="length"), "truncated"),
    "null ids": (Reply(token_ids=None), "failed"),
    "null prompt ids": (Reply(prompt_token_ids=None), "failed"),
    "wrong count": (Reply(completion_tokens=99), "failed"),
    "wrong prompt count": (Reply(prompt_tokens=99), "failed"),
    "context too long": (Reply(status=400), "failed"),
}


@dataclass(frozen=True)
class Case:
    """What the server does to one prompt, and what must come of it."""

    replies: tuple[Reply, ...]
    status: str
    num_requests: int


def draw(dice: random.Random, timeout_seconds: float, big: Reply) -> Case:
    """Up to four faults, then an end, which is never seen after the fourth."""
    faults = [dice.choice(list(FAULTS.values())) for _ in range(dice.choice((0, 0, 0, 0, 0, 1, 1, 2, 3, 4)))]
    if faults and dice.random() < 0.03:
        faults[dice.randrange(len(faults))] = HANG
    end, status = dice.choice(list(ENDS.values()))
    match dice.randrange(200):
        case 0:
            end, status = big, "ok"
        case 1:  # 601 s where the limit is 1800: an OpenAI client as it comes would give up and ask nine times
            end, status = Reply(latency_seconds=timeout_seconds * 601 / 1800), "ok"
    if len(faults) >= MAX_ATTEMPTS:
        status = "failed"
    return Case((*faults, end), status, min(len(faults) + 1, MAX_ATTEMPTS))


@pytest.mark.parametrize(
    ("num_prompts", "timeout_seconds"),
    [pytest.param(300, 6.0, marks=pytest.mark.seconds), pytest.param(2000, 12.0, marks=pytest.mark.slow)],
)
async def test_a_seeded_mix_of_faults(num_prompts: int, timeout_seconds: float) -> None:
    """Each id once; rows in = ok + truncated + failed; requests sent = what the policy says, and nothing hidden."""
    dice, big = random.Random(7), Reply(body=big_body())
    cases = {f"p{index}": draw(dice, timeout_seconds, big) for index in range(num_prompts)}
    changes = {"timeout_seconds": timeout_seconds, "max_attempts": MAX_ATTEMPTS, "gone_after_seconds": 5.0}
    config = GenerateConfig(**(QUICK | changes), concurrency=128)
    progress = GenerationProgress(num_rows=num_prompts)
    rows = prompts(num_prompts)
    shards = [rows[start : start + SHARD_SIZE] for start in range(0, num_prompts, SHARD_SIZE)]
    with FakeOpenAIServer() as server:
        for name, case in cases.items():
            server.script(name, *case.replies)
        async with CompletionClient(server.base_url, "key", "verifier", config) as client:
            made = await asyncio.gather(*(generate_rows(client, shard, config, progress.add) for shard in shards))
    flat = [row for shard in made for row in shard]
    assert [row["sample_id"] for row in flat] == [row["sample_id"] for row in rows]
    assert {row["sample_id"].removeprefix("id-"): row["status"] for row in flat} == {
        name: case.status for name, case in cases.items()
    }
    del server.requests[PROBE]
    assert server.requests == {name: case.num_requests for name, case in cases.items()}
    assert server.max_in_flight <= config.concurrency
    counts = status_counts(flat)
    assert counts == {status: sum(case.status == status for case in cases.values()) for status in counts}
    assert sum(counts.values()) == num_prompts
    assert progress.rows_by_status == Counter(counts)
    assert progress.num_completion_tokens == sum(row["num_completion_tokens"] for row in flat)
    assert sum(pq.read_table(io.BytesIO(to_parquet(shard))).num_rows for shard in made) == num_prompts
    assert max(len(row["reasoning"] or "") for row in flat) == BIG_BYTES
