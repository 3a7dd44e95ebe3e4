"""Real processes, really killed: nothing may be left of a guarded child, whoever dies first."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from infra import guard, processes
from infra.errors import InputError
from infra.processes import GuardedProcess, descendants, end_stale, living, log_tail, process_token

END_SECONDS = 15.0

# A child as torchrun and vLLM are: descendants in sessions of their own, and one that ignores TERM.
TREE = """
import signal, subprocess, sys, time
sleeper = "import time; time.sleep(120)"
stubborn = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); time.sleep(120)"
subprocess.Popen([sys.executable, "-c", sleeper], start_new_session=True)
subprocess.Popen(["sh", "-c", "setsid sleep 120 &"], start_new_session=True)
subprocess.Popen([sys.executable, "-c", stubborn], start_new_session=True)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("deaf", flush=True)
time.sleep(120)
"""
TREE_SIZE = 1 + 1 + 3  # the guard, the child, its three descendants (the shell between them exits)
TREE_DEAF = 2  # of them, each says so once it ignores TERM

PARENT = """
import os, sys, time
from infra.processes import GuardedProcess
token, log, tree, forks = sys.argv[1:]
process = GuardedProcess.start([sys.executable, "-c", tree], token=token, log_path=log)
if forks == "fork" and os.fork() == 0:
    print(os.getpid(), flush=True)  # a fork without exec holds the lifeline too
