"""A real Prefect server with its services, our deployments and automations, and workers as processes of their own.

    with PrefectStack(folder) as stack:
        worker = stack.start_worker("one")
        run = stack.trigger("generate", config)
        run.wait_for("Running")
        worker.kill()

Everything runs under a guard and ends with the test, but a worker's death is only its own: the guard watches a
shell beside it, so the flow process that a killed worker leaves behind goes on, as on a real machine.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
import urllib.request
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import pytest
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId
from prefect.client.schemas.objects import FlowRun, State, TaskRun
from prefect.states import Cancelling

from flows.automations import install
from flows.config import PipelineConfig
from flows.registration import deploy_all, make_pools
from flows.stack import POOLS
from infra import guard
from infra.locations import project_home
from infra.processes import GuardedProcess, descendants, process_token

POOL = "gpu-pool"
STARTUP_SECONDS = 180.0
RUN_VARIABLE = "PREFECT__FLOW_RUN_ID"  # Prefect gives it to a run's process, which its children inherit
FLOW_NAMES = {"smoke": "speculator-pipeline"}  # where they differ from the deployment's
FINAL = ("Completed", "Cached", "Failed", "Crashed", "Cancelled")


class Run:
    """One flow run of a deployment, seen through the API and /proc."""

    def __init__(self, client: SyncPrefectClient, run_id: UUID) -> None:
        self.id = run_id
        self._client = client
        self._began = time.monotonic()

    def read(self) -> FlowRun:
        return self._client.read_flow_run(self.id)

    @property
    def state(self) -> str:
        """The name of its state."""
        return self.read().state_name or ""

    def history(self) -> list[State[Any]]:
        """All states it has been in, oldest first."""
        return sorted(self._client.read_flow_run_states(self.id), key=lambda state: state.timestamp)

    def timeline(self) -> list[str]:
        """Its states as lines: seconds since the first, name, message."""
        states = self.history()
        return [
            f"{(state.timestamp - states[0].timestamp).total_seconds():7.1f} s  {state.name}: {state.message or ''}"
            for state in states
        ]

    def task_runs(self) -> list[TaskRun]:
        return self._client.read_task_runs(flow_run_filter=FlowRunFilter(id=FlowRunFilterId(any_=[self.id])))

    def wait_for(self, *names: str, timeout_seconds: float) -> str:
        """Wait for a state of one of these names; fails when another final state comes first.

        A Crashed run is not final here: it is put back in the queue.
        """
        self.wait_until(lambda: self.state in names, f"state {' or '.join(names)}", timeout_seconds, but=names)
        return self.state

    def wait_until(
        self, reached: Callable[[], bool], what: str, timeout_seconds: float, but: tuple[str, ...] = ()
    ) -> None:
        """Wait for a moment of the run; fails when the run ends before (unless so, by `but`)."""
        deadline = time.monotonic() + timeout_seconds
        while not reached():
            state = self.state
            ended = state in FINAL and state != "Crashed" and state not in but
            if (ended and not reached()) or time.monotonic() > deadline:
                raise AssertionError(f"{what} did not come; the run's states:\n" + "\n".join(self.timeline()))
            time.sleep(0.25)

    def cancel(self) -> None:
        """Ask for its end, as the UI's button does."""
        self._client.set_flow_run_state(self.id, Cancelling())

    def processes(self) -> dict[int, str]:
        """Every live process of the run, whoever its parent is now: pid -> command line."""
        entry = f"{RUN_VARIABLE}={self.id}".encode()
        found = {pid for pid in guard.all_pids() if entry in _read(pid, "environ").split(b"\0")}
        for pid in list(found):
            found.update(descendants(pid))
        return {pid: name for pid in found if (name := command_line(pid))}

    def flow_pids(self) -> list[int]:
        """The processes that execute the flow: one, or two where a copy was taken for dead."""
        return [pid for pid, name in self.processes().items() if name.endswith("-m prefect.engine")]

    def left_alive(self, within_seconds: float) -> dict[int, str]:
        """Its processes that still live after that time at most, those that began meanwhile included."""
        deadline = time.monotonic() + within_seconds
        while (alive := self.processes()) and time.monotonic() < deadline:
            time.sleep(0.1)
        return alive

    def processes_with(self, programs: tuple[str, ...], timeout_seconds: float) -> dict[int, str]:
        """Its processes, as soon as one of each program is among them: a server may just be starting anew.

        Args:
            programs: parts of command lines.
        """
        found: dict[int, str] = {}

        def all_there() -> bool:
            found.clear()
            found.update(self.processes())
            return all(any(program in name for name in found.values()) for program in programs)

        self.wait_until(all_there, f"{' and '.join(programs)} among its processes", timeout_seconds)
        return found

    def ports(self) -> set[int]:
        """TCP ports that its processes listen on."""
        listening = _listening_sockets()
        return {port for pid in self.processes() for inode in _socket_inodes(pid) if (port := listening.get(inode))}


