"""A data folder of speculators 0.9: what its trainer reads, and what people bring from there.

    FOLDER/                                 a Hugging Face dataset (`save_to_disk`): dataset_info.json, data-*.arrow
        input_ids, loss_mask                int64 lists of a conversation's ids and 0 or 1 for each
        seq_len                             int64, number of ids
    FOLDER/hidden_states/hs_17.safetensors  of row 17
        hidden_states                       [tokens, layers, hidden], layers ascending, the verifier's last one,
                                            before the final norm, at the end: the same as ours
        token_ids                           [tokens] int64, equal to input_ids

A row whose states could not be made has no file there, or a torn one. Files of its fp8 connector hold
`hidden_states_scales` beside float8 states. Folders that we export have two more columns, `sample_id` and `status`,
which its trainer does not look at, and `draftsmith.json`, which says of which verifier and layers they are.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from infra.errors import InfrastructureError, InputError
from infra.fingerprint import content_sha256

STATES_FOLDER = "hidden_states"
ABOUT_FILE = "draftsmith.json"
ID_COLUMNS = ("input_ids", "loss_mask")
STATES, TOKEN_IDS, SCALES = "hidden_states", "token_ids", "hidden_states_scales"

_STATES_NAME = re.compile(r"hs_(0|[1-9]\d*)\.safetensors")
REVISION_HEX_DIGITS = 32
_hashed_ids: dict[tuple[Path, tuple[tuple[str, int, int], ...]], str] = {}
_OWN_COLUMNS = ("sample_id", "status")
_STATES_TYPES = (torch.bfloat16, torch.float16, torch.float32)
# Rows of ids that are in memory at once while a data set is hashed or checked.
_BATCH_ROWS = 1000


class TornFile(Exception):
    """A file of states that cannot be read as what it should be."""


class StatesHeader(NamedTuple):
    """What a file of states holds, as its header says.

    Args:
        shape: of the states; [tokens, layers, hidden] where they are what they should be.
        num_ids: number of token ids beside them.
    """

    shape: tuple[int, ...]
    num_ids: int


def states_name(index: int) -> str:
    """File name of the states of row `index`."""
    return f"hs_{index}.safetensors"


def read_header(path: Path) -> StatesHeader:
    """Shapes in a file of states; its tensors are not read.

    Raises:
        TornFile: it is cut short, or holds other tensors.
        InfrastructureError: it cannot be read just now.
    """
    try:
        with safe_open(path, framework="pt") as file:
            ids = file.get_slice(TOKEN_IDS).get_shape()
            return StatesHeader(tuple(file.get_slice(STATES).get_shape()), int(np.prod(ids)))
    except (SafetensorError, KeyError) as error:
        raise TornFile(_brief(error)) from error
    except OSError as error:
        raise InfrastructureError(f"{path} cannot be read: {error}") from error


def read_states(path: Path) -> tuple[Tensor, list[int]]:
    """States [tokens, layers, hidden], mapped from the file (fp8 ones decoded to bf16), and token ids.

    Raises: as `read_header`.
    """
    try:
        tensors = load_file(path)
        states, ids = tensors[STATES], tensors[TOKEN_IDS]
    except (SafetensorError, KeyError) as error:
        raise TornFile(_brief(error)) from error
    except OSError as error:
        raise InfrastructureError(f"{path} cannot be read: {error}") from error
    if SCALES in tensors:
        from hs_connectors.fp8_utils import dequantize_fp8_tensor

        states = dequantize_fp8_tensor(states, tensors[SCALES])
    if states.dtype not in _STATES_TYPES:  # float8 without its scales, for one
        raise TornFile(f"its states are of type {states.dtype}")
    return states, ids.flatten().tolist()


def _brief(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"


class DataFolder:
    """A data folder on this machine, opened for reading; its ids are mapped, not loaded.

    Args:
        folder: the data set's.
        states: of the files of states.
        field: what errors name.

    Attributes:
        sizes: bytes of every file of states by row; a row without one is not in it.

    Raises:
        InputError: there is no data set, it lacks a column, or there is no folder of states.
    """

    def __init__(self, folder: Path, states: Path, field: str) -> None:
        self.folder, self.states, self.field = folder, states, field
        data = _open_dataset(folder, field)
        kinds = {field.name: field.type for field in data.features.arrow_schema}
        own = [name for name in _OWN_COLUMNS if name in kinds and pa.types.is_string(kinds[name])]
        self._columns = [*own, *ID_COLUMNS]
        self._data = data.select_columns(self._columns).with_format("arrow")
        self.sizes = self._list_states()
        self.about = self._read_about()

    def __len__(self) -> int:
        return len(self._data)

    def path(self, index: int) -> Path:
        """File of the states of row `index`."""
        return self.states / states_name(index)

    def rows(self, start: int, stop: int) -> list[dict[str, Any]]:
        """Rows [start, stop) as `sample_id`, `status`, `input_ids` and `loss_mask` (of bools)."""
        rows: list[dict[str, Any]] = self._data[start:stop].to_pylist()
        for index, row in enumerate(rows, start):
            row.setdefault("sample_id", f"hs_{index}")
            row.setdefault("status", "ok")
            row["loss_mask"] = [bool(value) for value in row["loss_mask"]]
        return rows

    def batches(self) -> Iterator[tuple[int, pa.Table]]:
        """The whole data set: number of the first row, and some rows from there."""
        for start in range(0, len(self), _BATCH_ROWS):
            yield start, self._data[start : start + _BATCH_ROWS]

    @property
    def revision(self) -> str:
        """Hash of the ids and masks, and of which files of states there are and how large: never of where."""
        known = (self.folder, _stamps(self.folder))
        if known not in _hashed_ids:
            _hashed_ids[known] = self._hash_ids()
        files = hashlib.sha256()
        for index in sorted(self.sizes):
            files.update(f"{states_name(index)} {self.sizes[index]}\n".encode())
        return content_sha256([_hashed_ids[known], files.hexdigest()])[:REVISION_HEX_DIGITS]

    def _hash_ids(self) -> str:
        digests = {name: hashlib.sha256() for name in self._columns}
        lengths = hashlib.sha256()  # of the ids; the masks' are the same, or the folder is refused
        for _, table in self.batches():
            for name in self._columns:
                column = table[name].combine_chunks()
                is_ids = name in ID_COLUMNS
                digests[name].update(
                    values_of(column).tobytes() if is_ids else json.dumps(column.to_pylist()).encode()
                )
            lengths.update(lengths_of(table["input_ids"]).tobytes())
        return content_sha256({name: digest.hexdigest() for name, digest in (digests | {"": lengths}).items()})

    def _list_states(self) -> dict[int, int]:
        try:
            found = ((_STATES_NAME.fullmatch(path.name), path) for path in self.states.iterdir())
            sizes = {int(match[1]): path.stat().st_size for match, path in found if match}
        except OSError as error:
            raise InputError(
                self.field,
                f"{self.states} holds no hs_*.safetensors ({error.strerror}); run `speculators "
                "generate-offline-data`, or say in import_states.hidden_states_folder where they are",
            ) from None
        return {index: size for index, size in sizes.items() if index < len(self)}

    def _read_about(self) -> dict[str, Any]:
        """`draftsmith.json`; empty where there is none."""
        try:
            found = json.loads((self.folder / ABOUT_FILE).read_bytes())
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}


def lengths_of(column: pa.ChunkedArray) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Length of each row's list."""
    return np.asarray(pc.list_value_length(column).cast(pa.int64()).to_numpy())