time.sleep(120)
"""


@pytest.fixture
def token() -> Iterator[str]:
    value = process_token("test", uuid.uuid4().hex)
    yield value
    for pid in living(value):
        os.kill(pid, signal.SIGKILL)


def eventually(condition: Callable[[], bool], timeout_seconds: float = END_SECONDS) -> bool:
    deadline = time.monotonic() + timeout_seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def wait_for_trees(token: str, log: Path, count: int = 1) -> None:
    """Until that many trees are whole, and those that ignore TERM do so."""

    def said() -> str:
        return log.read_text() if log.exists() else ""

    assert eventually(
        lambda: len(living(token)) == count * TREE_SIZE and said().count("deaf\n") == count * TREE_DEAF
    ), f"{living(token)} {said()}"


def start_tree(token: str, tmp_path: Path) -> GuardedProcess:
    log = tmp_path / "tree.log"
    process = GuardedProcess.start([sys.executable, "-c", TREE], token=token, log_path=log)
    wait_for_trees(token, log)
    return process


@pytest.mark.seconds
def test_nothing_outlives_a_killed_parent(token: str, tmp_path: Path) -> None:
    command = [sys.executable, "-c", PARENT, token, str(tmp_path / "log"), TREE]
    plain = subprocess.Popen([*command, "plain"])
    forking = subprocess.Popen([*command, "fork"], stdout=subprocess.PIPE, text=True)
    fork_pid = 0
    try:
        assert forking.stdout is not None
        fork_pid = int(forking.stdout.readline())
        wait_for_trees(token, tmp_path / "log", 2)
        for parent in (plain, forking):
            parent.kill()
            parent.wait()
        assert eventually(lambda: not living(token)), living(token)
        assert Path(f"/proc/{fork_pid}").exists()  # and the guard did not wait for it
    finally:
        for parent in (plain, forking):
            parent.kill()
            parent.wait()
        if fork_pid:
            os.kill(fork_pid, signal.SIGKILL)


def test_stop_ends_every_descendant_and_may_be_called_again(token: str, tmp_path: Path) -> None:
    process = start_tree(token, tmp_path)
    started = time.monotonic()
    threads = [threading.Thread(target=process.stop, args=(0.5,)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert time.monotonic() - started >= 0.5
    assert "killing what is left after 0.5 s" in (tmp_path / "tree.log").read_text()
    assert living(token) == []
    assert process.poll() == 128 + signal.SIGKILL  # it ignores TERM
    process.stop()


def test_leaving_the_context_stops(token: str, tmp_path: Path) -> None:
    process = GuardedProcess.start(["sleep", "60"], token=token, log_path=tmp_path / "log")

    def fail() -> None:
        with process:
            assert eventually(lambda: len(living(token)) == 2)
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert living(token) == []
    # TERM was enough, although it may have come before the child's exec.
    assert process.poll() == 128 + signal.SIGTERM


def test_orphans_end_with_the_child(token: str, tmp_path: Path) -> None:
    process = GuardedProcess.start(
        ["sh", "-c", "setsid sleep 60 & sleep 0.3; exit 3"], token=token, log_path=tmp_path / "log"
    )
    assert process.wait(END_SECONDS) == 3
    assert living(token) == []


@pytest.mark.seconds
def test_a_killed_guard_leaves_nothing_either(token: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "SWEEP_SECONDS", 1.0)
    process = start_tree(token, tmp_path)
    os.kill(process.pid, signal.SIGKILL)
    assert eventually(lambda: process.poll() is not None)
    assert process.poll() == 128 + signal.SIGKILL
    assert living(token) == []


def test_stale_processes_are_found_by_token_and_our_own_are_spared(token: str, tmp_path: Path) -> None:
    environment = {**os.environ, "DRAFTSMITH_TOKEN": token}
    subprocess.run(["sh", "-c", "setsid sleep 60 &"], env=environment, check=True)  # an orphan: not our descendant
    with GuardedProcess.start(["sleep", "60"], token=token, log_path=tmp_path / "log") as ours:
        assert eventually(lambda: len(living(token)) == 3)
        assert len(end_stale(token)) == 1
        assert ours.poll() is None
        assert sorted(living(token)) == sorted([ours.pid, *descendants(ours.pid)])


@pytest.mark.seconds
def test_what_another_living_process_started_is_spared_until_that_is_dead(
    token: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "SWEEP_SECONDS", 1.0)
    command = [sys.executable, "-c", PARENT, token, str(tmp_path / "log"), TREE, "plain"]
    shell = ["sh", "-c", 'setsid "$@" >/dev/null 2>&1 & echo $!', "sh", *command]
    # No child of ours, or it and its own would be spared in any case.
    other = int(subprocess.run(shell, stdout=subprocess.PIPE, text=True, check=True).stdout)
    try:
        wait_for_trees(token, tmp_path / "log")
        assert end_stale(token) == []
        assert len(living(token)) == TREE_SIZE
        started = guard.process_start(other)
        guards = [pid for pid in living(token) if guard.process_state(pid)[1] == other]
        # The guard too, and first, so that nothing but the sweep can end the rest.
        for pid in (*guards, other):
            os.kill(pid, signal.SIGKILL)
        assert eventually(lambda: not guard.runs_since(other, started))
        assert len(end_stale(token)) >= 3
        assert living(token) == []
    finally:
        guard.send(other, signal.SIGKILL)


def test_a_zombie_does_not_run() -> None:
    process = subprocess.Popen(["sleep", "60"])
    started = guard.process_start(process.pid)
    assert guard.runs_since(process.pid, started)
    process.kill()
    assert eventually(lambda: not guard.runs_since(process.pid, started))
    assert guard.process_state(process.pid)[0] == "Z"
    process.wait()


def test_a_pid_that_is_used_again_is_another_process() -> None:
    started = guard.process_start(os.getpid())
    assert guard.runs_since(os.getpid(), started)
    assert not guard.runs_since(os.getpid(), started - 1)
    assert not guard.runs_since(2**22, started)


@pytest.mark.parametrize(
    ("command", "code"), [("exit 0", 0), ("exit 7", 7), ("kill -9 $$", 137), ("kill -TERM $$", 143)]
)
def test_exit_code_is_the_childs(token: str, tmp_path: Path, command: str, code: int) -> None:
    with GuardedProcess.start(["sh", "-c", command], token=token, log_path=tmp_path / "log") as process:
        assert process.wait(END_SECONDS) == code == process.poll()


def test_a_command_that_cannot_start(token: str, tmp_path: Path) -> None:
    with GuardedProcess.start(["/no/such/program"], token=token, log_path=tmp_path / "log") as process:
        assert process.wait(END_SECONDS) == 127
    assert "/no/such/program" in log_tail(tmp_path / "log")[-1]


def test_pipes_are_the_childs_own(token: str, tmp_path: Path) -> None:
    process = GuardedProcess.start(
        ["sh", "-c", "cat; echo noise >&2; exec >&-; sleep 30"],
        token=token,
        log_path=tmp_path / "deep" / "log",
        stdin_pipe=True,
        stdout_pipe=True,
    )
    with process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(b"question\n")
        process.stdin.flush()
        assert process.stdout.readline() == b"question\n"
        process.stdin.close()
        started = time.monotonic()
        assert process.stdout.read() == b""
        assert time.monotonic() - started < 10  # the guard holds no copy that would have kept it open
    assert (tmp_path / "deep" / "log").read_text().startswith("noise\n")


def test_the_starting_thread_may_end(token: str, tmp_path: Path) -> None:
    started: list[GuardedProcess] = []
    argv = ["sh", "-c", "echo here; sleep 60"]
    thread = threading.Thread(
        target=lambda: started.append(GuardedProcess.start(argv, token=token, log_path=tmp_path / "log"))
    )
    thread.start()
    thread.join()
    with started[0] as process:
        time.sleep(0.5)
        assert process.poll() is None
        with pytest.raises(TimeoutError):
            process.wait(0.1)


def test_guard_is_quick_and_in_its_own_session(token: str, tmp_path: Path) -> None:
    seconds = []
    for _ in range(3):
        started = time.monotonic()
        process = GuardedProcess.start(["echo", "up"], token=token, log_path=tmp_path / "log", stdout_pipe=True)
        with process:
            assert process.stdout is not None
            assert process.stdout.readline() == b"up\n"
            seconds.append(time.monotonic() - started)
    # What it takes by itself, 0.05 s; what a busy machine adds now and then is none of its own.
    assert min(seconds) < 1.0, seconds
    with GuardedProcess.start(["sleep", "60"], token=token, log_path=tmp_path / "log") as process:
        assert os.getsid(process.pid) == process.pid != os.getsid(0)


def test_variables_are_added_and_the_output_of_each_start_is_told_apart(token: str, tmp_path: Path) -> None:
    log = tmp_path / "log"
    for value in ("first", "second"):
        with GuardedProcess.start(
            ["sh", "-c", "echo Error: $WHICH"], token=token, log_path=log, env={"WHICH": value}
        ) as process:
            process.wait(END_SECONDS)
    assert log_tail(log, offset=process.log_offset) == ["Error: second"]
    assert "Error: first" in log.read_text()


def test_other_systems_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(InputError, match="darwin"):
        GuardedProcess.start(["true"], token="t", log_path=tmp_path / "log")


def test_log_tail_prefers_the_cause(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text(
        "INFO started\n"
        "x.py:1: DeprecationWarning: old\n"
        "(EngineCore pid=1) ERROR 11-29 20:00:00 [core.py:1] ValueError: no memory\n"
        "(APIServer pid=2) ValueError: no memory\n"
        "RuntimeError: Engine core initialization failed.\n"
        "INFO bye\n"
    )
    assert log_tail(log) == [
        "(APIServer pid=2) ValueError: no memory",
        "RuntimeError: Engine core initialization failed.",
    ]
    log.write_text("INFO Error: no\nx.ValidationError: 1 error for Config\n  no such folder [type=x]\nbye\n")
    assert log_tail(log) == ["x.ValidationError: 1 error for Config", "no such folder [type=x]"]
    log.write_text("started\nbye\n")
    assert log_tail(log, max_lines=1) == ["bye"]
    assert log_tail(tmp_path / "absent") == []
