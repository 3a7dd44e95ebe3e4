"""How long it takes to see what is done and what is missing in a stage of 10,000 shards, on a local folder.

    .venv/bin/python benchmarks/planning.py [FOLDER]

The stage reads one shard of a complete upstream stage for each of its own, as extraction does. Unfinished, it lacks
its last shard and its manifest, so every record is read by itself; complete, its manifest is read. Each figure is
the median of `REPEATS` inspections with the files in the page cache. FOLDER is where the scratch folder is made.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Mapping

from infra import manifest
from infra.fingerprint import stage_content
from infra.manifest import Shard, ShardRecord, StageRef

NUM_SHARDS = 10_000
REPEATS = 3


def main() -> None:
    with tempfile.TemporaryDirectory(
        prefix="draftsmith-benchmark-", dir=sys.argv[1] if len(sys.argv) > 1 else None
    ) as root:
        began = time.perf_counter()
        responses = StageRef(root, "responses", stage_content("responses", 1, {}, {}, {}))
        commit(responses, [Shard(f"{index:05d}") for index in range(NUM_SHARDS)], {})
        manifest.finish(responses, {})

        upstream = {"responses": responses.key}
        stage = StageRef(root, "hidden_states", stage_content("hidden_states", 1, {}, {}, upstream))
        shards = [Shard(f"{index:05d}", (f"responses/{index:05d}",)) for index in range(NUM_SHARDS)]
        manifest.write_plan(stage, shards)
        inputs = manifest.input_records(stage, shards)
        commit(stage, shards[:-1], inputs, planned=True)
        print(f"{2 * NUM_SHARDS - 1} shards committed in {time.perf_counter() - began:.1f} s")

        unfinished_seconds = inspect_seconds(stage, num_missing=1)
        commit(stage, shards[-1:], inputs, planned=True)
        manifest.finish(stage, {})
        complete_seconds = inspect_seconds(stage, num_missing=0)
    print(f"plan_unfinished_s={unfinished_seconds:.2f} plan_complete_s={complete_seconds:.2f}")


def commit(
    stage: StageRef, shards: list[Shard], inputs: Mapping[str, ShardRecord], *, planned: bool = False
) -> None:
    if not planned:
        manifest.write_plan(stage, shards)
    for shard in shards:
        body = f"{stage.stage} {shard.shard}".encode()
        manifest.commit_shard(stage, shard, body, rows=64, status_counts={"ok": 64}, inputs=inputs)


def inspect_seconds(stage: StageRef, num_missing: int) -> float:
    """Median time of an inspection, which must find what is there."""
    seconds = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        state = manifest.inspect(stage)
        seconds.append(time.perf_counter() - began)
        assert len(state.missing) == num_missing
        assert state.complete == (num_missing == 0)
    return statistics.median(seconds)


if __name__ == "__main__":
    main()
