"""Start and stop vLLM servers, and reach external ones, as tasks that a person sees in the UI."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Mapping
from functools import partial
from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE

from infra.locations import log_file
from infra.manifest import StageRef
from infra.processes import process_token
from infra.serving.config import ServersConfig, replica_configs
from infra.serving.external import ExternalServer
from infra.serving.pool import Launch
from infra.verifiers.verifier import Verifier
from infra.vllm_server import VllmConfig, VllmServer
from tasks.child_log import child_log
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
    server = server_of(config, verifier, stage, purpose, speculative_config, trust_remote_code)
    return await server.__aenter__()


def server_of(
    config: VllmConfig,
    verifier: Verifier,
    stage: StageRef,
    purpose: str,
    speculative_config: Mapping[str, Any] | None,
    trust_remote_code: bool,
) -> VllmServer:
    """The stage's server for one purpose, not started yet; log and processes are named after both."""
    return VllmServer(
        config,
        model_path=verifier.path,
        served_name=verifier.name,
        log_path=log_file(stage.stage, stage.key, f"vllm-{purpose}"),
        token=process_token(stage.uri, purpose),
        speculative_config=speculative_config,
        trust_remote_code=trust_remote_code,
    )


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
    async with child_log(stage, f"vllm-{purpose}"):
        server = await start_server(config, verifier, stage, purpose, speculative_config, trust_remote_code)
        try:
            yield server
        finally:
            await asyncio.shield(server.__aexit__(None, None, None))
            logger.info("The vLLM server for %s has ended.", purpose)


# Not retried: its own patience is the limit.
@task(name="reach-server", task_run_name="reach {base_url}", cache_policy=NO_CACHE)
async def reach_server(
    base_url: str, served_name: str, servers: ServersConfig, max_model_len: int | None
) -> ExternalServer:
    """Wait until an external server answers. Whoever reaches one leaves it (`reached`)."""
    patience_seconds = servers.external_patience_seconds
    server = ExternalServer(base_url, servers.external_key(), served_name, patience_seconds=patience_seconds)
    await server.__aenter__()
    if max_model_len is not None and (server.max_model_len or 0) >= max_model_len:
        logger.warning(
            "%s takes sequences of %d tokens; what it generates beyond %d (vllm.max_model_len - 1) will fail in "
            "extraction. Start it with a lower limit, or raise vllm.max_model_len.",
            *(base_url, server.max_model_len, max_model_len - 1),
        )
    return server


@contextlib.asynccontextmanager
async def reached(
    base_url: str, served_name: str, servers: ServersConfig, max_model_len: int | None
) -> AsyncIterator[ExternalServer]:
    """An external server for as long as the context lasts."""
    server = await reach_server(base_url, served_name, servers, max_model_len)
    try:
        yield server
    finally:
        await server.__aexit__(None, None, None)


def replica_launches(
    servers: ServersConfig,
    config: VllmConfig,
    verifier: Verifier,
    stage: StageRef,
    partition: str = "",
    *,
    trust_remote_code: bool,
) -> list[Launch]:
    """What starts each replica on this node, by its number, each with one token less than extraction takes.

    Args:
        partition: of a partition run, its name: its processes are not to be taken for another run's on this node.
    """
    return [
        partial(
            serving,
            each.for_generation(),
            verifier,
            stage,
            purpose="-".join(["generation", str(number), *filter(None, [partition])]),
            trust_remote_code=trust_remote_code,
        )
        for number, each in enumerate(replica_configs(servers, config), start=1)
    ]


def external_launches(servers: ServersConfig, config: VllmConfig, served_name: str) -> list[Launch]:
    """What reaches each external server."""
    name = servers.external_model or served_name
    return [partial(reached, url, name, servers, config.max_model_len) for url in servers.external]
