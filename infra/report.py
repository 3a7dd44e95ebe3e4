"""The report of an evaluation: plain Markdown, the same text for the same inputs, no clock and no local path."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from infra.evaluation import BASELINE
from infra.evaluation_config import Note
from infra.evaluation_results import median_first_difference
from infra.findings import DataFigures, Row, headline, lowest_load, percent, warnings
from infra.plots import acceptance_by_position

ACCEPTANCE_PLOT = "acceptance_by_position.png"
TRAINING_PLOT = "training_loss.png"
SPEEDUP_PLOT = "speedup_by_concurrency.png"


@dataclass(frozen=True)
class Served:
    """What was measured, and on what.

    Attributes:
        flags: each method's server command line, without secrets and local paths (`portable_flags`).
        hardware: one line, as from `infra.provenance.hardware_name`.
    """

    verifier: str
    revision: str
    draft_key: str | None
    vllm_version: str
    flags: Mapping[str, str]
    hardware: str
    versions: Mapping[str, str]
    git_commit: str | None


@dataclass(frozen=True)
class StageLine:
    """One stage of this run; `reused` where its manifest already stood and nothing was made."""

    stage: str
    key: str
    reused: bool
    num_rows: int | None = None
    status_counts: Mapping[str, int] = field(default_factory=dict)
    size_bytes: int | None = None


@dataclass(frozen=True)
class Report:
    """Everything the report says. `rows` are those of `infra.evaluation_results.result_rows`, `groups` those of its
    `acceptance_rows`, stages in order."""

    rows: Sequence[Row]
    served: Served
    stages: Sequence[StageLine] = ()
    data: DataFigures = field(default_factory=DataFigures)
    groups: Sequence[Row] = ()
    notes: Sequence[Note] = ()


def report_markdown(report: Report, *, with_plots: bool = True) -> str:
    """The whole report. Without plots it suits a Prefect artifact, which cannot show files beside it."""
    sections = [
        f"# Draft for {report.served.verifier}",
        headline(report.rows, report.served.verifier),
        _section("Warnings", _bullets(warnings(report.rows, report.data))),
        _section("Speed and acceptance", _table(result_table(report.rows)), _how_to_read(report.rows)),
        _plot("Speed-up by requests in flight", SPEEDUP_PLOT, with_plots),
        _section("Acceptance by position", _table(_position_table(report.rows))),
        _plot("Drafts accepted through each position", ACCEPTANCE_PLOT, with_plots),
        _section("Same answers as without a draft", _losslessness(report.rows)),
        _section("Training", _bullets(_training_lines(report.data))),
        _plot("Training loss and accuracy", TRAINING_PLOT, with_plots),
        _section("Stages of this run", _table(stage_table(report.stages))),
        _section("What was served", _bullets(_served_lines(report.served)), _flags(report.served.flags)),
    ]
    return "\n\n".join(section for section in sections if section) + "\n"


def result_table(rows: Sequence[Row]) -> list[dict[str, str]]:
    """One line per dataset, load and method, all text: a Prefect table artifact takes it as it is."""
    several = len({row["dataset"] for row in rows}) > 1
    return [({"dataset": str(row["dataset"])} if several else {}) | _result_cells(row) for row in rows]


def summary_line(rows: Sequence[Row], report_uri: str) -> str:
    """The run's last line but for the path: `acceptance_length=… speedup_c1=… report=…`.

    Figures of the main method under its lowest load; `-` where there is none.
    """
    row = next(iter(lowest_load(rows)), None)
    if row is None:
        return f"acceptance_length=- speedup_c1=- report={report_uri}"
    length = "-" if row["acceptance_length"] is None else f"{row['acceptance_length']:.3f}"
    return f"acceptance_length={length} speedup_c{row['concurrency']}={row['speedup']:.3f} report={report_uri}"


def _result_cells(row: Row) -> dict[str, str]:
    baseline = row["method"] == BASELINE
    interval = f"{row['speedup']:.2f} ({row['speedup_low']:.2f} to {row['speedup_high']:.2f})"
    length = row["acceptance_length"]
    return {
        "in flight": str(row["concurrency"]),
        "method": str(row["method"]),
        "output tokens/s": f"{row['output_tokens_per_second']:,.1f}",
        "speed-up (95 % interval)": "1 (baseline)" if baseline else interval,
        "verdict": "" if baseline else str(row["verdict"]),
        "acceptance length": "" if length is None else f"{length:.3f}",
        "draft acceptance": percent(row["draft_acceptance_rate"]),
    }


def _position_table(rows: Sequence[Row]) -> list[dict[str, str]]:
    return [
        {"method": method} | {f"position {index + 1}": percent(rate) for index, rate in enumerate(rates)}
        for method, rates in acceptance_by_position(rows).items()
    ]


def _how_to_read(rows: Sequence[Row]) -> str:
    if not rows:
        return ""
    datasets = ", ".join(sorted({str(row["dataset"]) for row in rows}))
    rounds = f"{rows[0]['num_rounds']} rounds with the methods side by side"
    return (
        f"Held-out prompts ({datasets}), temperature {rows[0]['temperature']:g}, {rounds}. Speed-up is the ratio "
        "to `none` in the same round; `no difference` where its interval includes 1. Acceptance length counts the "
        "verifier's own token, and only steps in which something was drafted (ngram drafts only where the text "
        "repeats)."
    )


def _losslessness(rows: Sequence[Row]) -> str:
    compared = [row for row in rows if row["num_compared_outputs"]]
    if not compared:
        return "Not compared: that takes greedy answers (temperature 0)."
    several = len({row["dataset"] for row in rows}) > 1
    lines = [({"dataset": str(row["dataset"])} if several else {}) | _agreement_cells(row) for row in compared]
    note = (
        "The verifier checks every drafted token. Greedy answers still part where two tokens nearly tie in bf16 "
        "and another batch shape rounds them the other way; `none` against itself shows how often that happens "
        "anyway."
    )
    return f"{_table(lines)}\n\n{note}"


def _agreement_cells(row: Row) -> dict[str, str]:
    differences = len(row["first_differences"])
    return {
        "in flight": str(row["concurrency"]),
        "answers of": str(row["method"]),
        "compared with": "its own first round" if row["method"] == BASELINE else "none, same round",
        "identical": f"{row['num_identical_outputs']:,} of {row['num_compared_outputs']:,}",
        "first difference (median token)": f"{median_first_difference(row):.0f}" if differences else "",
        "tokens per difference": f"{row['num_compared_tokens'] / differences:,.0f}" if differences else "",
    }


def _training_lines(data: DataFigures) -> list[str]:
    lines = []
    if data.num_training_steps is not None:
        lines.append(f"Optimizer steps: {data.num_training_steps:,}")
    if data.num_tokens is not None:
        trained = "" if data.num_trained_tokens is None else f", {data.num_trained_tokens:,} of them trained on"
        lines.append(f"Tokens with hidden states: {data.num_tokens:,}{trained}")
    if data.draft_vocab_size is not None and data.verifier_vocab_size is not None:
        sizes = f"{data.draft_vocab_size:,} of the verifier's {data.verifier_vocab_size:,} tokens"
        coverage = percent(data.vocabulary_coverage) or "an unknown share"
        lines.append(f"Draft vocabulary: {sizes}, which is {coverage} of the trained text")
    if data.trained_length_tokens is not None:
        lines.append(f"Longest trained sequence: {data.trained_length_tokens:,} tokens")
    return lines


def stage_table(stages: Sequence[StageLine]) -> list[dict[str, str]]:
    """One line per stage: what this run made and what it found finished. Fit for a Prefect table artifact."""
    return [
        {
            "stage": line.stage,
            "key": f"`{line.key}`",
            "this run": "Cached" if line.reused else "made",
            "rows": "" if line.num_rows is None else f"{line.num_rows:,}",
            "by status": ", ".join(f"{name} {count:,}" for name, count in sorted(line.status_counts.items())),
            "size": _size(line.size_bytes),
        }
        for line in stages
    ]


def _served_lines(served: Served) -> list[str]:
    versions = "".join(f", {name} {version}" for name, version in sorted(served.versions.items()))
    return [
        f"Verifier: {served.verifier}, revision `{served.revision}`",
        f"Draft: `{served.draft_key}`" if served.draft_key else "Draft: none",
        f"Hardware: {served.hardware}",
        f"Versions: vLLM {served.vllm_version}{versions}",
        f"Git commit: `{served.git_commit}`" if served.git_commit else "Git commit: not run from a checkout",
    ]


def _flags(flags: Mapping[str, str]) -> str:
    return "```\n" + "\n".join(f"{method}: {line}" for method, line in flags.items()) + "\n```" if flags else ""


def _section(title: str, *bodies: str) -> str:
    text = "\n\n".join(body for body in bodies if body)
    return f"## {title}\n\n{text}" if text else ""


def _plot(title: str, name: str, wanted: bool) -> str:
    return f"![{title}]({name})" if wanted else ""


def _bullets(lines: Iterable[str]) -> str:
    return "\n".join(f"- {line}" for line in lines)


def _table(lines: Sequence[Mapping[str, str]]) -> str:
    """A Markdown table; the columns are those of all lines, in order of first appearance."""
    if not lines:
        return ""
    names = list(dict.fromkeys(name for line in lines for name in line))
    cells = [names, ["---"] * len(names), *([line.get(name, "") for name in names] for line in lines)]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in cells)


def _size(size_bytes: int | None) -> str:
    if size_bytes is None:
        return ""
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size_bytes >= factor:
            return f"{size_bytes / factor:,.1f} {unit}"
    return f"{size_bytes} B"
