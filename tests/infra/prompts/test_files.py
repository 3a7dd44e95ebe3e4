"""The same rows out of every format; a damaged row is dropped, a damaged file refused."""

from __future__ import annotations

import contextlib
import csv
import gzip
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from infra import storage
from infra.errors import InputError
from infra.fingerprint import sha256_hex
from infra.prompts import files as prompt_files
from infra.prompts import sources as prompt_sources
from infra.prompts.config import PromptSource
from infra.prompts.files import UnusableRow, read_entries
from infra.prompts.rows import conversation
from infra.prompts.sources import open_source

ROWS: list[dict[str, Any]] = [
    {"prompt": "Why?", "domain": "a"},
    {"prompt": 'Two\nlines, a "quote", a \u2028 and a 🦊', "domain": "b"},
    {"prompt": "x" * 200_000, "domain": "c"},
]


def as_csv(rows: list[dict[str, Any]]) -> bytes:
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, ["prompt", "domain"])
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue().encode()


def as_parquet(rows: list[dict[str, Any]]) -> bytes:
    sink = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows), sink)
    return sink.getvalue()


FORMATS: dict[str, Callable[[list[dict[str, Any]]], bytes]] = {
    "q.jsonl": lambda rows: "\n".join(json.dumps(row, ensure_ascii=False) for row in rows).encode(),
    "lines.json": lambda rows: "\n".join(json.dumps(row) for row in rows).encode(),
    "list.json": lambda rows: json.dumps(rows, indent=1).encode(),
    "bom.json": lambda rows: b"\xef\xbb\xbf\n " + json.dumps(rows).encode(),
    "data.json": lambda rows: json.dumps({"data": rows, "version": 1}, indent=2, ensure_ascii=False).encode(),
    "last.json": lambda rows: json.dumps({"version": {"a": [1]}, "data": rows}, indent=2).encode(),
    "line.json": lambda rows: json.dumps({"version": 1, "data": rows}).encode(),
    "q.csv": as_csv,
    "q.parquet": as_parquet,
}


def entries(path: Path, data: bytes) -> list[Any]:
    path.write_bytes(data)
    return list(read_entries(path, path.name, "field"))


@pytest.mark.parametrize("chunk", [7, 20, 2**20])
@pytest.mark.parametrize("name", FORMATS)
def test_every_format_gives_the_same_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, chunk: int
) -> None:
    monkeypatch.setattr(prompt_files, "_CHUNK_CHARACTERS", chunk)
    data = FORMATS[name](ROWS)
    assert entries(tmp_path / name, data) == ROWS
    if name != "q.parquet":
        assert entries(tmp_path / f"{name}.gz", gzip.compress(data)) == ROWS


def test_one_object_is_one_row(tmp_path: Path) -> None:
    assert entries(tmp_path / "q.json", b'{\n "prompt":\n "Why?"\n}') == [{"prompt": "Why?"}]
    assert entries(tmp_path / "q.json", b"") == []
    assert entries(tmp_path / "q.json", b"[]") == []
    assert entries(tmp_path / "q.csv", b"") == []


def test_an_item_is_not_cut_where_a_chunk_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for chunk in range(1, 20):
        monkeypatch.setattr(prompt_files, "_CHUNK_CHARACTERS", chunk)
        assert entries(tmp_path / "q.json", b'[1, 2345, "a", null, {"b": 67}]') == [1, 2345, "a", None, {"b": 67}]


@pytest.mark.parametrize("ending", ["json", "csv", "jsonl", "parquet"])
def test_a_text_that_is_not_utf8_costs_its_row_only(tmp_path: Path, ending: str) -> None:
    texts = [b"first", b"caf\xe9", b"last"]
    if ending == "parquet":
        buffers = pa.array(texts, pa.binary()).buffers()
        column = pa.StringArray.from_buffers(3, buffers[1], buffers[2])
        pq.write_table(pa.table({"prompt": column}), tmp_path / "q.parquet")
        data = (tmp_path / "q.parquet").read_bytes()
    elif ending == "csv":
        data = b"prompt\n" + b"\n".join(texts)
    else:
        rows = [b'{"prompt": "' + text + b'"}' for text in texts]
        data = b"[" + b",".join(rows) + b"]" if ending == "json" else b"\n".join(rows)
    first, broken, last = entries(tmp_path / f"q.{ending}", data)
    assert (first, last) == ({"prompt": "first"}, {"prompt": "last"})
    if ending in ("jsonl", "parquet"):
        assert isinstance(broken, UnusableRow)
        assert str(broken) == "broken_utf8"
    else:  # half a surrogate pair, which the checks of the row refuse
        assert broken == {"prompt": "caf\udce9"}


def test_a_value_that_python_cannot_hold_costs_its_row_only(tmp_path: Path) -> None:
    times = pa.array([0, 2**60, 0], pa.timestamp("s"))
    table = pa.table({"prompt": ["a", "b", "c"], "time": times})
    first, broken, last = prompt_files.table_entries(table)
    assert (first["prompt"], str(broken), last["prompt"]) == ("a", "wrong_type", "c")
    number = b"[" + b"9" * 5000 + b"]"
    assert [str(entry) for entry in entries(tmp_path / "q.jsonl", number)] == ["broken_json"]
    with pytest.raises(InputError, match=r"^field: q\.json is no whole json file"):
        entries(tmp_path / "q.json", number)


