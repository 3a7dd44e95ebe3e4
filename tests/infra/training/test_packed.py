"""What the packed forward pass is planned from: rows, masks and chunks."""

from __future__ import annotations

import pytest
import torch

from infra.training.batch import PackedBatch
from infra.training.packed_attention import attend_dense, join
from infra.training.packed_plan import BLOCK, PackPlan, block_table, plan_pack, row_capacity
from infra.training.vocab_loss import Targets, chunk_rows, kl_of_chunk, target_statistics


def batch(lengths: tuple[int, ...], prompt: float) -> PackedBatch:
    total = sum(lengths)
    mask = torch.cat([torch.arange(length) >= int(length * prompt) for length in lengths])
    positions = torch.cat([torch.arange(1, length + 1) for length in lengths])
    return PackedBatch(torch.zeros(total, 3), torch.arange(total), mask, positions, torch.zeros(total, 1), lengths)


def seen_keys(plan: PackPlan) -> torch.Tensor:
    """[num_rows, num_tokens]"""
    keys = torch.arange(plan.num_tokens)
    return (keys >= plan.row_mask.first[:, None]) & (keys <= plan.row_mask.last[:, None])


def test_rows_are_what_some_step_is_trained_on() -> None:
    packed = batch((100, 300, 200), prompt=0.5)
    plan = plan_pack(packed, 1024, 3, 1, 384)
    assert plan.rows is not None
    assert plan.places is not None
    assert len(plan.rows) == 384  # 300 trained rows and 2 before each answer, in whole blocks
    found = plan.rows[plan.valid.any(dim=0)]
    assert found.tolist() == [*range(48, 100), *range(248, 400), *range(498, 600)]
    assert plan.valid.sum(dim=1).tolist() == [300, 300, 300]
    assert torch.equal(plan.places[found], torch.arange(len(found)))
    assert int((plan.places >= 0).sum()) == len(found)


def test_where_the_capacity_is_too_small_every_token_is_a_row() -> None:
    plan = plan_pack(batch((100, 300, 200), prompt=0.5), 1024, 3, 1, 256)
    assert plan.rows is None
    assert plan.valid.shape == (3, 1024)


def test_the_capacity_is_what_most_packs_need() -> None:
    assert row_capacity([6000] * 95 + [7900] * 5, 8192) == 6144
    assert row_capacity([6000] * 50 + [7900] * 50, 8192) is None
    assert row_capacity([10], 64) is None


def test_a_row_sees_its_sample_up_to_itself() -> None:
    plan = plan_pack(batch((100, 300, 200), prompt=0.5), 1024, 3, 1, 384)
    assert plan.rows is not None
    for row, token in enumerate(plan.rows[:306].tolist()):
        start = max(start for start in (0, 100, 400) if start <= token)
        assert seen_keys(plan)[row].nonzero().squeeze(1).tolist() == list(range(start, token + 1))


@pytest.mark.parametrize("prompt", [0.0, 0.7])
def test_blocks_hold_exactly_what_is_seen(prompt: float) -> None:
    plan = plan_pack(batch((100, 300, 500, 60), prompt), 1024, 3, 2, 384)
    masks = [plan.row_mask, *([plan.token_mask] if plan.token_mask else [])]
    assert len(masks) == (1 if prompt == 0 else 2)
    for mask in masks:
        keys = torch.arange(plan.num_tokens)
        seen = (keys >= mask.first[:, None]) & (keys <= mask.last[:, None])
        blocks = seen.view(len(mask.first) // BLOCK, BLOCK, -1, BLOCK)
        whole, part = blocks.all(3).all(1), blocks.any(3).any(1)
        assert torch.equal(mask.flex.to_dense()[0, 0].bool(), part)
        counts = (mask.full_kv_num_blocks[0, 0], (part & ~whole).sum(1))
        assert torch.equal(counts[0], whole.sum(1))
        assert torch.equal(mask.kv_num_blocks[0, 0], counts[1])
        for query, count in enumerate(counts[0].tolist()):
            assert set(mask.full_kv_indices[0, 0, query, :count].tolist()) == set(
                whole[query].nonzero()[:, 0].tolist()
            )


def test_joined_parts_are_one_softmax() -> None:
    torch.manual_seed(0)
    query = torch.randn(1, 4, BLOCK, 8)
    key, value = torch.randn(2, 1, 2, BLOCK, 8)
    own_key, own_value = torch.randn(2, 1, 2, BLOCK, 8)
    places = torch.arange(BLOCK, dtype=torch.int32)
    attended, normalizer = attend_dense(query, key, value, block_table(places * 0, places, BLOCK), 0.3)
    found = join(query, attended, normalizer, [own_key], [own_value], 0.3)
    keys, values, own_keys, own_values = (part.repeat_interleave(2, 1) for part in (key, value, own_key, own_value))
    scores = (query @ keys.mT * 0.3).masked_fill(places > places[:, None], float("-inf"))
    scores = torch.cat([scores, (query * own_keys).sum(-1, keepdim=True) * 0.3], dim=-1).softmax(dim=-1)
    wanted = scores[..., :-1] @ values + scores[..., -1:] * own_values
    assert torch.allclose(found, wanted, atol=1e-5)


def test_a_chunks_loss_is_kl_divergence_and_its_gradient() -> None:
    from speculators.losses.eager import kl_div_loss

    torch.manual_seed(0)
    logits, targets, weights = torch.randn(6, 20, requires_grad=True), torch.randn(6, 20) * 3, torch.rand(6)
    held = Targets(targets, *target_statistics(targets))
    losses, correct, gradient = kl_of_chunk(
        logits.detach(), held.logits, held.log_normalizer, held.negative_entropy, held.token, weights
    )
    wanted = kl_div_loss(logits[None], targets[None])[0]
    assert torch.allclose(losses, wanted, atol=1e-5)
    torch.autograd.backward((wanted * weights).sum())
    assert logits.grad is not None
    assert torch.allclose(gradient, logits.grad, atol=1e-6)
    assert torch.equal(correct, logits.argmax(-1) == targets.argmax(-1))


def test_chunks_are_equal_and_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("infra.training.vocab_loss.CHUNK_BYTES", 1000)
    assert chunk_rows(64, 10) == 64
    assert chunk_rows(120, 10) == 60
    assert chunk_rows(126, 10) == 63
    assert chunk_rows(7, 900) == 1
    assert chunk_rows(3, 5000) == 1
