"""Counters out of a /metrics page with two engines and a name that holds braces."""

from __future__ import annotations

import textwrap

import pytest

from infra.errors import ServerError
from infra.vllm_metrics import (
    EngineWork,
    ServerProgress,
    SpeculationCounters,
    parse_counters,
    parse_engines,
    parse_progress,
)

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