def test_a_nul_reaches_the_checks_of_its_row(tmp_path: Path) -> None:
    assert entries(tmp_path / "q.csv", b"prompt\na\0b\nc\n") == [{"prompt": "a\0b"}, {"prompt": "c"}]


@given(data=st.lists(st.binary() | st.text().map(str.encode) | st.just(b'{"prompt": "a"}')).map(b"\n".join))
def test_no_line_stops_the_rest(data: bytes) -> None:
    rows = list(prompt_files.read_lines(io.BytesIO(data + b'\n{"prompt": "last"}')))
    assert rows[-1] == {"prompt": "last"}
    for row in rows:
        with contextlib.suppress(UnusableRow):
            conversation(row, PromptSource(file="q.jsonl"))


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("q.json", b'[{"prompt": "a"}, {"prompt": "b"'),
        ("q.json", b'[{"prompt": "a"}, {prompt: "b"}]'),
        ("q.json", b'[{"prompt": "a"}'),
        ("q.json", b'{"data": [{"prompt": "a"}'),
        ("q.json", b"[" * 100_000),
        ("q.jsonl.gz", gzip.compress(b'{"prompt": "a"}\n' * 1000, mtime=0)[:-12]),
        ("q.jsonl", b"\x1f\x8bno gzip"),
        ("q.csv", b'prompt\nfirst\n"stray quote\nsecond\nthird\n'),
        ("q.parquet", b"PAR1"),
        ("q.parquet", as_parquet(ROWS)[:-40]),
        ("q.parquet", b""),
    ],
)
def test_a_damaged_file_is_refused_as_a_whole(tmp_path: Path, name: str, data: bytes) -> None:
    with pytest.raises(InputError, match=rf"^field: {name} is "):
        entries(tmp_path / name, data)


# --- where files lie ---


def read(file: str) -> tuple[str, list[str]]:
    opened = open_source(PromptSource(file=file), "prompts.sources[0].file")
    return opened.revision, [entry["prompt"] for entry in opened.entries]


def test_a_pattern_names_several_files_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAFTSMITH_HOME", str(tmp_path))
    for name in "bca":
        (tmp_path / f"part-{name}.jsonl").write_text(json.dumps({"prompt": name}))
    (tmp_path / "part-d.txt").write_text("not this")
    (tmp_path / "deeper").mkdir()
    (tmp_path / "deeper" / "part-e.jsonl").write_text("not this")
    revision, prompts = read("part-*.jsonl")
    assert prompts == ["a", "b", "c"]
    assert revision.endswith(" files:3")
    assert str(tmp_path) not in revision
    assert read(f"file://{tmp_path}/part-?.jsonl") == (revision, prompts)
    # Of one file, the pattern does not show.
    assert read("part-a.*") == read("part-a.jsonl")
    (tmp_path / "part-c.jsonl").write_text(json.dumps({"prompt": "C"}))
    assert read("part-*.jsonl")[0] != revision
    with pytest.raises(InputError, match=r"^prompts\.sources\[0\]\.file: other-\*\.jsonl is not there"):
        read("other-*.jsonl")


def test_objects_of_a_store_are_read_through_a_local_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    objects = {"s3://bucket/p/a.jsonl.gz": gzip.compress(b'{"prompt": "a"}'), "s3://bucket/p/b.csv": b"prompt\nb\n"}
    monkeypatch.setattr(storage, "sha256", lambda uri: sha256_hex(objects[uri]))
    monkeypatch.setattr(storage, "get_file", lambda uri, path: path.write_bytes(objects[uri]))
    monkeypatch.setattr(storage, "list_objects", lambda uri: ["a.jsonl.gz", "b.csv", "deeper/c.csv"])
    assert read("s3://bucket/p/*")[1] == ["a", "b"]
    assert read("s3://bucket/p/b.csv") == (f"sha256:{sha256_hex(objects['s3://bucket/p/b.csv'])}", ["b"])


def test_a_file_that_changes_while_it_is_read_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "q.jsonl"
    file.write_text('{"prompt": "a"}\n')
    opened = open_source(PromptSource(file=str(file)), "prompts.sources[0].file")
    file.write_text('{"prompt": "b"}\n')
    with pytest.raises(InputError, match=r"q\.jsonl was changed while it was read"):
        list(opened.entries)


def test_nothing_is_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_sources.tempfile, "tempdir", str(tmp_path))
    file = tmp_path / "q.jsonl"
    file.write_text('{"prompt": "a"}\n' * 9)
    opened = open_source(PromptSource(file=str(file)), "prompts.sources[0].file")
    next(opened.entries)
    opened.entries.close()
    assert [path.name for path in tmp_path.iterdir()] == ["q.jsonl"]
