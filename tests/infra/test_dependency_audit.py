"""The audit of `make check`, by the real uv and a service of our own with OSV's routes."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from infra import dependency_audit
from infra.dependency_audit import ENVIRONMENTS, accepted, main, misfits, pins
from infra.errors import InputError
from infra.locations import project_home

ADVISORY = {
    "id": "GHSA-aaaa-bbbb-cccc",
    "aliases": ["CVE-2026-0001"],
    "summary": "it adds wrongly",
    "modified": "2026-01-01T00:00:00Z",
    "affected": [
        {
            "package": {"name": "adder", "ecosystem": "PyPI"},
            "ranges": [{"type": "ECOSYSTEM", "events": [{"introduced": "0"}, {"fixed": "1.1"}]}],
        }
    ],
}


class Service(BaseHTTPRequestHandler):
    """Knows of one vulnerability, in adder 1.0."""

    asked: list[dict[str, Any]]

    def do_POST(self) -> None:
        queries = json.loads(self.rfile.read(int(self.headers["content-length"])))["queries"]
        self.asked += queries
        bad = {"vulns": [{"id": ADVISORY["id"], "modified": ADVISORY["modified"]}]}
        wrong = [one["package"]["name"] == "adder" and one["version"] == "1.0" for one in queries]
        self._answer({"results": [bad if one else {} for one in wrong]})

    def do_GET(self) -> None:
        self._answer(ADVISORY)

    def _answer(self, said: dict[str, Any]) -> None:
        body = json.dumps(said).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def service() -> Iterator[str]:
    Service.asked = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), Service)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    server.server_close()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout's environments, which are not made yet."""
    monkeypatch.setenv("DRAFTSMITH_HOME", str(tmp_path))
    found = tmp_path / "deployments" / "environments"
    found.mkdir(parents=True)
    (found / "pipeline.txt").write_text("# pins\nAdder==1.0\nother.thing==2.0+cpu\n")
    (found / "vllm.txt").write_text("adder==1.1\n")
    (found / "overrides.txt").write_text("torchvision ; sys_platform == 'never'\n")
    (found / "accepted.txt").write_text("# none\n")
    return found


def test_a_known_vulnerability_fails_unless_it_is_accepted(
    folder: Path, service: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--service", service]) == 1
    said = capsys.readouterr()
    assert "pipeline.txt: adder 1.0 has GHSA-aaaa-bbbb-cccc (it adds wrongly), mended in 1.1:" in said.err
    assert "pipeline.txt: 2 pins audited, 1 with a known vulnerability" in said.out
    assert "vllm.txt: 1 pins audited, 0 with" in said.out
    assert [(one["package"]["name"], one["version"]) for one in Service.asked] == [
        ("adder", "1.0"),
        ("other-thing", "2.0"),
        ("adder", "1.1"),
    ]
    for name in ("GHSA-aaaa-bbbb-cccc", "CVE-2026-0001"):
        (folder / "accepted.txt").write_text(f"{name} it is never asked to add\nCVE-2020-1 long ago\n")
        assert main(["--service", service]) == 0
        assert "accepted.txt: CVE-2020-1 is not found any more; take it out" in capsys.readouterr().out


@pytest.mark.seconds
def test_a_service_out_of_reach_is_one_line_and_no_failure(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["--service", "http://127.0.0.1:1/"]) == 0
    said = capsys.readouterr()
    (line,) = [line for line in said.out.splitlines() if "NOTHING WAS AUDITED" in line]
    assert "cannot be reached" in line
    assert said.err == ""
    monkeypatch.setattr(dependency_audit, "_AUDIT", ("audit", "--no-such-flag"))
    assert main(["--service", "http://127.0.0.1:1/"]) == 1, "what is not the service's is a failure"


@pytest.mark.parametrize(
    ("name", "line", "problem"),
    [("pipeline.txt", "adder>=1", "is no pin"), ("accepted.txt", "CVE-2026-0001", "has no reason")],
)
def test_wrong_files_are_refused(
    folder: Path, name: str, line: str, problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / name).write_text(f"{line}\n")
    assert main(["--service", "http://127.0.0.1:1/"]) == 2
    assert f"{name}: " in (said := capsys.readouterr().err)
    assert problem in said


def test_the_projects_own_files_can_be_audited() -> None:
    environments = project_home() / "deployments" / "environments"
    assert all(len(pins(environments / f"{name}.txt")) > 100 for name in ENVIRONMENTS)
    accepted(environments / "accepted.txt")


def test_what_is_left_out_on_purpose_fits() -> None:
    uv = str(Path(sys.executable).with_name("uv"))
    found = misfits(Path(sys.executable), uv, set())
    assert any("requires `torchvision`" in line for line in found), "or this test looks at nothing"
    assert misfits(Path(sys.executable), uv, {"torchvision", "torchaudio", "llama-cpp-python"}) == []


def test_pins_are_known_by_their_normal_names(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("Ruamel.YAML_clib==0.1\n")
    assert pins(tmp_path / "a.txt") == {"ruamel-yaml-clib": "0.1"}
    (tmp_path / "a.txt").write_text("a==1 ; python_version > '3'\n")
    with pytest.raises(InputError, match=r"^a\.txt: "):
        pins(tmp_path / "a.txt")
