"""How fast the trainer's data path delivers packs, by encoding and number of input processes. No GPU is used.

    .venv/bin/python benchmarks/training_input.py [--tokens N] [--workers 0 1 2 4] [--folder DIR]

Shards of random states (four layers of 4,096 channels) are written once for each encoding that there is; then four
epochs of packs of 8,192 tokens are taken and dropped. The first epoch includes the comparison of every shard with
its record's hash, the others are what a long training sees. MB are decoded states, 10^6 bytes of bf16. Starting the
processes is left out. Files come from the page cache where they fit: a disk's speed is not measured.

The last line has MB/s and tokens/s after the first epoch for each encoding, with the last number of processes.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from infra import manifest
from infra.fingerprint import stage_content
from infra.hidden_states import ENCODINGS, HiddenRow, HiddenStatesMeta, encode
from infra.manifest import Shard, StageRef
from infra.training.config import TrainConfig
from infra.training.data import Schedule, ShardStore, StepLoader, build_index
from infra.training.feed import Feed

LAYER_IDS = (2, 18, 33, 36)
HIDDEN_SIZE = 4096
BYTES_PER_TOKEN = len(LAYER_IDS) * HIDDEN_SIZE * 2
SAMPLE_TOKENS = 2049  # one is lost to the alignment: four samples fill a pack
SAMPLES_PER_SHARD = 8
PACK_TOKENS = 8192


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8 * PACK_TOKENS, help="of the stage, for each encoding")
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 1, len(os.sched_getaffinity(0))])
    parser.add_argument("--folder", help="where the shards are written; by default the system's temporary folder")
    arguments = parser.parse_args()
    summary = []
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        os.environ["DRAFTSMITH_CACHE"] = f"{folder}/cache"
        for encoding in ENCODINGS:
            stage_uri = write_stage(Path(folder, encoding), encoding, arguments.tokens)
            for workers in arguments.workers:
                first, later = measure(stage_uri, workers)
                print(
                    f"{encoding} workers={workers}: first epoch {first * BYTES_PER_TOKEN / 1e6:.0f} MB/s, "
                    f"then {later * BYTES_PER_TOKEN / 1e6:.0f} MB/s = {later:.0f} tokens/s",
                    flush=True,
                )
            summary.append(
                f"{encoding}_mb_per_s={later * BYTES_PER_TOKEN / 1e6:.0f} {encoding}_tokens_per_s={later:.0f}"
            )
    print(f"workers={arguments.workers[-1]} {' '.join(summary)}")


def write_stage(root: Path, encoding: str, num_tokens: int) -> str:
    """A stage of equal samples. Returns its URI."""
    stage = StageRef(str(root), "hidden_states", stage_content("hidden_states", 1, {}, {}, {}))
    num_shards = max(1, num_tokens // (SAMPLES_PER_SHARD * (SAMPLE_TOKENS - 1)))
    meta = HiddenStatesMeta(LAYER_IDS, HIDDEN_SIZE, "benchmark", encoding)
    for shard in manifest.write_plan(stage, [Shard(f"{number:05d}") for number in range(num_shards)]):
        data = encode(samples(int(shard.shard)), meta)
        counts = {"ok": SAMPLES_PER_SHARD}
        manifest.commit_shard(stage, shard, data, rows=SAMPLES_PER_SHARD, status_counts=counts, inputs={})
    manifest.finish(stage, {})
    return stage.uri


def samples(shard: int) -> Iterator[HiddenRow]:
    generator = torch.Generator().manual_seed(shard)
    for number in range(SAMPLES_PER_SHARD):
        ids = torch.randint(100_000, (SAMPLE_TOKENS,), generator=generator).tolist()
        mask = [place >= SAMPLE_TOKENS // 4 for place in range(SAMPLE_TOKENS)]
        states = torch.randn(SAMPLE_TOKENS, len(LAYER_IDS), HIDDEN_SIZE, generator=generator).bfloat16()
        yield HiddenRow(f"{shard}-{number}", "ok", None, ids, mask, states)


def measure(stage_uri: str, workers: int) -> tuple[float, float]:
    """Tokens per second of the first epoch, and of those after it."""
    config = TrainConfig(total_seq_len=PACK_TOKENS, epochs=4.0, validation_share=0.0)
    store = ShardStore(stage_uri, config.shuffle_window_shards)
    schedule = Schedule(build_index(store, config), config)
    loader = StepLoader(store, schedule, config, 0, 1)
    # Checked anew, as in a process of its own.
    store.files.group += f" {workers}"
    seconds, num_tokens = [0.0, 0.0], [0, 0]
    batches = Feed(loader, torch.device("cpu"), workers).batches(0, schedule.num_steps)
    for pack in next(batches).packs:
        del pack
    began = time.perf_counter()
    for step in range(1, schedule.num_steps):
        for pack in (batch := next(batches)).packs:
            del pack
        ended = time.perf_counter()
        epoch = min(1, schedule.epoch_of_step(step))
        seconds[epoch] += ended - began
        num_tokens[epoch] += batch.num_tokens
        began = ended
    return num_tokens[0] / max(seconds[0], 1e-9), num_tokens[1] / max(seconds[1], 1e-9)


if __name__ == "__main__":
    main()
