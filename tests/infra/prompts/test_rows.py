"""Every shape of row gives a conversation, and whatever a row holds it gives one or a reason."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infra.prompts.config import PromptSource
from infra.prompts.files import UnusableRow
from infra.prompts.rows import conversation

SYSTEM = {"role": "system", "content": "Be brief."}
USER, MORE = {"role": "user", "content": "Hi."}, {"role": "user", "content": "And then?"}
THEIRS = {"role": "assistant", "content": "Theirs."}


def source(**fields: Any) -> PromptSource:
    return PromptSource.model_validate({"file": "q.jsonl", **fields})


def messages_of(entry: Any, **fields: Any) -> list[dict[str, Any]]:
    return conversation(entry, source(**fields))[0]


@pytest.mark.parametrize(
    ("entry", "fields", "expected"),
    [
        ({"prompt": "Hi."}, {}, [USER]),
        ({"messages": [SYSTEM, USER]}, {}, [SYSTEM, USER]),
        ({"messages": json.dumps([SYSTEM, USER])}, {}, [SYSTEM, USER]),
        ({"messages": None, "prompt": "Hi."}, {}, [USER]),
        ({"messages": [USER], "prompt": "Not this."}, {}, [USER]),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "H"}, {"type": "text", "text": "i."}]}]}, {}, [USER]),
        ({"messages": [{"role": "system", "content": " "}, USER]}, {}, [USER]),
        ({"messages": [{**USER, "tool_calls": None, "weight": 1}]}, {}, [USER]),
        ({"conversations": [{"from": "human", "value": "Hi."}, {"from": "gpt", "value": "Theirs."}]}, {}, [USER]),
        ({"conversations": [{"from": "System", "value": "Be brief."}, {"from": "Human", "value": "Hi."}]}, {}, [SYSTEM, USER]),
        ({"conversations": [{"role": "user", "content": "Hi."}]}, {}, [USER]),
        ({"instruction": "Hi."}, {}, [USER]),
        ({"instruction": "Hi.", "input": " "}, {}, [USER]),
        ({"instruction": "Sum up:", "input": "A text."}, {}, [{"role": "user", "content": "Sum up:\n\nA text."}]),
        ({"question": "Hi.", "prompt": "x"}, {"columns": {"prompt": "question"}}, [USER]),
        ({"instruction": "Sum up:", "context": "A text."}, {"columns": {"input": "context"}}, [{"role": "user", "content": "Sum up:\n\nA text."}]),
        ({"turns": ["Hi.", "And then?"]}, {"columns": {"prompt": "turns"}, "turns": "all"}, [USER, MORE]),
        ({"turns": ["Hi.", "And then?"]}, {"columns": {"prompt": "turns"}, "turns": "first"}, [USER]),
        ({"sys": "Be brief.", "prompt": "Hi."}, {"columns": {"system": "sys"}}, [SYSTEM, USER]),
        ({"sys": "", "prompt": "Hi."}, {"columns": {"system": "sys"}}, [USER]),
    ],
)  # fmt: skip
def test_shapes(entry: Any, fields: dict[str, Any], expected: list[dict[str, Any]]) -> None:
    assert messages_of(entry, **fields) == expected


def test_tool_turns_of_from_and_value() -> None:
    turns = [("human", "Weather?"), ("gpt", "I look."), ("observation", "Rain."), ("gpt", "It rains.")]
    entry = {"conversations": [{"from": role, "value": text} for role, text in turns]}
    assert [message["role"] for message in messages_of(entry)] == ["user", "assistant", "tool"]
    assert [message["content"] for message in messages_of(entry, turns="all")] == ["Weather?"]


@pytest.mark.parametrize(
    ("turns", "expected"),
    [
        ("last", [SYSTEM, USER, THEIRS, MORE]),
        ("first", [SYSTEM, USER]),
        ("all", [SYSTEM, USER, MORE]),
    ],
)
def test_turns(turns: str, expected: list[dict[str, Any]]) -> None:
    given_messages = [SYSTEM, USER, THEIRS, MORE, {"role": "assistant", "content": ""}]
    if turns == "last":  # an empty answer within what is kept makes the row unusable; at the end it is left off
        given_messages = [*given_messages[:-1], THEIRS]
    assert messages_of({"messages": given_messages}, turns=turns) == expected


@pytest.mark.parametrize(
    ("fields", "with_own", "without"),
    [
        ({}, [SYSTEM, USER], [USER]),
        ({"system": "keep"}, [SYSTEM, USER], [USER]),
        ({"system": "drop"}, [USER], [USER]),
        ({"system_prompt": "Ours."}, [SYSTEM, USER], [{"role": "system", "content": "Ours."}, USER]),
        ({"system_prompt": "Ours.", "system": "replace"}, [{"role": "system", "content": "Ours."}, USER], [{"role": "system", "content": "Ours."}, USER]),
    ],
)  # fmt: skip
@pytest.mark.parametrize("turns", ["last", "first", "all"])
def test_system_messages(turns: str, fields: dict[str, Any], with_own: Any, without: Any) -> None:
    assert messages_of({"messages": [SYSTEM, USER]}, turns=turns, **fields) == with_own
    assert messages_of({"messages": [USER]}, turns=turns, **fields) == without


@pytest.mark.parametrize(
    ("reason", "entry", "fields"),
    [
        ("no_prompt", {"question": "Hi."}, {}),
        ("no_prompt", {"prompt": None}, {}),
        ("no_prompt", {"messages": [SYSTEM]}, {"turns": "all"}),
        ("no_prompt", {"messages": [{"role": "tool", "content": "Rain."}]}, {}),
        ("no_prompt", {"messages": [THEIRS]}, {"turns": "first"}),
        ("starts_with_answer", {"messages": [THEIRS, USER]}, {"turns": "first"}),
        ("starts_with_answer", {"messages": [SYSTEM, THEIRS, USER]}, {"turns": "all"}),
        ("empty", {"messages": []}, {"turns": "first"}),
        ("empty", {"turns": []}, {"columns": {"prompt": "turns"}, "turns": "all"}),
        ("empty", {"messages": [USER, THEIRS, {"role": "user", "content": " "}]}, {"turns": "all"}),
        ("empty", {"instruction": ""}, {}),
        ("wrong_type", {"prompt": ["Hi.", "And then?"]}, {}),
        ("wrong_type", {"prompt": ["Hi.", 3]}, {"turns": "all"}),
        ("wrong_type", {"conversations": [{"from": "wizard", "value": "Hi."}]}, {}),
        ("wrong_type", {"conversations": [{"from": 3, "value": "Hi."}]}, {}),
        ("wrong_type", {"conversations": [{"from": "human", "value": None}]}, {}),
        ("wrong_type", {"conversations": ["Hi."]}, {}),
        ("wrong_type", {"messages": '{"role": "user"}'}, {}),
        ("wrong_type", {"messages": [{"role": "user", "content": [{"type": "image"}]}]}, {}),
        ("wrong_type", {"instruction": "Sum.", "input": 5}, {}),
        ("wrong_type", {"prompt": "Hi.", "sys": 3}, {"columns": {"system": "sys"}}),
        ("broken_utf8", {"prompt": "half a pair \ud83d"}, {}),
        ("broken_utf8", {"prompt": "Hi.", "domain": "\udcff"}, {}),
        ("nul", {"conversations": [{"from": "human", "value": "a\0b"}]}, {"turns": "all"}),
        ("broken_json", {"messages": [USER, {**THEIRS, "tool_calls": [float("nan")]}, MORE]}, {}),
        ("broken_json", {"messages": [USER, {**THEIRS, "tool_calls": [b"raw"]}, MORE]}, {}),
    ],
)  # fmt: skip
def test_reasons(reason: str, entry: Any, fields: dict[str, Any]) -> None:
    with pytest.raises(UnusableRow, match=f"^{reason}$"):
        messages_of(entry, **fields)


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text()
    | st.sampled_from(["user", "gpt", "system"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=8,
)
MESSAGE = st.fixed_dictionaries(
    {}, optional=dict.fromkeys(("role", "from", "content", "value", "name", "tool_calls"), JSON)
)
LIKELY = st.fixed_dictionaries(
    {"role": st.sampled_from(["system", "user", "assistant", "tool"]), "content": st.text() | st.none()}
)
ENTRY = JSON | st.fixed_dictionaries(
    {},
    optional={
        "messages": st.lists(MESSAGE | LIKELY, max_size=5) | JSON,
        "conversations": st.lists(MESSAGE | LIKELY, max_size=5) | JSON,
        "prompt": JSON,
        "instruction": JSON,
        "input": JSON,
        "domain": JSON,
    },
)


@given(entry=ENTRY, turns=st.sampled_from(["last", "first", "all"]), system=st.sampled_from(["fill", "drop"]))
@pytest.mark.seconds
def test_whatever_a_row_holds_it_gives_a_conversation_or_a_reason(entry: Any, turns: str, system: str) -> None:
    try:
        messages, domain = conversation(entry, source(turns=turns, system=system))
    except UnusableRow:
        return
    text = json.dumps(messages, ensure_ascii=False, allow_nan=False)
    text.encode()
    assert "\0" not in text
    roles = [message["role"] for message in messages]
    assert "user" in roles
    assert roles[-1] in ("user", "tool")
    assert domain is None or domain.strip()
    if turns != "last":
        assert roles[-1] == "user"
        assert set(roles) <= {"system", "developer", "user"}
        assert turns == "all" or roles.count("user") == 1
    if system == "drop":
        assert "system" not in roles
