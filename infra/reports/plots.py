"""Plots of what was measured, as PNG bytes, drawn without a display and legible at 900 pixels' width."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from infra.evaluation.findings import Row, groups_by_way, series, ways
from infra.promotion.pointer import Promotion
from infra.reports.canvas import INK, LEGEND, MUTED, SERIES_COLORS, new_figure, png, say

# The usual ways of decoding keep their colour in every plot; Okabe and Ito's palette, as elsewhere.
COLORS = {"none": "#8a8a8a", "ngram": "#e69f00", "eagle3": "#0072b2", "eagle3 promoted": "#009e73"}
MORE_COLORS = ("#d55e00", "#cc79a7", "#56b4e9", "#8c6d1f", "#5d4b8a")
MARKERS = "os^Dv"
LINES = ("-", "--", ":", "-.")
MOST_NUMBERED_BARS = 12  # more would print into one another
LONGEST_NAME = 40
NOT_PROMOTED = "this run, not promoted when measured"
HOLLOW: dict[str, Any] = {"marker": "o", "markersize": 11, "fillstyle": "none", "linestyle": "none"}


def acceptance_by_position(rows: Sequence[Row]) -> dict[str, list[float]]:
    """Acceptance rate per position by way of decoding, counts summed over all its rows, divided once."""
    names = ways(rows)
    drafts: dict[str, int] = {}
    accepted: dict[str, list[int]] = {}
    for row in rows:
        if not row["num_drafts"]:
            continue
        way = names[row["label"], row["num_speculative_tokens"]]
        counts = accepted.setdefault(way, [])
        counts.extend([0] * (len(row["accepted_per_position"]) - len(counts)))
        for position, count in enumerate(row["accepted_per_position"]):
            counts[position] += count
        drafts[way] = drafts.get(way, 0) + row["num_drafts"]
    return {way: [count / drafts[way] for count in counts] for way, counts in accepted.items()}


def acceptance_png(rows: Sequence[Row]) -> bytes:
    """Bars: for each position of a draft, how many drafts the verifier accepted through it; one colour a way.

    Args:
        rows: rows of `infra.evaluation.results.RESULTS`.
    """
    rates, colors = acceptance_by_position(rows), way_colors(rows)
    positions = max((len(values) for values in rates.values()), default=0)
    figure, (axes,) = new_figure(height_inches=4.2)
    width = 0.8 / max(1, len(rates))
    numbers = len(rates) * positions <= MOST_NUMBERED_BARS
    for index, (way, values) in enumerate(rates.items()):
        offset = (index - (len(rates) - 1) / 2) * width
        places = [position + 1 + offset for position in range(len(values))]
        heights = [100 * value for value in values]
        bars = axes.bar(places, heights, width * 0.92, color=colors[way], label=way)
        if numbers:
            axes.bar_label(bars, fmt="%.1f", padding=2, color=INK)
    axes.set_title("Drafts accepted through each position")
    axes.set_xlabel("position of the drafted token (1 = first)")
    axes.set_ylabel("share of drafts (%)")
    axes.xaxis.set_major_locator(FixedLocator(list(range(1, positions + 1))))
    axes.margins(y=0.15)
    axes.set_ylim(bottom=0)
    if rates:
        axes.legend(**LEGEND)
    else:
        say(axes, "nothing was drafted")
    return png(figure)


def way_colors(rows: Sequence[Row]) -> dict[str, str]:
    """A colour for each way of decoding: its own, or for further drafts and draft lengths the next one."""
    further = itertools.cycle(MORE_COLORS)
    return {way: COLORS.get(way) or next(further) for way in dict.fromkeys(ways(rows).values())}


def context_png(rows: Sequence[Row], groups: Sequence[Row]) -> bytes:
    """Acceptance length over the context's length in bins, with 95 % intervals, by way of decoding and data set.

    Args:
        rows: rows of `infra.evaluation.results.RESULTS`, for the names of the ways.
        groups: rows of `infra.evaluation.groups.GROUPS`.
    """
    chosen = groups_by_way(rows, groups, "context")
    bins = {
        bin_[0]: bin_[1]
        for loads in chosen.values()
        for bin_ in ((row["context_from"], row["group"]) for row in loads)
    }
    places = {start: index for index, start in enumerate(sorted(bins))}
    figure, (axes,) = new_figure(height_inches=4.2)
    colors, datasets = way_colors(rows), list(dict.fromkeys(dataset for _, dataset in chosen))
    for index, ((way, dataset), found) in enumerate(chosen.items()):
        nudge = 0.06 * (index - (len(chosen) - 1) / 2)  # or the intervals of one bin would hide one another
        axes.errorbar(
            [places[row["context_from"]] + nudge for row in found],
            [row["acceptance_length"] for row in found],
            yerr=_errors(found, "acceptance_length"),
            color=colors[way],
            marker=MARKERS[datasets.index(dataset) % len(MARKERS)],
            linestyle=LINES[datasets.index(dataset) % len(LINES)],
            capsize=4,
            linewidth=1.8,
            label=way if len(datasets) == 1 else f"{way}, {_short(dataset)}",
        )
        alone = [row for row in found if row["acceptance_length_low"] is None]
        axes.plot(
            [places[row["context_from"]] + nudge for row in alone],
            [row["acceptance_length"] for row in alone],
            color=colors[way],
            marker=MARKERS[datasets.index(dataset) % len(MARKERS)],
            markerfacecolor="white",
            zorder=3,
            linestyle="none",
        )
    axes.set_xticks(list(places.values()), [bins[start] for start in places])
    axes.margins(x=0.06, y=0.15)
    axes.set_title("Acceptance by length of the context, with 95 % intervals (hollow: one prompt)")
    axes.set_xlabel("tokens before the drafted ones")
    axes.set_ylabel("acceptance length (tokens a step)")
    if chosen:
        axes.legend(**LEGEND, ncols=2 if len(chosen) > 3 else 1)
    else:
        say(axes, "the server did not say at which length it drafted")
    return png(figure)


def history_png(history: Sequence[Promotion], measured: Sequence[Row]) -> bytes:
    """Acceptance length and speed-up of each promoted speculator in order, at the lowest load, joined by a line;
    apart from it, hollow, the draft of this report, where it is not the promoted one already.

    Args:
        history: the oldest first.
        measured: rows of the report's draft (`infra.evaluation.findings.main_rows`).
    """
    return png(history_figure(history, measured))


def history_figure(history: Sequence[Promotion], measured: Sequence[Row]) -> Figure:
    """What `history_png` draws."""
    figure, panels = new_figure(height_inches=6.0, panels=2)
    columns = [(f"{each.promoted_at[:10]}\n{each.draft[:8]}", _lowest(each.figures)) for each in history]
    new = next((row["draft"] for row in measured if row["draft"]), None)
    is_new = new is not None and not (history and history[-1].draft == new)
    if is_new:
        columns.append((f"this run\n{str(new)[:8]}", _lowest(measured)))
    settings = list(dict.fromkeys((row["dataset"], row["temperature"]) for _, shown in columns for row in shown))
    for index, setting in enumerate(settings):
        nudge = 0.08 * (index - (len(settings) - 1) / 2)
        color, marker = SERIES_COLORS[index % len(SERIES_COLORS)], MARKERS[index % len(MARKERS)]
        points = [
            (place, row)
            for place, (_, shown) in enumerate(columns)
            for row in shown
            if (row["dataset"], row["temperature"]) == setting
        ]
        served = [(place, row) for place, row in points if place < len(history)]
        ours = [(place, row) for place, row in points if place >= len(history)]
        for axes, name in zip(panels, ("acceptance_length", "speedup"), strict=True):
            for some, how in ((served, {"marker": marker, "label": _said(*setting)}), (ours, HOLLOW)):
                places, values = [place + nudge for place, _ in some], [row[name] for _, row in some]
                axes.plot(places, values, color=color, **how)
        errors = _errors([row for _, row in points], "speedup")
        places, values = [place + nudge for place, _ in points], [row["speedup"] for _, row in points]
        panels[1].errorbar(places, values, yerr=errors, color=color, capsize=4, fmt="none")
    if is_new:
        panels[0].plot([], [], color=INK, label=NOT_PROMOTED, **HOLLOW)
    panels[0].set_title("Promoted speculators under the lowest load")
    panels[0].set_ylabel("acceptance length\n(tokens a step)")
    panels[1].set_ylabel("output tokens per second,\nratio to none")
    panels[1].axhline(1.0, color=MUTED, linestyle="--", linewidth=1.2)
    panels[1].set_xticks(range(len(columns)), [name for name, _ in columns])
    panels[1].set_xlabel("promoted on, key of the drafts stage")
    for axes in panels:
        axes.set_xlim(-0.5, max(0, len(columns) - 1) + 0.5)
        axes.margins(y=0.2)
    _frame(panels[1], [row for _, shown in columns for row in shown])
    if settings:
        panels[0].legend(**LEGEND)
    else:
        say(panels[0], "nothing has been promoted yet")
    return figure


def _lowest(rows: Sequence[Row]) -> list[Row]:
    lowest = min((row["concurrency"] for row in rows), default=0)
    return [row for row in rows if row["concurrency"] == lowest and row["acceptance_length"] is not None]


def _said(dataset: str, temperature: float) -> str:
    """A data set and a temperature, for a legend or title; mixtures have long names."""
    return f"{_short(dataset)}, temperature {temperature:g}"


def _short(dataset: str) -> str:
    return dataset if len(dataset) <= LONGEST_NAME else f"{dataset[: LONGEST_NAME - 1]}…"


def _frame(axes: Axes, rows: Sequence[Row]) -> None:
    """Limit the speed-ups' panel to where they are: an interval that is much wider runs out of it."""
    ratios = [1.0, *(row["speedup"] for row in rows)]
    low = max(0.6 * min(ratios), min(1.0, *(row["speedup_low"] for row in rows), 1.0))
    high = min(1.6 * max(ratios), max(1.0, *(row["speedup_high"] for row in rows), 1.0))
    room = 0.08 * (high - low) or 0.1
    axes.set_ylim(low - room, high + room)


