"""One run on an MLflow server, gone on with at each resume. The package is imported only where it is asked for."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from infra.tracking.tracker import Line, scalars

RUN_TAG = "draftsmith.run"


class MlflowTracker:
    """A run in an experiment; the server names runs itself, so this one is found again by a tag.

    Args:
        tracking_uri: the server, or a local store.
        run: its name, and the tag's value.
        config: hyper-parameters to show.
    """

    def __init__(self, tracking_uri: str, experiment: str, run: str, config: Mapping[str, Any]) -> None:
        self._uri, self._experiment, self._name, self._config = tracking_uri, experiment, run, config
        self._client: Any = None
        self._run_id = ""
        self._logged: set[tuple[str, int]] = set()  # kind and step

    def begin(self, lines: Sequence[Line]) -> None:
        if self._client is None:
            import mlflow

            client = mlflow.MlflowClient(tracking_uri=self._uri)
            self._run_id = self._find_or_create(client)
            self._logged = {
                (kind, metric.step)
                for kind in ("train", "validation")
                for metric in client.get_metric_history(self._run_id, f"{kind}/loss")
            }
            client.update_run(self._run_id, status="RUNNING")
            self._client = client
        for line in lines:
            self.log(line)

    def log(self, line: Line) -> None:
        if (line["kind"], line["step"]) in self._logged:
            return
        from mlflow.entities import Metric

        now_ms = int(time.time() * 1000)
        metrics = [Metric(name, value, now_ms, line["step"]) for name, value in scalars(line).items()]
        self._client.log_batch(self._run_id, metrics=metrics)
        self._logged.add((line["kind"], line["step"]))

    def close(self, done: bool) -> None:
        if self._client is not None:
            self._client.set_terminated(self._run_id, status="FINISHED" if done else "KILLED")

    def _find_or_create(self, client: Any) -> str:
        experiment = client.get_experiment_by_name(self._experiment)
        if experiment is None:
            experiment_id = client.create_experiment(self._experiment)
        else:
            experiment_id = experiment.experiment_id
            found = client.search_runs([experiment_id], f"tags.`{RUN_TAG}` = '{self._name}'", max_results=1)
            if found:
                return str(found[0].info.run_id)
        created = client.create_run(experiment_id, tags={RUN_TAG: self._name}, run_name=self._name)
        for name, value in self._config.items():
            client.log_param(created.info.run_id, name, value)
        return str(created.info.run_id)
