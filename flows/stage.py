"""What every stage's flow does alike: open its plan, say what is reused, make what is missing, close it."""

from __future__ import annotations

import asyncio
import functools
import itertools
import logging
import time
from collections import Counter
from collections.abc import (
    AsyncIterable,
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Iterable,
    Mapping,
    Sequence,
)
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar, cast

from prefect.states import Completed

from flows.attempts import refuse_crash_loop
from flows.config import PipelineConfig
from flows.credentials import use_credentials
from flows.estimates import SHARED, amount_made
from flows.lease import holding
from flows.plain_errors import show_plain_errors
from flows.resolve import resolve
from flows.run_names import name_run
from infra import manifest
from infra.effort import Effort
from infra.errors import DamagedShard, LeaseLost, ServerError, StageFailed
from infra.manifest import Shard, ShardRecord, StageRef, StageState
from infra.provenance import provenance
from infra.redaction import clean_errors
from infra.schemas import STATUS_FAILED
from tasks.reuse import reuse_shard

logger = logging.getLogger("draftsmith.stage")

P = ParamSpec("P")
R = TypeVar("R")
Summary = dict[str, Any]

# A server or engine that dies this often in one run of a stage will not be mended by another start.
MAX_STARTS = 3
# Each costs some 10 ms; the stage's log says how many there are in all.
MAX_SHOWN_SHARDS = 500
# More damage than this in one run is not bad luck.
MAX_DAMAGED_SHARDS = 100


Stages = Mapping[str, StageRef]
PlanShards = Callable[[Stages], Sequence[Shard]]


@dataclass(frozen=True)
class StageWork:
    """What one stage has to make: its place among the others, and what of it is there already.

    Args:
        lease_epoch: of the lease under which it is made; a higher one supersedes it.
        partition: where another run holds the stage's lease and this one helps it (flows/partition.py), a name
            that tells this one's processes and folders from others on the same machine; else empty.
    """

    config: PipelineConfig
    stages: Stages
    stage: StageRef
    state: StageState
    lease_epoch: int
    partition: str = ""

    async def inputs(self) -> dict[str, ShardRecord]:
        """The present record of every upstream shard, by `<stage>/<shard>`."""
        return await asyncio.to_thread(manifest.input_records, self.stage, self.state.plan)


Make = Callable[[StageWork], Awaitable[Mapping[str, Any] | None]]


async def run_stage(
    config: PipelineConfig,
    name: str,
    plan_shards: PlanShards | None,
    make: Make,
) -> Summary:
    """Make what is missing of one stage; a stage that is complete is reused as it stands.

    Args:
        name: the stage's name in the artifact contract.
        plan_shards: its shards, from the plans of the stages before; None where `make` writes the plan itself.
        make: commits every missing shard, refuses what is not acceptable; what it returns is added to the manifest.
    """
    show_plain_errors()
    with clean_errors():
        return await _run_stage(config, name, plan_shards, make)


async def _run_stage(config: PipelineConfig, name: str, plan_shards: PlanShards | None, make: Make) -> Summary:
    await use_credentials(config)
    stages = await asyncio.to_thread(resolve, config)
    stage = stages[name]
    await name_run(name, config, stages)
    await refuse_crash_loop(config, stages)
    await asyncio.to_thread(refuse_absent_upstream, stages, stage)
    if plan_shards is not None:
        await asyncio.to_thread(manifest.write_plan, stage, await asyncio.to_thread(plan_shards, stages))
    state = await inspect(stage)
    while not state.complete:
        try:
            return await _make_missing(config, stages, stage, make)
        except LeaseLost as error:
            logger.warning("%s. This run waits for it, then makes what is still missing.", error)
        state = await inspect(stage)
    return reused(stage, state)


async def _make_missing(config: PipelineConfig, stages: Stages, stage: StageRef, make: Make) -> Summary:
    """Make what is missing under the stage's lease, which another run may hold for long."""
    async with holding(stage) as lease:
        state = await inspect(stage)
        if state.complete:
            return reused(stage, state)
        report_missing(stage, state)
        await show_reused_shards(stage, state)
        work, began = StageWork(config, stages, stage, state, lease.epoch), time.monotonic()
        extra = await make(work)
        return await close_stage(stage, extra, await effort_of(work, time.monotonic() - began))


async def effort_of(work: StageWork, seconds: float) -> Effort | None:
    """What this run has made of the stage and what it took, for later plans; None where that cannot be told."""
    state = await inspect(work.stage)
    made = [record for shard, record in state.records.items() if shard not in work.state.records]
    amount = amount_made(work.config, work.stages, work.stage.stage, made, resumed=work.lease_epoch > 1)
    num_nodes = work.config.nodes.count if work.stage.stage in SHARED else 1
    return None if amount is None else Effort(amount, seconds * num_nodes)


def own_inputs(shard: Shard, inputs: Mapping[str, ShardRecord]) -> dict[str, ShardRecord]:
    """Those records that the shard itself reads: Prefect walks through all that a task is given, for each task."""
    return {name: inputs[name] for name in shard.inputs}


