"""What a stage is made of: its place, its planned shards, their records, and what an inspection found."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from infra import storage
from infra.fingerprint import canonical_json, sha256_hex, stage_key

RECORD_FIELDS = ("shard", "data", "sha256", "size_bytes", "rows", "status_counts", "inputs")


@dataclass(frozen=True)
class StageRef:
    """Where one stage of one configuration lives. `content` is exactly what its key hashes."""

    root: str
    stage: str
    content: Mapping[str, Any]

    @cached_property
    def key(self) -> str:
        return stage_key(dict(self.content))

    @property
    def uri(self) -> str:
        return storage.join(self.root, self.stage, self.key)

    @property
    def plan_uri(self) -> str:
        return storage.join(self.uri, "plan.json")

    @property
    def manifest_uri(self) -> str:
        return storage.join(self.uri, "manifest.json")

    def upstream_uri(self, stage: str) -> str:
        """Folder of the stage this one reads, by the key in its content."""
        return storage.join(self.root, stage, self.content["upstream"][stage])


@dataclass(frozen=True)
class Shard:
    """One planned unit of work.

    Args:
        shard: its id, five digits: "00012".
        inputs: what it reads, as `<stage>/<shard>` of upstream stages.
        extra: more that the plan fixes, such as the `file` it writes or the `split` it holds.
    """

    shard: str
    inputs: tuple[str, ...] = ()
    extra: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return {"shard": self.shard, "inputs": list(self.inputs), **self.extra}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Shard:
        """Raises KeyError, TypeError, ValueError: it is no shard, or its files would lie outside of the stage."""
        extra = {name: item for name, item in value.items() if name not in ("shard", "inputs")}
        if not is_name(value["shard"]) or not is_path(extra.get("file", value["shard"])):
            raise ValueError(f"a shard {value['shard']!r} would lie outside of its stage")
        return cls(value["shard"], tuple(value["inputs"]), extra)


@dataclass(frozen=True)
class ShardRecord:
    """The commit of one shard.

    Args:
        data: file name of the object: in `shards/` when it begins with the shard's id, else in the stage's folder.
        inputs: sha256 of each input's record at the time of writing, by name.
        extra: `key` of the stage, and more fields that the stage adds; deterministic for deterministic data, since
            records are hashed.
    """

    shard: str
    data: str
    sha256: str
    size_bytes: int
    rows: int
    status_counts: Mapping[str, int]
    inputs: Mapping[str, str]
    extra: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def body(self) -> bytes:
        """The record's file: canonical JSON, so that the file's own sha256 is the record's fingerprint."""
        return canonical_json(self.to_json())

    def to_json(self) -> dict[str, Any]:
        return {
            "shard": self.shard,
            "data": self.data,
            "sha256": self.sha256,
            "size_bytes": self.size_bytes,
            "rows": self.rows,
            "status_counts": dict(self.status_counts),
            "inputs": dict(self.inputs),
            **self.extra,
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> ShardRecord:
        extra = {name: item for name, item in value.items() if name not in RECORD_FIELDS}
        return cls(**{name: value[name] for name in RECORD_FIELDS}, extra=extra)

    @cached_property
    def fingerprint(self) -> str:
        """sha256 of the record itself: what downstream records name as their input's hash."""
        return sha256_hex(self.body)

    @property
    def data_path(self) -> str:
        """Path of the object relative to the stage's folder."""
        return f"shards/{self.data}" if self.data.startswith(f"{self.shard}-") else self.data


@dataclass(frozen=True)
class StageState:
    """What a stage has and what it lacks, as its records and one listing tell.

    Args:
        plan: its shards in order; empty when no plan has been written.
        records: the valid records by shard id.
        manifest: the manifest, only when it is present and every shard of the plan is valid.
        problems: why a record was not taken, by shard id.
    """

    plan: tuple[Shard, ...]
    records: Mapping[str, ShardRecord]
    manifest: Mapping[str, Any] | None
    problems: Mapping[str, str]

    @property
    def missing(self) -> list[Shard]:
        return [shard for shard in self.plan if shard.shard not in self.records]

    @property
    def complete(self) -> bool:
        return self.manifest is not None


def is_path(value: Any) -> bool:
    """Whether a value read from a store is a relative path that does not lead upwards, or to a hidden file."""
    return isinstance(value, str) and all(map(is_name, value.split("/")))


def is_name(value: Any) -> bool:
    """Whether it is a name of one such file or folder."""
    return (
        isinstance(value, str)
        and bool(value)
        and not value.startswith(".")
        and "/" not in value
        and value.isprintable()
    )


def is_record(value: Any, key: str, shard: str | None = None) -> bool:
    """Whether a JSON value is a record of this key, and of this shard where one is named, of data in its stage.

    Records of versions before 0.2 do not say their key.
    """
    return (
        isinstance(value, dict)
        and all(name in value for name in RECORD_FIELDS)
        and value.get("key", key) == key
        and (shard is None or value["shard"] == shard)
        and is_name(value["shard"])
        and is_path(value["data"])
    )
