"""How a draft is measured against its verifier: what is run, in which order, and what one run yields.

Servers for all methods stand side by side; the measurements are taken in interleaved rounds, so that a machine
that slows down for a minute slows every method of that round. `infra.evaluation_results` turns the measurements
into rows and intervals. This module starts no server and knows no store.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Protocol, Self

from pydantic import Field, PositiveInt, model_validator

from infra.config import CONTENT, Config
from infra.conversations import split_turns
from infra.errors import DraftsmithError, InfrastructureError, InputError, ServerError, StageFailed
from infra.vllm_server import SpeculationCounters

log = logging.getLogger("draftsmith.evaluation")

Method = Literal["none", "ngram", "eagle3"]
BASELINE: Method = "none"

WARMUP_MAX_TOKENS = 32
COUNTER_READS = 50
COUNTER_INTERVAL_SECONDS = 0.1


class EvaluateConfig(Config):
    """What is measured. Speed depends on the load, so concurrency is content here, unlike elsewhere."""

    methods: Annotated[tuple[Method, ...], CONTENT] = ("none", "ngram", "eagle3")
    """Ways of decoding to compare. `none` is needed: every speed-up is a ratio to it."""

    num_speculative_tokens: Annotated[int, CONTENT, Field(ge=1, le=32)] = 3
    """Tokens drafted per step by ngram and eagle3 (k)."""

    concurrency: Annotated[tuple[PositiveInt, ...], CONTENT, Field(min_length=1)] = (1, 8)
    """Requests in flight; one series of measurements for each."""

    num_prompts: Annotated[tuple[PositiveInt, ...], CONTENT, Field(min_length=1)] = (16, 32)
    """Held-out prompts run in each round, one number per entry of `concurrency` and no smaller than it."""

    rounds: Annotated[int, CONTENT, Field(ge=1)] = 3
    """How often every method is measured. With one round the intervals know nothing of the machine's noise."""

    max_tokens: Annotated[int, CONTENT, Field(ge=1)] = 256
    """Limit of each answer."""

    temperature: Annotated[float, CONTENT, Field(ge=0.0, le=2.0)] = 0.0
    """0 is greedy. On CPU, vLLM's sampling under a speculative method is wrong above 0."""

    warmup_requests: Annotated[int, CONTENT, Field(ge=0)] = 2
    """Requests sent before each measurement and not counted."""

    prompt_lookup_max: Annotated[int, CONTENT, Field(ge=1)] = 4
    """ngram: longest run of tokens that is looked up in the text so far."""

    prompt_lookup_min: Annotated[int, CONTENT, Field(ge=1)] = 2
    """ngram: shortest such run."""

    by_dataset: Annotated[bool, CONTENT] = False
    """Measure every dataset of held-out prompts by itself (as many times longer) instead of their mixture."""

    max_failed_share: Annotated[float, CONTENT, Field(ge=0.0, lt=1.0)] = 0.02
    """Share of requests that may fail in a measurement before it is refused."""

    request_timeout_seconds: Annotated[float, Field(gt=0)] = 1800.0
    """Longest wait for one answer."""

    settle_seconds: Annotated[float, Field(ge=0)] = 2.0
    """Least time, warm-up included, between two measurements: the last server's workers stop spinning in it."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if BASELINE not in self.methods:
            raise ValueError("methods must contain 'none': every speed-up is a ratio to it")
        for name in ("methods", "concurrency"):
            values = getattr(self, name)
            if len(set(values)) != len(values):
                raise ValueError(f"{name} names an entry twice: {list(values)}")
        if len(self.num_prompts) != len(self.concurrency):
            raise ValueError("num_prompts needs one number per entry of concurrency")
        for streams, prompts in zip(self.concurrency, self.num_prompts, strict=True):
            if prompts < streams:
                raise ValueError(f"num_prompts: {prompts} prompts cannot keep {streams} requests in flight")
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise ValueError("prompt_lookup_min must not exceed prompt_lookup_max")
        return self


def speculative_config(method: Method, config: EvaluateConfig, draft_path: str | None) -> dict[str, Any] | None:
    """vLLM's `speculative_config` for a method; None for `none`.

    Args:
        draft_path: local folder of the exported speculator; only eagle3 needs it.

    Raises:
        InputError: eagle3 without a draft.
    """
    if method == "none":
        return None
    if method == "ngram":
        return {
            "method": "ngram",
            "num_speculative_tokens": config.num_speculative_tokens,
            "prompt_lookup_max": config.prompt_lookup_max,
            "prompt_lookup_min": config.prompt_lookup_min,
        }
    if not draft_path:
        raise InputError("evaluate.methods", "eagle3 needs an exported draft; leave it out to measure without one")
    return {"method": "eagle3", "model": draft_path, "num_speculative_tokens": config.num_speculative_tokens}


@dataclass(frozen=True)
class EvaluationPrompt:
    """One held-out prompt, ready to send."""

    sample_id: str
    dataset: str
    messages: list[dict[str, Any]]


def select_prompts(rows: Iterable[Mapping[str, Any]], config: EvaluateConfig) -> dict[str, list[EvaluationPrompt]]:
    """The held-out prompts to measure with, by dataset label, in a fixed order.

    Rows of `schemas.PROMPTS` go in; training rows and further samples of one prompt are left out. Unless
    `by_dataset`, the datasets take turns in one list, labelled with their names joined by `+`, so that its first
    n prompts (`num_prompts`) are a fair mixture for every n.

    Raises:
        InputError: fewer held-out prompts than the highest concurrency.
    """
    groups: dict[str, list[EvaluationPrompt]] = {}
    seen: set[str] = set()
    for row in rows:
        if row["split"] != "heldout" or row["messages"] in seen:
            continue
        seen.add(row["messages"])
        # Of a conversation the first turn: the next ones stand on replies that each method would have to give.
        messages = split_turns(json.loads(row["messages"]))[0]
        prompt = EvaluationPrompt(row["sample_id"], row["dataset"], messages)
        groups.setdefault(prompt.dataset, []).append(prompt)
    if groups and not config.by_dataset:
        groups = {"+".join(sorted(groups)): list(_take_turns([groups[name] for name in sorted(groups)]))}
    needed, wanted = max(config.concurrency), max(config.num_prompts)
    if not groups:
        raise InputError("prompts", f"no held-out prompt to evaluate on; at least {needed} are needed")
    for dataset, prompts in groups.items():
        if len(prompts) < needed:
            raise InputError(
                "evaluate.concurrency",
                f"{dataset} has {len(prompts)} held-out prompts, which cannot keep {needed} requests in flight",
            )
        if len(prompts) < wanted:
            log.warning("%s has %d held-out prompts of %d wanted: all are used", dataset, len(prompts), wanted)
    return {dataset: prompts[:wanted] for dataset, prompts in groups.items()}


def _take_turns(lists: Sequence[Sequence[EvaluationPrompt]]) -> Iterator[EvaluationPrompt]:
    for index in range(max(len(items) for items in lists)):
        yield from (items[index] for items in lists if index < len(items))


@dataclass(frozen=True)
class Slot:
    """One measurement to take: which method, under which load, in which round (from 0)."""

    round_index: int
    concurrency: int
    num_prompts: int
    method: Method


def measurement_order(config: EvaluateConfig) -> list[Slot]:
    """Every measurement of one dataset, rounds interleaved.

    The methods of a round and load stand next to each other, and the one that begins changes with each round, so
    that neither drift nor place in the order favours a method.
    """
    slots = []
    for round_index in range(config.rounds):
        shift = round_index % len(config.methods)
        methods = config.methods[shift:] + config.methods[:shift]
        for concurrency, num_prompts in zip(config.concurrency, config.num_prompts, strict=True):
            slots += [Slot(round_index, concurrency, num_prompts, method) for method in methods]
    return slots


@dataclass(frozen=True)
class RequestResult:
    """One answered (or failed) request. `latency_seconds` runs from sending to the whole answer."""

    sample_id: str
    latency_seconds: float
    completion_token_ids: tuple[int, ...]
    error: str | None = None


@dataclass(frozen=True)
class Measurement:
    """One method under one load in one round. `requests` are in the order of the prompts."""

    method: Method
    dataset: str
    concurrency: int
    round_index: int
    wall_seconds: float
    counters: SpeculationCounters
    requests: tuple[RequestResult, ...]

    @property
    def num_requests(self) -> int:
        """Requests that were answered."""
        return sum(request.error is None for request in self.requests)

    @property
    def output_tokens(self) -> int:
        return sum(len(request.completion_token_ids) for request in self.requests)

    @property
    def output_tokens_per_second(self) -> float:
        return self.output_tokens / self.wall_seconds


class CompletionLike(Protocol):
    """The part of `infra.inference.Completion` that is measured."""

    @property
    def completion_token_ids(self) -> Sequence[int]: ...


class CompletionClientLike(Protocol):
    """The part of `infra.inference.CompletionClient` that is used here."""

    async def complete(
        self, messages: list[dict[str, Any]], sampling: dict[str, Any], seed: int | None = None
    ) -> CompletionLike: ...


async def measure(
    client: CompletionClientLike,
    prompts: Sequence[EvaluationPrompt],
    slot: Slot,
    config: EvaluateConfig,
    read_counters: Callable[[], Awaitable[SpeculationCounters]],
    *,
    dataset: str,
) -> Measurement:
    """Run the slot's prompts through one server and take what it counted, by difference.

    The warm-up, the pause and the reading of counters lie outside the timed window. No seed is sent: vLLM's
    engine dies of one under a speculative method on CPU, and greedy decoding needs none.

    Raises:
        InfrastructureError: the server failed; the measurement is worthless and may be taken again.
        StageFailed: more than `max_failed_share` of the requests were refused.
    """
    sampling = {"temperature": config.temperature, "max_tokens": config.max_tokens}
    chosen = prompts[: slot.num_prompts]
    warmup = [chosen[index % len(chosen)] for index in range(config.warmup_requests)]
    settled = time.perf_counter() + config.settle_seconds
    short = sampling | {"max_tokens": min(config.max_tokens, WARMUP_MAX_TOKENS)}
    await _run_requests(client, warmup, short, slot.concurrency)
    await asyncio.sleep(max(0.0, settled - time.perf_counter()))
    before = await settled_counters(read_counters)
    started = time.perf_counter()
    requests = await _run_requests(client, chosen, sampling, slot.concurrency)
    wall_seconds = time.perf_counter() - started
    counters = await settled_counters(read_counters) - before
    failed = [request for request in requests if request.error is not None]
    if len(failed) > config.max_failed_share * len(requests):
        raise StageFailed(
            f"{slot.method} with {slot.concurrency} in flight on {dataset}: {len(failed)} of {len(requests)} "
            f"requests failed, first {failed[0].sample_id}: {failed[0].error}"
        )
    return Measurement(slot.method, dataset, slot.concurrency, slot.round_index, wall_seconds, counters, requests)


async def _run_requests(
    client: CompletionClientLike, prompts: Sequence[EvaluationPrompt], sampling: dict[str, Any], concurrency: int
) -> tuple[RequestResult, ...]:
    """Send the prompts with `concurrency` in flight; the results are in the order of the prompts."""
    results: list[RequestResult | None] = [None] * len(prompts)
    waiting = iter(enumerate(prompts))

    async def stream() -> None:
        for index, prompt in waiting:
            results[index] = await _request(client, prompt, sampling)

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(min(concurrency, len(prompts))):
                group.create_task(stream())
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from failures
    return tuple(result for result in results if result is not None)


async def _request(
    client: CompletionClientLike, prompt: EvaluationPrompt, sampling: dict[str, Any]
) -> RequestResult:
    started = time.perf_counter()
    try:
        completion = await client.complete(prompt.messages, sampling)
    except InfrastructureError:
        raise
    except DraftsmithError as error:  # this request is refused (too long, say), whoever asks and however often
        return RequestResult(prompt.sample_id, time.perf_counter() - started, (), str(error))
    return RequestResult(prompt.sample_id, time.perf_counter() - started, tuple(completion.completion_token_ids))


async def settled_counters(
    read_counters: Callable[[], Awaitable[SpeculationCounters]],
) -> SpeculationCounters:
    """The counters once two readings agree: vLLM books its last step a moment after the answer is out.

    Raises:
        ServerError: they keep moving, so somebody else uses the server and no difference can be trusted.
    """
    previous = await read_counters()
    for _ in range(COUNTER_READS):
        await asyncio.sleep(COUNTER_INTERVAL_SECONDS)
        current = await read_counters()
        if current == previous:
            return current
        previous = current
    raise ServerError("the server's speculation counters keep moving while no request of ours runs")
