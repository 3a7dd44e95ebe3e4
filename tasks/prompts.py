"""Write the prompts of every source, split once into train and heldout."""

from __future__ import annotations

from typing import Any

from infra import manifest
from infra.manifest import Shard, StageRef
from infra.prompts import PromptsConfig, cut_shards, load_prompts, to_parquet
from infra.schemas import STATUS_OK
from tasks.policy import in_thread, retried_task


@retried_task(name="write-prompts", run_name="write prompts {stage.key}", timeout_seconds=3600)
@in_thread
def write_prompts(stage: StageRef, config: PromptsConfig) -> dict[str, Any]:
    """Load, split and commit every prompt.

    Returns:
        What the manifest adds: `dropped`, rows that could not be used, by dataset and reason.
    """
    prompts = load_prompts(config)
    cut = cut_shards(prompts, config.shard_size)
    plan = [Shard(f"{index:05d}", extra={"split": split}) for index, (split, _) in enumerate(cut)]
    manifest.write_plan(stage, plan)
    for shard, (_, rows) in zip(plan, cut, strict=True):
        manifest.commit_shard(
            stage,
            shard,
            to_parquet(rows),
            rows=len(rows),
            status_counts={STATUS_OK: len(rows)},
            inputs={},
        )
    return {"dropped": prompts.dropped}
