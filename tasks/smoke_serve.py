"""Let vLLM serve a new speculator once, before its export is committed."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from infra.drafts.smoke_serve import Messages, SmokeServe, serve_once
from infra.evaluation.config import EAGLE3, EvaluateConfig, Way
from infra.evaluation.measurement import speculative_config
from infra.manifest import StageRef
from infra.verifiers.verifier import Verifier
from infra.vllm_server import VllmConfig
from tasks.policy import retried_task
from tasks.server import server_of

logger = logging.getLogger("draftsmith.smoke_serve")

PURPOSE = "smoke"


# One more attempt, not three: a start takes half an hour with a large verifier, and what fails twice is the draft.
@retried_task(name="smoke-serve", run_name="smoke-serve {stage.key}", restarts=True, retries=1)
async def smoke_serve(
    stage: StageRef,
    speculator: Path,
    prompts: Sequence[Messages],
    verifier: Verifier,
    vllm: VllmConfig,
    evaluate: EvaluateConfig,
    tie_nats: float,
    trust_remote_code: bool,
) -> SmokeServe:
    """Start vLLM as the evaluation does, with verifier and speculator, and judge its greedy answers.

    Args:
        speculator: local folder of the export.
        evaluate: says how many tokens are drafted at a time, at most.

    Raises:
        ServerError: the server did not start, or died.
        StageFailed: it serves, but not what the verifier would say.
    """
    way = Way(EAGLE3, max(evaluate.num_speculative_tokens))
    method = speculative_config(way, evaluate, str(speculator))
    served = server_of(vllm.without_prefix_caching(), verifier, stage, PURPOSE, method, trust_remote_code)
    async with served as server:
        found = await serve_once(
            server, prompts, tie_nats=tie_nats, timeout_seconds=evaluate.request_timeout_seconds
        )
    logger.info(
        "vLLM serves the speculator: acceptance length %.2f over %d greedy requests; of %d tokens %d nearly tie "
        "with the verifier's first choice (at most %.3f nats apart), the others are it.",
        found.acceptance_length,
        found.num_requests,
        found.num_tokens,
        found.num_near_ties,
        found.largest_gap_nats,
    )
    return found
