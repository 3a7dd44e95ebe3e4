"""Events of ours that automations wait for (deployments/automations/notify/)."""

from __future__ import annotations

from prefect.events import emit_event

PROMOTED, NOT_PROMOTED = "draftsmith.speculator.promoted", "draftsmith.speculator.not-promoted"


def tell_promotion(verifier: str, *, promoted: bool, said: str) -> None:
    """Emit whether the verifier's new speculator was promoted.

    Args:
        said: why, in a sentence.
    """
    resource = {"prefect.resource.id": f"draftsmith.speculator.{verifier}", "prefect.resource.name": verifier}
    emit_event(PROMOTED if promoted else NOT_PROMOTED, resource=resource, payload={"said": said})
