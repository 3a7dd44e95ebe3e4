"""Whether a hidden_states stage is what a draft can be trained on: asked before any GPU is taken."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from infra.errors import InputError
from infra.hidden_states import HiddenStatesMeta
from infra.schemas import STATUS_FAILED
from infra.training.shard_store import ShardStore

_FIELD = "hidden_states"
_THREADS = 32  # they wait for a store that is far away


def check_hidden_states(
    stage_uri: str, *, verifier_revision: str, hidden_size: int, layer_ids: Sequence[int]
) -> HiddenStatesMeta:
    """What all shards of the stage say of themselves. Reads their footers only.

    Args:
        stage_uri: folder of the stage (`<root>/hidden_states/<key>`).
        verifier_revision: of the verifier that the draft is for.
        hidden_size: of that verifier.
        layer_ids: the extracted layers, ascending: those that the draft reads, and the verifier's last.

    Raises:
        InputError: the stage is empty, of another verifier or of other layers, or its shards do not agree.
        StageFailed: the stage is not complete.
        DamagedShard: a shard is absent or not a file of hidden states.
    """
    store = ShardStore(stage_uri, 1)
    usable = [
        sum(number for status, number in record.status_counts.items() if status != STATUS_FAILED)
        for record in store.records
    ]
    if not any(usable):
        raise InputError(_FIELD, f"{stage_uri} has no sample that could be trained on: it is empty, or all failed")
    with ThreadPoolExecutor(_THREADS) as pool:
        metas = list(
            pool.map(lambda shard: store.read_unchecked(shard, lambda file: file.meta), range(len(usable)))
        )
    first = metas[0]
    for record, meta in zip(store.records, metas, strict=True):
        if meta != first:
            raise InputError(
                _FIELD,
                f"the shards of {stage_uri} were not made alike: {record.shard} has {_differences(meta, first)} in "
                f"{store.records[0].shard}; delete the stage and extract again",
            )
    if first.verifier_revision != verifier_revision:
        raise InputError(
            _FIELD,
            f"{stage_uri} was extracted from verifier {first.verifier_revision}, but the draft is for "
            f"{verifier_revision}",
        )
    if first.hidden_size != hidden_size:
        raise InputError(
            _FIELD,
            f"{stage_uri} has states of width {first.hidden_size}, but the verifier's are {hidden_size} wide",
        )
    if first.layer_ids != tuple(layer_ids):
        raise InputError(
            _FIELD,
            f"{stage_uri} has the states of layers {list(first.layer_ids)}, but the draft is to read "
            f"{list(layer_ids)[:-1]} beside the verifier's last, {list(layer_ids)[-1]}",
        )
    return first


def _differences(meta: HiddenStatesMeta, first: HiddenStatesMeta) -> str:
    """For example: "encoding fp8_e4m3 where it is bf16"."""
    names = [name for name in meta.__dataclass_fields__ if getattr(meta, name) != getattr(first, name)]
    return " and ".join(f"{name} {getattr(meta, name)} where it is {getattr(first, name)}" for name in names)
