"""Presets: well-known data sets as rows of a table, so that a config names them by one word."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import yaml

PRESETS_FILE = Path(__file__).resolve().parents[2] / "deployments" / "prompts" / "presets.yaml"
# For people; the other keys of a row are fields of `PromptSource`.
NOTES = ("licence",)


@functools.cache
def load() -> dict[str, dict[str, Any]]:
    """Each preset's fields of `PromptSource`, by its name. Empty where the table was not installed."""
    if not PRESETS_FILE.exists():
        return {}
    table: dict[str, dict[str, Any]] = yaml.safe_load(PRESETS_FILE.read_text(encoding="utf-8"))
    return {name: {key: value for key, value in row.items() if key not in NOTES} for name, row in table.items()}
