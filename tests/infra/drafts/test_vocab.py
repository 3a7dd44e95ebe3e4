"""The draft's vocabulary is the tokens that were generated most, and its two maps agree."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from infra.drafts.vocab import VocabConfig, VocabMap, build_map, count_tokens, count_tokens_of_shard
from infra.errors import InputError, StageFailed
from infra.schemas import RESPONSES


def responses(*rows: tuple[list[int], list[bool], str]) -> pa.Table:
    filled = [
        {
            **{field.name: None for field in RESPONSES},
            "sample_id": f"s/{number}", "dataset": "d", "domain": "d", "messages": "[]", "token_source": "server",
            "num_prompt_tokens": 0, "num_completion_tokens": 0, "temperature": 0.0, "latency_seconds": 0.0,
            "input_ids": ids, "loss_mask": mask, "status": status,
        }
        for number, (ids, mask, status) in enumerate(rows)
    ]  # fmt: skip
    return pa.Table.from_pylist(filled, schema=RESPONSES)


def test_only_generated_tokens_count() -> None:
    table = responses(
        ([5, 5, 7, 7], [False, False, True, True], "ok"), ([5, 8], [False, True], "truncated"), ([], [], "failed")
    )
    assert dict(enumerate(count_tokens(table, 10))) == {**dict.fromkeys(range(10), 0), 7: 2, 8: 1}
    sink = io.BytesIO()
    pq.write_table(table, sink)
    assert count_tokens_of_shard(sink.getvalue(), 10).tolist() == count_tokens(table, 10).tolist()


def test_no_rows_give_no_counts() -> None:
    assert count_tokens(responses(), 4).tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize(("ids", "mask"), [([5, 12], [True, True]), ([5, 6], [True])])
def test_rows_that_cannot_be_are_refused(ids: list[int], mask: list[bool]) -> None:
    with pytest.raises(StageFailed):
        count_tokens(responses((ids, mask, "ok")), 10)


def test_shards_are_merged_and_the_most_frequent_tokens_taken() -> None:
    counts = [np.array([0, 4, 0, 1, 0, 9]), np.array([0, 4, 0, 9, 1, 0])]
    built = build_map(VocabConfig(draft_vocab_size=3), counts, 6)
    assert built.token_ids.tolist() == [1, 3, 5]
    assert built.t2d.tolist() == [False, True, False, True, False, True]
    assert built.coverage == pytest.approx(27 / 28)


def test_tokens_that_are_kept_are_taken_whatever_was_generated() -> None:
    counts = [np.array([0, 4, 0, 1, 0, 9])]
    kept = build_map(VocabConfig(draft_vocab_size=3, from_start=True), counts, 6, torch.tensor([5, 0, 2]))
    assert kept.token_ids.tolist() == [0, 2, 5]
    assert kept.counts.tolist() == counts[0].tolist()
    assert kept.coverage == pytest.approx(9 / 14)
    with pytest.raises(InputError, match=r"^vocab\.draft_vocab_size: is 4, but .* of 3 tokens; set it to that$"):
        build_map(VocabConfig(draft_vocab_size=4), counts, 6, torch.tensor([5, 0, 2]))


@pytest.mark.parametrize(("share", "size"), [(0.5, 1), (0.6, 2), (0.9, 3), (0.901, 4), (1.0, 5)])
def test_the_size_that_reaches_a_coverage(share: float, size: int) -> None:
    counts = np.array([0, 30, 5, 50, 0, 10, 5])
    assert build_map(VocabConfig(draft_vocab_size=2), [counts], 7).size_for(share) == size
    reached = build_map(VocabConfig(draft_vocab_size=size), [counts], 7)
    assert reached.coverage >= share
    if size > 1:
        assert build_map(VocabConfig(draft_vocab_size=size - 1), [counts], 7).coverage < share


def test_order_of_shards_does_not_change_a_byte() -> None:
    counts = [np.array([0, 4, 2, 1]), np.array([3, 0, 0, 1]), np.array([0, 0, 7, 0])]
    config = VocabConfig(draft_vocab_size=2)
    assert build_map(config, counts, 4).to_bytes() == build_map(config, counts[::-1], 4).to_bytes()


@given(st.lists(st.integers(0, 5), min_size=12, max_size=12).filter(any), st.integers(1, 12))
def test_the_maps_agree_for_any_counts(counts: list[int], size: int) -> None:
    built = build_map(VocabConfig(draft_vocab_size=size), [np.array(counts)], 12)
    assert built.t2d.nonzero().squeeze(1).tolist() == built.token_ids.tolist()
    assert len(set(built.token_ids.tolist())) == size
    back = VocabMap.from_bytes(built.to_bytes())
    assert torch.equal(back.d2t, built.d2t)
    assert torch.equal(back.t2d, built.t2d)
    assert torch.equal(back.counts, built.counts)


def break_offset(tensors: dict[str, torch.Tensor]) -> None:
    tensors["d2t"][1] += 1


def break_mask(tensors: dict[str, torch.Tensor]) -> None:
    tensors["t2d"][0] = ~tensors["t2d"][0]


def leave_vocabulary(tensors: dict[str, torch.Tensor]) -> None:
    tensors["d2t"][-1] = 100


def lose_counts(tensors: dict[str, torch.Tensor]) -> None:
    del tensors["counts"]


@pytest.mark.parametrize("harm", [break_offset, break_mask, leave_vocabulary, lose_counts])
def test_maps_that_do_not_agree_are_refused(harm: Any) -> None:
    from safetensors.torch import load, save

    built = build_map(VocabConfig(draft_vocab_size=3), [np.array([0, 4, 2, 1, 1, 9])], 6)
    tensors = load(built.to_bytes())
    harm(tensors)
    with pytest.raises(StageFailed):
        VocabMap.from_bytes(save(tensors))
    with pytest.raises(StageFailed):
        VocabMap.from_bytes(built.to_bytes()[:-3])


def test_impossible_vocabularies_are_refused() -> None:
    with pytest.raises(StageFailed, match="no response"):
        build_map(VocabConfig(draft_vocab_size=2), [np.zeros(4, dtype=np.int64)], 4)
    with pytest.raises(InputError, match=r"^vocab\.draft_vocab_size: is 5, but the verifier has 4 tokens"):
        build_map(VocabConfig(draft_vocab_size=5), [np.ones(4, dtype=np.int64)], 4)
