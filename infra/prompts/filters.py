"""Which conversations are taken: by language, by length in tokens, and of equal ones the first."""

from __future__ import annotations

import functools
import sys
import unicodedata
from collections.abc import Callable
from typing import Any

from infra.errors import InputError
from infra.fingerprint import content_sha256
from infra.prompts.config import Language, PromptSource
from infra.prompts.files import Entry, UnusableRow
from infra.prompts.rows import SYSTEM_ROLES, Messages
from infra.verifiers.verifier import VerifierConfig, tokenizer_origin

CountTokens = Callable[[Messages], int]
"""Tokens that a conversation takes in the verifier's chat template, up to where its answer begins. Raises
UnusableRow when the template refuses the conversation."""

# Punctuation that changes what a formula or a line of code means.
_OPERATORS = frozenset("%&*/\\@#-")


def check_language(entry: Entry, language: Language | None) -> None:
    """Raises UnusableRow when the row's language is none of those asked for."""
    if language is None or not isinstance(entry, dict):
        return
    found = entry.get(language.column)
    wanted = {value.casefold() for value in language.values}
    if not isinstance(found, str) or found.strip().casefold() not in wanted:
        raise UnusableRow("language")


def check_length(messages: Messages, source: PromptSource, count_tokens: CountTokens) -> None:
    """Raises UnusableRow when the conversation has too few or too many tokens, or the template refuses it."""
    if source.turns == "all":
        # Many templates refuse user turns without answers between them: each is counted by itself.
        opening = [message for message in messages if message["role"] in SYSTEM_ROLES]
        users = messages[len(opening) :]
        num_tokens = count_tokens([*opening, users[0]]) + sum(count_tokens([user]) for user in users[1:])
    else:
        num_tokens = count_tokens(messages)
    if num_tokens < (source.min_prompt_tokens or 0):
        raise UnusableRow("too_short")
    if source.max_prompt_tokens is not None and num_tokens > source.max_prompt_tokens:
        raise UnusableRow("too_long")


def token_counter(verifier: VerifierConfig) -> CountTokens:
    """Counts by the verifier's own tokenizer and chat template.

    Effects: fetches the tokenizer (not the weights) from the hub, or converts a packaged verifier.

    Raises:
        InputError: the verifier has no tokenizer, or no chat template.
        InfrastructureError: the hub did not answer.
    """
    from jinja2 import TemplateError
    from transformers import AutoTokenizer

    name, revision = tokenizer_origin(verifier)
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(
            name, revision=revision, trust_remote_code=verifier.trust_remote_code
        )
    except (OSError, ValueError, KeyError) as error:
        brief = str(error).split("\n")[0]
        raise InputError("verifier.model", f"its tokenizer, to count prompts, cannot be loaded: {brief}") from error
    if not tokenizer.chat_template:
        raise InputError("verifier.model", "has no chat template, so the tokens of a prompt cannot be counted")

    def count(messages: Messages) -> int:
        try:
            text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        except (TemplateError, TypeError) as error:
            raise UnusableRow("template") from error
        return len(tokenizer(text, add_special_tokens=False)["input_ids"])

    return count


def folded_sha256(messages: Messages) -> str:
    """Hash of a conversation that case, sentence punctuation and blanks do not change; system messages aside."""
    said = [
        [message["role"], " ".join(_fold(message.get("content", "")).split())]
        for message in messages
        if message["role"] not in SYSTEM_ROLES
    ]
    return content_sha256(said)


def _fold(text: str) -> str:
    return unicodedata.normalize("NFKC", text).casefold().translate(_sentence_punctuation())


@functools.cache
def _sentence_punctuation() -> dict[int, str]:
    """A blank for every sign of punctuation; letters, digits, marks, symbols and operators stay."""
    every = (chr(point) for point in range(sys.maxunicode + 1))
    return {ord(sign): " " for sign in every if unicodedata.category(sign)[0] == "P" and sign not in _OPERATORS}
