"""Stage 3: the verifier's hidden states over its own responses."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from functools import partial
from typing import Any

from prefect import flow

from flows.config import PipelineConfig
from flows.interchange import make_imported_states
from flows.nodes import Feed, helped
from flows.stage import Stages, StageWork, Summary, inspect, own_inputs, run_stage
from infra import manifest, storage
from infra.extraction.budget import (
    FEWEST_SHARDS,
    Budget,
    Measured,
    raw_bytes_per_token,
    readable,
    room_said,
    shards_at_a_time,
    stage_totals,
)
from infra.extraction.build_pool import BuildPool
from infra.extraction.config import resolve_layer_ids, states_meta
from infra.extraction.engine import ExtractionEngine, engine_configs
from infra.extraction.pool import EnginePool, ShardQueue
from infra.extraction.staging import Staging
from infra.gauges import show_extraction
from infra.generation.progress import Rate
from infra.manifest import Shard, ShardRecord, StageState
from infra.schemas import STATUS_FAILED
from infra.state_checks.checks import StateChecks, open_head
from infra.state_checks.verdict import refuse_bad_states
from infra.verifiers.verifier import Verifier, resolve_shape
from tasks.extract import building, extract_shard, extracting, staging_of
from tasks.progress import StageProgress
from tasks.verifier import materialize_verifier

logger = logging.getLogger("draftsmith.extraction")


@flow(name="extract", flow_run_name="extract {config.root}")
async def extract(config: PipelineConfig) -> Summary:
    """Extract hidden states for every response. Reads `responses`, writes `hidden_states`."""
    make = make_hidden_states if config.import_states is None else make_imported_states
    return await run_stage(config, "hidden_states", plan_shards, make)


def plan_shards(stages: Stages) -> list[Shard]:
    """One shard of hidden states for each shard of responses, under the same id."""
    planned = manifest.read_plan(stages["responses"].uri)
    return [Shard(shard.shard, (f"responses/{shard.shard}",)) for shard in planned]


async def make_hidden_states(work: StageWork) -> Mapping[str, Any]:
    peak_staging_bytes = 0
    if work.state.missing:
        async with helped(work, shards_at_once(work.config)):
            peak_staging_bytes = await extract_missing(work)
    records = (await inspect(work.stage)).records.values()
    config = work.config.extract
    refuse_bad_states(work.stage, records, config.max_failed_share, config.checks)
    shape = await asyncio.to_thread(resolve_shape, work.config.verifier)
    layer_ids = resolve_layer_ids(config, shape)
    return stage_totals(records, await work.inputs(), config.encoding, layer_ids, peak_staging_bytes)


async def extract_missing(work: StageWork) -> int:
    """Extract every missing shard; on many nodes, those that this one claims.

    Returns:
        The most bytes that were staged at one time.
    """
    config, stage, state = work.config, work.stage, work.state
    progress = StageProgress("hidden_states", len(state.plan), len(state.records))
    making: Making | None = None

    def see(state: StageState) -> None:
        progress.at(len(state.records))
        if making is not None:
            making.see(state)

    block_size = shards_at_once(config)
    async with Feed(work, block_size, see) as feed:
        if not await feed.begin():
            return 0
        verifier = await materialize_verifier(config.verifier)
        making = await asyncio.to_thread(Making, work, verifier, await work.inputs(), feed, progress)
        # What a shard takes is measured once, before the others are begun; an earlier run may have done so.
        queue = ShardQueue(feed, first_alone=not making.budget_said)
        ahead = min(len(state.missing), block_size)
        async with (
            staging_of(stage, config.extract, work.partition) as staging,
            building(stage, staging, making.checks, verifier, ahead, work.partition) as making.builders,
            progress,
        ):
            trusted = config.verifier.trust_remote_code
            launches = [
                partial(
                    extracting,
                    *(stage, number, config.extract, vllm, verifier, staging, work.partition),
                    trust_remote_code=trusted,
                )
                for number, vllm in enumerate(engine_configs(config.extract, config.vllm))
            ]
            await EnginePool(launches, making.shard, queue, partial(making.shards_per_engine, staging)).make_all()
        return staging.peak_bytes


def shards_at_once(config: PipelineConfig) -> int:
    """Shards that this node's engines have in hand at a time, at first."""
    return config.extract.engines * (config.extract.shards_per_engine or FEWEST_SHARDS)


