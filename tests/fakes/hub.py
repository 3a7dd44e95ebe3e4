"""The few routes of the Hugging Face hub that resolve a repository's commit and download its files.

The hub's library reads its environment when it is imported, so what talks to this server runs in a process of its
own (`run_against`).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

COMMIT = "0123456789abcdef0123456789abcdef01234567"
UNREACHABLE = "http://127.0.0.1:9"


class FakeHub(BaseHTTPRequestHandler):
    """Answers about one repository, which has one commit and a branch `main`."""

    kind: ClassVar[str] = "models"
    name: ClassVar[str] = ""
    files: ClassVar[dict[str, bytes]] = {}
    requests: ClassVar[list[str]] = []
    failing: ClassVar[bool] = False

    def do_GET(self) -> None:
        self.requests.append(self.path)
        path = self.path.split("?")[0]
        api = f"/api/{self.kind}/{self.name}"
        if self.failing:
            return self._answer(500, b"")
        if path in (api, f"{api}/revision/main", f"{api}/revision/{COMMIT}"):
            siblings = [{"rfilename": name} for name in self.files]
            info = {"id": self.name, "sha": COMMIT, "siblings": siblings}
            return self._answer(200, json.dumps(info).encode())
        if path.startswith(f"{api}/revision/"):
            return self._answer(404, b"", {"X-Error-Code": "RevisionNotFound"})
        if path.startswith(f"{api}/tree/{COMMIT}"):
            tree = [
                {"type": "file", "path": name, "size": len(data), "oid": f"{index:040x}"}
                for index, (name, data) in enumerate(self.files.items())
            ]
            return self._answer(200, json.dumps(tree).encode())
        folder = f"/{self.name}" if self.kind == "models" else f"/{self.kind}/{self.name}"
        name = path.removeprefix(f"{folder}/resolve/{COMMIT}/")
        if name in self.files:
            return self._answer(200, self.files[name], {"ETag": f'"{name}"', "X-Repo-Commit": COMMIT})
        return self._answer(404, b"", {"X-Error-Code": "RepoNotFound"})

    do_HEAD = do_GET

    def _answer(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@contextmanager
def serving(kind: str, name: str, folder: Path) -> Iterator[str]:
    """The hub's address while it has one repository, whose files are those of `folder`."""
    paths = [path for path in folder.rglob("*") if path.is_file()]
    FakeHub.kind, FakeHub.name = kind, name
    FakeHub.files = {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}
    FakeHub.requests = []
    FakeHub.failing = False
    server = ThreadingHTTPServer(("127.0.0.1", 0), FakeHub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def run_against(endpoint: str, code: str, argument: Any, *, home: Path, offline: bool) -> list[str]:
    """Run Python code, with `argument` as JSON in its argv, against that hub; the lines it prints.

    Args:
        home: folder of the hub library's cache.
    """
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "HUGGING"))}
    environment |= {"HF_ENDPOINT": endpoint, "HF_HOME": str(home), "HF_HUB_DISABLE_TELEMETRY": "1"}
    environment |= {"HF_HUB_OFFLINE": str(int(offline)), "no_proxy": "127.0.0.1", "NO_PROXY": "127.0.0.1"}
    argv = [sys.executable, "-c", code, json.dumps(argument)]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=120, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip().split("\n")
