"""`draftsmith run` is asked to stop: it ends soon, says how to go on, and leaves nothing running."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path

import pytest

from flows.cli import EXIT_INTERRUPTED
from tests.e2e.conftest import Commands

pytestmark = [pytest.mark.e2e, pytest.mark.kill]

END_SECONDS = 15.0  # all of it is gone by then


@pytest.mark.parametrize(
    "signals",
    [
        pytest.param((signal.SIGTERM,), id="TERM"),
        pytest.param((signal.SIGINT,), id="INT", marks=pytest.mark.slow),
        pytest.param((signal.SIGTERM, signal.SIGINT), id="TERM and INT", marks=pytest.mark.slow),
        pytest.param((signal.SIGINT, signal.SIGINT), id="INT twice"),
    ],
)
def test_a_run_that_is_asked_to_stop_ends_soon_and_leaves_nothing(
    commands: Commands, tmp_path: Path, signals: tuple[int, ...]
) -> None:
    """While it waits for a server; no vLLM is needed to wait for."""
    interpreter = tmp_path / "python"
    interpreter.write_text('#!/bin/sh\n[ "$1" = -I ] && echo 0.32.0 || exec sleep 1000\n')
    interpreter.chmod(0o755)
    run = commands.start(tmp_path / "root", f"vllm.python={interpreter}")
    run.wait_for(lambda: any("sleep 1000" in name for name in run.processes().values()), "a server's start")
    time.sleep(1.0)
    before = run.processes()
    for number in signals:
        run.process.send_signal(number)
        time.sleep(0.3)
    assert run.finish(60) == EXIT_INTERRUPTED
    assert run.left_alive(before, END_SECONDS) == {}
    assert run.log.rstrip().splitlines()[-1].startswith("draftsmith: interrupted; the same command continues")
    (lineage,) = (tmp_path / "root" / "runs").glob("*.json")
    assert len(signals) > 1 or json.loads(lineage.read_text())["status"] == "failed"
