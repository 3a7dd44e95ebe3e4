"""Planted secrets are in nothing that is told to others. With a real run: tests/e2e/test_secrets.py."""

from __future__ import annotations

import base64
import json
import logging
import pickle
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from flows import lineage
from flows.config import load_config
from flows.lineage import Run
from flows.plain_errors import show_plain_errors
from infra import redaction
from infra.errors import DamagedShard, InputError, ServerError
from infra.locations import project_home
from infra.logs import log_tail
from infra.processes import GuardedProcess, living, process_token
from infra.redaction import learn_secret, redact, redact_logs, withheld
from infra.serving.config import ServersConfig
from infra.vllm_server import VllmConfig, VllmServer
from tasks.child_log import Follower
from tasks.policy import retried_task

CANARIES = {
    "AWS_SECRET_ACCESS_KEY": "canary/s3+secret",
    "AWS_SESSION_TOKEN": "canary-s3-session",
    "HF_TOKEN": "hf_canary0123",
    "PREFECT_API_AUTH_STRING": "admin:canary-prefect",
    "PREFECT_API_KEY": "pnu_canary0123",
    "WANDB_API_KEY": "canary-wandb-key",
}
DATABASE = "PREFECT_API_DATABASE_CONNECTION_URL"
EXTERNAL = "GPU_SEVEN"  # of no secret's name
SPOKEN = (
    *CANARIES.values(),
    *("canary-prefect", "canary-database", "canary-external"),
    quote(CANARIES["AWS_SECRET_ACCESS_KEY"], safe=""),
    base64.b64encode(CANARIES["PREFECT_API_AUTH_STRING"].encode()).decode(),
)


@pytest.fixture(autouse=True)
def planted(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(redaction, "_learnt", {})
    for name, value in CANARIES.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv(DATABASE, "postgresql+asyncpg://draftsmith:canary-database@db.example/prefect")
    monkeypatch.setenv(EXTERNAL, "canary-external")
    factory = logging.getLogRecordFactory()
    ServersConfig(external=["http://a:8000"], external_key_variable=EXTERNAL).external_key()
    yield
    logging.setLogRecordFactory(factory)


def tells(text: str) -> list[str]:
    return [canary for canary in SPOKEN if canary in text]


ALL = f"it said {' '.join(SPOKEN)} and went on"


def test_every_spelling_is_replaced_by_its_name() -> None:
    assert tells(ALL) == list(SPOKEN)
    told = redact(ALL)
    assert tells(told) == []
    assert told.startswith(
        "it said (AWS_SECRET_ACCESS_KEY) (AWS_SESSION_TOKEN) (HF_TOKEN) (PREFECT_API_AUTH_STRING)"
    )
    assert f"({DATABASE}) ({EXTERNAL})" in told
    assert told.endswith("and went on")
    assert redaction.redact_bytes(b"\xff hf_canary0123 \x00") == b"\xff (HF_TOKEN) \x00"


def test_a_word_is_no_secret_and_what_is_made_here_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_TOKEN", "run")
    learn_secret("run", "a word")
    learn_secret("made-just-now", "the API key")
    assert redact("the run of made-just-now") == "the run of (the API key)"
    assert redact("DRAFTSMITH_TOKEN") == "DRAFTSMITH_TOKEN"


def test_no_log_record_of_any_logger_has_one(caplog: pytest.LogCaptureFixture) -> None:
    redact_logs()
    show_plain_errors()  # again
    caplog.set_level(logging.INFO)
    logging.getLogger("somebody.else").info("%s and %d", ALL, 7)
    logging.getLogger("draftsmith").info(json.dumps(CANARIES))
    try:
        try:
            raise ValueError(ALL)
        except ValueError as error:
            raise RuntimeError("a library's own") from error
    except RuntimeError:
        logging.getLogger("prefect.flow_runs").exception("Encountered an exception")
    assert tells(caplog.text) == []
    assert "(HF_TOKEN)" in caplog.text
    assert "RuntimeError: a library's own" in caplog.text
    assert "and 7" in caplog.text
    logging.getLogger("draftsmith").info("%d", 3)
    assert caplog.records[-1].args == (3,), "what holds none stays as it is"


def test_no_error_has_one() -> None:
    for error in (ServerError(ALL), InputError("root", ALL), DamagedShard("root/a", "00001", ALL)):
        for told in (str(error), repr(error), str(pickle.loads(pickle.dumps(error)))):
            assert tells(told) == []
            assert "(HF_TOKEN)" in told


async def test_nothing_that_a_task_raises_has_one() -> None:
    @retried_task(name="raises")
    async def raises(text: str) -> None:
        """Of a library."""
        try:
            raise OSError(5, text)
        except OSError as error:
            raise RuntimeError(text, 7) from error

    assert (raises.fn.__name__, raises.fn.__doc__) == ("raises", "Of a library.")
    with pytest.raises(RuntimeError) as caught:
        await raises.fn(ALL)
    assert caught.value.args[1] == 7
    for told in (str(caught.value), str(caught.value.__cause__)):
        assert tells(told) == []
        assert "(HF_TOKEN)" in told


def test_no_run_file_has_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lineage, "provenance", dict)
    config = load_config(str(project_home() / "deployments" / "smoke.yaml"), [f"root={tmp_path}"])
    run = Run("run", config, {}, "now")
    lineage._write(run, "failed", ValueError(ALL))
    written = Path(run.uri).read_text()
    assert tells(written) == []
    assert "ValueError: it said (AWS_SECRET_ACCESS_KEY)" in written


