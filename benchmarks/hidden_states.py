"""How fast hidden states are encoded into a shard's bytes, and decoded from them.

    .venv/bin/python benchmarks/hidden_states.py

One shard of 64 samples of 512 tokens, four layers of 576 channels (the smoke verifier's), all in memory: no disk is
measured. MB are payload, 10^6 bytes of bf16 states. Decoding gives tensors over the file's own memory where it can,
so its figure says what a reader pays before it looks at the states. Each figure is the median of `REPEATS` runs.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

from infra.hidden_states import HiddenRow, HiddenStatesMeta, decode, encode

NUM_SAMPLES = 64
NUM_TOKENS = 512
META = HiddenStatesMeta(layer_ids=(2, 15, 27, 30), hidden_size=576, verifier_revision="benchmark")
PAYLOAD_BYTES = NUM_SAMPLES * NUM_TOKENS * len(META.layer_ids) * META.hidden_size * 2
REPEATS = 5


def main() -> None:
    rows = [sample(index) for index in range(NUM_SAMPLES)]
    shard = encode(rows, META)

    def read() -> None:
        assert sum(len(found.input_ids) for found in decode(shard)) == NUM_SAMPLES * NUM_TOKENS

    encode_seconds = median_seconds(lambda: encode(rows, META))
    decode_seconds = median_seconds(read)
    print(f"one shard of {len(shard) / 1e6:.0f} MB: {encode_seconds:.3f} s, {decode_seconds:.3f} s")
    megabytes = PAYLOAD_BYTES / 1e6
    print(f"encode_mb_per_s={megabytes / encode_seconds:.0f} decode_mb_per_s={megabytes / decode_seconds:.0f}")


def sample(index: int) -> HiddenRow:
    generator = torch.Generator().manual_seed(index)
    ids = torch.randint(49_152, (NUM_TOKENS,), generator=generator).tolist()
    mask = [position >= NUM_TOKENS // 4 for position in range(NUM_TOKENS)]
    states = torch.randn(NUM_TOKENS, len(META.layer_ids), META.hidden_size, generator=generator)
    return HiddenRow(f"sample-{index}", "ok", None, ids, mask, states.to(torch.bfloat16))


def median_seconds(run: Callable[[], object]) -> float:
    seconds = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


if __name__ == "__main__":
    main()
