"""Write the prompts of every source, split once into train and heldout."""

from __future__ import annotations

import logging
from typing import Any

from infra import manifest
from infra.errors import InputError
from infra.manifest import Shard, StageRef
from infra.prompts.filters import token_counter
from infra.prompts.samples import PromptsConfig, cut_shards, left_out_said, load_prompts, to_parquet
from infra.schemas import STATUS_OK
from infra.verifiers.verifier import VerifierConfig
from tasks.policy import in_thread, retried_task

logger = logging.getLogger("draftsmith.prompts")


@retried_task(name="write-prompts", run_name="write prompts {stage.key}", timeout_seconds=6 * 3600)
@in_thread
def write_prompts(stage: StageRef, config: PromptsConfig, verifier: VerifierConfig) -> dict[str, Any]:
    """Load, split and commit every prompt.

    Args:
        verifier: whose tokenizer counts the prompts where their length decides (`config.counts_tokens`).

    Returns:
        What the manifest adds: `dropped`, rows that could not be used, by dataset and reason.

    Raises:
        InputError: a source cannot be used, or is not of the revision that the stage's key was made of.
    """
    prompts = load_prompts(config, count_tokens=token_counter(verifier) if config.counts_tokens else None)
    for dataset, revision in prompts.revisions.items():
        if (planned := stage.content["revisions"][dataset]) != revision:
            raise InputError("prompts.sources", f"{dataset} was {planned} and is now {revision}; run again")
    samples = f"{len(prompts.train)} train samples and {len(prompts.heldout)} heldout prompts"
    logger.info("Read %s%s.", samples, left_out_said(config, prompts.dropped, prompts.first_dropped, lengths=True))
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
