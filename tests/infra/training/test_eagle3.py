"""The forward pass over trained rows is speculators' own, and the loss is its KL divergence."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from infra.training.algorithm import trainable_parameters
from infra.training.batch import PackedBatch, align_sample, concatenate
from infra.training.config import TrainConfig
from infra.training.eagle3 import Eagle3Objective
from infra.training.eagle3_model import build_model
from infra.training.losses import TargetDistribution, chunked_kl
from tests.fakes.training_run import HIDDEN_SIZE, LAYER_IDS, random_rows, vocabulary, write_verifier


@pytest.fixture(scope="module")
def verifier(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_verifier(tmp_path_factory.mktemp("verifier")))


def batch(num_samples: int, masks: Any = None) -> PackedBatch:
    parts = []
    for number, row in enumerate(random_rows(num_samples)):
        assert row.hidden_states is not None
        mask = torch.tensor(row.loss_mask)
        if masks:
            mask = masks(number, mask)
        parts.append(
            align_sample(
                torch.tensor(row.input_ids),
                mask,
                row.hidden_states[:, :-1].flatten(1),
                row.hidden_states[:, -1].contiguous(),
            )
        )
    return concatenate(parts)


def two_turns(number: int, mask: torch.Tensor) -> torch.Tensor:
    """A conversation with two trained answers."""
    mask = torch.zeros_like(mask)
    mask[6:8] = True
    mask[-1:] = number % 2 == 0
    return mask


def run(objective: Eagle3Objective, packed: PackedBatch, num_loss_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    found: tuple[torch.Tensor, torch.Tensor] = objective(objective.prepare(packed), num_loss_tokens)
    return found


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"num_layers": 2},
        {"ttt_steps": 5, "ttt_step_loss_decay": 0.5},
        {"norm_output": True, "fc_norm": True},
        {"train_lm_head": True, "norm_before_residual": False},
    ],
)
@pytest.mark.parametrize("masks", [pytest.param(None, marks=pytest.mark.seconds), two_turns])
def test_rows_agree_with_the_library(verifier: str, change: dict[str, Any], masks: Any) -> None:
    config = TrainConfig(**{"precision": "fp32", "total_seq_len": 128, **change})
    model = build_model(config, vocabulary(), verifier, LAYER_IDS[:-1])
    # Fresh weights give near-uniform guesses; scale them up so that every path carries signal.
    with torch.no_grad():
        for value in trainable_parameters(model).values():
            if value.dim() > 1:
                value.mul_(5)
    packed = batch(3, masks)
    found = {}
    for kind in ("rows", "packed", "library"):
        model.zero_grad()
        loss, sums = run(Eagle3Objective(model, config, kind), packed, packed.num_loss_tokens)
        loss.backward()
        gradients = {n: v.grad.clone() for n, v in trainable_parameters(model).items() if v.grad is not None}
        found[kind] = (loss.detach(), sums, gradients)
    wanted_loss, wanted_sums, wanted_gradients = found.pop("library")
    assert torch.equal(found["rows"][1][:, 1:], found["packed"][1][:, 1:])
    for loss, sums, gradients in found.values():
        assert float(loss) == pytest.approx(float(wanted_loss), rel=1e-4)
        # The library counts its `total` before it aligns the steps; what was right is the same.
        assert torch.allclose(sums[:, 0] / sums[:, 1], wanted_sums[:, 0] / wanted_sums[:, 1], rtol=1e-4)
        assert torch.equal(sums[:, 2], wanted_sums[:, 2])
        assert set(gradients) == set(wanted_gradients) == set(trainable_parameters(model))
        for name, gradient in gradients.items():
            wanted = wanted_gradients[name]
            assert (gradient - wanted).norm() < 1e-3 * wanted.norm(), name


def test_the_chunked_loss_is_the_librarys_kl_divergence(monkeypatch: pytest.MonkeyPatch) -> None:
    from speculators.losses.eager import kl_div_loss

    monkeypatch.setattr("infra.training.losses.CHUNK_ROWS", 3)
    torch.manual_seed(0)
    hidden = torch.randn(10, 8, requires_grad=True)
    head = torch.randn(20, 8, requires_grad=True)
    target_logits = torch.randn(10, 20) * 3
    weights = torch.rand(10)
    weights[-2:] = 0
    loss, correct = chunked_kl(hidden, head, TargetDistribution(target_logits), 2, weights)
    torch.autograd.backward(loss)
    found = (hidden.grad, head.grad)
    hidden.grad = head.grad = None
    logits = hidden[:-2] @ head.T
    expected = (kl_div_loss(logits[None], target_logits[2:][None])[0] * weights[:-2]).sum()
    torch.autograd.backward(expected)
    assert float(loss.detach()) == pytest.approx(float(expected.detach()), rel=1e-5)
    assert torch.equal(correct[:-2], logits.argmax(-1) == target_logits[2:].argmax(-1))
    for mine, theirs in zip(found, (hidden.grad, head.grad), strict=True):
        assert mine is not None
        assert theirs is not None
        assert torch.allclose(mine, theirs, atol=1e-5)


def test_samples_of_a_pack_do_not_see_one_another(verifier: str) -> None:
    config = TrainConfig(precision="fp32", total_seq_len=128)
    model = build_model(config, vocabulary(), verifier, LAYER_IDS[:-1])
    objective = Eagle3Objective(model, config, "rows")
    whole = batch(3)
    total, _ = run(objective, whole, 100)
    parts = []
    for row in random_rows(3):
        assert row.hidden_states is not None
        alone = align_sample(
            torch.tensor(row.input_ids),
            torch.tensor(row.loss_mask),
            row.hidden_states[:, :-1].flatten(1),
            row.hidden_states[:, -1].contiguous(),
        )
        parts.append(run(objective, alone, 100)[0])
    assert total.item() == pytest.approx(sum(part.item() for part in parts), rel=1e-5)


def test_only_the_draft_is_trained(verifier: str) -> None:
    for trained in (False, True):
        config = TrainConfig(train_lm_head=trained)
        names = set(trainable_parameters(build_model(config, vocabulary(), verifier, LAYER_IDS[:-1])))
        assert ("lm_head.weight" in names) == trained
        assert not any("embed" in name or "verifier" in name for name in names)


def test_fresh_weights_follow_the_seed(verifier: str) -> None:
    def weights(seed: int) -> torch.Tensor:
        model = build_model(TrainConfig(seed=seed), vocabulary(), verifier, LAYER_IDS[:-1])
        found: torch.Tensor = model.fc.weight
        assert found.shape == (HIDDEN_SIZE, 3 * HIDDEN_SIZE)
        return found

    assert torch.equal(weights(3), weights(3))
    assert not torch.equal(weights(3), weights(4))
