from __future__ import annotations

import json
import logging
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from infra.errors import InputError
from infra.state_checks import on_policy
from infra.state_checks.checks import ChecksConfig, open_head
from infra.state_checks.on_policy import (
    Excerpt,
    OnPolicy,
    OnPolicyConfig,
    _measured,
    measure,
    problem,
    total_problem,
)
from infra.state_checks.verifier_head import UnknownHead, VerifierHead
from infra.verifiers.verifier import Verifier
from tests.fakes.tiny_verifier import HIDDEN_SIZE, VOCAB_SIZE, Answered, answers, save, states_of, tiny_model

pytestmark = pytest.mark.seconds  # a small model writes its own text first

MODEL = tiny_model()
OTHER_MODEL = 1  # its seed
CONFIG = OnPolicyConfig()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(MODEL, tmp_path_factory.mktemp("verifier"))


@pytest.fixture(scope="module")
def head(folder: Path) -> VerifierHead:
    return VerifierHead.open(folder)


def judged(head: VerifierHead, answer: Answered, config: OnPolicyConfig = CONFIG) -> OnPolicy:
    row = answer.response
    excerpt = Excerpt.of(
        *(answer.states[:, -1], row["input_ids"], row["loss_mask"], row["temperature"], row["sample_id"]), config
    )
    return measure(head, [excerpt], config)[0]


def rewritten(folder: Path, target: Path, names: dict[str, str | None], **config: Any) -> Path:
    """The checkpoint with tensors renamed (None: left out) and fields of its config changed (None: left out)."""
    target.mkdir()
    tensors = load_file(folder / "model.safetensors")
    renamed = {names.get(name, name): tensor.contiguous() for name, tensor in tensors.items()}
    save_file({name: tensor for name, tensor in renamed.items() if name is not None}, target / "model.safetensors")
    found = json.loads((folder / "config.json").read_text()) | config
    (target / "config.json").write_text(
        json.dumps({name: value for name, value in found.items() if value is not None})
    )
    return target


def test_the_head_gives_the_models_own_logits(head: VerifierHead) -> None:
    ids = torch.randint(VOCAB_SIZE, (1, 20), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = MODEL(ids).logits[0].float()
    found = head.logits(states_of(MODEL, ids)[0, :, -1])
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected, rtol=0.02, atol=0.1)


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_the_verifiers_own_text_passes_and_is_as_likely_as_expected(head: VerifierHead, temperature: float) -> None:
    found = [judged(head, answer) for answer in answers(temperature, 40)]
    assert [problem(each, CONFIG) for each in found] == [None] * 40
    total = sum(found, OnPolicy())
    assert total_problem(total, CONFIG) is None
    assert 40 * 8 <= total.positions < 40 * CONFIG.positions  # most are sound by their first few
    if temperature:
        # Within four standard errors of what the module's docstring says to expect.
        assert abs(total.logprob - total.expected_logprob) < 4 * math.sqrt(total.variance)
        assert abs(total.top1 - total.expected_top1) < 4 * math.sqrt(total.positions / 4)
    else:
        assert total.top1 > 0.95 * total.positions


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_the_text_of_another_model_is_refused(head: VerifierHead, temperature: float) -> None:
    others = answers(temperature, 20, seed=OTHER_MODEL)
    for answer in others:
        assert str(problem(judged(head, answer), CONFIG)).startswith("off-policy: ")
    assert total_problem(sum((judged(head, answer) for answer in others), OnPolicy()), CONFIG)


@pytest.mark.parametrize("config", [OnPolicyConfig(margin_top1=0.999), OnPolicyConfig(margin_nats=1000)])
def test_likelihood_and_first_choices_each_refuse_by_themselves(head: VerifierHead, config: OnPolicyConfig) -> None:
    for answer in answers(0.7, 20, seed=OTHER_MODEL):
        assert problem(judged(head, answer, config), config)


