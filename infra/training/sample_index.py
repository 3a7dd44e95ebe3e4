"""Which samples a hidden_states stage holds: where each lies, how long it is, and whether it only measures."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from infra.errors import StageFailed
from infra.schemas import STATUS_FAILED
from infra.training.config import TrainConfig
from infra.training.shard_store import ShardStore

# They wait for a store that is far away; a folder is read by one core's worth of them.
INDEX_THREADS = 32


@dataclass(frozen=True)
class IndexedSample:
    """Where a sample lies and what it holds after alignment.

    Args:
        shard: position of its shard in the stage.
        row: its row there.
        num_tokens: rows of the aligned sample, cut to total_seq_len.
        num_loss_tokens: how many of them are trained on.
        validation: whether it only measures.
    """

    shard: int
    row: int
    num_tokens: int
    num_loss_tokens: int
    validation: bool


def build_index(store: ShardStore, config: TrainConfig) -> list[IndexedSample]:
    """Every sample but the failed ones and those without a trained token.

    Reads ids and masks only, of several shards at once. They are not compared with the records' hashes here: each
    shard is before it is trained on, and a damaged one ends the run then.
    """

    def read(shard: int) -> list[IndexedSample]:
        return list(_samples_of(shard, store.read_unchecked(shard, lambda file: file.rows()), config))

    with ThreadPoolExecutor(INDEX_THREADS) as pool:
        found = [sample for part in pool.map(read, range(len(store.records))) for sample in part]
    if all(sample.validation for sample in found):
        raise StageFailed(f"{store.stage_uri} has no sample to train on")
    return found


def index_to_json(index: Sequence[IndexedSample]) -> bytes:
    return json.dumps([list(asdict(sample).values()) for sample in index]).encode()


def index_from_json(data: bytes) -> list[IndexedSample]:
    return [IndexedSample(*values) for values in json.loads(data)]


def _samples_of(shard: int, rows: Any, config: TrainConfig) -> Iterator[IndexedSample]:
    for row, (status, ids, mask) in enumerate(
        zip(*(rows[name] for name in ("status", "input_ids", "loss_mask")), strict=True)
    ):
        if status.as_py() == STATUS_FAILED:
            continue
        loss_mask: npt.NDArray[np.bool_] = np.array(mask.values, dtype=np.bool_)
        cut = loss_mask[1 : config.total_seq_len + 1]
        if cut.any():
            prompt = ids.values[: int(loss_mask.argmax())].to_pylist()
            yield IndexedSample(shard, row, len(cut), int(cut.sum()), _is_validation(prompt, config))


def _is_validation(prompt: list[int], config: TrainConfig) -> bool:
    """By a hash of the prompt's tokens, so that all samples of one prompt fall on the same side."""
    digest = hashlib.sha256(f"{config.seed}:{prompt}".encode()).digest()
    return int.from_bytes(digest[:8], "big") < config.validation_share * 2**64
