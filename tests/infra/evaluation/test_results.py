from __future__ import annotations

import dataclasses
import io
import math

import pyarrow.parquet as pq
import pytest

from infra import schemas
from infra.errors import ServerError, StageFailed
from infra.evaluation.agreement import FAULT, IDENTICAL, NEAR_TIES, NOT_COMPARED
from infra.evaluation.config import Way
from infra.evaluation.groups import GROUPS
from infra.evaluation.measurement import EvaluateConfig
from infra.evaluation.results import (
    RESULTS,
    acceptance_parquet,
    acceptance_rows,
    agreements,
    request_notes,
    result_rows,
    results_parquet,
)
from infra.vllm_metrics import RequestFigures
from tests.fakes.measurements import DRAFT, FLAGS, counters, example_measurements, example_rows, measurement


def test_rows_combine_rounds_by_summing_counts() -> None:
    taken = [
        measurement("none", [1.0, 1.0], outputs=[[1, 2], [3, 4]]),
        measurement("none", [2.0, 2.0], round_index=1, outputs=[[1, 2], [3, 4]]),
        measurement("eagle3", [0.5, 0.5], counted=counters(10, 5, 1), outputs=[[1, 2], [3, 4]]),
        measurement("eagle3", [1.0, 1.0], round_index=1, counted=counters(30, 9, 3), outputs=[[1, 2], [3, 9]]),
    ]
    none, eagle3 = result_rows(taken, EvaluateConfig(), vllm_version="v", flags=FLAGS)
    assert (none["method"], none["draft"], none["num_speculative_tokens"]) == ("none", None, 0)
    assert (none["acceptance_length"], none["draft_acceptance_rate"]) == (None, None)
    assert (none["speedup"], none["speedup_low"], none["speedup_high"]) == (1.0, 1.0, 1.0)
    assert none["output_tokens_per_second"] == pytest.approx(8 / 6)
    assert (none["num_compared_outputs"], none["num_identical_outputs"]) == (2, 2)  # round 1 against round 0

    assert (eagle3["draft"], eagle3["flags"], eagle3["num_speculative_tokens"]) == (
        "0123456789abcdef",
        "--model verifier --y",
        3,
    )
    assert (eagle3["num_drafts"], eagle3["accepted_per_position"]) == (40, [14, 4])
    assert eagle3["acceptance_length"] == pytest.approx(1 + 18 / 40)
    assert eagle3["acceptance_rate_per_position"] == pytest.approx([0.35, 0.1])
    assert eagle3["draft_acceptance_rate"] == pytest.approx(18 / 80)
    assert eagle3["speedup_by_round"] == pytest.approx([2.0, 2.0])
    assert eagle3["output_tokens_per_second_by_round"] == pytest.approx([4.0, 2.0])
    assert eagle3["verdict"] == "faster"
    assert (eagle3["num_compared_outputs"], eagle3["num_identical_outputs"]) == (4, 3)
    assert eagle3["first_differences"] == [1]


def test_where_answers_part_the_gap_decides_whether_it_is_a_fault() -> None:
    taken = [measurement("none", [1.0] * 2, outputs=[[1, 2], [3, 4]])]
    taken.append(measurement("eagle3", [1.0] * 2, counted=counters(10, 5), outputs=[[1, 2], [3, 9]]))
    ((near,),) = [found.partings for found in agreements(taken) if found.partings]
    for gap, verdict, beyond in ((0.25, NEAR_TIES, 0), (3.0, FAULT, 1)):
        none, eagle3 = result_rows(taken, EvaluateConfig(), vllm_version="v", flags=FLAGS, scored={near: gap})
        assert (eagle3["first_difference_gaps_nats"], eagle3["num_beyond_ties"]) == ([gap], beyond)
        assert (none["losslessness"], eagle3["losslessness"]) == (NOT_COMPARED, verdict)
    unscored = result_rows(taken, EvaluateConfig(), vllm_version="v", flags=FLAGS)[1]
    assert math.isnan(unscored["first_difference_gaps_nats"][0])
    assert unscored["losslessness"] == NOT_COMPARED


def told(accepted: list[int], ttft_seconds: float) -> RequestFigures:
    return RequestFigures(ttft_seconds, 0.01, tuple(accepted), (2,) * len(accepted))