def refuse_absent_upstream(stages: Stages, stage: StageRef) -> None:
    """Raise StageFailed when a stage that this one reads has not been made."""
    for name in stage.content["upstream"]:
        if manifest.read_manifest(stages[name].uri) is None:
            raise StageFailed(
                f"{stage.stage} reads {name}, which is not complete at {stages[name].uri}; "
                f"run the stages before it with this config first, or the whole pipeline"
            )


async def inspect(stage: StageRef) -> StageState:
    return await asyncio.to_thread(manifest.inspect, stage)


def report_missing(stage: StageRef, state: StageState) -> None:
    """Log what is made again and how much is left to make."""
    for shard, problem in state.problems.items():
        logger.warning("%s shard %s is made again: %s.", stage.stage, shard, problem)
    if state.missing:
        logger.info(
            "%s/%s: %d of %d shards are done, %d to make.",
            stage.stage,
            stage.key,
            len(state.records),
            len(state.plan),
            len(state.missing),
        )


def reused(stage: StageRef, state: StageState) -> Summary:
    """What the flow of an already complete stage returns: the state Cached, so that the UI shows what was skipped.

    Prefect takes a returned state as the run's own and hands its data to the caller, hence the type.
    """
    assert state.manifest is not None
    summary = summarize(stage, state.manifest, reused=True)
    totals = state.manifest["totals"]
    message = f"{stage.stage}/{stage.key} is complete: {len(state.plan)} shards, {totals['rows']} rows reused"
    return cast(Summary, Completed(name="Cached", message=message, data=summary))


async def show_reused_shards(stage: StageRef, state: StageState) -> None:
    """One Cached task run for each shard that an earlier run has committed; of very many, for the first ones."""
    for record in itertools.islice(state.records.values(), MAX_SHOWN_SHARDS):
        await reuse_shard(stage, record)


async def close_stage(stage: StageRef, extra: Mapping[str, Any] | None, effort: Effort | None) -> Summary:
    """Write the manifest of a stage whose shards are all committed."""
    taken = {} if effort is None else {"effort": effort.to_json()}
    written = await asyncio.to_thread(manifest.finish, stage, provenance(**taken), extra)
    return summarize(stage, written, reused=False)


def summarize(stage: StageRef, written: Mapping[str, Any], *, reused: bool) -> Summary:
    return {
        "stage": stage.stage,
        "key": stage.key,
        "uri": stage.uri,
        "reused": reused,
        "shards": len(written["shards"]),
        "totals": written["totals"],
    }


def refuse_failed_rows(stage: StageRef, records: Iterable[ShardRecord], max_share: float) -> None:
    """Raise StageFailed when more than `max_share` of the stage's rows are failed ones."""
    counts: Counter[str] = Counter()
    for record in records:
        counts.update(record.status_counts)
    rows = sum(counts.values())
    if rows and counts[STATUS_FAILED] > max_share * rows:
        raise StageFailed(
            f"{stage.stage}/{stage.key}: {counts[STATUS_FAILED]} of {rows} rows failed, more than the allowed "
            f"share {max_share}; the column `error` of {stage.uri}/shards says why"
        )


Job = Callable[[], Coroutine[Any, Any, Any]]


async def run_all(jobs: Iterable[Job] | AsyncIterable[Job], at_once: int) -> None:
    """Run the jobs in order, at most `at_once` together. The first error cancels the others and is raised.

    The next job is asked for only when there is room for it.
    """
    room = asyncio.Semaphore(at_once)

    async def run(job: Job) -> None:
        try:
            await job()
        finally:
            room.release()

    try:
        async with asyncio.TaskGroup() as group:
            await room.acquire()
            async for job in jobs if isinstance(jobs, AsyncIterable) else _one_by_one(jobs):
                group.create_task(run(job))
                await room.acquire()
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from None


async def _one_by_one(jobs: Iterable[Job]) -> AsyncIterator[Job]:
    for job in jobs:
        yield job


async def with_restarts(attempt: Callable[[], Awaitable[None]], what: str) -> None:
    """Repeat an attempt whose server or engine died; each attempt does only what is still missing."""
    for start in range(1, MAX_STARTS + 1):
        try:
            await attempt()
            return
        except ServerError as error:
            if start == MAX_STARTS:
                raise
            logger.warning("%s: %s. It is started again (%d of %d).", what, error, start + 1, MAX_STARTS)


def redo_damaged_shards(run_stages: Callable[P, Awaitable[R]]) -> Callable[P, Awaitable[R]]:
    """Run the stages again when a reader finds a shard that does not match its record.

    The damaged shard's record is withdrawn first, so its own stage makes it anew; everything else is reused.
    """

    @functools.wraps(run_stages)
    async def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        for _ in range(MAX_DAMAGED_SHARDS):
            try:
                return await run_stages(*args, **kwargs)
            except DamagedShard as damage:
                last = damage
                logger.warning("%s. It is made again, then the run goes on.", damage)
                await asyncio.to_thread(manifest.invalidate, damage.stage_uri, damage.shard)
        raise StageFailed(f"{MAX_DAMAGED_SHARDS} damaged shards in one run, {last} the last; the store loses data")

    return wrapped
