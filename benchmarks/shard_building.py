"""How fast staged hidden states become committed shards, in threads of one process and in processes of their own.

    .venv/bin/python benchmarks/shard_building.py [--workers N] [--shards N] [--rounds N]

States of noise, as wide as the small verifier's and staged as files as its engine does, 32 samples of 64 to 447
tokens a shard; `--workers` shards at a time are read, checked (the verifier's head too), encoded and committed to a
folder, in interleaved rounds. Threads are what the stage had until it built in processes: `read_staged` and
`build_shard` in this process. Both have built a shard each before. Seconds of CPU are those of this process and of
its builders; a ratio below one says that processes are the faster.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
import torch
from safetensors.torch import save_file

from infra import manifest
from infra.extraction.build_pool import BuildPool
from infra.extraction.config import ExtractConfig, states_meta
from infra.extraction.rows import BuiltShard, build_shard, samples_of
from infra.extraction.staged_states import Staged, StreamTimes, read_staged
from infra.hidden_states import ENCODINGS, HiddenStatesMeta
from infra.manifest import Shard, StageRef
from infra.processes import descendants, process_token
from infra.schemas import RESPONSES, STATUS_OK
from infra.state_checks.checks import ChecksConfig, StateChecks, open_head
from infra.verifiers.verifier import Verifier, VerifierConfig, materialize

SAMPLES, SHORTEST_TOKENS, LONGEST_TOKENS = 32, 64, 448
ANY_TEXT = ChecksConfig(margin_nats=1000.0, margin_top1=0.999, norm_log_units=10.0)


class Kit(NamedTuple):
    folder: Path
    verifier: Verifier
    meta: HiddenStatesMeta
    responses: pa.Table
    num_tokens: int

    def staged(self, shard: int) -> Generator[Staged | None]:
        for index in range(SAMPLES):
            path = self.folder / f"{shard}-{index}"
            os.link(self.folder / f"states-{index}", path)
            yield Staged(str(path), None)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--shards", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    verifier = materialize(VerifierConfig())
    with tempfile.TemporaryDirectory(prefix="draftsmith-benchmark-") as folder:
        kit = prepared(Path(folder), verifier)
        for encoding in ENCODINGS:
            compare(
                kit._replace(meta=dataclasses.replace(kit.meta, encoding=encoding)),
                options.workers,
                options.shards,
                options.rounds,
            )


def prepared(folder: Path, verifier: Verifier) -> Kit:
    meta, draw, rows = states_meta(ExtractConfig(), verifier), torch.Generator().manual_seed(0), []
    for index in range(SAMPLES):
        count = SHORTEST_TOKENS + 29 * index % (LONGEST_TOKENS - SHORTEST_TOKENS)
        ids = torch.randint(verifier.vocab_size, (count,), generator=draw)
        states = 5 * torch.randn(count, len(meta.layer_ids), meta.hidden_size, generator=draw).bfloat16()
        save_file({"hidden_states": states, "token_ids": ids}, folder / f"states-{index}")
        row = {"sample_id": str(index), "status": STATUS_OK, "input_ids": ids.tolist(), "temperature": 1.0}
        rows.append(row | {"loss_mask": [position >= count // 2 for position in range(count)]})
    table = pa.Table.from_pylist(rows, schema=RESPONSES)
    return Kit(folder, verifier, meta, table, sum(len(row["input_ids"]) for row in rows))


def compare(kit: Kit, workers: int, shards: int, rounds: int) -> None:
    checks = StateChecks(ANY_TEXT, kit.meta, open_head(ANY_TEXT, kit.verifier))

    def in_a_thread(shard: int) -> BuiltShard:
        torch.set_num_threads(1)
        samples = samples_of(kit.responses)
        answers = zip(samples, kit.staged(shard), strict=True)
        results = (read_staged(sample, staged, kit.meta) for sample, staged in answers if staged)
        return build_shard(kit.responses, results, kit.meta, checks)

    began = time.perf_counter()
    with BuildPool(
        checks,
        kit.verifier.path,
        kit.folder,
        token=process_token("benchmark", str(kit.folder)),
        log_path=kit.folder / "log",
        ahead=workers,
    ) as pool:

        def in_a_process(shard: int) -> BuiltShard:
            return pool.build(kit.responses, kit.staged(shard), StreamTimes())

        pool.wait_ready()
        started = time.perf_counter() - began, cpu_seconds() - time.process_time()
        for build in (in_a_thread, in_a_process):
            one_pass(kit, build, workers, workers)
        found: dict[str, list[tuple[float, float]]] = {"threads": [], "processes": []}
        for turn in range(rounds):
            for name in list(found)[:: -1 if turn % 2 else 1]:
                build = in_a_thread if name == "threads" else in_a_process
                found[name].append(one_pass(kit, build, workers, shards))
    tokens = kit.num_tokens * shards
    for name, passes in found.items():
        wall, cpu = (statistics.median(column) for column in zip(*passes, strict=True))
        print(
            f"{kit.meta.encoding} {name}: {tokens / wall:.0f} tokens/s, {1e6 * cpu / tokens:.1f} us of CPU a token"
        )
    pairs = list(zip(found["processes"], found["threads"], strict=True))
    wall, cpu = (statistics.median(ours[part] / theirs[part] for ours, theirs in pairs) for part in (0, 1))
    print(
        f"{kit.meta.encoding} workers={workers} wall_ratio={wall:.3f} cpu_ratio={cpu:.3f} "
        f"start_seconds={started[0]:.1f} start_cpu_seconds={started[1]:.1f}",
        flush=True,
    )


def one_pass(kit: Kit, build: Callable[[int], BuiltShard], workers: int, shards: int) -> tuple[float, float]:
    """Seconds, and seconds of CPU, that `shards` shards take."""

    def work(number: int) -> None:
        built = build(number)
        assert built.status_counts == {STATUS_OK: SAMPLES}, built.extra
        counts = built.status_counts
        manifest.commit_shard(
            stage, Shard(f"{number:05d}"), built.data, rows=SAMPLES, status_counts=counts, inputs={}
        )
        if isinstance(built.data, Path):
            built.data.unlink()

    with tempfile.TemporaryDirectory(dir=kit.folder) as root:
        stage = StageRef(root, "hidden_states", {"encoding": kit.meta.encoding})
        began, cpu = time.perf_counter(), cpu_seconds()
        with ThreadPoolExecutor(workers) as pool:
            list(pool.map(work, range(shards)))
        return time.perf_counter() - began, cpu_seconds() - cpu


def cpu_seconds() -> float:
    """Of this process and all that it has started."""
    ticks = 0
    for pid in descendants(os.getpid()):
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return time.process_time() + ticks / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    main()
