"""From prompts to responses: each prompt through the verifier by itself, every prompt giving exactly one row."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

from pydantic import Field, field_validator

from infra.completion_client import ClientConfig, CompletionClient
from infra.config import CONTENT
from infra.errors import ServerError
from infra.responses import Row, RowFailure, response_row

__all__ = ["ClientConfig", "CompletionClient", "GenerateConfig", "PartialShard", "generate_rows"]

logger = logging.getLogger("draftsmith.inference")

# A row that was in flight each time when so many servers died may be what kills them: it is not asked again. Not
# fewer: servers die of other causes too, with all that they had in flight.
MAX_SERVER_LOSSES = 3
# Fields of the request that the client sets itself.
FIXED_FIELDS = frozenset({"model", "messages", "n", "stream", "return_token_ids", "seed"})


class GenerateConfig(ClientConfig):
    """How the verifier is asked for its responses."""

    temperature: Annotated[float, CONTENT, Field(ge=0, le=2)] = 0.7
    """Sampling temperature; 0 is greedy."""
    top_p: Annotated[float, CONTENT, Field(gt=0, le=1)] = 1.0
    """Nucleus sampling: the share of probability that is kept."""
    max_tokens: Annotated[int, CONTENT, Field(ge=1)] = 8192
    """Most completion tokens of a response, thinking included; one that reaches it is `truncated`."""
    seed: Annotated[int | None, CONTENT] = 0
    """Each sample's own seed is a hash of this and its id. None sends no seed, for servers that take none."""
    extra_body: Annotated[dict[str, Any], CONTENT] = Field(default={})
    """Further request fields by vLLM's names: top_k, min_p, repetition_penalty, chat_template_kwargs."""
    max_failed_share: Annotated[float, Field(ge=0, le=1)] = 0.02
    """The stage fails when more than this share of its rows failed."""

    @field_validator("extra_body")
    @classmethod
    def _no_fixed_fields(cls, extra_body: dict[str, Any]) -> dict[str, Any]:
        taken = sorted((FIXED_FIELDS | cls.model_fields.keys()).intersection(extra_body))
        if taken:
            raise ValueError(f"{', '.join(taken)} cannot be set in extra_body")
        return extra_body

    def sampling(self, prompt_row: Mapping[str, Any]) -> dict[str, Any]:
        """Request fields for one prompt: this config's, overridden by the prompt's own `sampling`."""
        shared = {"temperature": self.temperature, "top_p": self.top_p, "max_tokens": self.max_tokens}
        own: dict[str, Any] = json.loads(prompt_row["sampling"])
        return shared | self.extra_body | own

    def sample_seed(self, sample_id: str) -> int | None:
        """A sample's own seed, 31 bits: the same for the same sample, whatever else is in flight."""
        if self.seed is None:
            return None
        return int.from_bytes(hashlib.sha256(f"{self.seed}/{sample_id}".encode()).digest()[:4], "big") >> 1


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
        finish(await _response(client, prompt_row, config))

    try:
        async with asyncio.TaskGroup() as group, client.turn:
            for prompt_row in prompt_rows:
                sample_id = prompt_row["sample_id"]
                if sample_id in partial.rows:
                    continue
                if partial.server_losses[sample_id] >= MAX_SERVER_LOSSES:
                    finish(_failed_row(prompt_row, _lost_with_servers(config)))
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


async def _response(client: CompletionClient, prompt_row: Row, config: GenerateConfig) -> Row:
    """One row, failed or not."""
    sample_id = prompt_row["sample_id"]
    try:
        messages, sampling = json.loads(prompt_row["messages"]), config.sampling(prompt_row)
    except ValueError as error:
        reason = f"the prompt's messages or sampling are no JSON: {error}"
        return _failed_row(prompt_row, RowFailure(reason, temperature=config.temperature))
    try:
        completion = await client.complete_in_slot(
            messages, sampling, config.sample_seed(sample_id), label=sample_id
        )
    except RowFailure as failure:
        return _failed_row(prompt_row, failure)
    return response_row(prompt_row, completion)


def _failed_row(prompt_row: Row, failure: RowFailure) -> Row:
    logger.warning("%s becomes a failed row: %s", prompt_row["sample_id"], failure.reason)
    return response_row(prompt_row, failure)


def _lost_with_servers(config: GenerateConfig) -> RowFailure:
    return RowFailure(f"in flight when {MAX_SERVER_LOSSES} servers were lost", temperature=config.temperature)
