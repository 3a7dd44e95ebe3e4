"""`make stack`, a run that a person starts from its form in the browser, and `make stack-down`.

With DRAFTSMITH_SCREENSHOTS set to a folder, what the person sees is kept there (docs/ui/ was made so).
"""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from flows.config import load_config
from flows.stack import BLOCK, POOLS, Stack
from infra import guard
from infra.local_postgres import LocalPostgres, installed
from infra.locations import project_home
from infra.processes import living
from tests.e2e.browser import PROGRAM, Browser
from tests.e2e.conftest import TINY

pytestmark = [pytest.mark.prefect, pytest.mark.timeout(3000)]

STARTED_SECONDS = 300.0
RUN_SECONDS = 2400.0


def command(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "flows.stack", *arguments, "--folder", str(folder)]
    return subprocess.run(
        argv, cwd=project_home(), capture_output=True, text=True, timeout=STARTED_SECONDS, check=False
    )


class Api:
    """The stack's Prefect API, asked as its users ask it."""

    def __init__(self, state: dict[str, Any]) -> None:
        self.url: str = state["url"]
        self._key = base64.b64encode(state["auth_string"].encode()).decode()

    def ask(self, path: str, body: Any = None, method: str | None = None) -> Any:
        headers = {"Authorization": f"Basic {self._key}", "Content-Type": "application/json"}
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data=data, headers=headers, method=method)
        with urllib.request.urlopen(request, timeout=60) as answer:
            text = answer.read()
        return json.loads(text) if text else None

    def newest_artifact(self, kind: str) -> dict[str, Any] | None:
        found = self.ask("/artifacts/filter", {"artifacts": {"type": {"any_": [kind]}}, "sort": "CREATED_DESC"})
        return found[0] if found else None


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    made = Stack(tmp_path_factory.mktemp("stack") / "stack")
    done = command(made.folder, "up", "--port", "0")
    try:
        assert done.returncode == 0, done.stdout + done.stderr
        yield made
    finally:
        made.end()
        made.remove()


@pytest.fixture(scope="module")
def state(stack: Stack) -> dict[str, Any]:
    found = stack.state()
    assert found is not None
    assert found["ready"]
    return found


def test_everything_is_installed_and_asks_for_the_key(stack: Stack, state: dict[str, Any]) -> None:
    api = Api(state)
    assert {pool["name"] for pool in api.ask("/work_pools/filter", {})} == set(POOLS)
    names = {found["name"] for found in api.ask("/deployments/filter", {})}
    assert {"smoke", "kimi-k2.5-b300", "generate", "watch", "gc"} <= names
    files = (project_home() / "deployments" / "automations").glob("*.yaml")
    automations = {found["name"] for found in api.ask("/automations/filter", {})}
    assert {f"draftsmith-{path.stem}" for path in files} <= automations
    block = api.ask(f"/block_types/slug/aws-credentials/block_documents/name/{BLOCK}?include_secrets=false")
    assert set(block["data"]["aws_secret_access_key"]) == {"*"}
    workers = [api.ask(f"/work_pools/{pool}/workers/filter", {}) for pool in POOLS]
    assert [[worker["status"] for worker in found] for found in workers] == [["ONLINE"]] * len(POOLS)
    assert state["database"] == ("PostgreSQL" if installed() else "SQLite")
    with pytest.raises(urllib.error.HTTPError, match="401"):
        urllib.request.urlopen(f"{state['url']}/admin/version", timeout=60)


def test_its_keys_are_in_no_log_and_in_no_process_list(stack: Stack, state: dict[str, Any]) -> None:
    secret = (stack.folder / "s3" / "secret").read_text()
    key = state["auth_string"].partition(":")[2]
    logs = [path.read_text(errors="replace") for path in stack.folder.glob("*.log")]
    lists = []
    for pid in [state["pid"], *living(stack.token)]:
        with suppress(OSError):  # the database ends the processes of connections that are closed
            lists.append(Path(f"/proc/{pid}/cmdline").read_text(errors="replace"))
    assert len(logs) >= 4
    assert len(lists) >= 4
    for text in logs + lists:
        assert key not in text
        assert secret not in text
    assert (stack.folder / "stack.json").stat().st_mode & 0o077 == 0


