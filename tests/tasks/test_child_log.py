"""A child's log in the run's own at a bounded rate, and whole in the store."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from infra.fingerprint import stage_content
from infra.locations import log_file
from infra.manifest import StageRef
from infra.verify import verify
from tasks import child_log as module
from tasks.child_log import ERRORS_PER_LOOK, LINES_PER_LOOK, RUN_VARIABLE, Follower, child_log


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StageRef:
    monkeypatch.setenv("DRAFTSMITH_CACHE", str(tmp_path / "cache"))
    return StageRef(str(tmp_path / "root"), "responses", stage_content("responses", 1, {}, {}, {}))


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.INFO]


def test_errors_are_all_told_and_of_the_rest_a_few(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "draftsmith.child")
    log = tmp_path / "a.log"
    log.write_text("of an earlier attempt\n")
    follower = Follower(log, "engine-0")
    follower.look()
    assert said(caplog) == []
    with log.open("a") as out:
        out.write("".join(f"line {number}\n" for number in range(500)))
        out.write("ValueError: no\nINFO all is well, ValueError is a word\nhalf of a li")
    follower.look()
    assert said(caplog) == [
        "engine-0: line 499",
        "engine-0: ValueError: no",
        "engine-0: INFO all is well, ValueError is a word",
    ]
    caplog.clear()
    with log.open("a") as out:
        out.write("ne\n" + "RuntimeError: again\n" * 100)
    follower.look()
    assert said(caplog)[0] == "engine-0: half of a line"
    assert len(said(caplog)) == 1 + ERRORS_PER_LOOK
    assert LINES_PER_LOOK == 2
    assert follower.written().startswith(b"line 0\n")


async def test_in_a_deployments_run_it_is_kept_and_elsewhere_not(
    stage: StageRef, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    kept: dict[str, str] = {}

    async def artifact(text: str, *, key: str, description: str) -> None:
        kept[key] = text
        raise RuntimeError("no server")

    monkeypatch.setattr(module, "acreate_markdown_artifact", artifact)
    log = log_file(stage.stage, stage.key, "vllm-generation-1")
    log.parent.mkdir(parents=True)
    monkeypatch.delenv(RUN_VARIABLE, raising=False)
    async with child_log(stage, "vllm-generation-1"):
        log.write_text("before\n")
    assert not Path(stage.root).exists()
    monkeypatch.setenv(RUN_VARIABLE, "0123456789-ab")

    async def failing() -> None:
        async with child_log(stage, "vllm-generation-1"):
            log.write_text("before\nOSError: the disk is full\n")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await failing()
    uri = Path(stage.root, "logs", f"responses-{stage.key}", "vllm-generation-1-01234567.log")
    assert uri.read_text() == "OSError: the disk is full\n"
    assert str(uri) in kept["log-vllm-generation-1"]
    assert "could not be kept" in caplog.text, "nor does a server that is away fail the work"
    assert [one for one in verify(stage.root) if one.problem] == []
