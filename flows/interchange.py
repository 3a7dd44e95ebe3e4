"""In from a speculators data folder, and out to one.

With `import_states` in the config, `responses` are made of the folder's ids and masks and `hidden_states` of its
files; every other stage is as always.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from flows.config import PipelineConfig
from flows.import_checks import refuse_unfit_import
from flows.resolve import resolve
from flows.stage import Stages, StageWork, inspect, own_inputs, refuse_failed_rows, run_all
from infra import manifest, storage
from infra.drafts.start_draft import kept_tokens
from infra.errors import InputError, StageFailed
from infra.extraction.budget import EXPECTED_RATIO, readable, room_said, stage_totals
from infra.extraction.config import resolve_layer_ids
from infra.hidden_states import HiddenStatesMeta
from infra.interchange.exporting import export_states
from infra.interchange.folder import DataFolder
from infra.interchange.importing import ImportConfig, import_revision, open_folder
from infra.manifest import Shard
from infra.state_checks.checks import StateChecks, open_head
from infra.state_checks.verdict import refuse_bad_states
from infra.state_checks.verifier_head import VerifierHead
from infra.verifiers.verifier import resolve_shape
from tasks.interchange import import_responses, import_states
from tasks.progress import StageProgress
from tasks.verifier import materialize_verifier

# Reading and encoding share out the cores; more shards at once are more of them in memory.
SHARDS_AT_ONCE = 2


def plan_import(config: PipelineConfig, stages: Stages) -> list[Shard]:
    """Shards of the folder's rows in their order."""
    refuse_unfit_import(config, stages)
    planned = manifest.read_plan(stages["responses"].uri)
    if planned:
        return list(planned)  # made already, and the folder perhaps deleted
    source = _source(config)
    num_rows, size = len(open_folder(source)), source.shard_size
    starts = range(0, num_rows, size)
    return [
        Shard(f"{number:05d}", (), {"rows": [start, min(start + size, num_rows)]})
        for number, start in enumerate(starts)
    ]


def import_costs(config: PipelineConfig) -> dict[str, Callable[[], str]]:
    """What the two imported stages cost, in words, by stage; none where nothing is imported."""
    source = config.import_states
    if source is None:
        return {}

    def files() -> str:
        folder = open_folder(source)
        return f"{len(folder.sizes)} files of states, {sum(folder.sizes.values()):,} bytes, are read"

    return {
        "responses": lambda: f"{len(open_folder(source))} rows of import_states.revision={import_revision(source)}",
        "hidden_states": files,
    }


async def make_imported_responses(work: StageWork) -> None:
    source = _source(work.config)
    if work.state.missing:
        folder = await asyncio.to_thread(open_folder, source)
        async with StageProgress("responses", len(work.state.plan), len(work.state.records)) as progress:
            jobs = (
                partial(import_responses, work.stage, shard, folder, source, progress)
                for shard in work.state.missing
            )
            await run_all(jobs, at_once=SHARDS_AT_ONCE)
    records = (await inspect(work.stage)).records.values()
    refuse_failed_rows(work.stage, records, work.config.generate.max_failed_share)


async def make_imported_states(work: StageWork) -> Mapping[str, Any]:
    if work.state.missing:
        await _import_missing(work)
    extract, records = work.config.extract, (await inspect(work.stage)).records.values()
    refuse_bad_states(work.stage, records, extract.max_failed_share, extract.checks)
    layer_ids = resolve_layer_ids(extract, await asyncio.to_thread(resolve_shape, work.config.verifier))
    return stage_totals(records, await work.inputs(), extract.encoding, layer_ids, peak_staging_bytes=0)


async def _import_missing(work: StageWork) -> None:
    config, stage = work.config, work.stage
    folder: DataFolder = await asyncio.to_thread(open_folder, _source(config))
    planned = await asyncio.to_thread(manifest.read_plan, work.stages["responses"].uri)
    rows = {shard.shard: shard.extra["rows"] for shard in planned}
    _refuse_no_room(config, folder, [rows[shard.shard] for shard in work.state.missing])
    shape = await asyncio.to_thread(resolve_shape, config.verifier)
    meta = HiddenStatesMeta(
        layer_ids=tuple(resolve_layer_ids(config.extract, shape)),
        hidden_size=shape.hidden_size,
        verifier_revision=stage.content["revisions"]["verifier"],
        encoding=config.extract.encoding,
    )
    checks = StateChecks(config.extract.checks, meta, await _head(config))
    checks.learn(record.extra for record in work.state.records.values())
    inputs = await work.inputs()
    async with StageProgress("hidden_states", len(work.state.plan), len(work.state.records)) as progress:
        jobs = (
            partial(
                import_states,
                stage,
                shard,
                own_inputs(shard, inputs),
                folder,
                rows[shard.shard][0],
                meta,
                checks,
                progress,
            )
            for shard in work.state.missing
        )
        await run_all(jobs, at_once=SHARDS_AT_ONCE)


def _refuse_no_room(config: PipelineConfig, folder: DataFolder, missing: Sequence[Sequence[int]]) -> None:
    """Raise StageFailed where the root cannot hold what is still to be imported.

    Args:
        missing: first and last + 1 of the rows of each shard.
    """
    raw_bytes = sum(folder.sizes.get(index, 0) for start, stop in missing for index in range(start, stop))
    needed, room = raw_bytes * EXPECTED_RATIO[config.extract.encoding], storage.free_bytes(config.root)
    if room is not None and needed > room:
        raise StageFailed(
            f"hidden_states: {config.root} cannot hold what is left to import, about {readable(needed)} as "
            f"{config.extract.encoding}: {room_said(room)}; free some, or see extract.encoding"
        )


async def _head(config: PipelineConfig) -> VerifierHead | None:
    """For the on-policy check; None where it cannot be made, since nobody knows how the text was sampled."""
    checks = config.extract.checks
    if checks.on_policy == "off" or _source(config).temperature is None:
        return None
    return await asyncio.to_thread(open_head, checks, await materialize_verifier(config.verifier))


def _source(config: PipelineConfig) -> ImportConfig:
    assert config.import_states is not None  # only such configs come here
    return config.import_states


def export(config: PipelineConfig, options: argparse.Namespace) -> None:
    """`draftsmith export-states`: write the config's hidden states as a data folder, and say how to train on it.

    Raises:
        InputError: the stage is not complete, or the folder cannot take it.
    """
    stage = resolve(config)["hidden_states"]
    folder = Path(options.folder).expanduser().resolve()
    shape = resolve_shape(config.verifier)
    if config.vocab.draft_vocab_size > shape.vocab_size:
        raise InputError("vocab.draft_vocab_size", f"must be at most {shape.vocab_size}, the verifier's tokens")
    kept = kept_tokens(config.vocab, config.train.init_from, shape.vocab_size)
    written = export_states(stage.uri, folder, config.vocab, shape.vocab_size, kept)
    if options.json:
        print(json.dumps(written.to_json()))
        return
    layers = " ".join(map(str, written.target_layer_ids))
    vocabulary = f" --draft-vocab-size {written.draft_vocab_size}" if written.draft_vocab_size else ""
    print(
        f"Train on it: speculators train --data-path {written.folder} --verifier-name-or-path MODEL "
        f"--target-layer-ids {layers}{vocabulary} --on-missing raise"
    )
    print(
        f"exported={written.samples} left_out={written.left_out} tokens={written.num_tokens} "
        f"folder={written.folder}"
    )
