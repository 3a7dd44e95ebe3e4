"""`draftsmith run` is killed in the middle of its stages; the same command completes and loses nothing.

Only the command itself is killed, as a machine's out-of-memory killer would: no handler of it runs.
"""

from __future__ import annotations

import json
import random
import re
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from flows.cli import EXIT_DONE, EXIT_INTERRUPTED
from flows.resolve import resolve
from infra.manifest import StageRef
from tests.e2e.conftest import CommandRun, Commands, Finished, tiny_config

pytestmark = [pytest.mark.e2e, pytest.mark.kill, pytest.mark.timeout(1800)]

END_SECONDS = 15.0  # all of a killed run is gone by then
SEED = 4
MOMENT_SECONDS = 3.0
# One server less to start twice: what survives a kill does not depend on the method.
EVALUATION = ("evaluate.methods=[none]",)

Reached = Callable[[], bool]


class Root:
    """One artifact root, seen from outside."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.stages: dict[str, StageRef] = resolve(tiny_config(root, *EVALUATION))

    def folder(self, stage: str) -> Path:
        return Path(self.stages[stage].uri)

    def committed(self, stage: str) -> dict[str, int]:
        """Modification times (ns) of every record of a stage, and of the data that it names."""
        found: dict[str, int] = {}
        for record in (self.folder(stage) / "shards").glob("*.json"):
            data = json.loads(record.read_text())["data"]
            path = next(path for path in (record.parent / data, self.folder(stage) / data) if path.exists())
            found |= {str(item): item.stat().st_mtime_ns for item in (record, path)}
        return found

    def partly_done(self, stage: str) -> bool:
        return bool(self.records(stage)) and not (self.folder(stage) / "manifest.json").exists()

    def records(self, stage: str) -> list[Path]:
        return sorted((self.folder(stage) / "shards").glob("*.json"))

    def checkpoints(self) -> list[Path]:
        return list((self.folder("drafts") / "checkpoints").glob("*/step-*/COMMITTED.json"))

    def rows(self, stage: str) -> list[dict[str, Any]]:
        files = [
            self.folder(stage) / "shards" / json.loads(path.read_text())["data"] for path in self.records(stage)
        ]
        return [row for file in files for row in pq.read_table(file).to_pylist()]


def kill(run: CommandRun, expected: tuple[str, ...]) -> None:
    """Kill the command, and see that everything it had started ends with it.

    Args:
        expected: parts of command lines that must be among them, or the test looks at too little.
    """
    before = run.kill()
    for part in ("prefect server", *expected):
        assert any(part in name for name in before.values()), f"no {part} among {sorted(before.values())}"
    left = run.left_alive(before, END_SECONDS)
    assert left == {}, f"still alive {END_SECONDS:.0f} s after the kill: {left}"


def test_a_run_killed_in_every_long_stage_completes_and_loses_nothing(
    commands: Commands, finished: Finished, tmp_path: Path
) -> None:
    assert finished.exit_code == EXIT_DONE, finished.run.log[-5000:]
    root = Root(tmp_path / "root")
    kept: dict[str, int] = {}

    def run_until(reached: Reached, what: str, expected: tuple[str, ...]) -> CommandRun:
        run = commands.start(root.root, *EVALUATION)
        run.wait_for(reached, what)
        kill(run, expected)
        for stage in ("prompts", "responses", "hidden_states", "vocab"):
            kept.update(root.committed(stage))
        return run

    run_until(lambda: root.partly_done("responses"), "a shard of responses", ("api_server", "VLLM::"))
    assert root.partly_done("responses"), "the kill came too late"
    run_until(lambda: root.partly_done("hidden_states"), "a shard of states", ("extract_worker", "VLLM::"))
    assert root.partly_done("hidden_states"), "the kill came too late"
    run_until(lambda: bool(root.checkpoints()), "a checkpoint", ("torch.distributed.run", "-m infra.training"))
    assert not root.records("drafts"), "the kill came too late"
    steps = sorted(int(path.parent.name.removeprefix("step-")) for path in root.checkpoints())
    measuring = commands.start(root.root, *EVALUATION)
    measuring.wait_for(partial(says, measuring, "none x1 round 0' - Finished"), "a measurement")
    kill(measuring, ("api_server", "VLLM::"))
    resumed = re.search(r"Training from step (\d+) of 12", measuring.log)
    assert resumed, measuring.log[-3000:]
    assert int(resumed[1]) == steps[-1] > 0, "the steps up to the last checkpoint are not made again"
    kept |= root.committed("drafts")
    assert not root.records("evaluations"), "the kill came too late"

    last = commands.start(root.root, *EVALUATION)
    assert last.finish() == EXIT_DONE, last.log[-5000:]
    assert_nothing_redone(kept, root)
    assert_same_rows(root, finished)
    for stage in root.stages:
        assert (root.folder(stage) / "manifest.json").exists()


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


def says(run: CommandRun, text: str) -> bool:
    return text in run.log


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["prompts", "vocab", "evaluate"])
def test_a_run_killed_at_a_random_moment_of_a_stage_completes(
    commands: Commands, finished: Finished, tmp_path: Path, stage: str
) -> None:
    """The short stages, and the start of the evaluation's servers, each some moments after the stage began."""
    moments = random.Random(f"{SEED} {stage}")
    root = Root(tmp_path / "root")
    kept: dict[str, int] = {}
    for _ in range(2):
        run = commands.start(root.root, *EVALUATION)
        begun = f"for flow '{stage}'"
        run.wait_for(partial(says, run, begun), begun)
        time.sleep(moments.uniform(0.0, MOMENT_SECONDS))
        kill(run, ())
        for name in root.stages:
            kept.update(root.committed(name))
    last = commands.start(root.root, *EVALUATION)
    assert last.finish() == EXIT_DONE, last.log[-5000:]
    assert_nothing_redone(kept, root)
    assert_same_rows(root, finished)


def assert_nothing_redone(kept: dict[str, int], root: Root) -> None:
    now = {name: time_ns for stage in root.stages for name, time_ns in root.committed(stage).items()}
    assert kept, "nothing was committed before the kills"
    redone = {name for name, time_ns in kept.items() if now.get(name) != time_ns}
    assert redone == set()


def assert_same_rows(root: Root, finished: Finished) -> None:
    """The rows are those of the run that nobody disturbed; a near tie in bf16 may turn a few tokens."""
    assert {name: stage.key for name, stage in root.stages.items() if name != "evaluations"} == {
        name: stage.key for name, stage in finished.stages.items() if name != "evaluations"
    }
    here, there = root.rows("responses"), Root(finished.root).rows("responses")
    assert [(row["sample_id"], row["status"]) for row in here] == [
        (row["sample_id"], row["status"]) for row in there
    ]
    pairs = [
        (ours, theirs)
        for one, other in zip(here, there, strict=True)
        for ours, theirs in zip(completion(one), completion(other), strict=False)
    ]
    share = sum(ours == theirs for ours, theirs in pairs) / len(pairs)
    print(f"token_ids_equal={share:.4f}")
    assert share > 0.5, "greedy answers to the same prompts have little in common"


def completion(row: dict[str, Any]) -> list[int]:
    ids: list[int] = row["input_ids"][row["num_prompt_tokens"] :]
    return ids
