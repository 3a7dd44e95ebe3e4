"""A verifier that thinks, under the real vLLM: its thoughts, its answers and its exact token ids.

The small verifier does not think. A copy of its tokenizer calls two tokens that it never uses `<think>` and
`</think>`, a chat template opens the thought, and vLLM's thinking budget closes it, as it would that of a verifier
that thinks for too long. What the thoughts say is of no matter here.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from transformers import AutoTokenizer

from infra.generation.config import GenerateConfig
from infra.generation.reconstruct import Reconstructor
from infra.generation.responses import MissingTokenIds, RowFailure
from infra.inference import CompletionClient, generate_rows
from infra.processes import end_stale, process_token
from infra.verifiers.verifier import VerifierConfig, materialize
from infra.vllm_server import VllmConfig, VllmServer

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

# What the template opens the thought with; without a word in it the small verifier loses its thread.
OPENING = "<think>Let me think about this."
BUDGET = 24  # tokens of a thought, the opening's included
# Past the budget, so that the small verifier, whose answers are short, does not end its turn within the thought.
MIN_TOKENS = 28
# Neither <|endoftext|> nor <|im_start|>, with which it would go on as the user: such tokens do not show in the text.
BIAS = {"0": -100, "1": -100}
RENAMED = {"<issue_comment>": "<think>", "<jupyter_text>": "</think>"}
# Earlier thoughts are left out, as in the templates of most verifiers that think, unless `keep` is given.
TEMPLATE = (
    """\
{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}\
{% if keep is defined and message['role'] == 'assistant' %}\
{{ 'OPENING' + message['reasoning_content'] + '</think>' }}\
{% endif %}{{ message['content'] + '<|im_end|>\n' }}{% endfor %}\
{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}\
{{ '<think></think>' if thinking is defined and not thinking else 'OPENING' }}{% endif %}"""
).replace("OPENING", OPENING)
QUESTIONS = (
    "What is the capital of France?",
    "Name three colours of the rainbow.",
    "How many days has a week?",
    "What do bees make?",
    "Say hello in Spanish.",
    "Which planet is closest to the sun?",
    "What is 7 times 8?",
    "Write a sentence about the sea.",
)


@pytest.fixture(scope="module")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small verifier's checkpoint under a tokenizer that knows how to think."""
    source = Path(os.environ.get("DRAFTSMITH_TEST_MODEL") or materialize(VerifierConfig()).path)
    folder = tmp_path_factory.mktemp("thinker")
    for name in ("config.json", "generation_config.json", "model.safetensors", "tokenizer_config.json"):
        (folder / name).symlink_to(source / name)
    tokenizer = json.loads((source / "tokenizer.json").read_text(encoding="utf-8"))
    vocabulary = tokenizer["model"]["vocab"]
    for old, new in RENAMED.items():
        vocabulary[new] = vocabulary.pop(old)
        (added,) = (entry for entry in tokenizer["added_tokens"] if entry["content"] == old)
        added |= {
            "content": new,
            "special": False,
        }  # as Qwen's and Kimi's are: else they would not show in the text
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer, ensure_ascii=False), encoding="utf-8")
    (folder / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    return folder


@pytest.fixture
def token() -> Iterator[str]:
    value = process_token("test", uuid4().hex)
    yield value
    end_stale(value)


def prompt(*questions: str, **sampling: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": question} for question in questions]
    row = {"dataset": "test", "domain": "general", "split": "train", "sampling": json.dumps(sampling)}
    return row | {"sample_id": f"{len(questions)}-{questions[0]}", "messages": json.dumps(messages)}


def generate_config(
    max_tokens: int = 64, extra_body: dict[str, Any] | None = None, **changes: Any
) -> GenerateConfig:
    fields = {"temperature": 0.0, "max_tokens": max_tokens, "concurrency": 8}
    steering = {"thinking_token_budget": BUDGET, "min_tokens": min(MIN_TOKENS, max_tokens), "logit_bias": BIAS}
    return GenerateConfig(**(fields | changes), extra_body=steering | (extra_body or {}))


async def test_a_verifier_that_thinks(thinker: Path, token: str, tmp_path: Path) -> None:
    vllm = VllmConfig(
        environment={"VLLM_CPU_KVCACHE_SPACE": "1"},
        max_model_len=512,
        enforce_eager=True,
        reasoning_parser="deepseek_r1",
        startup_timeout_seconds=400,
    )
    server = VllmServer(vllm, model_path=thinker, served_name="thinker", log_path=tmp_path / "log", token=token)
    async with server, CompletionClient.to(server, generate_config()) as client:
        await _check_capture(client, thinker)
        await _check_rebuilding(client, thinker)
        await _check_turns(client)


async def _check_capture(client: CompletionClient, thinker: Path) -> None:
    """Every row holds the thought, the answer, and the very ids that both were decoded from."""
    tokenizer = AutoTokenizer.from_pretrained(thinker)
    end = tokenizer.convert_tokens_to_ids("</think>")
    rows = await generate_rows(client, [prompt(question) for question in QUESTIONS], generate_config())
    assert {row["status"] for row in rows} <= {"ok", "truncated"}
    assert {row["token_source"] for row in rows} == {"server"}
    for row in rows:
        ids, num_prompt = row["input_ids"], row["num_prompt_tokens"]
        assert row["loss_mask"] == [False] * num_prompt + [True] * row["num_completion_tokens"]
        assert tokenizer.decode(ids[:num_prompt]).endswith(OPENING)
        completion = ids[num_prompt:]
        assert completion.count(end) == 1
        assert BUDGET / 2 < completion.index(end) <= BUDGET
        ending = "<|im_end|>" if row["status"] == "ok" else ""
        assert row["reasoning"]
        assert row["content"]
        assert tokenizer.decode(completion) == f"{row['reasoning']}</think>{row['content']}{ending}"
        reply = json.loads(row["messages"])[-1]
        assert (reply["reasoning"], reply["content"]) == (row["reasoning"], row["content"])


async def _check_rebuilding(client: CompletionClient, thinker: Path) -> None:
    """Ids made of the text are the server's own, wherever they are as many."""
    config = generate_config(token_source="reconstructed")
    rebuilder = Reconstructor.load(VerifierConfig(model=str(thinker)), config)
    num_equal = num_refused = 0
    for question, temperature, max_tokens, thinking in itertools.product(
        QUESTIONS,
        (0.0, 0.7),
        (8, 64),
        (True, False),  # 8 cuts the thought, 64 the answer if anything
    ):
        kwargs = {"chat_template_kwargs": {"thinking": thinking}}
        asked = generate_config(temperature=temperature, max_tokens=max_tokens, extra_body=kwargs)
        messages, sampling = [{"role": "user", "content": question}], asked.sampling(prompt(question))
        exact = await client.complete(messages, sampling, seed=1)
        if thinking:
            assert (exact.content is None) == (max_tokens < BUDGET)
        try:
            rebuilt = rebuilder.rebuild(messages, sampling, MissingTokenIds("as if it had sent none", exact))
        except RowFailure as failure:  # sampled text need not be split as the tokenizer splits it
            num_refused += 1
            print(f"{failure.reason}: {exact.reasoning!r} {exact.content!r}")
            continue
        assert rebuilt.prompt_token_ids == exact.prompt_token_ids
        assert rebuilt.completion_token_ids == exact.completion_token_ids
        num_equal += 1
    print(f"rebuilt_equal={num_equal} refused={num_refused}")
    assert num_equal >= 0.8 * (num_equal + num_refused)
    # The whole way: nothing is asked for, the rows say so, and nobody's count is off.
    prompts = [prompt(question) for question in QUESTIONS]
    rows = await generate_rows(client, prompts, config, rebuilder=rebuilder)
    made = [row for row in rows if row["status"] != "failed"]
    assert len(made) >= 0.8 * len(rows)
    assert {row["token_source"] for row in made} == {"reconstructed"}
    bare = await generate_rows(client, prompts[:1], config)
    assert bare[0]["error"].startswith("the server sent no prompt_token_ids")


async def _check_turns(client: CompletionClient) -> None:
    """The second turn is asked after the verifier's own first reply, thought included; the template decides on it."""
    asked = [prompt(question, "Please say it again in other words.") for question in QUESTIONS]
    for kwargs, is_kept in (({}, False), ({"keep": True}, True)):
        config = generate_config(max_tokens=150, loss_on="all_turns", extra_body={"chat_template_kwargs": kwargs})
        rows = await generate_rows(client, asked, config)
        assert {row["status"] for row in rows} <= {"ok", "truncated"}
        whole = [row for row in rows if len(json.loads(row["messages"])) == 4]
        assert whole, "every first reply was cut; ask for more tokens"
        found = [row for row in whole if "num_turns_not_found" not in row]
        print(f"keep={is_kept}: {len(found)} of {len(whole)} first replies stand in the second prompt")
        for row in whole:
            assert (sum(row["loss_mask"]) > row["num_completion_tokens"]) == (row in found)
        if is_kept:
            assert len(found) >= 0.8 * len(whole)
        else:
            assert not found
