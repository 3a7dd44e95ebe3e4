"""The table of presets: every row is a right source, and a config's own fields overrule it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from flows.config import load_config
from infra.errors import InputError
from infra.prompts import presets as prompt_presets
from infra.prompts.config import PromptsConfig, PromptSource
from infra.prompts.samples import load_prompts

TABLE: dict[str, dict[str, Any]] = yaml.safe_load(prompt_presets.PRESETS_FILE.read_text(encoding="utf-8"))
WELL_KNOWN = {"open-perfectblend", "sharegpt", "ultrachat", "magpie", "gsm8k", "math500", "mt-bench", "humaneval"}


@pytest.mark.parametrize("name", TABLE)
def test_a_row_is_a_right_source(name: str) -> None:
    row = TABLE[name]
    assert set(row) <= {*PromptSource.model_fields, *prompt_presets.NOTES} - {"preset", "file", "name"}
    assert row["licence"].strip()
    source = PromptSource.model_validate({"preset": name})
    assert source.dataset == name
    assert source.origin in ("hub", "package")
    if source.revision is not None:
        assert re.fullmatch(r"[0-9a-f]{40}", source.revision)
    if source.origin == "hub" and source.files is None:
        assert source.split, "say which split, so that the row can be read without knowing our default"
    # As a config travels through Prefect, and comes back.
    assert PromptSource.model_validate(json.loads(source.model_dump_json())) == source
    assert source.content() == PromptSource.model_validate({**row_of(name), "name": name}).content()


def row_of(name: str) -> dict[str, Any]:
    return prompt_presets.load()[name]


def test_the_well_known_ones_are_there() -> None:
    assert TABLE.keys() >= WELL_KNOWN


def test_the_configs_own_fields_overrule_the_row() -> None:
    source = PromptSource(preset="ultrachat", turns="all", name="chat", revision="main", sample=5)
    assert (source.hub, source.turns, source.dataset) == ("HuggingFaceH4/ultrachat_200k", "all", "chat")
    assert (source.revision, source.sample) == ("main", 5)


def test_a_preset_tells_how_a_copy_of_the_data_set_is_read(tmp_path: Path) -> None:
    file = tmp_path / "train.jsonl"
    file.write_text('{"question": "How many?", "answer": "42"}\n')
    config = PromptsConfig.model_validate(
        {"sources": [{"preset": "gsm8k", "file": str(file)}], "heldout_prompts": 0}
    )
    (row,) = load_prompts(config).train
    assert (row["dataset"], row["domain"]) == ("gsm8k", "math")
    assert json.loads(row["messages"]) == [{"role": "user", "content": "How many?"}]


def test_an_unknown_preset_is_named_with_those_that_are_known(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump({"root": "r", "verifier": {}, "prompts": {"sources": [{"preset": "gsm9k"}]}}))
    with pytest.raises(InputError) as caught:
        load_config(str(path))
    assert str(caught.value).startswith("prompts.sources[0].preset: there is no preset 'gsm9k'; known are alpaca, ")
    assert set(re.findall(r"[\w-]+", str(caught.value))) >= WELL_KNOWN


def test_the_package_of_a_preset_is_read() -> None:
    config = PromptsConfig.model_validate({"sources": [{"preset": "humaneval", "limit": 3}], "heldout_prompts": 0})
    assert [row["domain"] for row in load_prompts(config).train] == ["code"] * 3
