"""Make the verifier's checkpoint available on this node."""

from __future__ import annotations

from infra.verifiers.verifier import Verifier, VerifierConfig, materialize
from tasks.policy import in_thread, retried_task


@retried_task(name="materialize-verifier", run_name="materialize {config.model}", timeout_seconds=4 * 3600)
@in_thread
def materialize_verifier(config: VerifierConfig) -> Verifier:
    """Convert or download the verifier unless its folder is already whole. Idempotent; the revision is its name."""
    return materialize(config)
