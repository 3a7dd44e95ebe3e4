from __future__ import annotations

import json
import math
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from matplotlib.axes import Axes

from infra.evaluation.findings import groups_by_way
from infra.promotion.pointer import Promotion, figures
from infra.reports.plots import (
    NOT_PROMOTED,
    acceptance_by_position,
    acceptance_png,
    context_png,
    history_figure,
    history_png,
    speedup_png,
)
from infra.reports.training_plots import TrainingPoint, smooth, training_png, training_points
from tests.fakes.result_rows import NEW, PROMOTED, beside, group_rows, measured, result_row

ROWS = beside(measured(), PROMOTED)


def png_size(data: bytes) -> tuple[int, int]:
    """Width and height in pixels; raises if the bytes are no whole PNG."""
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    assert data[-8:-4] == b"IEND"
    width, height = struct.unpack(">II", data[16:24])
    return width, height


def points(count: int, accuracy: bool = True) -> list[TrainingPoint]:
    return [
        TrainingPoint(step, 9.0 * math.exp(-step / 50) + 1, (0.4, 0.3, 0.2) if accuracy else ())
        for step in range(1, count + 1)
    ]


def test_rates_pool_the_loads_of_a_way_and_tell_draft_lengths_apart() -> None:
    rows = [
        result_row("none"),
        result_row(num_drafts=10, accepted_per_position=[5, 1], num_speculative_tokens=2),
        result_row(concurrency=8, num_drafts=30, accepted_per_position=[9, 3], num_speculative_tokens=2),
    ]
    assert acceptance_by_position(rows) == {"eagle3": [0.35, 0.1]}
    longer = result_row(num_drafts=10, accepted_per_position=[5, 1, 1], num_speculative_tokens=3)
    assert acceptance_by_position([*rows, longer]) == {"eagle3 k=2": [0.35, 0.1], "eagle3 k=3": [0.5, 0.1, 0.1]}


@pytest.mark.parametrize("rows", [ROWS, ROWS[:1], []])
def test_plots_of_rows(rows: list[dict[str, Any]]) -> None:
    for drawn in (acceptance_png(rows), speedup_png(rows), context_png(rows, group_rows() if rows == ROWS else [])):
        width, height = png_size(drawn)
        assert width >= 900
        assert height >= 400


def test_each_data_set_has_a_panel_of_its_own() -> None:
    two = ROWS + [row | {"dataset": "another" * 20} for row in ROWS]
    assert png_size(speedup_png(two))[1] > 1.5 * png_size(speedup_png(ROWS))[1]


def test_context_bins_are_those_of_the_coldest_and_longest_measurement_in_order() -> None:
    few = group_rows(concurrency=8, num_drafts=1)
    warm = group_rows(temperature=0.7, num_drafts=10**6)
    ((way, found),) = groups_by_way(ROWS, [*few, *group_rows()[::-1], *warm], "context").items()
    assert way == ("eagle3", "questions")
    assert [row["group"] for row in found] == ["0-127", "128-255", "256-511", "512+"]
    assert {(row["concurrency"], row["temperature"]) for row in found} == {(1, 0.0)}


def test_history_joins_what_was_promoted_and_sets_this_run_apart() -> None:
    def promoted(draft: str) -> Promotion:
        shown = figures([result_row(draft=draft)])
        return Promotion(draft, "export", "e" * 16, "revision", 3, "2026-01-02T03:04:05+00:00", "run", (), shown)

    def drawn(*drafts: str, measured: Sequence[dict[str, Any]] = (result_row(), result_row(concurrency=8))) -> Axes:
        return history_figure([promoted(draft) for draft in drafts], measured).axes[0]

    def places(axes: Axes) -> list[tuple[list[float], str]]:
        lines = [(list(np.asarray(line.get_xdata())), str(line.get_linestyle())) for line in axes.lines]
        return [line for line in lines if line[0]]

    assert places(drawn(PROMOTED, "3" * 16)) == [([0, 1], "-"), ([2], "None")]
    assert places(drawn(PROMOTED, NEW)) == [([0, 1], "-")]
    names = [
        [text.get_text() for text in drawn(*drafts).get_legend().get_texts()] for drafts in ((PROMOTED,), (NEW,))
    ]
    assert names == [["questions, temperature 0", NOT_PROMOTED], ["questions, temperature 0"]]
    ngram = [result_row("ngram")]
    assert places(drawn(measured=ngram)) == []
    assert png_size(history_png([], ngram))[0] >= 900


def test_training_plot_has_a_second_panel_where_accuracy_was_logged() -> None:
    assert png_size(training_png(points(200)))[1] > png_size(training_png(points(200, accuracy=False)))[1]


@pytest.mark.parametrize(
    "given",
    [[], points(1), points(5), [TrainingPoint(1, math.nan), TrainingPoint(2, 1.0), TrainingPoint(3, 0.0)]],
)
def test_training_plot_of_odd_runs(given: list[TrainingPoint]) -> None:
    assert png_size(training_png(given))[0] >= 900


def test_points_come_from_the_trainers_metrics() -> None:
    lines = [
        {"kind": "start", "num_steps": 3},
        {"kind": "train", "step": 2, "loss": 5.0, "accuracy_per_ttt_step": [0.1, 0.2]},
        {"kind": "validation", "step": 2, "loss": 6.0},
        {"kind": "train", "step": 1, "loss": 9.0},
        {"kind": "train", "step": 2, "loss": 4.0, "accuracy_per_ttt_step": [0.3, 0.4]},
    ]
    text = "\n".join(json.dumps(line) for line in lines) + "\n"
    assert training_points(text) == [TrainingPoint(1, 9.0), TrainingPoint(2, 4.0, (0.3, 0.4))]
    assert training_points(text, "validation") == [TrainingPoint(2, 6.0)]


def test_validation_losses_are_drawn_too() -> None:
    assert training_png(points(30)) != training_png(points(30), points(30)[::10])


def test_plots_are_the_same_each_time() -> None:
    assert training_png(points(30)) == training_png(points(30))


def test_smoothing_drops_a_spike_and_keeps_the_level() -> None:
    values = np.ones(40)
    values[20] = 100.0
    assert smooth(values).tolist() == [1.0] * 40
