"""Token ids for answers of servers that send none: made again of the chat template and of the answer's text.

Only where `generate.token_source: reconstructed` asks for it, because the ids that the verifier wrote need not be
those its tokenizer makes of the same text, parsers may strip blanks, and calls of tools are not kept as written. So
a rebuilt sequence counts only if the prompt and the completion have as many tokens as the server counted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from infra.errors import InputError
from infra.generation.config import GenerateConfig
from infra.generation.responses import (
    TOKEN_SOURCE_RECONSTRUCTED,
    Answer,
    Completion,
    MissingTokenIds,
    RowFailure,
    with_ids,
)
from infra.verifiers.verifier import VerifierConfig, tokenizer_origin

THINK_START, THINK_END = "<think>", "</think>"
# Fields of the request that the server hands to the chat template.
_TEMPLATE_FIELDS = ("chat_template", "documents", "reasoning_effort", "tools")


class _Unclear(Exception):
    """The answer does not say which tokens it was made of."""


class Reconstructor:
    """Makes the ids of an answer by the verifier's tokenizer.

    Args:
        tokenizer: of transformers, with a chat template.
        think_start_token_id: opens the thinking; by default what the tokenizer calls `<think>`.
        think_end_token_id: closes it; by default what the tokenizer calls `</think>`.
        end_token_ids: tokens that end a turn, by the model's generation config; may be empty.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        think_start_token_id: int | None = None,
        think_end_token_id: int | None = None,
        end_token_ids: Sequence[int] = (),
    ) -> None:
        vocabulary = tokenizer.get_vocab()
        self._tokenizer = tokenizer
        self._start = vocabulary.get(THINK_START) if think_start_token_id is None else think_start_token_id
        self._end = vocabulary.get(THINK_END) if think_end_token_id is None else think_end_token_id
        self._end_token_ids = frozenset(end_token_ids)

    @classmethod
    def load(cls, verifier: VerifierConfig, config: GenerateConfig) -> Reconstructor:
        """The one of a verifier. Blocks for seconds.

        Effects: fetches the tokenizer (not the weights) from the hub, or converts a packaged verifier. Code that
        comes with the tokenizer runs only where `verifier.trust_remote_code` allows it.

        Raises:
            InputError: the tokenizer cannot be loaded, or has no chat template.
        """
        from transformers import AutoTokenizer

        name, revision = tokenizer_origin(verifier)
        try:
            tokenizer = AutoTokenizer.from_pretrained(
                name, revision=revision, trust_remote_code=verifier.trust_remote_code
            )
        except (OSError, ValueError, KeyError, ImportError) as error:
            raise InputError("verifier.model", f"its tokenizer cannot be loaded: {error}") from error
        if not tokenizer.chat_template:
            raise InputError("generate.token_source", "`reconstructed` needs a verifier with a chat template")
        return cls(
            tokenizer,
            think_start_token_id=config.think_start_token_id,
            think_end_token_id=config.think_end_token_id,
            end_token_ids=_end_token_ids(name, revision),
        )

    def rebuild(
        self, messages: Sequence[Mapping[str, Any]], sampling: Mapping[str, Any], failure: MissingTokenIds
    ) -> Completion:
        """The answer with ids.

        Args:
            messages: the conversation as it was sent.
            sampling: the other fields of the request.
            failure: holds the answer.

        Raises:
            RowFailure: the answer can be read in more than one way, or the server counted other numbers of tokens.
        """
        answer = failure.answer
        try:
            prompt, opening = self._render(messages, sampling)
            prompt_ids = self._ids(prompt)
            completion_ids = self._completion_ids(answer, sampling, opening)
            _check_counts("prompt", len(prompt_ids), answer.num_prompt_tokens)
            _check_counts("completion", len(completion_ids), answer.num_completion_tokens)
        except _Unclear as unclear:
            reason = f"the token ids cannot be reconstructed: {unclear}"
            raise RowFailure(
                reason, temperature=answer.temperature, latency_seconds=answer.latency_seconds
            ) from unclear
        return with_ids(answer, prompt_ids, completion_ids, TOKEN_SOURCE_RECONSTRUCTED)

    def _render(self, messages: Sequence[Mapping[str, Any]], sampling: Mapping[str, Any]) -> tuple[str, str]:
        """The prompt's text, and the end of it by which the template begins the verifier's turn."""
        given = {name: sampling[name] for name in _TEMPLATE_FIELDS if name in sampling}
        given |= sampling.get("chat_template_kwargs") or {}
        try:
            said, prompt = (
                self._tokenizer.apply_chat_template(
                    list(messages), tokenize=False, add_generation_prompt=begun, **given
                )
                for begun in (False, True)
            )
        except Exception as error:  # a template is a program of the model's maker and raises what it likes
            raise _Unclear(f"the chat template fails: {error!r}") from error
        return prompt, prompt[len(said) :] if prompt.startswith(said) else ""

    def _completion_ids(self, answer: Answer, sampling: Mapping[str, Any], opening: str) -> list[int]:
        """What the model wrote, as far as the answer tells: [<think>] thinking </think> content [end].

        Where the template's `opening` of the turn holds a think token, the model writes no <think>: the thinking is
        open already, or closed already (a parser may call that answer thinking all the same). Thinking that the
        limit cut has no </think>.
        """
        if answer.tool_calls is not None:
            raise _Unclear("calls of tools are not kept as they were written")
        marks = [token for token in self._ids(opening) if token in (self._start, self._end)]
        is_open, is_closed = marks[-1:] == [self._start], marks[-1:] == [self._end]
        cut = answer.finish_reason == "length"
        content_ids = self._ids(answer.content or "")
        ids: list[int] = []
        if answer.reasoning is not None:
            if not marks:
                ids.append(self._think_token(self._start, "start"))
            ids += self._ids(answer.reasoning)
            if content_ids or not (cut or is_closed):
                ids.append(self._think_token(self._end, "end"))
        elif is_open and not cut and self._end not in content_ids:  # closed at once: no thought to show
            ids.append(self._think_token(self._end, "end"))
        ids += content_ids
        return ids if cut else [*ids, self._ending(answer, sampling)]

    def _think_token(self, token: int | None, name: str) -> int:
        if token is None:
            raise _Unclear(f"the tokenizer names no think tokens; set generate.think_{name}_token_id")
        return token

    def _ending(self, answer: Answer, sampling: Mapping[str, Any]) -> int:
        """The token that ended the turn."""
        if isinstance(answer.stopped_by, int):
            return answer.stopped_by
        if isinstance(answer.stopped_by, str) or sampling.get("stop"):
            raise _Unclear("a stop string may have cut the text")
        end: int | None = self._tokenizer.eos_token_id
        if end is None or (self._end_token_ids and end not in self._end_token_ids):
            raise _Unclear("the server does not say which token ended the turn")
        return end

    def _ids(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return ids


def _check_counts(what: str, num_rebuilt: int, num_counted: int) -> None:
    if num_rebuilt != num_counted:
        raise _Unclear(f"the {what} has {num_rebuilt} tokens, the server counted {num_counted}")


def _end_token_ids(name: str, revision: str | None) -> list[int]:
    """`eos_token_id` of generation_config.json, one or several; none where there is no such file."""
    from transformers import GenerationConfig

    try:
        declared = GenerationConfig.from_pretrained(name, revision=revision).eos_token_id
    except OSError:
        return []
    return [declared] if isinstance(declared, int) else list(declared or [])
