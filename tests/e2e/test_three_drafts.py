"""What a person bets a deployment on: of three drafts of one verifier, only the one that is worth it is promoted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from flows.cli import EXIT_DONE
from tests.e2e.conftest import CommandRun

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(5400)]

# The demo with one answer to each prompt, measured with one request in flight.
COMMON = (
    "prompts.samples_per_prompt=1",
    "train.smoke_serve=false",
    "evaluate.concurrency=[1]",
    "evaluate.num_prompts=[8]",
)
RANDOM = ("train.num_steps=1", "train.warmup_steps=0", "train.learning_rate=1.0e-9")
TRAINED = ("train.num_steps=240",)
WORSE = ("train.num_steps=120", "evaluate.drafts=[promoted]", "promote.not_worse_than=promoted")


class Judged:
    """One draft trained, measured and held against the gate, by the command that a person would type."""

    def __init__(self, folder: Path, root: Path, overrides: tuple[str, ...]) -> None:
        before = set(root.glob("evaluations/*"))
        self.run = CommandRun(
            folder, [f"root={root}", *COMMON, *overrides], {"PREFECT_HOME": str(folder.parent / "prefect")}
        ).start()
        try:
            assert self.run.finish(2400) == EXIT_DONE, self.run.log[-5000:]
        finally:
            self.run.end()
        (evaluation,) = set(root.glob("evaluations/*")) - before
        self.rows: list[dict[str, Any]] = pq.read_table(evaluation / "results.parquet").to_pylist()
        self.report = (evaluation / "report.md").read_text()

    def row(self, label: str = "eagle3") -> dict[str, Any]:
        (row,) = (row for row in self.rows if row["label"] == label)
        return row

    @property
    def verdict(self) -> str:
        """What the command said of the promotion: its last line but one."""
        return self.run.stdout.splitlines()[-2]


@pytest.fixture(scope="module")
def judged(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Judged]:
    folder = tmp_path_factory.mktemp("three-drafts")
    root, found = folder / "root", dict[str, Judged]()
    pointers: list[bytes | None] = []  # promoted.json after each
    for name, overrides in (("random", RANDOM), ("trained", TRAINED), ("worse", WORSE)):
        found[name] = Judged(folder / name, root, overrides)
        pointer = list(root.glob("speculators/*/promoted.json"))
        pointers.append(pointer[0].read_bytes() if pointer else None)
        print(f"{name}: {found[name].verdict}")
        print(
            *(f"  {row['label']}: {row['acceptance_length']} {row['speedup']}" for row in found[name].rows),
            sep="\n",
        )
    assert pointers[0] is None, "weights drawn at random are not promoted"
    assert pointers[1] is not None
    assert json.loads(pointers[1])["promoted"]["draft"] == found["trained"].row()["draft"]
    assert pointers[2] == pointers[1], "what is promoted stays, to the byte"
    return found


def test_random_weights_are_accepted_nowhere_and_slow_it_down(judged: dict[str, Judged]) -> None:
    draft = judged["random"]
    assert draft.row()["acceptance_length"] < 1.05
    assert draft.row()["speedup"] < 1.0
    assert draft.verdict.startswith("Not promoted: acceptance length 1.0")
    assert f"**{draft.verdict.partition(': ')[0]}:** {draft.verdict.partition(': ')[2]}" in draft.report


def test_the_trained_one_is_promoted(judged: dict[str, Judged]) -> None:
    draft = judged["trained"]
    assert draft.row()["acceptance_length"] > 1.3
    assert draft.row()["speedup"] > judged["random"].row()["speedup"]
    assert not draft.verdict.startswith("Not promoted")


def test_half_as_long_a_training_is_measured_beside_it_and_not_promoted(judged: dict[str, Judged]) -> None:
    draft, promoted = judged["worse"], judged["trained"].row()["draft"]
    (rival,) = (row for row in draft.rows if row["draft"] == promoted)
    assert 1.2 < draft.row()["acceptance_length"] < rival["acceptance_length"]
    assert draft.verdict.startswith("Not promoted: ")
    assert promoted in draft.verdict
