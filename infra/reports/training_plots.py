"""The plot of a draft's training: loss and accuracy over optimizer steps."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from infra.reports.canvas import SERIES_COLORS, new_figure, png, say

Floats = npt.NDArray[np.float64]

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


def training_png(points: Sequence[TrainingPoint], validation: Sequence[TrainingPoint] = ()) -> bytes:
    """Loss over optimizer steps, and below it the accuracy of each ttt step, raw in pale and smoothed in full.

    The loss is on a log scale once it spans a factor of 4; non-positive or missing losses leave a gap. Validation
    losses, if any, stand as points in the upper panel.
    """
    with_accuracy = [point for point in points if point.accuracy_per_ttt_step]
    figure, panels = new_figure(height_inches=6.4 if with_accuracy else 4.2, panels=2 if with_accuracy else 1)
    steps = np.array([point.step for point in points], dtype=np.float64)
    losses = np.array([point.loss for point in points], dtype=np.float64)
    panels[0].set_title("Training loss" + _legend_of_lines(points))
    panels[0].set_ylabel("loss per token")
    if points:
        _raw_and_smooth(panels[0], steps, losses, SERIES_COLORS[0], "training")
        if validation:
            places, values = [point.step for point in validation], [point.loss for point in validation]
            panels[0].plot(places, values, color=SERIES_COLORS[1], marker="o", linestyle=":", label="validation")
            panels[0].legend(frameon=False)
        _maybe_log(panels[0], losses)
    else:
        say(panels[0], "no step was logged")
    if with_accuracy:
        panels[0].tick_params(labelbottom=True)
        _accuracy(panels[1], with_accuracy)
    panels[-1].set_xlabel("optimizer step")
    panels[-1].xaxis.set_major_locator(MaxNLocator(integer=True))
    return png(figure)


def _accuracy(axes: Axes, points: Sequence[TrainingPoint]) -> None:
    steps = np.array([point.step for point in points], dtype=np.float64)
    for index in range(max(len(point.accuracy_per_ttt_step) for point in points)):
        values = np.array(
            [
                100 * point.accuracy_per_ttt_step[index] if index < len(point.accuracy_per_ttt_step) else np.nan
                for point in points
            ]
        )
        _raw_and_smooth(axes, steps, values, SERIES_COLORS[index % len(SERIES_COLORS)], f"ttt step {index + 1}")
    axes.set_title("Draft token equals the verifier's (among those right in the ttt steps before)")
    axes.set_ylabel("trained tokens (%)")
    axes.set_ylim(0, 1.25 * axes.get_ylim()[1])  # room for the legend above the curves
    axes.legend(frameon=False, loc="upper left", ncols=5)


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
    return " (pale: each logged step, full: running median)" if len(points) >= SMOOTHED_FROM_POINTS else ""


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
