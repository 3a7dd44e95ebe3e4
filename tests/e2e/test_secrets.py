"""A real pipeline with planted secrets: nothing that it writes, logs, sends or shows in the process list tells one.

Keys of the store are in a Prefect block, the others in the worker's environment, and the server asks for a password.
"""

from __future__ import annotations

import base64
import contextlib
import io
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import gettempdir
from typing import Any
from urllib.parse import quote
from uuid import uuid4

import pyarrow.parquet as parquet
import pytest
from prefect.settings import PREFECT_API_AUTH_STRING, PREFECT_API_URL, temporary_settings

from flows.registration import save_block
from infra import guard, storage
from infra.local_s3 import LocalS3
from infra.stores.s3_client import VARIABLES
from tests.conftest import use_server
from tests.e2e.conftest import tiny_config
from tests.e2e.prefect_stack import PrefectStack
from tests.fakes.openai_server import FakeOpenAIServer

pytestmark = [pytest.mark.e2e, pytest.mark.prefect, pytest.mark.s3, pytest.mark.timeout(2700)]

RUN_SECONDS = 1800.0
STAGE_SECONDS = 300.0
LOOK_SECONDS = 0.2
PAGE = 200  # what the server gives at most
TEXT_BYTES = 32 * 2**20  # hidden states are larger, and numbers
BLOCK = "canary-store"
EXTERNAL = "GPU_SEVEN"  # of no secret's name
MARK = uuid4().hex[:12]  # so that nothing else on the machine is meant
CANARIES = {
    "store": f"store+{MARK}/secret",
    "password": f"password{MARK}",
    "HF_TOKEN": f"hf_{MARK}",
    "WANDB_API_KEY": f"wandb{MARK}",
    EXTERNAL: f"external{MARK}",
}
AUTH = f"draftsmith:{CANARIES['password']}"
SPELLINGS = [
    *CANARIES.values(),
    quote(CANARIES["store"], safe=""),
    base64.b64encode(AUTH.encode()).decode(),
    MARK,
]


@dataclass
class Planted:
    """The stack with its store, and the command lines of all processes that were seen."""

    folder: Path
    stack: PrefectStack
    store: LocalS3
    began: float = field(default_factory=time.time)
    command_lines: set[str] = field(default_factory=set)
    had_secrets: set[str] = field(default_factory=set)

    def look(self) -> None:
        for pid in guard.all_pids():
            try:
                self.command_lines.add(Path(f"/proc/{pid}/cmdline").read_text(errors="replace"))
                environment = Path(f"/proc/{pid}/environ").read_bytes()
            except OSError:
                continue  # ended, or another user's
            self.had_secrets |= {name for name, value in CANARIES.items() if value.encode() in environment}


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Planted]:
    folder = tmp_path_factory.mktemp("secrets")
    variables = {name: CANARIES[name] for name in ("HF_TOKEN", "WANDB_API_KEY", EXTERNAL)}
    variables["DRAFTSMITH_CACHE"] = str(folder / "cache")
    with pytest.MonkeyPatch.context() as patch:
        for name in VARIABLES:
            patch.delenv(name, raising=False)
        store = LocalS3(folder / "s3", secret_key=CANARIES["store"])
        stack = PrefectStack(folder / "stack", environment=variables, auth=AUTH)
        stack.folder.mkdir()
        with store, stack:
            known = {PREFECT_API_URL: stack.url, PREFECT_API_AUTH_STRING: AUTH}
            with temporary_settings(known):
                save_block(BLOCK, store.environment)
            made, ended = Planted(folder, stack, store), threading.Event()

            def watch() -> None:
                while not ended.wait(LOOK_SECONDS):
                    made.look()

            watcher = threading.Thread(target=watch, daemon=True)
            watcher.start()
            try:
                stack.start_worker("one")
                yield made
            finally:
                ended.set()
                watcher.join(10)


def of_the_server(stack: PrefectStack) -> Iterator[tuple[str, str]]:
    """What the server tells whoever may ask it, by what was asked."""
    client = stack.client._client
    for path in (
        "flow_runs",
        "task_runs",
        "logs",
        "artifacts",
        "variables",
        "deployments",
        "block_documents",
        "work_pools",
    ):
        offset = 0
        while found := _posted(client, f"/{path}/filter", {"limit": PAGE, "offset": offset}):
            yield f"{path} from {offset}", str(found)
            offset += len(found)
    for run in _posted(client, "/flow_runs/filter", {"limit": PAGE}):
        states = client.get("/flow_run_states/", params={"flow_run_id": run["id"]})
        states.raise_for_status()
        yield f"states of {run['name']}", states.text
    page = _posted(client, "/events/filter", {"filter": {}, "limit": 50})
    while page["events"]:
        yield "events", str(page["events"])
        if not page["next_page"]:
            break
        page = client.get(page["next_page"]).json()


