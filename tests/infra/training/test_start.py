"""Training starts from another draft's weights: equal at step 0, remapped by token, refused where it does not fit."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from infra.drafts.export import CONFIG_FILE, WEIGHTS_FILE
from infra.drafts.start_draft import StartConfig
from infra.errors import InfrastructureError, InputError
from infra.training import checkpoint, checkpoint_files, start
from infra.training.checkpoint_files import CheckpointRef
from infra.training.config import TrainConfig, TrainSpec
from infra.training.eagle3_start import start_weights
from infra.training.loop import Trainer
from infra.training.ranks import Ranks
from infra.training.start import write_start
from tests.fakes.start_draft import map_of, random_weights, write_original, write_speculator
from tests.fakes.training_run import LAYER_IDS, VERIFIER_VOCAB_SIZE, vocabulary, write_spec, write_verifier

CONFIG = TrainConfig(
    num_steps=2, warmup_steps=0, total_seq_len=64, validation_share=0.2, num_threads=1, train_lm_head=True
)
ORIGINAL = CONFIG.model_copy(update={"norm_before_residual": False})


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAFTSMITH_CACHE", str(tmp_path / "cache"))
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def verifier(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_verifier(tmp_path_factory.mktemp("verifier")))


@pytest.fixture(scope="module")
def weights(verifier: str) -> dict[str, Tensor]:
    return random_weights(CONFIG, vocabulary(), verifier)


@pytest.fixture(scope="module")
def speculator(verifier: str, weights: dict[str, Tensor], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_speculator(tmp_path_factory.mktemp("speculator"), CONFIG, vocabulary(), verifier, weights)


@pytest.fixture(scope="module")
def original(verifier: str, weights: dict[str, Tensor], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("original")
    return write_original(
        folder / "draft", write_speculator(folder / "speculator", ORIGINAL, vocabulary(), verifier, weights)
    )


def spec_of(verifier: str, draft: Path, train: TrainConfig = CONFIG) -> TrainSpec:
    """What `start_weights` reads of a specification."""
    return TrainSpec(
        train=train.model_copy(update={"init_from": StartConfig(draft=str(draft))}),
        hidden_states_uri="unread",
        vocab_uri="unread",
        draft_uri="unread",
        lease_epoch=1,
        verifier_path=verifier,
        aux_hidden_state_layer_ids=LAYER_IDS[:-1],
        metrics_path="unread",
    )


def equal(found: dict[str, Any], wanted: dict[str, Tensor]) -> None:
    assert set(found) == set(wanted)
    for name, value in wanted.items():
        assert torch.equal(found[name], value), name


# --- a run ---


@pytest.mark.seconds
def test_what_was_trained_and_exported_is_what_the_next_training_starts_from(tmp_path: Path) -> None:
    first = write_spec(tmp_path, CONFIG)
    assert Trainer(first, Ranks()).run() == "done"
    trained = checkpoint.read_newest(first.draft_uri, "")
    assert trained is not None
    export = write_speculator(tmp_path / "export", CONFIG, vocabulary(), first.verifier_path, trained.weights)

    moved = {"draft_uri": str(tmp_path / "second"), "metrics_path": str(tmp_path / "second.jsonl")}
    second = first.model_copy(
        update={**moved, "train": CONFIG.model_copy(update={"init_from": StartConfig(draft=str(export))})}
    )
    write_start(second)
    trainer = Trainer(second, Ranks())
    trainer._resume()
    assert trainer.step == 0
    exported = {name: value.bfloat16().float() for name, value in trained.weights.items()}
    equal({name: value.detach() for name, value in trainer.parameters.items()}, exported)

    assert Trainer(second, Ranks()).run() == "done"
    lines = [json.loads(line) for line in Path(second.metrics_path).read_text().splitlines()]
    assert [line["step"] for line in lines] == [2, 2]
    begun = checkpoint.read_newest(second.draft_uri, "")
    assert begun is not None
    assert begun.ref.step == 2
    assert not torch.equal(begun.weights["fc.weight"], exported["fc.weight"])


@pytest.mark.seconds
def test_a_resumed_run_does_not_load_the_start_draft_again(
    tmp_path: Path, speculator: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draft = shutil.copytree(speculator, tmp_path / "draft")
    train = CONFIG.model_copy(update={"init_from": StartConfig(draft=str(draft)), "checkpoint_every_steps": 1})
    spec = write_spec(tmp_path, train)
    write_start(spec)
    shutil.rmtree(draft)
    monkeypatch.setattr(start, "start_folder", lambda config: pytest.fail("the start draft was asked for again"))
    write_start(spec)  # begun, though no step was made
    trainer = Trainer(spec, Ranks())
    trainer._train_step = stopping_after(trainer, 1)
    assert trainer.run() == "stopped"
    later = spec.model_copy(update={"lease_epoch": 2})
    write_start(later)
    again = Trainer(later, Ranks())
    again._resume()
    assert again.step == 1
    assert Trainer(later, Ranks()).run() == "done"


def stopping_after(trainer: Trainer, step: int) -> Callable[..., None]:
    train_step = trainer._train_step

    def stepped(*arguments: Any) -> None:
        train_step(*arguments)
        trainer.stop.asked = trainer.step == step

    return stepped


def test_training_never_begins_from_fresh_weights_instead(tmp_path: Path, speculator: Path) -> None:
    train = CONFIG.model_copy(update={"init_from": StartConfig(draft=str(speculator))})
    spec = write_spec(tmp_path, train, num_samples=4)
    with pytest.raises(InfrastructureError, match="not there whole"):
        Trainer(spec, Ranks()).run()
    write_start(spec)
    torn = Path(CheckpointRef(0, 1).uri(spec.draft_uri), checkpoint_files.MODEL_FILE)
    torn.write_bytes(torn.read_bytes()[:-4])
    with pytest.raises(InfrastructureError, match="not there whole"):
        Trainer(spec, Ranks()).run()
    write_start(spec)
    Trainer(spec, Ranks())._resume()


def test_inputs_that_were_made_anew_start_from_the_draft_again(tmp_path: Path, speculator: Path) -> None:
    train = CONFIG.model_copy(update={"init_from": StartConfig(draft=str(speculator))})
    before = write_spec(tmp_path, train, num_samples=4)
    write_start(before)
    after = before.model_copy(update={"inputs_sha256": "other", "lease_epoch": 2})
    write_start(after)
    assert checkpoint_files.newest_whole(before.draft_uri, "") == CheckpointRef(0, 1)
    assert checkpoint_files.newest_whole(after.draft_uri, "other") == CheckpointRef(0, 2)


# --- the weights ---


def test_a_speculator_gives_its_weights(verifier: str, speculator: Path, weights: dict[str, Tensor]) -> None:
    equal(start_weights(spec_of(verifier, speculator), speculator, vocabulary()), weights)


@pytest.mark.parametrize("told", [{}, {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 4]}}])
def test_the_original_layout_gives_its_weights(
    tmp_path: Path, verifier: str, original: Path, weights: dict[str, Tensor], told: dict[str, Any]
) -> None:
    folder = shutil.copytree(original, tmp_path / "draft")
    config = json.loads((folder / CONFIG_FILE).read_text())
    if told:
        del config["eagle_aux_hidden_state_layer_ids"]
    (folder / CONFIG_FILE).write_text(json.dumps({**config, **told}))
    assert any(name.startswith("midlayer.") for name in load_file(folder / WEIGHTS_FILE))
    equal(start_weights(spec_of(verifier, folder, ORIGINAL), folder, vocabulary()), weights)


@pytest.mark.parametrize("layout", ["speculators", "original"])
def test_rows_of_the_head_follow_their_tokens(
    tmp_path: Path, verifier: str, caplog: pytest.LogCaptureFixture, layout: str
) -> None:
    caplog.set_level(logging.INFO, "draftsmith")
    theirs = map_of(token for token in range(VERIFIER_VOCAB_SIZE) if token % 4)
    trained = random_weights(ORIGINAL, theirs, verifier)
    folder = write_speculator(tmp_path / "speculator", ORIGINAL, theirs, verifier, trained)
    if layout == "original":
        folder = write_original(tmp_path / "original", folder)
    ours = vocabulary()
    found = start_weights(spec_of(verifier, folder, ORIGINAL), folder, ours)["lm_head.weight"]
    from infra.training.eagle3_model import build_model

    verifiers_rows = build_model(CONFIG, ours, verifier, LAYER_IDS[:-1]).lm_head.weight.detach()
    row_of = {int(token): row for row, token in enumerate(theirs.token_ids)}
    shared = 0
    for row, token in enumerate(ours.token_ids.tolist()):
        in_start = token in row_of
        shared += in_start
        wanted = trained["lm_head.weight"][row_of[token]] if in_start else verifiers_rows[row]
        assert torch.equal(found[row], wanted), token
    assert (shared, len(ours.token_ids)) == (48, 64)
    assert "48 of 64 draft tokens (75.0 %) were in the start draft's vocabulary of 72." in caplog.text


def test_a_head_that_is_not_trained_is_the_verifiers_and_a_lost_one_is_told(
    verifier: str, speculator: Path, caplog: pytest.LogCaptureFixture
) -> None:
    frozen = CONFIG.model_copy(update={"train_lm_head": False})
    found = start_weights(spec_of(verifier, speculator, frozen), speculator, vocabulary())
    assert "lm_head.weight" not in found
    assert "The start draft's head differs from the verifier's by" in caplog.text
    assert "train.train_lm_head would start from it" in caplog.text


def test_the_verifiers_own_head_is_no_loss(tmp_path: Path, verifier: str, caplog: pytest.LogCaptureFixture) -> None:
    frozen = CONFIG.model_copy(update={"train_lm_head": False})
    weights = random_weights(frozen, vocabulary(), verifier)
    folder = write_speculator(tmp_path / "draft", frozen, vocabulary(), verifier, weights)
    equal(start_weights(spec_of(verifier, folder, frozen), folder, vocabulary()), weights)
    assert "differs from" not in caplog.text


# --- refusals ---


def flat(name: str, value: Any) -> Callable[[Path], None]:
    """Change a field of an original layout's config."""

    def change(folder: Path) -> None:
        config = json.loads((folder / CONFIG_FILE).read_text())
        (folder / CONFIG_FILE).write_text(json.dumps({**config, name: value}))

    return change


