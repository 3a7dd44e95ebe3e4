"""Names of what a comparison of outputs with those of no speculation came to."""

from __future__ import annotations

IDENTICAL = "identical"
NEAR_TIES = "near-ties"
FAULT = "fault"
NOT_COMPARED = "not compared"
