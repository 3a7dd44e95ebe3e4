"""Shards built in processes of their own are those that a thread here would build, whoever dies meanwhile."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Generator, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from infra.errors import InfrastructureError, ServerError
from infra.extraction.build_pool import HOME, BuildPool
from infra.extraction.rows import BuiltShard, build_shard, samples_of
from infra.extraction.staged_states import Staged, StreamTimes, read_staged
from infra.hidden_states import HiddenStatesMeta
from infra.processes import descendants, living
from infra.state_checks.checks import ChecksConfig, StateChecks
from infra.state_checks.norms import LayerNorms
from infra.state_checks.verifier_head import VerifierHead
from tests.infra.extraction.test_engine import response, responses
from tests.infra.state_checks.test_checks import MODEL, save

pytestmark = pytest.mark.seconds

META = HiddenStatesMeta((1, 2, 3, 4), 32, "rev", "bf16_split")


def token_of(pid: int) -> str:
    return f"test-build-pool-{pid}"


TOKEN = token_of(os.getpid())
TABLE = responses(*(response(name) for name in "abcdefghij"), response("k", "failed", "no ids"), response("nan"))


class Kit:
    """A pool, what it learns, and where its files lie."""

    def __init__(self, folder: Path, verifier: Path) -> None:
        self.head = VerifierHead.open(verifier)
        self.checks = self.fresh()
        self.folder = folder
        self.pool = BuildPool(self.checks, verifier, folder, token=TOKEN, log_path=folder / "log", ahead=1)

    def fresh(self) -> StateChecks:
        """Checks that know nothing yet; text which is not the verifier's passes."""
        return StateChecks(ChecksConfig(margin_nats=1000.0, margin_top1=0.999), META, self.head)

    def staged(self, folder: Path, closed: list[bool], scale: float = 1.0) -> Generator[Staged | None]:
        """Files of states whose layers are of like lengths, and then an engine that refuses or fails."""
        folder.mkdir(exist_ok=True)
        try:
            for sample in samples_of(TABLE):
                states = torch.randn(10, 4, 32, generator=torch.Generator().manual_seed(7)).bfloat16() * scale
                if sample.sample_id == "nan":
                    states[3, 2, 1] = float("nan")
                path = folder / sample.sample_id
                save_file({"hidden_states": states, "token_ids": torch.tensor(sample.input_ids)}, path)
                refused = sample.sample_id == "c"
                yield Staged(None, "too long") if refused else Staged(str(path), None)
        finally:
            closed.append(True)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kit]:
    kit = Kit(tmp_path_factory.mktemp("built"), save(MODEL, tmp_path_factory.mktemp("verifier")))
    with kit.pool:
        yield kit
    assert living(TOKEN) == []


@pytest.fixture
def kit(shared: Kit) -> Kit:
    shared.checks.norms = shared.fresh().norms
    return shared


def here(kit: Kit, folder: Path) -> BuiltShard:
    """What a thread of this process builds."""
    answers = zip(samples_of(TABLE), kit.staged(folder, []), strict=True)
    results = (read_staged(sample, staged, META) for sample, staged in answers if staged)
    return build_shard(TABLE, results, META, kit.fresh())


def build(kit: Kit, folder: Path, scale: float = 1.0) -> BuiltShard:
    closed: list[bool] = []
    built = kit.pool.build(TABLE, kit.staged(folder, closed, scale), StreamTimes())
    assert closed
    assert [path.name for path in folder.iterdir()] == ["c"], "what was read is deleted"
    return built


def content(built: BuiltShard) -> bytes:
    """Of the shard's file, which is deleted."""
    assert isinstance(built.data, Path)
    try:
        return built.data.read_bytes()
    finally:
        built.data.unlink()


def builders() -> list[int]:
    return [
        pid for pid in descendants(os.getpid()) if "build_worker" in command(pid) and "guard" not in command(pid)
    ]


