"""What a stage of hidden states takes: bytes and hours, from what its committed shards have shown.

Tokens are known only where states are: a shard that is still to be made is taken to have as many for each byte of
its responses as the shards that are made.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from infra.errors import StageFailed
from infra.extraction.config import ExtractConfig
from infra.machine import free_memory_bytes, usable_cores
from infra.manifest import ShardRecord, StageRef
from infra.state_checks.on_policy import OnPolicy
from infra.state_checks.verdict import FailedChecks

BF16_BYTES = 2
# Stored bytes over those of raw bf16, as measured on the small verifier (docs/performance.md).
EXPECTED_RATIO = {"bf16": 1.0, "bf16_split": 0.70, "fp8_e4m3": 0.51}
# What `extract_shard` measures, beside what `build_shard` puts into the record.
EXTRACT_SECONDS, ENCODE_SECONDS = "extract_seconds", "encode_seconds"
# Shards that an engine has at a time at least: one that it computes, one that is built meanwhile.
FEWEST_SHARDS = 2
# Shards that tell how many an engine needs: the first ones of a run are slower.
RECENT_SHARDS = 8
# What a process that builds shards was seen to take: by itself, and so many times the longest sample's bf16 states.
BUILDER_BYTES, BUILDER_STATES = 256 * 2**20, 5


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Sums over committed shards.

    Attributes:
        input_bytes: of the responses they were made from.
        raw_bytes: their states in bf16.
        stored_bytes: the files.
        extract_seconds: that an engine has worked for them.
        encode_seconds: for checking and encoding, by one process.
    """

    num_tokens: int
    input_bytes: int
    raw_bytes: int
    stored_bytes: int
    extract_seconds: float
    encode_seconds: float

    @classmethod
    def of(cls, records: Iterable[ShardRecord], inputs: Mapping[str, ShardRecord]) -> Measured | None:
        """None where no shard with tokens is there, or none that says how long it took.

        Args:
            inputs: records of the responses, by name.
        """
        told = [record for record in records if record.extra.get("num_tokens") and EXTRACT_SECONDS in record.extra]
        if not told:
            return None
        return cls(
            num_tokens=sum(record.extra["num_tokens"] for record in told),
            input_bytes=sum(inputs[name].size_bytes for record in told for name in record.inputs),
            raw_bytes=sum(record.extra["state_bytes"]["raw"] for record in told),
            stored_bytes=sum(record.size_bytes for record in told),
            extract_seconds=sum(record.extra[EXTRACT_SECONDS] for record in told),
            encode_seconds=sum(record.extra[ENCODE_SECONDS] for record in told),
        )

    def tokens_per_second(self, num_engines: int, num_builders: int) -> float:
        """Of that many engines, or of the processes that encode for them where those are slower."""
        builders = min(num_builders, usable_cores())
        seconds = max(self.extract_seconds / num_engines, self.encode_seconds / builders)
        return self.num_tokens / max(seconds, 1e-9)


