"""One prompt through the server, turn by turn, and the row of responses that comes of it.

A prompt has several turns where a user message stands directly after another one, [system, user, user, user]: the
answers in between are the verifier's to give. The turns are asked one after another, each with the replies given
so far, and the conversation is one row, that of its last turn. It ends early, as what it then is, with a reply
that was cut by the limit (`truncated`) or that calls a tool (there is nobody to answer the call).
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from infra.generation.config import GenerateConfig
from infra.generation.responses import (
    Completion,
    MissingTokenIds,
    Row,
    RowFailure,
    answered_row,
    assistant_message,
    failed_row,
)

logger = logging.getLogger("draftsmith.conversations")

Message = dict[str, Any]


class Asker(Protocol):
    """What holds a slot of the window: `infra.generation.completion_client.CompletionClient`."""

    async def complete_in_slot(
        self, messages: Sequence[Message], sampling: Mapping[str, Any], seed: int | None = None, *, label: str
    ) -> Completion:
        """One completion. Raises RowFailure or ServerError."""


class Rebuilder(Protocol):
    """What makes token ids for an answer that has none: `infra.generation.reconstruct.Reconstructor`."""

    def rebuild(
        self, messages: Sequence[Message], sampling: Mapping[str, Any], failure: MissingTokenIds
    ) -> Completion:
        """The answer with ids. Raises RowFailure."""


async def answer_prompt(
    asker: Asker, prompt_row: Row, config: GenerateConfig, rebuilder: Rebuilder | None = None
) -> Row:
    """The row of one prompt, failed or not; its turns share the caller's slot.

    Args:
        rebuilder: for `token_source: reconstructed`. Without one, an answer without ids is a failed row.

    Raises:
        ServerError: the server is gone; nothing of an unfinished conversation is kept.
    """
    sample_id = prompt_row["sample_id"]
    try:
        turns = split_turns(json.loads(prompt_row["messages"]))
        sampling = config.sampling(prompt_row)
    except ValueError as error:
        reason = f"the prompt's messages or sampling are no JSON: {error}"
        return reported(failed_row(prompt_row, RowFailure(reason, temperature=config.temperature)))
    said: list[Message] = []
    completions: list[Completion] = []
    for number, turn in enumerate(turns, start=1):
        said += turn
        which = f"turn {number} of {len(turns)}" if len(turns) > 1 else ""
        # The first turn has the seed of a prompt with one turn.
        seed = config.sample_seed(sample_id if number == 1 else f"{sample_id}/{number}")
        try:
            completion = await _ask(asker, said, sampling, seed, f"{sample_id} {which}".strip(), rebuilder)
        except RowFailure as failure:
            if which:
                failure.reason = f"{which}: {failure.reason}"
            return reported(failed_row(prompt_row, failure))
        said.append(assistant_message(completion))
        completions.append(completion)
        if completion.finish_reason == "length" or completion.tool_calls is not None:
            break
    return answered_row(prompt_row, said, completions, all_turns=config.loss_on == "all_turns")


def split_turns(messages: Sequence[Message]) -> list[list[Message]]:
    """The messages that are added for each turn: a user message directly after another begins a new one."""
    turns: list[list[Message]] = [[]]
    for before, message in zip([None, *messages], messages, strict=False):
        if before is not None and before["role"] == message["role"] == "user":
            turns.append([])
        turns[-1].append(message)
    return turns


def reported(row: Row) -> Row:
    """A failed row, told to the log."""
    logger.warning("%s becomes a failed row: %s", row["sample_id"], row["error"])
    return row


async def _ask(
    asker: Asker,
    said: Sequence[Message],
    sampling: Mapping[str, Any],
    seed: int | None,
    label: str,
    rebuilder: Rebuilder | None,
) -> Completion:
    messages = [_as_sent(message) for message in said]
    try:
        return await asker.complete_in_slot(messages, sampling, seed, label=label)
    except MissingTokenIds as failure:
        if rebuilder is None:
            raise
        return rebuilder.rebuild(messages, sampling, failure)


def _as_sent(message: Message) -> Message:
    """A reply as the next turn's request holds it: thinking under both of its names, and a text even where it was
    null, which many templates cannot add to a string."""
    if message["role"] != "assistant" or "reasoning" not in message:
        return message
    return {**message, "reasoning_content": message["reasoning"], "content": message["content"] or ""}
