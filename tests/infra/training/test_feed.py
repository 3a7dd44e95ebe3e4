"""Made in a thread or in processes, near or far, the batches are the same bits; and no process is left behind."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Generator, Iterator
from pathlib import Path

import psutil
import pytest
import torch

from infra import manifest, storage
from infra.errors import DamagedShard, InfrastructureError
from infra.hidden_states import HiddenStatesMeta
from infra.manifest import ShardRecord
from infra.state_encodings import ENCODINGS
from infra.training import feed as feeding
from infra.training import pack_ring
from infra.training.batch import PackedBatch
from infra.training.config import TrainConfig
from infra.training.data import Schedule, ShardStore, StepBatch, StepLoader, build_index, make_pack
from infra.training.feed import Feed, input_workers, timed
from infra.training.input_worker import fill
from infra.training.pack_ring import PackLayout, PackRing
from infra.training.progress import Meter
from infra.training.ranks import Ranks, set_up_threads
from infra.training.shard_store import ShardFiles
from infra.training.shards_ahead import ShardsAhead
from tests.fakes.training_run import HIDDEN_SIZE, LAYER_IDS, random_rows, write_stage

META = HiddenStatesMeta(LAYER_IDS, HIDDEN_SIZE, "revision")
CONFIG = TrainConfig(
    total_seq_len=64, global_batch=2, num_steps=9, validation_share=0.2, validate_every_steps=4, state_noise=0.1
)
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DRAFTSMITH_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def loader_of(root: str, config: TrainConfig = CONFIG, rank: int = 0, world: int = 1) -> StepLoader:
    rows = [random_rows(10), random_rows(10, first=10), random_rows(10, first=20)]
    store = ShardStore(write_stage(root, rows, META), config.shuffle_window_shards)
    return StepLoader(store, Schedule(build_index(store, config), config), config, rank, world)


def seen(batches: Generator[StepBatch, None, None]) -> list[tuple[object, ...]]:
    """All that batches hold, in bytes."""
    found: list[tuple[object, ...]] = []
    with contextlib.closing(batches):  # what a pack raises does not end them
        for batch in batches:
            found.append((batch.num_loss_tokens, batch.num_tokens, len(batch.packs), len(batch.validation)))
            for packs in (batch.packs, batch.validation):
                for pack in packs:
                    found.append(content(pack))
    return found


def content(pack: PackedBatch) -> tuple[object, ...]:
    tensors = (
        pack.hidden_states, pack.verifier_last_hidden_states, pack.input_ids, pack.loss_mask, pack.position_ids,
    )  # fmt: skip
    bits = [bytes(tensor.contiguous().view(torch.uint8).numpy()) for tensor in tensors]
    return (pack.lengths, [tensor.dtype for tensor in tensors], bits)


@pytest.mark.seconds
def test_processes_make_what_a_thread_makes(tmp_path: Path) -> None:
    loader = loader_of(str(tmp_path))
    by_thread = seen(Feed(loader, CPU, 0).batches(2, 9))
    assert [entry[3] > 0 for entry in by_thread if len(entry) == 4] == [step in (3, 7, 8) for step in range(2, 9)]
    assert seen(Feed(loader, CPU, 2).batches(2, 9)) == by_thread


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_a_pack_is_filled_in_parts(encoding: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pack_ring, "TOKENS_AT_ONCE", 5)
    meta = HiddenStatesMeta(LAYER_IDS, HIDDEN_SIZE, "revision", encoding)
    store = ShardStore(write_stage(str(tmp_path), [random_rows(12)], meta), 1)
    loader = StepLoader(store, Schedule(build_index(store, CONFIG), CONFIG), CONFIG, 0, 1)
    slot = PackRing(PackLayout(64, (len(LAYER_IDS) - 1) * HIDDEN_SIZE, HIDDEN_SIZE), 1).slots[0]
    for job in loader.jobs(0):
        made = slot.batch(fill(slot, store, job))
        assert content(made) == content(make_pack(store, job))


class FakeEvent:
    """Of a GPU that is slow."""

    def __init__(self) -> None:
        self.asked = 0

    def query(self) -> bool:
        self.asked += 1
        return self.asked > 4

    def synchronize(self) -> None:
        self.asked = 9


class FakeStream:
    def wait_event(self, event: FakeEvent) -> None: ...

    def wait_stream(self, stream: FakeStream) -> None: ...

    def record_event(self) -> FakeEvent:
        return FakeEvent()

    def synchronize(self) -> None: ...


@pytest.mark.seconds
def test_uploads_give_their_slots_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: FakeStream())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: FakeStream())
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(PackRing, "pin", lambda self: None)
    monkeypatch.setattr(feeding, "_on_cpu", lambda pool: feeding._on_gpu(pool, CPU))
    loader = loader_of(str(tmp_path))
    assert seen(Feed(loader, CPU, 1).batches(0, 9)) == seen(Feed(loader, CPU, 0).batches(0, 9))


@pytest.mark.seconds
def test_what_was_not_asked_for_is_passed_over(tmp_path: Path) -> None:
    loader = loader_of(str(tmp_path), CONFIG.model_copy(update={"num_steps": 4}))
    expected = list(Feed(loader, CPU, 0).batches(0, 4))
    for batch, whole in zip(Feed(loader, CPU, 1).batches(0, 4), expected, strict=True):
        pack = next(iter(batch.packs))
        assert torch.equal(pack.hidden_states, next(iter(whole.packs)).hidden_states)


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.seconds)])
def test_a_shard_that_is_not_what_was_committed_ends_the_feeding(tmp_path: Path, workers: int) -> None:
    loader = loader_of(str(tmp_path))
    for path in Path(loader.store.stage_uri, "shards").glob("*.parquet"):
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1  # of a state: only the hash can tell
        path.write_bytes(data)
    with pytest.raises(DamagedShard, match="does not match its record"):
        seen(Feed(loader, CPU, workers).batches(0, 9))


@pytest.mark.seconds
def test_a_process_that_dies_is_told_of(tmp_path: Path) -> None:
    batches = Feed(loader_of(str(tmp_path)), CPU, 1).batches(0, 9)
    next(batches)
    for child in multiprocessing.active_children():
        child.kill()
    with pytest.raises(InfrastructureError, match="ended with code -9"):
        seen(batches)


@pytest.mark.seconds
def test_no_process_outlives_its_trainer(tmp_path: Path) -> None:
    loader = loader_of(str(tmp_path))
    script = (
        "import sys, time, torch\n"
        "from tests.infra.training.test_feed import CONFIG, CPU\n"
        "from infra.training.data import Schedule, ShardStore, StepLoader, build_index\n"
        "from infra.training.feed import Feed\n"
        "if __name__ == '__main__':\n"
        "    store = ShardStore(sys.argv[1], 4)\n"
        "    loader = StepLoader(store, Schedule(build_index(store, CONFIG), CONFIG), CONFIG, 0, 1)\n"
        "    batches = Feed(loader, CPU, 2).batches(0, 9)\n"
        "    next(batches)\n"
        "    print('fed', flush=True)\n"
        "    time.sleep(600)\n"
    )
    path = tmp_path / "trainer.py"
    path.write_text(script)
    home = str(Path(__file__).resolve().parents[3])
    command = [sys.executable, str(path), loader.store.stage_uri]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": home}) as trainer:
        assert trainer.stdout is not None
        assert trainer.stdout.readline() == b"fed\n"
        children = psutil.Process(trainer.pid).children(recursive=True)
        assert len(children) >= 3
        for child in children:
            if "spawn_main" in " ".join(child.cmdline()):
                child.send_signal(signal.SIGTERM)  # meant for the trainer, which goes on to its checkpoint
        time.sleep(0.2)
        assert all(child.is_running() for child in children)
        trainer.kill()
        _, alive = psutil.wait_procs(children, timeout=60)
    assert alive == []


@pytest.mark.seconds
def test_a_process_imports_no_compiler() -> None:
    modules = (
        "infra.training.__main__, infra.training.input_worker"  # a spawned process imports its parent's main module
    )
    command = [sys.executable, "-c", f"import sys, {modules}; print(*sys.modules)"]
    imported = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    assert "infra.training.data" in imported
    assert {"torch._dynamo", "transformers", "speculators"}.isdisjoint(imported)


@pytest.mark.seconds
def test_processes_start_with_the_feed_and_end_with_its_batches(tmp_path: Path) -> None:
    feed = Feed(loader_of(str(tmp_path)), CPU, 1)
    workers = multiprocessing.active_children()
    assert len(workers) == 2  # one makes packs, one checks shards
    batches = feed.batches(0, 9)
    next(batches)
    assert set(multiprocessing.active_children()) == set(workers)
    batches.close()
    assert not any(psutil.pid_exists(worker.pid) for worker in workers)


def test_the_ranks_of_a_process_group_check_a_shard_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[str] = []
    check = manifest.check_shard

    def counted(stage_uri: str, record: ShardRecord) -> None:
        checked.append(record.shard)
        check(stage_uri, record)

    monkeypatch.setattr(manifest, "check_shard", counted)
    loaders = [loader_of(str(tmp_path), rank=rank, world=2) for rank in range(2)]
    for loader in loaders:
        seen(Feed(loader, CPU, 0).batches(0, 3))
    assert sorted(checked) == ["00000", "00001", "00002"]
    other = ShardStore(loaders[0].store.stage_uri, 2)
    other.files.group = "another run"
    other.sample(0, 0)
    assert len(checked) == 4


@pytest.mark.s3
def test_shards_of_an_s3_root_are_fetched_into_a_bounded_folder(s3_root: str, tmp_path: Path, cache: Path) -> None:
    near, far = loader_of(str(tmp_path)), loader_of(s3_root)
    largest = max(record.size_bytes for record in far.store.records)
    far.store.files.cache_bytes = 2 * largest
    far.store.max_open = 1
    assert seen(Feed(far, CPU, 0).batches(0, 9)) == seen(Feed(near, CPU, 0).batches(0, 9))
    copies = list((cache / "shards").glob("*.parquet"))
    assert 0 < sum(copy.stat().st_size for copy in copies) <= 2 * largest
    assert seen(Feed(far, CPU, 1).batches(0, 9)) == seen(Feed(near, CPU, 0).batches(0, 9))
    torn = next((cache / "shards").glob("*.parquet"))  # others may have taken the first ones' room
    torn.write_bytes(torn.read_bytes()[:-1])
    assert seen(Feed(far, CPU, 0).batches(0, 9)) == seen(Feed(near, CPU, 0).batches(0, 9))


@pytest.mark.parametrize(("free", "kept"), [(10**9, 3), (200, 3), (199, 2), (75, 2), (74, 1)])
def test_copies_of_shards_leave_a_fifth_of_the_disk(
    cache: Path, monkeypatch: pytest.MonkeyPatch, free: int, kept: int
) -> None:
    """Three copies of 100 bytes, and one that is to come."""
    folder = cache / "shards"
    folder.mkdir(parents=True)
    for age, name in enumerate("cba"):
        (folder / f"{name}.parquet").write_bytes(bytes(100))
        (folder / f"{name}.mark").touch()
        os.utime(folder / f"{name}.mark", (1000 - age, 1000 - age))
    monkeypatch.setattr(storage, "free_bytes", lambda uri: free if uri == str(folder) else None)
    ShardFiles("s3://bucket/root", [], cache_bytes=400)._make_room(100)
    assert sorted(path.stem for path in folder.glob("*.parquet")) == sorted("cba"[:kept])


def test_shards_are_asked_for_before_their_steps_and_not_too_early(tmp_path: Path) -> None:
    loader = loader_of(str(tmp_path), CONFIG.model_copy(update={"shuffle_window_shards": 1, "global_batch": 1}))
    ahead = ShardsAhead(loader, 0, 60, limit=2)
    asked: set[int] = set()
    for step in range(60):
        asked |= (new := set(ahead.at(step)))
        assert set(loader.shards_of_step(step)) <= asked
        assert len(new) <= 3
    first = ShardsAhead(loader, 0, 60, limit=2).at(0)
    assert len(first) == 2


def test_a_gpu_gets_processes_and_the_cpu_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(32)))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert input_workers(TrainConfig(), CPU) == 0
    assert input_workers(TrainConfig(), torch.device("cuda", 1)) == 6
    assert input_workers(TrainConfig(input_workers=3), CPU) == 3


def test_beside_a_gpu_the_host_computes_in_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(6)))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    before = torch.get_num_threads()
    ranks = Ranks()
    try:
        for cuda, asked, expected in ((True, None, 1), (True, 2, 2), (False, None, 3)):
            ranks.cuda = cuda
            set_up_threads(TrainConfig(num_threads=asked), ranks)
            assert torch.get_num_threads() == expected
    finally:
        torch.set_num_threads(before)


def test_waiting_for_packs_is_metered(tmp_path: Path) -> None:
    def slow() -> Iterator[int]:
        for number in range(3):
            time.sleep(0.01)
            yield number

    meter = Meter()
    assert list(timed(slow(), meter)) == [0, 1, 2]
    assert meter.take().input_wait_seconds >= 0.03
