"""Filters, duplicates and samples: what is taken, what is counted as dropped, and what the key sees of it."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from flows.config import PipelineConfig
from flows.resolve import resolve
from infra.errors import InputError
from infra.prompts.filters import folded_sha256, token_counter
from infra.prompts.rows import Messages, UnusableRow
from infra.prompts.samples import PromptsConfig, PromptSet, Row, load_prompts
from infra.verifiers.verifier import VerifierConfig


def write(path: Path, entries: list[Any]) -> str:
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries), encoding="utf-8")
    return str(path)


def numbered(path: Path, count: int) -> str:
    return write(path, [{"prompt": f"Question {number}?"} for number in range(count)])


def config(*sources: dict[str, Any], **fields: Any) -> PromptsConfig:
    return PromptsConfig.model_validate({"sources": sources, "heldout_prompts": 0, **fields})


def texts(rows: list[Row]) -> list[str]:
    return [json.loads(row["messages"])[-1]["content"] for row in rows]


def check_ids(prompts: PromptSet) -> None:
    ids = [row["sample_id"] for row in prompts.train + prompts.heldout]
    assert len(set(ids)) == len(ids)


# --- duplicates ---

VARIANTS = ["What is 2+3?", "what is 2+3", " What  is\n2+3 ? ", "What is 2-3?", "What is 23?", "\uff37hat is 2+3?"]


@pytest.mark.parametrize(
    ("duplicates", "expected"),
    [("exact", VARIANTS), ("normalized", [VARIANTS[0], VARIANTS[3], VARIANTS[4]])],
)
def test_equal_prompts(tmp_path: Path, duplicates: str, expected: list[str]) -> None:
    file = write(tmp_path / "q.jsonl", [{"prompt": text} for text in [*VARIANTS, VARIANTS[0]]])
    prompts = load_prompts(config({"file": file}, duplicates=duplicates))
    assert sorted(texts(prompts.train)) == sorted(expected)
    assert prompts.dropped == {"q": {"duplicate": 7 - len(expected)}}


def test_normalized_duplicates_are_found_across_data_sets(tmp_path: Path) -> None:
    one = write(tmp_path / "a.jsonl", [{"prompt": "Why, then?"}])
    two = write(tmp_path / "b.jsonl", [{"prompt": "WHY THEN"}, {"prompt": "Other."}])
    prompts = load_prompts(config({"file": one}, {"file": two}, duplicates="normalized"))
    assert sorted(texts(prompts.train)) == ["Other.", "Why, then?"]
    assert prompts.dropped == {"a": {}, "b": {"duplicate": 1}}


@pytest.mark.parametrize(
    ("one", "other", "equal"),
    [
        ("कि", "का", False),  # letters that differ in a vowel sign only
        ("ß", "SS", True),
        ("¿Qué?", "qué", True),
        ("a/b", "a*b", False),
        ("3 < 4", "3 > 4", False),
        ("🦊", "🐻", False),
        ("?", "!", True),
    ],
)
def test_folding(one: str, other: str, equal: bool) -> None:
    folded = [folded_sha256([{"role": "user", "content": text}]) for text in (one, other)]
    assert (folded[0] == folded[1]) is equal


@pytest.mark.parametrize("heldout", [{"heldout_prompts": 7}, {"heldout_prompts": None, "heldout_share": 0.4}])
def test_kept_duplicates_have_ids_of_their_own_and_lie_on_one_side(tmp_path: Path, heldout: dict[str, Any]) -> None:
    entries = [{"prompt": f"Question {number % 10}?"} for number in range(30)]
    file = write(tmp_path / "q.jsonl", entries)
    sources = [{"file": file}, {"file": file, "name": "again", "system_prompt": "Be brief."}]
    prompts = load_prompts(config(*sources, duplicates="keep", samples_per_prompt=2, **heldout))
    check_ids(prompts)
    assert prompts.dropped == {"q": {}, "again": {}}
    assert len(prompts.train) == 2 * (60 - len(prompts.heldout))
    assert len(prompts.heldout) >= 7
    assert not set(texts(prompts.train)) & set(texts(prompts.heldout))
    assert set(Counter(texts(prompts.heldout)).values()) == {6}
    again = load_prompts(config(*sources, duplicates="keep", samples_per_prompt=2, **heldout))
    assert again == prompts
    # The first of equal prompts has the id that it would have alone.
    alone = load_prompts(config(*sources[:1], samples_per_prompt=2))
    assert {row["sample_id"] for row in alone.train} <= {
        row["sample_id"] for row in load_prompts(config(*sources, duplicates="keep", samples_per_prompt=2)).train
    }


# --- language, length, sample, limit ---


def test_only_rows_in_the_languages_asked_for(tmp_path: Path) -> None:
    entries = [
        {"prompt": "a", "lang": "EN"},
        {"prompt": "b", "lang": "de"},
        {"prompt": "c"},
        {"prompt": "d", "lang": 3},
    ]
    file = write(tmp_path / "q.jsonl", [*entries, 3, {"prompt": "e", "lang": "English"}])
    language = {"column": "lang", "values": ["en", "english"]}
    prompts = load_prompts(config({"file": file, "language": language}))
    assert sorted(texts(prompts.train)) == ["a", "e"]
    assert prompts.dropped == {"q": {"language": 3, "wrong_type": 1}}


def count_words(messages: Messages) -> int:
    if any(message["content"] == "refused" for message in messages):
        raise UnusableRow("template")
    return sum(len(message["content"].split()) for message in messages)


def test_only_prompts_of_the_length_asked_for(tmp_path: Path) -> None:
    entries = [{"prompt": text} for text in ("one", "one two", "one two three", "one two three four", "refused")]
    limits = {"min_prompt_tokens": 3, "max_prompt_tokens": 4, "system_prompt": "System"}
    wanted = config({"file": write(tmp_path / "q.jsonl", entries), **limits})
    prompts = load_prompts(wanted, count_tokens=count_words)
    assert sorted(texts(prompts.train)) == ["one two", "one two three"]
    assert prompts.dropped == {"q": {"template": 1, "too_long": 1, "too_short": 1}}
    # Without a tokenizer, as in a forecast, there may be more.
    assert len(load_prompts(wanted).train) == 5


def test_all_turns_of_a_conversation_count(tmp_path: Path) -> None:
    entries = [{"turns": ["one two", "three"]}, {"turns": ["one two", "three four"]}]
    shape = {"columns": {"prompt": "turns"}, "turns": "all", "max_prompt_tokens": 3}
    prompts = load_prompts(
        config({"file": write(tmp_path / "q.jsonl", entries), **shape}), count_tokens=count_words
    )
    assert [json.loads(row["messages"]) for row in prompts.train] == [
        [{"role": "user", "content": "one two"}, {"role": "user", "content": "three"}]
    ]
    assert prompts.dropped == {"q": {"too_long": 1}}


def test_a_sample_does_not_depend_on_the_order_of_the_file(tmp_path: Path) -> None:
    entries = [{"prompt": f"Question {number}?"} for number in range(300)]
    shuffled = random.Random(7).sample(entries, len(entries))
    files = [write(tmp_path / f"{name}.jsonl", rows) for name, rows in (("a", entries), ("b", shuffled))]
    drawn = [load_prompts(config({"file": file, "name": "q", "sample": 40}, heldout_prompts=10)) for file in files]
    assert drawn[0].train == drawn[1].train
    assert drawn[0].heldout == drawn[1].heldout
    assert drawn[0].dropped == {"q": {"not_sampled": 260}}
    assert (len(drawn[0].train), len(drawn[0].heldout)) == (30, 10)
    other = load_prompts(config({"file": files[0], "name": "q", "sample": 40}, heldout_prompts=10, seed=1))
    assert len({*texts(other.train), *texts(other.heldout)} - set(texts(drawn[0].train + drawn[0].heldout))) >= 20
    # A larger sample holds the smaller one; a sample lies on both sides of the split.
    more = load_prompts(config({"file": files[0], "name": "q", "sample": 90}))
    assert set(texts(drawn[0].train + drawn[0].heldout)) <= set(texts(more.train))
    shared = load_prompts(config({"file": files[0], "sample": 90}, heldout_prompts=None, heldout_share=0.5))
    assert 25 <= len(shared.heldout) <= 65


def test_a_sample_is_drawn_from_the_first_usable_ones(tmp_path: Path) -> None:
    file = write(tmp_path / "q.jsonl", [{"prompt": ""}, *({"prompt": f"{number}"} for number in range(20))])
    prompts = load_prompts(config({"file": file, "limit": 8, "sample": 5}))
    assert set(texts(prompts.train)) <= {str(number) for number in range(8)}
    assert prompts.dropped == {"q": {"empty": 1, "not_sampled": 3}}


def test_what_one_data_set_did_not_draw_another_may_hold(tmp_path: Path) -> None:
    file = numbered(tmp_path / "q.jsonl", 20)
    prompts = load_prompts(config({"file": file, "sample": 5}, {"file": file, "name": "rest"}))
    assert prompts.dropped == {"q": {"not_sampled": 15}, "rest": {"duplicate": 5}}
    assert len(set(texts(prompts.train))) == len(prompts.train) == 20


def test_a_source_whose_rows_are_all_dropped_is_named(tmp_path: Path) -> None:
    file = numbered(tmp_path / "q.jsonl", 3)
    with pytest.raises(
        InputError, match=r"^prompts\.sources\[0\]\.file: .*/q\.\w+ holds no usable prompt \(3 too_long\)$"
    ):
        load_prompts(config({"file": file, "max_prompt_tokens": 1}), count_tokens=count_words)


# --- the verifier's tokenizer ---


@pytest.fixture(scope="module")
def verifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A verifier's folder with a tokenizer of words and a template that takes a system message only before a user."""
    import torch
    from safetensors.torch import save_file
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("verifier")
    words = Tokenizer(models.WordLevel({"?": 0}, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="?")
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m['content'] == 'refused' %}{{ raise_exception('no') }}{% endif %}"
        "{{ m['role'] }} {{ m['content'] }} {% endfor %}{% if add_generation_prompt %}assistant{% endif %}"
    )
    tokenizer.save_pretrained(folder)
    shape = {"hidden_size": 16, "num_hidden_layers": 8, "vocab_size": 9, "max_position_embeddings": 64}
    (folder / "config.json").write_text(json.dumps(shape))
    save_file({"weight": torch.ones(4, 4)}, folder / "model.safetensors")
    return folder


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAFTSMITH_CACHE", str(tmp_path / "cache"))


