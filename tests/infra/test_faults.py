"""A thousand faults drawn from a seed: no lost row, no duplicated row, nothing that says it is done and is not.

Two stages are planned, committed by several workers that also do each other's shards, and resumed after each
failure: over a store whose calls fail, and over an S3 client whose requests fail.
"""

from __future__ import annotations

import json
import random
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest

from infra import manifest, storage
from infra.errors import DamagedShard, StageFailed, StorageError
from infra.fingerprint import sha256_hex, stage_content
from infra.manifest import Shard, ShardRecord, StageRef
from infra.stores import s3 as storage_s3
from infra.stores import s3_client as storage_s3_client
from tests.fakes.faulty_stores import Draw, FaultyStore, FlakyS3Client

NUM_SHARDS = 8
ROWS_PER_SHARD = 3
NUM_WORKERS = 3
MAX_ATTEMPTS = 200
TIMES_DONE = 3  # a stage that was complete loses a shard, and is completed again
NUM_FAULTS = 1_000
RESUMABLE = (StorageError, DamagedShard, StageFailed)


class Simulation:
    """Two stages, the second made from the first, and the failures they are resumed after."""

    def __init__(self, root: str, seed: int) -> None:
        first = StageRef(root, "prompts", stage_content("prompts", 1, {"seed": seed}, {}, {}))
        second = StageRef(root, "responses", stage_content("responses", 1, {}, {}, {"prompts": first.key}))
        self.stages = {"prompts": first, "responses": second}
        self.seed = seed
        self.failures: Counter[str] = Counter()
        self._attempt = 0

    def attempt(self, name: str) -> bool:
        """One run of one stage, to its end or its first failure. Returns whether it says that it is complete."""
        stage = self.stages[name]
        self._attempt += 1
        try:
            manifest.write_plan(stage, planned(name))
            state = manifest.inspect(stage)
            if not state.complete:
                inputs = self._inputs(stage, state.plan)
                self._work(stage, state.missing, inputs)
                manifest.finish(stage, {})
            return True
        except RESUMABLE as error:
            self.failures[type(error).__name__] += 1
            if isinstance(error, DamagedShard):
                self.withdraw(error)
            return False

    def distrust(self, chance: float) -> None:
        """A reader found some shard damaged (its own copy, perhaps): its record is withdrawn."""
        source = random.Random(f"{self.seed} distrust {self._attempt}")
        if source.random() < chance:
            stage = self.stages[source.choice(sorted(self.stages))]
            self.withdraw(DamagedShard(stage.uri, f"{source.randrange(NUM_SHARDS):05d}", "simulated"))

    def _inputs(self, stage: StageRef, plan: tuple[Shard, ...]) -> Mapping[str, ShardRecord]:
        found = manifest.input_records(stage, plan)
        if any(name not in found for shard in plan for name in shard.inputs):
            raise StageFailed("the stage before is not complete")
        return found

    def _work(self, stage: StageRef, missing: list[Shard], inputs: Mapping[str, ShardRecord]) -> None:
        errors: list[BaseException] = []

        def worker(number: int) -> None:
            order = random.Random(f"{self.seed} {self._attempt} {number}")
            others = [shard for index, shard in enumerate(missing) if index % NUM_WORKERS != number]
            mine = [*missing[number::NUM_WORKERS], *order.sample(others, len(others) // 2)]  # some are done twice
            order.shuffle(mine)
            try:
                for shard in mine:
                    body = self._make(stage, shard, inputs, f"{self._attempt}.{number}")
                    manifest.commit_shard(
                        stage, shard, body, rows=ROWS_PER_SHARD, status_counts={"ok": ROWS_PER_SHARD}, inputs=inputs
                    )
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=worker, args=(n,), name=f"worker-{n}") for n in range(NUM_WORKERS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for error in errors:
            raise error

    def _make(self, stage: StageRef, shard: Shard, inputs: Mapping[str, ShardRecord], by: str) -> bytes:
        """What a worker writes; like a verifier's answers, no two attempts give the same bytes."""
        made_from = ""
        for name in shard.inputs:
            upstream = self.stages[name.partition("/")[0]]
            made_from = sha256_hex(manifest.read_shard(upstream.uri, inputs[name]))
        rows = [{"id": f"{shard.shard}-{index}", "by": by, "from": made_from} for index in range(ROWS_PER_SHARD)]
        return json.dumps(rows).encode()

    def withdraw(self, damage: DamagedShard) -> None:
        try:
            manifest.invalidate(damage.stage_uri, damage.shard)
        except StorageError as error:
            self.failures[type(error).__name__] += 1

    def check_done(self, name: str) -> bool:
        """Whether the stage says it is complete; if it does, each row must be there, once, from present inputs."""
        stage = self.stages[name]
        state = manifest.inspect(stage)
        if not state.complete:
            return False
        assert state.manifest is not None
        sources = manifest.input_records(stage, state.plan)
        rows: list[dict[str, Any]] = []
        for shard, item in zip(state.plan, state.manifest["shards"], strict=True):
            found = json.loads(manifest.read_shard(stage.uri, ShardRecord.from_json(item)))
            expected = {sources[name].sha256 for name in shard.inputs} or {""}
            assert {row["from"] for row in found} == expected, "made from something else than what is there"
            rows += found
        ids = [f"{number:05d}-{index}" for number in range(NUM_SHARDS) for index in range(ROWS_PER_SHARD)]
        assert sorted(row["id"] for row in rows) == ids
        assert state.manifest["totals"]["rows"] == len(ids)
        return True


def planned(name: str) -> list[Shard]:
    inputs = {"prompts": False, "responses": True}[name]
    return [Shard(f"{n:05d}", (f"prompts/{n:05d}",) if inputs else ()) for n in range(NUM_SHARDS)]


@contextmanager
def calm(draw: Draw) -> Iterator[None]:
    rate, draw.rate = draw.rate, 0.0
    try:
        yield
    finally:
        draw.rate = rate


def run_over_faulty_store(seed: int, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """One pipeline over a store that fails in one call of twelve; checked after every attempt."""
    store = FaultyStore(Draw(seed, rate=1 / 12))
    monkeypatch.setattr(storage, "_store", lambda uri: store)
    simulation, times_done = Simulation("memory", seed), 0
    for number in range(MAX_ATTEMPTS):
        said = [simulation.attempt(name) for name in ("prompts", "responses")]
        if number % 2:
            store.deliver_late()
        with calm(store.draw):
            done = [simulation.check_done(name) for name in ("prompts", "responses")]
        times_done += all(said) and all(done)
        if times_done == TIMES_DONE:
            break
        simulation.distrust(chance=1.0 if all(done) else 0.3)
    store.deliver_late()
    with calm(store.draw):  # what came late may have undone something; it is seen, and mended by resuming
        for name in ("prompts", "responses"):
            while not simulation.check_done(name):
                simulation.attempt(name)
    return store.draw.met


@pytest.mark.seconds
def test_a_thousand_faults_of_the_store_lose_no_row(monkeypatch: pytest.MonkeyPatch) -> None:
    met: Counter[str] = Counter()
    seed = 0
    while met.total() < NUM_FAULTS:
        seed += 1
        met += run_over_faulty_store(seed, monkeypatch)
    assert len(met) == 7, f"not every kind was drawn: {met}"
    assert min(met.values()) >= 10, met


@pytest.mark.slow
def test_many_more_faults_lose_no_row(monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(1_000, 1_150):
        run_over_faulty_store(seed, monkeypatch)


@pytest.fixture
def wire(monkeypatch: pytest.MonkeyPatch) -> FlakyS3Client:
    """An S3 client over a wire that fails in one request of six; retries do not wait."""
    import fsspec.asyn

    client = FlakyS3Client(Draw(5, rate=1 / 6))

    class FileSystem:
        loop = fsspec.asyn.get_loop()

        async def set_session(self) -> FlakyS3Client:
            return client

    monkeypatch.setattr(storage_s3_client, "_filesystem", lambda process_id, settings: FileSystem())
    monkeypatch.setattr(storage_s3_client, "FIRST_WAIT_SECONDS", 0.0001)
    monkeypatch.setattr(storage_s3_client, "LONGEST_WAIT_SECONDS", 0.001)
    return client


@pytest.mark.seconds
def test_a_thousand_faults_of_the_wire_are_not_even_seen(wire: FlakyS3Client) -> None:
    seed = 0
    while wire.draw.met.total() < NUM_FAULTS:
        seed += 1
        simulation = Simulation(f"s3://bucket/{seed}", seed)
        for name in ("prompts", "responses"):
            assert simulation.attempt(name), simulation.failures
        with calm(wire.draw):
            assert simulation.check_done("prompts")
            assert simulation.check_done("responses")
    assert set(wire.draw.met) == {"503", "SlowDown", "no connection", "lost answer", "short read"}


@pytest.mark.seconds
def test_a_writer_whose_answer_is_lost_knows_its_own_write(
    wire: FlakyS3Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    wire.draw.rate = 0.5
    monkeypatch.setattr(storage_s3, "ONE_REQUEST_BYTES", 64)
    monkeypatch.setattr(storage_s3, "PART_BYTES", 64)
    for number in range(5):
        uri = f"s3://bucket/{number}"
        for size_bytes in (0, 10, 64, 65, 1000):
            body = random.Random(size_bytes).randbytes(size_bytes)
            assert storage.create(f"{uri}-{size_bytes}", body)
            assert not storage.create(f"{uri}-{size_bytes}", b"other")
            assert storage.get(f"{uri}-{size_bytes}") == body
            storage.put(f"{uri}-{size_bytes}", body + b"more")
            assert storage.sha256(f"{uri}-{size_bytes}") == sha256_hex(body + b"more")
        assert storage.compare_and_set(uri, b"1", None)
        assert storage.compare_and_set(uri, b"2", b"1")
        assert not storage.compare_and_set(uri, b"3", b"1")
        assert len(storage.list_sizes("s3://bucket")) == 6 * (number + 1)
    assert wire.draw.met["lost answer"] > 20
    assert storage.get_many(["s3://bucket/0", "s3://bucket/absent"]) == {"s3://bucket/0": b"2"}


def test_a_store_that_stays_away_is_given_up_in_bounded_time(
    wire: FlakyS3Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    wire.draw.rate = 1.0
    monkeypatch.setattr(storage_s3_client, "RETRY_SECONDS", 0.3)
    with pytest.raises(StorageError, match="tried for 0 s"):
        storage.get("s3://bucket/object")
