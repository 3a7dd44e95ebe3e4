"""Plots of the report as PNG bytes, drawn without a display and legible at 900 pixels' width."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

Floats = npt.NDArray[np.float64]

WIDTH_INCHES = 9.0  # 900 pixels at 100 dots an inch, at which the fonts are chosen
DOTS_PER_INCH = 150
INK = "#222222"
MUTED = "#6b6b6b"
# Okabe and Ito's palette: told apart by colour-blind readers too. A method keeps its colour in every plot.
METHOD_COLORS = {"none": "#8a8a8a", "ngram": "#e69f00", "eagle3": "#0072b2"}
STEP_COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9")
LOG_SCALE_FROM_RATIO = 4.0
SMOOTHED_FROM_POINTS = 20


@dataclass(frozen=True)
class TrainingPoint:
    """One logged optimizer step.

    Attributes:
        step: optimizer steps done, from 1.
        loss: mean loss over the step's trained tokens, weighted over the ttt steps as it is optimized.
        accuracy_per_ttt_step: share (0 to 1) of trained tokens whose draft token is the verifier's, by ttt step,
            among those right in the ttt steps before; empty where it was not logged.
    """

    step: int
    loss: float
    accuracy_per_ttt_step: tuple[float, ...] = ()


def training_points(metrics: str, kind: str = "train") -> list[TrainingPoint]:
    """The points of one kind (`train` or `validation`) in the trainer's metrics, JSON lines, by step.

    A step that was done again after a resume counts as it came out last.
    """
    lines = [json.loads(line) for line in metrics.splitlines() if line.strip()]
    points = {
        line["step"]: TrainingPoint(line["step"], line["loss"], tuple(line.get("accuracy_per_ttt_step", ())))
        for line in lines
        if line.get("kind") == kind
    }
    return [points[step] for step in sorted(points)]


def acceptance_by_position(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[float]]:
    """Acceptance rate per position by method, counts summed over every row of the method, divided once."""
    drafts: dict[str, int] = {}
    accepted: dict[str, list[int]] = {}
    for row in rows:
        if not row["num_drafts"]:
            continue
        method = str(row["method"])
        counts = accepted.setdefault(method, [])
        counts.extend([0] * (len(row["accepted_per_position"]) - len(counts)))
        for position, count in enumerate(row["accepted_per_position"]):
            counts[position] += count
        drafts[method] = drafts.get(method, 0) + row["num_drafts"]
    return {method: [count / drafts[method] for count in counts] for method, counts in accepted.items()}


def acceptance_png(rows: Sequence[Mapping[str, Any]]) -> bytes:
    """Bars: for each position of a draft, how many drafts the verifier accepted through it; one colour a method.

    Args:
        rows: rows of `infra.evaluation_results.RESULTS`.
    """
    rates = acceptance_by_position(rows)
    positions = max((len(values) for values in rates.values()), default=0)
    figure, (axes,) = _figure(height_inches=4.2)
    width = 0.8 / max(1, len(rates))
    for index, (method, values) in enumerate(rates.items()):
        offset = (index - (len(rates) - 1) / 2) * width
        places = [position + 1 + offset for position in range(len(values))]
        heights = [100 * value for value in values]
        bars = axes.bar(places, heights, width * 0.92, color=METHOD_COLORS.get(method, INK), label=method)
        axes.bar_label(bars, fmt="%.1f", padding=2, color=INK)
    axes.set_title("Drafts accepted through each position")
    axes.set_xlabel("position of the drafted token (1 = first)")
    axes.set_ylabel("share of drafts (%)")
    axes.xaxis.set_major_locator(FixedLocator(list(range(1, positions + 1))))
    axes.margins(y=0.15)
    axes.set_ylim(bottom=0)
    if rates:
        axes.legend(frameon=False)
    else:
        _say(axes, "nothing was drafted")
    return _png(figure)


def training_png(points: Sequence[TrainingPoint], validation: Sequence[TrainingPoint] = ()) -> bytes:
    """Loss over optimizer steps, and below it the accuracy of each ttt step, raw in pale and smoothed in full.

    The loss is on a log scale once it spans a factor of 4; non-positive or missing losses leave a gap. Validation
    losses, if any, stand as points in the upper panel.
    """
    with_accuracy = [point for point in points if point.accuracy_per_ttt_step]
    figure, panels = _figure(height_inches=6.4 if with_accuracy else 4.2, panels=2 if with_accuracy else 1)
    steps = np.array([point.step for point in points], dtype=np.float64)
    losses = np.array([point.loss for point in points], dtype=np.float64)
    panels[0].set_title("Training loss" + _legend_of_lines(points))
    panels[0].set_ylabel("loss per token")
    if points:
        _raw_and_smooth(panels[0], steps, losses, METHOD_COLORS["eagle3"], "training")
        if validation:
            places, values = [point.step for point in validation], [point.loss for point in validation]
            panels[0].plot(places, values, color=STEP_COLORS[1], marker="o", linestyle=":", label="validation")
            panels[0].legend(frameon=False)
        _maybe_log(panels[0], losses)
    else:
        _say(panels[0], "no step was logged")
    if with_accuracy:
        panels[0].tick_params(labelbottom=True)
        _accuracy(panels[1], with_accuracy)
    panels[-1].set_xlabel("optimizer step")
    panels[-1].xaxis.set_major_locator(MaxNLocator(integer=True))
    return _png(figure)


def _accuracy(axes: Axes, points: Sequence[TrainingPoint]) -> None:
    steps = np.array([point.step for point in points], dtype=np.float64)
    for index in range(max(len(point.accuracy_per_ttt_step) for point in points)):
        values = np.array(
            [
                100 * point.accuracy_per_ttt_step[index] if index < len(point.accuracy_per_ttt_step) else np.nan
                for point in points
            ]
        )
        _raw_and_smooth(axes, steps, values, STEP_COLORS[index % len(STEP_COLORS)], f"ttt step {index + 1}")
    axes.set_title("Draft token equals the verifier's (among those right in the ttt steps before)")
    axes.set_ylabel("trained tokens (%)")
    axes.set_ylim(0, 1.25 * axes.get_ylim()[1])  # room for the legend above the curves
    axes.legend(frameon=False, loc="upper left", ncols=5)


def speedup_png(rows: Sequence[Mapping[str, Any]]) -> bytes:
    """Speed-up over concurrency with 95 % intervals; the dashed line is the verifier without a draft."""
    figure, (axes,) = _figure(height_inches=4.2)
    methods = list(dict.fromkeys(str(row["method"]) for row in rows if row["method"] != "none"))
    datasets = list(dict.fromkeys(row["dataset"] for row in rows))
    streams = sorted({row["concurrency"] for row in rows})
    axes.axhline(1.0, color=MUTED, linestyle="--", linewidth=1.2, label="none (no draft)")
    for index, method in enumerate(methods):
        for shade, dataset in enumerate(datasets):
            chosen = sorted(
                (row for row in rows if row["method"] == method and row["dataset"] == dataset),
                key=lambda row: int(row["concurrency"]),
            )
            ratios = np.array([row["speedup"] for row in chosen])
            errors = [
                ratios - [row["speedup_low"] for row in chosen],
                [row["speedup_high"] for row in chosen] - ratios,
            ]
            # Side by side, or the intervals of one load would hide one another.
            nudge = 1.0 + 0.03 * (index - (len(methods) - 1) / 2)
            axes.errorbar(
                [row["concurrency"] * nudge for row in chosen],
                ratios,
                yerr=errors,
                color=METHOD_COLORS.get(method, INK),
                marker="os^Dv"[shade % 5],
                capsize=4,
                linewidth=1.8,
                label=method if len(datasets) == 1 else f"{method}, {dataset}",
            )
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(streams))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.margins(x=0.08, y=0.12)
    axes.set_title("Speed-up by load, with 95 % intervals")
    axes.set_xlabel("requests in flight")
    axes.set_ylabel("output tokens per second,\nratio to none")
    axes.legend(frameon=False)
    return _png(figure)


def smooth(values: Floats) -> Floats:
    """Centered running median over about a twentieth of the points (at least 5): spikes leave no trace in it."""
    half = max(2, len(values) // 40)
    windows = [values[max(0, index - half) : index + half + 1] for index in range(len(values))]
    return np.array([np.nanmedian(window) if np.isfinite(window).any() else np.nan for window in windows])


def _raw_and_smooth(axes: Axes, steps: Floats, values: Floats, color: str, label: str) -> None:
    finite = np.where(np.isfinite(values), values, np.nan)
    if len(values) < SMOOTHED_FROM_POINTS:
        axes.plot(steps, finite, color=color, linewidth=1.8, marker="o", markersize=4, label=label)
        return
    axes.plot(steps, finite, color=color, linewidth=0.8, alpha=0.3)
    axes.plot(steps, smooth(finite), color=color, linewidth=2.0, label=label)


def _legend_of_lines(points: Sequence[TrainingPoint]) -> str:
    return " (pale: each step, full: running median)" if len(points) >= SMOOTHED_FROM_POINTS else ""


def _maybe_log(axes: Axes, values: Floats) -> None:
    positive = values[np.isfinite(values) & (values > 0)]
    if positive.size == 0 or positive.max() / positive.min() < LOG_SCALE_FROM_RATIO:
        return
    axes.set_yscale("log", nonpositive="mask")
    low, high = float(positive.min()), float(positive.max())
    marks = [base * 10.0**power for power in range(-8, 7) for base in (1.0, 2.0, 5.0)]
    axes.yaxis.set_major_locator(FixedLocator([mark for mark in marks if low / 2 <= mark <= high * 2]))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.set_ylim(low * 0.9, high * 1.1)


def _say(axes: Axes, text: str) -> None:
    axes.text(0.5, 0.5, text, transform=axes.transAxes, ha="center", va="center", color=MUTED, fontsize=13)


def _figure(height_inches: float, panels: int = 1) -> tuple[Figure, list[Axes]]:
    """A figure of its own, not pyplot's: pyplot keeps global state and is not safe in threads."""
    figure = Figure(figsize=(WIDTH_INCHES, height_inches), layout="constrained", facecolor="white")
    axes_list: list[Axes] = list(figure.subplots(panels, 1, sharex=True, squeeze=False)[:, 0])
    for axes in axes_list:
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="#dddddd", linewidth=0.8)
        axes.set_axisbelow(True)
        axes.tick_params(labelsize=12, colors=INK)
        axes.xaxis.label.set_fontsize(13)
        axes.yaxis.label.set_fontsize(13)
    return figure, axes_list


def _png(figure: Figure) -> bytes:
    for axes in figure.axes:
        axes.title.set_fontsize(15)
        legend = axes.get_legend()
        for text in legend.get_texts() if legend else ():
            text.set_fontsize(12)
        for text in axes.texts:
            text.set_fontsize(12)
    sink = io.BytesIO()
    figure.savefig(sink, format="png", dpi=DOTS_PER_INCH)
    return sink.getvalue()
