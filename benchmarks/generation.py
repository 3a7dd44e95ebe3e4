"""How near generation keeps a server to what it can do, and what the client itself costs.

    .venv/bin/python benchmarks/generation.py [--prompts N] [--max-tokens N] [--rounds N]

One real vLLM server with the demo's verifier, the same prompts, greedy, 64 requests in flight, in interleaved
rounds whose order turns: our stage (`generate_rows` over a pool, and the rows encoded as Parquet), vLLM's own load
generator (`vllm.benchmarks.serve`), and `speculators regenerate-responses`. Each is measured from its first request
to its last answer, by its own clock and with its own count of output tokens; start-up and imports are in none. Each
ratio is the median of the rounds' ratios. vLLM's generator can only stream, which costs the server more. The
prompts are in the prefix cache from a first, unmeasured pass.

Then the client alone: against the tests' fake server, in a process of its own, that answers at once with 100 words
(501 token ids), CPU time of this process for each request, and bytes by which it grows over 20,000 of them. The
first shards, which fill caches and connections, count in neither.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import psutil

from infra.generation.responses import to_parquet
from infra.inference import GenerateConfig, generate_rows
from infra.processes import process_token
from infra.serving.config import ServersConfig
from infra.serving.external import ExternalServer
from infra.serving.pool import ServerPool
from infra.verifiers.verifier import VerifierConfig, materialize
from infra.vllm_server import VllmConfig, VllmServer

HOME = Path(__file__).resolve().parents[1]
CONCURRENCY = 64
SHARD_SIZE = 64
NUM_CLIENT_REQUESTS = 20_000
CLIENT_SHARD_SIZE = 250
NUM_WARMUP_SHARDS = 8
WORDS = 100

# Both read the API key from their environment: it belongs in no command line.
# The file is read here, for vLLM's own reader wants pandas, which its CPU package does not bring.
VLLM_BENCH = """
import argparse, json, sys
from vllm.benchmarks.datasets import CustomDataset
from vllm.benchmarks.serve import add_cli_args, main
def load_data(self):
    with open(self.dataset_path) as file:
        self.data = [json.loads(line) for line in file]
CustomDataset.load_data = load_data
parser = argparse.ArgumentParser()
add_cli_args(parser)
main(parser.parse_args(sys.argv[1:]))
"""
# It has no option for an API key; and what it counts, it only logs.
SPECULATORS = """
import importlib, json, os, time, aiohttp, typer
module = importlib.import_module("speculators.cli.regenerate_responses")
session = aiohttp.ClientSession
key = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
aiohttp.ClientSession = lambda *, headers=None, **more: session(headers={**(headers or {}), **key}, **more)
def report(stats):
    said = {name: stats[name] for name in ("completion_tokens", "errors")}
    print("RESULT " + json.dumps({**said, "seconds": time.perf_counter() - stats["start_time"]}))
module._log_summary = report
typer.run(module.regenerate_responses)
"""

Measure = Callable[[], Awaitable[float]]
"""One pass over all prompts; returns output tokens per second."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--prompts", type=int, default=160)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=6)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="draftsmith-benchmark-") as folder:
        questions = write_prompts(Path(folder), options.prompts)
        ratios = asyncio.run(compare(Path(folder), questions, options.max_tokens, options.rounds))
    milliseconds, growth_mb = client_cost()
    print(
        f"ratio_vs_vllm_bench={ratios['vllm']:.3f} ratio_vs_speculators={ratios['speculators']:.3f} "
        f"client_ms_per_request={milliseconds:.3f} rss_growth_mb={growth_mb:.1f}"
    )


def write_prompts(folder: Path, count: int) -> list[str]:
    """The questions, also as the files that the two others read."""
    lines = (HOME / "deployments/prompts/general.jsonl").read_text(encoding="utf-8").splitlines()[:count]
    questions = [str(json.loads(line)["prompt"]) for line in lines]
    for name, row in (
        ("vllm", lambda question: {"prompt": question}),
        ("speculators", lambda question: {"messages": [{"role": "user", "content": question}]}),
    ):
        text = "".join(json.dumps(row(question)) + "\n" for question in questions)
        (folder / f"{name}.jsonl").write_text(text, encoding="utf-8")
    return questions


