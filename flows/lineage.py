"""One object for each run: which stages it read and wrote, with what versions, and how it ended."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from typing import Any

from prefect.runtime import flow_run

from flows.attempts import refuse_crash_loop
from flows.config import PipelineConfig
from flows.credentials import use_credentials
from flows.early_checks import refuse_unfit
from flows.plain_errors import show_plain_errors
from flows.resolve import resolve
from flows.run_names import name_run
from flows.stage import Summary
from infra import storage
from infra.promotion.pointer import Outcome
from infra.provenance import provenance
from infra.redaction import redact

# A store that is just away when a run is put back may be waited for.
ROOT_SECONDS = 120.0


@dataclass
class Run:
    """One run of the pipeline. `stages` is filled when they are done, `promotion` where a gate was set."""

    run_id: str
    config: PipelineConfig
    keys: dict[str, str]
    started_at: str
    stages: list[Summary] = field(default_factory=list)
    promotion: Outcome | None = None

    @property
    def uri(self) -> str:
        return storage.join(self.config.root, "runs", f"{self.run_id}.json")

    @property
    def report_uri(self) -> str:
        return storage.join(self.config.root, "runs", f"{self.run_id}.md")


@contextlib.asynccontextmanager
async def lineage(config: PipelineConfig, until: str) -> AsyncIterator[Run]:
    """Write `runs/<run id>.json` at the start and complete it at the end, however the run ends.

    Raises InputError, before anything is written, where a stage up to `until` could not use the config.

    The run id is Prefect's flow run id, which a rescheduled run keeps.
    """
    show_plain_errors()
    await use_credentials(config)
    stages = await asyncio.to_thread(resolve, config)
    await name_run("pipeline", config, stages)
    await asyncio.to_thread(storage.check_root, config.root, ROOT_SECONDS)
    await asyncio.to_thread(refuse_unfit, config, stages, until)
    run = Run(str(flow_run.get_id()), config, {name: stage.key for name, stage in stages.items()}, _now())
    await asyncio.to_thread(_write, run, "running", None)
    try:
        await refuse_crash_loop(config, stages)
        yield run
    except BaseException as error:
        await asyncio.shield(asyncio.to_thread(_write, run, "failed", error))
        raise
    await asyncio.to_thread(_write, run, "completed", None)


def _write(run: Run, status: str, error: BaseException | None) -> None:
    said: dict[str, Any] = {
        "run_id": run.run_id,
        "prefect_flow_run_id": run.run_id,
        "status": status,
        "error": None if error is None else redact(f"{type(error).__name__}: {error}"),
        "started_at": run.started_at,
        "ended_at": None if status == "running" else _now(),
        "config": run.config.model_dump(mode="json"),
        "keys": run.keys,
        "stages": run.stages,
        "promotion": asdict(run.promotion) if run.promotion else None,
        "provenance": provenance(),
    }
    storage.put(run.uri, json.dumps(said, indent=1, sort_keys=True).encode())


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