def values_of(column: pa.Array) -> np.ndarray[Any, np.dtype[np.int64]]:
    """All values of a column of lists, as int64."""
    return np.asarray(column.flatten().cast(pa.int64()).to_numpy(zero_copy_only=False))


def _stamps(folder: Path) -> tuple[tuple[str, int, int], ...]:
    """Size and time of the data set's files: the ids are hashed again when one of them has changed."""
    stats = sorted((path.name, path.stat()) for path in folder.glob("*.arrow"))
    return tuple((name, stat.st_size, stat.st_mtime_ns) for name, stat in stats)


def _open_dataset(folder: Path, field: str) -> Any:
    from datasets import Dataset, load_from_disk

    try:
        found = load_from_disk(folder)
    except FileNotFoundError:
        raise InputError(
            field, f"{folder} is no data set; name the folder that `speculators prepare-data` has written"
        ) from None
    except (OSError, ValueError, KeyError, TypeError, pa.ArrowInvalid) as error:
        raise InputError(field, f"the data set in {folder} cannot be read: {error}") from None
    if not isinstance(found, Dataset):
        raise InputError(field, f"{folder} holds several splits ({', '.join(found)}); name the folder of one")
    for name in ID_COLUMNS:
        if name not in found.column_names:
            has = ", ".join(found.column_names)
            raise InputError(
                field, f"{folder} lacks the column {name} (it has {has}); run `speculators prepare-data`"
            )
        if not _is_list_of_numbers(found.features.arrow_schema.field(name).type):
            raise InputError(field, f"the column {name} of {folder} must hold lists of integers")
    if not len(found):
        raise InputError(field, f"the data set in {folder} has no row")
    return found


def _is_list_of_numbers(kind: pa.DataType) -> bool:
    is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind)
    return bool(is_list and (pa.types.is_integer(kind.value_type) or pa.types.is_boolean(kind.value_type)))