def test_text_sampled_at_another_temperature_than_said_shows_in_the_total(head: VerifierHead) -> None:
    hotter = [Answered({**each.response, "temperature": 0.7}, each.states) for each in answers(1.2, 40)]
    cooler = [Answered({**each.response, "temperature": 1.2}, each.states) for each in answers(0.7, 40)]
    assert total_problem(sum((judged(head, each) for each in hotter), OnPolicy()), CONFIG)
    # As with top_p and top_k, likelier tokens are no fault.
    assert total_problem(sum((judged(head, each) for each in cooler), OnPolicy()), CONFIG) is None


@pytest.mark.parametrize("temperature", [0.1, 0.7, 2.0])
def test_the_statistics_are_those_of_the_formulas(temperature: float) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = 5 * torch.randn(9, 300, generator=generator)
    tokens = torch.randint(300, (9,), generator=generator)
    logprobs = torch.log_softmax(logits.double() / temperature, dim=-1)
    probs, own = logprobs.exp(), logprobs[torch.arange(9), tokens]
    entropy = -(probs * logprobs).sum(-1)
    columns = _measured(logits.clone(), tokens, torch.full((9,), temperature), evidence=True)
    found = OnPolicy.of(columns.sum(dim=0).tolist())
    assert found.positions == 9
    assert found.top1 == (logits.argmax(-1) == tokens).sum()
    assert found.expected_top1 == pytest.approx(probs.amax(-1).sum().item(), rel=1e-4)
    assert found.logprob == pytest.approx(own.sum().item(), rel=1e-4)
    assert found.expected_logprob == pytest.approx(-entropy.sum().item(), rel=1e-4)
    expected = ((probs * logprobs.square()).sum(-1) - entropy.square()).sum().item()
    assert found.variance == pytest.approx(expected, rel=1e-3)
    for a, ratio in zip((0.25, 0.5), found.ratios, strict=True):
        expected = (-a * own - (probs ** (1 - a)).sum(-1).log()).sum().item()
        assert ratio == pytest.approx(expected, rel=1e-3, abs=1e-3)


def test_a_few_positions_give_no_verdict_but_count(head: VerifierHead) -> None:
    others = answers(1.0, 20, seed=OTHER_MODEL)
    for answer in others:
        for position in range(16, len(answer.response["loss_mask"])):
            answer.response["loss_mask"][position] = False
    found = [judged(head, answer) for answer in others]
    assert [each.positions for each in found] == [4] * 20
    assert sum(problem(each, CONFIG) is None for each in answers_with(found, 1)) == 20
    assert total_problem(sum(found, OnPolicy()), CONFIG)


def answers_with(found: list[OnPolicy], positions: int) -> list[OnPolicy]:
    """Each as if only so many of its positions were judged."""
    return [
        OnPolicy(
            positions,
            *(
                getattr(each, name) * positions / each.positions
                for name in ("top1", "expected_top1", "logprob", "expected_logprob", "variance")
            ),
            tuple(ratio * positions / each.positions for ratio in each.ratios),
        )
        for each in found
    ]


def test_every_position_under_the_mask_is_judged_once_where_there_are_few(head: VerifierHead) -> None:
    answer = answers(0.7, 1)[0]
    mask = answer.response["loss_mask"]
    mask[:] = [
        position in (0, 3, 4, 20, 21) for position in range(len(mask))
    ]  # two turns; nothing predicts token 0
    whole = judged(head, answer)
    assert whole.positions == 4
    parts = []
    for kept in (3, 4, 20, 21):
        mask[:] = [position == kept for position in range(len(mask))]
        parts.append(judged(head, answer))
    assert sum(parts, OnPolicy()).logprob == pytest.approx(whole.logprob, abs=1e-3)
    mask[:] = [False] * len(mask)
    assert judged(head, answer) == OnPolicy()
    assert problem(OnPolicy(), CONFIG) is None


