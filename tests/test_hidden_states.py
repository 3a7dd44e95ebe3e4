from __future__ import annotations

import gc
import io
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from infra.hidden_states import (
    ENCODINGS,
    MAX_VALUE_BYTES,
    HiddenRow,
    HiddenStatesFile,
    HiddenStatesMeta,
    decode,
    encode,
    payload_problem,
    schema,
)

pytestmark = pytest.mark.filterwarnings("error")
META = HiddenStatesMeta(layer_ids=(2, 15, 27, 30), hidden_size=8, verifier_revision="abc")


def states(num_tokens: int, seed: int = 0) -> torch.Tensor:
    """Any bit pattern at all, NaN and Inf too: [tokens, 4, 8] bf16."""
    bits = torch.randint(
        -(2**15), 2**15, (num_tokens, 4, 8), dtype=torch.int16, generator=torch.Generator().manual_seed(seed)
    )
    return bits.view(torch.bfloat16)


def ok_row(name: str, num_tokens: int, seed: int = 0) -> HiddenRow:
    mask = [position > num_tokens // 2 for position in range(num_tokens)]
    return HiddenRow(name, "ok", None, list(range(num_tokens)), mask, states(num_tokens, seed))


def failed_row(name: str) -> HiddenRow:
    return HiddenRow(name, "failed", "the reason", [5, 6], [False, True], None)


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.contiguous().view(torch.int16), other.contiguous().view(torch.int16))


@settings(max_examples=20, deadline=None)
@given(st.lists(st.integers(1, 40), max_size=6))
def test_decoding_gives_back_every_bit(lengths: list[int]) -> None:
    rows = [ok_row(f"s{index}", length, index) for index, length in enumerate(lengths)]
    samples = list(decode(encode(iter(rows), META)))
    assert [sample.sample_id for sample in samples] == [row.sample_id for row in rows]
    for row, sample in zip(rows, samples, strict=True):
        assert row.hidden_states is not None
        assert sample.input_ids.tolist() == row.input_ids
        assert sample.loss_mask.tolist() == row.loss_mask
        assert sample.aux_hidden_states.dtype == sample.verifier_last_hidden_states.dtype == torch.bfloat16
        assert sample.aux_hidden_states.shape == (len(row.input_ids), 3 * 8)
        # Three layers side by side, in the order of their ids.
        assert same_bits(sample.aux_hidden_states, row.hidden_states[:, :3].flatten(1))
        assert same_bits(sample.verifier_last_hidden_states, row.hidden_states[:, 3])


def test_columns_types_and_metadata_of_the_contract() -> None:
    table = pq.read_table(pa.BufferReader(encode([failed_row("a")], META)))  # the types stand though all is null
    assert {field.name: str(field.type) for field in table.schema} == {
        "sample_id": "string",
        "status": "string",
        "error": "string",
        "input_ids": "list<element: int32>",
        "loss_mask": "list<element: bool>",
        "num_tokens": "int32",
        "aux_hidden_states": "large_binary",
        "verifier_last_hidden_states": "large_binary",
    }
    metadata = table.schema.metadata
    assert metadata[b"layer_ids"] == b"[2, 15, 27, 30]"
    assert metadata[b"hidden_size"] == b"8"
    assert metadata[b"dtype"] == b'"bfloat16"'
    assert metadata[b"encoding"] == b'"bf16"'
    assert metadata[b"verifier_revision"] == b'"abc"'


def test_a_failed_row_keeps_its_ids_and_is_not_decoded() -> None:
    data = encode([ok_row("a", 3), failed_row("b"), ok_row("c", 2)], META)
    assert [sample.sample_id for sample in decode(data)] == ["a", "c"]
    shard = HiddenStatesFile(data)
    assert len(shard) == 3
    assert shard.sample(1) is None
    assert shard.rows()["status"].to_pylist() == ["ok", "failed", "ok"]
    row = pq.read_table(pa.BufferReader(data)).slice(1, 1).to_pylist()[0]
    assert row["input_ids"] == [5, 6]
    assert row["num_tokens"] == 2
    assert row["error"] == "the reason"
    assert row["aux_hidden_states"] is None
    assert row["verifier_last_hidden_states"] is None


def test_payload_is_stored_as_it_is_and_ids_are_compressed() -> None:
    group = pq.ParquetFile(pa.BufferReader(encode([ok_row("a", 64)], META))).metadata.row_group(0)
    codecs = {
        group.column(index).path_in_schema: group.column(index).compression for index in range(group.num_columns)
    }
    assert codecs["aux_hidden_states"] == codecs["verifier_last_hidden_states"] == "UNCOMPRESSED"
    assert codecs["input_ids.list.element"] == codecs["loss_mask.list.element"] == "ZSTD"


