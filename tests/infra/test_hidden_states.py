from __future__ import annotations

import gc
import io
import weakref
from collections.abc import Iterator
from dataclasses import replace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from infra.hidden_states import (
    MAX_VALUE_BYTES,
    HiddenRow,
    HiddenStatesFile,
    HiddenStatesMeta,
    decode,
    encode,
    encoding_error,
    fail_rows,
    payload_problem,
    schema,
    state_bytes,
)
from infra.state_encodings import ENCODINGS

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


def finite_row(name: str, num_tokens: int, seed: int = 0) -> HiddenRow:
    """What a model may compute: states of like magnitudes."""
    values = torch.randn(num_tokens, 4, 8, generator=torch.Generator().manual_seed(seed))
    return replace(ok_row(name, num_tokens), hidden_states=values.bfloat16())


def meta_of(encoding: str) -> HiddenStatesMeta:
    return replace(META, encoding=encoding)


def failed_row(name: str) -> HiddenRow:
    return HiddenRow(name, "failed", "the reason", [5, 6], [False, True], None)


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.contiguous().view(torch.int16), other.contiguous().view(torch.int16))


@settings(max_examples=20, deadline=None)
@given(st.lists(st.integers(0, 40), max_size=6), st.sampled_from(["bf16", "bf16_split"]))
def test_decoding_gives_back_every_bit(lengths: list[int], encoding: str) -> None:
    rows = [ok_row(f"s{index}", length, index) for index, length in enumerate(lengths)]
    samples = list(decode(encode(iter(rows), meta_of(encoding))))
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


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_one_sample_is_read_by_itself(encoding: str) -> None:
    data = encode([finite_row(f"s{index}", 2000, index) for index in range(20)], meta_of(encoding))
    file = CountingFile(data)
    sample = HiddenStatesFile(file).sample(11)
    assert sample is not None
    assert sample.sample_id == "s11"
    assert file.bytes_read < len(data) / 5


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_every_encoding_takes_rows_of_any_length_and_failed_ones(encoding: str) -> None:
    rows = [finite_row("one", 1), failed_row("failed"), finite_row("none", 0), finite_row("seven", 7)]
    data = encode(rows, meta_of(encoding))
    assert pq.read_schema(pa.BufferReader(data)).names == schema(meta_of(encoding)).names
    found = list(decode(data))
    assert [sample.sample_id for sample in found] == ["one", "none", "seven"]
    for sample, num_tokens in zip(found, (1, 0, 7), strict=True):
        assert sample.aux_hidden_states.shape == (num_tokens, 24)
        assert sample.verifier_last_hidden_states.shape == (num_tokens, 8)
        assert sample.aux_hidden_states.dtype == sample.verifier_last_hidden_states.dtype == torch.bfloat16
    failed = pq.read_table(pa.BufferReader(data)).slice(1, 1).to_pylist()[0]
    assert {name for name, value in failed.items() if value is not None} == {
        "sample_id", "status", "error", "input_ids", "loss_mask", "num_tokens"
    }  # fmt: skip


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_rows_failed_after_all_leave_the_others_as_they_were(encoding: str) -> None:
    rows = [finite_row("a", 9, 1), failed_row("b"), finite_row("c", 5, 2), finite_row("d", 7, 3)]
    lost = HiddenRow("c", "failed", "norms: late", rows[2].input_ids, rows[2].loss_mask, None)
    expected = encode([*rows[:2], lost, rows[3]], meta_of(encoding))
    assert fail_rows(encode(rows, meta_of(encoding)), {"c": "norms: late"}) == expected


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_float32_and_strided_states_are_stored_like_their_bf16_copy(encoding: str) -> None:
    row = finite_row("a", 20)
    assert row.hidden_states is not None
    expected = encode([row], meta_of(encoding))
    wide = torch.zeros(20, 8, 9)
    wide[:, ::2, 1:] = row.hidden_states.float()
    for same in (row.hidden_states.float(), wide[:, ::2, 1:], wide.bfloat16()[:, ::2, 1:]):
        assert encode([replace(row, hidden_states=same)], meta_of(encoding)) == expected


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_state_bytes_are_those_of_the_usable_samples(encoding: str) -> None:
    data = encode([finite_row("a", 300), failed_row("b"), finite_row("c", 100)], meta_of(encoding))
    found = state_bytes(data)
    assert found["raw"] == 400 * 4 * 8 * 2
    stored = {"bf16": 400 * 4 * 8 * 2, "fp8_e4m3": 400 * 4 * (8 + 1)}.get(encoding)
    if stored is None:
        assert found["raw"] / 2 < found["stored"] < 0.8 * found["raw"]
    else:
        assert 0 < found["stored"] - stored < 500  # page headers
    assert state_bytes(encode([failed_row("b")], meta_of(encoding)))["raw"] == 0


