"""What is seen of a running training: progress, curves that stand, trackers, at a bounded rate."""

from __future__ import annotations

import asyncio
import base64
import json
import re
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4
from xml.etree import ElementTree

import pytest

from infra.tracking.curves import MAX_POINTS, SPARKS, TrainingCurves, sparkline
from infra.tracking.trackers import Trackers
from tasks import progress, training_watch
from tasks.training_watch import watching
from tests.infra.tracking.test_trackers import Listed

START = {"kind": "start", "num_steps": 4000, "from_step": 0, "num_samples": 9, "ranks": 1}


def line(kind: str, step: int, **changes: Any) -> dict[str, Any]:
    found = {
        "kind": kind, "step": step, "num_steps": 4000, "loss": 10.0 - step / 1000, "acceptance_length": 1 + step / 1000,
        "accuracy_per_ttt_step": [0.5, 0.25],
    }  # fmt: skip
    if kind == "train":
        found |= {
            "epoch": 0, "learning_rate": 0.001, "gradient_norm": 0.25, "tokens_per_second": 1234.5,
            "input_wait_seconds": 0.5, "peak_process_memory_gib": 2.5,
        }  # fmt: skip
    return found | changes


def drawn(text: str) -> ElementTree.Element:
    """The image within a text, as the XML that a browser reads."""
    (data,) = re.findall(r"!\[curves\]\(data:image/svg\+xml;base64,([A-Za-z0-9+/=]+)\)", text)
    return ElementTree.fromstring(base64.b64decode(data))


def curve_lengths(text: str) -> list[int]:
    """Number of points of each curve."""
    tag = "{http://www.w3.org/2000/svg}polyline"
    return [len(curve.attrib["points"].split()) for curve in drawn(text).iter(tag)]


# --- curves


def test_curves_are_a_line_a_drawing_and_a_table() -> None:
    curves = TrainingCurves(4000)
    for step in range(10, 2001, 10):
        curves.add(line("train", step))
    for step in (1000, 2000):
        curves.add(line("validation", step))
    text = curves.markdown()
    assert text.startswith(
        "**Step 2,000 of 4,000** · epoch 1 · learning rate 0.001 · peak memory 2.5 GiB (process)\n"
    )
    assert curve_lengths(text) == [200, 2, 200, 2]
    rows = {cells[1].strip(): cells for row in text.splitlines() if len(cells := row.split("|")) == 8}
    assert [cell.strip() for cell in rows["loss"][2:6]] == ["9.99", "8", "8", "9.99"]
    assert [cell.strip() for cell in rows["predicted acceptance length, validation"][2:6]] == ["2", "3", "2", "3"]
    assert {"loss, validation", "tokens/s", "input wait (s)", "gradient norm"} <= set(rows)
    assert rows["loss"][6].strip()[0] == SPARKS[-1]
    assert rows["loss"][6].strip()[-1] == SPARKS[0]


def test_curves_stay_small_however_long_the_run_is_and_leave_gaps() -> None:
    curves = TrainingCurves(1_000_000)
    for step in range(10, 200_000, 10):
        curves.add(line("train", step, loss=float("nan") if step % 20 else 2.0))
    text = curves.markdown()
    assert max(curve_lengths(text)) == MAX_POINTS
    assert len(text) < 20_000
    assert "nan" not in text


def test_nothing_is_drawn_before_the_first_line() -> None:
    text = TrainingCurves(4000).markdown()
    assert text.startswith("No step of 4,000 is logged yet.")
    assert curve_lengths(text) == []


@pytest.mark.parametrize(
    ("values", "bars"), [([5.0], "▁"), ([1.0, 1.0], "▁▁"), ([0.0, 7.0, 3.0], "▁█▄"), ([0.0, 0.0, 8.0, 6.0], "▁█")]
)
def test_sparklines(values: list[float], bars: str) -> None:
    assert sparkline(values, 3 if len(values) < 4 else 2) == bars


# --- what is shown while the trainer runs


class FakeUi:
    """The Prefect server's side of artifacts, which fails where it is told to."""

    def __init__(self) -> None:
        self.created: list[tuple[str, str]] = []
        self.updated: list[str] = []
        self.broken = False

    async def create(self, text: str, key: str, description: str) -> UUID:
        if self.broken:
            raise ConnectionError("no server here")
        self.created.append((key, text))
        return uuid4()

    async def update_artifact(self, artifact_id: UUID, artifact: Any) -> None:
        self.updated.append(artifact.data)

    async def __aenter__(self) -> FakeUi:
        return self

    async def __aexit__(self, *_: object) -> None: ...


