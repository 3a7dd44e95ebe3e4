"""The draft's vocabulary: the tokens the verifier generates most, and the maps between the two numberings.

- d2t: offsets, verifier_id = draft_id + d2t[draft_id]
- t2d: membership mask over the verifier's vocabulary
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from pydantic import Field
from safetensors.torch import load, save
from torch import Tensor

from infra.config import CONTENT, Config
from infra.errors import InputError, StageFailed
from infra.schemas import STATUS_FAILED

FILE_NAME = "vocab.safetensors"
# Below it acceptance suffers: what is outside the draft's vocabulary ends every draft.
LOWEST_COVERAGE = 0.95


class VocabConfig(Config):
    """Size of the draft's vocabulary."""

    draft_vocab_size: Annotated[int, CONTENT, Field(ge=1)] = 8192
    """Tokens the draft can propose; others are left to the verifier. More cover more and cost time."""

    from_start: Annotated[bool, CONTENT] = False
    """Keep the vocabulary of the draft that `train.init_from` names, instead of the tokens generated most."""


@dataclass(frozen=True)
class VocabMap:
    """A draft vocabulary.

    Args:
        d2t: [draft_vocab_size] int64 offsets.
        t2d: [verifier_vocab_size] bool membership.
        counts: [verifier_vocab_size] int64, how often each token was generated.
    """

    d2t: Tensor
    t2d: Tensor
    counts: Tensor

    @property
    def draft_vocab_size(self) -> int:
        return int(self.d2t.shape[0])

    @property
    def verifier_vocab_size(self) -> int:
        return int(self.t2d.shape[0])

    @property
    def token_ids(self) -> Tensor:
        """[draft_vocab_size], the verifier's id of each draft id."""
        return torch.arange(self.draft_vocab_size) + self.d2t

    @property
    def coverage(self) -> float:
        """Share of the generated tokens that the draft can propose."""
        total = int(self.counts.sum())
        return float(self.counts[self.t2d].sum()) / total if total else 0.0

    def size_for(self, coverage: float) -> int:
        """Tokens of the smallest draft vocabulary that would hold this share (0 to 1) of the generated tokens."""
        held = self.counts.sort(descending=True).values.cumsum(0)
        return int((held < coverage * float(held[-1])).sum()) + 1

    def check(self) -> None:
        """Raises StageFailed unless d2t and t2d name the same tokens, each once, in ascending order."""
        ids = self.token_ids
        if self.counts.shape != self.t2d.shape:
            raise StageFailed(f"vocabulary map: {len(self.counts)} counts for {len(self.t2d)} tokens")
        if bool((ids < 0).any()) or bool((ids >= self.verifier_vocab_size).any()):
            raise StageFailed("vocabulary map: d2t leads outside the verifier's vocabulary")
        if not torch.equal(ids, self.t2d.nonzero().squeeze(1)):
            raise StageFailed("vocabulary map: d2t and t2d do not name the same tokens; build it anew")

    def to_bytes(self) -> bytes:
        """safetensors bytes; the same map gives the same bytes."""
        tensors = {"counts": self.counts, "d2t": self.d2t, "t2d": self.t2d}
        return bytes(save({name: tensor.contiguous() for name, tensor in tensors.items()}))

    @classmethod
    def from_bytes(cls, data: bytes) -> VocabMap:
        """Read and check a map. Raises StageFailed when it is not one."""
        try:
            tensors = load(data)
            found = cls(tensors["d2t"].long(), tensors["t2d"].bool(), tensors["counts"].long())
        except Exception as error:
            raise StageFailed(f"vocabulary map cannot be read: {error}") from error
        found.check()
        return found


def count_tokens(table: pa.Table, verifier_vocab_size: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """How often each token was generated in one shard of responses.

    Args:
        table: rows of schemas.RESPONSES; `input_ids`, `loss_mask` and `status` are read.

    Returns:
        [verifier_vocab_size] int64 counts of the tokens under the loss_mask in rows that did not fail.

    Raises:
        StageFailed: a row's mask and ids differ in length, or an id lies outside the vocabulary.
    """
    usable = table.filter(pa.compute.not_equal(table["status"], STATUS_FAILED))
    ids = _flatten(usable["input_ids"]).to_numpy(zero_copy_only=False)
    mask = _flatten(usable["loss_mask"]).to_numpy(zero_copy_only=False)
    if len(ids) != len(mask):
        raise StageFailed(f"responses: {len(ids)} token ids but {len(mask)} loss_mask values")
    generated = ids[mask.astype(bool)]
    if len(generated) and not 0 <= int(generated.min()) <= int(generated.max()) < verifier_vocab_size:
        raise StageFailed(
            f"responses: token id {int(generated.max())} is outside the verifier's {verifier_vocab_size} tokens"
        )
    return np.bincount(generated, minlength=verifier_vocab_size).astype(np.int64)


def count_tokens_of_shard(data: bytes, verifier_vocab_size: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """`count_tokens` of a responses shard, given its Parquet bytes."""
    table = pq.read_table(pa.BufferReader(data), columns=["input_ids", "loss_mask", "status"])
    return count_tokens(table, verifier_vocab_size)


def build_map(
    config: VocabConfig,
    counts: Iterable[np.ndarray[Any, np.dtype[np.int64]]],
    verifier_vocab_size: int,
    kept: Tensor | None = None,
) -> VocabMap:
    """Merge the shards' counts and take the most frequent tokens, or those that are given.

    Args:
        kept: the verifier's ids of the tokens to take, whatever was generated.

    Raises:
        InputError: as `check_size`.
        StageFailed: nothing was generated.
    """
    from speculators.train.vocab_mapping import build_vocab_mappings_from_distribution

    check_size(config, verifier_vocab_size, None if kept is None else len(kept))
    total = np.zeros(verifier_vocab_size, dtype=np.int64)
    for shard in counts:
        total += shard
    if not total.any():
        raise StageFailed("no response has a generated token, so there is no vocabulary to choose")
    if kept is not None:
        return _map_of(kept, torch.from_numpy(total))
    seen = {int(token): int(total[token]) for token in np.flatnonzero(total)}
    d2t, t2d = build_vocab_mappings_from_distribution(seen, config.draft_vocab_size, verifier_vocab_size)
    built = VocabMap(d2t.long(), t2d.bool(), torch.from_numpy(total))
    built.check()
    return built


def check_size(config: VocabConfig, verifier_vocab_size: int, num_kept: int | None = None) -> None:
    """Raise InputError where the draft's vocabulary cannot be as large as the config says.

    Args:
        num_kept: tokens of the start draft, where they are kept.
    """
    field, size = "vocab.draft_vocab_size", config.draft_vocab_size
    if size > verifier_vocab_size:
        raise InputError(field, f"is {size}, but the verifier has {verifier_vocab_size} tokens; at most that")
    if num_kept not in (None, size):
        raise InputError(
            field,
            f"is {size}, but vocab.from_start keeps the start draft's vocabulary of {num_kept} tokens; set it to "
            "that",
        )


def _map_of(token_ids: Tensor, counts: Tensor) -> VocabMap:
    t2d = torch.zeros(len(counts), dtype=torch.bool)
    t2d[token_ids] = True
    ascending = t2d.nonzero().squeeze(1)
    built = VocabMap(ascending - torch.arange(len(ascending)), t2d, counts)
    built.check()
    return built


def _flatten(column: pa.ChunkedArray) -> pa.Array:
    combined = column.combine_chunks()
    if isinstance(combined, pa.ChunkedArray):
        combined = pa.concat_arrays(combined.chunks) if combined.num_chunks else pa.array([], combined.type)
    return combined.flatten()
