"""What a run hands to people: artifacts in the Prefect UI, `runs/<run id>.md`, and one last line."""

from __future__ import annotations

import asyncio
from typing import Any

from prefect.artifacts import acreate_markdown_artifact, acreate_table_artifact

from flows.lineage import Run
from flows.stage import Summary
from infra import storage
from infra.evaluation import BASELINE
from infra.report import StageLine, result_table, stage_table
from tasks.evaluate import REPORT_FILE, read_report, read_results


async def publish_outcome(run: Run) -> dict[str, Any]:
    """Publish the run's report and return its headline figures.

    Returns:
        `acceptance_length` and `speedup_c1` of the speculator with the fewest requests in flight (None without
        one), the URIs `report` and `run_report`, and `stages`.
    """
    evaluations_uri = run.stages[-1]["uri"]
    rows = await asyncio.to_thread(read_results, evaluations_uri)
    report = await asyncio.to_thread(read_report, evaluations_uri)
    table = stage_table([_line(summary) for summary in run.stages])
    text = f"# Run {run.run_id}\n\n{_markdown_table(table)}\n\n{report}"
    await asyncio.to_thread(storage.put, run.report_uri, text.encode())
    await acreate_table_artifact(table, key="stages", description="What this run made and what it reused")
    await acreate_table_artifact(result_table(rows), key="evaluation", description="Speed and acceptance")
    await acreate_markdown_artifact(text, key="report", description=f"Report of this run, from {evaluations_uri}")
    measured = sorted((row for row in rows if row["method"] != BASELINE), key=lambda row: int(row["concurrency"]))
    ours = next((row for row in measured if row["method"] == "eagle3"), None)
    return {
        "acceptance_length": ours["acceptance_length"] if ours else None,
        "speedup_c1": ours["speedup"] if ours else None,
        "report": storage.join(evaluations_uri, REPORT_FILE),
        "run_report": run.report_uri,
        "stages": run.stages,
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


def _markdown_table(lines: list[dict[str, str]]) -> str:
    names = list(lines[0])
    body = [names, ["---"] * len(names), *([line[name] for name in names] for line in lines)]
    return "\n".join("| " + " | ".join(row) + " |" for row in body)
