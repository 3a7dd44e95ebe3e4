"""Counters out of a /metrics page with two engines and a name that holds braces."""

from __future__ import annotations

import json
import re
import textwrap
from pathlib import Path
from typing import Any

import pytest

from infra.errors import ServerError
from infra.evaluation.comparison import acceptance
from infra.vllm_metrics import (
    EngineWork,
    RequestFigures,
    ServerProgress,
    SpeculationCounters,
    parse_counters,
    parse_engines,
    parse_progress,
    request_figures,
)

# Of vLLM 0.32: the page after each of two windows of four requests (eagle3 on one engine, ngram on two), and what it
# said of the second window's requests.
RECORDED = Path(__file__).parents[1] / "recorded"
FIRST, SECOND = [(RECORDED / f"one-engine-{number}.metrics").read_text() for number in (1, 2)]

METRICS = textwrap.dedent(
    """\
    # HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.
    # TYPE vllm:spec_decode_num_drafts_total counter
    vllm:spec_decode_num_drafts_total{engine="0",model_name="a{b}"} 10.0
    vllm:spec_decode_num_drafts_total{engine="1",model_name="a{b}"} 5.0
    vllm:spec_decode_num_drafts_created{engine="0",model_name="a{b}"} 1.764e+09
    vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="a{b}"} 20.0
    vllm:spec_decode_num_draft_tokens_total{engine="1",model_name="a{b}"} 1e+01
    vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="a{b}"} 7.0
    vllm:spec_decode_num_accepted_tokens_total{engine="1",model_name="a{b}"} 2.0
    vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="a{b}",position="1"} 2.0
    vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="a{b}",position="0"} 5.0
    vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="1",model_name="a{b}",position="0"} 2.0
    vllm:spec_decode_num_accepted_tokens_per_pos_created{engine="0",model_name="a{b}",position="0"} 1.764e+09
    vllm:generation_tokens_total{engine="0",model_name="a{b}"} 100.0
    vllm:generation_tokens_total{engine="1",model_name="a{b}"} 11.0
    vllm:generation_tokens_created{engine="0",model_name="a{b}"} 1.764e+09
    vllm:prompt_tokens_total{engine="0",model_name="a{b}"} 40.0
    vllm:num_requests_running{engine="0",model_name="a{b}"} 3.0
    vllm:num_requests_running{engine="1",model_name="a{b}"} 1.0
    vllm:num_requests_waiting{engine="0",model_name="a{b}"} 2.0
    vllm:num_requests_waiting_by_reason{engine="0",model_name="a{b}",reason="capacity"} 2.0
    vllm:kv_cache_usage_perc{engine="0",model_name="a{b}"} 0.25
    vllm:kv_cache_usage_perc{engine="1",model_name="a{b}"} 0.5
    """
)


def test_counters_sum_engines_and_ignore_time_stamps() -> None:
    counted = parse_counters(METRICS)
    assert counted == SpeculationCounters(
        num_drafts=15, num_draft_tokens=30, num_accepted_tokens=9, accepted_per_position=(7, 2)
    )
    assert parse_counters("") == SpeculationCounters()
    assert counted - SpeculationCounters(10, 20, 4, (4,)) == SpeculationCounters(5, 10, 5, (3, 2))
    with pytest.raises(ServerError, match="restarted"):
        SpeculationCounters() - counted


def test_a_recorded_window_is_the_difference_of_two_pages_of_a_running_server() -> None:
    window = parse_counters(SECOND) - parse_counters(FIRST)
    assert window == SpeculationCounters(93, 279, 55, (38, 10, 7))
    assert window == parse_counters(FIRST) - SpeculationCounters(), "both windows asked for the same"
    assert "_created" in FIRST, "the time stamps that are not counted"


def recorded_requests(name: str) -> list[RequestFigures]:
    told = [request_figures(each) for each in json.loads((RECORDED / f"{name}-requests.json").read_text())]
    return [each for each in told if each is not None]


def test_a_recorded_window_of_two_engines_is_the_sum_of_theirs() -> None:
    before, after = (parse_counters((RECORDED / f"two-engines-{n}.metrics").read_text()) for n in (1, 2))
    assert after.engines["1"] == SpeculationCounters(24, 72, 20, (16, 3, 1))
    window = after - before
    assert window == SpeculationCounters(20, 60, 15, (11, 3, 1))
    found = recorded_requests("two-engines")
    assert sum(len(each.accepted) for each in found) == window.num_drafts
    assert sum(sum(each.accepted) for each in found) == window.num_accepted_tokens


def test_what_recorded_requests_say_of_themselves_sums_to_the_counters() -> None:
    found = recorded_requests("one-engine")
    assert sum(len(each.accepted) for each in found) == 93
    assert sum(sum(each.drafted) for each in found) == 279
    assert sum(sum(each.accepted) for each in found) == 55
    assert [1 + len(each.accepted) + sum(each.accepted) for each in found] == [48, 27, 48, 29], (
        "tokens of the answers"
    )
    assert found[0].ttft_seconds == pytest.approx(0.748898, abs=1e-6), "the wait in the queue counts"
    assert found[0].tpot_seconds == pytest.approx(0.118832, abs=1e-6)


