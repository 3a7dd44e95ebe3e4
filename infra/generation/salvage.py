"""Salvage: the good rows of an earlier responses stage are taken as they are, only the others are made again.

The new stage has the earlier one's shards, and each of its shards has two inputs: the prompts, and the earlier
responses to them. So the record of a shard names both, and a shard whose earlier one was made anew is stale.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, Self

from pydantic import field_validator, model_validator

from infra import manifest, storage
from infra.config import CONTENT, Config
from infra.errors import InputError, StageFailed
from infra.fingerprint import KEY_HEX_DIGITS
from infra.manifest import Shard, ShardRecord, StageRef
from infra.schemas import STATUS_FAILED
from infra.tables import read_table

RESPONSES = "responses"
FIELD = "generate.redo_from"

_KEY = re.compile(rf"[0-9a-f]{{{KEY_HEX_DIGITS}}}")


class SalvageConfig(Config):
    """Which rows of an earlier responses stage are made again; the part of `GenerateConfig` that says so."""

    redo_from: Annotated[str | None, CONTENT] = None
    """Key of an earlier responses stage under the same root, of the same prompts and verifier: rows of a status
    that `redo` does not name are taken from it as they are, the others are made with this config."""
    redo: Annotated[tuple[Literal["failed", "truncated"], ...], CONTENT] = ()
    """Statuses of the rows to make again: `failed`, `truncated` or both. Given together with `redo_from`."""

    @field_validator("redo_from")
    @classmethod
    def _is_a_key(cls, key: str | None) -> str | None:
        if key is not None and not _KEY.fullmatch(key):
            raise ValueError(
                f"must be the key of a responses stage, {KEY_HEX_DIGITS} hex digits as `draftsmith status` shows "
                f"them, not {key!r}"
            )
        return key

    @field_validator("redo")
    @classmethod
    def _in_one_order(cls, statuses: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(sorted(set(statuses)))  # the key must not depend on how the list was written

    @model_validator(mode="after")
    def _both_or_none(self) -> Self:
        if (self.redo_from is None) != (not self.redo):
            raise ValueError("redo_from and redo belong together: name the earlier stage and the statuses to redo")
        return self


@dataclass(frozen=True)
class SalvagingStage(StageRef):
    """A responses stage that takes rows from an earlier one: its `responses` inputs are that stage's shards."""

    redo_from: str
    redo: tuple[str, ...]

    @property
    def earlier_uri(self) -> str:
        return storage.join(self.root, RESPONSES, self.redo_from)

    def upstream_uri(self, stage: str) -> str:
        return self.earlier_uri if stage == RESPONSES else super().upstream_uri(stage)


def salvaging(stage: StageRef, config: SalvageConfig) -> StageRef:
    """The responses stage as `config` wants it made: the same, unless it takes rows from an earlier one."""
    if config.redo_from is None:
        return stage
    return SalvagingStage(stage.root, stage.stage, stage.content, config.redo_from, config.redo)


def with_earlier(stage: StageRef, shards: Sequence[Shard]) -> list[Shard]:
    """The planned shards, each with the earlier responses of the same id as a further input where there are some.

    Raises:
        InputError: there is no such stage, it is not whole, it answers other prompts or is another verifier's, or
            it has no row to make again.
    """
    if not isinstance(stage, SalvagingStage):
        return list(shards)
    try:
        content = manifest.read_content(stage.earlier_uri)
    except StageFailed:
        raise InputError(FIELD, f"there is no responses stage {stage.earlier_uri}") from None
    _refuse_other("prompts", content, stage, lambda of: of["upstream"]["prompts"])
    _refuse_other("verifier", content, stage, lambda of: of["revisions"]["verifier"])
    _refuse_other("schema version", content, stage, lambda of: of["schema_version"])
    # Kept rows have their masks already: one stage must not mix two meanings.
    _refuse_other("generate.loss_on", content, stage, lambda of: of["config"].get("loss_on", "its default"))
    records = manifest.read_records(stage.earlier_uri)
    lacking = [shard.shard for shard in shards if shard.shard not in records]
    if lacking:
        raise InputError(
            FIELD,
            f"{stage.redo_from} lacks {len(lacking)} of {len(shards)} shards ({', '.join(lacking[:3])}, …): run "
            "it to its end with its own config first (generate.max_failed_share=1 lets it end whatever failed)",
        )
    if not any(record.status_counts.get(status) for record in records.values() for status in stage.redo):
        raise InputError(
            FIELD, f"{stage.redo_from} has no {' or '.join(stage.redo)} rows, so nothing is to be redone"
        )
    return [replace(shard, inputs=(*shard.inputs, f"{RESPONSES}/{shard.shard}")) for shard in shards]


def _refuse_other(what: str, content: Mapping[str, Any], stage: SalvagingStage, of: Callable[[Any], Any]) -> None:
    theirs, ours = of(content), of(stage.content)
    if theirs != ours:
        raise InputError(
            FIELD, f"{stage.redo_from} was made with {what} {theirs}, this config has {ours}; they must be the same"
        )


def kept_rows(
    stage: StageRef, shard: Shard, inputs: Mapping[str, ShardRecord], config: SalvageConfig
) -> list[dict[str, Any]]:
    """Rows of one shard that are taken from the earlier stage, exactly as they are; none where there is none.

    Raises:
        DamagedShard: the earlier shard is not what was committed.
    """
    if config.redo_from is None:
        return []
    earlier = read_table(stage.upstream_uri(RESPONSES), inputs[f"{RESPONSES}/{shard.shard}"])
    return [row for row in earlier.to_pylist() if row["status"] not in config.redo]


@dataclass(frozen=True)
class Salvage:
    """How many rows of some shards are taken and how many are made anew, as the earlier records tell.

    Args:
        redo_from: key of the earlier stage.
        kept: rows taken as they are, by status.
        redone: rows made anew, by the status that they had.
    """

    redo_from: str
    kept: Counter[str]
    redone: Counter[str]

    def __str__(self) -> str:
        redone = ", ".join(f"{count} {status}" for status, count in sorted(self.redone.items())) or "none"
        return (
            f"{self.kept.total()} rows of {RESPONSES}/{self.redo_from} are kept as they are, "
            f"{self.redone.total()} are made anew ({redone})"
        )

    def to_json(self) -> dict[str, Any]:
        """For the stage's manifest."""
        return {"redo_from": self.redo_from, "rows_kept": self.kept.total(), "rows_made_anew": dict(self.redone)}


def refuse_kept_failures(salvage: Salvage, max_share: float) -> None:
    """Raise InputError where the failed rows that are kept alone are more than the stage may have."""
    total, failed = salvage.kept.total() + salvage.redone.total(), salvage.kept[STATUS_FAILED]
    if failed > max_share * total:
        raise InputError(
            "generate.redo",
            f"would keep {failed} failed of {total} rows, more than the share {max_share}; add `failed` to it",
        )


def salvage_of(config: SalvageConfig, shards: Iterable[Shard], inputs: Mapping[str, ShardRecord]) -> Salvage | None:
    """What is taken and what is made anew in these shards; None where nothing is salvaged."""
    if config.redo_from is None:
        return None
    kept: Counter[str] = Counter()
    redone: Counter[str] = Counter()
    for shard in shards:
        for status, count in inputs[f"{RESPONSES}/{shard.shard}"].status_counts.items():
            if count:
                (redone if status in config.redo else kept)[status] += count
    return Salvage(config.redo_from, kept, redone)
