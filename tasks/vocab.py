"""The draft's vocabulary, from the tokens that the verifier generated."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from infra import manifest
from infra.drafts.start_draft import StartConfig, kept_tokens
from infra.drafts.vocab import LOWEST_COVERAGE, VocabConfig, VocabMap, build_map, count_tokens_of_shard
from infra.manifest import Shard, ShardRecord, StageRef
from tasks.policy import in_thread, retried_task

logger = logging.getLogger("draftsmith.vocab")


@retried_task(name="build-vocabulary", run_name="build vocabulary {stage.key}", timeout_seconds=4 * 3600)
@in_thread
def build_vocabulary(
    stage: StageRef,
    shard: Shard,
    inputs: Mapping[str, ShardRecord],
    config: VocabConfig,
    verifier_vocab_size: int,
    start: StartConfig | None = None,
) -> ShardRecord:
    """Count the completions' tokens over all responses, choose the most frequent, and commit the map.

    Args:
        start: the draft that training starts from; with `config.from_start` its tokens are taken.

    Raises:
        InputError: the start draft's vocabulary is not of this verifier, or not of the size that the config says.
    """
    responses_uri = stage.upstream_uri("responses")
    counts = (
        count_tokens_of_shard(manifest.read_shard(responses_uri, inputs[name]), verifier_vocab_size)
        for name in shard.inputs
    )
    kept = kept_tokens(config, start, verifier_vocab_size)
    built: VocabMap = build_map(config, counts, verifier_vocab_size, kept)
    say_coverage(built, config)
    return manifest.commit_shard(
        stage,
        shard,
        built.to_bytes(),
        rows=built.draft_vocab_size,
        status_counts={},
        inputs=inputs,
        extra={"coverage": built.coverage, "verifier_vocab_size": built.verifier_vocab_size},
    )


def say_coverage(built: VocabMap, config: VocabConfig) -> None:
    """Log which share of the generated tokens the draft can propose; warn where that is too little."""
    said = (
        f"The draft's vocabulary of {built.draft_vocab_size:,} tokens (of {built.verifier_vocab_size:,}) holds "
        f"{100 * built.coverage:.2f} % of the {int(built.counts.sum()):,} generated tokens"
    )
    if built.coverage >= LOWEST_COVERAGE:
        logger.info("%s.", said)
        return
    remedy = f"vocab.draft_vocab_size={built.size_for(LOWEST_COVERAGE)} would reach that"
    logger.warning(
        "%s, under %g %%: the rest can never be drafted. %s; training goes on with what there is.",
        *(said, 100 * LOWEST_COVERAGE, f"Without vocab.from_start {remedy}" if config.from_start else remedy),
    )


def coverage_figures(stage: StageRef, record: ShardRecord) -> dict[str, object]:
    """What the stage's manifest says of its map, read from the map itself."""
    built = VocabMap.from_bytes(manifest.read_shard(stage.uri, record))
    figures = {
        "draft_vocab_size": built.draft_vocab_size,
        "verifier_vocab_size": built.verifier_vocab_size,
        "coverage": built.coverage,
        "num_generated_tokens": int(built.counts.sum()),
        f"draft_vocab_size_for_{100 * LOWEST_COVERAGE:g}_percent": built.size_for(LOWEST_COVERAGE),
    }
    return {"vocabulary": figures}
