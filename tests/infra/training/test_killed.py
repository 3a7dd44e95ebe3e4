"""The trainer as its users start it: a process that may be killed at any step and goes on as if nothing happened."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from infra import guard, manifest
from infra.guard import descendants
from infra.training import checkpoint, checkpoint_files
from infra.training.config import TrainConfig, TrainSpec
from infra.training.launch import torchrun_command
from infra.training.progress import EXIT_RESUME, parse
from tests.fakes.training_run import write_spec

pytestmark = pytest.mark.kill

END_SECONDS = 300.0  # of a trainer of a few steps, on a busy machine

CONFIG = TrainConfig(
    num_steps=60, warmup_steps=5, total_seq_len=64, checkpoint_every_steps=7, log_every_steps=2,
    validation_share=0.2, validate_every_steps=20, state_noise=0.1, num_threads=1,
)  # fmt: skip


def start(spec: TrainSpec, folder: Path, name: str, ranks: int = 1) -> subprocess.Popen[str]:
    path = folder / f"{name}.json"
    path.write_text(spec.model_dump_json())
    command = [sys.executable, "-m", "infra.training", str(path)]
    if ranks > 1:
        command = torchrun_command(spec.train.model_copy(update={"num_ranks": ranks}), str(path))
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, start_new_session=True
    )


def finish(process: subprocess.Popen[str]) -> list[dict[str, Any]]:
    out, err = process.communicate(timeout=END_SECONDS)
    lines = [found for line in out.splitlines() if (found := parse(line))]
    assert lines, err
    return [*lines, {"exit": process.returncode, "stderr": err}]


def series(spec: TrainSpec) -> list[tuple[Any, ...]]:
    """Every logged figure that must not depend on how often the run was interrupted."""
    lines = [json.loads(line) for line in Path(spec.metrics_path).read_text().splitlines()]
    names = ("kind", "step", "loss", "loss_per_ttt_step", "accuracy_per_ttt_step", "learning_rate")
    return [tuple(json.dumps(line.get(name)) for name in names) for line in lines]


def weights(spec: TrainSpec) -> dict[str, bytes]:
    found = checkpoint.read_newest(spec.draft_uri, spec.inputs_sha256)
    assert found is not None
    assert found.ref.step == 60
    return {name: value.numpy().tobytes() for name, value in found.weights.items()}


def elsewhere(spec: TrainSpec, folder: Path, name: str, **changes: Any) -> TrainSpec:
    """The same run into other folders."""
    moved = {"draft_uri": str(folder / name / "draft"), "metrics_path": str(folder / name / "metrics.jsonl")}
    return spec.model_copy(update={**moved, **changes})


def wait_for_step(process: subprocess.Popen[str], step: int) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        found = parse(line)
        if found and found.get("step", 0) >= step:
            return
    raise AssertionError(f"the trainer ended before step {step}")


def kill_at(process: subprocess.Popen[str], step: int, number: signal.Signals) -> None:
    wait_for_step(process, step)
    process.send_signal(number)


def ranks_of(process: subprocess.Popen[str]) -> dict[int, int]:
    """Rank -> pid; without a launcher it is the process itself."""
    found = {}
    for pid in [process.pid, *descendants(process.pid)]:
        try:
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        except OSError:
            continue  # ended since it was listed
        if b"infra.training" in words and b"torch.distributed.run" not in words:
            found[next((int(each[5:]) for each in variables if each.startswith(b"RANK=")), 0)] = pid
    return found


def kill(process: subprocess.Popen[str], victim: str) -> None:
    """SIGKILL to one rank (`rank N`), or to the launcher and all that is below it at once (`node`).

    A busy machine may let the trainer do its last steps, and end, before the signal comes.
    """
    if victim == "node":
        pids = [process.pid, *descendants(process.pid)]
    else:
        pids = [pid for rank, pid in ranks_of(process).items() if victim == f"rank {rank}"]
    for pid in pids:
        guard.send(pid, signal.SIGKILL)


def newest_step(spec: TrainSpec) -> int:
    kept = checkpoint_files.find(spec.draft_uri)
    return kept[0].step if kept else 0


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, TrainSpec]:
    folder = tmp_path_factory.mktemp("training")
    spec = write_spec(folder, CONFIG)
    lines = finish(start(spec, folder, "undisturbed"))
    assert lines[-1]["exit"] == 0, lines[-1]["stderr"]
    assert lines[0]["kind"] == "start"
    assert lines[-2] == {"kind": "done", "step": 60}
    return folder, spec


def test_it_learns_and_logs(undisturbed: tuple[Path, TrainSpec]) -> None:
    _, spec = undisturbed
    lines = [json.loads(line) for line in Path(spec.metrics_path).read_text().splitlines()]
    training = [line for line in lines if line["kind"] == "train"]
    assert [line["step"] for line in training] == list(range(2, 61, 2))
    assert training[-1]["loss"] < training[0]["loss"]
    assert [line["step"] for line in lines if line["kind"] == "validation"] == [20, 40, 60]
    assert {"learning_rate", "tokens_per_second", "input_wait_seconds", "acceptance_length"} <= set(training[0])
    kept = checkpoint_files.find(spec.draft_uri)
    assert [ref.step for ref in kept] == [60, 56]


@pytest.fixture(scope="module")
def undisturbed_pair(undisturbed: tuple[Path, TrainSpec]) -> TrainSpec:
    """What two gloo ranks make of the same data."""
    folder, original = undisturbed
    spec = elsewhere(original, folder, "pair", train=CONFIG.model_copy(update={"global_batch": 2}))
    lines = finish(start(spec, folder, "pair", ranks=2))
    assert lines[-1]["exit"] == 0, lines[-1]["stderr"]
    return spec


@pytest.mark.parametrize("times", [2, pytest.param(10, marks=[pytest.mark.slow, pytest.mark.timeout(1200)])])
@pytest.mark.parametrize("ranks", [1, 2])
def test_killed_and_resumed_under_new_leases_it_is_bit_for_bit_the_same(
    undisturbed: tuple[Path, TrainSpec],
    undisturbed_pair: TrainSpec,
    ranks: int,
    times: int,
    report_line: Callable[[str], None],
) -> None:
    folder, original = undisturbed[0], undisturbed[1] if ranks == 1 else undisturbed_pair
    name = f"killed-{ranks}-{times}"
    spec = elsewhere(original, folder, name)
    draw = random.Random()
    steps = sorted(draw.sample(range(4, 30), times // 2) + draw.sample(range(30, 52), times - times // 2))
    died, resumed_from = list[str](), list[int]()
    for lease_epoch, step in enumerate(steps, start=1):
        process = start(spec.model_copy(update={"lease_epoch": lease_epoch}), folder, name, ranks)
        wait_for_step(process, step)
        died.append(draw.choice(["node", *(f"rank {rank}" for rank in range(ranks))]))
        kill(process, died[-1])
        process.communicate(timeout=END_SECONDS)
        resumed_from.append(newest_step(spec))
        assert process.returncode != 0 or resumed_from[-1] == CONFIG.num_steps, "it was not killed"
    lines = finish(start(spec.model_copy(update={"lease_epoch": times + 1}), folder, name, ranks))
    what = f"ranks={ranks} steps={steps} died={died} resumed_from={resumed_from}"
    assert lines[-1]["exit"] == 0, f"{what}\n{lines[-1]['stderr']}"
    assert lines[0].get("from_step", 0) == resumed_from[-1] > 0, what
    assert series(spec) == series(original), what
    assert weights(spec) == weights(original), what
    report_line(f"kill: victim='trainer' times={times} {what}")


def test_sigterm_saves_and_asks_to_be_resumed(undisturbed: tuple[Path, TrainSpec]) -> None:
    folder, original = undisturbed
    spec = elsewhere(original, folder, "stopped", train=CONFIG.model_copy(update={"checkpoint_every_steps": 1000}))
    process = start(spec, folder, "stopped")
    kill_at(process, 2, signal.SIGTERM)  # early: the other steps take a second or two
    lines = finish(process)
    assert lines[-1]["exit"] == EXIT_RESUME, lines
    assert lines[-2]["kind"] == "stopped"
    again = finish(start(spec, folder, "stopped"))
    assert again[0]["from_step"] == lines[-2]["step"]
    assert series(spec) == series(original)


def test_another_node_resumes_with_the_metrics_of_the_first(undisturbed: tuple[Path, TrainSpec]) -> None:
    folder, original = undisturbed
    spec = original.model_copy(update={"metrics_path": str(folder / "other node" / "metrics.jsonl")})
    lines = finish(start(spec, folder, "other"))
    assert [line["kind"] for line in lines[:-1]] == ["start", "done"]
    assert series(spec) == series(original)


def test_two_ranks_learn_the_same(undisturbed: tuple[Path, TrainSpec]) -> None:
    folder, original = undisturbed
    one = elsewhere(
        original, folder, "one", train=CONFIG.model_copy(update={"global_batch": 2, "precision": "fp32"})
    )
    two = elsewhere(one, folder, "two")
    first, second = start(one, folder, "one"), start(two, folder, "two", ranks=2)
    for process in (first, second):
        lines = finish(process)
        assert lines[-1]["exit"] == 0, lines[-1]["stderr"]
    losses = [[json.loads(row[2]) for row in series(spec)] for spec in (one, two)]
    assert losses[0] == pytest.approx(losses[1], rel=2e-3)


def test_torchrun_stopped_by_sigterm_leaves_a_checkpoint(undisturbed: tuple[Path, TrainSpec]) -> None:
    folder, original = undisturbed
    changed = {"global_batch": 2, "checkpoint_every_steps": 1000, "num_steps": 20000}
    spec = elsewhere(original, folder, "torchrun", train=CONFIG.model_copy(update=changed))
    process = start(spec, folder, "torchrun", ranks=2)
    kill_at(process, 4, signal.SIGTERM)
    lines = finish(process)
    assert lines[-1]["exit"] != 0
    assert lines[-2]["kind"] == "stopped", lines
    assert checkpoint_files.find(spec.draft_uri)[0].step == lines[-2]["step"]


def test_a_damaged_shard_is_named(undisturbed: tuple[Path, TrainSpec], tmp_path: Path) -> None:
    spec = write_spec(tmp_path, CONFIG)
    record = manifest.read_records(spec.hidden_states_uri)["00001"]
    data = Path(spec.hidden_states_uri, record.data_path)
    data.write_bytes(data.read_bytes()[:-1] + b"?")
    lines = finish(start(spec, tmp_path, "damaged"))
    assert lines[-1]["exit"] == 1
    assert lines[-2]["error_type"] == "DamagedShard"
    assert (lines[-2]["stage_uri"], lines[-2]["shard"]) == (spec.hidden_states_uri, "00001")


def test_a_wrong_specification_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "spec.json"
    path.write_text("{}")
    since = time.monotonic()
    done = subprocess.run([sys.executable, "-m", "infra.training", str(path)], capture_output=True, text=True)
    assert done.returncode == 2
    assert "hidden_states_uri" in done.stdout
    assert time.monotonic() - since < 60