class Making:
    """What the shards of one run of the stage share.

    Raises:
        InputError: layer ids or checks do not fit the verifier.
        StageFailed: by what an earlier run has left: the root cannot hold the rest, or too many rows have failed.
    """

    def __init__(
        self,
        work: StageWork,
        verifier: Verifier,
        inputs: Mapping[str, ShardRecord],
        feed: Feed,
        progress: StageProgress,
    ) -> None:
        self.builders: BuildPool
        self.budget_said = False
        self._feed, self._progress = feed, progress
        self._num_tokens, self._token_rate = 0, Rate()
        self._token_rate.sample(0, time.monotonic())
        self._config, self._stage, self._plan = work.config.extract, work.stage, work.state.plan
        self._inputs = inputs
        self._num_rows = sum(inputs[name].rows for shard in self._plan for name in shard.inputs)
        self._records = dict(work.state.records)
        self._num_failed = sum(map(num_failed, self._records.values()))
        meta = states_meta(self._config, verifier)
        self.checks = StateChecks(self._config.checks, meta, open_head(self._config.checks, verifier))
        self.checks.learn(record.extra for record in self._records.values())
        self._refuse_failing()
        self._say_budget()
        if not self.budget_said:
            longest = work.config.vllm.max_model_len or work.config.generate.max_tokens
            self._warn_of_bound(longest * raw_bytes_per_token(len(meta.layer_ids), meta.hidden_size))

    def see(self, state: StageState) -> None:
        """Take what other nodes have committed for known."""
        self._records.update(state.records)
        self._num_failed = sum(map(num_failed, self._records.values()))

    async def shard(self, engine: ExtractionEngine, shard: Shard) -> None:
        """Make one.

        Raises:
            StageFailed: the root cannot hold the others, or too many rows have failed already.
        """
        inputs = own_inputs(shard, self._inputs)
        record = await extract_shard(self._stage, shard, inputs, engine, self.builders)
        self._records[shard.shard] = record
        self._num_failed = sum(map(num_failed, self._records.values()))
        self._num_tokens += record.extra.get("num_tokens", 0)
        self._token_rate.sample(self._num_tokens, time.monotonic())
        show_extraction(self._stage, self._records.values(), self._num_rows, self._token_rate.per_second)
        self._progress.advance()
        await self._feed.made(shard)
        self._refuse_failing()
        if not self.budget_said:
            self._say_budget()

    def shards_per_engine(self, staging: Staging) -> int:
        """How many an engine is to have at a time."""
        return shards_at_a_time(self._config, list(self._records.values()), staging.limit_bytes)

    def _refuse_failing(self) -> None:
        """Raise StageFailed as soon as more rows have failed than may of the whole stage."""
        if self._num_failed > self._config.max_failed_share * self._num_rows:
            records = self._records.values()
            refuse_bad_states(self._stage, records, self._config.max_failed_share, self._config.checks)

    def _say_budget(self) -> None:
        """Log what the stage takes, once that can be told. Raises StageFailed where the root cannot hold it."""
        measured = Measured.of(self._records.values(), self._inputs)
        left = [
            self._inputs[name] for shard in self._plan if shard.shard not in self._records for name in shard.inputs
        ]
        if measured is None or not left:
            return
        budget = Budget.of(measured, left, self._config, storage.free_bytes(self._stage.root))
        budget.require_room(self._stage)
        logger.info("%s/%s: %s.", self._stage.stage, self._stage.key, budget)
        self.budget_said = True

    def _warn_of_bound(self, longest_bytes: int) -> None:
        """Warn when the root could not hold the stage if every response were as long as may be."""
        longest_bytes *= self._num_rows
        room_bytes = storage.free_bytes(self._stage.root)
        if room_bytes is not None and longest_bytes > room_bytes:
            logger.warning(
                "%s may not hold the hidden states: up to %s if all %d responses were as long as may be, and %s. "
                "The first shard will tell.",
                *(self._stage.root, readable(longest_bytes), self._num_rows, room_said(room_bytes)),
            )


def num_failed(record: ShardRecord) -> int:
    return record.status_counts.get(STATUS_FAILED, 0)
