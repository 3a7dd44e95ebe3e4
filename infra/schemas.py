"""Versioned Arrow schemas of every Parquet artifact, and the stages that have them.

Always written with an explicit schema: a column that is null in every row of a shard would otherwise get Arrow's
type null, and the data set as a whole would no longer read.
"""

from __future__ import annotations

import pyarrow as pa

# Raised when the meaning or layout of a stage's artifact changes; part of every key.
SCHEMA_VERSIONS: dict[str, int] = {
    "prompts": 1,
    "responses": 1,
    "hidden_states": 1,
    "vocab": 1,
    "drafts": 1,
    "evaluations": 1,
}

STAGES: tuple[str, ...] = tuple(SCHEMA_VERSIONS)

EXPORT_FOLDER = "export"  # of the drafts stage: holds the speculator that vLLM serves

STATUS_OK = "ok"
STATUS_TRUNCATED = "truncated"
STATUS_FAILED = "failed"

PROMPTS = pa.schema(
    [
        pa.field("sample_id", pa.string(), nullable=False),
        pa.field("messages", pa.string(), nullable=False),  # JSON
        pa.field("dataset", pa.string(), nullable=False),
        pa.field("domain", pa.string(), nullable=False),
        pa.field("split", pa.string(), nullable=False),  # train or heldout
        pa.field("sampling", pa.string(), nullable=False),  # JSON
    ]
)

RESPONSES = pa.schema(
    [
        pa.field("sample_id", pa.string(), nullable=False),
        pa.field("dataset", pa.string(), nullable=False),
        pa.field("domain", pa.string(), nullable=False),
        pa.field("messages", pa.string(), nullable=False),  # JSON
        pa.field("input_ids", pa.list_(pa.int32()), nullable=False),  # prompt + completion
        pa.field("loss_mask", pa.list_(pa.bool_()), nullable=False),  # true on completion tokens
        pa.field("num_prompt_tokens", pa.int32(), nullable=False),
        pa.field("num_completion_tokens", pa.int32(), nullable=False),
        pa.field("reasoning", pa.string()),
        pa.field("content", pa.string()),
        pa.field("tool_calls", pa.string()),  # JSON
        pa.field("finish_reason", pa.string()),
        pa.field("temperature", pa.float64(), nullable=False),
        pa.field("status", pa.string(), nullable=False),  # ok, truncated or failed
        pa.field("error", pa.string()),
        pa.field("token_source", pa.string(), nullable=False),  # server, reconstructed or imported
        pa.field("latency_seconds", pa.float64(), nullable=False),
    ]
)

EVALUATIONS = pa.schema(
    [
        pa.field("method", pa.string(), nullable=False),  # none, ngram or eagle3
        pa.field("draft", pa.string()),  # key of the drafts stage
        pa.field("dataset", pa.string(), nullable=False),
        pa.field("temperature", pa.float64(), nullable=False),
        pa.field("concurrency", pa.int32(), nullable=False),
        pa.field("num_speculative_tokens", pa.int32(), nullable=False),
        pa.field("num_requests", pa.int64(), nullable=False),
        pa.field("num_drafts", pa.int64(), nullable=False),
        pa.field("num_draft_tokens", pa.int64(), nullable=False),
        pa.field("num_accepted_tokens", pa.int64(), nullable=False),
        pa.field("accepted_per_position", pa.list_(pa.int64()), nullable=False),
        pa.field("acceptance_length", pa.float64()),  # null for none
        pa.field("acceptance_rate_per_position", pa.list_(pa.float64()), nullable=False),
        pa.field("output_tokens_per_second", pa.float64(), nullable=False),
        pa.field("speedup", pa.float64(), nullable=False),
        pa.field("speedup_low", pa.float64(), nullable=False),
        pa.field("speedup_high", pa.float64(), nullable=False),
        pa.field("vllm_version", pa.string(), nullable=False),
        pa.field("flags", pa.string(), nullable=False),
    ]
)
