"""What the watch looks at, and what it starts a run with. Its life with a real server: tests/e2e/test_watch.py."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from flows.config import PipelineConfig
from flows.resolve import resolve
from flows.watch import VERIFIER, memory_name, pinned, revisions, watch
from infra.errors import InputError
from tests.watched import config_of, write_model

COMMIT = "0123456789012345678901234567890123456789"


def test_a_run_is_given_the_revisions_that_were_seen() -> None:
    source = {"hub": "org/data", "name": "data"}
    config = PipelineConfig.model_validate(
        {
            "profile": "smoke",
            "verifier": {"model": "org/model", "revision": "main"},
            "prompts": {"sources": [source]},
        }
    )
    found = pinned(config, {VERIFIER: COMMIT, "dataset data": COMMIT[::-1]})
    assert found.verifier.revision == COMMIT
    assert found.prompts.sources[0].revision == COMMIT[::-1]
    assert (config.verifier.revision, config.prompts.sources[0].revision) == ("main", None)
    sent = PipelineConfig.model_validate(found.model_dump(mode="json", exclude_unset=True))
    assert sent == found, "what is sent with the run is the whole config"


def test_pinning_changes_no_key_and_a_new_verifier_only_what_it_touches(tmp_path: Path) -> None:
    write_model(tmp_path, 1)
    config = config_of(tmp_path)
    before = revisions(config)
    keys = {name: stage.key for name, stage in resolve(config).items()}
    assert {name: stage.key for name, stage in resolve(pinned(config, before)).items()} == keys
    write_model(tmp_path, 2)
    after = revisions(config)
    assert {what for what in after if after[what] != before[what]} == {VERIFIER}
    now = {name: stage.key for name, stage in resolve(pinned(config, after)).items()}
    assert {name for name in now if now[name] == keys[name]} == {"prompts"}
    with pytest.raises(InputError, match=r"verifier\.revision"):
        resolve(pinned(config, before))


def test_each_thing_that_is_watched_has_a_memory_of_its_own(tmp_path: Path) -> None:
    write_model(tmp_path, 1)
    configs = [
        config_of(tmp_path),
        config_of(tmp_path, root="elsewhere"),
        config_of(tmp_path, profile="qwen3-8b-h200"),
    ]
    names = {memory_name(config) for config in configs}
    assert len(names) == 3
    assert all(name.replace("-", "").isalnum() and name.islower() for name in names)
    write_model(tmp_path, 2)
    assert memory_name(config_of(tmp_path)) in names


def test_a_hub_out_of_reach_is_a_state_and_not_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any, **__: Any) -> None:
        raise ConnectionError("no route to host")

    write_model(tmp_path, 1)
    monkeypatch.setattr("huggingface_hub.HfApi.model_info", refused)
    config = config_of(tmp_path, verifier={"model": "org/model"})
    state: Any = asyncio.run(watch.fn(config))
    assert (state.name, state.type.value) == ("OutOfReach", "COMPLETED")
    assert "org/model is not there" in state.message
    assert "the Hugging Face hub did not answer about it: no route to host" in state.message
    assert "Nothing was started" in state.message


def test_a_config_without_a_profile_is_wrong_input(tmp_path: Path) -> None:
    write_model(tmp_path, 1)
    with pytest.raises(InputError, match="name the profile"):
        asyncio.run(watch.fn(config_of(tmp_path).model_copy(update={"profile": None})))
