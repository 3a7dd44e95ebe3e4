"""Rows of the responses stage: what a server's answer must hold to become training data, and what a failure leaves.

A draft learns from token ids, so the ids must be the server's own: an answer without them, or with another number
of them than its usage says, is a failed row and never tokenized a second time.
"""

from __future__ import annotations

import io
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from infra.errors import DraftsmithError
from infra.schemas import RESPONSES, STATUS_FAILED, STATUS_OK, STATUS_TRUNCATED

TOKEN_SOURCE_SERVER = "server"
TOKEN_SOURCE_RECONSTRUCTED = "reconstructed"
TOKEN_SOURCE_IMPORTED = "imported"
MAX_ERROR_CHARACTERS = 2000
TURNS_NOT_FOUND = "num_turns_not_found"
"""In a row, a shard's record and the log: earlier turns that `loss_on: all_turns` found no ids of."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a server says beside token ids."""

    reasoning: str | None
    content: str | None
    tool_calls: list[Any] | None
    finish_reason: str
    stopped_by: int | str | None
    """The token or text that ended the answer, where the server names it (vLLM: all but the tokenizer's own)."""
    num_prompt_tokens: int
    num_completion_tokens: int
    temperature: float
    latency_seconds: float
    server_metrics: dict[str, Any] | None = None
    """What the server measured of this request, where it was started to tell (`vllm_metrics.request_figures`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion(Answer):
    """An answer, checked. With `token_source` server the ids are exactly what the server read and wrote."""

    prompt_token_ids: list[int]
    completion_token_ids: list[int]
    token_source: str = TOKEN_SOURCE_SERVER


class MissingTokenIds(RowFailure):
    """The answer is whole, but has no token ids. Its text is in `answer`, for those who may rebuild them."""

    def __init__(self, reason: str, answer: Answer) -> None:
        super().__init__(reason, temperature=answer.temperature, latency_seconds=answer.latency_seconds)
        self.answer = answer


def parse_completion(body: bytes, *, temperature: float, latency_seconds: float) -> Completion:
    """Reads the JSON body of a chat completion, of vLLM or SGLang.

    The thinking is taken from `message.reasoning` or, of SGLang and older vLLM, `message.reasoning_content`. The
    prompt's ids stand beside the choices (vLLM) or in the choice (SGLang).

    Raises:
        GarbledAnswer: the body is no chat completion.
        MissingTokenIds: the answer is whole, but without token ids.
        RowFailure: its token ids are empty, or not as many as its usage says.
    """
    try:
        whole = json.loads(body)
        choice, usage = whole["choices"][0], whole["usage"]
        message, finish_reason = choice["message"], choice["finish_reason"]
        stopped_by = choice.get("stop_reason", choice.get("matched_stop"))
        prompt_ids = whole.get("prompt_token_ids") or choice.get("prompt_token_ids")
        completion_ids = choice.get("token_ids")
        answer = Answer(
            reasoning=_text(message.get("reasoning") or message.get("reasoning_content") or None),
            content=_text(message.get("content")),
            tool_calls=message.get("tool_calls") or None,
            finish_reason=str(finish_reason),
            stopped_by=stopped_by if isinstance(stopped_by, int | str) else None,
            num_prompt_tokens=usage["prompt_tokens"],
            num_completion_tokens=usage["completion_tokens"],
            temperature=temperature,
            latency_seconds=latency_seconds,
            server_metrics=whole.get("metrics"),
        )
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise GarbledAnswer(f"the body of {len(body)} bytes is no chat completion: {error!r}") from error
    if finish_reason in _ABANDONED:
        raise GarbledAnswer(f"the engine gave the request up (finish_reason {finish_reason})")
    for name, ids in (("prompt_token_ids", prompt_ids), ("completion token_ids", completion_ids)):
        if not isinstance(ids, list):
            reason = f"the server sent no {name}; if it knows none, see generate.token_source"
            raise MissingTokenIds(reason, answer)
    try:
        _check_ids("prompt_token_ids", prompt_ids, answer.num_prompt_tokens)
        _check_ids("completion token_ids", completion_ids, answer.num_completion_tokens)
    except ValueError as error:
        raise RowFailure(str(error), temperature=temperature, latency_seconds=latency_seconds) from error
    return with_ids(answer, prompt_ids, completion_ids, TOKEN_SOURCE_SERVER)


def with_ids(answer: Answer, prompt_ids: list[int], completion_ids: list[int], token_source: str) -> Completion:
    """The answer together with its token ids."""
    said = {field.name: getattr(answer, field.name) for field in fields(Answer)}
    return Completion(
        **said, prompt_token_ids=prompt_ids, completion_token_ids=completion_ids, token_source=token_source
    )


def _check_ids(name: str, ids: list[Any], num_tokens: Any) -> None:
    if len(ids) != num_tokens:
        raise ValueError(f"the server sent {len(ids)} {name}, its usage says {num_tokens}")
    if not ids:
        raise ValueError(f"the server sent empty {name}")
    if not all(type(token) is int and 0 <= token <= _INT32_MAX for token in ids):
        raise ValueError(f"the server sent {name} that are no token ids")


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


def failed_row(prompt_row: Mapping[str, Any], failure: RowFailure) -> Row:
    """The row of a prompt that has no response: empty lists, zero counts and the reason."""
    return {
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
        "temperature": failure.temperature,
        "status": STATUS_FAILED,
        "error": _text(failure.reason[:MAX_ERROR_CHARACTERS]),
        "token_source": TOKEN_SOURCE_SERVER,
        "latency_seconds": failure.latency_seconds,
    }


def answered_row(
    prompt_row: Mapping[str, Any],
    messages: Sequence[Mapping[str, Any]],
    completions: Sequence[Completion],
    *,
    all_turns: bool = False,
) -> Row:
    """The row of a conversation: the ids of its last turn, the whole of what was said.

    Args:
        messages: the conversation, replies included.
        completions: the completion of each turn.
        all_turns: train every turn's completion that stands with its exact ids in the last turn's prompt. How many
            do not is in the row as `num_turns_not_found`, which is no column.
    """
    last = completions[-1]
    mask, num_not_found = loss_mask(completions if all_turns else [last])
    row: Row = {
        "sample_id": prompt_row["sample_id"],
        "dataset": prompt_row["dataset"],
        "domain": prompt_row["domain"],
        "messages": _text(messages),
        "input_ids": last.prompt_token_ids + last.completion_token_ids,
        "loss_mask": mask,
        "num_prompt_tokens": last.num_prompt_tokens,
        "num_completion_tokens": last.num_completion_tokens,
        "reasoning": last.reasoning,
        "content": last.content,
        "tool_calls": _text(last.tool_calls),
        "finish_reason": last.finish_reason,
        "temperature": last.temperature,
        "status": STATUS_TRUNCATED if last.finish_reason == "length" else STATUS_OK,
        "error": None,
        "token_source": last.token_source,
        "latency_seconds": sum(completion.latency_seconds for completion in completions),
    }
    return row | {TURNS_NOT_FOUND: num_not_found} if num_not_found else row


def assistant_message(completion: Answer) -> dict[str, Any]:
    """The reply as a message of the conversation."""
    message: dict[str, Any] = {"role": "assistant", "content": completion.content}
    if completion.reasoning is not None:
        message["reasoning"] = completion.reasoning
    if completion.tool_calls is not None:
        message["tool_calls"] = completion.tool_calls
    return message


def loss_mask(completions: Sequence[Completion]) -> tuple[list[bool], int]:
    """The mask over the last turn's ids, and how many earlier completions are not in its prompt.

    The last completion begins where the prompt ends; no marker of a template is looked for. An earlier one is
    looked for where its own turn's prompt and the last one part: only an occurrence over that place is it, and not
    the same words in a user's mouth.
    """
    *earlier, last = completions
    prompt = last.prompt_token_ids
    mask = [False] * len(prompt) + [True] * len(last.completion_token_ids)
    num_not_found = 0
    for completion in earlier:
        ids = completion.completion_token_ids
        start = _find_over(prompt, ids, _num_common(completion.prompt_token_ids, prompt))
        if start is None:
            num_not_found += 1
        else:
            mask[start : start + len(ids)] = [True] * len(ids)
    return mask, num_not_found


def _num_common(left: Sequence[int], right: Sequence[int]) -> int:
    """Length of the common beginning."""
    pairs = enumerate(zip(left, right, strict=False))
    return next((index for index, (a, b) in pairs if a != b), min(len(left), len(right)))


def _find_over(ids: Sequence[int], wanted: Sequence[int], place: int) -> int | None:
    """Where `wanted` stands in `ids`, over index `place`; None if it does not."""
    for start in range(place, max(-1, place - len(wanted)), -1):
        if ids[start : start + 1] == wanted[:1] and ids[start : start + len(wanted)] == wanted:
            return start
    return None


def to_parquet(rows: Sequence[Mapping[str, Any]]) -> bytes:
    """One shard of the responses stage as a Parquet file, zstd, with the explicit schema. CPU-bound."""
    sink = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(list(rows), schema=RESPONSES), sink, compression="zstd")
    return sink.getvalue()


def status_counts(rows: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """Number of rows by status, a status without rows as zero."""
    counts = Counter(row["status"] for row in rows)
    return {status: counts[status] for status in (STATUS_OK, STATUS_TRUNCATED, STATUS_FAILED)}


def turns_not_found(rows: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """For the shard's record: how many earlier turns `loss_on: all_turns` leaves out; empty if none."""
    number = sum(row.get(TURNS_NOT_FOUND, 0) for row in rows)
    return {TURNS_NOT_FOUND: number} if number else {}
