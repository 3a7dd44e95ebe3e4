"""Everything that a Prefect deployment needs, on this machine: `make stack` and `make stack-down`.

    .venv/bin/python -m flows.stack up [--folder DIR] [--port PORT]
    .venv/bin/python -m flows.stack down [--folder DIR] [--keep-data]

`up` leaves one process behind (`serve`), under whose guards run a database (PostgreSQL where it is installed,
else SQLite), the Prefect server, a SeaweedFS S3 server and a worker for each work pool. They end with it, however
it ends.
`down` ends it and deletes what it kept.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import logging
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from infra import guard
from infra.errors import DraftsmithError, InfrastructureError, InputError
from infra.local_postgres import LocalPostgres, installed
from infra.local_s3 import LocalS3, kept_secret
from infra.locations import cache_folder, project_home, write_private
from infra.logs import log_tail
from infra.processes import GuardedProcess, end_stale, process_token
from infra.redaction import redact_logs

logger = logging.getLogger("draftsmith.stack")

HOST, USUAL_PORT = "127.0.0.1", 4200
START_SECONDS = 600.0
END_SECONDS = 120.0
STATE = "stack.json"
# Runs that this machine's worker of a pool executes at once.
POOLS = {"gpu-pool": 1, "light-pool": 4}
BLOCK = "draftsmith-s3"
# They would make the stack's own programs speak to another server, or as somebody else.
FOREIGN = (
    *("PREFECT_API_URL", "PREFECT_API_KEY", "PREFECT_API_AUTH_STRING"),
    *("PREFECT_API_DATABASE_CONNECTION_URL", "PREFECT_PROFILE"),
)


class Stack:
    """One stack, known by its folder.

    Args:
        folder: of everything it keeps, but for PostgreSQL's files; made if absent.
        port: of the Prefect server; by default 4200, or a free one where that is taken; 0 is any free one.
    """

    def __init__(self, folder: Path, port: int | None = None) -> None:
        self.folder = folder.absolute()
        self.port = port
        self.token = process_token("stack", str(self.folder))
        self.log = self.folder / "stack.log"

    def state(self) -> dict[str, Any] | None:
        """What the running stack has written about itself; None where none runs."""
        try:
            found: dict[str, Any] = json.loads((self.folder / STATE).read_text())
        except (OSError, ValueError):
            return None
        return found if guard.runs_since(found["pid"], found["started"]) else None

    def up(self) -> dict[str, Any]:
        """Start it, unless it runs already, and return its state once everything answers.

        Raises:
            InputError: the folder holds something else.
            InfrastructureError: a part did not start; nothing is left running.
        """
        if self.folder.is_dir() and any(self.folder.iterdir()) and not (self.folder / STATE).exists():
            raise InputError("--folder", f"{self.folder} holds files that are no stack's; name another folder")
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        offset = self.log.stat().st_size if self.log.exists() else 0
        serving = self._start_serving() if self.state() is None else None  # else another `up` is waited for
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            if (state := self.state()) is not None and state["ready"]:
                return state
            if state is None and (serving is None or serving.poll() is not None):
                raise InfrastructureError(
                    f"the stack did not start: {' | '.join(log_tail(self.log, offset=offset))}"
                )
            time.sleep(0.2)
        self.end()
        raise InfrastructureError(f"the stack was not ready in {START_SECONDS:.0f} s; see {self.log}")

    def _start_serving(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "flows.stack", "serve", "--folder", str(self.folder)]
        command += ["--port", str(self.port)] if self.port is not None else []
        environment = {name: value for name, value in os.environ.items() if name not in FOREIGN}
        quiet: Any = {"env": environment, "stdin": subprocess.DEVNULL, "start_new_session": True}
        with self.log.open("ab") as log:
            return subprocess.Popen(command, cwd=project_home(), stdout=log, stderr=log, **quiet)

    def end(self) -> bool:
        """End every process of it; returns whether there were any."""
        state = self.state()
        if state is not None:
            guard.send(state["pid"], signal.SIGTERM)
            deadline = time.monotonic() + END_SECONDS
            while guard.runs_since(state["pid"], state["started"]) and time.monotonic() < deadline:
                time.sleep(0.1)
        return bool(end_stale(self.token)) or state is not None

    def remove(self) -> bool:
        """Delete what it kept: database, history, objects of its S3 server, logs. Returns whether there was any."""
        if not (self.folder / STATE).exists():
            return False
        LocalPostgres(self.token, Path()).remove()
        shutil.rmtree(self.folder)
        return True

    def serve(self) -> None:
        """Run everything until TERM, or until one part ends by itself.

        Raises:
            DraftsmithError: a part did not start, or has ended.
        """
        with (self.folder / "lock").open("a") as lock, contextlib.ExitStack() as parts:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise InfrastructureError("another start of it is under way; wait for that one") from None
            end_stale(self.token)
            port = self.port or _free_port(USUAL_PORT if self.port is None else 0)
            auth = os.environ.get("PREFECT_SERVER_API_AUTH_STRING") or f"draftsmith:{secrets.token_hex(16)}"
            state: dict[str, Any] = {
                "pid": os.getpid(),
                "started": guard.process_start(os.getpid()),
                "ready": False,
            }
            state |= {"url": f"http://{HOST}:{port}/api", "auth_string": auth}
            self._write(state)
            variables = self._variables(state)
            database, postgres = "SQLite", None
            if programs := installed():
                database = "PostgreSQL"
                postgres = parts.enter_context(LocalPostgres(self.token, programs))
                variables["PREFECT_API_DATABASE_CONNECTION_URL"] = postgres.url
            s3 = parts.enter_context(
                LocalS3(self.folder / "s3", access_key="draftsmith", secret_key=kept_secret(self.folder / "s3"))
            )
            server = parts.enter_context(
                self._start_server(port, {**variables, "PREFECT_SERVER_API_AUTH_STRING": auth})
            )
            _wait_until_healthy(state["url"], server, self.folder / "server.log")
            self._register(variables, s3)
            workers = {pool: parts.enter_context(self._start_worker(pool, variables)) for pool in POOLS}
            for pool, worker in workers.items():
                self._wait_until_known(pool, worker)
            self._write(state | {"ready": True, "database": database, "s3_root": s3.root, "workers": list(workers)})
            running = {"the Prefect server": server, "the S3 server": s3}
            running |= {f"the worker of {pool}": worker for pool, worker in workers.items()}
            running |= {"PostgreSQL": postgres} if postgres else {}
            _wait_for_an_end(running)

    def _variables(self, state: Mapping[str, Any]) -> dict[str, str]:
        """What every program of the stack, and every run, has in its environment."""
        return {
            "PREFECT_HOME": str(self.folder / "prefect"),
            "PREFECT_API_URL": state["url"],
            "PREFECT_API_AUTH_STRING": state["auth_string"],
            "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        }

    def _start_server(self, port: int, variables: Mapping[str, str]) -> GuardedProcess:
        argv = [sys.executable, "-m", "prefect", "server", "start", "--host", HOST, "--port", str(port)]
        env = {**variables, "PREFECT_SERVER_UI_API_URL": variables["PREFECT_API_URL"]}
        return GuardedProcess.start(argv, token=self.token, log_path=self.folder / "server.log", env=env)

    def _start_worker(self, pool: str, variables: Mapping[str, str]) -> GuardedProcess:
        argv = [sys.executable, "-m", "prefect", "worker", "start", "--pool", pool, "--name", f"{pool}-here"]
        argv += ["--limit", str(POOLS[pool])]
        env = {**variables, "DRAFTSMITH_HOME": str(project_home()), "PREFECT_WORKER_QUERY_SECONDS": "5"}
        log = self.folder / f"worker-{pool}.log"
        return GuardedProcess.start(argv, token=self.token, log_path=log, env=env)

    def _wait_until_known(self, pool: str, worker: GuardedProcess) -> None:
        """Return when the server has heard of the pool's worker."""
        from prefect.client.orchestration import get_client

        deadline = time.monotonic() + START_SECONDS
        with get_client(sync_client=True) as client:
            while not client.read_workers_for_work_pool(pool):
                if worker.poll() is not None or time.monotonic() > deadline:
                    told = " | ".join(log_tail(self.folder / f"worker-{pool}.log"))
                    raise InfrastructureError(f"the worker of {pool} did not start: {told}")
                time.sleep(0.5)

    def _register(self, variables: Mapping[str, str], s3: LocalS3) -> None:
        """Work pools, the block of the S3 server's keys, automations and deployments; all may be there already."""
        os.environ.update(variables)
        from prefect.client.orchestration import get_client

        from flows.automations import install
        from flows.registration import deploy_all, make_pools, save_block

        with get_client(sync_client=True) as client:
            make_pools(client, POOLS)
        save_block(BLOCK, s3.environment)
        deploy_all(variables)
        for automation in install():
            logger.info("automation %s: %s", automation["name"], automation["done"])

    def _write(self, state: Mapping[str, Any]) -> None:
        write_private(self.folder / STATE, json.dumps(state))


