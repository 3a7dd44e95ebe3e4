"""What several test files share: a real S3 server, and roots to write to."""

from __future__ import annotations

import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from infra.local_s3 import LocalS3
from infra.stores.s3_client import VARIABLES


@pytest.fixture(autouse=True)
def as_processes_begin() -> Iterator[None]:
    """A trainer that runs in the tests' own process has it take the smallest numbers for zero; undone after it."""
    yield
    if "torch" in sys.modules:
        sys.modules["torch"].set_flush_denormal(False)


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalS3]:
    """One SeaweedFS server for the session; tests that stop it start one of their own."""
    with LocalS3(tmp_path_factory.mktemp("s3")) as server:
        yield server


@pytest.fixture
def s3_environment(s3_server: LocalS3, monkeypatch: pytest.MonkeyPatch) -> LocalS3:
    """The server, with its keys and endpoint in this process's environment, for this test only."""
    use_server(s3_server, monkeypatch)
    return s3_server


@pytest.fixture
def s3_root(s3_environment: LocalS3) -> str:
    """A root of this test's own on the server."""
    return f"{s3_environment.root}/{uuid.uuid4().hex[:12]}"


@pytest.fixture(params=["folder", pytest.param("s3", marks=pytest.mark.s3)])
def any_root(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A root of this test's own, once in a folder and once on the server."""
    return str(tmp_path / "root") if request.param == "folder" else str(request.getfixturevalue("s3_root"))


def use_server(server: LocalS3, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)


REPORT_LINES = pytest.StashKey[list[str]]()


@pytest.fixture
def report_line(request: pytest.FixtureRequest) -> Callable[[str], None]:
    """Add a line to the table at the end of the test run."""
    return request.config.stash.setdefault(REPORT_LINES, []).append


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if lines := config.stash.get(REPORT_LINES, []):
        terminalreporter.section("what was killed, lost and recovered")
        for line in lines:
            terminalreporter.write_line(line)
