"""A Prefect server of our own for `draftsmith run`, when no PREFECT_API_URL names another.

It runs under the guard, so that it ends with this process however that ends; Prefect's own temporary server
outlives a killed parent. Its database stays in the cache folder: earlier runs remain visible in its UI. It listens
on the loopback interface and asks for a password, which stays in a file beside the database.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import secrets
import socket
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from infra.errors import InfrastructureError
from infra.locations import cache_folder, write_private
from infra.processes import GuardedProcess, log_tail, process_token

logger = logging.getLogger("draftsmith.prefect")

STARTUP_TIMEOUT_SECONDS = 180
# Logs of ours that the UI shall show beside Prefect's.
EXTRA_LOGGERS = "draftsmith"
PASSWORD_FILE = "password"
SERVER_AUTH, CLIENT_AUTH = "PREFECT_SERVER_API_AUTH_STRING", "PREFECT_API_AUTH_STRING"


@contextlib.contextmanager
def prefect_api(*, services: bool = False, meanwhile: Callable[[], object] = lambda: None) -> Iterator[str]:
    """Make PREFECT_API_URL name a server that answers, and yield it. Call before Prefect is imported.

    The server of our own asks for PREFECT_SERVER_API_AUTH_STRING, or, where that is not set, for a password of its
    own; PREFECT_API_AUTH_STRING then holds it.

    Args:
        services: start the server's schedulers and automations too, which one run of ours has no use for.
        meanwhile: called while the server starts, when its address is known and it does not answer yet.

    Raises:
        InfrastructureError: the embedded server did not come up.
    """
    os.environ.setdefault("PREFECT_LOGGING_EXTRA_LOGGERS", EXTRA_LOGGERS)
    os.environ.setdefault("PREFECT_SERVER_ANALYTICS_ENABLED", "false")
    if url := os.environ.get("PREFECT_API_URL"):
        yield url
        return
    home = Path(os.environ.setdefault("PREFECT_HOME", str(cache_folder() / "prefect")))
    port = _free_port()
    url = f"http://127.0.0.1:{port}/api"
    log = home / "server.log"
    command = [sys.executable, "-m", "prefect", "server", "start", *([] if services else ["--no-services"])]
    command += ["--host", "127.0.0.1", "--port", str(port)]
    auth = os.environ.get(SERVER_AUTH) or _password(home)
    # The pages would otherwise ask the default port, where nobody listens.
    env = {"PREFECT_SERVER_UI_API_URL": url, SERVER_AUTH: auth}
    token = process_token("prefect", str(home))
    with contextlib.ExitStack() as stack:
        with _alone(home):
            server = stack.enter_context(GuardedProcess.start(command, token=token, env=env, log_path=log))
            stack.enter_context(_environment({"PREFECT_API_URL": url, CLIENT_AUTH: auth}))
            meanwhile()
            _wait_until_healthy(url, server, log)
        where = SERVER_AUTH if os.environ.get(SERVER_AUTH) else home / PASSWORD_FILE
        logger.info(
            "Prefect's UI for this run: http://127.0.0.1:%d (password: in %s; ends with the run).", port, where
        )
        yield url


@contextlib.contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """These variables set, and as they were afterwards."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextlib.contextmanager
def _alone(home: Path) -> Iterator[None]:
    """One start at a time: two servers that bring the same new database into shape break each other's work."""
    home.mkdir(mode=0o700, parents=True, exist_ok=True)
    with (home / "start.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _password(home: Path) -> str:
    """What this user's servers ask for: the same at each start, so that a browser that knows it goes on."""
    with _alone(home):
        path = home / PASSWORD_FILE
        if not path.exists():
            write_private(path, f"draftsmith:{secrets.token_hex(16)}")
        return path.read_text()


def _wait_until_healthy(url: str, server: GuardedProcess, log: Path) -> None:
    deadline = time.monotonic() + STARTUP_TIMEOUT_SECONDS
    while time.monotonic() < deadline:
        if server.poll() is not None:
            break
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/health", timeout=5) as answer:
            if answer.status == 200:
                return
        time.sleep(0.2)
    tail = " | ".join(log_tail(log, offset=server.log_offset))
    raise InfrastructureError(f"the embedded Prefect server did not start; {log} ends with: {tail}")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
