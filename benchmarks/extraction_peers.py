"""The others that benchmarks/extraction.py measures beside ours: speculators against a server, and bare vLLM.

Each is a context that has its engine loaded and yields a function which makes one pass over all conversations.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import json
import os
import re
import shutil
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import torch

from infra.processes import process_token
from infra.verifiers.verifier import Verifier, default_layer_ids
from infra.vllm_config import VllmConfig
from infra.vllm_server import VllmServer

HOME = Path(__file__).resolve().parents[1]
SHARED_ENGINE_ARGS = ("max_model_len", "gpu_memory_utilization", "enforce_eager")

# It has no option for an API key, and logs how long it took.
SPECULATORS = """
import os, sys, openai
client = openai.AsyncOpenAI
openai.AsyncOpenAI = lambda *, api_key, **more: client(api_key=os.environ["OPENAI_API_KEY"], **more)
sys.argv[0] = "speculators"
from speculators.__main__ import app
app()
"""
# Reads its set-up, then generates once for each line.
BARE_VLLM = """
import json, os, sys, time
from vllm import LLM, SamplingParams
from vllm.config import KVTransferConfig
setup = json.loads(sys.stdin.readline())
llm = LLM(**setup["engine"], kv_transfer_config=KVTransferConfig(**setup["connector"]))
prompts = [{"prompt_token_ids": ids} for ids in setup["input_ids"]]
params = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False)
folder = setup["connector"]["kv_connector_extra_config"]["shared_storage_path"]
def written(state_bytes):
    try:
        return sum(file.stat().st_size for file in os.scandir(folder)) >= state_bytes
    except FileNotFoundError:  # one was just given its final name
        return False
print("READY", flush=True)
for line in sys.stdin:
    began = time.perf_counter()
    llm.generate(prompts, params, use_tqdm=False)
    generated = time.perf_counter() - began
    while not written(setup["state_bytes"]):
        time.sleep(0.002)
    print("RESULT", generated, time.perf_counter() - began, flush=True)
"""


class Pass(NamedTuple):
    """One extraction of all conversations."""

    seconds: float
    file_bytes: int


Measure = Callable[[], Awaitable[Pass]]


@dataclasses.dataclass(frozen=True)
class Bench:
    """What all passes share."""

    folder: Path
    verifier: Verifier
    vllm: VllmConfig
    shards: list[pa.Table]
    keep: Path | None

    @property
    def input_ids(self) -> list[list[int]]:
        return [ids for shard in self.shards for ids in shard["input_ids"].to_pylist()]

    @property
    def layer_ids(self) -> list[int]:
        return default_layer_ids(self.verifier.num_hidden_layers)

    @functools.cached_property
    def num_tokens(self) -> int:
        return sum(map(tokens_in, self.shards))

    @property
    def state_bytes(self) -> int:
        return self.num_tokens * len(self.layer_ids) * self.verifier.hidden_size * 2

    @property
    def speculative_config(self) -> dict[str, Any]:
        """The one of infra/extract_worker.py."""
        layers = {"eagle_aux_hidden_state_layer_ids": self.layer_ids}
        shape = {"method": "extract_hidden_states", "num_speculative_tokens": 1, "enforce_eager": True}
        return {**shape, "draft_model_config": {"hf_config": layers}}


def tokens_in(responses: pa.Table) -> int:
    return len(responses["input_ids"].combine_chunks().flatten())


@contextlib.asynccontextmanager
async def speculators(bench: Bench) -> AsyncIterator[Measure]:
    """A server with our connector, and speculators' command as its client."""
    dataset, states, output = (bench.folder / name for name in ("dataset", "server", "speculators"))
    save_dataset(bench, dataset)
    flags = ["--no-enable-prefix-caching", "--kv-transfer-config", json.dumps(our_connector(states))]
    config = with_our_connector(bench.vllm).model_copy(update={"extra_args": flags})
    command = [sys.executable, "-c", SPECULATORS, "generate-offline-data", "--preprocessed-data", str(dataset)]
    async with VllmServer(
        config,
        model_path=bench.verifier.path,
        served_name="verifier",
        log_path=bench.folder / "server.log",
        token=process_token("benchmark", str(bench.folder), "server"),
        speculative_config=bench.speculative_config,
    ) as server:

        async def measure() -> Pass:
            shutil.rmtree(output, ignore_errors=True)
            said = await finish([*command, "--endpoint", server.base_url, "--output", str(output)], server.api_key)
            files = list(output.glob("hs_*.safetensors"))
            assert len(files) == len(bench.input_ids), said[-4000:]
            # By its own clock, from before its first request to its last file.
            seconds = re.search(r"([0-9.]+)s elapsed", said)
            assert seconds, said[-4000:]
            return Pass(float(seconds[1]), sum(file.stat().st_size for file in files))

        yield measure
    if bench.keep:
        shutil.copytree(dataset, bench.keep, dirs_exist_ok=True)
        shutil.copytree(output, bench.keep / "hidden_states", dirs_exist_ok=True)


