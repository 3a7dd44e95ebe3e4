"""Start and stop vLLM servers, as tasks that a person sees in the UI."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Mapping
from typing import Any

from infra.locations import log_file
from infra.manifest import StageRef
from infra.processes import process_token
from infra.verifier import Verifier
from infra.vllm_server import VllmConfig, VllmServer
from tasks.policy import retried_task

logger = logging.getLogger("draftsmith.server")


@retried_task(name="start-vllm-server", run_name="start vLLM for {purpose}", restarts=True)
async def start_server(
    config: VllmConfig,
    verifier: Verifier,
    stage: StageRef,
    purpose: str,
    speculative_config: Mapping[str, Any] | None,
    trust_remote_code: bool,
) -> VllmServer:
    """Start a server and wait until it answers. Whoever starts one stops it (`serving`)."""
    server = VllmServer(
        config,
        model_path=verifier.path,
        served_name=verifier.name,
        log_path=log_file(stage.stage, stage.key, f"vllm-{purpose}"),
        token=process_token(stage.uri, purpose),
        speculative_config=speculative_config,
        trust_remote_code=trust_remote_code,
    )
    return await server.__aenter__()


@contextlib.asynccontextmanager
async def serving(
    config: VllmConfig,
    verifier: Verifier,
    stage: StageRef,
    *,
    purpose: str,
    speculative_config: Mapping[str, Any] | None = None,
    trust_remote_code: bool = False,
) -> AsyncIterator[VllmServer]:
    """A vLLM server of the verifier for as long as the context lasts; it ends on any exit, cancellation too."""
    server = await start_server(config, verifier, stage, purpose, speculative_config, trust_remote_code)
    try:
        yield server
    finally:
        await asyncio.shield(server.__aexit__(None, None, None))
        logger.info("The vLLM server for %s has ended.", purpose)