@dataclass
class Worker:
    """A Prefect worker; its flow processes are its children while it lives, and orphans afterwards."""

    name: str
    log_path: Path
    process: GuardedProcess

    @property
    def pid(self) -> int:
        """Of the worker itself."""
        return next(
            pid for pid in descendants(self.process.pid) if f"--name {self.name}" in command_line(pid, "-m prefect")
        )

    def alive(self) -> bool:
        return any(command_line(pid, "-m prefect worker") for pid in descendants(self.process.pid))

    def runs(self, run: Run) -> bool:
        """Whether it is this worker that executes the run."""
        return bool(set(run.flow_pids()) & set(descendants(self.process.pid)))

    def kill(self) -> None:
        """SIGKILL the worker alone."""
        os.kill(self.pid, signal.SIGKILL)

    def stop(self) -> None:
        """End the worker and all that it started."""
        self.process.stop()

    @property
    def log(self) -> str:
        return self.log_path.read_text(errors="replace")


@dataclass
class PrefectStack:
    """The server and what is registered there, from entering the context to leaving it."""

    folder: Path
    environment: Mapping[str, str] = field(default_factory=dict)
    """More variables for the workers, and so for the flows."""
    auth: str = ""
    """What the server asks everybody for, as user:password; nothing by default."""
    workers: list[Worker] = field(default_factory=list)

    def __enter__(self) -> PrefectStack:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = int(probe.getsockname()[1])
        self.url = f"http://127.0.0.1:{port}/api"
        self.token = process_token("prefect-stack", uuid4().hex)
        self._variables = {
            "PREFECT_HOME": str(self.folder / "prefect"),
            "PREFECT_API_URL": self.url,
            "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
            "PREFECT_WORKER_QUERY_SECONDS": "2",
            **({"PREFECT_API_AUTH_STRING": self.auth} if self.auth else {}),
        }
        asks = {"PREFECT_SERVER_API_AUTH_STRING": self.auth} if self.auth else {}
        server = [sys.executable, "-m", "prefect", "server", "start", "--host", "127.0.0.1", "--port", str(port)]
        self.server = GuardedProcess.start(
            server, token=self.token, log_path=self.folder / "server.log", env={**self._variables, **asks}
        )
        try:
            self._wait_until_healthy()
            self.client = SyncPrefectClient(self.url, auth_string=self.auth or None)
            self.client.__enter__()
            self._register()
        except BaseException:
            self.server.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self.workers:
            worker.stop()
        self.client.__exit__(None, None, None)
        self.server.stop()

    def install_automations(self) -> list[dict[str, str]]:
        """What `draftsmith automations` does."""
        names = ("PREFECT_API_URL", "PREFECT_API_AUTH_STRING")
        with pytest.MonkeyPatch.context() as patch:
            for name in names:
                patch.delenv(name, raising=False)
                if name in self._variables:
                    patch.setenv(name, self._variables[name])
            return install()

    def deploy_again(self) -> None:
        """What `prefect --no-prompt deploy --all` does."""
        deploy_all(self._variables)

    def start_worker(
        self,
        name: str,
        *,
        limit: int | None = None,
        environment: Mapping[str, str] | None = None,
        pool: str = POOL,
    ) -> Worker:
        """Start a worker and wait until the server knows it.

        Args:
            limit: runs that it executes at once; any number by default.
            environment: variables of this worker only.
        """
        command = [sys.executable, "-m", "prefect", "worker", "start", "--pool", pool, "--name", name]
        command += ["--limit", str(limit)] if limit else []
        log_path = self.folder / f"worker-{name}.log"
        variables = {
            **self._variables,
            "DRAFTSMITH_HOME": str(project_home()),
            **self.environment,
            **(environment or {}),
        }
        process = GuardedProcess.start(
            ["sh", "-c", '"$@" & exec sleep infinity', "sh", *command],
            token=self.token,
            log_path=log_path,
            env=variables,
        )
        worker = Worker(name, log_path, process)
        self.workers.append(worker)
        deadline = time.monotonic() + STARTUP_SECONDS
        while name not in {known.name for known in self.client.read_workers_for_work_pool(pool)}:
            assert time.monotonic() < deadline, f"worker {name} did not start:\n{worker.log[-3000:]}"
            time.sleep(0.5)
        return worker

    def stop_workers(self) -> None:
        """End all workers and what they run; the server goes on."""
        while self.workers:
            self.workers.pop().stop()

    def trigger(self, deployment: str, config: PipelineConfig, **parameters: Any) -> Run:
        """Start a run of a deployment of prefect.yaml with this config."""
        found = self.client.read_deployment_by_name(f"{FLOW_NAMES.get(deployment, deployment)}/{deployment}")
        parameters = {"config": config.model_dump(mode="json"), **parameters}
        run = self.client.create_flow_run_from_deployment(found.id, parameters=parameters)
        return Run(self.client, run.id)

    def limit_deployment(self, deployment: str, limit: int) -> str:
        """Give a deployment a concurrency limit; returns the name of the server's limit."""
        found = self.client.read_deployment_by_name(f"{FLOW_NAMES.get(deployment, deployment)}/{deployment}")
        answer = self.client._client.patch(f"/deployments/{found.id}", json={"concurrency_limit": limit})
        answer.raise_for_status()
        return f"deployment:{found.id}"

    def active_slots(self, limit_name: str) -> int:
        """Slots of a limit that are held."""
        return self.client.read_global_concurrency_limit_by_name(limit_name).active_slots

    def _register(self) -> None:
        make_pools(self.client, POOLS)
        self.deploy_again()
        self.install_automations()

    def _wait_until_healthy(self) -> None:
        deadline = time.monotonic() + STARTUP_SECONDS
        while True:
            try:
                with urllib.request.urlopen(f"{self.url}/health", timeout=5):
                    return
            except OSError:
                log = (self.folder / "server.log").read_text(errors="replace")
                assert self.server.poll() is None, log[-3000:]
                assert time.monotonic() < deadline, log[-3000:]
                time.sleep(0.2)