def test_tokens_are_counted_by_the_verifiers_template(verifier: Path) -> None:
    count = token_counter(VerifierConfig(model=str(verifier)))
    assert count([{"role": "user", "content": "one two"}]) == 4  # user one two assistant
    with pytest.raises(UnusableRow, match=r"^template$"):
        count([{"role": "user", "content": "refused"}])


def test_a_verifier_without_template_is_refused(verifier: Path, tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    plain.mkdir()
    for path in verifier.iterdir():
        if path.suffix != ".jinja":
            (plain / path.name).write_bytes(path.read_bytes())
    with pytest.raises(InputError, match=r"^verifier\.model: has no chat template"):
        token_counter(VerifierConfig(model=str(plain)))


def test_the_verifier_enters_the_key_only_where_it_decides(verifier: Path, tmp_path: Path) -> None:
    interpreter = tmp_path / "python"
    interpreter.write_text("#!/bin/sh\necho 0.32.0\n")
    interpreter.chmod(0o755)
    file = numbered(tmp_path / "q.jsonl", 3)
    copy = tmp_path / "copy"
    copy.mkdir()
    for path in verifier.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    (copy / "config.json").write_text((copy / "config.json").read_text() + "\n")

    def key(model: Path, **source: Any) -> str:
        tree = {
            "root": str(tmp_path / "root"),
            "verifier": {"model": str(model)},
            "vllm": {"python": str(interpreter)},
            "prompts": {"sources": [{"file": file, **source}]},
        }
        return resolve(PipelineConfig.model_validate(tree))["prompts"].key

    assert key(verifier) == key(copy)
    assert key(verifier, max_prompt_tokens=9) != key(copy, max_prompt_tokens=9)
    assert key(verifier, max_prompt_tokens=9) != key(verifier, max_prompt_tokens=8) != key(verifier)


# --- configs and keys ---


@pytest.mark.parametrize(
    "source",
    [
        {"hub": "openai/gsm8k", "file": "q.jsonl"},
        {"hub": "a/b/c"},
        {"hub": "../b"},
        {"file": "q.jsonl", "split": "train"},
        {"file": "q.jsonl", "revision": "main"},
        {"hub": "openai/gsm8k", "files": []},
        {"hub": "openai/gsm8k", "files": ["a"], "subset": "main"},
        {"file": "q.jsonl", "turns": "none"},
        {"file": "q.jsonl", "system": "replace"},
        {"file": "q.jsonl", "system": "keep", "system_prompt": "x"},
        {"file": "q.jsonl", "columns": {"promt": "x"}},
        {"file": "q.jsonl", "language": {"column": "lang"}},
        {"file": "q.jsonl", "min_prompt_tokens": 9, "max_prompt_tokens": 8},
        {"file": "q.jsonl", "sample": 0},
    ],
)  # fmt: skip
def test_wrong_sources_are_refused(source: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        config(source)


@pytest.mark.parametrize(
    "fields",
    [
        {"turns": "all"},
        {"columns": {"prompt": "question"}},
        {"system": "drop"},
        {"language": {"values": ["en"]}},
        {"language": {"values": ["de"]}},
        {"max_prompt_tokens": 9},
        {"min_prompt_tokens": 9},
        {"sample": 9},
    ],
)
def test_what_is_taken_enters_the_key(fields: dict[str, Any]) -> None:
    assert config({"file": "q.jsonl", **fields}).content() != config({"file": "q.jsonl"}).content()
    duplicates = config({"file": "q.jsonl"}, duplicates="normalized").content()
    assert duplicates != config({"file": "q.jsonl"}).content()


# --- memory ---


@pytest.mark.seconds
def test_memory_grows_by_what_is_kept_not_by_what_is_read(tmp_path: Path) -> None:
    """A sample of a JSON list of 40 MB takes little memory."""
    row = json.dumps({"prompt": "{} " + "word " * 800})
    with (tmp_path / "q.json").open("w") as file:
        file.write("[" + ",\n".join(row.replace("{}", str(number), 1) for number in range(10_000)) + "]")
    code = (
        "import resource, sys\n"
        "from infra.prompts.samples import *\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "config = PromptsConfig(sources=({'file': sys.argv[1], 'sample': 100},), heldout_prompts=0)\n"
        "assert len(load_prompts(config).train) == 100\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "q.json")],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    assert int(done.stdout) < 16_000  # KiB
