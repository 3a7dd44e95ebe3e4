"""The `hidden_states` artifact: the verifier's hidden states of whole conversations, as Parquet.

One row and one row group a sample, so that one sample can be read by itself. The payload columns belong to the
encoding, which the schema's metadata names; an encoding is one entry of `ENCODINGS`. A failed row keeps its ids and
has null payload.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor

from infra.schemas import STATUS_FAILED

# Parquet counts the bytes of a value in 31 bits.
MAX_VALUE_BYTES = 2**31 - 2**16
_ID_COLUMNS = [
    pa.field("sample_id", pa.string(), nullable=False),
    pa.field("status", pa.string(), nullable=False),  # ok, truncated or failed
    pa.field("error", pa.string()),
    pa.field("input_ids", pa.list_(pa.int32()), nullable=False),
    pa.field("loss_mask", pa.list_(pa.bool_()), nullable=False),
    pa.field("num_tokens", pa.int32(), nullable=False),
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

    @property
    def aux_width(self) -> int:
        """Width of aux_hidden_states: all layers but the last, side by side."""
        return (len(self.layer_ids) - 1) * self.hidden_size

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


class Encoding(Protocol):
    """How the states of one sample become the bytes of its payload columns, and back."""

    @property
    def columns(self) -> Mapping[str, str]:
        """Payload columns (large_binary) and the Parquet codec of each."""

    def encode(self, aux: Tensor, last: Tensor) -> Mapping[str, Tensor]:
        """Contiguous uint8 tensors by column, of aux [tokens, aux_width] bf16 and last [tokens, hidden] bf16."""

    def decode(self, payload: Mapping[str, pa.Buffer], num_tokens: int) -> tuple[Tensor, Tensor]:
        """(aux [tokens, aux_width] bf16, last [tokens, hidden] bf16), without a copy where that is possible."""


class Bf16:
    """Raw little-endian bf16. Uncompressed: the low byte of bf16 states has 0.996 of its full entropy."""

    columns: Mapping[str, str] = {"aux_hidden_states": "none", "verifier_last_hidden_states": "none"}

    def encode(self, aux: Tensor, last: Tensor) -> Mapping[str, Tensor]:
        return {"aux_hidden_states": _bytes_of(aux), "verifier_last_hidden_states": _bytes_of(last)}

    def decode(self, payload: Mapping[str, pa.Buffer], num_tokens: int) -> tuple[Tensor, Tensor]:
        aux, last = (_tensor_of(payload[name], num_tokens) for name in self.columns)
        return aux, last


ENCODINGS: dict[str, Encoding] = {"bf16": Bf16()}


def schema(meta: HiddenStatesMeta) -> pa.Schema:
    """The Arrow schema of a shard, metadata included."""
    payload = [pa.field(name, pa.large_binary()) for name in ENCODINGS[meta.encoding].columns]
    return pa.schema([*_ID_COLUMNS, *payload], metadata=meta.to_metadata())


def encode(rows: Iterable[HiddenRow], meta: HiddenStatesMeta) -> bytes:
    """A shard's Parquet bytes. Rows are taken one by one: beside the result, one sample's states are in memory."""
    sink = io.BytesIO()
    table_schema = schema(meta)
    codecs = dict.fromkeys(_ID_LEAVES, "zstd") | dict(ENCODINGS[meta.encoding].columns)
    with pq.ParquetWriter(
        sink, table_schema, compression=codecs, use_dictionary=False, write_statistics=["num_tokens"]
    ) as writer:
        for row in rows:
            writer.write_table(_row_table(row, meta, table_schema))
    return sink.getvalue()  # CPython hands the buffer itself over, not a copy


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

    Args:
        source: the file's bytes, or a seekable binary file (of which only the footer and the samples asked for
            are read).
    Raises:
        ValueError: not a file of hidden states, or of an encoding that this version does not know.
    """

    def __init__(self, source: Any) -> None:
        if isinstance(source, bytes | bytearray | memoryview):
            source = pa.BufferReader(source)
        self._file = pq.ParquetFile(source)
        self.meta = HiddenStatesMeta.from_metadata(self._file.schema_arrow.metadata)
        if self.meta.encoding not in ENCODINGS:
            raise ValueError(f"encoding {self.meta.encoding!r} is not one of {', '.join(ENCODINGS)}")
        if self._file.metadata.num_row_groups != self._file.metadata.num_rows:
            raise ValueError("a file of hidden states has one row in each row group")

    def __len__(self) -> int:
        return int(self._file.metadata.num_rows)

    def rows(self) -> pa.Table:
        """All rows, failed ones too, without their payload."""
        return self._file.read(columns=[field.name for field in _ID_COLUMNS])

    def sample(self, index: int) -> HiddenSample | None:
        """The sample of row `index`; None where it failed."""
        row = self._file.read_row_group(index, use_threads=False)
        encoding = ENCODINGS[self.meta.encoding]
        values = {name: row[name][0] for name in row.column_names}
        if values["status"].as_py() == STATUS_FAILED:
            return None
        payload = {name: values[name].as_buffer() for name in encoding.columns}
        aux, last = encoding.decode(payload, values["num_tokens"].as_py())
        return HiddenSample(
            sample_id=values["sample_id"].as_py(),
            status=values["status"].as_py(),
            input_ids=torch.from_numpy(np.array(values["input_ids"].values, dtype=np.int32)),
            loss_mask=torch.from_numpy(np.array(values["loss_mask"].values, dtype=np.bool_)),
            aux_hidden_states=aux,
            verifier_last_hidden_states=last,
        )


