"""Stage 6: what the speculator is worth, against no speculation, n-gram and other speculators."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from prefect import flow

from flows.config import PipelineConfig
from flows.prompts import heldout_rows
from flows.resolve import measured_drafts, promoted_rival
from flows.stage import Stages, StageWork, Summary, run_all, run_stage, with_restarts
from infra import manifest
from infra.errors import InputError, StageFailed
from infra.evaluation.agreement import Parting
from infra.evaluation.config import Draft, Note, Sampling, Way, sampler_is_wrong, samplings, turns, ways
from infra.evaluation.drafts import draft_revisions, rival_notes
from infra.evaluation.measurement import (
    BASELINE,
    EvaluationPrompt,
    Measurement,
    measurement_order,
    refuse_beyond_trained,
    request_metrics_flags,
    speculative_config,
)
from infra.evaluation.prompts import read_sources, select_prompts
from infra.inference import ClientConfig, CompletionClient
from infra.manifest import Shard, StageRef
from infra.promotion.pointer import read_pointer
from infra.prompts.filters import token_counter
from infra.prompts.samples import HELDOUT, TRAIN
from infra.provenance import git_commit, hardware, hardware_name, package_versions
from infra.redaction import redact
from infra.reports.report import Served
from infra.tables import read_table
from infra.verifiers.verifier import Verifier
from infra.vllm_config import VllmConfig, portable_flags
from infra.vllm_server import VllmServer, vllm_version
from tasks.evaluate import (
    FILES,
    Measured,
    data_figures,
    fetch_speculator,
    measure_slot,
    score_differences,
    write_evaluation,
)
from tasks.progress import StageProgress
from tasks.server import serving
from tasks.verifier import materialize_verifier


@flow(name="evaluate", flow_run_name="evaluate {config.root}")
async def evaluate(config: PipelineConfig) -> Summary:
    """Measure every way of decoding. Reads `prompts` and `drafts`, writes `evaluations`."""
    return await run_stage(config, "evaluations", plan_shards, make_evaluation)


def plan_shards(stages: Stages) -> list[Shard]:
    """One record for each file of the report; each rests on the held-out prompts and on the exported files."""
    heldout = [shard for shard in manifest.read_plan(stages["prompts"].uri) if shard.extra["split"] == HELDOUT]
    names = [f"prompts/{shard.shard}" for shard in heldout]
    names += [f"drafts/{shard.shard}" for shard in manifest.read_plan(stages["drafts"].uri)]
    return [Shard(f"{index:05d}", tuple(names), {"file": file}) for index, file in enumerate(FILES)]


@dataclass(frozen=True)
class Plan:
    """What is measured, with what, and what is to be said about it.

    Attributes:
        turns: ways of decoding whose servers stand at the same time; the last turn has the baseline.
        trained_length_tokens: longest sequence that the new draft was trained on.
    """

    turns: Sequence[Sequence[Way]]
    samplings: Sequence[Sampling]
    prompts: Mapping[str, Sequence[EvaluationPrompt]]
    notes: Sequence[Note]
    trained_length_tokens: int

    @property
    def drafts(self) -> list[Draft]:
        return list(dict.fromkeys(way.draft for turn in self.turns for way in turn if way.draft))


async def make_evaluation(work: StageWork) -> None:
    if not work.state.missing:
        return
    config, drafts = work.config, work.stages["drafts"]
    plan = await asyncio.to_thread(plan_evaluation, work)
    verifier = await materialize_verifier(config.verifier)
    pointer = await asyncio.to_thread(read_pointer, config.root, verifier.name)
    inputs = await work.inputs()
    folders = {draft: await fetch_speculator(draft) for draft in plan.drafts}
    measuring = Measuring(work, plan, verifier, folders)
    for turn in plan.turns:
        await measuring.measure(turn)
    served = Served(
        verifier=verifier.name,
        revision=verifier.revision,
        draft_key=drafts.key,
        vllm_version=vllm_version(config.vllm),
        flags=measuring.flags,
        hardware=hardware_name(),
        versions=package_versions(),
        git_commit=git_commit(),
        environment={name: redact(value) for name, value in config.vllm.environment.items()},
    )
    measured = Measured(measuring.measurements, measuring.gaps_nats, plan.notes)
    shards, gate = work.state.plan, config.promote
    await write_evaluation(work.stage, shards, inputs, config.evaluate, measured, served, gate, pointer)


def plan_evaluation(work: StageWork) -> Plan:
    """Everything that can be known, or refused, before a server is started."""
    config, on_gpus = work.config, bool(hardware()["gpus"])
    sampled, notes = samplings(config.evaluate, config.generate, wrong_above_zero=sampler_is_wrong())
    new_key = work.stages["drafts"].key
    rival = promoted_rival(config, new_key)
    drafts, revisions = measured_drafts(config, new_key), work.stage.content["revisions"]
    if draft_revisions(drafts[1:]) != {name: key for name, key in revisions.items() if name.startswith("draft/")}:
        raise StageFailed("the promoted speculator, or another one to measure, was changed since the run began")
    every = ways(config.evaluate, drafts)
    in_turns, of_turns = turns(config.evaluate, every, on_gpus=on_gpus)
    counts_tokens = any(source.counts_tokens for source in config.evaluate.sources)
    further, told, found = read_sources(
        config.evaluate,
        config.prompts.seed,
        trained_rows(work.stages["prompts"]) if config.evaluate.sources else [],
        token_counter(config.verifier) if counts_tokens else None,
    )
    for dataset, revision in found.items():
        if (planned := revisions[f"evaluate/{dataset}"]) != revision:
            raise InputError("evaluate.sources", f"{dataset} was {planned} and is now {revision}; run again")
    rows = heldout_rows(work.stages["prompts"])
    prompts, few = select_prompts(rows, config.evaluate, config.generate, further)
    return Plan(
        turns=in_turns,
        samplings=sampled,
        prompts=prompts,
        notes=[*notes, *of_turns, *rival_notes(config.evaluate, rival), *told, *few],
        trained_length_tokens=data_figures(work.stage).trained_length_tokens or 0,
    )


def trained_rows(prompts: StageRef) -> Iterator[dict[str, Any]]:
    """What the draft was trained on, as far as rows of `schemas.PROMPTS` tell it."""
    records = manifest.read_records(prompts.uri)
    for shard in manifest.read_plan(prompts.uri):
        if shard.extra["split"] == TRAIN:
            table = read_table(prompts.uri, records[shard.shard])
            yield from table.select(["dataset", "messages"]).to_pylist()


class Measuring:
    """Takes the measurements, turn by turn, and keeps what came of them."""

    def __init__(self, work: StageWork, plan: Plan, verifier: Verifier, folders: Mapping[Draft, Path]) -> None:
        self.measurements: list[Measurement] = []
        self.gaps_nats: dict[Parting, float] = {}
        self.flags: dict[str, str] = {}
        self._work, self._plan, self._verifier, self._folders = work, plan, verifier, folders

    async def measure(self, turn: Sequence[Way]) -> None:
        """All rounds of one turn; from its beginning when a server dies."""
        before = list(self.measurements)

        async def attempt() -> None:
            self.measurements[:] = before
            async with self._servers(turn) as servers:
                self.flags |= {way.name: self._portable(server) for way, server in servers.items()}
                self.measurements += await self._measure_all(servers)
                if (baseline := servers.get(Way(BASELINE))) is not None:
                    config = self._work.config.evaluate
                    self.gaps_nats = await score_differences(baseline, self.measurements, config)

        await with_restarts(attempt, "The evaluation's vLLM servers")

    def _portable(self, server: VllmServer) -> str:
        names = {str(folder): draft.portable for draft, folder in self._folders.items()}
        return portable_flags(server.flags, {**names, str(self._verifier.path): self._verifier.name})

    @contextlib.asynccontextmanager
    async def _servers(self, turn: Sequence[Way]) -> AsyncIterator[dict[Way, VllmServer]]:
        """One server for each way of decoding, all up together for all rounds."""
        config, on_gpus = self._work.config, bool(hardware()["gpus"])
        servers: dict[Way, VllmServer] = {}
        async with contextlib.AsyncExitStack() as stack:

            async def start(way: Way) -> None:
                folder = self._folders[way.draft] if way.draft else None
                context = serving(
                    vllm_config(config.vllm, way, share=len(turn) if on_gpus else 1),
                    self._verifier,
                    self._work.stage,
                    purpose=re.sub(r"[^A-Za-z0-9._-]+", "-", way.name),
                    speculative_config=speculative_config(way, config.evaluate, str(folder) if folder else None),
                    trust_remote_code=config.verifier.trust_remote_code,
                )
                servers[way] = await stack.enter_async_context(context)

            # On a GPU each measures how much memory is free as it starts: another's start would spoil that.
            await run_all((partial(start, way) for way in turn), at_once=1 if on_gpus else len(turn))
            yield {way: servers[way] for way in turn}

    async def _measure_all(self, servers: Mapping[Way, VllmServer]) -> list[Measurement]:
        """Every measurement, one after another: nothing else runs while one is taken."""
        config, plan = self._work.config, self._plan
        order = measurement_order(config.evaluate, list(servers), plan.samplings)
        total = len(order) * len(plan.prompts)
        measured: list[Measurement] = []
        async with contextlib.AsyncExitStack() as stack:
            clients = {
                way: await stack.enter_async_context(CompletionClient.to(server, client_config(config)))
                for way, server in servers.items()
            }
            progress = await stack.enter_async_context(StageProgress("evaluations", total, unit="measurements"))
            for dataset, chosen in plan.prompts.items():
                for slot in order:
                    server, client = servers[slot.way], clients[slot.way]
                    taken = await measure_slot(server, client, chosen, slot, config.evaluate, dataset, progress)
                    refuse_beyond_trained(taken, config.evaluate, plan.trained_length_tokens)
                    measured.append(taken)
        return measured


def vllm_config(vllm: VllmConfig, way: Way, share: int) -> VllmConfig:
    """How the server of one way of decoding is started, beside `share` - 1 others on the same GPUs.

    Without prefix caching: a later round would skip the prefill that the first one paid for.
    """
    plain = vllm.without_prefix_caching()
    return plain.model_copy(
        update={
            "extra_args": [*plain.extra_args, *request_metrics_flags(way, vllm_version(vllm))],
            "gpu_memory_utilization": round(vllm.gpu_memory_utilization / share, 3),
        }
    )


def client_config(config: PipelineConfig) -> ClientConfig:
    """Room for the highest load; a request that needs a second attempt would spoil the measurement."""
    return ClientConfig(
        concurrency=max(config.evaluate.concurrency),
        timeout_seconds=config.evaluate.request_timeout_seconds,
        max_attempts=1,
    )
