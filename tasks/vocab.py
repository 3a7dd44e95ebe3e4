"""The draft's vocabulary, from the tokens that the verifier generated."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from infra import manifest
from infra.manifest import Shard, ShardRecord, StageRef
from infra.start_draft import StartConfig, kept_tokens
from infra.vocab import VocabConfig, VocabMap, build_map, count_tokens_of_shard
from tasks.policy import in_thread, retried_task

logger = logging.getLogger("draftsmith.vocab")

LOW_COVERAGE = 0.95


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
    if built.coverage < LOW_COVERAGE:
        logger.warning(
            "The draft's vocabulary of %d tokens covers %.1f %% of the generated tokens; %s would raise "
            "acceptance. Training goes on.",
            built.draft_vocab_size,
            100 * built.coverage,
            "one without vocab.from_start" if config.from_start else "a larger vocab.draft_vocab_size",
        )
    return manifest.commit_shard(
        stage,
        shard,
        built.to_bytes(),
        rows=built.draft_vocab_size,
        status_counts={},
        inputs=inputs,
        extra={"coverage": built.coverage, "verifier_vocab_size": built.verifier_vocab_size},
    )
