"""Every process of a run, and the store itself, dies once in every stage where it exists; the stage completes.

Each case starts one stage on S3 over finished stages before it, kills its victim at a moment drawn from a seed, and
compares what comes out with the run that nobody disturbed. Three cases, drawn from the same seed, are in `make test`.
"""

from __future__ import annotations

import json
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from flows.cli import EXIT_DONE
from flows.config import PipelineConfig
from flows.resolve import resolve
from infra import guard, storage
from infra.local_s3 import LocalS3
from infra.manifest import StageRef, read_manifest, read_records
from infra.schemas import STAGES, STATUS_OK, STATUS_TRUNCATED
from infra.tables import read_table
from infra.verify import verify
from tests.e2e.conftest import CommandRun, Commands, Finished, tiny_config
from tests.e2e.prefect_stack import PrefectStack, Run, Worker, left_alive

SEED = 10
TESTED_EACH_TIME = 3
END_SECONDS = 15.0  # all of a killed run is gone by then
OUTAGE_SECONDS = 20.0
COMPLETE_SECONDS = 600.0
# One server in the evaluation: what survives a kill does not depend on the method.
OVERRIDES = ("evaluate.methods=[none]", "evaluate.concurrency=[1]", "evaluate.num_prompts=[2]")
# Seconds in which the moment of the kill lies, from when the victim is there: about what the stage takes.
WINDOW_SECONDS = {
    "prompts": 1.0,
    "responses": 40.0,
    "hidden_states": 30.0,
    "vocab": 1.0,
    "drafts": 20.0,
    "evaluations": 40.0,
}
# Stages that commit on the way; half of their kills come this soon after the first commit, the others as above.
WORKING_SECONDS = {"responses": 3.0, "hidden_states": 2.0, "drafts": 3.0}
VICTIMS = {
    "flow process": STAGES,
    "worker": STAGES,
    "vLLM API server": ("responses", "evaluations"),
    "vLLM engine core": ("responses", "hidden_states", "evaluations"),
    "extraction worker": ("hidden_states",),
    "trainer rank": ("drafts",),
    "S3 server": STAGES,
}
# Part of the victim's command line.
COMMANDS = {
    "vLLM API server": "api_server",
    "vLLM engine core": "VLLM::EngineCore",
    "extraction worker": "extract_worker.py",
    "trainer rank": "-m infra.training",
}
GUARDS = ("guard.py", "torch.distributed.run")  # their command lines hold the victim's, too
CASES = [(victim, stage) for victim, stages in VICTIMS.items() for stage in stages]
DRAWN = random.Random(SEED).sample(CASES, TESTED_EACH_TIME)

pytestmark = [pytest.mark.e2e, pytest.mark.kill, pytest.mark.timeout(1800)]

Processes = Callable[[], dict[int, str]]


@dataclass
class CaseRoot:
    """One case's artifact root on S3: the stages before its own, finished."""

    config: PipelineConfig
    stage_name: str
    stages: dict[str, StageRef] = field(init=False)

    def __post_init__(self) -> None:
        self.stages = resolve(self.config)

    @property
    def stage(self) -> StageRef:
        return self.stages[self.stage_name]

    def copy_stages_before(self, finished: Finished) -> None:
        for name in STAGES[: STAGES.index(self.stage_name)]:
            folder = finished.folder(name)
            assert folder.name == self.stages[name].key
            for path in sorted(folder.rglob("*")):
                relative = path.relative_to(folder)
                if path.is_file() and relative.parts[0] != "checkpoints" and path.name[0] != ".":
                    storage.put_file(storage.join(self.stages[name].uri, *relative.parts), path)

    def begun(self) -> bool:
        return storage.exists(self.stage.plan_uri)

    def complete(self) -> bool:
        return storage.exists(self.stage.manifest_uri)

    def committed(self) -> dict[str, storage.ObjectInfo]:
        """Every commit of the stage: shard records, and checkpoints of a draft."""
        found = storage.list_objects(self.stage.uri)
        return {name: info for name, info in found.items() if is_record(name) or name.endswith("/COMMITTED.json")}

    def rows(self, name: str) -> list[dict[str, Any]]:
        return rows(self.stages[name])


def is_record(name: str) -> bool:
    return name.startswith("shards/") and name.endswith(".json")


def rows(stage: StageRef) -> list[dict[str, Any]]:
    records = read_records(stage.uri)
    return [row for shard in sorted(records) for row in read_table(stage.uri, records[shard]).to_pylist()]


