"""Content keys of stages: the same inputs give the same key, on any machine."""

from __future__ import annotations

import hashlib
import json
from typing import Any

KEY_HEX_DIGITS = 16
_ENCODER = json.JSONEncoder(sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def canonical_json(value: Any) -> bytes:
    """The one byte form of a JSON value: sorted keys, no spaces, UTF-8, no NaN."""
    return _ENCODER.encode(value).encode()


def sha256_hex(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def content_sha256(value: Any) -> str:
    """sha256, in hex, over the canonical JSON of `value`."""
    return sha256_hex(canonical_json(value))


def stage_content(
    stage: str,
    schema_version: int,
    config: dict[str, Any],
    revisions: dict[str, str],
    upstream: dict[str, str],
) -> dict[str, Any]:
    """Exactly what a stage's key hashes; stored as `content` in its plan.

    Args:
        stage: `prompts`, `responses`, `hidden_states`, `vocab`, `drafts` or `evaluations`.
        schema_version: version of the artifact's schema (`infra.schemas`).
        config: `Config.content()` of the stage's config.
        revisions: resolved revisions of what the stage reads from outside: model, tokenizer, template, dataset.
        upstream: key of each stage this one reads, by stage name.
    """
    return {
        "stage": stage,
        "schema_version": schema_version,
        "config": config,
        "revisions": revisions,
        "upstream": upstream,
    }


def stage_key(content: dict[str, Any]) -> str:
    """The stage's key: the first 16 hex digits of sha256 over the canonical JSON of `stage_content`."""
    return content_sha256(content)[:KEY_HEX_DIGITS]
