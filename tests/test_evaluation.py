from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from pydantic import ValidationError

from infra import evaluation
from infra.errors import InputError, ServerError, StageFailed
from infra.evaluation import (
    EvaluateConfig,
    EvaluationPrompt,
    Slot,
    measure,
    measurement_order,
    select_prompts,
    settled_counters,
    speculative_config,
)
from infra.vllm_server import SpeculationCounters
from tests.fakes.measurements import counters


def test_default_config_needs_nothing_and_hashes_nothing() -> None:
    assert EvaluateConfig().content() == {}


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
    ],
)
def test_wrong_configs_are_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        EvaluateConfig.model_validate(given)


def test_speculative_config_of_each_method() -> None:
    config = EvaluateConfig(num_speculative_tokens=5, prompt_lookup_max=6, prompt_lookup_min=3)
    assert speculative_config("none", config, "/draft") is None
    assert speculative_config("ngram", config, None) == {
        "method": "ngram",
        "num_speculative_tokens": 5,
        "prompt_lookup_max": 6,
        "prompt_lookup_min": 3,
    }
    assert speculative_config("eagle3", config, "/draft") == {
        "method": "eagle3",
        "model": "/draft",
        "num_speculative_tokens": 5,
    }
    with pytest.raises(InputError, match=r"evaluate\.methods"):
        speculative_config("eagle3", config, None)


def prompt_row(number: int, dataset: str, split: str = "heldout") -> dict[str, Any]:
    messages = json.dumps([{"role": "user", "content": f"{dataset} {number}"}])
    return {"sample_id": f"{dataset}-{number}", "dataset": dataset, "split": split, "messages": messages}


def small(**more: Any) -> EvaluateConfig:
    base: dict[str, Any] = {"concurrency": (1, 2), "num_prompts": (2, 4), "settle_seconds": 0}
    return EvaluateConfig.model_validate(base | more)


def test_of_a_conversation_the_first_turn_is_measured() -> None:
    messages = [{"role": role, "content": role} for role in ("system", "user", "user", "user")]
    rows = [
        prompt_row(number, "a") | {"messages": json.dumps([*messages[number:], *messages[1:]])} for number in (0, 1)
    ]
    config = EvaluateConfig(concurrency=[1], num_prompts=[2])
    (prompts,) = select_prompts(rows, config).values()
    assert [prompt.messages for prompt in prompts] == [messages[:2], messages[1:2]]


def test_prompts_are_heldout_only_unique_and_take_turns() -> None:
    rows = [prompt_row(i, "code") for i in range(5)] + [prompt_row(i, "chat") for i in range(3)]
    again = prompt_row(0, "code") | {"sample_id": "code-0-second-sample"}
    chosen = select_prompts([prompt_row(9, "code", "train"), *rows, again], small())
    assert [prompt.sample_id for prompt in chosen["chat+code"]] == ["chat-0", "code-0", "chat-1", "code-1"]
    assert chosen["chat+code"][0].messages == [{"role": "user", "content": "chat 0"}]


def test_by_dataset_keeps_datasets_apart() -> None:
    rows = [prompt_row(i, name) for name in ("code", "chat") for i in range(5)]
    chosen = select_prompts(rows, small(by_dataset=True))
    assert {name: len(prompts) for name, prompts in chosen.items()} == {"code": 4, "chat": 4}


def test_fewer_prompts_than_wanted_are_all_used_but_the_load_must_be_reached(
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert len(select_prompts([prompt_row(i, "code") for i in range(3)], small())["code"]) == 3
    assert "3 held-out prompts of 4 wanted" in caplog.text
    with pytest.raises(InputError, match="cannot keep 2 requests in flight"):
        select_prompts([prompt_row(0, "code")], small())
    with pytest.raises(InputError, match="no held-out prompt"):
        select_prompts([prompt_row(0, "code", "train")], small())


def test_rounds_are_interleaved_and_begin_with_another_method_each() -> None:
    slots = measurement_order(EvaluateConfig(rounds=3, concurrency=(1, 8), num_prompts=(2, 9)))
    assert len(slots) == 3 * 2 * 3
    assert slots[0] == Slot(round_index=0, concurrency=1, num_prompts=2, method="none")
    assert [slot.method for slot in slots[:3]] == ["none", "ngram", "eagle3"]
    assert [slot.method for slot in slots[6:9]] == ["ngram", "eagle3", "none"]
    assert [slot.num_prompts for slot in slots[:6]] == [2, 2, 2, 9, 9, 9]


@dataclass
class Answer:
    completion_token_ids: Sequence[int]


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
        return Answer([int(text)] * 5)

    async def read_counters(self) -> SpeculationCounters:
        return counters(self.num_drafts, self.num_drafts // 2)


PROMPTS = [EvaluationPrompt(str(i), "code", [{"role": "user", "content": str(i)}]) for i in range(6)]


@pytest.fixture(autouse=True)
def fast_counters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluation, "COUNTER_INTERVAL_SECONDS", 0.001)


async def test_measure_counts_only_the_window_and_keeps_the_order() -> None:
    client = FakeClient(seconds=0.02)
    config = small(warmup_requests=3, max_tokens=100)
    slot = Slot(round_index=1, concurrency=2, num_prompts=4, method="eagle3")
    taken = await measure(client, PROMPTS, slot, config, client.read_counters, dataset="code")
    assert [request.sample_id for request in taken.requests] == ["0", "1", "2", "3"]
    assert [request.completion_token_ids[0] for request in taken.requests] == [0, 1, 2, 3]
    assert taken.counters == counters(40, 20)  # 4 answers, though the server gave 7
    assert (taken.output_tokens, taken.num_requests, taken.round_index) == (20, 4, 1)
    assert client.most_in_flight == 2
    # Slot 1: the slow prompt 0 (0.04 s) and another; slot 2: two others.
    assert 0.05 < taken.wall_seconds < 2.0
    assert taken.requests[0].latency_seconds > taken.requests[1].latency_seconds
    assert client.asked[0][1] == {"temperature": 0.0, "max_tokens": 32}
    assert client.asked[3][1] == {"temperature": 0.0, "max_tokens": 100}
    assert {seed for _, _, seed in client.asked} == {None}


async def test_a_refused_request_is_kept_as_a_failure_within_the_allowed_share() -> None:
    client = FakeClient(failing={"1": InputError("prompt", "too long")})
    slot = Slot(0, 2, 4, "none")
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
        await measure(client, PROMPTS, Slot(0, 2, 6, "none"), config, client.read_counters, dataset="code")
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
