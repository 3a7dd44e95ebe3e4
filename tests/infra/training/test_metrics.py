"""What a line of metrics counts: sums and counts over the same rows, whatever computes the draft."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from infra.training.batch import PackedBatch
from infra.training.config import TrainConfig
from infra.training.eagle3 import SUM_COLUMNS, Eagle3Objective
from infra.training.eagle3_model import build_model
from infra.training.progress import metrics_line
from tests.fakes.training_run import LAYER_IDS, VERIFIER_VOCAB_SIZE, vocabulary, write_verifier

CONFIG = TrainConfig(precision="fp32", total_seq_len=64, ttt_steps=4)
IMPLEMENTATIONS = ("rows", "packed", "library")
LENGTHS = (17, 1, 2, 20, 9)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A draft that hands its first state through: of equal states it guesses one token, at every TTT step."""
    verifier = write_verifier(tmp_path_factory.mktemp("verifier"))
    built = build_model(CONFIG, vocabulary(), str(verifier), LAYER_IDS[:-1])
    with torch.no_grad():
        for layer in built.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    return built


def pack(model: Any, right: torch.Tensor) -> PackedBatch:
    """Samples of one and two answers, of nothing but an answer, and of a single row.

    Args:
        right: [num_tokens], rows whose target is what the draft guesses.
    """
    num_tokens = sum(LENGTHS)
    draw = torch.Generator().manual_seed(0)
    aux = torch.randn(model.fc.weight.shape[1], generator=draw)
    guess = model.fc(aux).detach()  # the verifier has the same head, so of this state it says what the draft does
    mask = torch.ones(num_tokens, dtype=torch.bool)
    mask[:6] = mask[10:13] = False  # prompt, answer, prompt, answer
    mask[20:25] = mask[39:] = False  # the fourth has a prompt, the last no answer but its last row
    mask[-1] = True
    return PackedBatch(
        aux.expand(num_tokens, -1),
        torch.randint(0, VERIFIER_VOCAB_SIZE, (num_tokens,), generator=draw),
        mask,
        torch.cat([torch.arange(1, length + 1) for length in LENGTHS]),
        torch.where(right[:, None], guess, -guess),
        LENGTHS,
    )


def sums_of(model: Any, implementation: str, batch: PackedBatch) -> torch.Tensor:
    objective = Eagle3Objective(model, CONFIG, implementation)
    _, sums = objective(objective.prepare(batch), batch.num_loss_tokens)
    return sums


def counted(batch: PackedBatch, right: torch.Tensor) -> list[tuple[int, int, int]]:
    """`correct`, `total` and `judged` of each TTT step, row by row: what the columns mean."""
    documents = batch.document_ids.tolist()
    table = []
    for step in range(CONFIG.ttt_steps):
        correct = total = judged = 0
        for row in range(batch.num_tokens):
            aims = range(row, row + step + 1)
            if aims[-1] >= batch.num_tokens or documents[aims[-1]] != documents[row]:
                continue
            if all(batch.loss_mask[aim] for aim in aims):
                judged += 1
                total += all(right[aim] for aim in aims[:-1])
                correct += all(right[aim] for aim in aims)
        table.append((correct, total, judged))
    return table


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_draft_that_is_right_everywhere_scores_one_at_every_step(model: Any, implementation: str) -> None:
    batch = pack(model, torch.ones(sum(LENGTHS), dtype=torch.bool))
    line = metrics_line("validation", 1, sums_of(model, implementation, batch), 0.8)
    assert line["accuracy_per_ttt_step"] == [1.0] * CONFIG.ttt_steps
    assert line["full_accuracy_per_ttt_step"] == [1.0] * CONFIG.ttt_steps
    assert line["acceptance_length"] == 1 + CONFIG.ttt_steps


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_counts_are_those_of_a_walk_through_the_rows(model: Any, implementation: str) -> None:
    right = torch.rand(sum(LENGTHS), generator=torch.Generator().manual_seed(3)) < 0.7
    batch = pack(model, right)
    sums = sums_of(model, implementation, batch)
    columns = [SUM_COLUMNS.index(name) for name in ("correct", "total", "judged")]
    wanted = counted(batch, right)
    assert [tuple(row) for row in sums[:, columns].int().tolist()] == wanted
    assert wanted[0][0] > wanted[-1][0] > 0
    line = metrics_line("train", 1, sums, 0.8)
    assert line["full_accuracy_per_ttt_step"] == pytest.approx([row[0] / row[2] for row in wanted])
    assert line["accuracy_per_ttt_step"] == pytest.approx([row[0] / row[1] for row in wanted])


def test_full_accuracy_is_of_all_rows_and_conditional_of_those_still_standing() -> None:
    sums = torch.tensor([[8.0, 4, 2, 4, 4], [4.0, 4, 1, 2, 4]], dtype=torch.float64)
    line = metrics_line("train", 7, sums, 0.5, learning_rate=1.0)
    assert line["loss"] == pytest.approx(2 + 0.5 * 1)
    assert line["accuracy_per_ttt_step"] == [0.5, 0.5]
    assert line["full_accuracy_per_ttt_step"] == [0.5, 0.25]
    assert line["acceptance_length"] == pytest.approx(1.75)


def test_no_rows_give_no_accuracy() -> None:
    line = metrics_line("train", 1, torch.zeros(2, len(SUM_COLUMNS), dtype=torch.float64), 0.5)
    assert line["full_accuracy_per_ttt_step"] == line["accuracy_per_ttt_step"] == [0.0, 0.0]