def _free_port(wanted: int) -> int:
    for port in (wanted, 0):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((HOST, port))
            return int(probe.getsockname()[1])
    raise InfrastructureError(f"no port of {HOST} is free")


def _wait_until_healthy(url: str, server: GuardedProcess, log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and server.poll() is None:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/health", timeout=5):
            return
        time.sleep(0.2)
    raise InfrastructureError(f"the Prefect server did not start: {' | '.join(log_tail(log))}")


def _wait_for_an_end(parts: Mapping[str, Any]) -> None:
    while True:
        for name, part in parts.items():
            if (code := part.poll()) is not None:
                raise InfrastructureError(f"{name} has ended with {code}; the stack ends")
        time.sleep(0.5)


def _tell(state: Mapping[str, Any]) -> Iterator[str]:
    yield f"Prefect's UI: {state['url'].removesuffix('/api')}    password: {state['auth_string']}"
    yield f"export PREFECT_API_URL={state['url']} PREFECT_API_AUTH_STRING={state['auth_string']}"
    yield f"# Database: {state['database']}. Workers: {', '.join(state['workers'])}."
    yield f"# S3: root: {state['s3_root']}/ANY-PREFIX with credentials_block: {BLOCK}."
    yield "# `make stack-down` ends all this and deletes its history and its objects."


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit codes: 0 done, 1 a part failed, 2 wrong input."""
    parser = argparse.ArgumentParser(prog="python -m flows.stack", description=__doc__.partition("\n")[0])
    parser.add_argument("command", choices=("up", "down", "serve"))
    parser.add_argument("--folder", type=Path, default=cache_folder() / "stack", help="what it keeps")
    parser.add_argument("--port", type=int, help="of the Prefect server")
    parser.add_argument("--keep-data", action="store_true", help="down: keep history and objects for the next `up`")
    options = parser.parse_args(arguments)
    stack = Stack(options.folder, options.port)
    try:
        match options.command:
            case "up":
                print("\n".join(_tell(stack.up())))
            case "down":
                ended = stack.end()
                removed = not options.keep_data and stack.remove()
                print(f"stack: ended={ended} removed={removed}")
            case "serve":
                redact_logs()
                logging.basicConfig(level=logging.WARNING)
                logging.getLogger("draftsmith").setLevel(logging.INFO)
                signal.signal(signal.SIGTERM, signal.default_int_handler)
                stack.serve()
    except KeyboardInterrupt:
        return 0
    except DraftsmithError as error:
        print(f"stack: {error}", file=sys.stderr)
        return 2 if isinstance(error, InputError) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
