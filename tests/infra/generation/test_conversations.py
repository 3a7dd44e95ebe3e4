"""Prompts with several turns: what each turn is asked with, where a conversation ends, and what of it is trained."""

from __future__ import annotations

import io
import json
from typing import Any

import pyarrow.parquet as pq
import pytest

from infra.generation.config import GenerateConfig
from infra.generation.conversations import answer_prompt, split_turns
from infra.generation.responses import Answer, Completion, loss_mask, to_parquet, turns_not_found
from infra.schemas import RESPONSES
from tests.asking import QUICK, assert_failed, connect, prompt
from tests.fakes.openai_server import FakeOpenAIServer, Reply

CALL = [{"id": "1", "type": "function", "function": {"name": "now", "arguments": "{}"}}]


def conversation(*questions: str, system: str | None = None) -> dict[str, Any]:
    messages = [{"role": "user", "content": question} for question in questions]
    if system is not None:
        messages.insert(0, {"role": "system", "content": system})
    return prompt("talk") | {"messages": json.dumps(messages)}


async def answered(
    replies: dict[str, Reply], row: dict[str, Any], **changes: Any
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The row, and the bodies of the requests."""
    config = GenerateConfig(**(QUICK | changes))
    async with FakeOpenAIServer() as server, connect(server) as client:
        for question, reply in replies.items():
            server.script(question, reply)
        made = await answer_prompt(client, row, config)
        return made, list(server.bodies)


def test_a_user_message_after_a_user_message_begins_a_turn() -> None:
    roles = {"s": "system", "u": "user", "a": "assistant", "t": "tool"}

    def turns(letters: str) -> list[int]:
        return [len(turn) for turn in split_turns([{"role": roles[letter]} for letter in letters])]

    assert turns("u") == [1]
    assert turns("suuu") == [2, 1, 1]
    assert turns("suauau") == [6]  # answers are given: one prompt
    assert turns("uatuu") == [4, 1]


async def test_each_turn_is_asked_with_the_replies_so_far_and_the_row_is_the_last_turns() -> None:
    replies = {
        "one": Reply(text="first", reasoning="hm"),
        "two": Reply(text=None, reasoning="only a thought"),
        "three": Reply(text="third", token_ids=[7, 8], completion_tokens=2),
    }
    row, bodies = await answered(replies, conversation("one", "two", "three", system="be brief"))
    system, one, two, three = (
        {"role": role, "content": text}
        for role, text in (("system", "be brief"), ("user", "one"), ("user", "two"), ("user", "three"))
    )
    first = {"role": "assistant", "content": "first", "reasoning": "hm"}
    second = {"role": "assistant", "content": None, "reasoning": "only a thought"}
    sent_first = first | {"reasoning_content": "hm"}  # by the name of either kind of server
    sent_second = second | {"reasoning_content": "only a thought", "content": ""}  # templates add it to a string
    assert [body["messages"] for body in bodies] == [
        [system, one],
        [system, one, sent_first, two],
        [system, one, sent_first, two, sent_second, three],
    ]
    assert json.loads(row["messages"]) == [
        *(system, one, first, two, second, three),
        {"role": "assistant", "content": "third"},
    ]
    assert (row["status"], row["content"], row["num_completion_tokens"]) == ("ok", "third", 2)
    assert bytes(row["input_ids"][:-2]) == b"be briefonefirsttwothree"
    assert row["loss_mask"] == [False] * 24 + [True] * 2
    config = GenerateConfig()
    seeds = [body["seed"] for body in bodies]
    assert seeds[0] == config.sample_seed("id-talk")
    assert len(set(seeds)) == 3


async def test_a_failed_turn_fails_the_row_and_names_the_turn() -> None:
    row, bodies = await answered({"two": Reply(status=400, error="too long")}, conversation("one", "two", "three"))
    assert_failed(row, "turn 2 of 3: HTTP 400: too long")
    assert json.loads(row["messages"]) == json.loads(conversation("one", "two", "three")["messages"])
    assert len(bodies) == 2


@pytest.mark.parametrize(
    ("reply", "status"),
    [
        (Reply(text="cut", finish_reason="length"), "truncated"),
        (Reply(text=None, tool_calls=CALL, finish_reason="tool_calls"), "ok"),
    ],
)
async def test_a_conversation_ends_with_a_reply_that_nobody_can_go_on_from(reply: Reply, status: str) -> None:
    row, bodies = await answered({"two": reply}, conversation("one", "two", "three"))
    assert (row["status"], row["content"], len(bodies)) == (status, reply.text, 2)
    assert [message["role"] for message in json.loads(row["messages"])] == ["user", "assistant"] * 2
    assert bytes(row["input_ids"][: row["num_prompt_tokens"]]) == b"onean answertwo"


async def test_all_turns_are_trained_whose_ids_stand_in_the_last_prompt() -> None:
    kept = Reply(text="a", prompt_token_ids=[1, 5], prompt_tokens=2, token_ids=[10, 2], completion_tokens=2)
    lost = Reply(
        text="b", prompt_token_ids=[1, 5, 10, 2, 6], prompt_tokens=5, token_ids=[30, 11, 2], completion_tokens=3
    )
    last = [1, 5, 10, 2, 6, 11, 2, 7]
    end = Reply(text="c", prompt_token_ids=last, prompt_tokens=8, token_ids=[30, 12, 2], completion_tokens=3)
    row, _ = await answered(
        {"one": kept, "two": lost, "three": end}, conversation("one", "two", "three"), loss_on="all_turns"
    )
    assert row["input_ids"] == [*last, 30, 12, 2]
    assert row["loss_mask"] == [index in (2, 3, 8, 9, 10) for index in range(11)]
    assert row["num_turns_not_found"] == 1
    assert turns_not_found([row, row]) == {"num_turns_not_found": 2}  # in the record: it is no column
    assert pq.read_table(io.BytesIO(to_parquet([row]))).schema.equals(RESPONSES)
    row, _ = await answered({"one": kept, "two": lost, "three": end}, conversation("one", "two", "three"))
    assert sum(row["loss_mask"]) == 3
    assert turns_not_found([row]) == {}


def completion(prompt_ids: list[int], ids: list[int]) -> Completion:
    said = Answer(
        reasoning=None,
        content="x",
        tool_calls=None,
        finish_reason="stop",
        stopped_by=None,
        num_prompt_tokens=len(prompt_ids),
        num_completion_tokens=len(ids),
        temperature=0.0,
        latency_seconds=0.0,
    )
    return Completion(
        **{name: getattr(said, name) for name in Answer.__slots__},
        prompt_token_ids=prompt_ids,
        completion_token_ids=ids,
    )


@pytest.mark.parametrize(
    ("first_prompt", "first_ids", "last_prompt", "trained"),
    [
        pytest.param([1, 5], [9, 2], [1, 5, 9, 2, 6], [2, 3], id="as it was"),
        pytest.param([1, 5, 40, 41], [9, 2], [1, 5, 9, 2, 6], [2, 3], id="the opening of the turn is not repeated"),
        pytest.param([1, 5, 40], [40, 9, 2], [1, 5, 40, 9, 2, 6], [2, 3, 4], id="the prompts part within it"),
        pytest.param([1, 5], [30, 9, 2], [1, 5, 9, 2, 6], [], id="its thinking is left out"),
        pytest.param([1, 9, 2, 5], [9, 2], [1, 9, 2, 5, 8, 2, 6], [], id="a user said the same before"),
        pytest.param([1, 5], [9, 2], [1, 5, 8, 2, 6, 9, 2], [], id="a user says the same afterwards"),
        pytest.param([1, 5], [9, 2], [1, 5, 9], [], id="the prompt ends within it"),
    ],
)
def test_an_earlier_completion_is_found_only_where_it_was_said(
    first_prompt: list[int], first_ids: list[int], last_prompt: list[int], trained: list[int]
) -> None:
    mask, num_not_found = loss_mask([completion(first_prompt, first_ids), completion(last_prompt, [7, 2])])
    places = [index for index, is_trained in enumerate(mask) if is_trained]
    assert places == [*trained, len(last_prompt), len(last_prompt) + 1]
    assert num_not_found == (0 if trained else 1)


async def test_the_turns_of_a_conversation_share_one_slot() -> None:
    async with FakeOpenAIServer() as server, connect(server, concurrency=1) as client, client.window:
        row = await answer_prompt(client, conversation("one", "two"), GenerateConfig())
    assert (row["status"], server.max_in_flight) == ("ok", 1)
