"""How long a run takes to see what is missing of a stage of 10,000 shards, in a folder and on a real S3 server.

    .venv/bin/python benchmarks/resume.py [FOLDER]

The stage reads one shard of a complete upstream stage for each of its own, as extraction does. `plan_local_s` and
`plan_s3_s`: half of its shards are done, so their records are read one by one (the S3 server is SeaweedFS on this
machine, its objects in the page cache). `reads_when_complete`: how many objects are read once the stage is
complete, beside one listing: its plan, its manifest, the manifest before it. Times are the median of `REPEATS`
inspections. FOLDER is where the scratch folder is made.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from infra import manifest, storage
from infra.fingerprint import stage_content
from infra.local_s3 import LocalS3
from infra.manifest import Shard, ShardRecord, StageRef
from infra.stores import local as storage_local

NUM_SHARDS = 10_000
REPEATS = 3
NUM_UPLOADERS = 16


def main() -> None:
    parent = sys.argv[1] if len(sys.argv) > 1 else None
    with tempfile.TemporaryDirectory(prefix="draftsmith-benchmark-", dir=parent) as folder:
        root = str(Path(folder, "root"))
        began = time.perf_counter()
        responses = stage_at(root, "responses")
        shards = [Shard(f"{index:05d}") for index in range(NUM_SHARDS)]
        manifest.write_plan(responses, shards)
        commit(responses, shards, {})
        manifest.finish(responses, {})

        stage = stage_at(root, "hidden_states", responses)
        shards = [Shard(f"{index:05d}", (f"responses/{index:05d}",)) for index in range(NUM_SHARDS)]
        manifest.write_plan(stage, shards)
        inputs = manifest.input_records(stage, shards)
        commit(stage, shards[::2], inputs)
        print(f"{NUM_SHARDS + NUM_SHARDS // 2} shards committed in {time.perf_counter() - began:.1f} s")
        local_seconds = inspect_seconds(stage, num_missing=NUM_SHARDS // 2)

        with LocalS3(Path(folder, "s3")) as server:
            os.environ.update(server.environment)
            began = time.perf_counter()
            upstream = [storage.join("responses", responses.key, name) for name in ("plan.json", "manifest.json")]
            own = [storage.join("hidden_states", stage.key, name) for name in storage.list_sizes(stage.uri)]
            upload(root, server.root, [*upstream, *own])
            print(f"{len(own) + 2} objects put on S3 in {time.perf_counter() - began:.1f} s")
            s3_seconds = inspect_seconds(StageRef(server.root, stage.stage, stage.content), NUM_SHARDS // 2)

        commit(stage, shards[1::2], inputs)
        manifest.finish(stage, {})
        reads = count_reads(stage)
    print(f"plan_local_s={local_seconds:.2f} plan_s3_s={s3_seconds:.2f} reads_when_complete={reads}")


def stage_at(root: str, name: str, *upstream: StageRef) -> StageRef:
    return StageRef(root, name, stage_content(name, 1, {}, {}, {stage.stage: stage.key for stage in upstream}))


def commit(stage: StageRef, shards: Sequence[Shard], inputs: Mapping[str, ShardRecord]) -> None:
    for shard in shards:
        body = f"{stage.stage} {shard.shard}".encode()
        manifest.commit_shard(stage, shard, body, rows=64, status_counts={"ok": 64}, inputs=inputs)


def upload(local_root: str, root: str, names: Sequence[str]) -> None:
    def one(name: str) -> None:
        storage.put(storage.join(root, name), storage.get(storage.join(local_root, name)))

    with ThreadPoolExecutor(NUM_UPLOADERS) as pool:
        list(pool.map(one, names))


def inspect_seconds(stage: StageRef, num_missing: int) -> float:
    """Median time of an inspection, which must find what is there."""
    seconds = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        state = manifest.inspect(stage)
        seconds.append(time.perf_counter() - began)
        assert len(state.missing) == num_missing
    print(f"{stage.root.partition(':')[0]}: " + " ".join(f"{each:.2f} s" for each in seconds))
    return statistics.median(seconds)


def count_reads(stage: StageRef) -> int:
    """Objects read by one inspection of a complete stage in a folder."""
    read, count = storage_local.get, 0

    def counted(uri: str) -> bytes:
        nonlocal count
        count += 1
        return read(uri)

    storage_local.get = counted
    try:
        assert manifest.inspect(stage).complete
    finally:
        storage_local.get = read
    return count


if __name__ == "__main__":
    main()