def test_no_told_part_of_a_childs_log_has_one(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    log = tmp_path / "child.log"
    follower = Follower(log, "child")
    log.write_text(f"RuntimeError: {ALL}\nthe end\n")
    with caplog.at_level(logging.INFO, "draftsmith.child"):
        follower.look()
    assert "(HF_TOKEN)" in caplog.text
    for told in (caplog.text, follower.written().decode(), "\n".join(log_tail(log))):
        assert tells(told) == []
        assert "RuntimeError: it said" in told


@pytest.mark.seconds
async def test_vllm_gets_none_that_it_needs_not_and_shows_none(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """An interpreter that tells all it knows and ends stands in for vLLM."""
    python, seen = tmp_path / "python", tmp_path / "seen.json"
    python.write_text(
        f"#!{sys.executable}\nimport json, os, sys\n"
        f"told = [dict(os.environ), [open(f'/proc/{{p}}/cmdline').read() for p in (os.getpid(), os.getppid())]]\n"
        f"open({str(seen)!r}, 'w').write(json.dumps(told))\n"
        f"sys.exit('RuntimeError: ' + repr(dict(os.environ)))\n"
    )
    python.chmod(0o755)
    server = VllmServer(
        VllmConfig(python=str(python)),
        model_path=tmp_path,
        served_name="model",
        log_path=tmp_path / "logs" / "vllm.log",
        token=process_token("test", uuid.uuid4().hex),
    )
    with caplog.at_level(logging.DEBUG), pytest.raises(ServerError, match="code 1 while starting") as caught:
        async with server:
            pass
    environment, command_lines = json.loads(seen.read_text())
    assert environment["VLLM_API_KEY"] == server.api_key
    assert environment["HF_TOKEN"] == CANARIES["HF_TOKEN"], "exported for vLLM, as the config's field says"
    assert not (set(CANARIES) - {"HF_TOKEN"} | {DATABASE}) & set(environment)
    for told in (*command_lines, str(caught.value), caplog.text):
        assert tells(told) == []
        assert server.api_key not in told
    assert (tmp_path / "logs" / "vllm.log").stat().st_mode & 0o077 == 0
    assert (tmp_path / "logs").stat().st_mode & 0o077 == 0


def test_a_trainer_keeps_the_keys_of_the_store() -> None:
    assert withheld() == {*CANARIES, DATABASE} - {"HF_TOKEN"}
    assert withheld(needs_store=True) == {"PREFECT_API_AUTH_STRING", "PREFECT_API_KEY", "WANDB_API_KEY", DATABASE}


@pytest.mark.parametrize(
    "wrong",
    [
        {"root": "s3://key:canary-external@bucket/prefix"},
        {"vllm": {"extra_args": ["--hf-token=canary-external"]}},
        {"vllm": {"extra_args": ["--hf-token", "canary-external"]}},
        {"vllm": {"extra_args": ["--api-k=canary-external"]}},
        {"vllm": {"extra_args": ["--config", "flags.yaml"]}},
        {"vllm": {"model_args": ["--trust-remote"]}},
        {"vllm": {"environment": {"MY_AUTH_STRING": "canary-external"}}},
        {"vllm": {"environment": {"A=1;rm": "x"}}},
        {"generate": {"servers": {"external": ["ftp://me:canary-external@host"]}}},
    ],
)
def test_a_config_takes_none_and_does_not_repeat_it(wrong: dict[str, Any], tmp_path: Path) -> None:
    redaction._learnt.clear()
    path = tmp_path / "config.yaml"
    path.write_text(json.dumps({"profile": "smoke", **wrong}))
    with pytest.raises(InputError) as caught:
        load_config(str(path))
    assert "canary" not in str(caught.value)
    assert "canary" not in repr(caught.value.__cause__)


def test_a_guarded_child_has_everything_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEPT", "yes")
    token, log = process_token("test", uuid.uuid4().hex), tmp_path / "log"
    with GuardedProcess.start(["env"], token=token, log_path=log, withhold=["HF_TOKEN"]) as process:
        assert process.wait(10) == 0
    assert "KEPT=yes" in log.read_text()
    assert "HF_TOKEN" not in log.read_text()
    assert living(token) == []
