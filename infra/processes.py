"""Children that never outlive their parent, however it ends.

Every long-lived child (a vLLM server, an extraction engine, torchrun, the embedded Prefect server) runs under a
small guard process (`infra/guard.py`):

    parent (ours) ── pipe, whose only write end is ours ──> guard (subreaper, own session) ──> child ──> ...

The guard ends the child and ALL its descendants when the parent is gone, SIGKILL included, when it is asked to, and
when the child exits by itself and leaves others behind; all of it within 15 s.

If the guard itself is killed, the kernel kills the child and the parent ends the rest, which it knows by a mark in
their environment; if the parent was killed with it, the next run does so through `end_stale`. That spares what a
living process has started: two pipelines may use one root on one machine.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from types import TracebackType
from typing import IO

from infra import guard
from infra.errors import InputError
from infra.guard import DEFAULT_GRACE_SECONDS, POLL_SECONDS, descendants
from infra.logs import log_tail

TOKEN_VARIABLE = "DRAFTSMITH_TOKEN"  # which piece of work a process belongs to; the same in every run of it
MARK_VARIABLE = "DRAFTSMITH_GUARD"  # which guard a process belongs to; new at each start
STARTER_VARIABLE = "DRAFTSMITH_STARTER"  # who started the guard: "<pid>:<when it started, in clock ticks>"
SWEEP_SECONDS = DEFAULT_GRACE_SECONDS + 2.0  # how long a stale process, or its guard, may take to end on TERM

__all__ = ["GuardedProcess", "descendants", "end_stale", "living", "log_tail", "process_token"]

logger = logging.getLogger("draftsmith.processes")


class GuardedProcess:
    """A child that, with all its descendants, ends when this process does. Use it as a context manager.

    Safe to start, poll and stop from any thread. Its output goes to a log file, never to our own: an orphan that
    holds our stdout would keep whoever reads it waiting. An object that is dropped ends its child.
    """

    def __init__(
        self, process: subprocess.Popen[bytes], lifeline: IO[bytes], mark: str, name: str, log_offset: int
    ) -> None:
        self._guard = process
        self._lifeline = lifeline  # the pipe's write end; the guard acts when it closes
        self._mark = mark
        self._name = name
        self._lock = threading.Lock()
        self._swept = False
        self.log_offset = log_offset  # bytes: where this child's output begins in the log, which is appended to

    @classmethod
    def start(
        cls,
        argv: Sequence[str],
        *,
        token: str,
        log_path: str | os.PathLike[str],
        env: Mapping[str, str] | None = None,
        withhold: Collection[str] = (),
        stdin_pipe: bool = False,
        stdout_pipe: bool = False,
        cwd: str | os.PathLike[str] | None = None,
    ) -> GuardedProcess:
        """Start `argv` under a guard.

        Args:
            argv: the command. One that cannot be executed exits with 127 and says why in the log.
            token: which piece of work this is (`process_token`); the next run finds what was left by it.
            log_path: file that stderr (and stdout, without `stdout_pipe`) is appended to, for this user alone; its
                folder is made.
            env: variables to add to this process's own; secrets belong here, never in `argv`.
            withhold: variables of this process's that the child does not get (`infra.redaction.withheld`).
            stdin_pipe: give the child a pipe as stdin, at `.stdin`; otherwise its stdin is empty.
            stdout_pipe: read the child's stdout at `.stdout`; otherwise it goes to the log.
            cwd: working folder of the child.
        Raises:
            InputError: this is not Linux.
            OSError: the guard could not be started (no memory, no file descriptors).
        """
        _require_linux()
        mark = os.urandom(8).hex()
        starter = f"{os.getpid()}:{guard.process_start(os.getpid())}"
        added = {
            **(env or {}),
            TOKEN_VARIABLE: token,
            MARK_VARIABLE: mark,
            STARTER_VARIABLE: starter,
            "SPT_NOENV": "1",
        }
        log_path = os.path.abspath(log_path)
        os.makedirs(os.path.dirname(log_path), mode=0o700, exist_ok=True)
        kept = {name: value for name, value in os.environ.items() if name not in withhold}
        # Neither end is inherited by anything else that this process starts: os.pipe sets O_CLOEXEC.
        read_end, write_end = os.pipe()
        lifeline = os.fdopen(write_end, "wb", buffering=0)
        try:
            with open(log_path, "ab", opener=_private) as log:
                log_offset = log.tell()
                process = subprocess.Popen(
                    [*_guard_command(read_end), "--", *argv],
                    env={**kept, **added},
                    stdin=subprocess.PIPE if stdin_pipe else subprocess.DEVNULL,
                    stdout=subprocess.PIPE if stdout_pipe else log,
                    stderr=log,
                    cwd=cwd,
                    pass_fds=(read_end,),
                    start_new_session=True,  # a Ctrl-C on the terminal is ours to handle, not raced
                )
        except BaseException:
            lifeline.close()
            raise
        finally:
            os.close(read_end)
        return cls(process, lifeline, mark, os.path.basename(argv[0]), log_offset)

    @property
    def pid(self) -> int:
        """Pid of the guard. The child and its descendants are `descendants(pid)`."""
        return self._guard.pid

    @property
    def stdin(self) -> IO[bytes] | None:
        return self._guard.stdin

    @property
    def stdout(self) -> IO[bytes] | None:
        return self._guard.stdout

    def poll(self) -> int | None:
        """Exit code of the child (128 + signal when it was killed), or None while anything of it lives."""
        code = self._guard.poll()
        return None if code is None else self._settle(code)

    def wait(self, timeout_seconds: float | None = None) -> int:
        """Wait for the end of the child and of all its descendants, and return the child's exit code.

        Raises:
            TimeoutError: it still runs after `timeout_seconds`.
        """
        try:
            return self._settle(self._guard.wait(timeout_seconds))
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"{self._name} (guard {self.pid}) still runs after {timeout_seconds} s") from None

    def stop(self, grace_seconds: float = DEFAULT_GRACE_SECONDS) -> None:
        """End the child and every descendant: TERM, `grace_seconds`, KILL. Returns when they are gone.

        Does nothing where they are gone already; may be called again, and from several threads.
        """
        with self._lock:
            if not self._lifeline.closed:
                with contextlib.suppress(BrokenPipeError):  # the guard has gone by itself
                    self._lifeline.write(f"{grace_seconds}\n".encode())
                self._lifeline.close()
        try:
            self.wait(grace_seconds + 10.0)
        except TimeoutError:
            left = descendants(self.pid)
            logger.error(
                "Processes %s of %s do not die on SIGKILL (stuck in a driver or on a disk?); "
                "guard %d keeps trying, and whatever they hold, GPU memory too, stays taken.",
                left,
                self._name,
                self.pid,
            )
            return
        for pipe in (self.stdin, self.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):  # unread input of a child that has ended
                    pipe.close()

    def _settle(self, guard_code: int) -> int:
        """The child's exit code, after making sure that a guard which was itself killed leaves nothing behind."""
        if guard_code >= 0:
            return guard_code
        with self._lock:
            if not self._swept:
                logger.warning("The guard of %s was killed; ending what it guarded.", self._name)
                _end_bearers(MARK_VARIABLE, self._mark)
                self._swept = True
        return 128 - guard_code

    def __enter__(self) -> GuardedProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def process_token(*parts: str) -> str:
    """Short stable name of a piece of work (root, stage, key, role ...): the same parts give the same token."""
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def living(token: str) -> list[int]:
    """Pids of live processes that were started for `token`, guards included, never this process itself."""
    _require_linux()
    return _bearers(TOKEN_VARIABLE, token, exclude={os.getpid()})


