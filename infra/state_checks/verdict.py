"""Which checks a stage's rows failed, how often, and whether the stage can be accepted for all that."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable
from typing import Any

from infra.errors import StageFailed
from infra.records import ShardRecord, StageRef
from infra.schemas import STATUS_FAILED
from infra.state_checks import on_policy
from infra.state_checks.on_policy import OnPolicy, OnPolicyConfig

logger = logging.getLogger("draftsmith.extraction")

# Sample ids that are kept for each check: enough to look at, and few enough for every shard's record.
NUM_NAMED = 3


class FailedChecks:
    """Failed rows counted by the name of the check, which their error begins with, and the first ids of each."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._samples: dict[str, list[str]] = {}
        self._first: str | None = None

    def add(self, sample_id: str, error: str) -> None:
        self._add(error.partition(":")[0], 1, [sample_id])
        self._first = self._first or f"{sample_id}: {error}"

    def add_json(self, found: dict[str, Any]) -> None:
        """Those of a shard's record."""
        for name, failed in found.items():
            self._add(name, failed["count"], failed["samples"])

    def to_json(self) -> dict[str, Any]:
        """{check: {`count`, `samples`: the first ids}}."""
        return {
            name: {"count": self._counts[name], "samples": self._samples[name]} for name in sorted(self._counts)
        }

    def warn(self) -> None:
        """Log what failed, if anything did."""
        if self._first:
            logger.warning(
                "%d samples have no hidden states and become failed rows: %s. The first: %s",
                self._counts.total(),
                self,
                self._first,
            )

    def __str__(self) -> str:
        return ", ".join(
            f"{count} {name} ({', '.join(self._samples[name])}{', …' if count > NUM_NAMED else ''})"
            for name, count in self._counts.most_common()
        )

    def _add(self, name: str, count: int, samples: list[str]) -> None:
        self._counts[name] += count
        named = self._samples.setdefault(name, [])
        named.extend(samples[: NUM_NAMED - len(named)])


def refuse_bad_states(
    stage: StageRef, records: Iterable[ShardRecord], max_failed_share: float, config: OnPolicyConfig
) -> None:
    """Refuse a stage of hidden states too many of whose rows failed, or whose text is not the verifier's own.

    Raises:
        StageFailed: with the checks that failed, how often, and up to three samples of each; or with the shards
            whose completions, all together, are too unlikely.
    """
    records = list(records)
    failed = FailedChecks()
    for record in records:
        failed.add_json(record.extra.get("failed_checks", {}))
    rows = sum(record.rows for record in records)
    num_failed = sum(record.status_counts.get(STATUS_FAILED, 0) for record in records)
    name = f"{stage.stage}/{stage.key}"
    if rows and num_failed > max_failed_share * rows:
        raise StageFailed(
            f"{name}: {num_failed} of {rows} rows failed, more than the allowed share {max_failed_share}: "
            f"{failed}; the column `error` of {stage.uri}/shards says more"
        )
    if problem := _off_policy(records, config):
        raise StageFailed(f"{name}: not the verifier's own text: {problem}")


def _off_policy(records: Iterable[ShardRecord], config: OnPolicyConfig) -> str | None:
    """Why the completions of a shard, or of all together, are not the verifier's own."""
    shards = {
        record.shard: OnPolicy.from_json(record.extra["on_policy"])
        for record in records
        if "on_policy" in record.extra
    }
    problems = {shard: on_policy.total_problem(found, config) for shard, found in shards.items()}
    off = [shard for shard, problem in problems.items() if problem]
    if off:
        return f"in {len(off)} of {len(shards)} shards, the first of them {off[0]}: {problems[off[0]]}"
    return on_policy.total_problem(sum(shards.values(), OnPolicy()), config)
