"""Stage 6: what the speculator is worth, against no speculation and n-gram, on held-out prompts."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

from prefect import flow

from flows.config import PipelineConfig
from flows.prompts import heldout_rows
from flows.stage import Stages, StageWork, Summary, run_all, run_stage, with_restarts
from infra import manifest
from infra.evaluation import (
    EvaluationPrompt,
    Measurement,
    Method,
    measurement_order,
    select_prompts,
    speculative_config,
)
from infra.evaluation_results import portable_flags
from infra.inference import ClientConfig, CompletionClient
from infra.manifest import Shard, StageRef
from infra.prompts import HELDOUT
from infra.provenance import git_commit, hardware_name, package_versions
from infra.report import Served
from infra.verifier import Verifier
from infra.vllm_server import VllmServer, vllm_version
from tasks.evaluate import FILES, fetch_speculator, measure_slot, write_evaluation
from tasks.progress import StageProgress
from tasks.server import serving
from tasks.verifier import materialize_verifier


@flow(name="evaluate", flow_run_name="evaluate {config.root}")
async def evaluate(config: PipelineConfig) -> Summary:
    """Measure every method in interleaved rounds. Reads `prompts` and `drafts`, writes `evaluations`."""
    return await run_stage(config, "evaluations", plan_shards, make_evaluation)


def plan_shards(stages: Stages) -> list[Shard]:
    """One record for each file of the report; each rests on the held-out prompts and on the exported files."""
    heldout = [shard for shard in manifest.read_plan(stages["prompts"].uri) if shard.extra["split"] == HELDOUT]
    names = [f"prompts/{shard.shard}" for shard in heldout]
    names += [f"drafts/{shard.shard}" for shard in manifest.read_plan(stages["drafts"].uri)]
    return [Shard(f"{index:05d}", tuple(names), {"file": file}) for index, file in enumerate(FILES)]


async def make_evaluation(work: StageWork) -> None:
    if not work.state.missing:
        return
    config, stage, drafts = work.config, work.stage, work.stages["drafts"]
    verifier = await materialize_verifier(config.verifier)
    inputs = await work.inputs()
    exported = [record for name, record in inputs.items() if name.startswith("drafts/")]
    speculator = await fetch_speculator(drafts.uri, exported)
    prompts = await asyncio.to_thread(heldout_prompts, config, work.stages["prompts"])
    measurements: list[Measurement] = []
    flags: dict[str, str] = {}

    async def attempt() -> None:
        measurements.clear()
        names = {str(verifier.path): verifier.name, str(speculator): f"drafts/{drafts.key}/export"}
        async with servers_side_by_side(config, stage, verifier, speculator) as servers:
            flags.update({method: portable_flags(server.flags, names) for method, server in servers.items()})
            measurements.extend(await measure_all(config, prompts, servers))

    await with_restarts(attempt, "The evaluation's vLLM servers")
    served = Served(
        verifier=verifier.name,
        revision=verifier.revision,
        draft_key=drafts.key,
        vllm_version=vllm_version(config.vllm),
        flags=flags,
        hardware=hardware_name(),
        versions=package_versions(),
        git_commit=git_commit(),
    )
    await write_evaluation(stage, work.state.plan, inputs, config.evaluate, measurements, served)


def heldout_prompts(config: PipelineConfig, prompts: StageRef) -> dict[str, list[EvaluationPrompt]]:
    """The prompts to measure with, by dataset label."""
    return select_prompts(heldout_rows(prompts), config.evaluate)


@contextlib.asynccontextmanager
async def servers_side_by_side(
    config: PipelineConfig, stage: StageRef, verifier: Verifier, speculator: Path
) -> AsyncIterator[dict[Method, VllmServer]]:
    """One server for each method, all up together for all rounds.

    Without prefix caching: a later round would skip the prefill that the first one paid for.
    """
    vllm = config.vllm.without_prefix_caching()
    servers: dict[Method, VllmServer] = {}
    async with contextlib.AsyncExitStack() as stack:

        async def start(method: Method) -> None:
            context = serving(
                vllm,
                verifier,
                stage,
                purpose=method,
                speculative_config=speculative_config(method, config.evaluate, str(speculator)),
                trust_remote_code=config.verifier.trust_remote_code,
            )
            servers[method] = await stack.enter_async_context(context)

        methods = config.evaluate.methods
        await run_all((partial(start, method) for method in methods), at_once=len(methods))
        yield servers


async def measure_all(
    config: PipelineConfig,
    prompts: dict[str, list[EvaluationPrompt]],
    servers: dict[Method, VllmServer],
) -> list[Measurement]:
    """Every measurement, one after another: nothing else runs while one is taken."""
    order = measurement_order(config.evaluate)
    measured: list[Measurement] = []
    async with contextlib.AsyncExitStack() as stack:
        clients = {
            method: await stack.enter_async_context(CompletionClient.to(server, client_config(config)))
            for method, server in servers.items()
        }
        progress = await stack.enter_async_context(
            StageProgress("evaluations", len(order) * len(prompts), unit="measurements")
        )
        for dataset, chosen in prompts.items():
            for slot in order:
                server, client = servers[slot.method], clients[slot.method]
                measured.append(
                    await measure_slot(server, client, chosen, slot, config.evaluate, dataset, progress)
                )
    return measured


def client_config(config: PipelineConfig) -> ClientConfig:
    """Room for the highest load; a request that needs a second attempt would spoil the measurement."""
    return ClientConfig(
        concurrency=max(config.evaluate.concurrency),
        timeout_seconds=config.evaluate.request_timeout_seconds,
        max_attempts=1,
    )