def end_stale(token: str) -> list[int]:
    """End what an earlier run left behind for `token` (TERM, some seconds, KILL) and return the pids found.

    Spares this process, its ancestors, its own descendants, and what another living process has started: those are
    not stale. Blocks up to some 15 s.
    """
    _require_linux()
    return _end_bearers(TOKEN_VARIABLE, token)


def _ancestors() -> set[int]:
    pid, found = os.getppid(), set[int]()
    while pid > 0 and pid not in found:
        found.add(pid)
        try:
            pid = guard.process_state(pid)[1]
        except OSError:
            break
    return found


def _bearers(variable: str, value: str, exclude: set[int]) -> list[int]:
    """Live processes that have `variable=value` in the environment they were started with."""
    entry, found = f"{variable}={value}".encode(), []
    for pid in guard.all_pids():
        try:
            if pid not in exclude and entry in _environment(pid):
                found.append(pid)
        except OSError:
            continue  # ended meanwhile, or another user's
    return found


def _environment(pid: int) -> list[bytes]:
    with open(f"/proc/{pid}/environ", "rb") as file:
        return file.read().split(b"\0")


def _has_living_starter(pid: int) -> bool:
    """Whether another process than this one started it and still runs."""
    prefix = f"{STARTER_VARIABLE}=".encode()
    try:
        named = next((entry for entry in _environment(pid) if entry.startswith(prefix)), prefix)
        starter, started = (int(number) for number in named.removeprefix(prefix).split(b":"))
    except (OSError, ValueError):
        return False
    return starter != os.getpid() and guard.runs_since(starter, started)


def _end_bearers(variable: str, value: str) -> list[int]:
    # Our own descendants are spared under a token, which a run may share among several children; under a
    # guard's mark they are meant.
    exclude = {os.getpid(), *_ancestors()}
    if variable == TOKEN_VARIABLE:
        exclude.update(descendants(os.getpid()))
    seen: set[int] = set()
    for number, limit_seconds in ((signal.SIGTERM, SWEEP_SECONDS), (signal.SIGKILL, SWEEP_SECONDS)):
        deadline, asked = time.monotonic() + limit_seconds, set[int]()
        while left := _bearers(variable, value, exclude):
            if variable == TOKEN_VARIABLE:
                left = [pid for pid in left if not _has_living_starter(pid)]
            if not left:
                break
            seen.update(left)
            for pid in left:
                if pid not in asked:
                    guard.send(pid, number)
                    asked.add(pid)
            if time.monotonic() > deadline:
                break
            time.sleep(POLL_SECONDS)
    return sorted(seen)


def _require_linux() -> None:
    if sys.platform != "linux":
        raise InputError(
            "platform", f"children are guarded through Linux's prctl and /proc; this is {sys.platform}"
        )


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _guard_command(watch_fd: int) -> list[str]:
    # -I and -S: no site-packages and nothing of the current folder, so that it starts fast and cannot be shadowed.
    program = [sys.executable, "-I", "-S", os.path.abspath(guard.__file__)]
    return [*program, "--watch-fd", str(watch_fd), "--parent", str(os.getpid())]
