"""The `hidden_states` artifact: the verifier's hidden states of whole conversations, as Parquet.

One row and one row group a sample, so that one sample can be read by itself. The payload columns belong to the
encoding (infra/state_encodings.py), which the schema's metadata names. A failed row keeps its ids without payload.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import torch
from torch import Tensor

from infra.schemas import STATUS_FAILED
from infra.state_encodings import ALL, ENCODINGS, relative_error

# Parquet counts the bytes of a value in 31 bits.
MAX_VALUE_BYTES = 2**31 - 2**16
# Higher levels pack the high bytes of states no better, and slower.
_ZSTD_LEVEL = 1
_ID_COLUMNS = [
    pa.field("sample_id", pa.string(), nullable=False),
    pa.field("status", pa.string(), nullable=False),  # ok, truncated or failed
    pa.field("error", pa.string()),
    pa.field("input_ids", pa.list_(pa.int32()), nullable=False),
    pa.field("loss_mask", pa.list_(pa.bool_()), nullable=False),
    pa.field("num_tokens", pa.int32(), nullable=False),
]
# Of lossy encodings, null where status is failed: what `relative_error` says of the row.
_ERROR_COLUMNS = [
    pa.field("encoding_error_mean", pa.float32()),
    pa.field("encoding_error_worst", pa.float32()),
]
# Parquet's own names of the leaves of those columns.
_ID_LEAVES = ["sample_id", "status", "error", "input_ids.list.element", "loss_mask.list.element", "num_tokens"]


@dataclass(frozen=True)
class HiddenStatesMeta:
    """What a shard's schema metadata says, each field as a JSON string under its own name.

    Args:
        layer_ids: the extracted layers, ascending; the last is the verifier's number of layers.
        hidden_size: width of one layer's state.
        verifier_revision: resolved revision of the verifier.
        encoding: name of the payload's encoding, a key of `ENCODINGS`.
        dtype: type of the decoded states.
    """

    layer_ids: tuple[int, ...]
    hidden_size: int
    verifier_revision: str
    encoding: str = "bf16"
    dtype: str = "bfloat16"

    def bytes_per_token(self) -> Mapping[str, int]:
        """Bytes that one token takes in each payload column, before its codec."""
        return ENCODINGS[self.encoding].bytes_per_token(len(self.layer_ids), self.hidden_size)

    def to_metadata(self) -> dict[str, str]:
        return {name: json.dumps(getattr(self, name)) for name in self.__dataclass_fields__}

    @classmethod
    def from_metadata(cls, metadata: Mapping[bytes, bytes] | None) -> HiddenStatesMeta:
        """Raises ValueError when the file is not one of hidden states."""
        try:
            found = {name: json.loads((metadata or {})[name.encode()]) for name in cls.__dataclass_fields__}
        except (KeyError, ValueError) as error:
            raise ValueError(f"not a file of hidden states: its metadata lacks {error}") from error
        return cls(**{**found, "layer_ids": tuple(found["layer_ids"])})


@dataclass(frozen=True)
class HiddenRow:
    """One row to be written.

    Args:
        status: of the response (`ok`, `truncated`), or `failed`.
        error: why it failed; None otherwise.
        hidden_states: [tokens, layers, hidden] in the order of the meta's layer ids; None if and only if failed.
    """

    sample_id: str
    status: str
    error: str | None
    input_ids: Sequence[int]
    loss_mask: Sequence[bool]
    hidden_states: Tensor | None


@dataclass(frozen=True)
class EncodedSample:
    """One sample whose states are still as the file has them.

    Args:
        input_ids: [tokens] int32.
        loss_mask: [tokens] bool, true where trained.
        payload: columns of the encoding, by name.
        shape: tokens, layers, hidden.
    """

    sample_id: str
    status: str
    input_ids: Tensor
    loss_mask: Tensor
    payload: Mapping[str, Any]
    shape: tuple[int, int, int]
    encoding: str

    def states(self, tokens: slice = ALL) -> tuple[Tensor, Tensor]:
        """The two states of a HiddenSample, of some of the tokens."""
        return ENCODINGS[self.encoding].decode(self.payload, self.shape, tokens)


@dataclass(frozen=True)
class HiddenSample:
    """One decoded sample. The tensors may share read-only memory with the file's bytes: never write into them.

    Args:
        input_ids: [tokens] int32.
        loss_mask: [tokens] bool, true where trained.
        aux_hidden_states: [tokens, layers * hidden] bf16, all extracted layers but the last.
        verifier_last_hidden_states: [tokens, hidden] bf16, the last layer's output before the final norm.
    """

    sample_id: str
    status: str
    input_ids: Tensor
    loss_mask: Tensor
    aux_hidden_states: Tensor
    verifier_last_hidden_states: Tensor


@functools.cache
def schema(meta: HiddenStatesMeta) -> pa.Schema:
    """The Arrow schema of a shard, metadata included."""
    encoding = ENCODINGS[meta.encoding]
    errors = _ERROR_COLUMNS if encoding.lossy else []
    payload = [pa.field(name, pa.large_binary()) for name in encoding.codecs]
    return pa.schema([*_ID_COLUMNS, *errors, *payload], metadata=meta.to_metadata())


def encode(rows: Iterable[HiddenRow], meta: HiddenStatesMeta) -> bytes:
    """A shard's Parquet bytes. Rows are taken one by one: beside the result, one sample's states are in memory."""
    sink = pa.BufferOutputStream()  # not a Python file, each of whose many writes would take the interpreter's lock
    _write((_row_table(row, meta) for row in rows), meta, sink)
    return bytes(sink.getvalue().to_pybytes())


def write(rows: Iterable[HiddenRow], meta: HiddenStatesMeta, path: Path) -> None:
    """The same as a local file, of which nothing but one sample is in memory."""
    _write((_row_table(row, meta) for row in rows), meta, str(path))


def fail_rows(data: bytes | Path, errors: Mapping[str, str]) -> bytes | Path:
    """A shard's bytes or local file, with the rows of some samples failed after all; the others are as they were.

    Args:
        errors: why, by sample id.
    """
    shard = HiddenStatesFile(data)

    def tables() -> Iterator[pa.Table]:
        for index, row in enumerate(shard.rows().to_pylist()):
            if error := errors.get(row["sample_id"]):
                failed = HiddenRow(row["sample_id"], STATUS_FAILED, error, row["input_ids"], row["loss_mask"], None)
                yield _row_table(failed, shard.meta)
            else:
                yield shard.row_table(index)

    if isinstance(data, Path):
        changed = data.with_name(f"{data.name}.changed")
        _write(tables(), shard.meta, str(changed))
        return changed.replace(data)
    sink = pa.BufferOutputStream()
    _write(tables(), shard.meta, sink)
    return bytes(sink.getvalue().to_pybytes())


def _write(row_tables: Iterable[pa.Table], meta: HiddenStatesMeta, sink: pa.NativeFile | str) -> None:
    """Parquet with a row group for each table."""
    codecs = dict.fromkeys(_ID_LEAVES, "zstd") | dict(ENCODINGS[meta.encoding].codecs)
    levels = {name: _ZSTD_LEVEL for name, codec in codecs.items() if codec == "zstd"}
    with pq.ParquetWriter(
        sink,
        schema(meta),
        compression=codecs,
        compression_level=levels,
        use_dictionary=False,
        write_statistics=["num_tokens"],
    ) as writer:
        for table in row_tables:
            writer.write_table(table)


def decode(source: Any) -> Iterator[HiddenSample]:
    """The usable samples of a shard, in its order: all rows but the failed ones.

    Args:
        source: the file's bytes (shared with the samples where possible, not copied) or a seekable binary file.
    Raises:
        ValueError: not a file of hidden states, or of an encoding that this version does not know.
    """
    shard = HiddenStatesFile(source)
    for index in range(len(shard)):
        sample = shard.sample(index)
        if sample is not None:
            yield sample


class HiddenStatesFile:
    """Reads single samples of a shard.

    Attributes:
        meta: the schema's metadata.
        parquet: the file's own metadata.

    Args:
        source: the file's bytes, or its local path or a seekable binary file (of which only the footer and the
            samples asked for are read).
    Raises:
        ValueError: not a file of hidden states, or of an encoding that this version does not know.
    """

    def __init__(self, source: Any) -> None:
        if isinstance(source, bytes | bytearray | memoryview):
            source = pa.BufferReader(source)
        elif isinstance(source, Path):
            source = pa.memory_map(str(source))
        self._file = pq.ParquetFile(source)
        self.parquet = self._file.metadata
        self.meta = HiddenStatesMeta.from_metadata(self._file.schema_arrow.metadata)
        if self.meta.encoding not in ENCODINGS:
            raise ValueError(f"encoding {self.meta.encoding!r} is not one of {', '.join(ENCODINGS)}")
        self._encoding = ENCODINGS[self.meta.encoding]
        if self.parquet.num_row_groups != self.parquet.num_rows:
            raise ValueError("a file of hidden states has one row in each row group")

    def __len__(self) -> int:
        return int(self.parquet.num_rows)

    def rows(self) -> pa.Table:
        """All rows, failed ones too, without their payload."""
        names = self._file.schema_arrow.names
        return self._file.read(columns=[name for name in names if name not in self._encoding.codecs])

    def row_table(self, index: int) -> pa.Table:
        """Row `index` as it is stored."""
        return self._file.read_row_group(index, use_threads=False)

    def sample(self, index: int) -> HiddenSample | None:
        """The sample of row `index`; None where it failed. Raises as `encoded`."""
        found = self.encoded(index)
        if found is None:
            return None
        return HiddenSample(found.sample_id, found.status, found.input_ids, found.loss_mask, *found.states())

    def encoded(self, index: int) -> EncodedSample | None:
        """The sample of row `index`, not decoded yet; None where it failed.

        Raises:
            ValueError: its payload is damaged.
        """
        try:
            row = self.row_table(index)
        except OSError as error:
            if error.errno is not None:  # of the file system, not of Parquet's reader
                raise
            raise ValueError(f"row {index} cannot be read: {error}") from error
        values = {name: row[name][0] for name in row.column_names}
        if values["status"].as_py() == STATUS_FAILED:
            return None
        num_tokens = values["num_tokens"].as_py()
        payload = {name: values[name].as_buffer() for name in self._encoding.codecs}
        for name, width in self.meta.bytes_per_token().items():
            size = None if payload[name] is None else payload[name].size
            if size != num_tokens * width:
                raise ValueError(
                    f"row {index}: {size} bytes of {name}, not {width} for each of {num_tokens} tokens"
                )
        return EncodedSample(
            sample_id=values["sample_id"].as_py(),
            status=values["status"].as_py(),
            input_ids=torch.from_numpy(np.array(values["input_ids"].values, dtype=np.int32)),
            loss_mask=torch.from_numpy(np.array(values["loss_mask"].values, dtype=np.bool_)),
            payload=payload,
            shape=(num_tokens, len(self.meta.layer_ids), self.meta.hidden_size),
            encoding=self.meta.encoding,
        )


def state_bytes(source: Any) -> dict[str, int]:
    """What the `state_bytes` of a shard's record say, from the shard's bytes (or file) alone.

    Returns:
        `raw`: bytes of the usable samples' states in bf16; `stored`: bytes of the payload columns in the file.
    """
    shard = HiddenStatesFile(source)
    rows = shard.rows().filter(pc.field("status") != STATUS_FAILED)
    num_tokens = pc.sum(rows["num_tokens"], min_count=0).as_py()
    parquet = shard.parquet
    columns = [
        parquet.row_group(group).column(column)
        for group in range(parquet.num_row_groups)
        for column in range(parquet.num_columns)
    ]
    payload = shard.meta.bytes_per_token()
    return {
        "raw": num_tokens * len(shard.meta.layer_ids) * shard.meta.hidden_size * 2,
        "stored": sum(column.total_compressed_size for column in columns if column.path_in_schema in payload),
    }


def encoding_error(source: Any) -> dict[str, float] | None:
    """What the `encoding_error` of a shard's record says, from the shard's bytes (or file) alone.

    Returns:
        `mean` and `worst` of the usable samples' `relative_error`, over all their tokens and layers; None where the
        encoding loses nothing or there is no token.
    """
    shard = HiddenStatesFile(source)
    if not ENCODINGS[shard.meta.encoding].lossy:
        return None
    rows = shard.rows().filter(pc.field("status") != STATUS_FAILED)
    num_tokens = pc.sum(rows["num_tokens"], min_count=0).as_py()
    if num_tokens == 0:
        return None
    total = pc.sum(pc.multiply(rows["encoding_error_mean"].cast("float64"), rows["num_tokens"])).as_py()
    return {"mean": total / num_tokens, "worst": pc.max(rows["encoding_error_worst"]).as_py()}


def payload_problem(num_tokens: int, meta: HiddenStatesMeta) -> str | None:
    """Why a sample of this length cannot be stored; None if it can."""
    size_bytes = num_tokens * max(meta.bytes_per_token().values())
    if size_bytes <= MAX_VALUE_BYTES:
        return None
    return (
        f"{num_tokens} tokens are {size_bytes} bytes of states, more than the {MAX_VALUE_BYTES} of a Parquet value"
    )


def _row_table(row: HiddenRow, meta: HiddenStatesMeta) -> pa.Table:
    if len(row.loss_mask) != len(row.input_ids):
        raise ValueError(f"{row.sample_id}: a mask of {len(row.loss_mask)} for {len(row.input_ids)} ids")
    if (row.hidden_states is None) != (row.status == STATUS_FAILED):
        raise ValueError(f"{row.sample_id}: a failed row has no states, and every other row has")
    columns: dict[str, Any] = {
        "sample_id": row.sample_id,
        "status": row.status,
        "error": row.error,
        "input_ids": row.input_ids,
        "loss_mask": row.loss_mask,
        "num_tokens": len(row.input_ids),
    }
    if row.hidden_states is not None:
        columns |= _state_columns(row.hidden_states, len(row.input_ids), meta)
    table_schema = schema(meta)
    arrays = []
    for field in table_schema:
        value = columns.get(field.name)
        arrays.append(_binary(value) if isinstance(value, Tensor) else pa.array([value], field.type))
    return pa.table(arrays, schema=table_schema)


def _state_columns(states: Tensor, num_tokens: int, meta: HiddenStatesMeta) -> dict[str, Any]:
    """Payload, and where the encoding is lossy what it lost, of states [tokens, layers, hidden]."""
    expected = (num_tokens, len(meta.layer_ids), meta.hidden_size)
    if tuple(states.shape) != expected:
        raise ValueError(f"states have shape {tuple(states.shape)}, not {expected}")
    encoding = ENCODINGS[meta.encoding]
    states = states.to(torch.bfloat16)
    payload = encoding.encode(states)
    columns: dict[str, Any] = dict(payload)
    if encoding.lossy:
        decoded = encoding.decode({name: pa.py_buffer(each.numpy()) for name, each in payload.items()}, expected)
        columns["encoding_error_mean"], columns["encoding_error_worst"] = relative_error(states, *decoded)
    return columns


def _binary(value: Tensor) -> pa.Array:
    """A large_binary array of the one value, sharing its memory."""
    offsets = pa.py_buffer(np.array([0, value.numel()], dtype=np.int64))
    return pa.LargeBinaryArray.from_buffers(pa.large_binary(), 1, [None, offsets, pa.py_buffer(value.numpy())])