def _errors(rows: Sequence[Row], name: str) -> list[list[float]]:
    """Distances of the intervals' ends, none where there is no interval; shape [2, rows]."""
    low = [row[name] - (row[name] if row[f"{name}_low"] is None else row[f"{name}_low"]) for row in rows]
    high = [(row[name] if row[f"{name}_high"] is None else row[f"{name}_high"]) - row[name] for row in rows]
    return [low, high]


def speedup_png(rows: Sequence[Row]) -> bytes:
    """Speed-up over concurrency with 95 % intervals, a panel for each data set and temperature; the dashed line is
    the verifier without a draft."""
    panels_of: dict[tuple[str, float], list[tuple[str, list[Row]]]] = {}
    names, colors = ways(rows), way_colors(rows)
    for (label, tokens, dataset, temperature), loads in series(rows).items():
        shown = panels_of.setdefault((dataset, temperature), [])
        if loads[0]["method"] != "none":
            shown.append((names[label, tokens], loads))
    figure, panels = new_figure(height_inches=1.2 + 3.0 * max(1, len(panels_of)), panels=max(1, len(panels_of)))
    for axes, ((dataset, temperature), shown) in zip(panels, panels_of.items(), strict=False):
        axes.axhline(1.0, color=MUTED, linestyle="--", linewidth=1.2, label="none (no draft)")
        for index, (way, loads) in enumerate(shown):
            # Side by side, or the intervals of one load would hide one another.
            nudge = 1.0 + 0.03 * (index - (len(shown) - 1) / 2)
            axes.errorbar(
                [row["concurrency"] * nudge for row in loads],
                [row["speedup"] for row in loads],
                yerr=_errors(loads, "speedup"),
                color=colors[way],
                marker=MARKERS[index % len(MARKERS)],
                capsize=4,
                linewidth=1.8,
                label=way,
            )
        axes.set_title(_said(dataset, temperature))
        axes.set_ylabel("output tokens per second,\nratio to none")
        axes.margins(x=0.08)
        _frame(axes, [row for _, loads in shown for row in loads])
        axes.tick_params(labelbottom=True)
    # Outside the panels, where it can hide no interval, and once: the ways are the same in all of them.
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=min(4, max(1, len(labels))), **LEGEND)
    figure.suptitle("Speed-up by load, with 95 % intervals (cut where they leave the frame)")
    panels[-1].set_xscale("log", base=2)
    panels[-1].xaxis.set_major_locator(FixedLocator(sorted({row["concurrency"] for row in rows})))
    panels[-1].xaxis.set_minor_locator(NullLocator())
    panels[-1].xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    panels[-1].set_xlabel("requests in flight")
    return png(figure)
