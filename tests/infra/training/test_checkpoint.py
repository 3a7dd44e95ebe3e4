"""Only a checkpoint whose every file matches its commit counts; damage costs the steps since the one before."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from torch import nn

from infra import storage
from infra.errors import StageFailed
from infra.training import checkpoint, checkpoint_files
from infra.training.checkpoint_files import COMMIT_FILE, CheckpointRef
from infra.training.config import TrainConfig
from infra.training.optimizer import DraftOptimizer


def make(seed: int = 0, kind: str = "muon") -> tuple[nn.Module, DraftOptimizer]:
    torch.manual_seed(seed)
    model = nn.Linear(3, 2)
    optimizer = DraftOptimizer(TrainConfig(optimizer=kind), dict(model.named_parameters()))
    model(torch.randn(4, 3)).sum().backward()
    optimizer.step(1e-3)
    return model, optimizer


def save(
    uri: str, step: int, lease_epoch: int, seed: int = 0, kind: str = "muon", best: CheckpointRef | None = None
) -> CheckpointRef:
    model, optimizer = make(seed, kind)
    ref = CheckpointRef(step, lease_epoch)
    copies = checkpoint.HostCopies()
    weights = copies.take(dict(model.named_parameters()), keep=True)
    optimizer_state = copies.take(optimizer.tensors(), keep=True)
    state = {"sums": [], "kept_best": None if best is None else asdict(best)}
    checkpoint.write(uri, ref, weights, optimizer_state, state, "line\n", [checkpoint.rank_state()])
    return ref


def test_the_newest_step_of_all_leases_is_read(tmp_path: Path) -> None:
    uri = str(tmp_path)
    save(uri, 100, 1)
    save(uri, 200, 1)
    save(uri, 150, 2)
    found = checkpoint.read_newest(uri, "")
    assert found is not None
    assert found.ref == CheckpointRef(200, 1)
    assert found.metrics == "line\n"
    assert found.state["step"] == 200


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", "state.json", "metrics.jsonl",
                                  "rank-00000.json", COMMIT_FILE])  # fmt: skip
@pytest.mark.parametrize("damage", ["truncated", "absent", "flipped"])
def test_a_torn_checkpoint_is_passed_over(tmp_path: Path, name: str, damage: str) -> None:
    uri = str(tmp_path)
    save(uri, 100, 1)
    newest = save(uri, 200, 2)
    file = Path(newest.uri(uri), name)
    data = file.read_bytes()
    if damage == "absent":
        file.unlink()
    elif damage == "truncated":
        file.write_bytes(data[: len(data) // 2])
    else:
        middle = len(data) // 2
        file.write_bytes(data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :])
    found = checkpoint.read_newest(uri, "")
    assert found is not None
    # A flipped bit of the commit's own text may leave it valid: then every file matches what it says.
    if not (name == COMMIT_FILE and damage == "flipped"):
        assert found.ref == CheckpointRef(100, 1)
        assert checkpoint_files.damage(uri, newest)
    assert checkpoint_files.damage(uri, CheckpointRef(100, 1)) is None


def test_the_older_are_deleted_only_after_the_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    uri = str(tmp_path)
    for step in (100, 200, 300):
        save(uri, step, 1)
    assert [ref.step for ref in checkpoint_files.find(uri)] == [300, 200]
    assert not Path(CheckpointRef(100, 1).uri(uri), "model.safetensors").exists()
    put = storage.put

    def fail_at_commit(target: str, data: bytes) -> None:
        if target.endswith(COMMIT_FILE):
            raise OSError("the node dies here")
        put(target, data)

    monkeypatch.setattr(storage, "put", fail_at_commit)
    with pytest.raises(OSError, match="dies here"):
        save(uri, 400, 1)
    assert [ref.step for ref in checkpoint_files.find(uri)] == [300, 200]


def steps(uri: str) -> list[int]:
    return [ref.step for ref in checkpoint_files.find(uri)]


def test_the_best_stays_until_the_newest_two_name_another(tmp_path: Path) -> None:
    uri, first, second = str(tmp_path), CheckpointRef(100, 1), CheckpointRef(400, 1)
    for step in (100, 200, 300):
        save(uri, step, 1, best=first)
    assert steps(uri) == [300, 200, 100]
    save(uri, 400, 1, best=second)
    assert steps(uri) == [400, 300, 100], "should 400 be damaged, 300 goes on, and it needs 100"
    save(uri, 500, 2, best=second)
    assert steps(uri) == [500, 400]


def test_a_damaged_newest_one_falls_back_with_the_best_that_was_then(tmp_path: Path) -> None:
    uri, first = str(tmp_path), CheckpointRef(100, 1)
    for step in (100, 200, 300):
        save(uri, step, 1, seed=step, best=first)
    newest = save(uri, 400, 1, best=CheckpointRef(400, 1))
    found = checkpoint.read_newest(uri, "")
    assert found is not None
    assert checkpoint.read_best(uri, found).ref == newest
    Path(newest.uri(uri), "model.safetensors").write_bytes(b"torn")
    found = checkpoint.read_newest(uri, "")
    assert found is not None
    assert found.ref.step == 300
    best = checkpoint.read_best(uri, found)
    assert best.ref == first
    assert torch.equal(best.weights["weight"], make(100)[0].weight)


@pytest.mark.parametrize("damage", ["model.safetensors", COMMIT_FILE])
def test_without_its_best_a_checkpoint_does_not_count(tmp_path: Path, damage: str) -> None:
    uri, first = str(tmp_path), CheckpointRef(100, 1)
    for step in (100, 200, 300):
        save(uri, step, 1, best=first)
    Path(first.uri(uri), damage).unlink()
    assert checkpoint.read_newest(uri, "") is None


def test_of_what_is_deleted_the_commit_goes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    uri = str(tmp_path)
    for step in (100, 200):
        save(uri, step, 1)
    deleted: list[str] = []
    delete = storage.delete
    monkeypatch.setattr(storage, "delete", lambda target: deleted.append(target) or delete(target))
    save(uri, 300, 1)
    of_oldest = [Path(target).name for target in deleted if "step-00000100" in target]
    assert of_oldest[0] == COMMIT_FILE
    assert len(of_oldest) == 6


def test_only_what_this_or_an_earlier_lease_made_from_other_inputs_is_taken_back(tmp_path: Path) -> None:
    uri = str(tmp_path)
    for step, epoch in ((100, 1), (200, 2), (300, 3)):
        save(uri, step, epoch)
    checkpoint_files.withdraw_foreign(uri, "", 2)
    assert len(checkpoint_files.find(uri)) == 2
    checkpoint_files.withdraw_foreign(uri, "other inputs", 2)
    assert checkpoint_files.find(uri) == [CheckpointRef(300, 3)]


def test_a_zombie_of_an_older_lease_deletes_nothing_of_a_newer_one(tmp_path: Path) -> None:
    uri = str(tmp_path)
    for step in (100, 200):
        save(uri, step, 2)
    for step in (100, 200, 300):
        save(uri, step, 1)
    assert {ref for ref in checkpoint_files.find(uri) if ref.lease_epoch == 2} == {
        CheckpointRef(100, 2),
        CheckpointRef(200, 2),
    }


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_weights_optimizer_and_random_state_come_back(tmp_path: Path, kind: str) -> None:
    uri = str(tmp_path)
    save(uri, 100, 1, seed=0, kind=kind)
    found = checkpoint.read_newest(uri, "")
    assert found is not None
    expected_model, expected_optimizer = make(seed=0, kind=kind)
    expected_draw = torch.rand(3)
    model, optimizer = make(seed=5, kind=kind)
    checkpoint.restore(found, dict(model.named_parameters()), optimizer, 0)
    assert torch.equal(torch.rand(3), expected_draw)
    for mine, theirs in zip(model.parameters(), expected_model.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    mine_held, theirs_held = optimizer.tensors(), expected_optimizer.tensors()
    assert set(mine_held) == set(theirs_held)
    assert len(mine_held) == (6 if kind == "adamw" else 4)
    assert all(torch.equal(mine_held[name], theirs_held[name]) for name in mine_held)


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    uri = str(tmp_path)
    save(uri, 100, 1)
    found = checkpoint.read_newest(uri, "")
    assert found is not None
    other = dict(nn.Linear(4, 2).named_parameters())
    with pytest.raises(StageFailed, match="other weights"):
        checkpoint.restore(found, other, DraftOptimizer(TrainConfig(), other), 0)


def test_nothing_is_pickled(tmp_path: Path) -> None:
    ref = save(str(tmp_path), 100, 1)
    for file in Path(ref.uri(str(tmp_path))).iterdir():
        data = file.read_bytes()
        if file.suffix == ".json":
            json.loads(data)
        elif file.suffix == ".safetensors":
            json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        else:
            assert file.suffix == ".jsonl"
