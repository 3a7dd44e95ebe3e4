"""Data sets on the hub: resolved to a commit, fetched once, read without the hub and without running their code."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from infra import prompt_hub
from infra.errors import InfrastructureError, InputError
from infra.prompts import PromptsConfig, dataset_revisions, load_prompts

COMMIT = "0123456789abcdef0123456789abcdef01234567"
CARD = """---
configs:
- config_name: main
  data_files:
  - {split: train, path: main/train-*}
  - {split: test, path: main/test-*}
- config_name: other
  data_files:
  - {split: train, path: other/train-*}
---
# A data set
"""


def config(**source: Any) -> PromptsConfig:
    return PromptsConfig.model_validate({"sources": [{"hub": "org/data", **source}], "heldout_prompts": 0})


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A data set's repository with two subsets, two splits, and code that must not run."""
    folder = tmp_path / "repository"
    for subset, split, texts in (
        ("main", "train", ["Why?", "How?", "caf\xe9"]),
        ("main", "test", ["Test?"]),
        ("other", "train", ["Other?"]),
    ):
        (folder / subset).mkdir(parents=True, exist_ok=True)
        name = folder / subset / f"{split}-00000-of-00001.parquet"
        buffers = pa.array([text.encode("latin-1") for text in texts], pa.binary()).buffers()
        pq.write_table(pa.table({"question": pa.StringArray.from_buffers(len(texts), *buffers[1:])}), name)
    (folder / "README.md").write_text(CARD)
    (folder / "lines.json").write_text('{"prompt": "Line?"}\n{"prompt": 3}\n{"prompt": torn\n')
    (folder / "data.py").write_text("raise SystemExit('code of the data set was run')\n")
    return folder


@pytest.fixture
def fetched(repository: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """That repository as what the hub's library has downloaded."""
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *args, **options: str(repository))
    monkeypatch.setattr(prompt_hub, "_remember_commit", lambda *args: None)
    return repository


def questions(wanted: PromptsConfig) -> set[str]:
    return {json.loads(row["messages"])[0]["content"] for row in load_prompts(wanted).train}


@pytest.mark.usefixtures("fetched")
def test_a_split_of_a_subset_is_read() -> None:
    columns = {"columns": {"prompt": "question"}, "revision": COMMIT}
    main = config(subset="main", **columns)
    prompts = load_prompts(main)
    assert questions(main) == {"Why?", "How?"}
    assert prompts.dropped == {"data": {"broken_utf8": 1}}
    assert prompts.revisions == dataset_revisions(main) == {"data": f"org/data@{COMMIT}"}
    assert questions(config(subset="main", split="test", **columns)) == {"Test?"}
    assert questions(config(subset="other", **columns)) == {"Other?"}
    contents = [config(subset="main", split=split, **columns).content() for split in (None, "test")]
    assert contents[0] != contents[1]


@pytest.mark.usefixtures("fetched")
def test_files_are_read_row_by_row() -> None:
    wanted = config(files=["lines.*"], revision=COMMIT)
    assert questions(wanted) == {"Line?"}
    assert load_prompts(wanted).dropped == {"data": {"broken_json": 1, "wrong_type": 1}}


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ({"subset": "none"}, "'none' not found. Available: ['main', 'other']"),
        ({"subset": "main", "split": "dev"}, "Bad split: dev. Available splits: ['train', 'test']"),
        ({}, "Config name is missing. Please pick one among the available configs: ['main', 'other']"),
        ({"files": ["none-*.parquet"]}, "org/data has no file none-*.parquet"),
        ({"subset": "main"}, "holds no usable prompt (1 broken_utf8, 2 no_prompt)"),
    ],
)
def test_what_is_not_there_is_named(fetched: Path, source: dict[str, Any], problem: str) -> None:
    with pytest.raises(InputError) as caught:
        load_prompts(config(revision=COMMIT, **source))
    assert caught.value.field == "prompts.sources[0].hub"
    assert problem in str(caught.value)
    assert str(fetched) not in str(caught.value)


def test_code_beside_the_data_is_refused_not_run(fetched: Path) -> None:
    (fetched / f"{fetched.name}.py").write_text("raise SystemExit('code of the data set was run')\n")
    with pytest.raises(InputError, match="scripts are no longer supported"):
        load_prompts(config(subset="main", revision=COMMIT))


def test_a_download_that_breaks_off_may_be_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: object, **options: object) -> str:
        raise ConnectionError("reset by peer\nand more lines")

    monkeypatch.setattr("huggingface_hub.snapshot_download", broken)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    with pytest.raises(InfrastructureError, match=r"org/data.*reset by peer$"):
        load_prompts(config(revision=COMMIT))


# --- against the hub's own client ---


