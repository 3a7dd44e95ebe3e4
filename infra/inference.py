"""From prompts to responses: each prompt through the verifier by itself, every prompt giving exactly one row."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from infra.generation.completion_client import ClientConfig, CompletionClient
from infra.generation.config import GenerateConfig
from infra.generation.conversations import Asker, Rebuilder, answer_prompt
from infra.generation.responses import Row

__all__ = ["ClientConfig", "CompletionClient", "GenerateConfig", "PartialShard", "generate_rows"]


class WindowedAsker(Asker, Protocol):
    """What shards of prompts share: `CompletionClient` of one server, `serving.pool.ServerPool` of several."""

    window: asyncio.Semaphore
    """The slots of the requests in flight."""
    turn: asyncio.Lock
    """Held by the shard whose rows are taking slots, so that shards are finished in their order."""


@dataclass
class PartialShard:
    """What earlier tries of a shard left in this process, so that the next one asks for the rest only."""

    rows: dict[str, Row] = field(default_factory=dict)
    """Finished rows by sample id."""


async def generate_rows(
    client: WindowedAsker,
    prompt_rows: Sequence[Row],
    config: GenerateConfig,
    on_row: Callable[[Row], None] | None = None,
    partial: PartialShard | None = None,
    rebuilder: Rebuilder | None = None,
) -> list[Row]:
    """The responses to the prompts of one shard, in their order: rows of `schemas.RESPONSES`.

    Any number of shards may run at once on one client: they share its window, and a shard's prompts take slots only
    when every prompt of the shards that came before has one. So the window stays full over the ends of shards, and
    there is a task for each slot, not for each prompt.

    Args:
        prompt_rows: rows of `schemas.PROMPTS` with distinct sample ids.
        on_row: called with each row as soon as it is there (`GenerationProgress.add`).
        partial: filled as rows are finished. Given again after an error, only what is missing is asked; `on_row` is
            not called again for what is there.
        rebuilder: makes the ids of answers that have none, for `token_source: reconstructed`.

    Raises:
        ServerError: the server is gone (of a pool: the last one).
        Anything `on_row` raises.
    """
    partial = PartialShard() if partial is None else partial

    def finish(row: Row) -> None:
        partial.rows[row["sample_id"]] = row
        if on_row is not None:
            on_row(row)

    async def make(prompt_row: Row) -> None:
        finish(await answer_prompt(client, prompt_row, config, rebuilder))

    try:
        async with asyncio.TaskGroup() as group, client.turn:
            for prompt_row in prompt_rows:
                if prompt_row["sample_id"] in partial.rows:
                    continue
                await client.window.acquire()
                # The callback, not the task, frees the slot: a task cancelled before it began runs no `finally`.
                group.create_task(make(prompt_row)).add_done_callback(lambda _: client.window.release())
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from None
    return [partial.rows[prompt_row["sample_id"]] for prompt_row in prompt_rows]
