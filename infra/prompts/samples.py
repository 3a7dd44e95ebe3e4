"""Prompts: checked, split once into train and heldout, cut into shards.

One hash per prompt decides what could look like chance: its order, its split, its place in a sample and its sample
ids. So the same sources give the same rows on any machine, and every shard holds a cross-section of all data sets.
"""

from __future__ import annotations

import bisect
import io
import itertools
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from infra.errors import InputError
from infra.fingerprint import canonical_json
from infra.prompts.config import PromptsConfig, PromptSource, SamplingOverrides
from infra.prompts.filters import CountTokens
from infra.prompts.selection import ORDER_HEX_DIGITS, Prompt, Selection
from infra.prompts.sources import OpenSource, open_source
from infra.schemas import PROMPTS

__all__ = [
    "HELDOUT",
    "TRAIN",
    "PromptSet",
    "PromptSource",
    "PromptsConfig",
    "Row",
    "SamplingOverrides",
    "cut_shards",
    "dataset_revisions",
    "left_out_said",
    "load_prompts",
    "to_parquet",
]

TRAIN = "train"
HELDOUT = "heldout"

# Beyond as many as are held out: enough that one of them is trained on, unless almost all are held out.
_FEW_ROWS = 100

Row = dict[str, Any]  # one row of schemas.PROMPTS


@dataclass(frozen=True)
class PromptSet:
    """All rows of the prompts stage, in final order.

    Attributes:
        train: rows of the train prompts, the samples of one prompt side by side.
        heldout: one row for each heldout prompt.
        dropped: rows that could not be used: data set -> reason -> count. For the manifest.
        first_dropped: data set -> reason -> the first such row, from 1, empty lines not counted.
        revisions: what `dataset_revisions` gives, of the very bytes that were read.
    """

    train: list[Row]
    heldout: list[Row]
    dropped: dict[str, dict[str, int]]
    first_dropped: dict[str, dict[str, int]]
    revisions: dict[str, str]


def dataset_revisions(config: PromptsConfig) -> dict[str, str]:
    """Revision of each data set's content, by data set: commits, hashes and package versions, never a path.

    Raises:
        InputError: a file is not there, a package not installed, a hub data set neither pinned nor known offline.
        InfrastructureError: the hub or the object store did not answer.
    """
    opened = (_open(config, index) for index in range(len(config.sources)))
    return {source.dataset: each.revision for source, each in zip(config.sources, opened, strict=True)}


def load_prompts(config: PromptsConfig, count_tokens: CountTokens | None = None) -> PromptSet:
    """Read every source, drop what cannot be used, split, and make the rows.

    Args:
        config: sources and split.
        count_tokens: `prompt_filters.token_counter` of the verifier. Without it no prompt is dropped for its
            length, so that there may be more of them than the stage will have.

    Raises:
        InputError: a source is missing or damaged or has no usable prompt, or none is left to train on.
        InfrastructureError: the hub or the object store did not answer.
    """
    selection = Selection(config, count_tokens)
    dropped: dict[str, dict[str, int]] = {}
    first_dropped: dict[str, dict[str, int]] = {}
    revisions: dict[str, str] = {}
    for index, source in enumerate(config.sources):
        opened = _open(config, index)
        with closing(opened.entries) as entries:
            num_taken, counts, first = selection.take(source, entries)
        if not num_taken:
            reasons = ", ".join(_reasons_said(counts, {})) or "it is empty"
            what = f"{source.file or source.dataset} holds no usable prompt ({reasons})"
            if source.file and ".jsonl" in source.file and counts.keys() & {"wrong_type", "broken_json"}:
                what += "; each line of a .jsonl file is one object, and a list of them belongs into a .json file"
            raise InputError(_field(config, index), what)
        dropped[source.dataset], first_dropped[source.dataset] = counts, first
        revisions[source.dataset] = opened.revision
    prompts = selection.prompts
    order = sorted(prompts)
    num_heldout = _num_heldout(config, order)
    return PromptSet(
        train=[row for place in order[num_heldout:] for row in _rows(config, prompts[place], TRAIN)],
        heldout=[row for place in order[:num_heldout] for row in _rows(config, prompts[place], HELDOUT)],
        dropped=dropped,
        first_dropped=first_dropped,
        revisions=revisions,
    )


