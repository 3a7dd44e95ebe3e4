"""What comes in from a speculators data folder: every row once and every bit, and out and in again the same."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset, load_from_disk
from safetensors.torch import load_file, save_file

from flows.config import PipelineConfig
from flows.extract import plan_shards
from flows.forecast import forecast, status
from flows.import_checks import refuse_unfit_import
from flows.interchange import plan_import
from flows.resolve import resolve
from infra import manifest, storage
from infra.drafts.vocab import VocabConfig
from infra.errors import InputError
from infra.hidden_states import HiddenStatesFile, HiddenStatesMeta
from infra.interchange.checks import check_import
from infra.interchange.exporting import export_states
from infra.interchange.importing import import_revision, open_folder
from infra.manifest import StageRef
from infra.state_checks.checks import ChecksConfig, StateChecks
from infra.tables import read_table
from infra.training.config import TrainConfig
from infra.training.data import Schedule, ShardStore, StepLoader, build_index
from tasks.interchange import import_responses, import_states
from tests.fakes.data_folder import (
    HIDDEN_SIZE,
    LAYER_IDS,
    LENGTHS,
    NUM_LAYERS,
    VOCAB_SIZE,
    ids_of,
    import_tree,
    mask_of,
    pipeline,
    states_of,
    write_folder,
    write_states,
)


class NoProgress:
    def advance(self) -> None:
        pass


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_folder(tmp_path / "data")


@pytest.fixture
def tree(tmp_path: Path, folder: Path) -> dict[str, Any]:
    return import_tree(tmp_path, folder)


async def imported(config: PipelineConfig) -> dict[str, StageRef]:
    """Make both stages as their flows do."""
    stages, source = resolve(config), config.import_states
    assert source is not None
    folder, progress = open_folder(source), NoProgress()
    responses, hidden = stages["responses"], stages["hidden_states"]
    manifest.write_plan(responses, plan_import(config, stages))
    for shard in manifest.inspect(responses).missing:
        await import_responses.fn(responses, shard, folder, source, progress)
    manifest.finish(responses, {})
    starts = {shard.shard: shard.extra["rows"][0] for shard in manifest.read_plan(responses.uri)}
    manifest.write_plan(hidden, plan_shards(stages))
    revision = hidden.content["revisions"]["verifier"]
    meta = HiddenStatesMeta(LAYER_IDS, HIDDEN_SIZE, revision, config.extract.encoding)
    checks = StateChecks(ChecksConfig(on_policy="off"), meta, None)
    inputs = manifest.input_records(hidden, manifest.read_plan(hidden.uri))
    for shard in manifest.inspect(hidden).missing:
        start = starts[shard.shard]
        await import_states.fn(hidden, shard, inputs, folder, start, meta, checks, progress)
    manifest.finish(hidden, {})
    return stages


def response_rows(stage: StageRef) -> list[dict[str, Any]]:
    records = manifest.read_records(stage.uri)
    return [row for shard in sorted(records) for row in read_table(stage.uri, records[shard]).to_pylist()]


def hidden_rows(stage: StageRef) -> list[tuple[dict[str, Any], Any]]:
    """Each row without its payload, and its decoded sample or None."""
    records = manifest.read_records(stage.uri)
    files = [HiddenStatesFile(manifest.read_shard(stage.uri, records[shard])) for shard in sorted(records)]
    return [(row, file.sample(index)) for file in files for index, row in enumerate(file.rows().to_pylist())]


def bits(states: torch.Tensor) -> torch.Tensor:
    return states.contiguous().view(torch.int16)


# --- what comes in


async def test_every_row_becomes_a_response_and_says_what_is_not_known(tree: dict[str, Any]) -> None:
    stages = await imported(pipeline(tree))
    rows = response_rows(stages["responses"])
    assert [row["sample_id"] for row in rows] == [f"hs_{index}" for index in range(5)]
    for index, (row, length) in enumerate(zip(rows, LENGTHS, strict=True)):
        assert row["input_ids"] == ids_of(index, length)
        assert row["loss_mask"] == [bool(value) for value in mask_of(length)]
        assert (row["num_prompt_tokens"], row["num_completion_tokens"]) == (3, length - 3), "of the last turn"
        assert (row["status"], row["token_source"], row["messages"]) == ("ok", "imported", "[]")
        assert math.isnan(row["temperature"])
        assert row["content"] is row["finish_reason"] is row["error"] is None
    assert [shard.extra["rows"] for shard in manifest.read_plan(stages["responses"].uri)] == [
        [0, 2],
        [2, 4],
        [4, 5],
    ]


@pytest.mark.parametrize("encoding", ["bf16", "bf16_split"])
async def test_every_bit_of_the_states_comes_in(tree: dict[str, Any], encoding: str) -> None:
    tree["extract"]["encoding"] = encoding
    stages = await imported(pipeline(tree))
    found = hidden_rows(stages["hidden_states"])
    for index, (length, (row, sample)) in enumerate(zip(LENGTHS, found, strict=True)):
        states = states_of(index, length)
        assert (row["sample_id"], row["status"], row["num_tokens"]) == (f"hs_{index}", "ok", length)
        assert torch.equal(bits(sample.aux_hidden_states), bits(states[:, :-1].flatten(1)))
        assert torch.equal(bits(sample.verifier_last_hidden_states), bits(states[:, -1]))
    records = manifest.read_records(stages["hidden_states"].uri).values()
    assert sum(record.extra["num_tokens"] for record in records) == sum(LENGTHS)


async def test_out_and_in_again_is_the_same(tree: dict[str, Any], tmp_path: Path) -> None:
    first = await imported(pipeline(tree))
    out = tmp_path / "out"
    written = export_states(first["hidden_states"].uri, out, VocabConfig(draft_vocab_size=9), VOCAB_SIZE)
    assert written.target_layer_ids == list(LAYER_IDS[:-1])
    again = tree | {"root": str(tmp_path / "other"), "import_states": {"folder": str(out), "shard_size": 3}}
    second = await imported(PipelineConfig.model_validate(again))
    one, two = hidden_rows(first["hidden_states"]), hidden_rows(second["hidden_states"])
    assert [row for row, _ in one] == [row for row, _ in two]
    for (_, left), (_, right) in zip(one, two, strict=True):
        assert torch.equal(bits(left.aux_hidden_states), bits(right.aux_hidden_states))
        assert torch.equal(bits(left.verifier_last_hidden_states), bits(right.verifier_last_hidden_states))
    same = ("sample_id", "input_ids", "loss_mask", "status", "num_prompt_tokens")
    for left_row, right_row in zip(
        response_rows(first["responses"]), response_rows(second["responses"]), strict=True
    ):
        assert {name: left_row[name] for name in same} == {name: right_row[name] for name in same}


async def test_training_reads_it(tree: dict[str, Any]) -> None:
    stages = await imported(pipeline(tree))
    config = TrainConfig(total_seq_len=16, num_steps=2, global_batch=2, validation_share=0.0)
    store = ShardStore(stages["hidden_states"].uri, 2)
    index = build_index(store, config)
    assert len(index) == len(LENGTHS)
    batch = StepLoader(store, Schedule(index, config), config, rank=0, world=1).load(0)
    assert batch.packs[0].hidden_states.shape[-1] == (NUM_LAYERS - 1) * HIDDEN_SIZE


async def test_files_of_the_fp8_connector_come_in(tree: dict[str, Any], folder: Path) -> None:
    from hs_connectors.fp8_utils import dequantize_fp8_tensor, quantize_tensor_to_fp8

    states, scales = quantize_tensor_to_fp8(states_of(0, LENGTHS[0]))
    tensors = {"hidden_states": states, "hidden_states_scales": scales}
    path = folder / "hidden_states/hs_0.safetensors"
    save_file(tensors | {"token_ids": load_file(path)["token_ids"]}, path)
    stages = await imported(pipeline(tree))
    _, sample = hidden_rows(stages["hidden_states"])[0]
    assert torch.equal(sample.aux_hidden_states, dequantize_fp8_tensor(states, scales)[:, :-1].flatten(1))


# --- what makes a failed row


async def test_what_only_a_file_shows_makes_a_failed_row_with_the_reason(
    tree: dict[str, Any], folder: Path
) -> None:
    tree["extract"]["max_failed_share"] = 0.9
    whole = (folder / "hidden_states/hs_0.safetensors").read_bytes()
    (folder / "hidden_states/hs_0.safetensors").write_bytes(whole[:-10])
    write_states(folder, 1, ids_of(3, LENGTHS[1]), states_of(1, LENGTHS[1]))
    write_states(
        folder, 2, ids_of(2, LENGTHS[2]), states_of(2, LENGTHS[2]).index_fill(0, torch.tensor([1]), torch.nan)
    )
    (folder / "hidden_states/hs_3.safetensors").unlink()
    stages = await imported(pipeline(tree, missing="leave_out"))
    errors = [row["error"] for row, _ in hidden_rows(stages["hidden_states"])]
    assert "import: hs_0.safetensors cannot be used: SafetensorError" in errors[0]
    assert errors[1] == "ids: hs_1.safetensors has 5 ids that are not those of its row"
    assert errors[2].startswith("not finite")
    assert errors[3] == "import: hs_3.safetensors cannot be used: it is not there"
    assert errors[4] is None
    assert manifest.read_manifest(stages["hidden_states"].uri)["totals"]["status_counts"] == {"ok": 1, "failed": 4}


async def test_a_row_that_trains_nothing_is_a_failed_row(tree: dict[str, Any], folder: Path) -> None:
    data = load_from_disk(folder)
    rows = data.with_format(None).to_dict()
    rows["loss_mask"][1] = [0] * LENGTHS[1]
    shutil.rmtree(folder)
    Dataset.from_dict(rows).save_to_disk(folder)
    for row, length in enumerate(LENGTHS):
        write_states(folder, row, ids_of(row, length), states_of(row, length))
    stages = await imported(pipeline(tree))
    responses, hidden = response_rows(stages["responses"]), hidden_rows(stages["hidden_states"])
    assert [row["status"] for row in responses] == ["ok", "failed", "ok", "ok", "ok"]
    assert (responses[1]["input_ids"], responses[1]["token_source"]) == ([], "imported")
    assert responses[1]["error"] == hidden[1][0]["error"].removeprefix("response failed: ")
    assert torch.equal(hidden[2][1].verifier_last_hidden_states, states_of(2, LENGTHS[2])[:, -1])


# --- keys


def test_the_key_is_of_the_content_and_never_of_the_place(
    tree: dict[str, Any], folder: Path, tmp_path: Path
) -> None:
    def keys(**source: Any) -> tuple[str, str]:
        stages = resolve(pipeline(tree, **source))
        return stages["responses"].key, stages["hidden_states"].key

    before = keys()
    moved = tmp_path / "moved"
    shutil.copytree(folder, moved)
    assert keys(folder=str(moved)) == before
    shutil.move(moved / "hidden_states", tmp_path / "states")
    assert keys(folder=str(moved), hidden_states_folder=str(tmp_path / "states")) == before
    assert keys(missing="leave_out") == before
    tree["generate"] = {"temperature": 0.1, "max_tokens": 5}  # nobody is asked anything
    assert keys() == before
    assert len({before, keys(shard_size=3), keys(dataset="other"), keys(temperature=0.7)}) == 4
    assert str(folder) not in json.dumps(resolve(pipeline(tree))["responses"].content)


def test_another_content_is_another_key(tree: dict[str, Any], folder: Path) -> None:
    def revision() -> str:
        return import_revision(pipeline(tree).import_states)

    found = {revision()}
    (folder / "hidden_states/hs_4.safetensors").write_bytes(b"other size")
    found.add(revision())
    (folder / "hidden_states/hs_4.safetensors").unlink()
    found.add(revision())
    rows = load_from_disk(folder).with_format(None).to_dict()
    for name in ("input_ids", "loss_mask"):
        changed = {each: [list(row) for row in values] for each, values in rows.items() if each != "seq_len"}
        changed[name][0][0] = 1 - changed[name][0][0]
        shutil.rmtree(folder / "hidden_states")
        shutil.rmtree(folder)
        Dataset.from_dict(changed).save_to_disk(folder)
        (folder / "hidden_states").mkdir()
        found.add(revision())
    assert len(found) == 5


async def test_a_folder_may_go_once_it_is_imported(tree: dict[str, Any], folder: Path) -> None:
    revision = import_revision(pipeline(tree).import_states)
    config = pipeline(tree, revision=revision)
    before = {row["stage"]: row for row in forecast(config)}
    assert before["responses"]["detail"] == f"5 rows of import_states.revision={revision}"
    assert before["hidden_states"]["detail"].startswith("5 files of states, ")
    stages = await imported(config)
    shutil.rmtree(folder)
    refuse_unfit_import(config, resolve(config))
    after = {row["stage"]: row["state"] for row in status(config)}
    assert (after["responses"], after["hidden_states"]) == ("complete", "complete")
    storage.delete(stages["hidden_states"].manifest_uri)
    check_import.cache_clear()  # as another process
    with pytest.raises(InputError, match=r"import_states\.folder: .* is no data set"):
        refuse_unfit_import(config, resolve(config))
    with pytest.raises(InputError, match=r"import_states\.folder: .* is no data set"):
        resolve(pipeline(tree))
