"""The automations in deployments/automations/ and prefect.yaml fit each other."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
import yaml
from prefect.events.schemas.automations import AutomationCore
from pydantic import ValidationError

from flows import automations
from flows.automations import install
from flows.cli import EXIT_FAILED, EXIT_WRONG_INPUT, main
from flows.config import profile_names
from flows.notices import NOT_PROMOTED, PROMOTED
from infra.errors import InputError
from infra.locations import project_home

FOLDER = project_home() / "deployments" / "automations"
BLOCK = UUID(int=7)


def automation(name: str) -> Any:
    return AutomationCore.model_validate(yaml.safe_load((FOLDER / f"{name}.yaml").read_text()))


def deployments() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = yaml.safe_load((project_home() / "prefect.yaml").read_text())["deployments"]
    return found


def test_a_healthy_run_beats_three_times_before_it_would_be_crashed() -> None:
    for deployment in deployments():
        environment = deployment["work_pool"]["job_variables"]["env"]
        period = timedelta(seconds=int(environment["PREFECT_FLOWS_HEARTBEAT_FREQUENCY"]))
        assert automation("zombie").trigger.within == 3 * period, deployment["name"]


def test_every_stage_and_the_pipeline_is_watched_and_put_back() -> None:
    stages = {"prompts", "generate", "extract", "vocab", "train", "evaluate", "partition"}
    assert {deployment["name"] for deployment in deployments()} == {*stages, *profile_names(), "watch", "gc"}
    for path in FOLDER.glob("*.yaml"):
        wanted = yaml.safe_load(path.read_text())["trigger"]["match_related"]["prefect.resource.id"]
        for deployment in deployments():
            if deployment["name"] == "partition":  # the run that it helps starts another one
                assert "resumable" not in deployment["tags"]
                assert "draftsmith" in deployment["tags"]
                continue
            assert wanted.removeprefix("prefect.tag.") in deployment["tags"], (
                f"{path.name} does not see {deployment['name']}"
            )
    for deployment in deployments():
        assert not deployment["work_pool"]["job_variables"]["stream_output"]


def test_people_are_told_by_a_block_of_theirs() -> None:
    told = automations._read(FOLDER / "notify", block_id=str(BLOCK))
    expected = {event for automation in told for event in automation.trigger.expect}
    assert expected == {PROMOTED, NOT_PROMOTED, "prefect.flow-run.Failed", "prefect.flow-run.Crashed"}
    assert {action.block_document_id for automation in told for action in automation.actions} == {BLOCK}
    with pytest.raises(ValidationError, match="block_document_id"):
        automations._read(FOLDER / "notify")


def test_a_run_that_was_failed_or_cancelled_is_not_put_back() -> None:
    ends = {"prefect.flow-run.Failed", "prefect.flow-run.Cancelled", "prefect.flow-run.Completed"}
    assert ends <= automation("resume").trigger.expect
    assert automation("resume").trigger.after == {"prefect.flow-run.Crashed"}


@pytest.mark.seconds
def test_without_a_server_there_is_one_clear_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    assert main(["automations"]) == EXIT_WRONG_INPUT
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("\n") == 1
    assert "PREFECT_API_URL: is not set" in said.err
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:1/api")
    monkeypatch.setenv("PREFECT_CLIENT_MAX_RETRIES", "0")
    assert main(["automations", "--json"]) == EXIT_FAILED
    assert "the Prefect server at http://127.0.0.1:1/api" in capsys.readouterr().err


def test_a_folder_without_automations_is_wrong_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:1/api")
    with pytest.raises(InputError, match="holds no automation"):
        install(tmp_path)
