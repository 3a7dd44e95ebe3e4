"""One stage on many nodes: which shards a run of it makes, and the partition runs that help it.

The run that holds the stage's lease works like any other node and starts a partition run (flows/partition.py) for
each further one. All of them claim blocks of shards (infra/claims.py), so nothing is dealt out beforehand: a node
that comes late, goes early or is slow makes fewer, and with none but the first the stage is made all the same.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Any
from uuid import UUID

from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import (
    FlowRunFilter,
    FlowRunFilterId,
    FlowRunFilterState,
    FlowRunFilterStateType,
    FlowRunFilterTags,
)
from prefect.client.schemas.objects import FlowRun, StateType
from prefect.deployments import arun_deployment
from prefect.exceptions import ObjectNotFound
from prefect.runtime import flow_run
from prefect.states import Cancelling

from flows.stage import StageWork
from infra.claims import Claims
from infra.errors import InputError
from infra.leases import Owner, current, lease_name, lease_uri
from infra.manifest import Shard, StageState

logger = logging.getLogger("draftsmith.nodes")

# While others make the last shards: how often to look whether they have, or have died. Looking reads every record,
# so it takes at most a third of the time.
LOOK_SECONDS = 5.0
# How often the server is asked how the partition runs do.
WATCH_SECONDS = 10.0
# A node that crashes this often in one run of a stage is given up; the others make its share.
MAX_CRASHES = 5

_BEFORE_RUNNING = (StateType.SCHEDULED, StateType.PENDING)
_LIVING = (*_BEFORE_RUNNING, StateType.RUNNING)


class Feed:
    """The shards that this run of a stage makes, one after another; for one event loop.

        async with Feed(work, block_size) as feed:
            if await feed.begin():
                async for shard in feed:
                    ...
                    await feed.made(shard)

    Alone, they are the missing ones. On many nodes they are those of the blocks that it claims: a partition run
    ends when no block is free, the run that holds the stage's lease when nothing is missing any more.

    Args:
        block_size: shards that one node has in hand at a time.
        seen: called now and then with what the stage has, where other nodes add to it.
    """

    def __init__(
        self, work: StageWork, block_size: int, seen: Callable[[StageState], None] = lambda state: None
    ) -> None:
        shared = bool(work.partition) or work.config.nodes.count > 1
        run = str(flow_run.get_id() or "") if shared else ""
        self._claims = Claims(work.stage, work.state.plan, block_size, run) if shared else None
        self._ready = deque([] if shared else work.state.missing)
        self._waits = not work.partition
        self._seen = seen
        self._idle = False
        self.mine: set[str] = set()
        """Ids of the shards that were given out here."""

    async def __aenter__(self) -> Feed:
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._claims is not None:
            await asyncio.shield(asyncio.to_thread(self._claims.release))

    async def begin(self) -> bool:
        """Whether there is anything to make here; a node without need not load a model."""
        shard = await self._next()
        if shard is not None:
            self._ready.appendleft(shard)
        return shard is not None

    async def __aiter__(self) -> AsyncIterator[Shard]:
        while (shard := await self._next()) is not None:
            yield shard

    async def made(self, shard: Shard) -> None:
        """The shard is committed."""
        if self._claims is not None:
            await asyncio.to_thread(self._claims.made, shard)

    async def _next(self) -> Shard | None:
        while not self._ready and self._claims is not None:
            began = time.monotonic()
            taken, state = await asyncio.to_thread(self._claims.take)
            self._seen(state)
            self._ready.extend(taken)
            self.mine.update(shard.shard for shard in taken)
            if taken:
                break
            if not self._waits or not state.missing:
                return None
            self._say_idle(state)
            await asyncio.sleep(max(LOOK_SECONDS, 2 * (time.monotonic() - began)))
        return self._ready.popleft() if self._ready else None

    def _say_idle(self, state: StageState) -> None:
        if not self._idle:
            self._idle = True
            logger.info("Every block is claimed; %d shards are still being made.", len(state.missing))


@contextlib.asynccontextmanager
async def helped(work: StageWork, block_size: int) -> AsyncIterator[None]:
    """Partition runs help with the stage for as long as the context lasts; none where `nodes.count` is 1.

    One that has crashed is started anew, one that has failed is not: its state says why, and this run finds out by
    itself whether the cause is its own too. Those of an earlier attempt of this run go on and are counted.

    Raises:
        InputError: the Prefect server has no such deployment.
    """
    num_blocks = -(-len(work.state.missing) // block_size)
    wanted = min(work.config.nodes.count, num_blocks) - 1
    if wanted < 1 or work.partition:
        yield
        return
    team = Partitions(work)
    await team.start(wanted)
    keeper = asyncio.create_task(team.keep())
    everything_made = False
    try:
        yield
        everything_made = True
    finally:
        keeper.cancel()
        await asyncio.gather(keeper, return_exceptions=True)
        if everything_made or await asyncio.to_thread(_still_ours, work):
            await asyncio.shield(team.cancel(_BEFORE_RUNNING if everything_made else _LIVING))


def _still_ours(work: StageWork) -> bool:
    """Whether no other run has taken the stage over; that one goes on with the partition runs."""
    stage = work.stage
    held = current(lease_uri(stage.root, lease_name(stage.stage, stage.key)))
    return held is None or held.owner == Owner.here()


class Partitions:
    """The partition runs of one stage."""

    def __init__(self, work: StageWork) -> None:
        self._config, self._stage = work.config, work.stage
        self._tag = work.stage.uri  # another root may have a stage of the same key
        self._living: set[UUID] = set()

    async def start(self, count: int) -> None:
        """Let so many runs help, with those that an earlier attempt has left. Raises InputError as `helped`."""
        tagged = FlowRunFilter(tags=FlowRunFilterTags(all_=[self._tag]), state=_state_filter(_LIVING))
        self._living = {run.id for run in await _read_runs(tagged)}
        if self._living:
            logger.info("%d partition runs are there from before.", len(self._living))
        for _ in range(count - len(self._living)):
            await self._dispatch()

    async def keep(self) -> None:
        """Start anew what crashes, until cancelled. The work goes on whatever happens here."""
        crashes = 0
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            try:
                for run in await self._ended():
                    self._living.discard(run.id)
                    if run.state_type != StateType.CRASHED:
                        self._tell_ended(run)
                    elif crashes < MAX_CRASHES:
                        crashes += 1
                        logger.warning("%s has crashed; its shards go to others, and it is started anew.", run.name)
                        await self._dispatch()
                    else:
                        logger.error("%s has crashed, the %dth to do so: it is given up.", run.name, crashes + 1)
            except Exception as error:
                logger.warning("The partition runs cannot be looked after now: %r. The work goes on.", error)

    async def cancel(self, states: tuple[StateType, ...]) -> None:
        """End those of the runs that are in such a state. Never fails: they find nothing to do, and end."""
        try:
            for run in await _read_runs(FlowRunFilter(id=_ids(self._living), state=_state_filter(states))):
                async with get_client() as client:
                    await client.set_flow_run_state(run.id, Cancelling(message="the stage needs no more help"))
        except Exception as error:
            logger.warning("The partition runs of %s could not be cancelled: %r", self._tag, error)

    async def _dispatch(self) -> None:
        deployment = self._config.nodes.deployment
        parameters: dict[str, Any] = {"config": self._config.model_dump(mode="json"), "stage": self._stage.stage}
        try:
            run = await arun_deployment(deployment, parameters=parameters, timeout=0, tags=[self._tag])
        except ObjectNotFound:
            raise InputError(
                "nodes.count",
                f"the Prefect server has no deployment {deployment} for the other nodes; `prefect deploy --all` "
                "on a server that stays makes it, and nodes.count=1 needs none",
            ) from None
        self._living.add(run.id)
        logger.info("Partition run %s is to help with %s.", run.name, self._tag)

    async def _ended(self) -> list[FlowRun]:
        runs = await _read_runs(FlowRunFilter(id=_ids(self._living))) if self._living else []
        return [run for run in runs if run.state is not None and run.state.is_final()]

    def _tell_ended(self, run: FlowRun) -> None:
        message = run.state.message if run.state else None
        if run.state_type == StateType.FAILED:
            logger.error("%s has failed and is not started anew: %s", run.name, message)
        else:
            logger.info("%s has ended: %s.", run.name, run.state_name)


async def _read_runs(which: FlowRunFilter) -> list[FlowRun]:
    async with get_client() as client:
        return await client.read_flow_runs(flow_run_filter=which)


def _ids(ids: set[UUID]) -> FlowRunFilterId:
    return FlowRunFilterId(any_=list(ids))


def _state_filter(types: tuple[StateType, ...]) -> FlowRunFilterState:
    return FlowRunFilterState(type=FlowRunFilterStateType(any_=list(types)))