@pytest.fixture
def ui(monkeypatch: pytest.MonkeyPatch) -> FakeUi:
    fake = FakeUi()

    async def no_progress(percent: float, key: str, description: str) -> None:
        raise RuntimeError("not looked at here")

    monkeypatch.setattr(progress, "acreate_progress_artifact", no_progress)
    monkeypatch.setattr(training_watch, "acreate_markdown_artifact", fake.create)
    monkeypatch.setattr(training_watch, "get_client", lambda: fake)
    monkeypatch.setattr(training_watch, "CURVES_SECONDS", 0.02)
    return fake


async def until(condition: Any) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_curves_are_one_artifact_that_is_brought_up_to_date(ui: FakeUi, tmp_path: Path) -> None:
    async with watching(Trackers({}), tmp_path / "metrics.jsonl") as watch:
        await watch.see(START)
        await watch.see(line("train", 10))
        await until(lambda: ui.created)
        await asyncio.sleep(0.1)
        assert ui.updated == [], "nothing is sent while nothing is new"
        await watch.see(line("train", 20))
        await until(lambda: ui.updated)
        await watch.see(line("train", 30))
        await watch.see({"kind": "done", "step": 30})
    ((key, first),) = ui.created
    assert key == "drafts-curves"
    assert first.startswith("**Step 10 of 4,000**")
    assert ui.updated[0].startswith("**Step 20 of 4,000**")
    assert ui.updated[-1].startswith("**Step 30 of 4,000**"), "the last state is shown at the end"


async def test_a_trainer_that_starts_again_is_shown_as_it_stands(ui: FakeUi, tmp_path: Path) -> None:
    path, told = tmp_path / "metrics.jsonl", Listed()
    async with watching(Trackers({"listed": told}), path) as watch:
        await watch.see(START)
        for step in (10, 20, 30):
            await watch.see(line("train", step))
        # torchrun has started it again from the checkpoint of step 20; step 30 is in the file before it is heard of.
        path.write_text("".join(json.dumps(line("train", step)) + "\n" for step in (10, 20, 30)) + '{"kind": "tr')
        await watch.see({**START, "from_step": 20})
        for step in (30, 40):
            await watch.see(line("train", step))
        await watch.see({"kind": "done", "step": 40})
    assert told.told == [[], 10, 20, 30, [10, 20], 30, 40, True]
    shown = [text for _, text in ui.created] + ui.updated
    assert curve_lengths(shown[-1])[0] == 4


async def test_a_ui_that_cannot_be_reached_stops_nothing(
    ui: FakeUi, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ui.broken = True
    told = Listed()
    async with watching(Trackers({"listed": told}), tmp_path / "metrics.jsonl") as watch:
        await watch.see(START)
        await watch.see(line("train", 10))
        await until(lambda: "could not be shown" in caplog.text)
        await watch.see(line("validation", 10))
    assert told.told == [[], 10, 10, False]
    assert caplog.text.count("The curves could not be shown in the UI") == 1


async def test_a_trainer_that_never_starts_leaves_nothing_behind(ui: FakeUi, tmp_path: Path) -> None:
    told = Listed()
    async with watching(Trackers({"listed": told}), tmp_path / "metrics.jsonl") as watch:
        await watch.see({"kind": "failed", "error_type": "InputError", "message": "x"})
    assert told.told == [False]
    assert (ui.created, ui.updated) == ([], [])


@pytest.mark.prefect
async def test_a_real_server_keeps_one_artifact_of_the_curves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from prefect import flow
    from prefect.artifacts import Artifact
    from prefect.testing.utilities import prefect_test_harness

    @flow
    async def training() -> Any:
        async with watching(Trackers({}), tmp_path / "metrics.jsonl") as watch:
            await watch.see(START)
            await watch.see(line("train", 10))
            await until(lambda: watch._shown)
            first = watch._artifact
            await watch.see(line("train", 20))
        assert watch._artifact == first
        found = await Artifact.aget("drafts-curves")
        assert found is not None
        assert found.id == first
        return found.data

    monkeypatch.setattr(training_watch, "CURVES_SECONDS", 0.05)
    with prefect_test_harness(server_startup_timeout=120):
        text = await training()
    assert text.startswith("**Step 20 of 4,000**")
    assert curve_lengths(text)[0] == 2
