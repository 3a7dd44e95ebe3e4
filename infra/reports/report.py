"""The report of an evaluation: plain Markdown, the same text for the same inputs, no clock and no local path.

What a decision needs stands first: the verdict, whether the draft may be promoted, one small table, the warnings.
All the rest is for whoever wants to know whether to believe it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from infra.evaluation.config import Note
from infra.evaluation.findings import DataFigures, Row, break_evens, headline, percent, warnings
from infra.promotion.gate import Decision
from infra.promotion.pointer import FOLDER, POINTER_FILE, Outcome, Promotion
from infra.reports.tables import (
    Line,
    agreement_table,
    group_table,
    history_table,
    latency_table,
    markdown_table,
    position_table,
    result_table,
    verdict_table,
)

ACCEPTANCE_PLOT = "acceptance_by_position.png"
CONTEXT_PLOT = "acceptance_by_context.png"
HISTORY_PLOT = "promoted_history.png"
TRAINING_PLOT = "training_loss.png"
SPEEDUP_PLOT = "speedup_by_concurrency.png"

NO_GATE = "No gate was set, so it is not up for promotion (`promote` in the config)."
_REFUSED, _FIT = "**Not promoted:**", "**Fit to be promoted**"
_JUDGEMENT = re.compile(rf"^(?:{re.escape(_REFUSED)}|{re.escape(_FIT)}|{re.escape(NO_GATE)}).*\n+", re.MULTILINE)


@dataclass(frozen=True)
class Served:
    """What was measured, and on what.

    Attributes:
        flags: each server's command line, without secrets and local paths (`portable_flags`).
        hardware: one line, as from `infra.provenance.hardware_name`.
        environment: variables that the config sets for the servers, without secrets.
    """

    verifier: str
    revision: str
    draft_key: str | None
    vllm_version: str
    flags: Mapping[str, str]
    hardware: str
    versions: Mapping[str, str]
    git_commit: str | None
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class StageLine:
    """One stage of a run; `reused` where its manifest already stood and nothing was made."""

    stage: str
    key: str
    reused: bool
    num_rows: int | None = None
    status_counts: Mapping[str, int] = field(default_factory=dict)
    size_bytes: int | None = None


@dataclass(frozen=True)
class Report:
    """Everything the report says.

    Attributes:
        rows: those of `infra.evaluation.results.result_rows`; groups: those of its `acceptance_rows`.
        notes: how it was measured, where that is not as asked for.
        gate: what the gate of the run that measured it says; None where it had none.
        history: the verifier's promoted speculators when it was measured, the oldest first.
    """

    rows: Sequence[Row]
    served: Served
    data: DataFigures = field(default_factory=DataFigures)
    groups: Sequence[Row] = ()
    notes: Sequence[Note] = ()
    gate: Decision | None = None
    history: Sequence[Promotion] = ()


def report_markdown(report: Report) -> str:
    """The whole report. Its plots lie beside it."""
    rows = report.rows
    sections = [
        f"# Draft for {report.served.verifier}",
        headline(rows, report.served.verifier),
        _gate(report),
        markdown_table(verdict_table(rows)),
        _section("Warnings", _bullets(warnings(rows, report.data)) or "None."),
        _section("Speed", markdown_table(result_table(rows)), _how_to_read(rows)),
        _plot("Speed-up by requests in flight", SPEEDUP_PLOT),
        _section("Latency", markdown_table(latency_table(rows))),
        _section("Acceptance by position", markdown_table(position_table(rows))),
        _plot("Drafts accepted through each position", ACCEPTANCE_PLOT),
        _section("Acceptance by context length", markdown_table(group_table(rows, report.groups, "context"))),
        _plot("Acceptance by length of the context", CONTEXT_PLOT),
        _section("Acceptance by domain", markdown_table(group_table(rows, report.groups, "domain"))),
        _section("Same answers as without a draft", _losslessness(rows)),
        _section("Training", _bullets(_training_lines(report.data))),
        _plot("Training loss and accuracy", TRAINING_PLOT),
        *_history(report.history),
        _section("How it was measured", _bullets(note.text for note in report.notes)),
        _section("What was served", _bullets(_served_lines(report.served)), _flags(report.served.flags)),
    ]
    return "\n\n".join(section for section in sections if section) + "\n"


def run_markdown(
    run_id: str, outcome: Outcome | None, serving: str, report: str | None, stages: Sequence[Line]
) -> str:
    """What one run says of itself, with the report of its evaluation.

    The report was written by the run that measured; what its gate said gives way to what this run's gate says.

    Args:
        outcome: what became of the draft in this run; None where it had no gate.
        serving: of `serving_now`, or nothing.
        report: text of `report_markdown`, by this version or an earlier one; None where nothing was measured.
        stages: of `stage_table`.
    """
    judged = f"**{outcome}**" if outcome else NO_GATE if report else ""
    body = _JUDGEMENT.sub("", report).strip() if report else ""
    parts = [f"# Run {run_id}", judged, serving, body, _section("Stages of this run", markdown_table(stages))]
    return "\n\n".join(part for part in parts if part) + "\n"


def serving_now(verifier: str, draft: str, promoted: Promotion | None) -> str:
    """Which speculator is promoted at the end of a run, and whether it is the run's own draft."""
    if promoted is None:
        return f"`{_pointer(verifier)}` is not there: nothing is promoted."
    whose = "this run's draft" if promoted.draft == draft else "another draft"
    since = f"promoted on {promoted.promoted_at[:10]}"
    return f"`{_pointer(verifier)}` names {whose} at the end of this run: `{promoted.draft}`, {since}."


