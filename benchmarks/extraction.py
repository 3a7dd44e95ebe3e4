"""How fast hidden states get from a verifier into committed shards, how many bytes they take, beside others.

    .venv/bin/python benchmarks/extraction.py [--peer speculators vllm] [--samples N] [--rounds N] [--eager]

The same conversations (questions strung together, 64 to 448 tokens) in interleaved rounds whose order turns; the
encoding of ours changes from round to round. Ours is what the stage does: `ExtractionEngine`, as many shards at a
time as `extract.shards_per_engine` or the stage itself says, checked and encoded as Parquet in processes of their
own, and committed to a folder. Each peer has its own rounds:

- `speculators`: `speculators generate-offline-data` with its defaults (32 requests in flight, raw states, a file a
  sample, no checks) against a vLLM server with our connector, since vLLM's own writes empty files on CPU.
- `vllm`: bare `vllm.LLM.generate` with vLLM's own connector, until its files are there. On CPU with our connector.

Both sides have their engine loaded from the start and have made a first pass that is not measured; with `--eager`
neither is compiled. Each is measured from its first request to its last file: loading, imports and start-up are in
none. A ratio is the median of the rounds' ratios. Of each pass of ours is said how busy its engine was, what its
shards' time went into, and how many cores the builders and this process used (the engine's are not among them).

The on-policy check is made, with margins so wide that text which is not the verifier's own passes and leaves no
doubt, as most of its own does. Bytes are those of the files. Decoding is of one core, of the first shard's file in
memory, in 10^6 bytes of its states in bf16, and of `bf16_split` in the last line.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import functools
import json
import os
import shutil
import statistics
import tempfile
import time
import traceback
from collections.abc import AsyncIterator
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
import torch
from extraction_peers import HOME, PEERS, Bench, Measure, Pass, tokens_in
from transformers import AutoTokenizer

from infra import manifest
from infra.extraction.budget import ENCODE_SECONDS, EXTRACT_SECONDS, shards_at_a_time
from infra.extraction.build_pool import BuildPool
from infra.extraction.engine import ExtractConfig, ExtractionEngine, StreamTimes, samples_of
from infra.extraction.pool import EnginePool, ShardQueue
from infra.hidden_states import ENCODINGS, decode
from infra.machine import usable_cores
from infra.manifest import Shard, ShardRecord, StageRef
from infra.processes import living, process_token
from infra.schemas import RESPONSES, STATUS_OK
from infra.state_checks.checks import ChecksConfig, StateChecks, open_head
from infra.verifiers.verifier import Verifier, VerifierConfig, materialize
from infra.vllm_config import VllmConfig

SHORTEST_TOKENS, LONGEST_TOKENS = 64, 448
MOST_LETTERS = 16  # of a token, on average
MAX_MODEL_LEN = 1024
DECODE_REPEATS = 3
ANY_TEXT = ChecksConfig(margin_nats=1000.0, margin_top1=0.999)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--peer", choices=PEERS, nargs="+", default=["speculators"])
    parser.add_argument("--samples", type=int, default=160)
    parser.add_argument("--rounds", type=int, default=len(ENCODINGS))
    parser.add_argument("--shard-size", type=int, default=32)
    parser.add_argument("--builders", type=int, help="as extract.shards_per_engine")
    parser.add_argument("--staging-mib", type=float, default=128.0, help="bound of our staging folder")
    parser.add_argument("--model", default=VerifierConfig().model, help="as verifier.model")
    parser.add_argument("--python", help="as vllm.python")
    parser.add_argument("--eager", action="store_true", help="as vllm.enforce_eager, for all engines")
    parser.add_argument("--peer-seconds", type=float, help="give a peer up that takes longer")
    parser.add_argument(
        "--linger", type=int, default=0, help="passes of ours at the end, for a profiler to look at"
    )
    parser.add_argument("--keep", type=Path, help="folder to leave what speculators wrote in")
    options = parser.parse_args()
    asyncio.run(run(options))


async def run(options: argparse.Namespace) -> None:
    verifier = await asyncio.to_thread(materialize, VerifierConfig(model=options.model))
    with tempfile.TemporaryDirectory(prefix="draftsmith-benchmark-") as name:
        shards = await asyncio.to_thread(make_shards, verifier, options.samples, options.shard_size)
        bench = Bench(Path(name), verifier, vllm_config(options.python, options.eager), shards, options.keep)
        print(
            f"{len(bench.input_ids)} conversations, {bench.num_tokens} tokens, "
            f"{options.builders or 'as many as needed'} shards at a time, "
            f"engines {'not ' if options.eager else ''}compiled, load {os.getloadavg()[0]:.1f}",
            flush=True,
        )
        failed = False
        async with loaded(bench, options) as ours:
            for peer in options.peer:
                made: list[Round] = []
                try:
                    async with asyncio.timeout(options.peer_seconds), PEERS[peer](bench) as measure:
                        await rounds(bench, ours, peer, measure, options.rounds, made)
                except Exception:  # the other peer may do better
                    traceback.print_exc()
                    failed = True
                if made:
                    report(bench, ours.engine, peer, made)
            for number in range(options.linger):
                print(f"lingering, pass {number + 1}", flush=True)
                await ours.measure("bf16_split")
    if failed:
        raise SystemExit(1)


def vllm_config(python: str | None, eager: bool) -> VllmConfig:
    """One for a GPU that two engines share, or for a small CPU."""
    cuda = torch.cuda.is_available()
    environment = {"PYTHONPATH": os.environ.get("PYTHONPATH", "")}
    return VllmConfig(
        python=python,
        environment=environment if cuda else environment | {"VLLM_CPU_KVCACHE_SPACE": "2"},
        max_model_len=MAX_MODEL_LEN,
        gpu_memory_utilization=0.3,
        enforce_eager=eager,
    )


def make_shards(verifier: Verifier, count: int, shard_size: int) -> list[pa.Table]:
    """Shards of responses, short and long ones mixed; the second half of each counts as the completion."""
    lines = (HOME / "deployments/prompts/general.jsonl").read_text(encoding="utf-8").splitlines()
    questions = [json.loads(line)["prompt"] for line in lines]
    tokenizer = AutoTokenizer.from_pretrained(verifier.path)

    @functools.cache
    def ids_from(first: int) -> list[int]:
        text = " ".join(questions[first:] + questions[:first])[: LONGEST_TOKENS * MOST_LETTERS]
        found: list[int] = tokenizer(text)["input_ids"]
        return found

    rows = []
    for index in range(count):
        ids = ids_from(index % len(questions))[: SHORTEST_TOKENS + 29 * index % (LONGEST_TOKENS - SHORTEST_TOKENS)]
        mask = [position >= len(ids) // 2 for position in range(len(ids))]
        row = {"sample_id": f"{index:05d}", "status": STATUS_OK, "input_ids": ids, "loss_mask": mask}
        rows.append({**row, "temperature": 1.0})
    cuts = range(0, count, shard_size)
    return [pa.Table.from_pylist(rows[start : start + shard_size], schema=RESPONSES) for start in cuts]


class Round(NamedTuple):
    encoding: str  # of ours
    ours: Pass
    theirs: Pass


async def rounds(
    bench: Bench,
    ours: Ours,
    peer: str,
    measure: Measure,
    count: int,
    made: list[Round],
) -> None:
    """Adds to `made` round by round."""
    # The first passes meet batches of sizes that no engine has seen yet.
    await ours.measure(next(iter(ENCODINGS)))
    await measure()
    for turn in range(count):
        encoding = list(ENCODINGS)[turn % len(ENCODINGS)]
        passes: dict[str, Pass] = {}
        for side in ("ours", "theirs")[:: -1 if turn % 2 else 1]:
            await asyncio.sleep(2.0)  # until the other engine's threads have stopped spinning
            passes[side] = await (ours.measure(encoding) if side == "ours" else measure())
        made.append(Round(encoding, **passes))
        mine_rate, their_rate = (bench.num_tokens / found.seconds for found in made[-1][1:])
        print(f"round {turn + 1}: {encoding} {mine_rate:.0f}, {peer} {their_rate:.0f} tokens/s", flush=True)


class Ours:
    """The stage's own work: one engine, and processes that build the shards of each encoding, idle while another is
    measured."""

    def __init__(self, bench: Bench, config: ExtractConfig, engine: ExtractionEngine) -> None:
        self.engine = engine
        self._bench = bench
        self._config = config
        self._records: list[ShardRecord] = []  # by which the stage decides how many shards the engine has at a time
        self._pools: dict[str, BuildPool] = {}

    def start_builders(self, encoding: str) -> BuildPool:
        """To be entered before the engine is, and loaded beside it."""
        meta = dataclasses.replace(self.engine.meta, encoding=encoding)
        self._pools[encoding] = BuildPool(
            StateChecks(ANY_TEXT, meta, open_head(ANY_TEXT, self._bench.verifier)),
            self._bench.verifier.path,
            self.engine.staging.folder,
            token=self._token(encoding),
            log_path=self._bench.folder / "builders.log",
            ahead=self._config.shards_per_engine or usable_cores(),
        )
        return self._pools[encoding]

    def wait_ready(self) -> None:
        for pool in self._pools.values():
            pool.wait_ready()

    async def measure(self, encoding: str) -> Pass:
        """One pass, into a folder that is left for one encoding at a time."""
        root = self._bench.folder / encoding
        shutil.rmtree(root, ignore_errors=True)
        stage = StageRef(str(root), "hidden_states", {"encoding": encoding})
        spent: list[tuple[StreamTimes, float, float]] = []  # of each shard; and its seconds in all, and committing
        size_bytes = 0

        def extract(shard: Shard) -> ShardRecord:
            responses = self._bench.shards[int(shard.shard)]
            times, started = StreamTimes(), time.perf_counter()
            staged = self.engine.staged(shard.shard, samples_of(responses), times)
            built = self._pools[encoding].build(responses, staged, times)
            encoded = time.perf_counter()
            assert built.status_counts == {STATUS_OK: len(responses)}, built.status_counts
            counts, seconds = built.status_counts, encoded - started - times.waited_seconds
            extra = {**built.extra, EXTRACT_SECONDS: times.engine_seconds, ENCODE_SECONDS: seconds}
            record = manifest.commit_shard(
                stage, shard, built.data, rows=built.rows, status_counts=counts, inputs={}, extra=extra
            )
            assert isinstance(built.data, Path)
            built.data.unlink()
            ended = time.perf_counter()
            spent.append((times, ended - started, ended - encoded))
            return record

        async def make(_: object, shard: Shard) -> None:
            nonlocal size_bytes
            record = await asyncio.to_thread(extract, shard)
            self._records.append(record)
            size_bytes += record.size_bytes

        queue = ShardQueue([Shard(f"{number:05d}") for number in range(len(self._bench.shards))])
        pool = EnginePool([lambda: contextlib.nullcontext(self.engine)], make, queue, self._at_a_time)
        cpu, began = cpu_seconds(self._token(encoding)), time.perf_counter()
        await pool.make_all()
        seconds, cpu = time.perf_counter() - began, cpu_seconds(self._token(encoding)) - cpu
        engine_seconds = sum(times.engine_seconds for times, *_ in spent)
        waited = sum(times.waited_seconds for times, *_ in spent)
        whole, committing = sum(of[1] for of in spent), sum(of[2] for of in spent)
        print(
            f"  {time.strftime('%H:%M:%S')} {encoding}: {seconds:.2f} s, engine busy "
            f"{engine_seconds / seconds:.0%}, {whole / seconds:.1f} shards at a time ({self._at_a_time()} in the "
            f"end): {waited / whole:.0%} waiting for engine or staging, "
            f"{(whole - waited - committing) / whole:.0%} checking and encoding, "
            f"{committing / whole:.0%} committing; {cpu / seconds:.1f} cores",
            flush=True,
        )
        return Pass(seconds, size_bytes)

    def _token(self, encoding: str) -> str:
        return process_token("benchmark", str(self._bench.folder), "builders", encoding)

    def _at_a_time(self) -> int:
        return shards_at_a_time(self._config, self._records, self.engine.staging.limit_bytes)


@contextlib.asynccontextmanager
async def loaded(bench: Bench, options: argparse.Namespace) -> AsyncIterator[Ours]:
    """Ours, ready."""
    config = ExtractConfig(staging_gib=options.staging_mib / 1024, shards_per_engine=options.builders)
    with contextlib.ExitStack() as stack:
        staging = config.staging(process_token("benchmark", str(bench.folder)))
        staging.open()
        stack.callback(staging.close)
        engine = ExtractionEngine(
            config,
            bench.vllm,
            bench.verifier,
            log_path=bench.folder / "engine.log",
            token=process_token("benchmark", str(bench.folder), "ours"),
            staging=staging,
        )
        ours = Ours(bench, config, engine)
        for encoding in ENCODINGS:
            stack.enter_context(ours.start_builders(encoding))
        try:
            await asyncio.to_thread(engine.__enter__)
            await asyncio.to_thread(ours.wait_ready)
            yield ours
        finally:
            await asyncio.to_thread(engine.stop)


def cpu_seconds(token: str) -> float:
    """Of this process and those of `token`."""
    ticks = 0
    for pid in living(token):
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return time.process_time() + ticks / os.sysconf("SC_CLK_TCK")


def report(bench: Bench, engine: ExtractionEngine, peer: str, made: list[Round]) -> None:
    stored = {encoding: ours.file_bytes for encoding, ours, _ in made}
    their_bytes = made[-1].theirs.file_bytes
    rates: dict[str, float] = {}
    for encoding, file_bytes in stored.items():
        rates[encoding] = decode_rate(bench, encoding)
        passes = [bench.num_tokens / ours.seconds for name, ours, _ in made if name == encoding]
        print(
            f"{encoding}: {statistics.median(passes):.0f} tokens/s, {file_bytes / 1e6:.1f} MB "
            f"({file_bytes / their_bytes:.3f} of {peer}'s {their_bytes / 1e6:.1f}), "
            f"decoded at {rates[encoding]:.0f} MB/s a core"
        )
    staging = engine.staging
    print(f"staging: {staging.peak_bytes / 1e6:.1f} MB at most, of {staging.limit_bytes / 1e6:.1f} allowed")
    ratio = statistics.median(theirs.seconds / ours.seconds for _, ours, theirs in made)
    split, fp8 = (stored.get(name, float("nan")) / their_bytes for name in ("bf16_split", "fp8_e4m3"))
    print(
        f"ratio_vs_{peer}={ratio:.3f} bytes_ratio_bf16_split={split:.3f} bytes_ratio_fp8={fp8:.3f} "
        f"decode_mb_per_s={rates.get('bf16_split', float('nan')):.0f} "
        f"peak_staging_mb={staging.peak_bytes / 1e6:.1f}",
        flush=True,
    )


def decode_rate(bench: Bench, encoding: str) -> float:
    """MB of bf16 states a second that one thread decodes from the file of the first shard."""
    file = min((bench.folder / encoding).rglob("*.parquet")).read_bytes()
    num_tokens = tokens_in(bench.shards[0])
    torch.set_num_threads(1)
    seconds = []
    for _ in range(DECODE_REPEATS):
        began = time.perf_counter()
        tokens = sum(len(sample.input_ids) for sample in decode(file))
        seconds.append(time.perf_counter() - began)
        assert tokens == num_tokens
    return bench.state_bytes * num_tokens / bench.num_tokens / 1e6 / statistics.median(seconds)


if __name__ == "__main__":
    main()
