"""Salvage for real: short limits first, then only the truncated rows again with a longer one."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from flows.config import load_config
from flows.resolve import resolve
from infra import manifest
from infra.locations import project_home
from infra.manifest import StageRef
from infra.tables import read_table

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(2000)]

SMOKE = str(project_home() / "deployments" / "smoke.yaml")
WORDS = ("apple", "river", "seven", "Monday", "blue", "yes")
SHORT = [f"Reply with one word only: {word}" for word in WORDS]
LONG = [f"Write a long story about this word: {word}" for word in WORDS]
FIRST, LATER = 26, 160  # seen: some first sentences end at 17 to 23 tokens, the others at 28 to 32


def overrides(folder: Path, *more: str) -> list[str]:
    return [
        f"root={folder / 'root'}",
        f"prompts.sources=[{{file: {folder / 'asked.jsonl'}}}]",
        "prompts.heldout_prompts=1",
        "prompts.samples_per_prompt=1",
        "prompts.greedy_samples=0",
        "prompts.shard_size=4",
        "vllm.max_model_len=512",
        "generate.temperature=0",
        "generate.concurrency=8",
        # The small model ends no answer within the first limit by itself; some of its first sentences are longer.
        "generate.extra_body={stop: [.]}",
        *more,
    ]


def generate(folder: Path, *more: str) -> tuple[StageRef, str]:
    """Run the pipeline up to the responses. Returns their stage and the log."""
    chosen = overrides(folder, *more)
    argv = [sys.executable, "-m", "flows.cli", "run", SMOKE, "--until", "responses"]
    argv += [part for override in chosen for part in ("--set", override)]
    environment = {**os.environ, "PREFECT_HOME": str(folder / "prefect")}
    for name in ("PREFECT_API_URL", "PREFECT_API_DATABASE_CONNECTION_URL"):
        environment.pop(name, None)
    ran = subprocess.run(argv, cwd=project_home(), env=environment, capture_output=True, text=True, timeout=900)
    assert ran.returncode == 0, ran.stderr[-5000:]
    return resolve(load_config(SMOKE, chosen))["responses"], ran.stderr


def rows_of(stage: StageRef) -> dict[str, dict[str, Any]]:
    records = manifest.read_records(stage.uri).values()
    return {row["sample_id"]: row for record in records for row in read_table(stage.uri, record).to_pylist()}


def test_only_truncated_rows_are_generated_again_and_the_log_says_how_many(tmp_path: Path) -> None:
    text = "".join(json.dumps({"prompt": prompt}) + "\n" for prompt in SHORT + LONG)
    (tmp_path / "asked.jsonl").write_text(text)
    earlier, _ = generate(tmp_path, f"generate.max_tokens={FIRST}")
    before = rows_of(earlier)
    cut = {sample_id for sample_id, row in before.items() if row["status"] == "truncated"}
    assert 0 < len(cut) < len(before) == 11

    redo = (f"generate.redo_from={earlier.key}", "generate.redo=[truncated]", f"generate.max_tokens={LATER}")
    later, log = generate(tmp_path, *redo)
    after = rows_of(later)
    assert list(after) == list(before)
    for sample_id, row in after.items():
        if sample_id in cut:
            # Made anew; perhaps no longer than before, for greedy answers can part where two logits nearly tie.
            assert row["latency_seconds"] != before[sample_id]["latency_seconds"]
            assert row["status"] == "ok" or row["num_completion_tokens"] == LATER
        else:
            assert row == before[sample_id]
    kept = len(before) - len(cut)
    said = f"{kept} rows of responses/{earlier.key} are kept as they are, {len(cut)} are made anew"
    assert said in re.sub(r"\s+", " ", log)
    written = manifest.read_manifest(later.uri)
    assert written is not None
    assert written["salvage"] == {
        "redo_from": earlier.key,
        "rows_kept": kept,
        "rows_made_anew": {"truncated": len(cut)},
    }
