"""Promote a measured draft, where it passes the gate."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime

from infra import manifest, storage
from infra.promotion.gate import Decision, PromoteConfig
from infra.promotion.pointer import Outcome, Promotion, figures, promote
from infra.schemas import EXPORT_FOLDER
from tasks.evaluate import read_results
from tasks.policy import in_thread, retried_task


@retried_task(name="promote", run_name="promote for {verifier}", timeout_seconds=600)
@in_thread
def promote_draft(root: str, verifier: str, keys: Mapping[str, str], gate: PromoteConfig, run_id: str) -> Outcome:
    """Hold the evaluation's rows against the gate, and point `promoted.json` at the draft where it passes.

    Args:
        verifier: its name, as in `speculators/<verifier>/promoted.json`.
        keys: of the stages of this run, by name; `drafts` and `evaluations` among them.
        run_id: of the run whose config says how the draft is served.

    Raises:
        StageFailed: promoted.json cannot be understood.
    """
    draft, evaluation = keys["drafts"], keys["evaluations"]
    drafts_uri = storage.join(root, "drafts", draft)

    def entry(decision: Decision) -> Promotion:
        return Promotion(
            draft=draft,
            export=f"drafts/{draft}/{EXPORT_FOLDER}",
            evaluation=evaluation,
            verifier_revision=manifest.read_content(drafts_uri)["revisions"]["verifier"],
            num_speculative_tokens=decision.num_speculative_tokens or 0,
            promoted_at=datetime.now(UTC).isoformat(timespec="seconds"),
            run_id=run_id,
            reasons=decision.reasons,
            figures=figures(decision.rows),
        )

    rows = read_results(storage.join(root, "evaluations", evaluation))
    return promote(root, verifier, rows, draft, gate, entry)
