"""What the generation client itself costs for each request, and whether it keeps memory.

    .venv/bin/python benchmarks/client.py

The server is the tests' fake, in a process of its own, answering at once with 100 words (501 token ids), so the
client is what is busy. Shards of prompts go through `generate_rows` and are dropped, as a stage does it. The first
shards fill caches and connections; time and memory are measured over the others.
"""

from __future__ import annotations

import asyncio
import gc
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil

from infra.inference import CompletionClient, GenerateConfig, generate_rows

HOME = Path(__file__).resolve().parents[1]
SHARD_SIZE = 256
NUM_WARMUP_SHARDS = 4
NUM_SHARDS = 20
WORDS = 100


def main() -> None:
    command = [sys.executable, "-m", "tests.fakes.openai_server", "--words", str(WORDS)]
    with subprocess.Popen(command, cwd=HOME, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            base_url = server.stdout.readline().strip()
            seconds_per_request, growth_bytes = asyncio.run(measure(base_url))
        finally:
            server.terminate()
    print(f"client_ms_per_request={seconds_per_request * 1e3:.3f} rss_growth_mb={growth_bytes / 1e6:.1f}")


async def measure(base_url: str) -> tuple[float, int]:
    """Seconds for each request, and bytes by which this process has grown meanwhile."""
    config = GenerateConfig()
    async with CompletionClient(base_url, "key", "verifier", config) as client:
        for shard in range(NUM_WARMUP_SHARDS):
            await answer(client, shard, config)
        gc.collect()
        resident_bytes = psutil.Process().memory_info().rss
        began = time.perf_counter()
        for shard in range(NUM_SHARDS):
            await answer(client, NUM_WARMUP_SHARDS + shard, config)
        seconds = time.perf_counter() - began
        gc.collect()
        growth_bytes = psutil.Process().memory_info().rss - resident_bytes
    print(f"{NUM_SHARDS * SHARD_SIZE} requests, {config.concurrency} in flight, in {seconds:.1f} s")
    return seconds / (NUM_SHARDS * SHARD_SIZE), growth_bytes


async def answer(client: CompletionClient, shard: int, config: GenerateConfig) -> None:
    rows = await generate_rows(client, [prompt(f"{shard}-{index}") for index in range(SHARD_SIZE)], config)
    assert all(row["status"] == "ok" for row in rows)


def prompt(name: str) -> dict[str, Any]:
    return {
        "sample_id": name,
        "messages": json.dumps([{"role": "user", "content": f"Question {name}"}]),
        "dataset": "benchmark",
        "domain": "general",
        "split": "train",
        "sampling": "{}",
    }


if __name__ == "__main__":
    main()