def save_dataset(bench: Bench, folder: Path) -> None:
    """The data set as `speculators prepare-data` leaves it."""
    from datasets import Dataset, disable_progress_bars

    disable_progress_bars()
    rows = [row for shard in bench.shards for row in shard.select(["input_ids", "loss_mask"]).to_pylist()]
    columns = {
        "input_ids": [row["input_ids"] for row in rows],
        "loss_mask": [list(map(int, row["loss_mask"])) for row in rows],
        "seq_len": [len(row["input_ids"]) for row in rows],
    }
    Dataset.from_dict(columns).with_format("torch").save_to_disk(folder)


async def finish(command: list[str], api_key: str) -> str:
    """The output of a command that must succeed."""
    # A proxy is for the outside world, and nothing of ours may shadow what it imports.
    ours = {"PYTHONPATH": "", "OPENAI_API_KEY": api_key, "HF_HUB_OFFLINE": "1", "NO_PROXY": "127.0.0.1"}
    process = await asyncio.create_subprocess_exec(
        *command, env=os.environ | ours, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    try:
        output = (await process.communicate())[0].decode(errors="replace")
    finally:
        if process.returncode is None:
            process.kill()
    if process.returncode != 0:
        raise RuntimeError(f"{command[0]} ended with {process.returncode}:\n{output[-4000:]}")
    return output


@contextlib.asynccontextmanager
async def bare_vllm(bench: Bench) -> AsyncIterator[Measure]:
    """An offline engine with nothing around it, in a process of its own."""
    states = bench.folder / "bare"
    states.mkdir()
    connector = our_connector(states, use_synchronization_lock=False)
    if torch.cuda.is_available():
        del connector["kv_connector_module_path"]
        connector["kv_connector"] = "ExampleHiddenStatesConnector"
    engine = {"model": str(bench.verifier.path), "enable_prefix_caching": False}
    engine |= {name: getattr(bench.vllm, name) for name in SHARED_ENGINE_ARGS}
    engine |= {"speculative_config": bench.speculative_config}
    setup = {"engine": engine, "connector": connector}
    setup |= {"input_ids": bench.input_ids, "state_bytes": bench.state_bytes}
    with (bench.folder / "bare.log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            *(bench.vllm.interpreter(), "-c", BARE_VLLM),
            env={**os.environ, "VLLM_NO_USAGE_STATS": "1", **with_our_connector(bench.vllm).environment},
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=log,
        )

    async def answer(word: str, line: str) -> str:
        """Send a line and return the one that answers it, beginning with `word`."""
        process.stdin.write(line.encode() + b"\n")
        async for found in process.stdout:
            if found.startswith(word.encode()):
                return found.decode()
        log_end = (bench.folder / "bare.log").read_text(errors="replace")[-4000:]
        raise RuntimeError(f"bare vLLM ended with {await process.wait()}:\n{log_end}")

    async def measure() -> Pass:
        _, generated, written = (await answer("RESULT", "again")).split()
        print(f"  generate() alone: {bench.num_tokens / float(generated):.0f} tokens/s")
        files = list(states.iterdir())
        size_bytes = sum(file.stat().st_size for file in files)
        for file in files:
            file.unlink()
        return Pass(float(written), size_bytes)

    try:
        await answer("READY", json.dumps(setup))
        yield measure
    finally:
        process.stdin.close()
        try:
            await asyncio.wait_for(process.wait(), 60)
        except TimeoutError:
            process.kill()


def our_connector(states: Path, **more: Any) -> dict[str, Any]:
    """vLLM's `kv_transfer_config`."""
    return {
        "kv_connector": "DraftsmithHiddenStatesConnector",
        "kv_connector_module_path": "infra.vllm_connector",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"shared_storage_path": str(states), **more},
    }


def with_our_connector(vllm: VllmConfig) -> VllmConfig:
    """The same, with the connector where vLLM's processes find it."""
    path = f"{HOME}:{vllm.environment['PYTHONPATH']}".rstrip(":")
    return vllm.model_copy(update={"environment": {**vllm.environment, "PYTHONPATH": path}})


PEERS = {"speculators": speculators, "vllm": bare_vllm}
