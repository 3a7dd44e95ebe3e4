"""Gauges of every stage, and a dashboard that asks only for gauges that there are."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from prometheus_client import REGISTRY, CollectorRegistry

from infra import gauges
from infra.fingerprint import stage_content
from infra.gauges import GpuMemory, show_extraction, show_training
from infra.locations import project_home
from infra.manifest import ShardRecord, StageRef

FOLDER = project_home() / "deployments" / "monitoring"


def gauge(stage: StageRef, name: str, **labels: str) -> float | None:
    own = {"root": stage.root, "stage": stage.stage, "key": stage.key, **labels}
    return REGISTRY.get_sample_value(f"draftsmith_{name}", own)


def stage_ref(root: Path, name: str) -> StageRef:
    return StageRef(str(root), name, stage_content(name, 1, {}, {}, {}))


def test_the_dashboard_asks_for_gauges_that_there_are() -> None:
    board = json.loads((FOLDER / "grafana-dashboard.json").read_text())
    asked = {
        name
        for panel in board["panels"]
        for target in panel["targets"]
        for name in re.findall(r"draftsmith_\w+", target["expr"])
    }
    there = {metric.name for metric in [*REGISTRY.collect(), *GpuMemory().collect()]}
    assert asked <= there
    assert {name for name in there if name.startswith("draftsmith_")} == asked, "each gauge has its panel"
    places = [tuple(panel["gridPos"].values()) for panel in board["panels"]]
    assert len(set(places)) == len(places)


def test_extraction_and_training_are_shown(tmp_path: Path) -> None:
    states, drafts = (stage_ref(tmp_path, name) for name in ("hidden_states", "drafts"))
    record = ShardRecord("00000", "x", "0" * 64, 1, 5, {"ok": 4, "failed": 1}, {})
    show_extraction(states, [record], 20, None)
    assert gauge(states, "rows", status="failed") == 1
    assert gauge(states, "rows_left") == 15
    show_extraction(states, [record, record], 20, 123.0)
    assert gauge(states, "rows", status="ok") == 8
    assert gauge(states, "tokens_per_second") == 123
    show_training(drafts, {"step": 7, "loss": 0.5, "tokens_per_second": 9.0, "input_wait_seconds": 0.25})
    assert gauge(drafts, "input_wait_seconds") == 0.25
    assert gauge(drafts, "step") == 7


def test_memory_of_gpus_is_read_from_the_driver_where_there_is_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry = CollectorRegistry()
    registry.register(GpuMemory())
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\nprintf '0, 1024, 2048\\n1, [N/A], 2048\\n'\n")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert registry.get_sample_value("draftsmith_gpu_memory_used_bytes", {"gpu": "0"}) == 2**30
    assert registry.get_sample_value("draftsmith_gpu_memory_used_bytes", {"gpu": "1"}) is None
    smi.write_text("#!/bin/sh\nexit 9\n")
    assert gauges._gpu_memory() == []
