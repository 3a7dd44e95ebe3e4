"""From prompts to responses: each prompt through the verifier by itself, every prompt giving exactly one row."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from infra.completion_client import ClientConfig, CompletionClient
from infra.conversations import Rebuilder, answer_prompt, reported
from infra.errors import ServerError
from infra.generation_config import GenerateConfig
from infra.responses import Row, RowFailure, failed_row

__all__ = ["ClientConfig", "CompletionClient", "GenerateConfig", "PartialShard", "generate_rows"]

# A row that was in flight each time when so many servers died may be what kills them: it is not asked again. Not
# fewer: servers die of other causes too, with all that they had in flight.
MAX_SERVER_LOSSES = 3


@dataclass
class PartialShard:
    """What earlier tries of a shard left in this process, so that a new server is asked for the rest only."""

    rows: dict[str, Row] = field(default_factory=dict)
    """Finished rows by sample id."""
    server_losses: Counter[str] = field(default_factory=Counter)
    """How often a sample was in flight when its server went, by sample id."""


async def generate_rows(
    client: CompletionClient,
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
        partial: filled as rows are finished. Given again after a `ServerError`, with a client of the new server,
            only what is missing is asked; `on_row` is not called again for what is there.
        rebuilder: makes the ids of answers that have none, for `token_source: reconstructed`.

    Raises:
        ServerError: the server is gone.
        Anything `on_row` raises.
    """
    partial = PartialShard() if partial is None else partial
    sent: set[str] = set()

    def finish(row: Row) -> None:
        partial.rows[row["sample_id"]] = row
        if on_row is not None:
            on_row(row)

    async def make(prompt_row: Row) -> None:
        finish(await answer_prompt(client, prompt_row, config, rebuilder))

    try:
        async with asyncio.TaskGroup() as group, client.turn:
            for prompt_row in prompt_rows:
                sample_id = prompt_row["sample_id"]
                if sample_id in partial.rows:
                    continue
                if partial.server_losses[sample_id] >= MAX_SERVER_LOSSES:
                    finish(reported(failed_row(prompt_row, _lost_with_servers(config))))
                    continue
                await client.window.acquire()
                sent.add(sample_id)
                # The callback, not the task, frees the slot: a task cancelled before it began runs no `finally`.
                group.create_task(make(prompt_row)).add_done_callback(lambda _: client.window.release())
    except ExceptionGroup as failures:
        error = failures.exceptions[0]
        if isinstance(error, ServerError):
            partial.server_losses.update(sent - partial.rows.keys())
        raise error from None
    return [partial.rows[prompt_row["sample_id"]] for prompt_row in prompt_rows]


def _lost_with_servers(config: GenerateConfig) -> RowFailure:
    return RowFailure(f"in flight when {MAX_SERVER_LOSSES} servers were lost", temperature=config.temperature)
