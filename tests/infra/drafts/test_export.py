"""An export that does not agree with the training in every particular is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load, save

from infra.drafts.export import CONFIG_FILE, EXPORT_FILES, WEIGHTS_FILE, ExportContract, check_export, export_draft
from infra.errors import StageFailed
from infra.training.algorithm import trainable_parameters
from infra.training.config import TrainConfig
from infra.training.eagle3_model import build_model
from tests.fakes.training_run import HIDDEN_SIZE, LAYER_IDS, vocabulary, write_verifier

TRAIN = TrainConfig()
CONTRACT = ExportContract(LAYER_IDS, vocabulary(), "package:tiny", "0123abcd", HIDDEN_SIZE)


@pytest.fixture(scope="module")
def verifier(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_verifier(tmp_path_factory.mktemp("verifier")))


@pytest.fixture(scope="module")
def weights(verifier: str) -> dict[str, torch.Tensor]:
    model = build_model(TRAIN, CONTRACT.vocab, verifier, LAYER_IDS[:-1])
    return {name: torch.randn(value.shape) for name, value in trainable_parameters(model).items()}


@pytest.fixture(scope="module")
def exported(verifier: str, weights: dict[str, torch.Tensor], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("export")
    paths = export_draft(weights, TRAIN, CONTRACT, verifier, folder)
    assert [path.name for path in paths] == [CONFIG_FILE, WEIGHTS_FILE]
    return folder


def test_the_export_holds_the_trained_weights_in_bf16(exported: Path, weights: dict[str, torch.Tensor]) -> None:
    tensors = load((exported / WEIGHTS_FILE).read_bytes())
    for name, value in weights.items():
        assert torch.equal(tensors[name], value.bfloat16()), name
    assert "verifier_lm_head.weight" not in tensors


def test_the_config_names_the_verifier_and_no_folder(exported: Path, verifier: str) -> None:
    text = (exported / CONFIG_FILE).read_text()
    assert verifier not in text
    config = json.loads(text)
    assert config["speculators_config"]["verifier"]["name_or_path"] == "package:tiny"
    assert config["speculators_config"]["verifier"]["revision"] == "0123abcd"
    assert config["eagle_aux_hidden_state_layer_ids"] == [1, 2, 4]


def test_speculators_reads_its_own_format_back(exported: Path) -> None:
    from speculators.models.eagle3 import Eagle3SpeculatorConfig

    config = Eagle3SpeculatorConfig.from_pretrained(exported)
    assert config.draft_vocab_size == CONTRACT.vocab.draft_vocab_size
    assert config.norm_before_residual is True


def set_in(*path: str, to: Any) -> Callable[[dict[str, Any]], None]:
    def change(config: dict[str, Any]) -> None:
        for name in path[:-1]:
            config = config[name]
        config[path[-1]] = to

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (set_in("eagle_aux_hidden_state_layer_ids", to=[1, 2, 3]), "aux_hidden_state_layer_ids"),
        (set_in("eagle_aux_hidden_state_layer_ids", to=[1, 2, 4, 6]), "aux_hidden_state_layer_ids"),
        (set_in("eagle_aux_hidden_state_layer_ids", to=None), "aux_hidden_state_layer_ids"),
        (set_in("draft_vocab_size", to=32), "draft_vocab_size"),
        (set_in("transformer_layer_config", "hidden_size", to=64), "hidden_size"),
        (set_in("speculators_config", "verifier", "name_or_path", to="/home/me/model"), "path of this machine"),
        (set_in("speculators_config", "verifier", "revision", to="ffff"), "revision"),
        (set_in("transformer_layer_config", "_name_or_path", to="/data/x"), "path of this machine"),
        (set_in("speculators_model_type", to="peagle"), "speculators_model_type"),
        (set_in("norm_before_residual", to=False), "norm_before_residual"),
        (set_in("fc_norm", to=True), "fc_norm"),
        (set_in("dtype", to="float32"), "dtype"),
        (set_in("transformer_layer_config", "model_type", to="gpt2"), "model_type"),
        (set_in("transformer_layer_config", "intermediate_size", to=64), "mlp.down_proj.weight has shape"),
        (set_in("transformer_layer_config", "num_key_value_heads", to=4), "self_attn.k_proj.weight has shape"),
        (
            lambda config: config["transformer_layer_config"].pop("num_attention_heads"),
            "lacks .*num_attention_heads",
        ),
    ],
)
def test_a_config_that_departs_is_refused(
    exported: Path, change: Callable[[dict[str, Any]], None], message: str
) -> None:
    config = json.loads((exported / CONFIG_FILE).read_text())
    change(config)
    with pytest.raises(StageFailed, match=message):
        check_export(json.dumps(config).encode(), (exported / WEIGHTS_FILE).read_bytes(), CONTRACT)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("d2t", lambda held: held + 1, "vocabulary map"),
        ("t2d", lambda held: ~held, "vocabulary map"),
        ("fc.weight", lambda held: held[:, :HIDDEN_SIZE].contiguous(), "shape"),
        ("fc.weight", lambda held: held.float(), "bfloat16"),
        ("lm_head.weight", lambda held: held * float("nan"), "not finite"),
        ("embed_tokens.weight", lambda held: None, "lacks"),
        ("layers.0.self_attn.q_proj.weight", lambda held: None, "lacks"),
        ("layers.0.self_attn.o_proj.weight", lambda held: held[:, :-1].contiguous(), "shape"),
    ],
)
def test_weights_that_depart_are_refused(
    exported: Path, name: str, change: Callable[[torch.Tensor], torch.Tensor | None], message: str
) -> None:
    tensors = load((exported / WEIGHTS_FILE).read_bytes())
    changed = change(tensors.pop(name))
    if changed is not None:
        tensors[name] = changed
    with pytest.raises(StageFailed, match=message):
        check_export((exported / CONFIG_FILE).read_bytes(), save(tensors), CONTRACT)


def test_a_tensor_that_no_draft_has_is_refused(exported: Path) -> None:
    tensors = {**load((exported / WEIGHTS_FILE).read_bytes()), "mask_hidden": torch.zeros(1).bfloat16()}
    with pytest.raises(StageFailed, match="mask_hidden"):
        check_export((exported / CONFIG_FILE).read_bytes(), save(tensors), CONTRACT)


def test_the_norms_and_layers_of_the_training_are_the_exports(verifier: str, tmp_path: Path) -> None:
    train = TrainConfig(num_layers=2, fc_norm=True, norm_output=True, norm_before_residual=False)
    model = build_model(train, CONTRACT.vocab, verifier, LAYER_IDS[:-1])
    weights = {name: value.detach() for name, value in trainable_parameters(model).items()}
    contract = replace(CONTRACT, num_layers=2, fc_norm=True, norm_output=True, norm_before_residual=False)
    export_draft(weights, train, contract, verifier, tmp_path)
    with pytest.raises(StageFailed, match="fc_norm"):
        check_export(*((tmp_path / name).read_bytes() for name in EXPORT_FILES), replace(contract, fc_norm=False))


def test_torn_files_are_refused(exported: Path) -> None:
    config, data = (exported / CONFIG_FILE).read_bytes(), (exported / WEIGHTS_FILE).read_bytes()
    for torn in ((config[:-9], data), (config, data[:-9])):
        with pytest.raises(StageFailed, match="cannot be read"):
            check_export(*torn, CONTRACT)


def test_weights_of_another_draft_are_refused(
    verifier: str, weights: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    with pytest.raises(StageFailed, match="other weights"):
        export_draft({**weights, "fc.weight": torch.zeros(2, 2)}, TRAIN, CONTRACT, verifier, tmp_path)
