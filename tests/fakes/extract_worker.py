"""Speaks the protocol of infra/extract_worker.py without vLLM, with programmable faults. Standard library only.

Faults of a sample are named by its id ("nan-3" has the fault "nan"); faults of the start by $FAKE_FAULT.
The state of token t at position p, layer index l and channel h is `value(t, p, l, h)`.
"""

from __future__ import annotations

import json
import os
import signal
import struct
import sys
import time

HIDDEN_SIZE = 8


def value(token: int, position: int, layer: int, channel: int) -> float:
    """Exact in bf16, which keeps eight significant bits."""
    return float((7 * token + 5 * position + 3 * layer + channel) % 128 + 1)


def states_of(ids: list[int], num_layers: int, fault: str) -> list[float]:
    """[tokens, layers, hidden], flattened."""
    values = [
        value(token, position, layer, channel)
        for position, token in enumerate(ids)
        for layer in range(num_layers)
        for channel in range(HIDDEN_SIZE)
    ]
    size = num_layers * HIDDEN_SIZE
    if fault == "nan":
        values[size + 3] = float("nan")
    elif fault == "inf":
        values[-1] = float("inf")
    elif fault == "zero":
        values[size : size + HIDDEN_SIZE] = [0.0] * HIDDEN_SIZE
    elif fault == "constant":
        values = [1.5] * len(values)
    elif fault == "same":
        values = values[:size] * len(ids)
    elif fault == "short":  # a prefix-cache hit: vllm#44485
        values = values[: (len(ids) - 4) * size]
    return values


def save(path: str, ids: list[int], num_layers: int, fault: str) -> None:
    """A safetensors file, as the connector writes it."""
    states = states_of(ids, num_layers, fault)
    saved_ids = [token + (fault == "ids") for token in ids]
    # bf16 is the upper half of float32.
    body = b"".join(struct.pack("<f", state)[2:] for state in states)
    tail = struct.pack(f"<{len(ids)}q", *saved_ids)
    shape = [len(states) // (num_layers * HIDDEN_SIZE), num_layers, HIDDEN_SIZE]
    header = json.dumps(
        {
            "hidden_states": {"dtype": "BF16", "shape": shape, "data_offsets": [0, len(body)]},
            "token_ids": {"dtype": "I64", "shape": [len(ids)], "data_offsets": [len(body), len(body) + len(tail)]},
        }
    ).encode()
    data = struct.pack("<Q", len(header)) + header + body + tail
    with open(path, "wb") as file:
        file.write(data[: len(data) // 2] if fault == "torn" else data)


def answer(sample: dict[str, object], path: str, num_layers: int) -> dict[str, object]:
    name = str(sample["sample_id"])
    fault = name.partition("-")[0]
    if fault == "die":
        print("RuntimeError: the fake engine has died", file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "hang":
        time.sleep(3600)
    if fault == "long":
        return {"sample_id": name, "error": "4096 tokens; extraction takes 1 to 2047"}
    save(path, sample["input_ids"], num_layers, fault)
    return {"sample_id": name, "path": path}


def main() -> None:
    setup = json.loads(sys.stdin.readline())
    fault = os.environ.get("FAKE_FAULT")
    if fault == "die":
        sys.exit("ValueError: no such model")
    if fault == "garbage":
        print("INFO a stray line on stdout", flush=True)
    if fault == "hang":
        time.sleep(3600)
    refusal = {"refused": "this vLLM is too old"} if fault == "refuse" else None
    print(json.dumps(refusal or {"ready": "fake", "max_model_len": 2048, "setup": setup}), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        replies = [
            answer(sample, os.path.join(request["staging"], f"{index:06d}.safetensors"), len(setup["layer_ids"]))
            for index, sample in enumerate(request["samples"])
        ]
        reply = {"request": request["request"], "shard": request["shard"], "samples": replies}
        print(json.dumps({**reply, "num_tokens": 1, "seconds": 0.1}), flush=True)


if __name__ == "__main__":
    main()