def shards_at_a_time(config: ExtractConfig, records: Sequence[ShardRecord], limit_bytes: int) -> int:
    """How many shards an engine is to have at a time: what the config says, or as many as keep it busy.

    While it computes one, the others are built. In step, those would be as many as it can compute while one is
    built, by the latest records. They are not in step: with just that many an H200's engine was busy for two thirds
    of the time. So it is given twice as many; no more than its share of the cores, than the staging's bound holds
    of the shards' files, or than would fit a second time into the memory that is free, but always two.

    Args:
        records: in the order they were made.
        limit_bytes: bound of the staging.
    """
    if config.shards_per_engine is not None:
        return config.shards_per_engine
    told = [record for record in records if record.extra.get(EXTRACT_SECONDS)][-RECENT_SHARDS:]
    if not told:
        return FEWEST_SHARDS
    extract_seconds: float = sum(record.extra[EXTRACT_SECONDS] for record in told)
    encode_seconds: float = sum(record.extra[ENCODE_SECONDS] for record in told)
    wanted = 2 * (1 + math.ceil(encode_seconds / extract_seconds))
    file_bytes = sum(record.size_bytes for record in told) // len(told)
    most = min(usable_cores(), limit_bytes // max(1, file_bytes), free_memory_bytes() // _builder_bytes(told))
    return max(FEWEST_SHARDS, min(wanted, most // config.engines))


def _builder_bytes(records: Sequence[ShardRecord]) -> int:
    raw_bytes: int = sum(record.extra["state_bytes"]["raw"] for record in records)
    num_tokens: int = sum(record.extra["num_tokens"] for record in records)
    token_bytes = raw_bytes // max(1, num_tokens)
    longest_tokens: int = max(record.extra.get("longest_tokens", 0) for record in records)
    return BUILDER_BYTES + BUILDER_STATES * longest_tokens * token_bytes


@dataclass(frozen=True, kw_only=True)
class Budget:
    """What is left of a stage to make, and the room for it.

    Attributes:
        room_bytes: free on the root; None where nobody knows (S3).
    """

    encoding: str
    num_engines: int
    tokens_done: int
    tokens_left: int
    bytes_per_token: float
    tokens_per_second: float
    room_bytes: int | None

    @classmethod
    def of(
        cls, measured: Measured, left: Iterable[ShardRecord], config: ExtractConfig, room_bytes: int | None
    ) -> Budget:
        """The budget for the shards of responses that are left."""
        left_bytes = sum(record.size_bytes for record in left)
        num_builders = config.engines * (config.shards_per_engine or usable_cores())
        return cls(
            encoding=config.encoding,
            num_engines=config.engines,
            tokens_done=measured.num_tokens,
            tokens_left=round(measured.num_tokens * left_bytes / max(measured.input_bytes, 1)),
            bytes_per_token=measured.stored_bytes / measured.num_tokens,
            tokens_per_second=measured.tokens_per_second(config.engines, num_builders),
            room_bytes=room_bytes,
        )

    @property
    def bytes_left(self) -> float:
        return self.tokens_left * self.bytes_per_token

    def __str__(self) -> str:
        total_bytes = (self.tokens_done + self.tokens_left) * self.bytes_per_token
        engines = f" with {self.num_engines} engines" if self.num_engines > 1 else ""
        return (
            f"{self.tokens_left:,} of {self.tokens_done + self.tokens_left:,} tokens left, "
            f"{self.bytes_per_token:,.0f} bytes each as {self.encoding}: {readable(self.bytes_left)} of "
            f"{readable(total_bytes)}; {self.tokens_per_second:,.0f} tokens/s{engines}: "
            f"{lasting(self.tokens_left / self.tokens_per_second / 3600)}; {room_said(self.room_bytes)}"
        )

    def require_room(self, stage: StageRef) -> None:
        """Raises StageFailed when the root cannot hold what is left."""
        if self.room_bytes is not None and self.bytes_left > self.room_bytes:
            raise StageFailed(
                f"{stage.stage}/{stage.key}: {stage.root} cannot hold what is left: {self}. Free some or take a "
                "larger root and run again, which goes on from what is committed; extract.encoding makes a smaller "
                "stage, from nothing"
            )


def room_said(room_bytes: int | None) -> str:
    return "how much the root can hold is not known" if room_bytes is None else f"{readable(room_bytes)} are free"


def raw_bytes_per_token(num_layers: int, hidden_size: int) -> int:
    """Bytes of one token's states in bf16."""
    return num_layers * hidden_size * BF16_BYTES


def lasting(hours: float) -> str:
    """A time for a person: `2.5 hours`, `40 min`."""
    return f"{hours:.1f} hours" if hours >= 1 else f"{math.ceil(hours * 60)} min"


def readable(size_bytes: float) -> str:
    """A number of bytes for a person: 1.5 TB."""
    for unit in ("B", "KB", "MB", "GB"):
        if size_bytes < 1000:
            return f"{size_bytes:.3g} {unit}"
        size_bytes /= 1000
    return f"{size_bytes:.1f} TB"


def stage_totals(
    records: Iterable[ShardRecord],
    inputs: Mapping[str, ShardRecord],
    encoding: str,
    layer_ids: Sequence[int],
    peak_staging_bytes: int,
) -> dict[str, Any]:
    """What the stage's manifest says beside its shards: the layers, sums over them, and one engine's rate.

    Args:
        peak_staging_bytes: of the run that writes the manifest; 0 where it had nothing to extract.
    """
    records = list(records)
    extras = [record.extra for record in records]
    failed = FailedChecks()
    for extra in extras:
        failed.add_json(extra.get("failed_checks", {}))
    totals: dict[str, Any] = {
        "layer_ids": list(layer_ids),
        "encoding": encoding,
        "num_tokens": sum(extra.get("num_tokens", 0) for extra in extras),
        "raw_bytes": sum(extra.get("state_bytes", {}).get("raw", 0) for extra in extras),
        "stored_bytes": sum(extra.get("state_bytes", {}).get("stored", 0) for extra in extras),
        "peak_staging_bytes": peak_staging_bytes,
        "failed_checks": failed.to_json(),
    }
    if measured := Measured.of(records, inputs):
        totals["tokens_per_second"] = round(measured.tokens_per_second(1, 2), 1)
        totals["encode_mb_per_s"] = round(measured.raw_bytes / 1e6 / max(measured.encode_seconds, 1e-9), 1)
    if judged := [OnPolicy.from_json(extra["on_policy"]) for extra in extras if "on_policy" in extra]:
        totals["on_policy"] = sum(judged, OnPolicy()).to_json()
    return {"extraction": totals}
