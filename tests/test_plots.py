from __future__ import annotations

import json
import math
import struct
from typing import Any

import numpy as np
import pytest

from infra.plots import (
    TrainingPoint,
    acceptance_by_position,
    acceptance_png,
    smooth,
    speedup_png,
    training_png,
    training_points,
)
from tests.fakes.measurements import example_rows


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


def test_rates_pool_the_loads_of_a_method() -> None:
    rows: list[dict[str, Any]] = [
        {"method": "none", "num_drafts": 0, "accepted_per_position": []},
        {"method": "eagle3", "num_drafts": 10, "accepted_per_position": [5, 1]},
        {"method": "eagle3", "num_drafts": 30, "accepted_per_position": [9, 3]},
    ]
    assert acceptance_by_position(rows) == {"eagle3": [0.35, 0.1]}


@pytest.mark.parametrize("rows", [example_rows(), example_rows()[:1], []])
def test_acceptance_plot(rows: list[dict[str, Any]]) -> None:
    width, height = png_size(acceptance_png(rows))
    assert width >= 900
    assert height >= 400


@pytest.mark.parametrize("rows", [example_rows(), example_rows(dataset="a") + example_rows(dataset="b")])
def test_speedup_plot(rows: list[dict[str, Any]]) -> None:
    assert png_size(speedup_png(rows))[0] >= 900


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
