"""Whether a data folder fits the verifier: told from its ids and from the headers of its files of states.

All of it is looked at before anything is written. A header is read in some 0.1 ms, no tensor is.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from infra.errors import InputError
from infra.interchange.folder import (
    ID_COLUMNS,
    DataFolder,
    StatesHeader,
    TornFile,
    lengths_of,
    read_header,
    states_name,
    values_of,
)
from infra.interchange.importing import FIELD, SECTION, ImportConfig, open_folder

# Reading headers is waiting, on a network file system at least.
_HEADER_THREADS = 16

logger = logging.getLogger("draftsmith.interchange")


@dataclass(frozen=True)
class Wanted:
    """What the states must fit.

    Args:
        verifier: its name, for messages.
        layer_ids: of the extraction, ascending.
        max_failed_share: of rows without usable states.
    """

    verifier: str
    hidden_size: int
    vocab_size: int
    layer_ids: tuple[int, ...]
    max_failed_share: float
    verifier_revision: str


@functools.lru_cache(maxsize=4)
def check_import(config: ImportConfig, wanted: Wanted, revision: str) -> None:
    """Refuse a folder that does not fit, from its ids and the headers of its files; once a process.

    Args:
        revision: of the folder, so that another content is checked anew.
    Raises:
        InputError: what does not fit, and what would be right.
    """
    folder = open_folder(config)
    _refuse_other_origin(folder, wanted)
    lengths = _checked_lengths(folder, wanted)
    _refuse_absent(folder, config)
    with ThreadPoolExecutor(_HEADER_THREADS) as pool:
        headers = pool.map(functools.partial(_header, folder), sorted(folder.sizes))
        torn = [
            index
            for index, header in zip(sorted(folder.sizes), headers, strict=True)
            if _is_torn(folder, index, header, int(lengths[index]), wanted)
        ]
    num_lost = len(torn) + len(folder) - len(folder.sizes)
    if num_lost > wanted.max_failed_share * len(folder):
        raise InputError(
            FIELD,
            f"{num_lost} of {len(folder)} rows have no usable file of states in {folder.states} ({len(torn)} are "
            f"torn{f', {states_name(torn[0])} for one' if torn else ''}), more than extract.max_failed_share "
            f"{wanted.max_failed_share:g}; run `speculators generate-offline-data` again, or raise that share",
        )
    if num_lost:
        logger.warning("%d of %d rows have no usable states and become failed rows.", num_lost, len(folder))


def _refuse_other_origin(folder: DataFolder, wanted: Wanted) -> None:
    """Folders of ours say whose states they are."""
    revision, layer_ids = folder.about.get("verifier_revision"), folder.about.get("layer_ids")
    if revision not in (None, wanted.verifier_revision):
        raise InputError(
            FIELD,
            f"{folder.folder} is of the verifier with revision {revision}, but {wanted.verifier} has "
            f"{wanted.verifier_revision}",
        )
    if layer_ids not in (None, list(wanted.layer_ids)):
        raise InputError(
            FIELD,
            f"{folder.folder} holds layers {layer_ids}, but {list(wanted.layer_ids)} are wanted; set "
            f"extract.layer_ids to {layer_ids}",
        )


def _checked_lengths(folder: DataFolder, wanted: Wanted) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Length of every row.

    Raises:
        InputError: a row is empty, its mask is of another length, an id is outside the vocabulary, or two rows have
            the same sample_id.
    """
    found = []
    seen: set[str] = set()
    for start, table in folder.batches():
        for name in table.column_names:
            if table[name].null_count or (name in ID_COLUMNS and table[name].combine_chunks().flatten().null_count):
                raise InputError(FIELD, f"the column {name} of {folder.folder} has nulls")
        lengths = lengths_of(table["input_ids"])
        for wrong, what in (
            (lengths != lengths_of(table["loss_mask"]), "has a loss_mask of another length than its input_ids"),
            (lengths == 0, "has no input_ids"),
        ):
            if wrong.any():
                raise InputError(FIELD, f"row {start + int(wrong.argmax())} of {folder.folder} {what}")
        ids = values_of(table["input_ids"].combine_chunks())
        outside = (ids < 0) | (ids >= wanted.vocab_size)
        if outside.any():
            place = int(outside.argmax())
            row = start + int(np.searchsorted(lengths.cumsum(), place, side="right"))
            raise InputError(
                FIELD,
                f"row {row} of {folder.folder} has the token id {ids[place]}, outside the {wanted.vocab_size} of "
                f"{wanted.verifier}; the folder is of another model",
            )
        if "sample_id" in table.column_names:
            for name in table["sample_id"].to_pylist():
                if name in seen:
                    raise InputError(FIELD, f"two rows of {folder.folder} have the sample_id {name!r}")
                seen.add(name)
        found.append(lengths)
    return np.concatenate(found)


def _refuse_absent(folder: DataFolder, config: ImportConfig) -> None:
    empty = [index for index, size in sorted(folder.sizes.items()) if size == 0]
    if empty:
        raise InputError(
            FIELD,
            f"{states_name(empty[0])} {_and_more(empty)}in {folder.states} is empty: vLLM's own connector writes "
            "such on a CPU; delete them and run `speculators generate-offline-data` again",
        )
    absent = [index for index in range(len(folder)) if index not in folder.sizes]
    if absent and (config.missing == "refuse" or not folder.sizes):
        raise InputError(
            FIELD,
            f"{states_name(absent[0])} {_and_more(absent)}is not in {folder.states}; run `speculators "
            f"generate-offline-data` to its end, or set {SECTION}.missing=leave_out to go on without those rows",
        )


def _and_more(indices: Sequence[int]) -> str:
    return f"(and {len(indices) - 1} more) " if len(indices) > 1 else ""


def _header(folder: DataFolder, index: int) -> StatesHeader | None:
    """None where the file is torn."""
    try:
        return read_header(folder.path(index))
    except TornFile:
        return None


def _is_torn(folder: DataFolder, index: int, header: StatesHeader | None, num_tokens: int, wanted: Wanted) -> bool:
    """Raises InputError where a whole file is not what it should be."""
    if header is None:
        return True
    shape, expected = header.shape, (num_tokens, len(wanted.layer_ids), wanted.hidden_size)
    if shape == expected and header.num_ids == num_tokens:
        return False
    name = f"{folder.path(index)} holds states of shape {list(shape)}"
    if len(shape) != 3:
        raise InputError(FIELD, f"{name}, which should be [tokens, layers, hidden]")
    if shape[2] != wanted.hidden_size:
        raise InputError(FIELD, f"{name}, but {wanted.verifier} has hidden_size {wanted.hidden_size}")
    if shape[1] != len(wanted.layer_ids):
        raise InputError(
            FIELD,
            f"{name}, so {shape[1]} layers, but extract.layer_ids are {list(wanted.layer_ids)}; set them to the "
            "layers that were extracted, the last one included",
        )
    raise InputError(
        FIELD,
        f"{name} and {header.num_ids} token_ids, but row {index} has {num_tokens} input_ids; extract it again, "
        "without prefix caching",
    )