def test_up_again_is_the_same_stack(stack: Stack, state: dict[str, Any]) -> None:
    done = command(stack.folder, "up")
    assert done.returncode == 0
    assert state["url"] in done.stdout
    assert stack.state() == state


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.skipif(PROGRAM is None, reason="no Chromium is installed")
def test_a_person_starts_a_run_from_its_form_and_reads_its_report(
    stack: Stack, state: dict[str, Any], tmp_path: Path
) -> None:
    api, ui = Api(state), state["url"].removesuffix("/api")
    shots = Path(os.environ.get("DRAFTSMITH_SCREENSHOTS") or tmp_path)
    deployment = api.ask("/deployments/name/speculator-pipeline/smoke")
    path = tmp_path / "tiny.yaml"
    path.write_text("profile: smoke\n")
    tiny = load_config(str(path), [*TINY, "root=s3://draftsmith/browser", f"credentials_block={BLOCK}"])
    parameters = {"config": tiny.model_dump(mode="json", exclude_unset=True)}
    api.ask(f"/deployments/{deployment['id']}", {"parameters": parameters}, method="PATCH")

    with Browser(tmp_path / "browser") as browser:
        browser.open(ui)
        browser.wait_for_text("Login")
        browser.click("input")
        browser.type(state["auth_string"])
        browser.click("button", "Login")
        browser.wait_for_text("Deployments")

        browser.open(f"{ui}/v2/deployments/deployment/{deployment['id']}/run")
        for text in ("Profile", "Verifier", "Hang timeout (seconds)", "Default: "):
            browser.wait_for_text(text)
        browser.screenshot(shots / "form.webp")
        browser.click("button", "Submit")
        ours = {"flows": {"name": {"any_": ["speculator-pipeline"]}}}
        browser.wait_for(lambda: api.ask("/flow_runs/filter", ours), "a run")

        def run() -> dict[str, Any]:
            found = api.ask("/flow_runs/filter", ours)
            assert len(found) == 1, [one["name"] for one in found]
            assert found[0]["state_type"] not in ("FAILED", "CRASHED", "CANCELLED"), found[0]["state"]
            one: dict[str, Any] = found[0]
            return one

        assert run()["parameters"]["config"]["profile"] == "smoke"
        seen: dict[str, set[str]] = {}
        deadline = time.monotonic() + RUN_SECONDS
        while (now := run())["state_type"] != "COMPLETED":
            assert time.monotonic() < deadline, now["state"]
            artifact = api.newest_artifact("progress")
            if artifact is not None:
                browser.open(f"{ui}/v2/artifacts/artifact/{artifact['id']}")
                browser.wait_for_text("Progress: ")
                moved = seen.setdefault(artifact["id"], set())
                moved.add(browser.run("document.querySelector('[data-testid=progress-display]').innerText"))
                if len(moved) == 2 and len(seen) == 1:  # of the first that moves
                    browser.screenshot(shots / "progress.webp")
            time.sleep(2)
        print({artifact: sorted(found) for artifact, found in seen.items()})
        assert any(len(found) > 1 for found in seen.values()), "no progress artifact moved on the page"

        browser.open(f"{ui}/v2/runs/flow-run/{now['id']}")
        browser.wait_for_text("Completed")
        report = api.newest_artifact("markdown")
        assert report is not None
        browser.open(f"{ui}/v2/artifacts/artifact/{report['id']}")
        browser.wait_for_text("eagle3")
        browser.screenshot(shots / "report.webp")


def test_down_leaves_nothing_behind(stack: Stack, state: dict[str, Any]) -> None:
    pids = living(stack.token)
    assert pids
    done = command(stack.folder, "down")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "stack: ended=True removed=True\n"
    assert living(stack.token) == []
    assert not guard.runs_since(state["pid"], state["started"])
    assert not stack.folder.exists()
    assert not LocalPostgres(stack.token, Path()).folder.exists()
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(f"{state['url']}/health", timeout=5)
    assert command(stack.folder, "down").stdout == "stack: ended=False removed=False\n"
