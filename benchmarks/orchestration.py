"""What Prefect adds to each shard: task runs, states, events, logs and the progress artifact.

    .venv/bin/python benchmarks/orchestration.py

A flow runs shards through the project's own machinery (`run_all`, a `retried_task` with the parameters that
extraction's has, `StageProgress`), whose body does nothing but hop into a thread; the same bodies then run without
Prefect. The difference is divided by the number of shards; the figure is the median of `REPEATS` flows. The server
is a real one on SQLite, its services included, started here unless PREFECT_API_URL names another.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine, Mapping
from functools import partial
from pathlib import Path
from typing import Any

NUM_SHARDS = 200
AT_ONCE = 2  # as extraction has it
REPEATS = 3
REAL_SHARD_SECONDS = 10.0


def main() -> None:
    from flows.embedded_prefect import prefect_api

    with tempfile.TemporaryDirectory(prefix="draftsmith-benchmark-") as folder:
        os.environ.setdefault("PREFECT_HOME", str(Path(folder, "prefect")))
        with prefect_api(services=True):
            from prefect.logging.handlers import APILogHandler

            measure()
            APILogHandler().flush()  # before the server goes


def measure() -> None:
    from prefect import flow

    from flows.stage import own_inputs, run_all, show_reused_shards
    from infra.fingerprint import stage_content
    from infra.manifest import Shard, ShardRecord, StageRef, StageState
    from tasks.policy import retried_task
    from tasks.progress import StageProgress

    stage = StageRef(
        "data/benchmark", "hidden_states", stage_content("hidden_states", 1, {}, {}, {"responses": "k"})
    )
    shards = [Shard(f"{index:05d}", (f"responses/{index:05d}",)) for index in range(NUM_SHARDS)]
    records = {
        f"responses/{shard.shard}": ShardRecord(
            shard.shard, f"{shard.shard}-{'0' * 12}.parquet", "0" * 64, 2**20, 64, {"ok": 64}, {}
        )
        for shard in shards
    }

    async def body(
        stage: StageRef, shard: Shard, inputs: Mapping[str, ShardRecord], engine: object, progress: StageProgress
    ) -> ShardRecord:
        record = await asyncio.to_thread(inputs.__getitem__, shard.inputs[0])
        progress.advance()
        return record

    shard_task = retried_task(name="extract-shard", run_name="extract {shard.shard}")(body)

    async def seconds(work: Callable[..., Coroutine[Any, Any, ShardRecord]], progress: StageProgress) -> float:
        began = time.perf_counter()
        jobs = (partial(work, stage, shard, own_inputs(shard, records), object(), progress) for shard in shards)
        await run_all(jobs, AT_ONCE)
        return time.perf_counter() - began

    @flow(name="benchmark")
    async def with_prefect() -> float:
        async with StageProgress("hidden_states", NUM_SHARDS) as progress:
            return await seconds(shard_task, progress)

    @flow(name="benchmark-reuse")
    async def reusing() -> float:
        began = time.perf_counter()
        state = StageState(tuple(shards), {shard.shard: records[shard.inputs[0]] for shard in shards}, None, {})
        await show_reused_shards(stage, state)
        return time.perf_counter() - began

    async def without() -> float:
        return await seconds(body, StageProgress("hidden_states", NUM_SHARDS))

    asyncio.run(with_prefect())  # the first flow pays for imports and the database's first pages
    plain = statistics.median(asyncio.run(without()) for _ in range(REPEATS))
    whole = statistics.median(asyncio.run(with_prefect()) for _ in range(REPEATS))
    reused = statistics.median(asyncio.run(reusing()) for _ in range(REPEATS))
    added_ms = 1000 * (whole - plain) / NUM_SHARDS
    print(f"{NUM_SHARDS} shards, {AT_ONCE} at once: {whole:.2f} s with Prefect, {plain:.3f} s without")
    print(f"a shard shown as Cached: {1000 * reused / NUM_SHARDS:.1f} ms")
    share = added_ms / 1000 / REAL_SHARD_SECONDS
    print(f"share of a stage whose shards take {REAL_SHARD_SECONDS:g} s: {100 * share:.2f} %")
    print(f"prefect_ms_per_shard={added_ms:.1f}")


if __name__ == "__main__":
    sys.exit(main())