def layer(name: str, value: Any) -> Callable[[Path], None]:
    """Change a field of the layers' config of a speculator."""

    def change(folder: Path) -> None:
        config = json.loads((folder / CONFIG_FILE).read_text())
        config["transformer_layer_config"][name] = value
        (folder / CONFIG_FILE).write_text(json.dumps(config))

    return change


def tensor(name: str, to: Callable[[Tensor | None], Tensor | None]) -> Callable[[Path], None]:
    """Change one tensor, add it, or take it away."""

    def change(folder: Path) -> None:
        tensors = load_file(folder / WEIGHTS_FILE)
        changed = to(tensors.pop(name, None))
        if changed is not None:
            tensors[name] = changed
        save_file(tensors, folder / WEIGHTS_FILE)

    return change


DRAFT = "train.init_from.draft"
MISFITS = [
    pytest.param(layer("hidden_size", 64), {}, DRAFT, "hidden_size 64, but this verifier's has 32", id="width"),
    pytest.param(layer("vocab_size", 128), {}, DRAFT, "vocab_size 128, but this verifier's has 96", id="vocabulary"),
    pytest.param(tensor("t2d", lambda held: torch.zeros(97, dtype=torch.bool)), {}, DRAFT, "vocab_size 97", id="t2d"),
    pytest.param(tensor("d2t", lambda held: held + 60), {}, DRAFT, "outside the verifier's 96", id="d2t"),
    pytest.param(tensor("d2t", lambda held: -torch.arange(64)), {}, DRAFT, "names a token twice", id="twice"),
    pytest.param(layer("intermediate_size", 96), {}, DRAFT, "intermediate_size 96", id="intermediate"),
    pytest.param(layer("num_attention_heads", 8), {}, DRAFT, "num_attention_heads 8", id="heads"),
    pytest.param(layer("num_key_value_heads", 4), {}, DRAFT, "num_key_value_heads 4", id="key heads"),
    pytest.param(layer("head_dim", 16), {}, DRAFT, "head_dim 16", id="head"),
    pytest.param(layer("hidden_act", "gelu"), {}, DRAFT, "hidden_act gelu", id="activation"),
    pytest.param(None, {"num_layers": 2}, "train.num_layers", "is 2, but the start draft has 1", id="layers"),
    pytest.param(None, {"fc_norm": True}, "train.fc_norm", "is true, but must be false", id="fc norm"),
    pytest.param(None, {"norm_output": True}, "train.norm_output", "must be false", id="output norm"),
    pytest.param(None, {"norm_before_residual": False}, "train.norm_before_residual", "must be true", id="residual"),
    pytest.param(flat("norm_before_fc", True), {}, DRAFT, "norm_before_fc", id="norm before fc"),
    pytest.param(
        flat("eagle_aux_hidden_state_layer_ids", [1, 2, 3]), {}, "extract.layer_ids", r"give [1, 2, 3, 6]", id="ids"
    ),
    pytest.param(flat("eagle_aux_hidden_state_layer_ids", None), {}, "extract.layer_ids", "[2, 3, 3]", id="default"),
    pytest.param(
        tensor("fc.weight", lambda held: held[:, :64].contiguous()), {}, "extract.layer_ids", "reads 2", id="inputs"
    ),
    pytest.param(tensor("norm.weight", lambda held: None), {}, DRAFT, "lacks norm.weight", id="absent"),
    pytest.param(
        tensor("layers.0.self_attn.q_proj.bias", lambda held: torch.zeros(32)), {}, DRAFT, "q_proj.bias", id="bias"
    ),
    pytest.param(tensor("norm.weight", lambda held: held[:8].contiguous()), {}, DRAFT, "shape [8]", id="shape"),
    pytest.param(tensor("norm.weight", lambda held: held * float("nan")), {}, DRAFT, "not finite", id="nan"),
    pytest.param(tensor("norm.weight", lambda held: held.to(torch.int8)), {}, DRAFT, "not quantized", id="int8"),
    pytest.param(tensor("fc.weight", lambda held: None), {}, DRAFT, "neither", id="no draft"),
    pytest.param(flat("speculators_model_type", "peagle"), {}, DRAFT, "is a peagle draft", id="another kind"),
    pytest.param(tensor("d2t", lambda held: None), {}, DRAFT, "no vocabulary map", id="no map"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "train", "field", "says"), MISFITS)
