"""What is exported is what speculators' own trainer loads, bit for bit; and a folder that is there is whole."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from speculators.train.data import ArrowDataset

from infra import manifest
from infra.drafts.vocab import VocabConfig
from infra.errors import DamagedShard, InfrastructureError, InputError, StageFailed
from infra.fingerprint import stage_content
from infra.hidden_states import HiddenRow, HiddenStatesMeta, decode, encode
from infra.interchange import exporting as interchange_export
from infra.interchange.exporting import Exported, export_states
from infra.manifest import Shard, StageRef

LAYER_IDS, HIDDEN_SIZE, VOCAB_SIZE = (2, 15, 27, 30), 8, 60
FAILED = HiddenRow("bad", "failed", "norms: too long", [1, 2], [False, True], None)


def row(number: int) -> HiddenRow:
    """Any bits at all, NaN and Inf too."""
    length = 5 + number
    generator = torch.Generator().manual_seed(number)
    bits = torch.randint(-(2**15), 2**15, (length, 4, HIDDEN_SIZE), dtype=torch.int16, generator=generator)
    ids = torch.randint(0, VOCAB_SIZE, (length,), generator=generator).tolist()
    mask = [place > 2 for place in range(length)]
    return HiddenRow(
        f"sample-{number}", "truncated" if number == 2 else "ok", None, ids, mask, bits.view(torch.bfloat16)
    )


ROWS = [[row(0), FAILED, row(1)], [row(2), row(3)]]
USABLE = [row(0), row(1), row(2), row(3)]


class Stage(NamedTuple):
    ref: StageRef
    uri: str


@pytest.fixture
def write_stage(tmp_path: Path) -> Callable[..., Stage]:
    def write(encoding: str = "bf16", rows: Any = ROWS, finish: bool = True) -> Stage:
        meta = HiddenStatesMeta(LAYER_IDS, HIDDEN_SIZE, "the-revision", encoding)
        stage = StageRef(str(tmp_path / "root"), "hidden_states", stage_content("hidden_states", 1, {}, {}, {}))
        shards = manifest.write_plan(stage, [Shard(f"{number:05d}") for number in range(len(rows))])
        for shard, content in zip(shards, rows, strict=True):
            failed = sum(each.status == "failed" for each in content)
            counts = {"ok": len(content) - failed, "failed": failed}
            manifest.commit_shard(
                stage, shard, encode(content, meta), rows=len(content), status_counts=counts, inputs={}
            )
        if finish:
            manifest.finish(stage, {})
        return Stage(stage, stage.uri)

    return write


def export(stage: Stage, folder: Path, draft_vocab_size: int = 10) -> Exported:
    return export_states(stage.uri, folder, VocabConfig(draft_vocab_size=draft_vocab_size), VOCAB_SIZE)


def bits(states: torch.Tensor) -> torch.Tensor:
    return states.contiguous().view(torch.int16)


@pytest.mark.parametrize("encoding", ["bf16", "bf16_split"])
def test_speculators_loads_every_bit(write_stage: Any, tmp_path: Path, encoding: str) -> None:
    written = export(write_stage(encoding), tmp_path / "out")
    assert (written.samples, written.left_out, written.target_layer_ids) == (4, 1, [2, 15, 27])
    data = ArrowDataset(max_len=100, datapath=tmp_path / "out", on_missing="raise")
    assert data.approx_lengths == [len(each.input_ids) for each in USABLE]
    for index, expected in enumerate(USABLE):
        found = data[index]
        assert expected.hidden_states is not None
        assert torch.equal(found["input_ids"], torch.tensor(expected.input_ids))
        assert torch.equal(found["loss_mask"].bool(), torch.tensor(expected.loss_mask))
        assert found["hidden_states"].dtype == torch.bfloat16
        assert torch.equal(bits(found["hidden_states"]), bits(expected.hidden_states[:, :-1].flatten(1)))
        assert torch.equal(bits(found["verifier_last_hidden_states"]), bits(expected.hidden_states[:, -1]))


def test_a_lossy_encoding_is_exported_as_it_decodes(write_stage: Any, tmp_path: Path) -> None:
    usable = HiddenRow("a", "ok", None, [1, 2, 3], [False, True, True], torch.randn(3, 4, HIDDEN_SIZE).bfloat16())
    stage = write_stage("fp8_e4m3", [[usable]])
    (record,) = manifest.read_records(stage.uri).values()
    (sample,) = decode(manifest.read_shard(stage.uri, record))
    export(stage, tmp_path / "out")
    found = ArrowDataset(max_len=100, datapath=tmp_path / "out", on_missing="raise")[0]
    assert torch.equal(found["hidden_states"], sample.aux_hidden_states)
    assert json.loads((tmp_path / "out/draftsmith.json").read_bytes())["encoding"] == "fp8_e4m3"


def test_its_trainer_finds_the_vocabulary(write_stage: Any, tmp_path: Path) -> None:
    from argparse import Namespace

    from speculators.train.cli import parse_vocab_mappings

    written = export(write_stage(), tmp_path / "out", draft_vocab_size=10)
    assert written.draft_vocab_size == 10
    arguments = Namespace(d2t_path=None, t2d_path=None, data_path=str(tmp_path / "out"), draft_vocab_size=10)
    d2t, t2d, size = parse_vocab_mappings(arguments)
    assert size == 10
    assert torch.equal(torch.arange(10) + d2t, t2d.nonzero().squeeze(1))
    trained = np.concatenate([np.array(each.input_ids)[np.array(each.loss_mask)] for each in USABLE])
    assert int(np.bincount(trained).argmax()) in t2d.nonzero().squeeze(1).tolist()


def test_nothing_but_the_format_is_in_the_folder(write_stage: Any, tmp_path: Path) -> None:
    export(write_stage(), tmp_path / "out")
    names = {path.relative_to(tmp_path / "out").as_posix() for path in (tmp_path / "out").rglob("*")}
    assert names == {
        "data-00000-of-00001.arrow",
        "dataset_info.json",
        "state.json",
        "draftsmith.json",
        "d2t-10.npy",
        "t2d-10.npy",
        "hidden_states",
        *(f"hidden_states/hs_{index}.safetensors" for index in range(4)),
    }
    assert [path.name for path in tmp_path.glob("out*")] == ["out"]


# --- interrupted


def test_an_export_cut_short_leaves_no_folder_and_goes_on(
    write_stage: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage, saved = write_stage(), []

    def save(tensors: Any, path: Path) -> None:
        if len(saved) == 2:
            path.write_bytes(b"half")
            raise KeyboardInterrupt
        saved.append(path.name)
        real(tensors, path)

    real = interchange_export.save_file
    monkeypatch.setattr(interchange_export, "save_file", save)
    with pytest.raises(KeyboardInterrupt):
        export(stage, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    saved.clear()
    assert export(stage, tmp_path / "out").samples == 4
    assert saved == [".hs_2.safetensors", ".hs_3.safetensors"]
    assert len(ArrowDataset(max_len=100, datapath=tmp_path / "out", on_missing="raise")) == 4
    assert not list((tmp_path / "out").rglob(".*"))


def test_what_is_left_of_another_stage_is_not_mixed_in(write_stage: Any, tmp_path: Path) -> None:
    stage = write_stage()
    left = tmp_path / "out.partial/hidden_states"
    left.mkdir(parents=True)
    (left / "hs_0.safetensors").write_bytes(b"")
    with pytest.raises(InputError, match=r"FOLDER: .*out\.partial is left of another export; delete it"):
        export(stage, tmp_path / "out")


def test_two_exports_into_one_folder(write_stage: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stage, inner = write_stage(), []
    real = interchange_export.save_file

    def save(tensors: Any, path: Path) -> None:
        if not inner:
            inner.append(True)
            with pytest.raises(InputError, match="another export is writing"):
                export(stage, tmp_path / "out")
        real(tensors, path)

    monkeypatch.setattr(interchange_export, "save_file", save)
    assert export(stage, tmp_path / "out").samples == 4
    assert inner


def test_a_full_disk_is_told_and_can_be_gone_on_from(
    write_stage: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(interchange_export, "save_file", full)
    with pytest.raises(InfrastructureError, match=r"No space left.*run the same command again"):
        export(write_stage(), tmp_path / "out")


# --- refused


def test_a_folder_in_use_is_refused_and_left_alone(write_stage: Any, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out/mine").write_text("x")
    with pytest.raises(InputError, match=r"FOLDER: .*/out is not empty; name a new folder"):
        export(write_stage(), tmp_path / "out")
    assert os.listdir(tmp_path / "out") == ["mine"]
    shutil.rmtree(tmp_path / "out")
    (tmp_path / "out").mkdir()
    assert export(write_stage(), tmp_path / "out").samples == 4


def test_a_disk_without_room_is_refused(write_stage: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stage = write_stage()
    usage = shutil.disk_usage(tmp_path)._replace(free=100)
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: usage)
    with pytest.raises(InputError, match=r"FOLDER: the states take .* GiB .*larger disk"):
        export(stage, tmp_path / "out")
    assert not list(tmp_path.glob("out*"))


def test_an_unfinished_stage_is_refused(write_stage: Any, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="is not complete; run the pipeline first"):
        export(write_stage(finish=False), tmp_path / "out")


def test_a_stage_of_failed_rows_is_refused(write_stage: Any, tmp_path: Path) -> None:
    with pytest.raises(StageFailed, match="no usable sample"):
        export(write_stage(rows=[[FAILED]]), tmp_path / "out")


def test_a_damaged_shard_is_named(write_stage: Any, tmp_path: Path) -> None:
    stage = write_stage()
    record = manifest.read_records(stage.uri)["00001"]
    path = Path(stage.uri, record.data_path)
    path.write_bytes(path.read_bytes()[:-1] + b"X")
    with pytest.raises(DamagedShard, match="00001"):
        export(stage, tmp_path / "out")
    assert not (tmp_path / "out").exists()
