"""The tables of a report, as lines of text: fit for Markdown and for a Prefect table artifact."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from infra.evaluation.agreement import FAULT, IDENTICAL, NEAR_TIES
from infra.evaluation.findings import Row, groups_by_way, main_rows, percent, streams, ways
from infra.evaluation.measurement import BASELINE
from infra.promotion.pointer import Promotion
from infra.reports.plots import acceptance_by_position

Line = dict[str, str]

_AGREEMENT = {IDENTICAL: "the same", NEAR_TIES: "as near-ties explain", FAULT: "THE SERVING STACK IS AT FAULT"}


def markdown_table(lines: Sequence[Mapping[str, str]]) -> str:
    """A Markdown table; the columns are those of all lines, in order of first appearance."""
    if not lines:
        return ""
    names = list(dict.fromkeys(name for line in lines for name in line))
    cells = [names, ["---"] * len(names), *([line.get(name, "") for name in names] for line in lines)]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in cells)


def verdict_table(rows: Sequence[Row]) -> list[Line]:
    """What the draft does to the speed, one line a load and data set: all that a decision needs."""
    without = {(row["dataset"], row["temperature"], row["concurrency"]): row for row in rows if _is_none(row)}
    main = main_rows(rows)
    lines = []
    for row in sorted(main, key=lambda row: int(row["concurrency"])):
        plain = without[row["dataset"], row["temperature"], row["concurrency"]]
        load = {"load": streams(row["concurrency"])}
        dataset = {"data set": row["dataset"]} if len({other["dataset"] for other in main}) > 1 else {}
        figures = {
            "tokens/s without a draft": f"{plain['output_tokens_per_second']:,.1f}",
            f"with {row['label']}": f"{row['output_tokens_per_second']:,.1f}",
            "speed-up (95 % interval)": _interval(row, "speedup", ".2f"),
            "verdict": row["verdict"],
        }
        lines.append(load | dataset | figures)
    return lines


def result_table(rows: Sequence[Row]) -> list[Line]:
    """One line per data set, temperature, load and way of decoding."""
    return [_place(row, rows) | _speed_cells(row) for row in rows]


def latency_table(rows: Sequence[Row]) -> list[Line]:
    """Time to first token and per output token after it; lines only of servers that tell."""
    names = (("first token", "ttft_seconds", 1e3), ("each further token", "tpot_seconds", 1e3))
    told = [row for row in rows if row["ttft_seconds_median"] is not None]
    return [
        _place(row, rows)
        | {
            f"{said}, {figure} (ms)": _interval(row, f"{name}_{figure}", ".1f", factor)
            for said, name, factor in names
            for figure in ("median", "p95")
        }
        for row in told
    ]


def position_table(rows: Sequence[Row]) -> list[Line]:
    return [
        {"method": way} | {f"position {index + 1}": percent(rate) for index, rate in enumerate(rates)}
        for way, rates in acceptance_by_position(rows).items()
    ]


def group_table(rows: Sequence[Row], groups: Sequence[Row], group_by: str) -> list[Line]:
    """Acceptance by context bin or by domain, as `infra.evaluation.findings.groups_by_way` chooses it."""
    found = groups_by_way(rows, groups, group_by)
    several = len({dataset for _, dataset in found}) > 1
    return [
        ({"data set": dataset} if several else {})
        | {
            "method": way,
            group_by: str(row["group"]),
            "acceptance length": _interval(row, "acceptance_length", ".2f"),
            "drafts": f"{row['num_drafts']:,}",
        }
        for (way, dataset), chosen in found.items()
        for row in chosen
    ]


def agreement_table(rows: Sequence[Row]) -> list[Line]:
    """How far greedy answers are those of no speculation; empty where nothing was compared."""
    return [_place(row, rows) | _agreement_cells(row) for row in rows if row["num_compared_outputs"]]


def history_table(history: Sequence[Promotion]) -> list[Line]:
    """The promoted speculators, the newest first, each with what it was promoted for."""
    return [
        {
            "promoted": each.promoted_at[:10],
            "draft": f"`{each.draft}`",
            "tokens drafted": str(each.num_speculative_tokens),
            "evaluation": f"`{each.evaluation}`",
            "for": "; ".join(each.reasons),
        }
        for each in reversed(history)
    ]


def _place(row: Row, rows: Sequence[Row]) -> Line:
    """Where a row belongs, without what is the same in all."""
    names = ways(rows)
    line: Line = {}
    if len({other["dataset"] for other in rows}) > 1:
        line["data set"] = str(row["dataset"])
    if len({other["temperature"] for other in rows}) > 1:
        line["temperature"] = f"{row['temperature']:g}"
    return line | {
        "in flight": str(row["concurrency"]),
        "method": names[row["label"], row["num_speculative_tokens"]],
    }


def _speed_cells(row: Row) -> Line:
    drafted = row["acceptance_length"] is not None
    return {
        "output tokens/s": _interval(row, "output_tokens_per_second", ",.1f"),
        "speed-up (95 % interval)": "1 (baseline)" if _is_none(row) else _interval(row, "speedup", ".2f"),
        "verdict": "" if _is_none(row) else str(row["verdict"]),
        "acceptance length": _interval(row, "acceptance_length", ".3f") if drafted else "",
        "draft acceptance": percent(row["draft_acceptance_rate"]),
    }


def _agreement_cells(row: Row) -> Line:
    gaps = [gap for gap in row["first_difference_gaps_nats"] if gap == gap]  # NaN: not scored
    differences = row["first_differences"]
    return {
        "compared with": "its own first round" if _is_none(row) else "none, same round",
        "identical": f"{row['num_identical_outputs']:,} of {row['num_compared_outputs']:,}",
        "first difference (median token)": f"{statistics.median(differences):.0f}" if differences else "",
        "logit gap there, median and largest (nats)": f"{statistics.median(gaps):.3f}, {max(gaps):.3f}"
        if gaps
        else "",
        "beyond near-ties": f"{row['num_beyond_ties']:,}" if differences else "",
        "verdict": _AGREEMENT.get(row["losslessness"], str(row["losslessness"])),
    }


def _interval(row: Row, name: str, form: str, factor: float = 1.0) -> str:
    """`1.25 (1.20 to 1.30)`, or the figure alone where it has no interval."""
    value, low, high = (row[key] for key in (name, f"{name}_low", f"{name}_high"))
    if value is None:
        return ""
    text = f"{factor * value:{form}}"
    return text if low is None or high is None else f"{text} ({factor * low:{form}} to {factor * high:{form}})"


def _is_none(row: Row) -> bool:
    return bool(row["method"] == BASELINE)