def test_a_server_that_began_anew_is_no_window() -> None:
    with pytest.raises(ServerError, match="went down"):
        parse_counters(FIRST) - parse_counters(SECOND)


def several_engines(*pages: str) -> str:
    """The pages of several engines as one page of their server."""
    return "\n".join(page.replace('engine="0"', f'engine="{number}"') for number, page in enumerate(pages))


def test_one_engine_that_began_anew_is_told_though_the_sum_of_all_has_risen() -> None:
    before = parse_counters(several_engines(FIRST, FIRST))
    grown = FIRST.replace(" 93.0", " 400.0").replace(" 279.0", " 1200.0").replace(" 55.0", " 300.0")
    grown = re.sub(r'(position="\d"\}) (38|10|7)\.0', r"\1 100.0", grown)
    after = parse_counters(several_engines(grown, re.sub(r" \d+\.0$", " 0.0", FIRST, flags=re.MULTILINE)))
    assert after.num_drafts > before.num_drafts
    with pytest.raises(ServerError, match="went down"):
        after - before
    assert parse_counters(several_engines(grown, SECOND)) - before == SpeculationCounters(
        400 + 186 - 2 * 93, 1200 + 558 - 2 * 279, 300 + 110 - 2 * 55, (100, 100, 100)
    )
    with pytest.raises(ServerError, match="went down"):
        parse_counters(grown) - before  # the other engine's series are gone


def test_acceptance_of_recorded_windows_is_one_plus_the_sum_of_its_rates() -> None:
    for page in (FIRST, SECOND):
        counted = parse_counters(page)
        found = acceptance(
            counted.num_drafts,
            counted.num_draft_tokens,
            counted.num_accepted_tokens,
            counted.accepted_per_position,
        )
        assert found.length == pytest.approx(1 + 55 / 93)
        assert abs(found.length - 1 - sum(found.rate_per_position)) < 1e-9


@pytest.mark.parametrize(
    ("metrics", "figures"),
    [
        (None, None),
        ({}, RequestFigures()),
        ({"time_to_first_token_ms": 20.0}, RequestFigures(ttft_seconds=0.02)),
        ({"mean_itl_ms": 4.0, "speculative_decoding": None}, RequestFigures(tpot_seconds=0.004)),
        (
            {"speculative_decoding": {"per_step_accepted": [1, 0], "per_step_drafted": [3, 2]}},
            RequestFigures(accepted=(1, 0), drafted=(3, 2)),
        ),
    ],
)
def test_what_a_server_does_not_say_is_left_open(
    metrics: dict[str, Any] | None, figures: RequestFigures | None
) -> None:
    assert request_figures(metrics) == figures


@pytest.mark.parametrize(
    "metrics",
    [
        {"time_to_first_token_ms": "soon"},
        {"speculative_decoding": [1]},
        {"speculative_decoding": {"per_step_accepted": [1], "per_step_drafted": [3, 3]}},
    ],
)
def test_metrics_of_an_unknown_form_are_an_error(metrics: dict[str, Any]) -> None:
    with pytest.raises(ServerError, match="unknown form"):
        request_figures(metrics)


def test_progress() -> None:
    progress = parse_progress(METRICS)
    assert progress == ServerProgress(
        num_generation_tokens=111,
        num_prompt_tokens=40,
        num_requests_running=4,
        num_requests_waiting=2,
        kv_cache_usage=0.5,
    )
    assert parse_progress("").kv_cache_usage is None


def test_each_engine_of_a_data_parallel_server_is_told_apart() -> None:
    assert parse_engines(METRICS) == {"0": EngineWork(140, 3), "1": EngineWork(11, 1)}
    assert parse_engines("") == {}


SGLANG = textwrap.dedent(
    """\
    sglang:generation_tokens_total{model_name="m"} 7557572.0
    sglang:prompt_tokens_total{model_name="m"} 8128902.0
    sglang:num_running_reqs{engine_type="unified",model_name="m",tp_rank="0"} 162.0
    sglang:num_queue_reqs{engine_type="unified",model_name="m",tp_rank="0"} 2826.0
    sglang:token_usage{engine_type="unified",model_name="m",tp_rank="0"} 0.28
    """
)
SGLANG_STEPS = """\
sglang:realtime_tokens_total{engine_type="unified",mode="prefill_compute",model_name="m",tp_rank="0"} 100.0
sglang:realtime_tokens_total{engine_type="unified",mode="decode",model_name="m",tp_rank="0"} 20.0
"""


def test_sglang_has_other_names_for_the_same() -> None:
    assert parse_progress(SGLANG) == ServerProgress(7557572, 8128902, 162, 2826, 0.28)


def test_a_counter_that_grows_when_a_request_ends_does_not_tell_a_long_answer_from_a_hang() -> None:
    assert parse_engines(SGLANG) == {}
    assert parse_engines(SGLANG + SGLANG_STEPS) == {"": EngineWork(120, 162)}