def command_line(pid: int, containing: str = "") -> str:
    """Command line of a live process; "" where there is none (a zombie has ended), or one without that text."""
    try:
        ended = guard.process_state(pid)[0] in "ZX"
    except OSError:
        return ""
    line = _read(pid, "cmdline").replace(b"\0", b" ").decode(errors="replace").strip()
    return line if not ended and containing in line else ""


def left_alive(pids: Mapping[int, str], within_seconds: float) -> dict[int, str]:
    """Those of the processes that still live after that time at most."""
    deadline = time.monotonic() + within_seconds
    while True:
        alive = {pid: name for pid, name in pids.items() if command_line(pid) == name}
        if not alive or time.monotonic() > deadline:
            return alive
        time.sleep(0.1)


def left_open(ports: set[int], within_seconds: float) -> set[int]:
    """Those of the ports that something still listens on after that time at most.

    A process that ends gives its memory back, and is no longer found, before it closes its sockets.
    """
    deadline = time.monotonic() + within_seconds
    while (found := ports & set(_listening_sockets().values())) and time.monotonic() < deadline:
        time.sleep(0.1)
    return found


def _listening_sockets() -> dict[int, int]:
    """Inode -> port of every listening TCP socket."""
    found: dict[int, int] = {}
    for name in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
            parts = line.split()
            if parts[3] == "0A":  # TCP_LISTEN
                found[int(parts[9])] = int(parts[1].rpartition(":")[2], 16)
    return found


def _socket_inodes(pid: int) -> set[int]:
    found = set()
    with suppress(OSError):
        for path in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):  # closed since it was listed
                name = os.readlink(path)
                if name.startswith("socket:["):
                    found.add(int(name[8:-1]))
    return found


def _read(pid: int, name: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:
        return b""
