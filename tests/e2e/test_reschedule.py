"""A node dies and nobody looks: the run is Crashed, goes back in the queue, and another worker completes it."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
from prefect.events.schemas.automations import AutomationCore

from flows.config import PipelineConfig
from flows.resolve import resolve
from infra.locations import project_home
from tests.e2e.conftest import tiny_config
from tests.e2e.prefect_stack import PrefectStack, left_alive

pytestmark = [pytest.mark.e2e, pytest.mark.kill, pytest.mark.timeout(1800)]

RECOVERY_SECONDS = 480.0  # until the crash is noticed, and from there to the end, other work beside it
END_SECONDS = 15.0
START_SECONDS = 180.0  # of a flow process, on a busy machine
# One request after another, so that there is a middle to kill in.
GENERATE = ("generate.concurrency=1",)


def records(config: PipelineConfig, stage: str) -> dict[str, int]:
    """Modification time (ns) of every record of a stage."""
    folder = Path(resolve(config)[stage].uri, "shards")
    return {path.name: path.stat().st_mtime_ns for path in folder.glob("*.json")}


def complete(config: PipelineConfig, stage: str) -> bool:
    return Path(resolve(config)[stage].uri, "manifest.json").exists()


def make_prompts(stack: PrefectStack, config: PipelineConfig) -> None:
    stack.trigger("prompts", config).wait_for("Completed", timeout_seconds=START_SECONDS)


def test_a_run_whose_node_dies_is_completed_by_another_worker(prefect_stack: PrefectStack, tmp_path: Path) -> None:
    config = tiny_config(tmp_path / "root", *GENERATE)
    slots = prefect_stack.limit_deployment("generate", 1)
    workers = [prefect_stack.start_worker(name, limit=1) for name in ("one", "two")]
    make_prompts(prefect_stack, config)
    run = prefect_stack.trigger("generate", config)
    run.wait_until(lambda: bool(records(config, "responses")), "a shard of responses", 420)
    (victim,) = [worker for worker in workers if worker.runs(run)]
    before, flow_pids = run.processes_with(("api_server",), START_SECONDS), run.flow_pids()
    assert len(flow_pids) == 1, before

    victim.kill()
    killed = time.monotonic()
    os.kill(flow_pids[0], signal.SIGKILL)
    kept = records(config, "responses")
    assert kept, "nothing was committed"
    assert not complete(config, "responses"), "the kill came too late"
    assert left_alive(before, END_SECONDS) == {}

    # Looked for among all its states: it may be Crashed for a moment only.
    run.wait_until(lambda: "Crashed" in [state.name for state in run.history()], "a crash", RECOVERY_SECONDS)
    run.wait_for("Completed", timeout_seconds=RECOVERY_SECONDS)
    recovery_seconds = time.monotonic() - killed
    print("\n".join(run.timeline()))
    print(f"shards_kept={len(kept)} shards={len(records(config, 'responses'))} recovery_s={recovery_seconds:.0f}")

    names = [state.name for state in run.history()]
    assert names.index("Crashed") < names.index("AwaitingRetry") < names.index("Completed")
    assert run.read().run_count == 2
    assert not victim.alive()
    assert complete(config, "responses")
    assert {name: records(config, "responses")[name] for name in kept} == kept, "a committed shard was made again"
    cached = {task.name for task in run.task_runs() if task.state_name == "Cached"}
    assert cached >= {f"responses {name.removesuffix('.json')}" for name in kept}
    assert run.left_alive(END_SECONDS) == {}
    deadline = time.monotonic() + END_SECONDS  # they are given back just after the state is written
    while (held := prefect_stack.active_slots(slots)) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert held == 0


@pytest.mark.slow
def test_a_run_that_dies_again_and_again_is_stopped(prefect_stack: PrefectStack, tmp_path: Path) -> None:
    """Its process is killed each time it starts a server, so no attempt ever commits anything."""
    interpreter = tmp_path / "python"
    interpreter.write_text(DEADLY_INTERPRETER)
    interpreter.chmod(0o755)
    config = tiny_config(tmp_path / "root", f"vllm.python={interpreter}", "max_idle_attempts=2")
    prefect_stack.start_worker("one")
    make_prompts(prefect_stack, config)
    run = prefect_stack.trigger("generate", config)
    run.wait_for("Failed", timeout_seconds=600)
    print("\n".join(run.timeline()))
    failed = run.read()
    assert failed.run_count == 3, "two attempts that committed nothing, and the one that says so"
    assert failed.state is not None
    assert "the last 2 attempts of this run died and committed nothing" in str(failed.state.message)
    time.sleep(40)
    assert run.state == "Failed", "a failed run is not put back"
    assert [state.name for state in run.history()].count("Crashed") == 2


# Answers the question for vLLM's version; asked to serve, it kills the flow's process, the guard's parent.
DEADLY_INTERPRETER = """\
#!/bin/sh
[ "$1" = -I ] && echo 0.32.0 && exit
kill -9 "$(awk '{print $4}' "/proc/$PPID/stat")"
sleep 1000
"""


def test_installing_the_automations_again_changes_nothing(prefect_stack: PrefectStack) -> None:
    files = list((project_home() / "deployments" / "automations").glob("*.yaml"))
    before = prefect_stack.client.read_automations()
    installed = prefect_stack.install_automations()
    assert [found["done"] for found in installed] == ["unchanged"] * len(files)
    triggers = {"draftsmith-published"}  # a deployment's own
    assert sorted(found.name for found in before) == sorted({found["name"] for found in installed} | triggers)
    assert prefect_stack.client.read_automations() == before


def test_an_automation_that_differs_is_updated_and_one_switched_off_stays_off(prefect_stack: PrefectStack) -> None:
    client = prefect_stack.client
    (zombie,) = client.read_automations_by_name("draftsmith-zombie")
    as_installed = AutomationCore.model_validate(zombie.model_dump(exclude={"id"}, exclude_unset=True))
    changed = as_installed.model_copy(update={"description": "another", "enabled": False})
    client.update_automation(zombie.id, changed)
    client.create_automation(changed)
    done = {found["name"]: found["done"] for found in prefect_stack.install_automations()}
    assert done.pop("draftsmith-zombie") == "updated"
    assert set(done.values()) == {"unchanged"}
    (now,) = client.read_automations_by_name("draftsmith-zombie")
    assert (now.description, now.enabled) == (zombie.description, False)
    client.update_automation(now.id, as_installed.model_copy(update={"enabled": True}))