class Commits(threading.Thread):
    """Watches a stage; knows when it committed something last, and first after a moment."""

    def __init__(self, root: CaseRoot) -> None:
        super().__init__(daemon=True)
        self._root = root
        self._end = threading.Event()
        self.times: list[float] = []

    def run(self) -> None:
        seen: set[str] = set()
        while not self._end.wait(0.5):
            now = set(self._root.committed()) | ({"manifest"} if self._root.complete() else set())
            if now - seen:
                self.times.append(time.monotonic())
            seen |= now

    def stop(self) -> None:
        self._end.set()
        self.join(60)

    def seconds_until_next(self, moment: float) -> float:
        return next((when - moment for when in self.times if when > moment), float("nan"))


# --- ways of running a stage ---


@dataclass
class OnCommandLine:
    """`draftsmith run --until STAGE`, started once more when it was itself the victim."""

    commands: Commands
    root: CaseRoot
    run: CommandRun = field(init=False)

    def start(self) -> None:
        self.run = self.commands.start(self.root.config.root, *OVERRIDES, until=self.root.stage_name)

    def processes(self) -> dict[int, str]:
        return self.run.processes()

    def begun(self) -> bool:
        assert self.run.process.poll() is None or self.root.complete(), self.run.log[-5000:]
        return f"for flow '{FLOWS[self.root.stage_name]}'" in self.run.log

    def kill(self) -> None:
        before = self.run.kill()
        assert any("prefect server" in name for name in before.values()), before
        assert self.run.left_alive(before, END_SECONDS) == {}, "it outlived the command"
        self.start()

    def complete(self) -> None:
        assert self.run.finish(COMPLETE_SECONDS) == EXIT_DONE, self.run.log[-5000:]
        assert self.run.left_alive({}, END_SECONDS) == {}, "it outlived the run"

    def end(self) -> None:
        self.run.end()


@dataclass
class OnWorker:
    """A run of the deployment `pipeline`; the worker is killed, the flow goes on without it."""

    stack: PrefectStack
    environment: Mapping[str, str]
    root: CaseRoot
    worker: Worker = field(init=False)
    run: Run = field(init=False)

    def start(self) -> None:
        self.worker = self.stack.start_worker(f"worker-{time.monotonic_ns()}", environment=self.environment)
        self.run = self.stack.trigger("smoke", self.root.config, until=self.root.stage_name)

    def processes(self) -> dict[int, str]:
        return self.run.processes()

    def begun(self) -> bool:
        return self.root.begun() or self.root.complete()

    def kill(self) -> None:
        self.worker.kill()

    def complete(self) -> None:
        self.run.wait_for("Completed", timeout_seconds=COMPLETE_SECONDS)
        assert left_alive(self.run.processes(), END_SECONDS) == {}, "it outlived the run"

    def end(self) -> None:
        self.stack.stop_workers()


FLOWS = {
    "prompts": "prompts",
    "responses": "generate",
    "hidden_states": "extract",
    "vocab": "vocab",
    "drafts": "train",
    "evaluations": "evaluate",
}


@pytest.fixture
def s3_commands(tmp_path: Path, s3_environment: LocalS3) -> Iterator[Commands]:
    made = Commands(tmp_path, s3_environment.environment)
    try:
        yield made
    finally:
        made.end()


@pytest.mark.parametrize(
    ("victim", "stage"),
    [pytest.param(*case, marks=[] if case in DRAWN else pytest.mark.slow, id=" in ".join(case)) for case in CASES],
)
def test_the_stage_completes(
    victim: str,
    stage: str,
    finished: Finished,
    s3_environment: LocalS3,
    s3_commands: Commands,
    request: pytest.FixtureRequest,
    report_line: Callable[[str], None],
) -> None:
    assert finished.exit_code == EXIT_DONE, finished.run.log[-5000:]
    draw = random.Random(f"{SEED} {victim} {stage}")
    share, working = draw.random(), stage in WORKING_SECONDS and draw.random() < 0.5
    for attempt in range(4):
        root = CaseRoot(
            tiny_config(f"{s3_environment.root}/{victim}-{stage}-{attempt}".replace(" ", "-"), *OVERRIDES), stage
        )
        root.copy_stages_before(finished)
        runner = (
            OnWorker(request.getfixturevalue("prefect_stack"), s3_environment.environment, root)
            if victim == "worker"
            else OnCommandLine(s3_commands, root)
        )
        commits = Commits(root)
        runner.start()
        commits.start()
        try:
            window_seconds = WORKING_SECONDS[stage] if working else WINDOW_SECONDS[stage]
            moment_seconds = share * window_seconds / 2**attempt
            if not wait_for_the_moment(runner, root, victim, moment_seconds, working):
                continue  # the stage was done before: once more, sooner
            before = root.committed()
            killed = time.monotonic()
            strike(victim, runner, s3_environment)
            runner.complete()
        finally:
            commits.stop()
            runner.end()
        check(root, finished, before)
        kept = sum(is_record(name) for name in before)
        newest = max((name.split("/")[2] for name in before if not is_record(name)), default="")
        report_line(
            f"kill: victim={victim!r} stage={stage} moment_s={moment_seconds:.1f}{' after a commit' if working else ''} "
            f"shards_kept={kept}/{len(read_records(root.stage.uri))}{f' checkpoint={newest}' if newest else ''} "
            f"shards_redone=0 recovery_s={commits.seconds_until_next(killed):.0f}"
        )
        return
    pytest.fail(f"{stage} was always done before its moment")


