"""The stages' own flows over an imported folder: planned, made, resumed and reused like any other, without vLLM."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from flows.config import PipelineConfig
from flows.extract import extract
from flows.pipeline import speculator_pipeline
from flows.resolve import resolve
from infra import manifest, storage
from infra.errors import StageFailed
from infra.verify import verify
from tests.fakes.data_folder import (
    LAYER_IDS,
    LENGTHS,
    ids_of,
    import_tree,
    pipeline,
    states_of,
    write_folder,
    write_states,
)

pytestmark = [pytest.mark.prefect, pytest.mark.usefixtures("prefect_server")]


@pytest.fixture(scope="module")
def prefect_server() -> Iterator[None]:
    from prefect.testing.utilities import prefect_test_harness

    with prefect_test_harness(server_startup_timeout=120):
        yield


@pytest.fixture
def config(tmp_path: Path) -> PipelineConfig:
    return pipeline(import_tree(tmp_path, write_folder(tmp_path / "data")) | {"vocab": {"draft_vocab_size": 9}})


async def test_the_pipeline_goes_on_from_a_folder(config: PipelineConfig) -> None:
    outcome = await speculator_pipeline(config, until="vocab")
    made = {stage["stage"]: stage for stage in outcome["stages"]}
    assert list(made) == ["prompts", "responses", "hidden_states", "vocab"]
    assert [made[name]["totals"]["rows"] for name in ("responses", "hidden_states")] == [len(LENGTHS)] * 2
    assert [finding for finding in verify(config.root) if finding.problem] == []

    stage = resolve(config)["hidden_states"]
    written = manifest.read_manifest(stage.uri) or {}
    assert written["extraction"]["layer_ids"] == list(LAYER_IDS), "which training reads"
    assert written["extraction"]["num_tokens"] == sum(LENGTHS)
    before = manifest.read_records(stage.uri)
    assert all(record.extra["failed_checks"] == {} for record in before.values()), "the checks ran"
    await asyncio.to_thread(manifest.invalidate, stage.uri, "00001")
    again = await speculator_pipeline(config, until="vocab")
    assert [one["stage"] for one in again["stages"] if not one["reused"]] == ["hidden_states"]
    assert manifest.read_records(stage.uri) == before


async def test_a_stage_with_too_many_failed_rows_says_which_check(config: PipelineConfig) -> None:
    folder = Path(config.import_states.folder)
    write_states(
        folder, 1, ids_of(3, LENGTHS[1]), states_of(1, LENGTHS[1])
    )  # another row's ids: only its content tells
    with pytest.raises(StageFailed, match=r"1 of 5 rows failed, more than the allowed share 0.02: 1 ids \(hs_1\)"):
        await speculator_pipeline(config, until="hidden_states")


async def test_a_root_without_room_is_refused(config: PipelineConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    await speculator_pipeline(config, until="responses")
    monkeypatch.setattr(storage, "free_bytes", lambda _root: 100)
    with pytest.raises(StageFailed, match=r"cannot hold what is left to import, about .* as bf16: 100 B are free"):
        await extract(config)