def _posted(client: Any, path: str, body: dict[str, Any]) -> Any:
    answer = client.post(path, json=body)
    answer.raise_for_status()
    return answer.json()


def of_the_store(store: LocalS3) -> Iterator[tuple[str, str]]:
    """Every object, tables as their rows."""
    with pytest.MonkeyPatch.context() as patch:
        use_server(store, patch)
        for name, size_bytes in storage.list_sizes(store.root).items():
            body = storage.get(storage.join(store.root, name))
            yield name, body.decode(errors="replace")
            if name.endswith(".parquet") and size_bytes < TEXT_BYTES:
                yield f"rows of {name}", str(parquet.read_table(io.BytesIO(body)).to_pylist())


def of_the_disk(planted: Planted) -> Iterator[tuple[str, str]]:
    """Logs, caches, the server's database and what is left in the temporary folder; not the store's own keys."""
    kept = {planted.store.folder / "identities.json"}
    left = {path for top in Path(gettempdir()).glob("draftsmith-*") for path in (top, *files_below(top))}
    for path in [*files_below(planted.folder), *left]:
        if path in kept or path.suffix in (".safetensors", ".dat") or not path.is_file():
            continue
        with contextlib.suppress(FileNotFoundError):  # of somebody who works beside us
            if path not in left or path.stat().st_mtime >= planted.began:
                yield str(path), path.read_bytes().decode(errors="replace")


def files_below(folder: Path) -> list[Path]:
    """Of folders that others may be deleting meanwhile."""
    return [Path(parent, name) for parent, _, names in os.walk(folder) for name in names]


def test_a_whole_run(planted: Planted) -> None:
    # One server in the evaluation: another is told no more.
    measured = ("evaluate.methods=[none]", "evaluate.concurrency=[1]", "evaluate.num_prompts=[2]")
    config = tiny_config(f"{planted.store.root}/whole", f"credentials_block={BLOCK}", *measured)
    run = planted.stack.trigger("smoke", config)
    run.wait_for("Completed", timeout_seconds=RUN_SECONDS)
    lines = list(planted.command_lines)  # as of now: the watch goes on adding to them
    assert any("vllm.entrypoints.openai.api_server" in line for line in lines)
    assert any("infra.training" in line for line in lines)


def test_an_external_server_that_takes_the_key_and_one_that_does_not(planted: Planted) -> None:
    def config(server: FakeOpenAIServer, *more: str) -> Any:
        return tiny_config(
            f"{planted.store.root}/external",
            f"credentials_block={BLOCK}",
            f"generate.servers.external=[{server.base_url}]",
            "generate.servers.external_model=verifier",
            f"generate.servers.external_key_variable={EXTERNAL}",
            *more,
        )

    with FakeOpenAIServer(api_key=CANARIES[EXTERNAL]) as ours, FakeOpenAIServer(api_key="another") as another:
        planted.stack.trigger("prompts", config(ours)).wait_for("Completed", timeout_seconds=STAGE_SECONDS)
        planted.stack.trigger("generate", config(ours)).wait_for("Completed", timeout_seconds=STAGE_SECONDS)
        refused = planted.stack.trigger("generate", config(another, "generate.max_tokens=31"))
        refused.wait_for("Failed", timeout_seconds=STAGE_SECONDS)
    assert "refuses the key" in (refused.read().state.message or "")


def test_nobody_was_told(planted: Planted) -> None:
    """After the runs above."""
    assert planted.had_secrets >= {"store", "password", "HF_TOKEN", "WANDB_API_KEY", EXTERNAL}, "or none was there"
    told, places = [], 0
    lists = ((f"command line {line[:80]!r}", line) for line in sorted(planted.command_lines))
    for sources in (lists, of_the_server(planted.stack), of_the_store(planted.store), of_the_disk(planted)):
        before = places
        for where, text in sources:
            places += 1
            told += [f"{spelling} in {where}" for spelling in SPELLINGS if spelling in text]
        assert places > before, "nothing was looked at"
    print(f"places={places} command_lines={len(planted.command_lines)} told={len(told)}")
    assert told == []
    logs = list((planted.folder / "cache").rglob("*.log"))
    assert logs
    assert [path for path in logs if path.stat().st_mode & 0o077] == []
