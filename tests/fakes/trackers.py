"""The parts of wandb and mlflow that are used here, with what their servers would keep."""

from __future__ import annotations

import itertools
import sys
import types
from dataclasses import dataclass, field
from typing import Any

import pytest


class FakeWandb:
    """Weights & Biases: runs by id, of which a step that lies before the last is refused."""

    def __init__(self) -> None:
        self.inits: list[dict[str, Any]] = []
        self.rows: dict[str, dict[int, dict[str, float]]] = {}
        self.exit_codes: list[int] = []
        self.broken = False

    def install(self, monkeypatch: pytest.MonkeyPatch) -> FakeWandb:
        module = types.ModuleType("wandb")
        module.__dict__.update(init=self._init, Settings=dict)
        monkeypatch.setitem(sys.modules, "wandb", module)
        return self

    def _init(self, **arguments: Any) -> FakeWandbRun:
        if self.broken:
            raise RuntimeError("no such entity")
        self.inits.append(arguments)
        return FakeWandbRun(self, self.rows.setdefault(arguments["id"], {}))


class FakeWandbRun:
    def __init__(self, owner: FakeWandb, rows: dict[int, dict[str, float]]) -> None:
        self._owner, self._rows = owner, rows
        self.step = max(rows) + 1 if rows else 0

    def log(self, values: dict[str, float], step: int) -> None:
        assert step >= self.step, "it would drop this with a warning"
        self.step = step
        row = self._rows.setdefault(step, {})
        assert not set(row) & set(values), "a curve would hold this step twice"
        row.update(values)

    def finish(self, exit_code: int) -> None:
        self._owner.exit_codes.append(exit_code)


@dataclass
class FakeMlflowRun:
    info: Any
    tags: dict[str, str]
    status: list[str] = field(default_factory=list)
    params: dict[str, Any] = field(default_factory=dict)
    metrics: list[Any] = field(default_factory=list)


class FakeMlflow:
    """MLflow: experiments by name and runs by an id that the server chooses."""

    def __init__(self) -> None:
        self.uris: list[str] = []
        self.experiments: dict[str, str] = {}
        self.runs: dict[str, FakeMlflowRun] = {}
        self._ids = itertools.count(1)

    def install(self, monkeypatch: pytest.MonkeyPatch) -> FakeMlflow:
        module, entities = types.ModuleType("mlflow"), types.ModuleType("mlflow.entities")

        def client(tracking_uri: str) -> FakeMlflow:
            self.uris.append(tracking_uri)
            return self

        module.__dict__.update(MlflowClient=client, entities=entities)
        entities.__dict__["Metric"] = lambda key, value, timestamp, step: types.SimpleNamespace(
            key=key, value=value, timestamp=timestamp, step=step
        )
        monkeypatch.setitem(sys.modules, "mlflow", module)
        monkeypatch.setitem(sys.modules, "mlflow.entities", entities)
        return self

    def get_experiment_by_name(self, name: str) -> Any:
        found = self.experiments.get(name)
        return None if found is None else types.SimpleNamespace(experiment_id=found)

    def create_experiment(self, name: str) -> str:
        return self.experiments.setdefault(name, f"experiment-{next(self._ids)}")

    def search_runs(self, experiment_ids: list[str], filter_string: str, max_results: int) -> list[FakeMlflowRun]:
        assert set(experiment_ids) <= set(self.experiments.values())
        matching = [
            run
            for run in self.runs.values()
            if any(filter_string == f"tags.`{tag}` = '{value}'" for tag, value in run.tags.items())
        ]
        return matching[:max_results]

    def create_run(self, experiment_id: str, tags: dict[str, str], run_name: str) -> FakeMlflowRun:
        run_id = f"run-{next(self._ids)}"
        self.runs[run_id] = FakeMlflowRun(types.SimpleNamespace(run_id=run_id, run_name=run_name), tags)
        return self.runs[run_id]

    def log_param(self, run_id: str, key: str, value: Any) -> None:
        self.runs[run_id].params[key] = value

    def update_run(self, run_id: str, status: str) -> None:
        self.runs[run_id].status.append(status)

    def set_terminated(self, run_id: str, status: str) -> None:
        self.runs[run_id].status.append(status)

    def get_metric_history(self, run_id: str, key: str) -> list[Any]:
        return [metric for metric in self.runs[run_id].metrics if metric.key == key]

    def log_batch(self, run_id: str, metrics: list[Any]) -> None:
        self.runs[run_id].metrics += metrics
