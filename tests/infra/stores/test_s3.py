"""S3 as it really is: wrong keys, no bucket, nobody there, an outage, a forked child, and bounded memory."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from infra import storage
from infra.errors import InputError, StorageError
from infra.local_s3 import LocalS3, free_ports
from infra.stores import s3 as storage_s3
from infra.stores import s3_client as storage_s3_client
from tests.conftest import use_server

pytestmark = pytest.mark.s3

AT_ONCE_SECONDS = storage_s3_client.RETRY_SECONDS / 4  # of some calls in a row; what is tried again takes longer
LARGE_BYTES = 400 * 2**20
MAX_GROWTH_BYTES = 220 * 2**20  # four parts of 16 MiB, their copies in the client, and what the allocator keeps


def one_line(error: BaseException) -> str:
    assert "\n" not in str(error)
    return str(error)


@pytest.mark.parametrize("name", ["AWS_SECRET_ACCESS_KEY", "AWS_ACCESS_KEY_ID"])
def test_a_wrong_key_is_told_at_once(
    s3_root: str, s3_environment: LocalS3, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv(name, "wrong-one")
    began = time.monotonic()
    for call in (storage.check_root, storage.get, storage.list_sizes):
        with pytest.raises(InputError, match=r"^root: access to .* is refused") as caught:
            call(storage.join(s3_root, "x"))
        line = one_line(caught.value)
        assert "AWS_SECRET_ACCESS_KEY" in line
        assert s3_environment.secret_key not in line
        assert "wrong-one" not in line
    assert time.monotonic() - began < AT_ONCE_SECONDS


def test_no_credentials_are_told_at_once(s3_root: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("AWS_SECRET_ACCESS_KEY", "AWS_ACCESS_KEY_ID"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    with pytest.raises(InputError, match=r"^root: there are no credentials"):
        storage.check_root(s3_root)


def test_a_missing_bucket_is_told_at_once(s3_environment: LocalS3) -> None:
    began = time.monotonic()
    for call in (storage.check_root, storage.get, storage.list_sizes, lambda uri: storage.put(uri, b"1")):
        with pytest.raises(InputError, match=r"^root: the bucket of .* does not exist"):
            call("s3://no-such-bucket/a")
    assert time.monotonic() - began < AT_ONCE_SECONDS


def test_an_endpoint_that_nobody_serves_is_told_soon(s3_root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{free_ports(1)[0]}")
    began = time.monotonic()
    with pytest.raises(StorageError, match="Could not connect to the endpoint URL") as caught:
        storage.check_root(s3_root, limit_seconds=2.0)
    one_line(caught.value)
    assert time.monotonic() - began < AT_ONCE_SECONDS


def test_an_endpoint_without_a_scheme_is_wrong_input(s3_root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "localhost:8333")
    with pytest.raises(InputError, match=r"^AWS_ENDPOINT_URL: "):
        storage.check_root(s3_root)


def test_many_small_objects_are_read_alike_with_and_without_the_client(
    s3_root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    bodies = {f"{s3_root}/a b+ü%41/{number}": b"x" * number for number in range(8)}
    for uri, body in bodies.items():
        storage.put(uri, body)
    for many in (1, 100):
        monkeypatch.setattr(storage_s3, "MANY", many)
        assert storage.get_many([*bodies, f"{s3_root}/absent"]) == bodies
    monkeypatch.setattr(storage_s3, "MANY", 1)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong-one")
    with pytest.raises(InputError, match="is refused"):
        storage.get_many(bodies)


def test_a_forked_child_has_a_client_of_its_own(s3_root: str) -> None:
    storage.put(storage.join(s3_root, "parent"), b"parent")
    child = os.fork()
    if child == 0:
        try:
            found = storage.get(storage.join(s3_root, "parent"))
            storage.put(storage.join(s3_root, "child"), found)
        finally:
            os._exit(0)
    deadline = time.monotonic() + 30
    while os.waitpid(child, os.WNOHANG) == (0, 0):
        if time.monotonic() > deadline:
            os.kill(child, 9)
        time.sleep(0.05)
    assert storage.get(storage.join(s3_root, "child")) == b"parent"


def test_an_outage_of_fifteen_seconds_is_outlasted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with LocalS3(tmp_path / "s3") as server:
        use_server(server, monkeypatch)
        body = os.urandom(48 * 2**20)
        storage.put(f"{server.root}/large", body)
        storage.put(f"{server.root}/lease", b"0")
        failures: list[BaseException] = []
        rounds = {"put": 0, "read": 0, "lease": 0}
        ending = threading.Event()

        def work(name: str) -> None:
            try:
                while not ending.is_set():
                    uri = f"{server.root}/{name}-{rounds[name]}"
                    if name == "put":
                        assert storage.create(uri, body[: 20 * 2**20])
                        assert storage.size(uri) == 20 * 2**20
                    elif name == "read":
                        storage.get_file(f"{server.root}/large", tmp_path / "large")
                        assert (tmp_path / "large").read_bytes() == body
                        storage.list_sizes(server.root)
                    else:
                        count = rounds[name]
                        assert storage.compare_and_set(f"{server.root}/lease", b"%d" % (count + 1), b"%d" % count)
                    rounds[name] += 1
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=work, args=(name,)) for name in rounds]
        for thread in threads:
            thread.start()
        time.sleep(1.5)
        server.stop(grace_seconds=0)
        before = dict(rounds)
        time.sleep(15)
        server.start()
        deadline = time.monotonic() + 240
        while any(rounds[name] < before[name] + 2 for name in rounds) and not failures:
            assert time.monotonic() < deadline, f"did not go on: {before} {rounds}"
            time.sleep(0.1)
        ending.set()
        for thread in threads:
            thread.join()
        assert failures == []


PROGRAM = """
import pathlib, sys
from infra import storage
from infra.stores import s3 as storage_s3
from infra.stores import s3_client as storage_s3_client
uri, folder, step = sys.argv[1], pathlib.Path(sys.argv[2]), sys.argv[3]
large, back = folder / "large.bin", folder / "back.bin"
def peak_bytes():
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("VmHWM"))
storage.put(uri + ".small", b"warm")
before = peak_bytes()
if step == "create in one request":
    assert storage.create_file(uri, large)
elif step == "put in parts":
    storage_s3.ONE_REQUEST_BYTES = 2**20
    storage.put_file(uri, large)
else:
    storage.get_file(uri, back)
    assert storage.sha256(uri) == storage.sha256(str(large)) == storage.sha256(str(back))
print(peak_bytes() - before)
"""


def test_memory_is_bounded_whatever_the_size(s3_root: str, tmp_path: Path) -> None:
    with (tmp_path / "large.bin").open("wb") as file:
        for _ in range(LARGE_BYTES // 2**20):
            file.write(os.urandom(2**20))
    for step in ("create in one request", "put in parts", "get"):
        argv = [sys.executable, "-c", PROGRAM, f"{s3_root}/large.bin", str(tmp_path), step]
        grown = int(subprocess.run(argv, check=True, capture_output=True, text=True, timeout=300).stdout)
        print(f"{step}: {grown / 2**20:.0f} MiB above the start for {LARGE_BYTES / 2**20:.0f} MiB")
        assert 0 < grown < MAX_GROWTH_BYTES, step