class FakeHub(BaseHTTPRequestHandler):
    """The few routes of the hub that resolve a data set's commit and download its files."""

    files: ClassVar[dict[str, bytes]] = {}
    requests: ClassVar[list[str]] = []

    def do_GET(self) -> None:
        self.requests.append(self.path)
        path = self.path.split("?")[0]
        api = "/api/datasets/org/data"
        if path in (api, f"{api}/revision/main", f"{api}/revision/{COMMIT}"):
            siblings = [{"rfilename": name} for name in self.files]
            return self.answer(200, json.dumps({"id": "org/data", "sha": COMMIT, "siblings": siblings}).encode())
        if path.startswith(f"{api}/revision/"):
            return self.answer(404, b"", {"X-Error-Code": "RevisionNotFound"})
        if path.startswith(f"{api}/tree/{COMMIT}"):
            tree = [
                {"type": "file", "path": name, "size": len(data), "oid": f"{index:040x}"}
                for index, (name, data) in enumerate(self.files.items())
            ]
            return self.answer(200, json.dumps(tree).encode())
        name = path.removeprefix(f"/datasets/org/data/resolve/{COMMIT}/")
        if name in self.files:
            return self.answer(200, self.files[name], {"ETag": f'"{len(name)}"', "X-Repo-Commit": COMMIT})
        return self.answer(404, b"", {"X-Error-Code": "RepoNotFound"})

    do_HEAD = do_GET

    def answer(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def hub(repository: Path) -> Iterator[str]:
    paths = [path for path in repository.rglob("*") if path.is_file()]
    FakeHub.files = {path.relative_to(repository).as_posix(): path.read_bytes() for path in paths}
    FakeHub.requests = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), FakeHub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def ask(tmp_path: Path, endpoint: str, *sources: dict[str, Any], offline: bool = False) -> list[str]:
    """Revision, prompts or error of each source, of a process of its own (the hub's library reads its environment
    at import)."""
    code = (
        "import json, sys\n"
        "from infra.prompts import *\n"
        "from infra.errors import *\n"
        "for source in json.loads(sys.argv[1]):\n"
        "    config = PromptsConfig(sources=({'hub': 'org/data', **source},), heldout_prompts=0)\n"
        "    try:\n"
        "        revisions = dataset_revisions(config)\n"
        "        found = load_prompts(config)\n"
        "        assert found.revisions == revisions\n"
        "        print(revisions['data'], sorted(json.loads(r['messages'])[0]['content'] for r in found.train))\n"
        "    except DraftsmithError as error:\n"
        "        print(type(error).__name__, error)\n"
        "assert 'datasets' not in sys.modules\n"
    )
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "HUGGING"))}
    environment |= {"HF_ENDPOINT": endpoint, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_DISABLE_TELEMETRY": "1"}
    environment |= {"HF_HUB_OFFLINE": str(int(offline)), "no_proxy": "127.0.0.1", "NO_PROXY": "127.0.0.1"}
    argv = [sys.executable, "-c", code, json.dumps(sources)]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=120, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip().split("\n")


@pytest.mark.seconds
def test_a_data_set_is_resolved_fetched_and_found_again_offline(tmp_path: Path, hub: str) -> None:
    lines = {"files": ["lines.json"]}
    unpinned, pinned = ask(tmp_path, hub, lines, {**lines, "revision": COMMIT}, offline=True)
    assert unpinned.startswith("InputError prompts.sources[0].hub: org/data is neither pinned to a commit nor in")
    assert pinned.startswith("InputError prompts.sources[0].hub: org/data at 0123456789ab is not whole in the")
    assert FakeHub.requests == []

    expected = f"org/data@{COMMIT} ['Line?']"
    assert ask(tmp_path, hub, lines, {**lines, "revision": "v9"}, {"hub": "org/none"}) == [
        expected,
        "InputError prompts.sources[0].hub: org/data has no revision v9 on the hub",
        "InputError prompts.sources[0].hub: the hub has no data set org/none, or it is private and HF_TOKEN is not set",
    ]
    assert not any("parquet" in request or ".py" in request for request in FakeHub.requests)

    FakeHub.requests.clear()
    more = {"files": ["main/*.parquet"]}
    again, other = ask(tmp_path, hub, lines, more, offline=True)
    assert again == expected
    assert other.startswith("InputError prompts.sources[0].hub: org/data at 0123456789ab is not whole in the")
    assert FakeHub.requests == []
    # A pinned commit needs no answer from the hub as long as its files are cached; a name does.
    unreachable = "http://127.0.0.1:9"
    pinned, unpinned = ask(tmp_path, unreachable, {**lines, "revision": COMMIT}, lines)
    assert pinned == expected
    assert unpinned.startswith(
        "InfrastructureError the Hugging Face hub did not answer about the data set org/data"
    )
