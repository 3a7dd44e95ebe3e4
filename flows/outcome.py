"""What a run hands to people: artifacts in the Prefect UI, `runs/<run id>.md`, and one last line."""

from __future__ import annotations

import asyncio
import base64
import re
from typing import Any

from prefect.artifacts import acreate_image_artifact, acreate_markdown_artifact, acreate_table_artifact

from flows.lineage import Run
from flows.stage import Summary
from infra import storage
from infra.evaluation.findings import lowest_load
from infra.promotion.pointer import read_pointer
from infra.reports.report import StageLine, run_markdown, serving_now, stage_table
from infra.reports.tables import result_table
from infra.verifiers.verifier import verifier_name
from tasks.evaluate import REPORT_FILE, read_report, read_results

PLOT = re.compile(r"!\[([^\]]*)\]\((\w+\.png)\)")


async def publish_outcome(run: Run) -> dict[str, Any]:
    """Publish the run's report and return its headline figures.

    Returns:
        `stages`, the URI `run_report`, and `promotion` in a sentence (None without a gate); with an evaluation also
        its `report`, and `acceptance_length` and `speedup_c1` of the speculator with the fewest requests in flight
        (None without one).
    """
    table = stage_table([_line(summary) for summary in run.stages])
    promotion, report = str(run.promotion) if run.promotion else None, None
    outcome: dict[str, Any] = {"stages": run.stages, "run_report": run.report_uri, "promotion": promotion}
    await acreate_table_artifact(table, key="stages", description="What this run made and what it reused")
    evaluation = next((stage["uri"] for stage in run.stages if stage["stage"] == "evaluations"), None)
    if evaluation is not None:
        rows = await asyncio.to_thread(read_results, evaluation)
        report = await asyncio.to_thread(read_report, evaluation)
        outcome |= {"report": storage.join(evaluation, REPORT_FILE), **_headline(rows)}
        await acreate_table_artifact(result_table(rows), key="evaluation", description="Speed and acceptance")
        await _publish_plots(evaluation, report)
    serving = await asyncio.to_thread(_serving, run) if run.promotion else ""
    text = run_markdown(run.run_id, run.promotion, serving, report, table)
    beside = PLOT.sub(rf"![\1](../evaluations/{run.keys['evaluations']}/\2)", text)
    await asyncio.to_thread(storage.put, run.report_uri, beside.encode())
    # The UI shows no image within a text: the plots are artifacts of their own.
    without = PLOT.sub("", text)
    await acreate_markdown_artifact(without, key="report", description=f"Report of run {run.run_id}")
    return outcome


def _serving(run: Run) -> str:
    verifier = verifier_name(run.config.verifier)
    return serving_now(verifier, run.keys["drafts"], read_pointer(run.config.root, verifier).promoted)


async def _publish_plots(evaluation_uri: str, report: str) -> None:
    """The report's plots as artifacts that need no file server: the UI takes an image's data for its address."""
    for title, name in PLOT.findall(report):
        png = await asyncio.to_thread(storage.get, storage.join(evaluation_uri, name))
        address = f"data:image/png;base64,{base64.b64encode(png).decode()}"
        key = "plot-" + name.removesuffix(".png").replace("_", "-")
        await acreate_image_artifact(address, key=key, description=title)


def _headline(rows: list[dict[str, Any]]) -> dict[str, Any]:
    ours = next((row for row in lowest_load(rows) if row["method"] == "eagle3"), None)
    return {
        "acceptance_length": ours["acceptance_length"] if ours else None,
        "speedup_c1": ours["speedup"] if ours else None,
    }


def _line(summary: Summary) -> StageLine:
    totals = summary["totals"]
    return StageLine(
        summary["stage"],
        summary["key"],
        summary["reused"],
        num_rows=totals["rows"],
        status_counts=totals["status_counts"],
        size_bytes=totals["size_bytes"],
    )
