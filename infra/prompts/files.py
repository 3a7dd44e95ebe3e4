"""Rows out of files of prompts: JSONL, JSON, CSV and Parquet, one row after another in bounded memory.

A row that cannot be read comes as the `UnusableRow` that says why, in its place. A file that is damaged as a whole
(torn gzip, half a JSON list, no Parquet) is an InputError: what follows the damage would be lost unseen.
"""

from __future__ import annotations

import codecs
import contextlib
import csv
import gzip
import io
import json
import re
import sys
import zlib
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import IO, Any

import pyarrow as pa
import pyarrow.parquet as pq

from infra.errors import InputError

Entry = Any
"""A row as its file gives it, meant to be a dict; or an `UnusableRow`."""

_CHUNK_CHARACTERS = 2**20
_LONGEST_ITEM_CHARACTERS = 2**27
_BATCH_ROWS = 1000
_DATA_FIRST = re.compile(r'\s*\{\s*"data"\s*:\s*(?=\[)')
_BETWEEN = re.compile(r"[\s,]*")


class UnusableRow(Exception):
    """A row cannot be used; the text is the reason it is counted under in the manifest."""


def read_entries(path: Path, name: str, where: str) -> Generator[Entry, None, None]:
    """The rows of one local file.

    Args:
        path: where it lies.
        name: its name, whose ending tells the format: .parquet, .csv, .json, anything else is JSONL. `.gz` after it
            means nothing: gzip is recognized by its first bytes.
        where: name of the config field, for errors.

    Raises:
        InputError: the file as a whole is damaged, or not of the format.
    """
    ending = Path(name.lower().removesuffix(".gz")).suffix
    try:
        if ending == ".parquet":
            yield from _parquet(path)
        else:
            with path.open("rb") as raw:
                packed = raw.read(2) == b"\x1f\x8b"
                raw.seek(0)
                file: Any = gzip.GzipFile(fileobj=raw) if packed else raw
                yield from _TEXT_FORMATS.get(ending, read_lines)(file)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise InputError(where, f"{name} is a damaged gzip file ({error})") from error
    except (pa.ArrowException, csv.Error, json.JSONDecodeError) as error:
        raise InputError(where, f"{name} is no whole {ending[1:]} file ({error})") from error


def read_lines(file: IO[bytes]) -> Iterator[Entry]:
    """The rows of JSONL. Cut at \\n only: U+2028 and its like may stand inside a JSON text."""
    for number, line in enumerate(file):
        line = line.removeprefix(codecs.BOM_UTF8) if number == 0 else line
        if line.strip():
            yield _decoded(line)


def table_entries(table: pa.Table | pa.RecordBatch) -> Iterator[Entry]:
    """The rows of an Arrow table. What Python cannot hold (no UTF-8, the year 10000) costs its own row only."""
    try:
        yield from table.to_pylist()
    except (ValueError, OverflowError):
        for index in range(table.num_rows):
            try:
                yield table.slice(index, 1).to_pylist()[0]
            except (ValueError, OverflowError) as error:
                yield UnusableRow("broken_utf8" if isinstance(error, UnicodeDecodeError) else "wrong_type")


def _parquet(path: Path) -> Iterator[Entry]:
    try:
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=_BATCH_ROWS):
                yield from table_entries(batch)
    except OSError as error:
        if error.errno is None:  # not the disk's: Arrow's for damaged pages
            raise pa.ArrowInvalid(str(error)) from error
        raise


def _decoded(line: bytes) -> Entry:
    try:
        return json.loads(line.decode())
    except UnicodeDecodeError:
        return UnusableRow("broken_utf8")
    except (ValueError, RecursionError):
        return UnusableRow("broken_json")


def _text(file: IO[bytes]) -> io.TextIOWrapper:
    """As text in which a byte that is not UTF-8 is half a surrogate pair: refused later, with its row only."""
    return io.TextIOWrapper(file, encoding="utf-8-sig", errors="surrogateescape", newline="")


def _csv(file: IO[bytes]) -> Iterator[Entry]:
    csv.field_size_limit(sys.maxsize)  # a prompt may be longer than the library's 128 KiB
    # strict: a quote that nothing closes is damage, and not one prompt made of all the rows after it
    yield from csv.DictReader(_text(file), strict=True)


def _json(file: IO[bytes]) -> Iterator[Entry]:
    """The items of one list, alone or under `data`; JSONL, which often has this ending; or the one object."""
    text = _text(file)
    start = text.read(_CHUNK_CHARACTERS).lstrip()
    if found := _DATA_FIRST.match(start):
        return _items(text, start[found.end() :])
    if start.startswith("["):
        return _items(text, start)
    text.detach()
    file.seek(0)
    filled = (line for line in file if line.strip())
    first, second = next(filled, b""), next(filled, b"")
    file.seek(0)
    if not second or isinstance(_decoded(first), UnusableRow):
        with contextlib.suppress(ValueError, RecursionError):
            whole = json.loads(file.read().decode("utf-8-sig", "surrogateescape"))
            return iter(whole["data"] if isinstance(whole.get("data"), list) else [whole])
        file.seek(0)
    return read_lines(file)


def _items(text: IO[str], buffer: str) -> Iterator[Entry]:
    """The items of a JSON list, which begins with the buffer and goes on in `text`."""
    decoder = json.JSONDecoder()
    position = 1
    while True:
        position = _BETWEEN.match(buffer, position).end()  # type: ignore[union-attr]  # matches even nothing
        if buffer.startswith("]", position):
            return
        end, problem = len(buffer), "its list is not closed"
        try:
            item, end = decoder.raw_decode(buffer, position)
        except (ValueError, RecursionError) as error:
            problem = str(error)
        if end < len(buffer):
            yield item
            position = end
            continue
        # The item may go on after the buffer: read as much again as is unread, so that a long one costs no square.
        unread = len(buffer) - position
        if unread > _LONGEST_ITEM_CHARACTERS or not (more := text.read(max(unread, _CHUNK_CHARACTERS))):
            raise json.JSONDecodeError(problem, "", 0)
        buffer, position = buffer[position:] + more, 0


_TEXT_FORMATS: dict[str, Callable[[IO[bytes]], Iterator[Entry]]] = {".csv": _csv, ".json": _json}