def check_split(config: PromptsConfig) -> None:
    """Raise InputError, as `load_prompts`, where files and packages on this machine leave nothing to train on.

    Of what is right only the first rows are read; what lies elsewhere is not asked, as it would be fetched.
    """
    if any(source.hub or "://" in (source.file or "") for source in config.sources):
        return
    selection, few = Selection(config, None), (config.heldout_prompts or 0) + _FEW_ROWS
    found = []
    for index, source in enumerate(config.sources):
        with closing(_open(config, index).entries) as entries:
            found.append(selection.take(source, itertools.islice(entries, few))[0])
    if not all(found) or not _leaves_some(config, sorted(selection.prompts)):
        load_prompts(config)  # which knows, and tells


def left_out_said(
    config: PromptsConfig,
    dropped: Mapping[str, Mapping[str, int]],
    first_dropped: Mapping[str, Mapping[str, int]] | None = None,
    *,
    lengths: bool,
) -> str:
    """What of each data set is not taken, and why, to be put behind the counts of what is; empty where all is.

    Args:
        dropped, first_dropped: of a PromptSet.
        lengths: whether it was made with `count_tokens`.
    """
    said = []
    for source in config.sources:
        why = _reasons_said(dropped.get(source.dataset, {}), (first_dropped or {}).get(source.dataset, {}))
        why += [] if source.limit is None else [f"whatever follows the first {source.limit} (limit)"]
        why += ["those too long are counted when it runs"] if source.counts_tokens and not lengths else []
        if why:
            said.append(f"of {source.dataset}: {', '.join(why)}")
    return f"; not taken {'; '.join(said)}" if said else ""


def _reasons_said(counts: Mapping[str, int], first: Mapping[str, int]) -> list[str]:
    """`2 wrong_type (the first in row 5)` and its like."""
    return [
        f"{count} {reason}"
        + (f" ({'the first in ' if count > 1 else ''}row {first[reason]})" if reason in first else "")
        for reason, count in counts.items()
    ]


def cut_shards(prompts: PromptSet, shard_size: int) -> list[tuple[str, list[Row]]]:
    """(split, rows) of every shard, train shards first. No shard holds rows of both splits."""
    return [
        (split, rows[start : start + shard_size])
        for split, rows in ((TRAIN, prompts.train), (HELDOUT, prompts.heldout))
        for start in range(0, len(rows), shard_size)
    ]


def to_parquet(rows: list[Row]) -> bytes:
    """The rows as one Parquet file of `schemas.PROMPTS`; the same rows give the same bytes."""
    sink = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows, schema=PROMPTS), sink, compression="zstd")
    return sink.getvalue()


def _field(config: PromptsConfig, index: int) -> str:
    return f"prompts.sources[{index}].{config.sources[index].origin}"


def _open(config: PromptsConfig, index: int) -> OpenSource:
    return open_source(config.sources[index], _field(config, index))


def _num_heldout(config: PromptsConfig, order: list[str]) -> int:
    """How many of the sorted prompts, from the front, are heldout."""
    if config.heldout_prompts is not None:
        where, num_heldout = "prompts.heldout_prompts", config.heldout_prompts
        # Equal prompts, where they are kept, must not be parted.
        while 0 < num_heldout < len(order) and _equal(order[num_heldout - 1], order[num_heldout]):
            num_heldout += 1
    else:
        # The order is uniform over its hex digits: what lies under the share's point is heldout.
        where = "prompts.heldout_share"
        num_heldout = bisect.bisect_left(order, f"{int(config.heldout_share * 2**52):013x}")
    if num_heldout >= len(order):
        raise InputError(where, f"keeps {num_heldout} of {len(order)} usable prompts out of training; leave some")
    return num_heldout


def _leaves_some(config: PromptsConfig, order: list[str]) -> bool:
    try:
        _num_heldout(config, order)
    except InputError:
        return False
    return True


def _equal(place: str, other: str) -> bool:
    return place[:ORDER_HEX_DIGITS] == other[:ORDER_HEX_DIGITS]


def _rows(config: PromptsConfig, prompt: Prompt, split: str) -> list[Row]:
    overrides = prompt.source.sampling.model_dump(exclude_none=True) if prompt.source.sampling else {}
    rows: list[Row] = []
    for sample in range(config.samples_per_prompt if split == TRAIN else 1):
        greedy = split == TRAIN and sample < config.greedy_samples
        sampling = {**overrides, "temperature": 0.0} if greedy else overrides
        rows.append(
            {
                "sample_id": f"{prompt.prompt_id}-{prompt.number * config.samples_per_prompt + sample}",
                "messages": prompt.messages,
                "dataset": prompt.source.dataset,
                "domain": prompt.domain,
                "split": split,
                "sampling": canonical_json(sampling).decode(),
            }
        )
    return rows
