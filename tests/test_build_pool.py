"""Shards built in processes of their own are those that a thread here would build, whoever dies meanwhile."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Generator, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from infra.build_pool import BuildPool
from infra.errors import InfrastructureError, ServerError
from infra.extraction_rows import BuiltShard, build_shard, samples_of
from infra.hidden_states import HiddenStatesMeta
from infra.processes import descendants, living
from infra.staged_states import Staged, StreamTimes, read_staged
from infra.state_checks import ChecksConfig, StateChecks
from infra.state_norms import LayerNorms
from infra.verifier_head import VerifierHead
from tests.test_extraction import response, responses
from tests.test_state_checks import MODEL, save

pytestmark = pytest.mark.seconds

META = HiddenStatesMeta((1, 2, 3, 4), 32, "rev", "bf16_split")
TOKEN = f"test-build-pool-{os.getpid()}"
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
    return Path(f"/proc/{pid}/cmdline").read_text(encoding="utf-8")


def test_the_same_shard_as_in_a_thread(kit: Kit, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first = build(kit, tmp_path / "a")
    said = [record.getMessage() for record in caplog.records]
    alone = here(kit, tmp_path / "b")
    assert content(first) == alone.data
    assert first[1:] == alone[1:]
    assert first.extra["on_policy"]["positions"] >= 9 * 6
    assert first.status_counts == {"ok": 10, "failed": 3}
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
        for pid in builders():
            os.kill(pid, signal.SIGKILL)
        yield from source

    with pytest.raises(InfrastructureError, match="ended with code 137; was it killed for want of memory"):
        kit.pool.build(TABLE, killing(), StreamTimes())
    assert closed
    assert list(kit.folder.glob("*.parquet")) == []
    times = StreamTimes()
    source = kit.staged(tmp_path / "b", closed)
    assert content(kit.pool.build(TABLE, source, times)) == here(kit, tmp_path / "c").data
    assert times.waited_seconds > 0, "until the other was ready"


def test_one_that_is_killed_while_idle_is_replaced(kit: Kit, tmp_path: Path) -> None:
    content(build(kit, tmp_path / "a"))
    for pid in builders():
        os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + 20
    while descendants(os.getpid()) and time.monotonic() < deadline:
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
    with pytest.raises(InfrastructureError, match="a process that builds shards failed with FileNotFoundError"):
        kit.pool.build(TABLE, kit.staged(tmp_path / "a", []), StreamTimes())


def test_nothing_is_built_after_its_end(tmp_path: Path) -> None:
    kit = Kit(tmp_path, save(MODEL, tmp_path / "verifier"))
    kit.pool.close()
    with pytest.raises(InfrastructureError, match="were ended"):
        kit.pool.build(TABLE, kit.staged(tmp_path / "a", []), StreamTimes())
