from __future__ import annotations

import io

import pyarrow.parquet as pq
import pytest

from infra import schemas
from infra.errors import StageFailed
from infra.evaluation import EvaluateConfig
from infra.evaluation_results import (
    RESULTS,
    measurements_from_json,
    measurements_json,
    portable_flags,
    result_rows,
    results_parquet,
)
from tests.fakes.measurements import counters, example_rows, measurement

FLAGS = {"none": "a", "ngram": "b", "eagle3": "c"}


def test_rows_combine_rounds_by_summing_counts() -> None:
    taken = [
        measurement("none", [1.0, 1.0], outputs=[[1, 2], [3, 4]]),
        measurement("none", [2.0, 2.0], round_index=1, outputs=[[1, 2], [3, 4]]),
        measurement("eagle3", [0.5, 0.5], counted=counters(10, 5, 1), outputs=[[1, 2], [3, 4]]),
        measurement("eagle3", [1.0, 1.0], round_index=1, counted=counters(30, 9, 3), outputs=[[1, 2], [3, 9]]),
    ]
    none, eagle3 = result_rows(taken, EvaluateConfig(), draft_key="k", vllm_version="v", flags=FLAGS)
    assert (none["method"], none["draft"], none["num_speculative_tokens"]) == ("none", None, 0)
    assert (none["acceptance_length"], none["draft_acceptance_rate"]) == (None, None)
    assert (none["speedup"], none["speedup_low"], none["speedup_high"]) == (1.0, 1.0, 1.0)
    assert none["output_tokens_per_second"] == pytest.approx(8 / 6)
    assert (none["num_compared_outputs"], none["num_identical_outputs"]) == (2, 2)  # round 1 against round 0

    assert (eagle3["draft"], eagle3["flags"], eagle3["num_speculative_tokens"]) == ("k", "c", 3)
    assert (eagle3["num_drafts"], eagle3["accepted_per_position"]) == (40, [14, 4])
    assert eagle3["acceptance_length"] == pytest.approx(1 + 18 / 40)
    assert eagle3["acceptance_rate_per_position"] == pytest.approx([0.35, 0.1])
    assert eagle3["draft_acceptance_rate"] == pytest.approx(18 / 80)
    assert eagle3["speedup_by_round"] == pytest.approx([2.0, 2.0])
    assert eagle3["output_tokens_per_second_by_round"] == pytest.approx([4.0, 2.0])
    assert eagle3["verdict"] == "faster"
    assert (eagle3["num_compared_outputs"], eagle3["num_identical_outputs"]) == (4, 3)
    assert eagle3["first_differences"] == [1]


def test_sampled_outputs_are_not_compared() -> None:
    rows = example_rows(EvaluateConfig(temperature=0.7))
    assert {row["num_compared_outputs"] for row in rows} == {0}
    assert {row["temperature"] for row in rows} == {0.7}


def test_a_method_without_its_baseline_is_refused() -> None:
    with pytest.raises(StageFailed, match="rounds"):
        result_rows([measurement("ngram", [1.0])], EvaluateConfig(), draft_key=None, vllm_version="v", flags=FLAGS)


def test_parquet_has_the_contracts_columns_first_and_keeps_the_figures() -> None:
    rows = example_rows()
    table = pq.read_table(io.BytesIO(results_parquet(rows)))
    assert table.schema.equals(RESULTS)
    assert table.schema.names[: len(schemas.EVALUATIONS)] == schemas.EVALUATIONS.names
    assert table.to_pylist() == rows
    for row in rows:
        if row["method"] == "none":
            assert row["acceptance_length"] is None
        else:
            assert abs(row["acceptance_length"] - 1 - sum(row["acceptance_rate_per_position"])) < 1e-9


def test_parquet_of_none_alone_still_has_types() -> None:
    rows = [row for row in example_rows() if row["method"] == "none"]
    assert pq.read_table(io.BytesIO(results_parquet(rows))).schema.equals(RESULTS)


def test_parquet_refuses_rows_that_do_not_fit() -> None:
    row = example_rows()[0]
    with pytest.raises(ValueError, match="speed"):
        results_parquet([row | {"speed": 1.0}])
    with pytest.raises(ValueError, match="vllm_version has a null"):
        results_parquet([row | {"vllm_version": None}])


def test_measurements_survive_json() -> None:
    taken = [
        measurement("none", [1.0, 0.1]),
        measurement("eagle3", [1.0, 2.0], concurrency=8, counted=counters(3, 2, 1)),
    ]
    assert measurements_from_json(measurements_json(taken)) == taken


def test_flags_lose_their_local_paths() -> None:
    arguments = ["--model", "/cache/v/rev", "--speculative-config", '{"model": "/cache/v/rev/draft", "k": 3}']
    names = {"/cache/v/rev": "SmolLM2", "/cache/v/rev/draft": "draft:0123"}
    assert portable_flags(arguments, names) == (
        '--model SmolLM2 --speculative-config \'{"model": "draft:0123", "k": 3}\''
    )