def command(pid: int) -> str:
    """Of a process of ours; "" where it has ended since it was listed."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text(encoding="utf-8")
    except OSError:
        return ""


def test_the_same_shard_as_in_a_thread(kit: Kit, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first = build(kit, tmp_path / "a")
    said = [record.getMessage() for record in caplog.records]
    alone = here(kit, tmp_path / "b")
    assert content(first) == alone.data
    assert first[1:] == alone[1:]
    assert first.extra["on_policy"]["positions"] >= 9 * 6
    assert first.status_counts == {"ok": 9, "failed": 3}
    assert said == [caplog.records[-1].getMessage()], "it warns of the failed rows as a thread does"
    known = kit.checks.norms.known()
    assert known is not None
    assert known.to_json() == first.extra["layer_norms"]
    assert len(builders()) == 1


def test_what_the_stage_knows_reaches_it(kit: Kit, tmp_path: Path) -> None:
    kit.checks.norms.learn(LayerNorms(100, np.full(4, 9.0), np.full(4, 0.01)))
    built = build(kit, tmp_path / "a")
    content(built)
    assert built.extra["failed_checks"]["norms"]["count"] == 9
    assert "layer_norms" not in built.extra


def test_one_that_is_killed_is_an_error_and_the_next_shard_has_another(kit: Kit, tmp_path: Path) -> None:
    closed: list[bool] = []

    def killing() -> Generator[Staged | None]:
        source = kit.staged(tmp_path / "a", closed)
        yield next(source)
        yield next(source)
        for pid in builders():
            os.kill(pid, signal.SIGKILL)
        yield from source

    with pytest.raises(
        InfrastructureError, match=r"at sample c, ended with code 137 \(killed for want of memory\?\)"
    ):
        kit.pool.build(TABLE, killing(), StreamTimes())
    assert closed
    assert list(kit.folder.glob("*.parquet")) == []
    times = StreamTimes()
    source = kit.staged(tmp_path / "b", closed)
    assert content(kit.pool.build(TABLE, source, times)) == here(kit, tmp_path / "c").data
    assert times.waited_seconds > 0, "until the other was ready"


def test_one_that_hangs_is_ended_and_the_next_shard_has_another(
    kit: Kit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content(build(kit, tmp_path / "a"))
    closed: list[bool] = []

    def stopping() -> Generator[Staged | None]:
        source = kit.staged(tmp_path / "b", closed)
        yield next(source)
        monkeypatch.setattr("infra.extraction.build_pool.HANG_SECONDS", 1.0)
        for pid in builders():
            os.kill(pid, signal.SIGSTOP)
        yield from source

    with pytest.raises(InfrastructureError, match=r"at sample b, said nothing for 1 s and was ended"):
        kit.pool.build(TABLE, stopping(), StreamTimes())
    assert closed
    assert builders() == []
    monkeypatch.undo()
    content(build(kit, tmp_path / "c"))


def test_one_that_is_killed_while_idle_is_replaced(kit: Kit, tmp_path: Path) -> None:
    content(build(kit, tmp_path / "a"))
    for pid in builders():
        os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + 60
    while any(builder.lives for builder in kit.pool._idle):  # until its guard has ended, too
        assert time.monotonic() < deadline, [command(pid) for pid in living(TOKEN)]
        time.sleep(0.05)
    content(build(kit, tmp_path / "b"))


def test_an_engine_that_dies_is_that_error(kit: Kit, tmp_path: Path) -> None:
    def dying() -> Generator[Staged | None]:
        yield next(kit.staged(tmp_path / "a", []))
        raise ServerError("the engine has died")

    with pytest.raises(ServerError, match="the engine has died"):
        kit.pool.build(TABLE, dying(), StreamTimes())
    assert list(kit.folder.glob("*.parquet")) == []
    assert builders() == [], "it was in the middle of a shard"


def test_what_it_cannot_write_is_said(kit: Kit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kit.pool, "_folder", tmp_path / "absent")
    with pytest.raises(InfrastructureError, match="failed before its first sample: FileNotFoundError"):
        kit.pool.build(TABLE, kit.staged(tmp_path / "a", []), StreamTimes())


def test_want_of_memory_is_that_samples_error(kit: Kit, tmp_path: Path) -> None:
    def large() -> Generator[Staged | None]:
        source = kit.staged(tmp_path / "a", [])
        yield next(source)
        (pid,) = builders()
        resource.prlimit(pid, resource.RLIMIT_AS, (virtual_bytes(pid) + 2**20, resource.RLIM_INFINITY))
        next(source)
        states = torch.zeros(2**20, 4, 32, dtype=torch.bfloat16)
        save_file(
            {"hidden_states": states, "token_ids": torch.tensor(samples_of(TABLE)[1].input_ids)}, tmp_path / "b"
        )
        yield Staged(str(tmp_path / "b"), None)
        raise AssertionError("it went on")

    with pytest.raises(InfrastructureError, match="at sample b"):
        kit.pool.build(TABLE, large(), StreamTimes())
    assert builders() == []
    content(build(kit, tmp_path / "c"))


def virtual_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text(encoding="utf-8").split()[0]) * resource.getpagesize()


def test_one_that_cannot_import_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('libtorch is not for this machine')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr("infra.extraction.build_pool.HOME", tmp_path)
    (tmp_path / "infra").symlink_to(HOME / "infra")
    with (
        Kit(tmp_path, save(MODEL, tmp_path / "verifier")).pool as pool,
        pytest.raises(InfrastructureError, match=r"(?s)ended with code 1\. .*libtorch is not for this machine"),
    ):
        pool.wait_ready()


STAGE = """
import sys, time
from pathlib import Path
from tests.infra.extraction.test_build_pool import Kit
kit = Kit(Path(sys.argv[1]), Path(sys.argv[2]))
with kit.pool as pool:
    pool.wait_ready()
    print("ready", flush=True)
    time.sleep(600)
"""


def test_none_outlives_a_killed_stage(tmp_path: Path) -> None:
    verifier = save(MODEL, tmp_path / "verifier")
    command = [sys.executable, "-c", STAGE, str(tmp_path), str(verifier)]
    with subprocess.Popen(command, cwd=HOME, stdout=subprocess.PIPE) as stage:
        assert stage.stdout is not None
        assert stage.stdout.readline() == b"ready\n"
        token = token_of(stage.pid)
        assert len(living(token)) == 2, "a guard and its builder"
        stage.kill()
    deadline = time.monotonic() + 60
    while living(token) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert living(token) == []


def test_nothing_is_built_after_its_end(tmp_path: Path) -> None:
    kit = Kit(tmp_path, save(MODEL, tmp_path / "verifier"))
    kit.pool.close()
    with pytest.raises(InfrastructureError, match="were ended"):
        kit.pool.build(TABLE, kit.staged(tmp_path / "a", []), StreamTimes())