def test_the_positions_are_the_samples_own_and_bounded(head: VerifierHead) -> None:
    answer = answers(0.7, 1)[0]
    few, many = OnPolicyConfig(positions=5), OnPolicyConfig(positions=1000)
    assert judged(head, answer, few) == judged(head, answer, few)
    assert judged(head, answer, few).positions == 5
    assert judged(head, answer, many).positions == 8  # sound: no need to look at more
    other = answers(0.7, 1, seed=OTHER_MODEL)[0]
    assert judged(head, other, many).positions == sum(other.response["loss_mask"])
    answer.response["sample_id"] = "another"
    assert judged(head, answer, few) != judged(head, answers(0.7, 1)[0], few)


def test_samples_measured_together_are_as_they_are_alone(
    head: VerifierHead, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(on_policy, "_VALUES_AT_ONCE", 3 * VOCAB_SIZE)  # blocks that begin and end in mid-sample
    mixed = [*answers(0.7, 5), *answers(0.0, 5), *answers(1.0, 5, seed=OTHER_MODEL)]
    rows = [(each.states[:, -1], each.response) for each in mixed]
    excerpts = [
        Excerpt.of(states, row["input_ids"], row["loss_mask"], row["temperature"], row["sample_id"], CONFIG)
        for states, row in rows
    ]
    for together, answer in zip(measure(head, excerpts, CONFIG), mixed, strict=True):
        alone = judged(head, answer)
        assert together.positions == alone.positions
        assert together.logprob == pytest.approx(alone.logprob, rel=1e-3, abs=1e-2)


def test_a_record_says_what_totals_are_judged_by(head: VerifierHead) -> None:
    total = sum((judged(head, each) for each in answers(1.0, 10)), OnPolicy())
    said = json.loads(json.dumps(total.to_json()))
    assert set(said) >= {"positions", "top1", "expected_top1", "mean_logprob", "expected_logprob"}
    again = OnPolicy.from_json(said)
    assert again.shortfall == pytest.approx(total.shortfall, abs=1e-4)
    assert again.variance == pytest.approx(total.variance, rel=1e-3)


@pytest.mark.parametrize(
    "names",
    [
        {
            "model.norm.weight": "language_model.model.norm.weight",
            "lm_head.weight": "language_model.lm_head.weight",
        },
        {"model.norm.weight": "model.language_model.norm.weight"},
        {"model.norm.weight": "transformer.ln_f.weight"},
    ],
    ids=["kimi", "qwen-vl", "gpt"],
)
def test_wrapped_names_and_configs_are_understood(
    folder: Path, tmp_path: Path, head: VerifierHead, names: dict[str, str | None]
) -> None:
    text = json.loads((folder / "config.json").read_text())
    # Parts with norms of their own, which are not the text model's.
    wrapped = rewritten(folder, tmp_path / "wrapped", names, text_config=text, rms_norm_eps=None, hidden_size=None)
    extra = {"vision_tower.norm.weight": torch.ones(3), "mtp.model.norm.weight": torch.ones(HIDDEN_SIZE)}
    save_file(extra, wrapped / "more.safetensors")
    states = torch.randn(5, HIDDEN_SIZE)
    assert torch.equal(VerifierHead.open(wrapped).logits(states), head.logits(states))


def test_an_index_names_the_files(folder: Path, tmp_path: Path, head: VerifierHead) -> None:
    split = rewritten(folder, tmp_path / "split", {})
    (split / "model.safetensors").rename(split / "model-00001-of-00001.safetensors")
    names = load_file(split / "model-00001-of-00001.safetensors")
    index = {"weight_map": dict.fromkeys(names, "model-00001-of-00001.safetensors")}
    (split / "model.safetensors.index.json").write_text(json.dumps(index))
    states = torch.randn(5, HIDDEN_SIZE)
    assert torch.equal(VerifierHead.open(split).logits(states), head.logits(states))


def test_tied_embeddings_are_the_head(folder: Path, tmp_path: Path) -> None:
    tied = rewritten(folder, tmp_path / "tied", {"lm_head.weight": None}, tie_word_embeddings=True)
    assert torch.equal(VerifierHead.open(tied).head, MODEL.model.embed_tokens.weight)


def test_families_that_scale_cap_or_shift_are_computed_as_they_do(
    folder: Path, tmp_path: Path, head: VerifierHead
) -> None:
    states = torch.randn(5, HIDDEN_SIZE)
    plain = head.logits(states)
    scaled = rewritten(folder, tmp_path / "granite", {}, logits_scaling=8.0)
    torch.testing.assert_close(VerifierHead.open(scaled).logits(states), plain / 8)
    capped = rewritten(folder, tmp_path / "capped", {}, final_logit_softcapping=30.0)
    torch.testing.assert_close(VerifierHead.open(capped).logits(states), 30 * torch.tanh(plain / 30))
    gemma = rewritten(folder, tmp_path / "gemma", {}, model_type="gemma2")
    torch.testing.assert_close(VerifierHead.open(gemma).norm, head.norm + 1)
    layer_norm = rewritten(folder, tmp_path / "cohere", {}, rms_norm_eps=None, layer_norm_eps=1e-5, logit_scale=0.5)
    normed = torch.nn.functional.layer_norm(states, (HIDDEN_SIZE,), head.norm, eps=1e-5)
    expected = normed @ head.head.T * 0.5
    torch.testing.assert_close(VerifierHead.open(layer_norm).logits(states), expected)


UNKNOWN: dict[str, tuple[dict[str, str | None], dict[str, Any], str]] = {
    "quantized": ({"lm_head.weight": "lm_head.weight_packed"}, {}, "output head has no name"),
    "quantized, and silent about ties": (
        {"lm_head.weight": "lm_head.qweight"},
        {"tie_word_embeddings": None},
        "output head has no name",
    ),
    "no head": ({"lm_head.weight": None}, {"tie_word_embeddings": False}, "output head has no name"),
    "no norm": ({"model.norm.weight": "model.the_norm.weight"}, {}, "final norm has no name"),
    "no epsilon": ({}, {"rms_norm_eps": None}, "no epsilon"),
    "of a kind of its own": ({}, {"model_type": "minicpm3"}, "family minicpm3"),
    "two": ({"model.layers.0.mlp.gate_proj.weight": "one.lm_head.weight"}, {}, "has several of lm_head"),
    "other shape": ({}, {"hidden_size": 64}, "have shapes"),
}


@pytest.mark.parametrize("kind", UNKNOWN)
def test_a_head_that_is_not_understood_turns_the_check_off_or_is_refused(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    names, config, said = UNKNOWN[kind]
    unknown = rewritten(folder, tmp_path / "unknown", names, **config)
    with pytest.raises(UnknownHead, match=said):
        VerifierHead.open(unknown)
    verifier = Verifier(
        name="tiny", revision="abc", path=unknown, hidden_size=HIDDEN_SIZE, num_hidden_layers=7,
        vocab_size=VOCAB_SIZE, max_position_embeddings=99,
    )  # fmt: skip
    with caplog.at_level(logging.WARNING):
        assert open_head(ChecksConfig(), verifier) is None
    assert [record.getMessage() for record in caplog.records if "on-policy check is off" in record.getMessage()]
    with pytest.raises(InputError, match=r"extract\.checks\.on_policy: cannot be required of tiny") as caught:
        open_head(ChecksConfig(on_policy="required"), verifier)
    assert "\n" not in str(caught.value)
    caplog.clear()
    assert open_head(ChecksConfig(on_policy="off"), verifier) is None
    assert not caplog.records


def test_a_torn_checkpoint_is_an_unknown_head(folder: Path, tmp_path: Path) -> None:
    torn = rewritten(folder, tmp_path / "torn", {})
    body = (torn / "model.safetensors").read_bytes()
    (torn / "model.safetensors").write_bytes(body[:100])
    with pytest.raises(UnknownHead, match="cannot be read"):
        VerifierHead.open(torn)
    with pytest.raises(UnknownHead, match="cannot be read"):
        VerifierHead.open(tmp_path)