def test_the_error_of_a_lossy_encoding_is_measured_row_by_row() -> None:
    rows = [finite_row("a", 300), failed_row("b"), finite_row("c", 100, 1), finite_row("none", 0)]
    data = encode(rows, meta_of("fp8_e4m3"))
    errors = []
    for sample in decode(data):
        row = next(row for row in rows if row.sample_id == sample.sample_id)
        assert row.hidden_states is not None
        decoded = torch.cat([sample.aux_hidden_states, sample.verifier_last_hidden_states], dim=1)
        difference = decoded.double().view(-1, 4, 8) - row.hidden_states.double()
        errors.append(difference.norm(dim=-1) / row.hidden_states.double().norm(dim=-1))
    table = pq.read_table(pa.BufferReader(data))
    assert table["encoding_error_mean"].to_pylist()[1] is None
    for place, found in ((0, errors[0]), (2, errors[1])):
        assert table["encoding_error_mean"][place].as_py() == pytest.approx(found.mean().item(), rel=0.01)
        assert table["encoding_error_worst"][place].as_py() == pytest.approx(found.max().item(), rel=0.01)
    everything = torch.cat(errors)
    assert encoding_error(data) == {
        "mean": pytest.approx(everything.mean().item(), rel=0.01),
        "worst": pytest.approx(everything.max().item(), rel=0.01),
    }
    assert encoding_error(encode([failed_row("b")], meta_of("fp8_e4m3"))) is None
    assert encoding_error(encode(rows, META)) is None


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_a_torn_file_is_never_read(encoding: str) -> None:
    data = encode([finite_row("a", 30), finite_row("b", 30)], meta_of(encoding))
    for cut in (0, 10, len(data) // 2, len(data) - 1):
        with pytest.raises(pa.ArrowInvalid):
            list(decode(data[:cut]))


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_a_payload_that_is_short_long_or_absent_is_refused(encoding: str) -> None:
    table = pq.read_table(pa.BufferReader(encode([finite_row("a", 30)], meta_of(encoding))))
    for name in ENCODINGS[encoding].codecs:
        whole = table[name][0].as_py()
        for wrong in (whole[:-2], whole + b"12", b"", None):
            column = pa.array([wrong], pa.large_binary())
            sink = io.BytesIO()
            pq.write_table(table.set_column(table.schema.get_field_index(name), name, column), sink)
            with pytest.raises(ValueError, match=f"bytes of {name}, not"):
                list(decode(sink.getvalue()))


def test_a_payload_that_does_not_unpack_is_refused() -> None:
    data = bytearray(encode([finite_row("a", 3000)], meta_of("bf16_split")))
    group = pq.ParquetFile(pa.BufferReader(bytes(data))).metadata.row_group(0)
    columns = [group.column(index) for index in range(group.num_columns)]
    (high,) = [column for column in columns if column.path_in_schema == "states_high"]
    middle = high.data_page_offset + high.total_compressed_size // 2
    data[middle : middle + 5000] = bytes(5000)
    with pytest.raises(ValueError, match="row 0 cannot be read"):
        list(decode(bytes(data)))


def test_other_files_and_unknown_encodings_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    sink = io.BytesIO()
    pq.write_table(pa.table({"sample_id": ["a"]}), sink)
    with pytest.raises(ValueError, match="not a file of hidden states"):
        list(decode(sink.getvalue()))
    monkeypatch.setitem(ENCODINGS, "later", ENCODINGS["bf16"])
    data = encode([ok_row("a", 2)], meta_of("later"))
    monkeypatch.delitem(ENCODINGS, "later")
    with pytest.raises(ValueError, match="'later' is not one of bf16, bf16_split, fp8_e4m3"):
        list(decode(data))


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


@pytest.mark.parametrize(
    ("encoding", "widest"), [("bf16", 3 * 7168 * 2), ("bf16_split", 4 * 7168), ("fp8_e4m3", 4 * 7168)]
)
def test_a_sample_too_large_for_parquet_is_told_before(encoding: str, widest: int) -> None:
    meta = HiddenStatesMeta((2, 30, 58, 61), 7168, "abc", encoding)
    longest = MAX_VALUE_BYTES // widest
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