def test_a_draft_that_does_not_fit_is_refused_by_name(
    tmp_path: Path,
    verifier: str,
    speculator: Path,
    change: Callable[[Path], None] | None,
    train: dict[str, Any],
    field: str,
    says: str,
) -> None:
    folder = shutil.copytree(speculator, tmp_path / "draft")
    if change is not None:
        change(folder)
    with pytest.raises(InputError) as caught:
        start_weights(spec_of(verifier, folder, CONFIG.model_copy(update=train)), folder, vocabulary())
    assert caught.value.field == field
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "field", "says"),
    [
        (flat("hidden_size", 64), DRAFT, "hidden_size 64"),
        (flat("vocab_size", 128), DRAFT, "vocab_size 128"),
        (flat("num_key_value_heads", 4), DRAFT, "num_key_value_heads 4"),
        (flat("num_hidden_layers", 2), "train.num_layers", "is 1, but the start draft has 2"),
        (flat("norm_before_residual", True), "train.norm_before_residual", "is false, but must be true"),
        (flat("eagle_aux_hidden_state_layer_ids", [1, 3, 4]), "extract.layer_ids", "[1, 3, 4, 6]"),
        (tensor("midlayer.self_attn.q_proj.bias", lambda held: torch.zeros(32)), DRAFT, "q_proj.bias"),
    ],
)
def test_one_in_the_original_layout_is_refused_alike(
    tmp_path: Path, verifier: str, original: Path, change: Callable[[Path], None], field: str, says: str
) -> None:
    folder = shutil.copytree(original, tmp_path / "draft")
    change(folder)
    with pytest.raises(InputError) as caught:
        start_weights(spec_of(verifier, folder, ORIGINAL), folder, vocabulary())
    assert caught.value.field == field
    assert says in str(caught.value)


def test_other_positions_are_warned_of(
    tmp_path: Path, verifier: str, original: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = shutil.copytree(original, tmp_path / "draft")
    flat("rope_theta", 500000.0)(folder)
    start_weights(spec_of(verifier, folder, ORIGINAL), folder, vocabulary())
    assert "The start draft has rope_parameters" in caplog.text
    assert "500000" in caplog.text


def test_a_folder_that_is_no_checkpoint_is_refused(tmp_path: Path, verifier: str, speculator: Path) -> None:
    folder = shutil.copytree(speculator, tmp_path / "draft")
    (folder / CONFIG_FILE).write_text("{")
    with pytest.raises(InputError, match=r"train\.init_from\.draft: the start draft cannot be read"):
        start_weights(spec_of(verifier, folder), folder, vocabulary())