def _pointer(verifier: str) -> str:
    return f"{FOLDER}/{verifier}/{POINTER_FILE}"


def _gate(report: Report) -> str:
    if report.gate is None:
        return NO_GATE
    text = "; ".join(report.gate.reasons)
    said = f"{_FIT}{': ' if text else ''}{text}." if report.gate.passes else f"{_REFUSED} {text}."
    pointer = f"`{_pointer(report.served.verifier)}` says which one is promoted now"
    return f"{said} So judged the gate of the run that measured it; {pointer}."


def _history(history: Sequence[Promotion]) -> list[str]:
    if not history:
        return []
    table = markdown_table(history_table(history))
    return [
        _section("Promoted speculators before this run", table),
        _plot("Promoted speculators in order", HISTORY_PLOT),
    ]


def _how_to_read(rows: Sequence[Row]) -> str:
    if not rows:
        return ""
    datasets = ", ".join(sorted({str(row["dataset"]) for row in rows}))
    temperatures = ", ".join(f"{value:g}" for value in sorted({row["temperature"] for row in rows}))
    even = "; ".join(break_evens(rows))
    until = f" By its point figures the speed-up falls through 1 {even}." if even else ""
    return (
        f"Data sets: {datasets}; temperature {temperatures}; {rows[0]['num_rounds']} rounds; 95 % intervals. "
        "Speed-up is the ratio to `none` in the same round; `no difference` where its interval includes 1. "
        "Acceptance length counts the verifier's own token, and only steps in which something was drafted (ngram "
        "drafts only where the text repeats). All figures are in `results.parquet` and `acceptance.parquet`."
        + until
    )


def _losslessness(rows: Sequence[Row]) -> str:
    lines = agreement_table(rows)
    if not lines:
        return "Not compared: that takes greedy answers (temperature 0)."
    note = (
        "The verifier checks every drafted token. Greedy answers still part where two tokens nearly tie in bf16 "
        "and another batch shape rounds them the other way; `none` against itself shows how often that happens "
        "anyway. The logit gap is between the two tokens where the answers part, by `none` itself."
    )
    return f"{markdown_table(lines)}\n\n{note}"


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
        longest = data.evaluated_length_tokens
        evaluated = "" if longest is None else f", in the evaluation {longest:,}"
        lines.append(f"Longest trained sequence: {data.trained_length_tokens:,} tokens{evaluated}")
    return lines


def stage_table(stages: Sequence[StageLine]) -> list[Line]:
    """One line per stage: what a run made and what it found finished."""
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
    variables = ", ".join(f"`{name}={value}`" for name, value in sorted(served.environment.items()))
    return [
        f"Verifier: {served.verifier}, revision `{served.revision}`",
        f"Draft: `{served.draft_key}`" if served.draft_key else "Draft: none",
        f"Hardware: {served.hardware}",
        f"Versions: vLLM {served.vllm_version}{versions}",
        f"Git commit: `{served.git_commit}`" if served.git_commit else "Git commit: not run from a checkout",
        *([f"Environment: {variables}"] if variables else []),
    ]


def _flags(flags: Mapping[str, str]) -> str:
    return "```\n" + "\n".join(f"{name}: {line}" for name, line in flags.items()) + "\n```" if flags else ""


def _section(title: str, *bodies: str) -> str:
    text = "\n\n".join(body for body in bodies if body)
    return f"## {title}\n\n{text}" if text else ""


def _plot(title: str, name: str) -> str:
    return f"![{title}]({name})"


def _bullets(lines: Iterable[str]) -> str:
    return "\n".join(f"- {line}" for line in lines)


def _size(size_bytes: int | None) -> str:
    if size_bytes is None:
        return ""
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size_bytes >= factor:
            return f"{size_bytes / factor:,.1f} {unit}"
    return f"{size_bytes} B"