def payload_problem(num_tokens: int, meta: HiddenStatesMeta) -> str | None:
    """Why a sample of this length cannot be stored; None if it can."""
    size_bytes = num_tokens * max(meta.aux_width, meta.hidden_size) * 2
    if size_bytes <= MAX_VALUE_BYTES:
        return None
    return (
        f"{num_tokens} tokens are {size_bytes} bytes of states, more than the {MAX_VALUE_BYTES} of a Parquet value"
    )


def _row_table(row: HiddenRow, meta: HiddenStatesMeta, table_schema: pa.Schema) -> pa.Table:
    columns: dict[str, Any] = {
        "sample_id": [row.sample_id],
        "status": [row.status],
        "error": [row.error],
        "input_ids": [row.input_ids],
        "loss_mask": [row.loss_mask],
        "num_tokens": [len(row.input_ids)],
    }
    if len(row.loss_mask) != len(row.input_ids):
        raise ValueError(f"{row.sample_id}: a mask of {len(row.loss_mask)} for {len(row.input_ids)} ids")
    if (row.hidden_states is None) != (row.status == STATUS_FAILED):
        raise ValueError(f"{row.sample_id}: a failed row has no states, and every other row has")
    payload: Mapping[str, Tensor] = {}
    if row.hidden_states is not None:
        aux, last = _split(row.hidden_states, len(row.input_ids), meta)
        payload = ENCODINGS[meta.encoding].encode(aux, last)
    arrays = [
        _binary(payload.get(field.name)) if pa.types.is_large_binary(field.type) else columns[field.name]
        for field in table_schema
    ]
    return pa.table(arrays, schema=table_schema)


def _split(states: Tensor, num_tokens: int, meta: HiddenStatesMeta) -> tuple[Tensor, Tensor]:
    """(aux [tokens, aux_width], last [tokens, hidden]) in bf16 of states [tokens, layers, hidden]."""
    expected = (num_tokens, len(meta.layer_ids), meta.hidden_size)
    if tuple(states.shape) != expected:
        raise ValueError(f"states have shape {tuple(states.shape)}, not {expected}")
    states = states.to(torch.bfloat16)
    return states[:, :-1].reshape(num_tokens, meta.aux_width), states[:, -1].contiguous()


def _binary(value: Tensor | None) -> pa.Array:
    """A large_binary array of the one value, sharing its memory; of one null where it is None."""
    if value is None:
        return pa.nulls(1, pa.large_binary())
    offsets = pa.py_buffer(np.array([0, value.numel()], dtype=np.int64))
    return pa.LargeBinaryArray.from_buffers(pa.large_binary(), 1, [None, offsets, pa.py_buffer(value.numpy())])


def _bytes_of(states: Tensor) -> Tensor:
    return states.contiguous().view(torch.uint8).reshape(-1)


def _tensor_of(data: pa.Buffer, num_tokens: int) -> Tensor:
    """[tokens, width] bf16 over the buffer's own memory.

    Through DLPack, since torch warns at each read-only buffer that it is given as one.
    """
    array = pa.Array.from_buffers(pa.int16(), data.size // 2, [None, data])
    return torch.utils.dlpack.from_dlpack(array).view(torch.bfloat16).reshape(num_tokens, -1)
