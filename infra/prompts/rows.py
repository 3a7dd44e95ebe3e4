"""One conversation out of one row of a data set, whatever its shape."""

from __future__ import annotations

import json
from typing import Any

from infra.fingerprint import canonical_json
from infra.prompts.config import Columns, PromptSource
from infra.prompts.files import Entry, UnusableRow

Messages = list[dict[str, Any]]

SYSTEM_ROLES = frozenset({"system", "developer"})
# Data sets' names of the roles, and ours.
_ROLES = {role: role for role in (*SYSTEM_ROLES, "user", "assistant", "tool")} | {
    "human": "user",
    "prompter": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "bard": "assistant",
    "model": "assistant",
    "function": "tool",
    "function_response": "tool",
    "observation": "tool",
}
_MESSAGE_KEYS = ("role", "content", "name", "tool_calls", "tool_call_id")


def conversation(entry: Entry, source: PromptSource) -> tuple[Messages, str | None]:
    """What the verifier is to answer of one row, and the row's domain if it has one.

    With `turns: last` the conversation ends where an answer is due; with `first` and `all` it holds the system
    message, if any, and user turns only.

    Raises:
        UnusableRow: with the reason: broken_utf8, broken_json, wrong_type, no_prompt, empty, nul, or (where
            `turns` is not `last`) starts_with_answer: the user turns answer something that is not there.
    """
    if isinstance(entry, UnusableRow):
        raise entry
    if not isinstance(entry, dict):
        raise UnusableRow("wrong_type")
    columns = source.columns
    messages = [_translated(message) for message in _raw_messages(entry, columns, source.turns)]
    # A blank system message, which some data sets have in every row, is none.
    messages = [message for message in messages if message["role"] not in SYSTEM_ROLES or not _blank(message)]
    messages = _answerable(messages) if source.turns == "last" else _user_turns(messages, source.turns)
    messages = _with_system(messages, source, entry.get(columns.system) if columns.system else None)
    checked = [_checked_message(message) for message in messages]
    domain = entry.get(columns.domain or "domain")
    if domain is not None and not isinstance(domain, str):
        raise UnusableRow("wrong_type")
    _check_text([checked, domain])
    return checked, (domain or "").strip() or None


def _raw_messages(entry: dict[str, Any], columns: Columns, turns: str) -> list[Any]:
    """The messages as the row has them, of the first shape that it has."""
    for column in (columns.messages or "messages", columns.conversations or "conversations"):
        if (found := entry.get(column)) is not None:
            return _listed(found)
    if (prompt := entry.get(columns.prompt or "prompt")) is not None:
        if isinstance(prompt, list) and turns == "last":
            raise UnusableRow("wrong_type")  # of several user turns without answers, none is the one to answer
        return [{"role": "user", "content": text} for text in (prompt if isinstance(prompt, list) else [prompt])]
    if (instruction := entry.get(columns.instruction or "instruction")) is not None:
        about = entry.get(columns.input or "input")
        if about is not None and not isinstance(about, str):
            raise UnusableRow("wrong_type")
        if isinstance(instruction, str) and about and about.strip():
            instruction = f"{instruction}\n\n{about}"
        return [{"role": "user", "content": instruction}]
    raise UnusableRow("no_prompt")


def _listed(found: Any) -> list[Any]:
    """A list, or the JSON text of one: CSV has no other way, and our own Parquet keeps messages so."""
    if isinstance(found, str):
        try:
            found = json.loads(found)
        except (ValueError, RecursionError):
            raise UnusableRow("wrong_type") from None
    if not isinstance(found, list):
        raise UnusableRow("wrong_type")
    return found


def _translated(message: Any) -> dict[str, Any]:
    """A message under our names: role/content, or from/value; its text may come in parts."""
    if not isinstance(message, dict):
        raise UnusableRow("wrong_type")
    if message.get("role") is None and message.get("from") is not None:
        message = {"role": message["from"], "content": message.get("value")}
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or role.lower() not in _ROLES:
        raise UnusableRow("wrong_type")
    if isinstance(content, list) and content:
        texts = [text for part in content if isinstance(part, dict) and isinstance(text := part.get("text"), str)]
        content = "".join(texts) if len(texts) == len(content) else content  # else a part is no text
    return {**message, "role": _ROLES[role.lower()], "content": content}


def _blank(message: dict[str, Any]) -> bool:
    content = message.get("content")
    return content is None or (isinstance(content, str) and not content.strip())


def _answerable(messages: Messages) -> Messages:
    """Without the answers at the end, which are the verifier's to give."""
    while messages and messages[-1]["role"] == "assistant":
        messages = messages[:-1]
    if not messages:
        raise UnusableRow("empty")
    if messages[-1]["role"] in SYSTEM_ROLES or not any(message["role"] == "user" for message in messages):
        raise UnusableRow("no_prompt")
    return messages


def _user_turns(messages: Messages, turns: str) -> Messages:
    """The system messages at the start, then the first user turn or all of them."""
    if not messages:
        raise UnusableRow("empty")
    said = [message for message in messages if message["role"] not in SYSTEM_ROLES]
    users = [message for message in said if message["role"] == "user"]
    if not users:
        raise UnusableRow("no_prompt")
    if said[0]["role"] != "user":
        raise UnusableRow("starts_with_answer")
    opening = messages[: messages.index(said[0])]
    return [*opening, *(users if turns == "all" else users[:1])]


def _with_system(messages: Messages, source: PromptSource, own: Any) -> Messages:
    """With the system messages that the source asks for: `own` is what the row's column for it holds."""
    has_system = any(message["role"] in SYSTEM_ROLES for message in messages)
    if not has_system and own not in (None, ""):
        messages, has_system = [{"role": "system", "content": own}, *messages], True
    if source.system in ("replace", "drop"):
        messages, has_system = [message for message in messages if message["role"] not in SYSTEM_ROLES], False
    if source.system_prompt and not has_system:
        messages = [{"role": "system", "content": source.system_prompt}, *messages]
    return messages


def _checked_message(message: dict[str, Any]) -> dict[str, Any]:
    content = message.get("content")
    if message["role"] == "assistant" and content in (None, ""):
        # A call of a tool needs no text; an answer without either is dropped with its row below.
        if not message.get("tool_calls"):
            raise UnusableRow("empty")
    elif not isinstance(content, str):
        raise UnusableRow("wrong_type")
    elif not content.strip() and message["role"] != "tool":
        raise UnusableRow("empty")
    return {key: message[key] for key in _MESSAGE_KEYS if message.get(key) is not None}


def _check_text(value: Any) -> None:
    """JSON may hold what UTF-8 cannot (half a surrogate pair), NaN, or a NUL that breaks readers downstream."""
    try:
        canonical_json(value)
    except UnicodeEncodeError:
        raise UnusableRow("broken_utf8") from None
    except (ValueError, TypeError):  # NaN; a date or bytes inside a Parquet row's tool call
        raise UnusableRow("broken_json") from None
    if _holds_nul(value):
        raise UnusableRow("nul")


def _holds_nul(value: Any) -> bool:
    if isinstance(value, dict):
        return any(_holds_nul(item) for pair in value.items() for item in pair)
    if isinstance(value, list):
        return any(_holds_nul(item) for item in value)
    return isinstance(value, str) and "\0" in value