async def compare(folder: Path, questions: list[str], max_tokens: int, rounds: int) -> dict[str, float]:
    """Our rate over each of the others'."""
    verifier = await asyncio.to_thread(materialize, VerifierConfig())
    config = VllmConfig(environment={"VLLM_CPU_KVCACHE_SPACE": "2"}, max_model_len=1024, enforce_eager=True)
    # The tokenizer is loaded by the model's name, so the name must be its path.
    async with VllmServer(
        config,
        model_path=verifier.path,
        served_name=str(verifier.path),
        log_path=folder / "server.log",
        token=process_token("benchmark", str(folder)),
    ) as server:
        await ours(server, questions, max_tokens=1)
        measures: dict[str, Measure] = {
            "ours": lambda: ours(server, questions, max_tokens),
            "vllm": lambda: vllm_bench(server, config, folder, len(questions), max_tokens),
            "speculators": lambda: speculators(server, folder, max_tokens),
        }
        rates: dict[str, list[float]] = {name: [] for name in measures}
        for turn in range(rounds):
            order = [*measures][turn // 2 % 3 :] + [*measures][: turn // 2 % 3]
            for name in order[:: 1 if turn % 2 == 0 else -1]:
                rates[name].append(await measures[name]())
            print(f"round {turn + 1}: " + ", ".join(f"{name} {rates[name][-1]:.1f} tokens/s" for name in order))
    ratios = {}
    for name in ("vllm", "speculators"):
        rounds_ratios = [mine / theirs for mine, theirs in zip(rates["ours"], rates[name], strict=True)]
        ratios[name] = statistics.geometric_mean(rounds_ratios)
        print(f"ours over {name}: {', '.join(f'{ratio:.3f}' for ratio in rounds_ratios)}")
    return ratios


async def ours(server: VllmServer, questions: list[str], max_tokens: int) -> float:
    """The stage's own path, shards side by side on one pool."""
    config = GenerateConfig(temperature=0, max_tokens=max_tokens, seed=None, concurrency=CONCURRENCY)
    rows = [prompt(f"q{index}", question) for index, question in enumerate(questions)]
    shards = [rows[start : start + SHARD_SIZE] for start in range(0, len(rows), SHARD_SIZE)]

    async def make(shard: list[dict[str, Any]]) -> int:
        made = await generate_rows(pool, shard, config)
        assert all(row["status"] != "failed" for row in made), made
        await asyncio.to_thread(to_parquet, made)
        return sum(row["num_completion_tokens"] for row in made)

    @contextlib.asynccontextmanager
    async def launch() -> AsyncIterator[VllmServer]:
        yield server

    async with ServerPool([launch], config, ServersConfig()) as pool:
        began = time.perf_counter()
        tokens = sum(await asyncio.gather(*map(make, shards)))
        return tokens / (time.perf_counter() - began)


async def vllm_bench(
    server: VllmServer, config: VllmConfig, folder: Path, num_prompts: int, max_tokens: int
) -> float:
    """vLLM's own load generator over the chat endpoint, which templates the prompts as it does for ours."""
    result = folder / "bench.json"
    command = [str(config.interpreter()), "-c", VLLM_BENCH, "--backend", "openai-chat"]
    command += ["--base-url", server.base_url.removesuffix("/v1"), "--endpoint", "/v1/chat/completions"]
    command += ["--model", server.served_name, "--max-concurrency", str(CONCURRENCY), "--temperature", "0"]
    command += ["--dataset-name", "custom", "--dataset-path", str(folder / "vllm.jsonl"), "--skip-chat-template"]
    command += ["--num-prompts", str(num_prompts), "--custom-output-len", str(max_tokens)]
    command += ["--save-result", "--result-dir", str(folder), "--result-filename", result.name]
    await run(command, server.api_key)
    said = json.loads(result.read_text(encoding="utf-8"))
    assert said["completed"] == num_prompts, said
    return float(said["output_throughput"])


async def speculators(server: VllmServer, folder: Path, max_tokens: int) -> float:
    """`speculators regenerate-responses`, which like ours asks for the token ids and keeps them."""
    outfile = folder / "regenerated.jsonl"
    outfile.unlink(missing_ok=True)
    command = [sys.executable, "-c", SPECULATORS, "--endpoint", f"{server.base_url}/chat/completions"]
    command += ["--model", server.served_name, "--dataset", str(folder / "speculators.jsonl")]
    command += ["--concurrency", str(CONCURRENCY), "--max-tokens", str(max_tokens)]
    command += ["--sampling-params", '{"temperature": 0}', "--outfile", str(outfile)]
    output = await run(command, server.api_key)
    said = json.loads(output.rpartition("RESULT ")[2].splitlines()[0])
    assert said["errors"] == 0, output
    return float(said["completion_tokens"] / said["seconds"])


async def run(command: list[str], api_key: str) -> str:
    """The output of a command that must succeed."""
    # Nothing of ours may shadow what the others import; a proxy is for the outside world.
    environment = {
        **os.environ,
        "PYTHONPATH": "",
        "OPENAI_API_KEY": api_key,
        "HF_HUB_OFFLINE": "1",
        "NO_PROXY": "127.0.0.1",
    }
    process = await asyncio.create_subprocess_exec(
        *command, env=environment, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    try:
        output = (await process.communicate())[0].decode(errors="replace")
    finally:
        if process.returncode is None:
            process.kill()
    if process.returncode != 0:
        raise RuntimeError(f"{command[0]} ended with {process.returncode}:\n{output[-4000:]}")
    return output


def client_cost() -> tuple[float, float]:
    """Milliseconds of CPU time for each request, and megabytes by which this process has grown meanwhile."""
    command = [sys.executable, "-m", "tests.fakes.openai_server", "--words", str(WORDS)]
    with subprocess.Popen(command, cwd=HOME, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            return asyncio.run(measure_client(server.stdout.readline().strip()))
        finally:
            server.terminate()


async def measure_client(base_url: str) -> tuple[float, float]:
    config = GenerateConfig()

    @contextlib.asynccontextmanager
    async def launch() -> AsyncIterator[ExternalServer]:
        async with ExternalServer(base_url, "key", "verifier", patience_seconds=10) as server:
            yield server

    async def answer(number: int) -> None:
        shard = [prompt(f"{number}-{index}", f"Question {number}-{index}") for index in range(CLIENT_SHARD_SIZE)]
        assert all(row["status"] == "ok" for row in await generate_rows(pool, shard, config))

    async def answer_all(first: int, count: int) -> None:
        """Two shards at a time, as a stage of such shards has them."""
        for number in range(first, first + count, 2):
            await asyncio.gather(answer(number), answer(number + 1))
        gc.collect()

    count = NUM_CLIENT_REQUESTS // CLIENT_SHARD_SIZE
    async with ServerPool([launch], config, ServersConfig()) as pool:
        await answer_all(0, NUM_WARMUP_SHARDS)
        resident_bytes, began, cpu = psutil.Process().memory_info().rss, time.perf_counter(), time.process_time()
        await answer_all(NUM_WARMUP_SHARDS, count)
        cpu_seconds, seconds = time.process_time() - cpu, time.perf_counter() - began
        growth_bytes = psutil.Process().memory_info().rss - resident_bytes
    print(f"{NUM_CLIENT_REQUESTS} requests, {config.concurrency} in flight, in {seconds:.1f} s")
    return cpu_seconds / NUM_CLIENT_REQUESTS * 1e3, growth_bytes / 1e6


def prompt(name: str, question: str) -> dict[str, Any]:
    return {
        "sample_id": name,
        "messages": json.dumps([{"role": "user", "content": question}]),
        "dataset": "benchmark",
        "domain": "general",
        "split": "train",
        "sampling": "{}",
    }


if __name__ == "__main__":
    main()