def wait_for_the_moment(
    runner: OnCommandLine | OnWorker, root: CaseRoot, victim: str, moment_seconds: float, working: bool
) -> bool:
    """Wait until the victim is there (and, if so asked, something is committed) and some seconds more.

    Returns False when the stage was done before.
    """
    deadline = time.monotonic() + COMPLETE_SECONDS
    while (
        not runner.begun()
        or (victim in COMMANDS and not found(victim, runner.processes))
        or (working and not root.committed())
    ):
        if root.complete():
            return False
        assert time.monotonic() < deadline, f"no {victim} in {root.stage_name}"
        time.sleep(0.05)
    time.sleep(moment_seconds)
    return not root.complete()


def found(victim: str, processes: Processes) -> list[int]:
    return [
        pid
        for pid, name in processes().items()
        if COMMANDS[victim] in name and not any(program in name for program in GUARDS)
    ]


def strike(victim: str, runner: OnCommandLine | OnWorker, server: LocalS3) -> None:
    if victim in ("flow process", "worker"):
        runner.kill()
    elif victim == "S3 server":
        server.stop(grace_seconds=0)
        time.sleep(OUTAGE_SECONDS)
        server.start()
    else:
        for pid in found(victim, runner.processes)[:1]:
            guard.send(pid, signal.SIGKILL)  # unless it has ended since it was found


def check(root: CaseRoot, finished: Finished, before: dict[str, storage.ObjectInfo]) -> None:
    """Nothing lost, nothing made twice, nothing that does not match its record."""
    assert read_manifest(root.stage.uri) is not None
    assert [finding for finding in verify(root.stage.uri) if finding.problem] == []
    after = root.committed()
    redone = {name for name, info in before.items() if is_record(name) and after.get(name) != info}
    assert redone == set(), "a committed shard was made again"
    ours, theirs = root.stage, finished.stages[root.stage_name]
    if root.stage_name == "prompts":
        assert rows(ours) == rows(theirs)
    elif root.stage_name == "responses":
        # Other neighbours in a batch change bf16 sums, and with them where a greedy answer ends.
        said = [[row["sample_id"] for row in rows(stage)] for stage in (ours, theirs)]
        assert said[0] == said[1]
        assert {row["status"] for row in rows(ours)} <= {STATUS_OK, STATUS_TRUNCATED}
    elif root.stage_name == "hidden_states":
        said = [[(row["sample_id"], row["status"]) for row in rows(stage)] for stage in (ours, theirs)]
        assert said[0] == said[1]
        pairs = [
            pair
            for one, other in zip(rows(ours), rows(theirs), strict=True)
            for pair in zip(one["input_ids"], other["input_ids"], strict=False)
        ]
        # Greedy: the same ids, but for near ties in bf16, after which two answers part.
        assert sum(one == other for one, other in pairs) > 0.75 * len(pairs)
    elif root.stage_name == "vocab":
        assert read_records(ours.uri)["00000"].sha256 == read_records(theirs.uri)["00000"].sha256
    else:
        names = [[record.data for record in read_records(stage.uri).values()] for stage in (ours, theirs)]
        assert names[0] == names[1]
        lineages = [
            name for name in storage.list_objects(storage.join(root.config.root, "runs")) if name.endswith(".json")
        ]
        states = [
            json.loads(storage.get(storage.join(root.config.root, "runs", name)))["status"] for name in lineages
        ]
        assert "completed" in states
