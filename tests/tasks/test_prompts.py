"""The task that writes the prompts: what its manifest adds, and a source that is not what the key says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from infra import manifest
from infra.errors import InputError
from infra.fingerprint import stage_content
from infra.manifest import StageRef
from infra.prompts.rows import Messages
from infra.prompts.samples import PromptsConfig, dataset_revisions
from infra.verifiers.verifier import VerifierConfig
from tasks import prompts as task


def stage_of(root: Path, config: PromptsConfig) -> StageRef:
    whole = stage_content("prompts", 1, config.content(), dataset_revisions(config), {})
    return StageRef(str(root), "prompts", whole)


def write(path: Path, *prompts: str) -> str:
    path.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    return str(path)


async def test_prompts_are_counted_where_their_length_decides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[VerifierConfig] = []

    def token_counter(verifier: VerifierConfig) -> Any:
        asked.append(verifier)

        def count(messages: Messages) -> int:
            return len(messages[0]["content"])

        return count

    monkeypatch.setattr(task, "token_counter", token_counter)
    file, verifier = write(tmp_path / "q.jsonl", "a", "bb", "ccc", "", "a"), VerifierConfig()
    for limit, dropped in ((None, {"duplicate": 1, "empty": 1}), (2, {"duplicate": 1, "empty": 1, "too_long": 1})):
        config = PromptsConfig.model_validate(
            {"sources": [{"file": file, "max_prompt_tokens": limit}], "heldout_prompts": 1}
        )
        stage = stage_of(tmp_path / "root", config)
        assert await task.write_prompts.fn(stage, config, verifier) == {"dropped": {"q": dropped}}
        shards = [shard.extra["split"] for shard in manifest.read_plan(stage.uri)]
        assert shards == ["train", "heldout"]
    assert asked == [verifier]


async def test_what_is_not_taken_is_logged_with_its_first_row(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = PromptsConfig.model_validate(
        {"sources": [{"file": write(tmp_path / "q.jsonl", "a", "b", "")}], "heldout_prompts": 1}
    )
    with caplog.at_level("INFO", logger="draftsmith"):
        await task.write_prompts.fn(stage_of(tmp_path / "root", config), config, VerifierConfig())
    said = "Read 1 train samples and 1 heldout prompts; not taken of q: 1 empty (row 3)."
    assert said in caplog.messages


async def test_a_source_that_is_not_what_the_key_says_is_refused(tmp_path: Path) -> None:
    file = write(tmp_path / "q.jsonl", "a", "b")
    config = PromptsConfig.model_validate({"sources": [{"file": file}], "heldout_prompts": 0})
    stage = stage_of(tmp_path / "root", config)
    write(tmp_path / "q.jsonl", "a", "c")
    with pytest.raises(InputError, match=r"^prompts\.sources: q was sha256:\w+ and is now sha256:\w+; run again$"):
        await task.write_prompts.fn(stage, config, VerifierConfig())
    assert not (tmp_path / "root").exists()
