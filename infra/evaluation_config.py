"""Stands in until the measuring half is merged."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Note:
    kind: str
    text: str
