"""A changed verifier starts the pipeline once, whether the schedule or an event makes the watch look."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast
from uuid import uuid4

import pytest

from flows.watch import CHANGED
from infra.locations import project_home
from tests.e2e.prefect_stack import PrefectStack
from tests.watched import config_of, write_model

pytestmark = [pytest.mark.prefect, pytest.mark.timeout(900)]

PATIENCE_SECONDS = 300.0
EVERY_SECONDS = 20
KEPT = {"schedule", "active", "slug", "parameters"}  # of a schedule


class Watched:
    """One verifier and data set, and what the server knows about them.

    An event names a profile and nothing else, so the worker has a home of its own, in which the profile is this config.
    """

    def __init__(self, stack: PrefectStack, folder: Path) -> None:
        write_model(folder, 1)
        self.folder = folder
        self.config = config_of(folder)
        self.given = self.config.model_dump(mode="json", exclude_unset=True)
        self.home = self._home()
        self._stack, self._client = stack, stack.client
        self._before = {run["id"] for run in self._all("watch")}

    def _home(self) -> Path:
        home = self.folder / "home"
        (home / "deployments").mkdir(parents=True)
        for path in project_home().iterdir():
            if path.name != "deployments":
                (home / path.name).symlink_to(path)
        for path in (project_home() / "deployments").iterdir():
            if path.name != "smoke.yaml":
                (home / "deployments" / path.name).symlink_to(path)
        profile = {name: value for name, value in self.given.items() if name != "profile"}
        (home / "deployments" / "smoke.yaml").write_text(json.dumps(profile))  # which is YAML too
        return home

    def start_worker(self, at_once: int | None = None) -> None:
        environment = {"DRAFTSMITH_HOME": str(self.home)}
        self._stack.start_worker("light", limit=at_once, pool="light-pool", environment=environment)

    def post(self, path: str, body: Any) -> Any:
        answer = self._client._client.post(path, json=body)
        answer.raise_for_status()
        return answer.json() if answer.content else None

    def runs(self, flow: str) -> list[dict[str, Any]]:
        """Runs of a flow that are about this folder, oldest first."""
        root = str(self.folder / "root")

        def is_ours(run: dict[str, Any]) -> bool:
            given = run["parameters"].get("config", {})
            by_event = given == {"profile": "smoke"} and flow == "watch" and run["id"] not in self._before
            return given.get("root") == root or (by_event and run["parameters"].get("first") == "start")

        return [run for run in self._all(flow) if is_ours(run)]

    def _all(self, flow: str) -> list[dict[str, Any]]:
        asked = {"flows": {"name": {"any_": [flow]}}, "sort": "EXPECTED_START_TIME_ASC"}
        return cast(list[dict[str, Any]], self.post("/flow_runs/filter", asked))

    def looks(self) -> list[str]:
        """States in which the watch's runs have ended."""
        return [run["state_name"] for run in self.runs("watch") if run["end_time"]]

    def pipeline_runs(self) -> list[dict[str, Any]]:
        return self.runs("speculator-pipeline")

    def changes(self) -> list[dict[str, Any]]:
        """The events that say that something has changed."""
        found = self.post("/events/filter", {"filter": {"event": {"name": [CHANGED]}}, "limit": 50})["events"]
        ours = {run["id"] for run in self.pipeline_runs()}
        return [event for event in found if event["payload"]["flow_run_id"] in ours]

    def publish(self) -> None:
        """Say that there may be something new."""
        event = {
            "id": str(uuid4()),
            "occurred": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "event": "draftsmith.verifier.published",
            "resource": {"prefect.resource.id": "draftsmith.verifier.test"},
            # Only the profile is taken.
            "payload": {"config": {"profile": "smoke", "root": str(self.folder / "elsewhere")}},
        }
        self.post("/events", [event])

    def wait_for(self, reached: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not reached():
            states = [(run["name"], run["state_name"], run["state"]["message"]) for run in self.runs("watch")]
            assert time.monotonic() < deadline, f"{what} did not come; the looks were {states}"
            time.sleep(1)

    def check_one_run_for_each(self, *revisions: str) -> None:
        """Exactly these revisions have a run each, and an event each."""
        found = [run["parameters"]["config"]["verifier"]["revision"] for run in self.pipeline_runs()]
        assert sorted(found) == sorted(revisions)
        self.wait_for(lambda: len(self.changes()) >= len(revisions), "the event")
        assert sorted(event["payload"]["revisions"]["verifier"] for event in self.changes()) == sorted(revisions)

    def revision(self) -> str:
        from infra.verifiers.verifier import resolve_revision

        return resolve_revision(self.config.verifier)


@pytest.fixture
def watched(prefect_stack: PrefectStack, tmp_path: Path) -> Iterator[Watched]:
    found = Watched(prefect_stack, tmp_path)
    deployment = prefect_stack.client.read_deployment_by_name("watch/watch")
    schedules = f"/deployments/{deployment.id}/schedules"
    for hourly in deployment.schedules:  # a look of the hour would be at our profile too
        prefect_stack.client._client.delete(f"{schedules}/{hourly.id}").raise_for_status()
    yield found
    found.post(schedules, [hourly.model_dump(mode="json", include=KEPT) for hourly in deployment.schedules])


def test_the_schedule_starts_one_run_for_a_change_and_none_without(
    watched: Watched, prefect_stack: PrefectStack
) -> None:
    # One look after the other, also where one takes longer than the time to the next.
    watched.start_worker(at_once=1)
    deployment = prefect_stack.client.read_deployment_by_name("watch/watch")
    schedule = {"schedule": {"interval": EVERY_SECONDS}, "active": True, "parameters": {"config": watched.given}}
    (made,) = watched.post(f"/deployments/{deployment.id}/schedules", [schedule])
    try:
        watched.wait_for(lambda: watched.looks().count("Unchanged") >= 1, "a look that finds nothing new")
        assert watched.looks()[0] == "Remembered"
        assert watched.pipeline_runs() == []
        write_model(watched.folder, 2)
        watched.wait_for(lambda: "Started" in watched.looks(), "a look that finds the change")
        watched.wait_for(lambda: watched.looks()[-1] == "Unchanged", "a look after the change")
    finally:
        prefect_stack.client._client.delete(f"/deployments/{deployment.id}/schedules/{made['id']}")
    print(f"looks={watched.looks()} pipeline_runs={len(watched.pipeline_runs())} events={len(watched.changes())}")
    assert watched.looks().count("Started") == 1
    watched.check_one_run_for_each(watched.revision())


def test_an_event_starts_one_run_for_a_change_however_often_it_comes(watched: Watched) -> None:
    watched.start_worker()
    watched.publish()  # of what nobody has seen before
    watched.wait_for(lambda: len(watched.looks()) == 1, "the look that the event asks for")
    assert watched.looks() == ["Started"]
    first = watched.revision()
    watched.check_one_run_for_each(first)

    watched.publish()
    watched.wait_for(lambda: len(watched.looks()) == 2, "the second look")
    assert watched.looks()[-1] == "Unchanged"
    watched.check_one_run_for_each(first)

    write_model(watched.folder, 2)
    watched.publish()
    watched.publish()
    watched.wait_for(lambda: len(watched.looks()) == 4, "two looks, side by side")
    print(f"looks={watched.looks()} pipeline_runs={len(watched.pipeline_runs())} events={len(watched.changes())}")
    assert "Started" in watched.looks()[2:]
    watched.check_one_run_for_each(first, watched.revision())
