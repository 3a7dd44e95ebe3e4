"""Has the verifier or a data set a new revision? Then say so, and start the pipeline, once for each revision.

What was seen last is a Prefect Variable. The run's idempotency key is made of the revisions, so two looks at the
same time, or one that died half-way and is repeated, start one run. The run is given the revisions that were seen:
resumed days later, it goes on with the model that it began with. What the change does not touch is reused there, as
in every run, since its key is the same.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import re
from typing import Any, Literal, cast
from uuid import NAMESPACE_URL, uuid5

from prefect import flow
from prefect.deployments import arun_deployment
from prefect.events import emit_event
from prefect.exceptions import ObjectNotFound
from prefect.states import Completed
from prefect.variables import Variable

from flows.config import PipelineConfig
from flows.credentials import use_credentials
from flows.plain_errors import show_plain_errors
from infra.errors import InfrastructureError, InputError
from infra.prompts.samples import dataset_revisions
from infra.verifiers.verifier import resolve_revision, verifier_name

logger = logging.getLogger("draftsmith.watch")

CHANGED = "draftsmith.revision.changed"
VERIFIER = "verifier"

Revisions = dict[str, str]
Look = dict[str, Any]


@flow(name="watch", flow_run_name="watch {config.profile}")
async def watch(config: PipelineConfig, first: Literal["remember", "start"] = "remember") -> Look:
    """Look at the revisions of the config's verifier and data sets, and act on a change.

    Ends in one of the states Unchanged, Remembered, Started and OutOfReach (the hub or the store did not answer:
    nothing is known, so nothing is started, and the next look tries again).

    Args:
        config: what is watched; its profile's deployment of the pipeline is what is started.
        first: what to do at the first look at it: only remember the revisions, or start the pipeline.

    Raises:
        InputError: the config has no profile, or a model or data set is not there.
    """
    show_plain_errors()
    if config.profile is None:
        raise InputError("config.profile", "name the profile whose deployment is to be started on a change")
    await use_credentials(config)
    try:
        seen = await asyncio.to_thread(revisions, config)
    except InfrastructureError as error:
        return _ended("OutOfReach", f"{error}. Nothing was started; the next look tries again")
    name = memory_name(config)
    before = cast(Revisions | None, await Variable.aget(name))
    if before is None and first == "remember":
        await Variable.aset(name, cast(Any, seen), overwrite=True)  # another first look may have been quicker
        return _ended("Remembered", f"first look; the pipeline starts when it changes: {_told(seen)}", seen)
    known = before or {}
    changed = {what: revision for what, revision in seen.items() if known.get(what) != revision}
    if not changed:
        return _ended("Unchanged", _told(seen), seen)
    run_id = await _start(config, seen, f"{name}@{_digest(seen)}", changed)
    await Variable.aset(name, cast(Any, seen), overwrite=True)
    return _ended("Started", f"new: {_told(changed)}; pipeline run {run_id}", seen)


def revisions(config: PipelineConfig) -> Revisions:
    """The present revision of the verifier, and of each data set by `dataset <label>`.

    Raises:
        InputError: one is not there, or, with HF_HUB_OFFLINE=1, not in the hub's cache.
        InfrastructureError: the hub or the store did not answer.
    """
    data_sets = dataset_revisions(config.prompts)
    return {VERIFIER: resolve_revision(config.verifier)} | {
        f"dataset {label}": revision for label, revision in data_sets.items()
    }


def pinned(config: PipelineConfig, seen: Revisions) -> PipelineConfig:
    """The config with those revisions in the place of branches and tags; its stages have the same keys."""
    sources = tuple(
        source.model_copy(update={"revision": seen[f"dataset {source.dataset}"]}) if source.hub else source
        for source in config.prompts.sources
    )
    return config.model_copy(
        update={
            "verifier": config.verifier.model_copy(update={"revision": seen[VERIFIER]}),
            "prompts": config.prompts.model_copy(update={"sources": sources}),
        }
    )


def memory_name(config: PipelineConfig) -> str:
    """Of the Variable that holds what was seen last: one for each profile, root, verifier and set of data sets."""
    data_sets = [source.dataset for source in config.prompts.sources]
    slug = re.sub(r"[^a-z0-9]+", "-", str(config.profile).lower())
    return f"draftsmith-watch-{slug}-{_digest([config.root, verifier_name(config.verifier), *data_sets])[:8]}"


async def _start(config: PipelineConfig, seen: Revisions, key: str, changed: Revisions) -> str:
    """Start the pipeline for these revisions, unless that was done before, and emit the event. Returns its id."""
    deployment = f"speculator-pipeline/{config.profile}"
    given = pinned(config, seen).model_dump(mode="json", exclude_unset=True)
    try:
        run = await arun_deployment(
            deployment, parameters={"config": given}, timeout=0, as_subflow=False, idempotency_key=key
        )
    except ObjectNotFound as error:
        raise InputError(
            "config.profile", f"the Prefect server has no deployment {deployment}; run `prefect deploy --all`"
        ) from error
    emit_event(
        CHANGED,
        resource={"prefect.resource.id": f"draftsmith.watch.{config.profile}"},
        payload={"profile": config.profile, "changed": changed, "revisions": seen, "flow_run_id": str(run.id)},
        id=uuid5(NAMESPACE_URL, key),
    )
    logger.info("New: %s. Pipeline run %s (%s) makes what that touches.", _told(changed), run.name, run.id)
    return str(run.id)


def _ended(name: str, message: str, seen: Revisions | None = None) -> Look:
    """A returned state is the run's own, and the UI shows its name; Prefect hands its data to the caller."""
    return cast(Look, Completed(name=name, message=message, data={"state": name, "revisions": seen}))


def _told(found: Revisions) -> str:
    return ", ".join(f"{what}@{revision[:12]}" for what, revision in found.items())


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]
