"""The metadata at the head of a GGUF file, in milliseconds (gguf's own reader takes seconds for a vocabulary)."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import BinaryIO

# Value types of the format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING = 8
_ARRAY = 9

Value = int | float | bool | str


def read_metadata(path: Path) -> dict[str, Value]:
    """The key-value pairs; of an array (tokens, merges) only its length.

    Raises:
        ValueError: this is no GGUF file of version 2 or 3 (little-endian), or it is cut short.
    """
    with path.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise ValueError(f"{path.name} is no GGUF file")
        try:
            version, _, num_pairs = struct.unpack("<IQQ", file.read(20))
            if version not in (2, 3):
                raise ValueError(f"{path.name} has GGUF version {version}; 2 and 3 are known")
            return dict(_read_pair(file) for _ in range(num_pairs))
        except (struct.error, KeyError, OverflowError, MemoryError) as error:
            raise ValueError(f"{path.name} is cut short or damaged") from error


def _read_pair(file: BinaryIO) -> tuple[str, Value]:
    key = _read_string(file)
    return key, _read_value(file, *struct.unpack("<I", file.read(4)))


def _read_value(file: BinaryIO, kind: int) -> Value:
    if kind == _STRING:
        return _read_string(file)
    if kind != _ARRAY:
        scalar = struct.Struct("<" + _SCALARS[kind])
        value: Value = scalar.unpack(file.read(scalar.size))[0]
        return value
    item_kind, length = struct.unpack("<IQ", file.read(12))
    if item_kind in _SCALARS:
        file.seek(length * struct.calcsize("<" + _SCALARS[item_kind]), 1)
    else:
        for _ in range(length):
            _read_value(file, item_kind)
    return int(length)


def _read_string(file: BinaryIO) -> str:
    (length,) = struct.unpack("<Q", file.read(8))
    data = file.read(length)
    if len(data) < length:
        raise struct.error("cut short")
    return data.decode(errors="replace")
