from __future__ import annotations

import pytest
import torch

from infra.hidden_states import HiddenStatesMeta
from infra.state_checks import states_problem

META = HiddenStatesMeta(layer_ids=(2, 15, 27, 30), hidden_size=8, verifier_revision="abc")


def sane(num_tokens: int = 10) -> torch.Tensor:
    return torch.randn(num_tokens, 4, 8, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)


def damaged(kind: str) -> torch.Tensor:
    damage = sane()
    if kind == "nan":
        damage[4, 1, 3] = float("nan")
    elif kind == "inf":
        damage[9, 3, 7] = float("-inf")
    elif kind == "zero everywhere":
        damage[:] = 0
    elif kind == "zero at one token":
        damage[6, 2] = 0
    elif kind == "constant":
        damage[:, 1] = 2.5
    elif kind == "same at every token":
        damage[:, 2] = damage[3, 2]
    elif kind == "short":
        damage = damage[:6]
    elif kind == "layer lost":
        damage = damage[:, :3]
    return damage


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("nan", "not finite: layer 15, token 4 (1 of 10 tokens)"),
        ("inf", "not finite: layer 30, token 9 (1 of 10 tokens)"),
        ("zero everywhere", "all zero: layer 2, token 0 (10 of 10 tokens)"),
        ("zero at one token", "all zero: layer 27, token 6 (1 of 10 tokens)"),
        ("constant", "constant: layer 15, token 0 (10 of 10 tokens)"),
        ("same at every token", "constant: the same at every token of layer 27"),
        ("short", "length: states of shape [6, 4, 8] for 10 tokens and 4 layers"),
        ("layer lost", "length: states of shape [10, 3, 8] for 10 tokens and 4 layers"),
        ("none", None),
    ],
)
def test_states_that_no_model_computes_are_found(kind: str, said: str | None) -> None:
    assert states_problem(damaged(kind), list(range(10)), META.layer_ids) == said


def test_one_token_over_and_over_may_have_one_state() -> None:
    repeated = sane(1).expand(10, 4, 8)
    assert states_problem(repeated, [7] * 10, META.layer_ids) is None
    assert states_problem(sane(1), [7], META.layer_ids) is None
