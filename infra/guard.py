"""The guard's program: run one command and leave none of its descendants behind, whatever happens.

`python -I -S guard.py --watch-fd N --parent PID -- CMD...`, started by `infra.processes.GuardedProcess` only.
It imports a few modules of the standard library and nothing of ours, so that it starts in well under 0.1 s and
works in any folder, with any interpreter.

The guard is a child subreaper (prctl(2)): a descendant whose own parent dies becomes the guard's child, even from a
session of its own, as torchrun's ranks and vLLM's engines have. It ends ALL its descendants (TERM, some seconds of
grace, KILL, until the kernel says that no child is left) when

- a line comes through the pipe `--watch-fd`: the seconds of grace to give; or the pipe ends, because its only
  writer, the parent, is gone for any reason, SIGKILL included;
- it is no longer PID's child: the same, where a fork of the parent still holds the pipe;
- it gets TERM, INT or HUP;
- the command exits by itself.

Exit code: the command's, or 128 + the signal that ended it; 127 when it could not be started.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import sys
import time

DEFAULT_GRACE_SECONDS = 5.0
PARENT_CHECK_SECONDS = 1.0
POLL_SECONDS = 0.05
EXIT_CANNOT_START = 127
EXIT_USAGE = 2
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def main(arguments: list[str]) -> int:
    match arguments:
        case ["--watch-fd", watch_fd, "--parent", parent_pid, "--", *command] if command:
            return _Guard(command, int(watch_fd), int(parent_pid)).run()
    print("usage: guard.py --watch-fd N --parent PID -- CMD...", file=sys.stderr)
    return EXIT_USAGE


class _Guard:
    """One command under guard; see the module's docstring."""

    def __init__(self, command: list[str], watch_fd: int, parent_pid: int) -> None:
        self._command = command
        self._watch_fd = watch_fd
        self._parent_pid = parent_pid
        self._child_pid = 0
        self._child_status: int | None = None  # as waitpid gives it
        self._signals: list[int] = []  # stop signals received
        self._wake_fd = -1  # readable after any signal

    def run(self) -> int:
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)
        os.set_inheritable(self._watch_fd, False)
        self._install_handlers()
        self._child_pid = self._spawn()
        # The command's stdin and stdout may be pipes to the parent: our copies would keep both from ever ending.
        null = os.open(os.devnull, os.O_RDWR)
        os.dup2(null, 0)
        os.dup2(null, 1)
        try:
            why, grace_seconds = self._watch()
        except Exception as error:  # whatever it is, a guard that fails must not leave anything running
            why, grace_seconds = f"the guard failed ({error!r})", DEFAULT_GRACE_SECONDS
        self._end_descendants(why, grace_seconds)
        if self._child_status is None:
            return 1
        code = os.waitstatus_to_exitcode(self._child_status)
        return code if code >= 0 else 128 - code

    def _install_handlers(self) -> None:
        self._wake_fd, write_fd = os.pipe()
        os.set_blocking(self._wake_fd, False)
        os.set_blocking(write_fd, False)
        signal.set_wakeup_fd(write_fd, warn_on_full_buffer=False)
        for number in _STOP_SIGNALS:
            signal.signal(number, lambda received, _frame: self._signals.append(received))
        signal.signal(signal.SIGCHLD, lambda _number, _frame: None)
        signal.pthread_sigmask(signal.SIG_SETMASK, [])  # the starting thread may have blocked some

    def _spawn(self) -> int:
        """Fork and execute the command in a session of its own; the kernel kills it should this guard be killed."""
        guard_pid = os.getpid()
        # Held back, or a TERM sent to the child before it executes would run our handler there and be lost.
        signal.pthread_sigmask(signal.SIG_BLOCK, _STOP_SIGNALS)
        pid = os.fork()
        if pid:
            signal.pthread_sigmask(signal.SIG_SETMASK, [])
            return pid
        try:
            os.setsid()
            # Python ignores the last two, and what is ignored stays so in the command.
            for number in (*_STOP_SIGNALS, signal.SIGCHLD, signal.SIGPIPE, signal.SIGXFSZ):
                signal.signal(number, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_SETMASK, [])
            _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() == guard_pid:
                os.execvp(self._command[0], self._command)
        except BaseException as error:
            _say(f"cannot start {self._command[0]}: {error}")
        finally:
            os._exit(EXIT_CANNOT_START)

    def _watch(self) -> tuple[str, float]:
        """Wait until the descendants must end. Returns why, and the seconds of grace to give them."""
        while True:
            readable, _, _ = select.select([self._watch_fd, self._wake_fd], [], [], PARENT_CHECK_SECONDS)
            if self._wake_fd in readable:
                os.read(self._wake_fd, 4096)
            self._reap()
            if self._child_status is not None:
                return "the command has ended", DEFAULT_GRACE_SECONDS
            if self._watch_fd in readable:
                word = os.read(self._watch_fd, 64)
                if word:
                    return "the parent asked for it", float(word)
                return "the parent is gone", DEFAULT_GRACE_SECONDS
            if self._signals:
                return f"signal {self._signals[0]}", DEFAULT_GRACE_SECONDS
            if os.getppid() != self._parent_pid:
                return "the parent is gone", DEFAULT_GRACE_SECONDS

    def _end_descendants(self, why: str, grace_seconds: float) -> None:
        """TERM to each descendant once, after the grace KILL to all that are left, until there is none.

        That none is left is what waitpid says (no children at all), not a reading of /proc, which can miss a
        process whose parent dies meanwhile; such a one is our child by the next reading.
        """
        deadline = time.monotonic() + grace_seconds
        asked: set[int] = set()
        killing = False
        while self._reap():
            found = descendants(os.getpid())
            if found and not asked:
                _say(f"{why}; ending {len(found)} process(es)")
            if not killing and time.monotonic() >= deadline:
                killing = True
                _say(f"killing what is left after {grace_seconds} s: {found}")
            for pid in found:
                if killing or pid not in asked:
                    send(pid, signal.SIGKILL if killing else signal.SIGTERM)
                    asked.add(pid)
            time.sleep(POLL_SECONDS)

    def _reap(self) -> bool:
        """Collect what has ended. Returns whether this process still has any child."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return False
            if pid == 0:
                return True
            if pid == self._child_pid:
                self._child_status = status


def descendants(pid: int) -> list[int]:
    """Pids of the live (not zombie) descendants of a process, each parent before its children.

    One reading of /proc is not atomic: it can miss a process whose parent dies meanwhile.
    """
    parents: dict[int, int] = {}
    dead: set[int] = set()
    for each in all_pids():
        try:
            state, parent = process_state(each)
        except OSError:
            continue  # it ended meanwhile
        parents[each] = parent
        if state in "ZX":
            dead.add(each)
    found = [pid]
    for ancestor in found:  # grows while it is walked
        found.extend(each for each, parent in parents.items() if parent == ancestor)
    return [each for each in found[1:] if each not in dead]


def process_state(pid: int) -> tuple[str, int]:
    """State letter and parent pid of a process, from /proc/PID/stat; OSError when there is none."""
    with open(f"/proc/{pid}/stat", "rb") as file:
        # The second field is the name, in parentheses, and may itself hold spaces and parentheses.
        state, parent = file.read().rpartition(b")")[2].split()[:2]
    return state.decode(), int(parent)


def process_start(pid: int) -> int:
    """When a process started, in clock ticks since the boot; OSError when there is none.

    With the pid it names one process for as long as the machine is up: pids are used again.
    """
    with open(f"/proc/{pid}/stat", "rb") as file:
        return int(file.read().rpartition(b")")[2].split()[19])  # field 22 of proc(5), the 20th after the name


def runs_since(pid: int, started: int) -> bool:
    """Whether the process that started then still runs (a zombie does not)."""
    try:
        return process_start(pid) == started and process_state(pid)[0] not in "ZX"
    except OSError:
        return False


def all_pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def send(pid: int, number: int) -> None:
    """Send a signal, if the process still is there and is ours."""
    with contextlib.suppress(ProcessLookupError, PermissionError):  # ended meanwhile, or changed its user
        os.kill(pid, number)


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl({option}): {os.strerror(number)}")


def _say(text: str) -> None:
    """A line into the command's log. Never fails: a full disk must not keep the guard from its work."""
    with contextlib.suppress(OSError):
        os.write(2, f"draftsmith guard {os.getpid()}: {text}\n".encode())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
