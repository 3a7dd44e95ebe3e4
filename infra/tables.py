"""Read committed Parquet shards."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from infra import manifest
from infra.manifest import Shard, ShardRecord, StageRef


def read_table(stage_uri: str, record: ShardRecord) -> Any:
    """A shard's rows as an Arrow table, its bytes checked against the record.

    Raises:
        DamagedShard: the object is absent or not what was committed.
    """
    return pq.read_table(pa.BufferReader(manifest.read_shard(stage_uri, record)))


def read_input(stage: StageRef, shard: Shard, record: ShardRecord) -> Any:
    """The Arrow table of a shard's first input, whose present record is given."""
    return read_table(stage.upstream_uri(shard.inputs[0].partition("/")[0]), record)
