"""What a deployment is given: a profile and what differs from it, checked by the server and by us alike."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from prefect.utilities.callables import parameter_schema

from flows.config import PipelineConfig, load_config, profile_folder, profile_names
from flows.pipeline import speculator_pipeline
from flows.resolve import resolve
from infra.config import field_title
from infra.errors import InputError
from infra.locations import project_home

SMOKE = str(profile_folder() / "smoke.yaml")
SCHEMA = parameter_schema(speculator_pipeline).model_dump()
FORM = jsonschema.Draft202012Validator(SCHEMA)


def given(**fields: Any) -> PipelineConfig:
    return PipelineConfig.model_validate({"profile": "smoke", **fields})


def test_a_profile_alone_is_its_file() -> None:
    assert given().model_copy(update={"profile": None}) == load_config(SMOKE)


def test_what_is_given_beside_a_profile_is_as_if_it_were_set_on_the_command_line() -> None:
    config = given(root="elsewhere", train={"num_steps": 7}, vllm={"environment": {"A": "b"}}, vocab={})
    overrides = ["root=elsewhere", "train.num_steps=7", "vllm.environment={A: b}"]
    assert config.model_copy(update={"profile": None}) == load_config(SMOKE, overrides)


def test_a_file_may_stand_on_a_profile(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("profile: smoke\ntrain: {num_steps: 7}\n")
    assert load_config(str(path), ["train.warmup_steps=2"]) == given(train={"num_steps": 7, "warmup_steps": 2})


@pytest.mark.parametrize("name", ["nobody", "../deployments/smoke", ""])
def test_an_unknown_profile_is_refused_by_name(name: str) -> None:
    with pytest.raises(InputError, match=r"^profile: there is no profile .*smoke"):
        given(profile=name)


def test_a_profile_stands_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "deployments").mkdir()
    (tmp_path / "deployments" / "ring.yaml").write_text("profile: ring\n")
    monkeypatch.setenv("DRAFTSMITH_HOME", str(tmp_path))
    with pytest.raises(InputError, match="must stand alone"):
        given(profile="ring")


def test_a_config_that_is_sent_on_in_full_stays_what_it_is() -> None:
    """Even where the profile has what was taken out of the config."""
    config = given(train={"num_steps": None}, vllm={"environment": {}})
    for dumped in (config.model_dump(mode="json"), config.model_dump(mode="json", exclude_unset=True)):
        FORM.validate({"config": dumped})
        assert PipelineConfig.model_validate(dumped) == config
    assert config.train.num_steps is None
    assert config.vllm.environment == {}


def test_the_keys_are_those_of_the_profile(tmp_path: Path) -> None:
    keys = [
        {name: stage.key for name, stage in resolve(config).items()} for config in (given(), load_config(SMOKE))
    ]
    assert keys[0] == keys[1]


def test_each_deployment_is_given_what_its_form_and_the_config_take() -> None:
    found = yaml.safe_load((project_home() / "prefect.yaml").read_text())["deployments"]
    profiles = {one["name"]: one["parameters"] for one in found if "pipeline" in one["entrypoint"]}
    assert profiles == {name: {"config": {"profile": name}} for name in profile_names()}
    for deployment in found:
        FORM.validate(deployment["parameters"])
        assert deployment["parameters"]["config"]["profile"] in profiles


def test_a_wrong_value_is_refused_before_there_is_a_run() -> None:
    for wrong in (
        {"train": {"loss": "nothing"}},
        {"train": {"fc_norm": 1}},
        {"profile": "nobody"},
        {"train": {"steps": 3}},
        {"train": 3},
    ):
        with pytest.raises(jsonschema.ValidationError):
            FORM.validate({"config": wrong})


def test_every_field_of_the_form_has_a_title_and_a_description_and_none_fills_itself_in() -> None:
    for name, section in SCHEMA["definitions"].items():
        assert "required" not in section, name
        places = [field["position"] for field in section["properties"].values()]
        assert places == sorted(places)
        for title, field in section["properties"].items():
            assert field["title"] == field_title(title)
            assert "default" not in field, f"{name}.{title} would overrule the profile"
            assert field.get("type") != "boolean", f"{name}.{title} would be sent as false by the older pages"
            assert field.get("description") or "$ref" in field, f"{name}.{title} says nothing"
    train = SCHEMA["definitions"]["TrainConfig"]["properties"]
    assert train["optimizer"]["enum"] == ["adamw", "muon"]
    assert train["hang_timeout_seconds"]["title"] == "Hang timeout (seconds)"
    assert "Default: [0.9, 0.95]." in train["adam_betas"]["description"]
    assert SCHEMA["definitions"]["PipelineConfig"]["properties"]["profile"]["enum"] == profile_names()
