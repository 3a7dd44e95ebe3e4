"""Ids rebuilt of the template and the text: equal to the server's where it sends them, refused where counts differ."""

from __future__ import annotations

import asyncio
import contextlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from infra.errors import InputError
from infra.generation.config import GenerateConfig
from infra.generation.reconstruct import Reconstructor
from infra.generation.responses import Answer, MissingTokenIds, RowFailure
from infra.inference import generate_rows
from infra.verifiers.verifier import VerifierConfig
from tests.asking import QUICK, assert_failed, connect, one_row, prompt
from tests.fakes.openai_server import FakeOpenAIServer, Reply

TEMPLATE = """{% for message in messages %}[{{ message.role }}]{{ message.content }}<end>{% endfor %}\
{% if add_generation_prompt %}[assistant]{{ {'open': '<think>', 'closed': '<think></think>'}.get(opening, '') }}{% endif %}"""
MESSAGES = [{"role": "user", "content": "why <think>?"}]


def tokenizer_of(think: bool = True) -> Any:
    """One token for each byte; <end>, <other_end> and, where it thinks, <think> and </think>."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({letter: index for index, letter in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    names = ["<end>", "<other_end>"] + ["<think>", "</think>"] * think
    backend.add_tokens([AddedToken(name, special=False, normalized=False) for name in names])
    made = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>")
    made.chat_template = TEMPLATE
    return made


TOKENIZER = tokenizer_of()


def ids_of(text: str) -> list[int]:
    ids: list[int] = TOKENIZER.encode(text, add_special_tokens=False)
    return ids


def answer(
    written: str, *, prompt_text: str = "[user]why <think>?<end>[assistant]", **said: Any
) -> MissingTokenIds:
    """The answer of a server whose verifier wrote `written`."""
    fields: dict[str, Any] = {"reasoning": None, "content": None, "tool_calls": None, "finish_reason": "stop"}
    counts = {"num_prompt_tokens": len(ids_of(prompt_text)), "num_completion_tokens": len(ids_of(written))}
    rest: dict[str, Any] = {"stopped_by": None, "temperature": 0.7, "latency_seconds": 0.1}
    return MissingTokenIds("none sent", Answer(**(fields | counts | rest | said)))


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ("4<end>", {"content": "4"}),
        ("<think>2+2</think>4<end>", {"reasoning": "2+2", "content": "4"}),
        ("<think>2+2</think><end>", {"reasoning": "2+2"}),
        ("<think>2+", {"reasoning": "2+", "finish_reason": "length"}),
        ("<think>2+2</think>4", {"reasoning": "2+2", "content": "4", "finish_reason": "length"}),
        ("4<other_end>", {"content": "4", "stopped_by": ids_of("<other_end>")[0]}),
        ("é </think> 4<end>", {"content": "é </think> 4"}),
    ],
)
def test_what_the_verifier_wrote_is_rebuilt(written: str, said: dict[str, Any]) -> None:
    made = Reconstructor(TOKENIZER).rebuild(MESSAGES, {}, answer(written, **said))
    assert TOKENIZER.decode(made.completion_token_ids) == written
    assert made.completion_token_ids == ids_of(written)
    assert TOKENIZER.decode(made.prompt_token_ids) == "[user]why <think>?<end>[assistant]"
    assert made.token_source == "reconstructed"


@pytest.mark.parametrize(
    ("opening", "written", "said"),
    [
        ("open", "2+2</think>4<end>", {"reasoning": "2+2", "content": "4"}),
        ("open", "2+", {"reasoning": "2+", "finish_reason": "length"}),
        ("open", "</think>4<end>", {"content": "4"}),
        ("open", "2+2</think>4<end>", {"content": "2+2</think>4"}),  # of a server without a parser
        ("closed", "4<end>", {"content": "4"}),
        ("closed", "4<end>", {"reasoning": "4"}),  # of a parser that does not read the prompt
        ("closed", "4", {"reasoning": "4", "finish_reason": "length"}),
    ],
)
def test_thinking_that_the_template_opened_or_closed_is_not_opened_again(
    opening: str, written: str, said: dict[str, Any]
) -> None:
    begun = "[user]why <think>?<end>[assistant]" + {"open": "<think>", "closed": "<think></think>"}[opening]
    sampling = {"chat_template_kwargs": {"opening": opening}}
    made = Reconstructor(TOKENIZER).rebuild(MESSAGES, sampling, answer(written, prompt_text=begun, **said))
    assert TOKENIZER.decode(made.prompt_token_ids) == begun
    assert TOKENIZER.decode(made.completion_token_ids) == written


@pytest.mark.parametrize(
    ("failure", "words"),
    [
        (answer("<think>2+2 </think>4<end>", reasoning="2+2", content="4"), ["completion has 7", "counted 8"]),
        (answer("4<end>", prompt_text="[user]why?", content="4"), ["prompt has 24 tokens", "counted 10"]),
        (answer("4<end>", tool_calls=[{}]), ["calls of tools"]),
        (answer("4<end>", content="4", stopped_by="\n\n"), ["stop string"]),
    ],
)
def test_an_answer_that_does_not_add_up_is_refused(failure: MissingTokenIds, words: list[str]) -> None:
    with pytest.raises(RowFailure) as refused:
        Reconstructor(TOKENIZER).rebuild(MESSAGES, {}, failure)
    for word in ["cannot be reconstructed", *words]:
        assert word in refused.value.reason
    assert (refused.value.temperature, refused.value.latency_seconds) == (0.7, 0.1)


def test_the_turns_end_must_be_known() -> None:
    other_end = ids_of("<other_end>")
    rebuilder = Reconstructor(TOKENIZER, end_token_ids=other_end)
    with pytest.raises(RowFailure, match="which token ended"):
        rebuilder.rebuild(MESSAGES, {}, answer("4<other_end>", content="4"))
    rebuilder.rebuild(MESSAGES, {}, answer("4<other_end>", content="4", stopped_by=other_end[0]))
    with pytest.raises(RowFailure, match="stop string"):
        Reconstructor(TOKENIZER).rebuild(MESSAGES, {"stop": ["x"]}, answer("4<end>", content="4"))


def test_think_tokens_are_configured_where_the_tokenizer_does_not_name_them() -> None:
    plain = tokenizer_of(think=False)
    failure = answer("<think>2</think>4<end>", reasoning="2", content="4")
    failure.answer = replace(
        failure.answer, num_prompt_tokens=len(plain.encode("[user]why <think>?<end>[assistant]"))
    )
    with pytest.raises(RowFailure, match=r"generate\.think_start_token_id"):
        Reconstructor(plain).rebuild(MESSAGES, {}, failure)
    told = Reconstructor(plain, think_start_token_id=163606, think_end_token_id=163607)
    two, four, end = (plain.encode(text)[0] for text in ("2", "4", "<end>"))
    assert told.rebuild(MESSAGES, {}, failure).completion_token_ids == [163606, two, 163607, four, end]


def test_it_is_loaded_as_the_verifiers_tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("infra.generation.reconstruct.tokenizer_origin", lambda verifier: (verifier.model, None))
    verifier, config = VerifierConfig(model=str(tmp_path)), GenerateConfig(token_source="reconstructed")
    with pytest.raises(InputError, match=r"verifier\.model"):
        Reconstructor.load(verifier, config)
    TOKENIZER.save_pretrained(tmp_path)
    written = "<think>2</think>4<end>"
    for ends, is_known in ((["<end>", "<other_end>"], True), (["<other_end>"], False)):
        declared = [ids_of(end)[0] for end in ends]
        (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": declared}))
        loaded = Reconstructor.load(verifier, config)
        with contextlib.nullcontext() if is_known else pytest.raises(RowFailure, match="which token ended"):
            made = loaded.rebuild(MESSAGES, {}, answer(written, reasoning="2", content="4"))
            assert made.completion_token_ids == ids_of(written)
    (tmp_path / "chat_template.jinja").unlink()
    with pytest.raises(InputError, match=r"generate\.token_source.*chat template"):
        Reconstructor.load(verifier, config)


def test_code_of_the_tokenizer_runs_only_where_that_was_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("infra.generation.reconstruct.tokenizer_origin", lambda verifier: (verifier.model, None))
    trusted = []
    monkeypatch.setattr(
        "transformers.AutoTokenizer.from_pretrained",
        lambda *_, trust_remote_code, **__: trusted.append(trust_remote_code) or TOKENIZER,
    )
    for trust in (False, True):
        verifier = VerifierConfig(model=str(tmp_path), trust_remote_code=trust)
        Reconstructor.load(verifier, GenerateConfig(token_source="reconstructed"))
    assert trusted == [False, True]


async def test_rows_of_a_server_that_sends_ids_and_of_one_that_sends_none_are_the_same() -> None:
    """Where both are possible they agree: all but the source is equal."""
    written = "<think>let me see</think>yes<end>"
    prompt_ids = ids_of("[user]hello<end>[assistant]")
    reply = Reply(text="yes", reasoning="let me see", token_ids=ids_of(written), prompt_token_ids=prompt_ids)
    reply = replace(reply, prompt_tokens=len(prompt_ids), completion_tokens=len(ids_of(written)))
    exact = await one_row(reply)
    config = GenerateConfig(token_source="reconstructed", **QUICK)
    async with FakeOpenAIServer() as server, connect(server) as client:
        server.script("hello", replace(reply, token_ids=None, prompt_token_ids=None))
        server.script("off", replace(reply, token_ids=None, prompt_token_ids=None))
        rows = [prompt("hello"), prompt("off")]
        made, off = await generate_rows(client, rows, config, rebuilder=Reconstructor(TOKENIZER))
        asked = [body["return_token_ids"] for body in server.bodies]
    assert exact["status"] == "ok"
    assert exact | {"token_source": "reconstructed", "latency_seconds": 0, "requests": 0} == made | {
        "latency_seconds": 0,
        "requests": 0,
    }
    assert asked == [False, False]
    assert_failed(off, "prompt has 21 tokens, the server counted 23")


async def test_a_server_that_sends_no_ids_is_alive_all_the_same() -> None:
    """After a request that timed out it is asked for no proof: it has answered another one meanwhile."""
    async with FakeOpenAIServer() as server, connect(server, timeout_seconds=2.0) as client:
        server.script("hangs", Reply(hang=True), Reply())
        server.script("hello", Reply(latency_seconds=0.3, token_ids=None))
        hanging = asyncio.create_task(client.complete([{"role": "user", "content": "hangs"}], {"temperature": 0}))
        with pytest.raises(MissingTokenIds):
            await client.complete([{"role": "user", "content": "hello"}], {"temperature": 0})
        await hanging
        assert server.requests == {"hangs": 2, "hello": 1}


def test_only_opting_in_changes_the_key() -> None:
    assert GenerateConfig().content() == {}
    kimi = GenerateConfig(token_source="reconstructed", think_start_token_id=163606, think_end_token_id=163607)
    assert set(kimi.content()) == {"token_source", "think_start_token_id", "think_end_token_id"}
    with pytest.raises(ValidationError):
        GenerateConfig(token_source="guessed")
