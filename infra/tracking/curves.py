"""The course of a training run as Markdown: a drawing and a table, small enough to be sent every few seconds.

The drawing is an SVG image within the text, which Prefect's UI shows; the table tells the same where images are not
shown. The report's plot (`infra.reports.training_plots`) is drawn once, at the end, and costs half a second of a
core.
"""

from __future__ import annotations

import base64
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from infra.reports.canvas import INK, MUTED, SERIES_COLORS

Points = Sequence[tuple[float, float]]  # step and value

MAX_POINTS = 240
SPARKS = "▁▂▃▄▅▆▇█"
SPARKLINE_LENGTH = 24

WIDTH, PANEL_HEIGHT = 860, 220
LEFT, RIGHT, TOP, BOTTOM = 64, 16, 30, 24


@dataclass(frozen=True)
class Quantity:
    """One line of the table.

    Args:
        kind: of the lines of metrics that have it.
        digits: significant ones.
    """

    label: str
    kind: str
    name: str
    digits: int = 4


QUANTITIES = (
    Quantity("loss", "train", "loss"),
    Quantity("loss, validation", "validation", "loss"),
    Quantity("predicted acceptance length", "train", "acceptance_length"),
    Quantity("predicted acceptance length, validation", "validation", "acceptance_length"),
    Quantity("tokens/s", "train", "tokens_per_second"),
    Quantity("input wait (s)", "train", "input_wait_seconds", 2),
    Quantity("gradient norm", "train", "gradient_norm", 3),
)
PANELS = (("Loss per token", QUANTITIES[:2]), ("Predicted acceptance length", QUANTITIES[2:4]))


@dataclass
class TrainingCurves:
    """Lines of metrics (`infra.training.progress.metrics_line`) in the order of their steps."""

    num_steps: int
    """Of the whole run."""
    last: Mapping[str, Any] = field(default_factory=dict)
    """The latest training line."""
    points: dict[Quantity, list[tuple[float, float]]] = field(
        default_factory=lambda: {one: [] for one in QUANTITIES}
    )

    def add(self, line: Mapping[str, Any]) -> None:
        """Take one more line; values that are no finite numbers leave a gap."""
        for quantity, points in self.points.items():
            value = line.get(quantity.name)
            if line["kind"] == quantity.kind and isinstance(value, int | float) and math.isfinite(value):
                points.append((line["step"], value))
        if line["kind"] == "train":
            self.last = line

    def markdown(self) -> str:
        """Where the run stands, the drawing, the table."""
        return "\n\n".join([self._where(), f"![curves]({self._image()})", self._table()]) + "\n"

    def _where(self) -> str:
        if not self.last:
            return f"No step of {self.num_steps:,} is logged yet."
        said = [f"**Step {self.last['step']:,} of {self.num_steps:,}**", f"epoch {self.last['epoch'] + 1}"]
        said.append(f"learning rate {self.last['learning_rate']:.3g}")
        for name, what in (("peak_gpu_memory_gib", "GPU"), ("peak_process_memory_gib", "process")):
            if name in self.last:
                said.append(f"peak memory {self.last[name]:.1f} GiB ({what})")
        return " · ".join(said)

    def _table(self) -> str:
        lines = ["| | first | latest | lowest | highest | course |", "|---|---:|---:|---:|---:|---|"]
        for quantity, points in self.points.items():
            if points:
                values = [value for _, value in points]
                figures = (values[0], values[-1], min(values), max(values))
                shown = " | ".join(f"{value:,.{quantity.digits}g}" for value in figures)
                lines.append(f"| {quantity.label} | {shown} | {sparkline(values)} |")
        return "\n".join(lines)

    def _image(self) -> str:
        height = PANEL_HEIGHT * len(PANELS)
        drawn = "".join(
            _panel(place * PANEL_HEIGHT, title, [self.points[one] for one in quantities], self.num_steps)
            for place, (title, quantities) in enumerate(PANELS)
        )
        svg = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" '
            f'height="{height}" font-family="sans-serif" font-size="13">'
            f'<rect width="{WIDTH}" height="{height}" fill="white"/>{drawn}</svg>'
        )
        return "data:image/svg+xml;base64," + base64.b64encode(svg.encode()).decode()


def sparkline(values: Sequence[float], length: int = SPARKLINE_LENGTH) -> str:
    """The values as a row of at most `length` bars, lowest to highest."""
    means = _means(list(values), length)
    low, high = min(means), max(means)
    scale = (len(SPARKS) - 1) / (high - low) if high > low else 0.0
    return "".join(SPARKS[round((value - low) * scale)] for value in means)


def _means(values: list[float], count: int) -> list[float]:
    """The means of at most `count` equal parts."""
    bounds = [round(place * len(values) / count) for place in range(count + 1)] if len(values) > count else []
    if not bounds:
        return values
    return [sum(values[a:b]) / (b - a) for a, b in itertools.pairwise(bounds)]


def _panel(top: int, title: str, curves: Sequence[Points], num_steps: int) -> str:
    """Training as a line, validation as points on a dotted one, over all steps of the run."""
    values = [value for points in curves for _, value in points]
    if not values:
        return ""
    low, high = min(values), max(values)
    span = (high - low) or 1.0
    inner_width, inner_height = WIDTH - LEFT - RIGHT, PANEL_HEIGHT - TOP - BOTTOM

    def place(step: float, value: float) -> tuple[float, float]:
        x = LEFT + inner_width * step / max(num_steps, 1)
        return round(x, 1), round(top + TOP + inner_height * (high - value) / span, 1)

    def text(x: float, y: float, said: str, anchor: str, color: str = MUTED) -> str:
        return f'<text x="{x}" y="{y}" text-anchor="{anchor}" fill="{color}">{said}</text>'

    bottom = top + TOP + inner_height
    parts = [
        text(LEFT, top + 18, title, "start", INK),
        text(WIDTH - RIGHT, top + 18, "training", "end", SERIES_COLORS[0]),
        text(WIDTH - RIGHT - 64, top + 18, "validation", "end", SERIES_COLORS[1]),
        text(LEFT - 6, top + TOP + 5, f"{high:.4g}", "end"),
        text(LEFT - 6, bottom + 5, f"{low:.4g}", "end"),
        text(LEFT, bottom + 18, "0", "start"),
        text(WIDTH - RIGHT, bottom + 18, f"step {num_steps:,}", "end"),
        f'<path d="M{LEFT} {top + TOP}V{bottom}H{WIDTH - RIGHT}" fill="none" stroke="#cccccc"/>',
    ]
    for points, color, style in zip(curves, SERIES_COLORS, ("", ' stroke-dasharray="3 3"'), strict=False):
        steps, heights = (_means([point[axis] for point in points], MAX_POINTS) for axis in (0, 1))
        places = [place(step, value) for step, value in zip(steps, heights, strict=True)]
        path = " ".join(f"{x},{y}" for x, y in places)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="1.6"{style}/>')
        if style or len(places) == 1:
            parts += [f'<circle cx="{x}" cy="{y}" r="2.6" fill="{color}"/>' for x, y in places]
    return "".join(parts)
