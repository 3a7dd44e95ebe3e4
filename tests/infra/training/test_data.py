"""The order of the samples is a pure function of seed and epoch, the same for any number of ranks."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from infra import storage
from infra.errors import DamagedShard, StageFailed
from infra.hidden_states import HiddenRow, HiddenStatesMeta
from infra.state_encodings import ENCODINGS
from infra.training.config import TrainConfig
from infra.training.data import (
    IndexedSample,
    Schedule,
    ShardStore,
    StepLoader,
    build_index,
    index_from_json,
    index_to_json,
)
from tests.fakes.training_run import HIDDEN_SIZE, LAYER_IDS, random_rows, write_stage

CONFIG = TrainConfig(total_seq_len=64, global_batch=2, epochs=2.0, validation_share=0.2)
META = HiddenStatesMeta(LAYER_IDS, HIDDEN_SIZE, "revision")


@pytest.fixture
def store(tmp_path: Path) -> ShardStore:
    failed = HiddenRow("failed", "failed", "no answer", [], [], None)
    untrained = random_rows(1, first=99)[0]
    untrained = HiddenRow(
        "untrained", "ok", None, untrained.input_ids, [False] * len(untrained.input_ids), untrained.hidden_states
    )
    rows = [[failed, *random_rows(15)], [*random_rows(15, first=15), untrained], random_rows(15, first=30)]
    return ShardStore(write_stage(str(tmp_path), rows, META), 2)


def test_failed_and_untrained_samples_are_left_out(store: ShardStore) -> None:
    index = build_index(store, CONFIG)
    assert len(index) == 45
    assert (0, 0) not in {(sample.shard, sample.row) for sample in index}
    assert 0 < sum(sample.validation for sample in index) < 25
    assert index_from_json(index_to_json(index)) == index


def test_an_epoch_has_every_sample_once_in_packs_that_fit(store: ShardStore) -> None:
    index = build_index(store, CONFIG)
    schedule = Schedule(index, CONFIG.model_copy(update={"global_batch": 1}))
    epoch = []
    step = 0
    while schedule.epoch_of_step(step) == 0:
        epoch.append(schedule.packs_of_step(step)[0])
        step += 1
    seen = Counter(sample for pack in epoch for sample in pack)
    assert seen == Counter(sample for sample in index if not sample.validation)
    assert all(sum(sample.num_tokens for sample in pack) <= 64 for pack in epoch)


def test_the_order_depends_on_seed_and_epoch_alone(store: ShardStore) -> None:
    index = build_index(store, CONFIG)
    forward, backward = Schedule(index, CONFIG), Schedule(index, CONFIG)
    steps = list(range(3 * forward.num_steps))
    ahead = {step: forward.packs_of_step(step) for step in steps}
    assert ahead == {step: backward.packs_of_step(step) for step in reversed(steps)}
    other = Schedule(index, CONFIG.model_copy(update={"seed": 1}))
    assert ahead[0] != other.packs_of_step(0)


@pytest.mark.parametrize("window", [1, 16])
def test_ranks_share_one_step(store: ShardStore, window: int) -> None:
    config = CONFIG.model_copy(update={"state_noise": 0.2, "shuffle_window_shards": window})
    schedule = Schedule(build_index(store, config), config)
    whole = StepLoader(store, schedule, config, 0, 1)
    parts = [StepLoader(store, schedule, config, rank, 2) for rank in range(2)]
    for step in range(schedule.num_steps):
        expected = whole.load(step)
        found = [part.load(step) for part in parts]
        assert {batch.num_loss_tokens for batch in found} == {expected.num_loss_tokens}
        assert expected.num_loss_tokens == sum(pack.num_loss_tokens for pack in expected.packs)
        for pack, (part,) in zip(expected.packs, [batch.packs for batch in found], strict=True):
            assert torch.equal(pack.hidden_states, part.hidden_states)
            assert torch.equal(pack.input_ids, part.input_ids)


def test_a_row_holds_one_tokens_state_the_next_token_and_the_view_of_the_one_after(tmp_path: Path) -> None:
    row = random_rows(1)[0]
    assert row.hidden_states is not None
    store = ShardStore(write_stage(str(tmp_path), [[row]], META), 1)
    config = TrainConfig(total_seq_len=16, validation_share=0.0)
    index = build_index(store, config)
    pack = StepLoader(store, Schedule(index, config), config, 0, 1).load(0).packs[0]
    cut = min(16, len(row.input_ids) - 1)
    assert index == [IndexedSample(0, 0, cut, sum(row.loss_mask[1 : cut + 1]), False)]
    assert torch.equal(pack.hidden_states, row.hidden_states[:cut, :-1].flatten(1))
    assert pack.input_ids.tolist() == list(row.input_ids[1 : cut + 1])
    assert torch.equal(pack.verifier_last_hidden_states, row.hidden_states[1 : cut + 1, -1])
    assert pack.loss_mask.tolist() == list(row.loss_mask[1 : cut + 1])
    assert pack.position_ids.tolist() == list(range(1, cut + 1))


def test_all_samples_of_a_prompt_fall_on_one_side(tmp_path: Path) -> None:
    rows = []
    for row in random_rows(20):
        prompt = row.loss_mask.index(True)
        for tail in range(3):
            ids = [*row.input_ids[:prompt], *([tail] * (len(row.input_ids) - prompt))]
            rows.append(HiddenRow(f"{row.sample_id}#{tail}", "ok", None, ids, row.loss_mask, row.hidden_states))
    store = ShardStore(write_stage(str(tmp_path), [rows], META), 1)
    index = build_index(store, TrainConfig(validation_share=0.5))
    sides = [[sample.validation for sample in index[place : place + 3]] for place in range(0, 60, 3)]
    assert all(len(set(side)) == 1 for side in sides)
    assert len({side[0] for side in sides}) == 2


def test_every_encoding_is_read(tmp_path: Path) -> None:
    config = CONFIG.model_copy(update={"total_seq_len": 256, "global_batch": 1, "validation_share": 0.0})
    packs = {}
    for encoding in ENCODINGS:
        meta = replace(META, encoding=encoding)
        store = ShardStore(write_stage(str(tmp_path / encoding), [random_rows(5)], meta), 1)
        packs[encoding] = (
            StepLoader(store, Schedule(build_index(store, config), config), config, 0, 1).load(0).packs[0]
        )
    raw, split, fp8 = packs["bf16"], packs["bf16_split"], packs["fp8_e4m3"]
    for name in ("hidden_states", "input_ids", "loss_mask", "position_ids", "verifier_last_hidden_states"):
        assert torch.equal(getattr(raw, name), getattr(split, name))
        torch.testing.assert_close(getattr(fp8, name), getattr(raw, name), rtol=2**-4, atol=2**-10)


def test_a_shard_that_cannot_be_decoded_is_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = ShardStore(write_stage(str(tmp_path), [random_rows(4)], META), 1)
    index = build_index(store, CONFIG)
    monkeypatch.setattr(HiddenStatesMeta, "bytes_per_token", lambda meta: {"aux_hidden_states": 1})
    with pytest.raises(DamagedShard, match=r"shard 00000: row 0: \d+ bytes of aux_hidden_states"):
        store.sample(index[0].shard, index[0].row)


@pytest.mark.parametrize("world", [1, 4])
def test_one_sample_feeds_any_number_of_ranks(tmp_path: Path, world: int) -> None:
    config = TrainConfig(total_seq_len=64, global_batch=4, num_steps=3, validation_share=0.0)
    store = ShardStore(write_stage(str(tmp_path), [random_rows(1)], META), 1)
    index = build_index(store, config)
    for rank in range(world):
        loader = StepLoader(store, Schedule(index, config), config, rank, world)
        for step in range(3):
            batch = loader.load(step)
            assert len(batch.packs) == 4 // world
            assert batch.num_loss_tokens == 4 * index[0].num_loss_tokens
        assert [len(loader.jobs(step)) for step in range(3)] == [4 // world] * 3


def test_the_index_reads_no_states(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    width = 2048
    rows = [
        replace(row, hidden_states=torch.zeros(len(row.input_ids), len(LAYER_IDS), width).bfloat16())
        for row in random_rows(10)
    ]
    meta = HiddenStatesMeta(LAYER_IDS, width, "revision")
    store = ShardStore(write_stage(str(tmp_path), [rows], meta), 1)
    read = []
    get_range = storage.get_range

    def counted(uri: str, start: int, length: int) -> bytes:
        read.append(length)
        return get_range(uri, start, length)

    monkeypatch.setattr(storage, "get_range", counted)
    assert len(build_index(store, CONFIG)) == 10
    assert 0 < sum(read) < store.records[0].size_bytes / 2
    assert len(read) < 25


def test_a_shard_that_cannot_be_read_is_damaged(store: ShardStore) -> None:
    (shard,) = Path(store.stage_uri, "shards").glob("00001-*.parquet")
    shard.write_bytes(shard.read_bytes()[:-100])
    with pytest.raises(DamagedShard, match="shard 00001"):
        build_index(store, CONFIG)
    shard.unlink()
    with pytest.raises(DamagedShard, match=r"shard 00001.*is not there"):
        build_index(store, CONFIG)


def test_an_unfinished_stage_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StageFailed, match="manifest"):
        ShardStore(str(tmp_path / "nothing"), 1)
