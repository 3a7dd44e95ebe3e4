"""What the report's plots have in common: size, fonts, colours, a PNG without a display."""

from __future__ import annotations

import io
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

WIDTH_INCHES = 9.0  # 900 pixels at 100 dots an inch, at which the fonts are chosen
DOTS_PER_INCH = 150
INK = "#222222"
MUTED = "#6b6b6b"
# Okabe and Ito's palette: told apart by colour-blind readers too.
SERIES_COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9")
LEGEND: dict[str, Any] = {"edgecolor": "white", "facecolor": "white", "framealpha": 0.85}


def say(axes: Axes, text: str) -> None:
    """A text in place of curves that there are none of."""
    axes.text(0.5, 0.5, text, transform=axes.transAxes, ha="center", va="center", color=MUTED, fontsize=13)


def new_figure(height_inches: float, panels: int = 1) -> tuple[Figure, list[Axes]]:
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


def png(figure: Figure) -> bytes:
    """The figure, its fonts set for 900 pixels' width."""
    if figure.get_suptitle():
        figure.suptitle(figure.get_suptitle(), fontsize=15)
    for legend in [*figure.legends, *filter(None, (axes.get_legend() for axes in figure.axes))]:
        for text in legend.get_texts():
            text.set_fontsize(12)
    for axes in figure.axes:
        axes.title.set_fontsize(15)
        for text in axes.texts:
            text.set_fontsize(12)
    sink = io.BytesIO()
    figure.savefig(sink, format="png", dpi=DOTS_PER_INCH)
    return sink.getvalue()
