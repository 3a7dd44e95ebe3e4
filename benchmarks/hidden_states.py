"""How fast hidden states are encoded into a shard's bytes and decoded from them on one core, and to how many bytes.

    .venv/bin/python benchmarks/hidden_states.py [SHARD.parquet]

One shard of 64 samples of 512 tokens, four layers of 576 channels (the smoke verifier's), or the samples of a shard
of any encoding; all in memory: no disk is measured. MB are 10^6 bytes of the states in bf16, whatever is stored;
`bytes_ratio` is the whole file, ids and masks too, over them. Encoding includes measuring the error of a lossy
encoding. Decoding ends when the tensors are there, so that what is only a view costs next to nothing. Each rate is
the median of `REPEATS` runs.

The made-up states are Gaussian around magnitudes that grow with the layer and differ among channels (log-normal),
with one channel 100 times the others: zstd packs their high bytes to 0.37, as those of the smoke verifier's own.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import torch

from infra.hidden_states import HiddenRow, HiddenStatesFile, HiddenStatesMeta, decode, encode, encoding_error
from infra.state_encodings import ENCODINGS

NUM_SAMPLES = 64
NUM_TOKENS = 512
HIDDEN_SIZE = 576
LAYER_IDS = (2, 15, 27, 30)
LAYER_MAGNITUDES = (1.0, 4.0, 16.0, 64.0)
CHANNEL_SPREAD = 0.3
REPEATS = 5


def main() -> None:
    torch.set_num_threads(1)
    pa.set_cpu_count(1)
    if len(sys.argv) > 1:
        shard = Path(sys.argv[1]).read_bytes()
        layer_ids, hidden_size = HiddenStatesFile(shard).meta.layer_ids, HiddenStatesFile(shard).meta.hidden_size
        rows = stored_rows(shard)
    else:
        layer_ids, hidden_size = LAYER_IDS, HIDDEN_SIZE
        rows = [made_up_row(index) for index in range(NUM_SAMPLES)]
    num_tokens = sum(len(row.input_ids) for row in rows)
    megabytes = num_tokens * len(layer_ids) * hidden_size * 2 / 1e6
    print(f"{len(rows)} samples, {num_tokens} tokens, {megabytes:.1f} MB of states")
    figures = []
    for name in ENCODINGS:
        meta = HiddenStatesMeta(layer_ids, hidden_size, "benchmark", name)
        shard, encode_seconds = timed(lambda meta=meta: encode(rows, meta))
        _, decode_seconds = timed(lambda shard=shard: sum(1 for _ in decode(shard)))
        print(f"{name}: {len(shard) / 1e6:.1f} MB, error {encoding_error(shard)}")
        figures += [
            f"encode_mb_per_s_{name}={megabytes / encode_seconds:.0f}",
            f"decode_mb_per_s_{name}={megabytes / decode_seconds:.0f}",
            f"bytes_ratio_{name}={len(shard) / 1e6 / megabytes:.3f}",
        ]
    print(*figures)


def made_up_row(index: int) -> HiddenRow:
    generator = torch.Generator().manual_seed(index)
    ids = torch.randint(49_152, (NUM_TOKENS,), generator=generator).tolist()
    mask = [position >= NUM_TOKENS // 4 for position in range(NUM_TOKENS)]
    of_all = torch.Generator().manual_seed(-1)  # the channels of one verifier are the same in every sample
    channels = torch.exp(torch.randn(HIDDEN_SIZE, generator=of_all) * CHANNEL_SPREAD)
    channels[7] = 100.0
    states = torch.randn(NUM_TOKENS, len(LAYER_IDS), HIDDEN_SIZE, generator=generator)
    states *= torch.tensor(LAYER_MAGNITUDES)[:, None] * channels
    return HiddenRow(f"sample-{index}", "ok", None, ids, mask, states.to(torch.bfloat16))


def stored_rows(shard: bytes) -> list[HiddenRow]:
    rows = []
    for sample in decode(shard):
        both = torch.cat([sample.aux_hidden_states, sample.verifier_last_hidden_states], dim=1)
        states = both.view(len(both), -1, sample.verifier_last_hidden_states.shape[1])
        ids, mask = sample.input_ids.tolist(), sample.loss_mask.tolist()
        rows.append(HiddenRow(sample.sample_id, sample.status, None, ids, mask, states))
    return rows


def timed(run: Callable[[], object]) -> tuple[object, float]:
    """What it gives, and the median of its seconds."""
    seconds = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        result = run()
        seconds.append(time.perf_counter() - began)
    return result, statistics.median(seconds)


if __name__ == "__main__":
    main()
