"""Names of runs in the UI: what is made, and of which verifier at which revision."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from prefect.client.orchestration import get_client
from prefect.context import FlowRunContext

from flows.config import PipelineConfig
from infra.manifest import StageRef
from infra.verifiers.verifier import verifier_name

logger = logging.getLogger("draftsmith.run_names")

REVISION_CHARACTERS = 12


async def name_run(what: str, config: PipelineConfig, stages: Mapping[str, StageRef]) -> None:
    """Rename the present flow run: `responses org/model@0123456789ab`. Never fails; does nothing outside of a run.

    The revision is known only after the run has started: resolving it may ask the hub, or hash a folder.
    """
    context = FlowRunContext.get()
    if context is None or context.flow_run is None:
        return
    try:
        async with get_client() as client:
            await client.update_flow_run(context.flow_run.id, name=run_name(what, config, stages))
    except Exception as error:  # a name is not worth a run
        logger.debug("The run could not be named: %r", error)


def run_name(what: str, config: PipelineConfig, stages: Mapping[str, StageRef]) -> str:
    revision: str = stages["responses"].content["revisions"]["verifier"]
    return f"{what} {verifier_name(config.verifier)}@{revision[:REVISION_CHARACTERS]}"
