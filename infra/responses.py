"""Rows of the responses stage: what a server's answer must hold to become training data, and what a failure leaves.

A draft learns from token ids, so the ids must be the server's own: an answer without them, or with another number
of them than its usage says, is a failed row and never tokenized a second time.
"""

from __future__ import annotations

import io
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from infra.errors import DraftsmithError
from infra.schemas import RESPONSES, STATUS_FAILED, STATUS_OK, STATUS_TRUNCATED

TOKEN_SOURCE_SERVER = "server"
MAX_ERROR_CHARACTERS = 2000

# The engine gave the request up (it is shutting down, or an error inside it): no answer of the verifier's.
_ABANDONED = (None, "abort", "error")
_INT32_MAX = 2**31 - 1

Row = dict[str, Any]
"""One row of `schemas.PROMPTS` or `schemas.RESPONSES`, by column name."""


class RowFailure(DraftsmithError):
    """This one row cannot be made, while the server may be sound: it becomes a row with an error.

    Args:
        reason: why, in the server's own words where it gave any.
        temperature: the temperature asked for.
        latency_seconds: how long the last request took.
    """

    def __init__(self, reason: str, *, temperature: float = 0.0, latency_seconds: float = 0.0) -> None:
        super().__init__(reason)
        self.reason = reason
        self.temperature = temperature
        self.latency_seconds = latency_seconds


class GarbledAnswer(DraftsmithError):
    """The body is no chat completion, or one the engine gave up on: asking again may mend it."""


@dataclass(frozen=True, slots=True)
class Completion:
    """A server's answer, checked. The two lists of ids are exactly what the server read and wrote."""

    prompt_token_ids: list[int]
    completion_token_ids: list[int]
    reasoning: str | None
    content: str | None
    tool_calls: list[Any] | None
    finish_reason: str
    temperature: float
    latency_seconds: float


def parse_completion(body: bytes, *, temperature: float, latency_seconds: float) -> Completion:
    """Reads the JSON body of a chat completion that was asked with `return_token_ids`.

    The thinking is taken from `message.reasoning` or, of older servers, `message.reasoning_content`.

    Raises:
        GarbledAnswer: the body is no chat completion.
        RowFailure: the answer is whole, but its token ids are missing, empty, or not as many as its usage says.
    """
    try:
        answer = json.loads(body)
        choice, usage = answer["choices"][0], answer["usage"]
        message, finish_reason = choice["message"], choice["finish_reason"]
        num_prompt, num_completion = usage["prompt_tokens"], usage["completion_tokens"]
        reasoning = message.get("reasoning") or message.get("reasoning_content")
        content, tool_calls = message.get("content"), message.get("tool_calls") or None
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise GarbledAnswer(f"the body of {len(body)} bytes is no chat completion: {error!r}") from error
    if finish_reason in _ABANDONED:
        raise GarbledAnswer(f"the engine gave the request up (finish_reason {finish_reason})")
    try:
        return Completion(
            prompt_token_ids=_checked_ids("prompt_token_ids", answer.get("prompt_token_ids"), num_prompt),
            completion_token_ids=_checked_ids("completion token_ids", choice.get("token_ids"), num_completion),
            reasoning=_text(reasoning),
            content=_text(content),
            tool_calls=tool_calls,
            finish_reason=str(finish_reason),
            temperature=temperature,
            latency_seconds=latency_seconds,
        )
    except ValueError as error:
        raise RowFailure(str(error), temperature=temperature, latency_seconds=latency_seconds) from error


def _checked_ids(name: str, ids: Any, num_tokens: Any) -> list[int]:
    if not isinstance(ids, list):
        raise ValueError(f"the server sent no {name} (is it asked with return_token_ids?)")
    if len(ids) != num_tokens:
        raise ValueError(f"the server sent {len(ids)} {name}, its usage says {num_tokens}")
    if not ids:
        raise ValueError(f"the server sent empty {name}")
    if not all(type(token) is int and 0 <= token <= _INT32_MAX for token in ids):
        raise ValueError(f"the server sent {name} that are no token ids")
    return ids


def _text(value: Any) -> str | None:
    """`value` as text that UTF-8 can hold (JSON may carry half of a surrogate pair, Parquet may not)."""
    if value is None:
        return None
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def response_row(prompt_row: Mapping[str, Any], result: Completion | RowFailure) -> Row:
    """The row of `schemas.RESPONSES` for one row of `schemas.PROMPTS`.

    `loss_mask` is true exactly on the completion's tokens. A failure gives empty lists, zero counts and its reason.
    """
    row: Row = {
        "sample_id": prompt_row["sample_id"],
        "dataset": prompt_row["dataset"],
        "domain": prompt_row["domain"],
        "messages": prompt_row["messages"],
        "input_ids": [],
        "loss_mask": [],
        "num_prompt_tokens": 0,
        "num_completion_tokens": 0,
        "reasoning": None,
        "content": None,
        "tool_calls": None,
        "finish_reason": None,
        "temperature": result.temperature,
        "status": STATUS_FAILED,
        "error": None,
        "token_source": TOKEN_SOURCE_SERVER,
        "latency_seconds": result.latency_seconds,
    }
    if isinstance(result, RowFailure):
        return row | {"error": _text(result.reason[:MAX_ERROR_CHARACTERS])}
    num_prompt, num_completion = len(result.prompt_token_ids), len(result.completion_token_ids)
    messages = [*json.loads(prompt_row["messages"]), _assistant_message(result)]
    return row | {
        "messages": _text(messages),
        "input_ids": result.prompt_token_ids + result.completion_token_ids,
        "loss_mask": [False] * num_prompt + [True] * num_completion,
        "num_prompt_tokens": num_prompt,
        "num_completion_tokens": num_completion,
        "reasoning": result.reasoning,
        "content": result.content,
        "tool_calls": _text(result.tool_calls),
        "finish_reason": result.finish_reason,
        "status": STATUS_TRUNCATED if result.finish_reason == "length" else STATUS_OK,
    }


def _assistant_message(completion: Completion) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": completion.content}
    if completion.reasoning is not None:
        message["reasoning"] = completion.reasoning
    if completion.tool_calls is not None:
        message["tool_calls"] = completion.tool_calls
    return message


def to_parquet(rows: Sequence[Mapping[str, Any]]) -> bytes:
    """One shard of the responses stage as a Parquet file, zstd, with the explicit schema. CPU-bound."""
    sink = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(list(rows), schema=RESPONSES), sink, compression="zstd")
    return sink.getvalue()


def status_counts(rows: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """Number of rows by status, a status without rows as zero."""
    counts = Counter(row["status"] for row in rows)
    return {status: counts[status] for status in (STATUS_OK, STATUS_TRUNCATED, STATUS_FAILED)}