def test_every_figure_has_an_interval_from_what_vllm_says_of_each_request() -> None:
    each = [told([2, 0], 0.1), told([1, 1, 0], 0.2), told([0], 0.3)]
    base = [measurement("none", [1.0] * 3, round_index=i) for i in range(2)]
    ours = [
        measurement("eagle3", [0.5, 0.4, 0.6], round_index=i, counted=counters(6, 3, 1), figures=each)
        for i in range(2)
    ]
    none, eagle3 = result_rows([*base, *ours], EvaluateConfig(), vllm_version="v", flags=FLAGS)
    for name in ("acceptance_length", "draft_acceptance_rate", "output_tokens_per_second"):
        assert eagle3[f"{name}_low"] < eagle3[name] < eagle3[f"{name}_high"]
    for low, rate, high in zip(
        eagle3["acceptance_rate_per_position_low"],
        eagle3["acceptance_rate_per_position"],
        eagle3["acceptance_rate_per_position_high"],
        strict=True,
    ):
        assert low < rate < high
    assert eagle3["acceptance_rate_per_position_high"][1] < eagle3["acceptance_rate_per_position_high"][0]
    assert eagle3["ttft_seconds_median"] == pytest.approx(0.2)
    assert eagle3["ttft_seconds_p95"] == pytest.approx(0.3)
    assert eagle3["ttft_seconds_median_low"] <= 0.2 <= eagle3["ttft_seconds_median_high"]
    assert none["ttft_seconds_median"] is None
    assert request_notes([*base, *ours]) == []
    (domain,) = [row for row in acceptance_rows([*base, *ours], EvaluateConfig()) if row["group_by"] == "domain"]
    assert (domain["label"], domain["draft"], domain["num_drafts"]) == ("eagle3", DRAFT.key, 12)
    assert pq.read_table(io.BytesIO(acceptance_parquet([domain]))).schema.equals(GROUPS)


def test_without_figures_of_requests_the_report_is_told() -> None:
    rows = example_rows()
    assert {row["acceptance_length_low"] for row in rows} == {None}
    (note,) = request_notes(example_measurements())
    assert (note.kind, "ngram k=3" in note.text) == ("no_request_metrics", True)
    assert acceptance_rows(example_measurements(), EvaluateConfig()) == []


def test_each_draft_and_k_has_rows_of_its_own_and_shares_the_baseline() -> None:
    promoted = dataclasses.replace(DRAFT, label="eagle3 promoted", key="f" * 16, portable="drafts/f/export")
    every = [Way("none"), Way("eagle3", 3, DRAFT), Way("eagle3", 5, DRAFT), Way("eagle3", 3, promoted)]
    taken = [
        measurement(way, [1.0, 2.0], counted=counters(9, 3) if way.method == "eagle3" else counters(0))
        for way in every
    ]
    rows = result_rows(taken, EvaluateConfig(), vllm_version="v", flags={way.name: "f" for way in every})
    assert [(row["label"], row["num_speculative_tokens"], row["draft"]) for row in rows] == [
        ("none", 0, None),
        ("eagle3", 3, DRAFT.key),
        ("eagle3", 5, DRAFT.key),
        ("eagle3 promoted", 3, "f" * 16),
    ]
    assert [row["speedup"] for row in rows] == [1.0] * 4


def test_greedy_and_sampled_rows_are_each_held_against_their_own_baseline() -> None:
    taken = example_measurements() + example_measurements(temperature=0.7)
    rows = result_rows(taken, EvaluateConfig(), vllm_version="v", flags=FLAGS)
    assert len(rows) == 2 * len(example_rows())
    assert {row["losslessness"] for row in rows if row["temperature"] == 0.7} == {NOT_COMPARED}
    assert {row["losslessness"] for row in rows if row["temperature"] == 0.0} == {IDENTICAL}


def test_a_length_that_its_rates_do_not_give_is_never_written() -> None:
    row = example_rows()[2]
    with pytest.raises(ServerError, match="not 1"):
        results_parquet([row | {"acceptance_length": row["acceptance_length"] + 1e-6}])


def test_sampled_outputs_are_not_compared() -> None:
    rows = example_rows(EvaluateConfig(temperature=0.7))
    assert {row["num_compared_outputs"] for row in rows} == {0}
    assert {row["temperature"] for row in rows} == {0.7}


def test_a_method_without_its_baseline_is_refused() -> None:
    with pytest.raises(StageFailed, match="rounds"):
        result_rows([measurement("ngram", [1.0])], EvaluateConfig(), vllm_version="v", flags=FLAGS)


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