class CountingFile(io.BytesIO):
    bytes_read = 0

    def read(self, size: int | None = -1, /) -> bytes:
        data = super().read(size)
        self.bytes_read += len(data)
        return data


def test_one_sample_is_read_by_itself() -> None:
    data = encode([ok_row(f"s{index}", 2000, index) for index in range(20)], META)
    file = CountingFile(data)
    sample = HiddenStatesFile(file).sample(11)
    assert sample is not None
    assert sample.sample_id == "s11"
    assert file.bytes_read < len(data) / 5


def test_a_torn_file_is_never_read() -> None:
    data = encode([ok_row("a", 30), ok_row("b", 30)], META)
    for cut in (0, 10, len(data) // 2, len(data) - 1):
        with pytest.raises(pa.ArrowInvalid):
            list(decode(data[:cut]))


def test_other_files_and_unknown_encodings_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    sink = io.BytesIO()
    pq.write_table(pa.table({"sample_id": ["a"]}), sink)
    with pytest.raises(ValueError, match="not a file of hidden states"):
        list(decode(sink.getvalue()))
    monkeypatch.setitem(ENCODINGS, "later", ENCODINGS["bf16"])
    data = encode([ok_row("a", 2)], HiddenStatesMeta((1, 2, 3, 4), 8, "abc", encoding="later"))
    monkeypatch.delitem(ENCODINGS, "later")
    with pytest.raises(ValueError, match="'later' is not one of bf16"):
        list(decode(data))


class HighAndLowBytes:
    """A second encoding, as one small class: what an entry of ENCODINGS has to be."""

    columns = {"high": "zstd", "low": "none"}  # noqa: RUF012

    def encode(self, aux: torch.Tensor, last: torch.Tensor) -> dict[str, torch.Tensor]:
        pairs = torch.cat([aux, last], dim=1).view(torch.uint8).reshape(-1, 2)
        return {"low": pairs[:, 0].contiguous(), "high": pairs[:, 1].contiguous()}

    def decode(self, payload: dict[str, Any], num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        pairs = np.stack([np.frombuffer(payload[name], np.uint8) for name in ("low", "high")], axis=1)
        both = torch.from_numpy(pairs).view(torch.bfloat16).reshape(num_tokens, 32)
        return both[:, :24], both[:, 24:]


def test_a_further_encoding_is_one_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ENCODINGS, "split", HighAndLowBytes())
    meta = HiddenStatesMeta((2, 15, 27, 30), 8, "abc", encoding="split")
    assert schema(meta).names[-2:] == ["high", "low"]
    row = ok_row("a", 9)
    (sample,) = decode(encode([row, failed_row("b")], meta))
    assert row.hidden_states is not None
    assert same_bits(sample.aux_hidden_states, row.hidden_states[:, :3].flatten(1))
    assert same_bits(sample.verifier_last_hidden_states, row.hidden_states[:, 3])


def test_rows_that_contradict_themselves_are_not_written() -> None:
    good = ok_row("a", 4)
    wrong = {
        "a failed row has no states": HiddenRow(
            "a", "failed", "x", good.input_ids, good.loss_mask, good.hidden_states
        ),
        "and every other row has": HiddenRow("a", "ok", None, good.input_ids, good.loss_mask, None),
        "a mask of 3 for 4 ids": HiddenRow("a", "ok", None, good.input_ids, good.loss_mask[:3], good.hidden_states),
        "states have shape": HiddenRow("a", "ok", None, [1, 2], [True, True], good.hidden_states),
    }
    for message, row in wrong.items():
        with pytest.raises(ValueError, match=message):
            encode([row], META)


def test_a_sample_too_large_for_parquet_is_told_before() -> None:
    meta = HiddenStatesMeta((2, 30, 58, 61), 7168, "abc")
    longest = MAX_VALUE_BYTES // (3 * 7168 * 2)
    assert payload_problem(longest, meta) is None
    assert "more than" in str(payload_problem(longest + 1, meta))


@pytest.mark.seconds
def test_encoding_holds_one_sample_at_a_time() -> None:
    alive: list[int] = []

    def rows() -> Iterator[HiddenRow]:
        references: list[weakref.ref[HiddenRow]] = []
        for index in range(4):
            row = ok_row(f"s{index}", 10)
            references.append(weakref.ref(row))
            yield row
            del row
            gc.collect()
            alive.append(sum(reference() is not None for reference in references))

    encode(rows(), META)
    assert max(alive) == 1
