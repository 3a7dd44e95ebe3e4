"""Deployments on a real server: registered twice, given a part of a config, and `gc` among them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from flows.config import PipelineConfig
from tests.e2e.prefect_stack import PrefectStack
from tests.infra.test_garbage import age, make, orphan, refer
from tests.watched import config_of, write_model

pytestmark = [pytest.mark.prefect, pytest.mark.timeout(1200)]

PATIENCE_SECONDS = 240.0


def test_deploying_everything_again_leaves_the_same_deployments(prefect_stack: PrefectStack) -> None:
    client = prefect_stack.client

    def ids() -> dict[str, Any]:
        return {str(found.id): (found.name, found.parameters) for found in client.read_deployments()}

    def schedules() -> dict[str | None, tuple[bool, str]]:
        found = [schedule for one in client.read_deployments() for schedule in one.schedules]
        return {schedule.slug: (schedule.active, repr(schedule.schedule)) for schedule in found}

    before, times, automations = ids(), schedules(), sorted(one.name for one in client.read_automations())
    watch = client.read_deployment_by_name("watch/watch")
    hourly = next(schedule for schedule in watch.schedules if schedule.slug == "hourly")
    client._client.patch(
        f"/deployments/{watch.id}/schedules/{hourly.id}", json={"active": False}
    ).raise_for_status()
    prefect_stack.deploy_again()
    assert ids() == before
    assert times.keys() == {"hourly", "weekly"}
    times["hourly"] = (False, times["hourly"][1])
    assert schedules() == times, "what was paused in the UI stays paused, and nothing begins to count anew"
    assert sorted(one.name for one in client.read_automations()) == automations


def test_a_partial_change_is_all_that_a_run_is_given(prefect_stack: PrefectStack) -> None:
    client = prefect_stack.client
    smoke = client.read_deployment_by_name("speculator-pipeline/smoke")
    changed = {"config": {"profile": "smoke", "train": {"num_steps": 7}}}
    run = client.create_flow_run_from_deployment(smoke.id, parameters=changed)
    config = PipelineConfig.model_validate(client.read_flow_run(run.id).parameters["config"])
    assert (config.train.num_steps, config.train.warmup_steps) == (7, 30)
    client.delete_flow_run(run.id)
    wrong = {"config": {"profile": "smoke", "train": {"optimizer": "none"}}}
    with pytest.raises(Exception, match=r"409|optimizer"):
        client.create_flow_run_from_deployment(smoke.id, parameters=wrong)


def test_gc_lists_and_deletes_only_when_told_so(prefect_stack: PrefectStack, tmp_path: Path) -> None:
    write_model(tmp_path, 1)
    config, root = config_of(tmp_path), tmp_path / "root"
    prefect_stack.start_worker("light", pool="light-pool")
    empty = prefect_stack.trigger("gc", config)
    empty.wait_for("Empty", timeout_seconds=PATIENCE_SECONDS)
    stage = make(root, "prompts")
    refer(root, stage)
    garbage = orphan(stage)
    age(root)
    listed = prefect_stack.trigger("gc", config)
    listed.wait_for("Completed", timeout_seconds=PATIENCE_SECONDS)
    assert garbage.exists()
    deleted = prefect_stack.trigger("gc", config, delete=True)
    deleted.wait_for("Completed", timeout_seconds=PATIENCE_SECONDS)
    assert not garbage.exists()
    told = "1 items of 10 bytes, {} of them removed"
    assert [run.history()[-1].message for run in (listed, deleted)] == [told.format(0), told.format(1)]
    artifacts = prefect_stack.client._client.post(
        "/artifacts/filter", json={"artifacts": {"key": {"any_": ["garbage"]}}}
    )
    assert [garbage.name in one["data"] for one in artifacts.json()] == [True, True]
