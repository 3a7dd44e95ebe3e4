"""What a row of responses holds, by the answer the server gave."""

from __future__ import annotations

import io
import json

import pyarrow.parquet as pq
import pytest

from infra.generation.responses import (
    GarbledAnswer,
    MissingTokenIds,
    RowFailure,
    answered_row,
    assistant_message,
    failed_row,
    parse_completion,
    status_counts,
    to_parquet,
)
from infra.schemas import RESPONSES
from tests.asking import assert_failed, one_row, prompt
from tests.fakes.openai_server import Reply, completion_body


async def test_a_row_holds_the_servers_own_ids_and_the_mask_covers_the_completion() -> None:
    row = await one_row(Reply(text="the answer", reasoning="let me think"))
    assert row["status"] == "ok"
    assert bytes(row["input_ids"]) == b"hello" + b"let me think" + b"the answer" + b"\0"
    assert row["loss_mask"] == [False] * 5 + [True] * 23
    assert (row["num_prompt_tokens"], row["num_completion_tokens"]) == (5, 23)
    assert (row["content"], row["reasoning"], row["finish_reason"]) == ("the answer", "let me think", "stop")
    assert json.loads(row["messages"]) == [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "the answer", "reasoning": "let me think"},
    ]
    assert (row["temperature"], row["token_source"], row["error"]) == (0.7, "server", None)
    assert 0 < row["latency_seconds"] < 5


async def test_case_4_either_name_of_the_reasoning_gives_the_same_row() -> None:
    new, old = [
        await one_row(Reply(reasoning="hm", reasoning_field=field)) for field in ("reasoning", "reasoning_content")
    ]
    assert new["reasoning"] == "hm"
    assert new | {"latency_seconds": 0} == old | {"latency_seconds": 0}


async def test_a_null_content_and_tool_calls_are_kept() -> None:
    calls = [{"id": "1", "type": "function", "function": {"name": "now", "arguments": "{}"}}]
    row = await one_row(Reply(text=None, reasoning="I call a tool", tool_calls=calls, finish_reason="tool_calls"))
    assert (row["status"], row["content"]) == ("ok", None)
    assert json.loads(row["tool_calls"]) == calls
    assert json.loads(row["messages"])[-1]["tool_calls"] == calls


async def test_a_response_cut_by_max_tokens_is_truncated() -> None:
    row = await one_row(Reply(finish_reason="length"))
    assert (row["status"], row["finish_reason"]) == ("truncated", "length")
    assert row["num_completion_tokens"] > 0


@pytest.mark.parametrize(
    ("reply", "words"),
    [
        (Reply(token_ids=None), ["no completion token_ids"]),
        (Reply(token_ids=[1, 2], completion_tokens=3), ["2 completion token_ids", "3"]),
        (Reply(completion_tokens=7), ["completion token_ids", "7"]),
        (Reply(prompt_token_ids=None), ["no prompt_token_ids"]),
        (Reply(prompt_tokens=6), ["5 prompt_token_ids", "6"]),
        (Reply(token_ids=[], completion_tokens=0), ["empty completion token_ids"]),
        (Reply(token_ids=[-1, 2**31], completion_tokens=2), ["no token ids"]),
    ],
)
async def test_case_5_unsound_token_ids_are_an_error_row_and_are_not_asked_for_again(
    reply: Reply, words: list[str]
) -> None:
    row = await one_row(reply)
    assert_failed(row, *words)
    assert row["requests"] == 1


def test_the_answer_of_sglang() -> None:
    """Its prompt's ids stand in the choice, its thinking has the old name, and it names the token that ended it."""
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": "4", "tool_calls": None, "reasoning_content": "2+2"},
        "logprobs": None,
        "finish_reason": "stop",
        "matched_stop": 163586,
        "prompt_token_ids": [5, 6],
        "token_ids": [163606, 7, 163607, 8, 163586],
    }
    usage = {"prompt_tokens": 2, "total_tokens": 7, "completion_tokens": 5, "reasoning_tokens": 1}
    body = {"id": "1", "object": "chat.completion", "choices": [choice], "usage": usage, "metadata": {}}
    made = parse_completion(json.dumps(body).encode(), temperature=1.0, latency_seconds=0.1)
    assert made.prompt_token_ids + made.completion_token_ids == [5, 6, 163606, 7, 163607, 8, 163586]
    assert (made.reasoning, made.content, made.stopped_by) == ("2+2", "4", 163586)
    del choice["token_ids"]  # of a version that knows no ids
    with pytest.raises(MissingTokenIds) as missing:
        parse_completion(json.dumps(body).encode(), temperature=1.0, latency_seconds=0.1)
    assert (missing.value.answer.reasoning, missing.value.answer.num_completion_tokens) == ("2+2", 5)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"<html>",
        b"[]",
        b"null",
        b"[" * 100_000,
        b'{"choices": []}',
        b'{"choices": [{"message": 5}], "usage": {}}',
    ],
)
def test_what_is_no_answer_may_be_asked_again(body: bytes) -> None:
    with pytest.raises(GarbledAnswer):
        parse_completion(body, temperature=1.0, latency_seconds=0.1)


def test_text_that_utf8_cannot_hold_does_not_spoil_the_shard() -> None:
    body = completion_body(
        {"messages": [{"content": "q"}], "model": "m", "return_token_ids": True}, Reply(text="x")
    )
    broken = body.replace(b'"content": "x"', b'"content": "half \\ud83d of a pair, \\ud83d\\ude00 whole"')
    completion = parse_completion(broken, temperature=0.7, latency_seconds=0.1)
    row = answered_row(prompt("q"), [assistant_message(completion)], [completion])
    assert row["content"] == "half \ufffd of a pair, \U0001f600 whole"
    assert pq.read_table(io.BytesIO(to_parquet([row]))).num_rows == 1


def test_parquet_has_the_schema_even_where_a_column_is_null_in_every_row() -> None:
    rows = [failed_row(prompt("a"), RowFailure("no", temperature=0.7))]
    table = pq.read_table(io.BytesIO(to_parquet(rows)))
    assert table.schema.equals(RESPONSES)
    assert table.to_pylist() == rows
    assert status_counts(rows) == {"ok": 0, "truncated": 0, "failed": 1}
