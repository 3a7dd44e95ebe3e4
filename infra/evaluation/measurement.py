"""How a draft is measured against its verifier: what is run, in which order, and what one run yields.

Where the machine holds servers for all methods side by side, the measurements are taken in interleaved rounds, so
that a machine that slows down for a minute slows every method of that round. `infra.evaluation.results` turns the
measurements into rows and intervals. This module starts no server and knows no store.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from infra.errors import DraftsmithError, InfrastructureError, InputError, ServerError, StageFailed
from infra.evaluation.config import BASELINE, EAGLE3, GREEDILY, EvaluateConfig, Method, Sampling, Way
from infra.evaluation.prompts import EvaluationPrompt
from infra.vllm_metrics import RequestFigures, SpeculationCounters, request_figures

__all__ = ["BASELINE", "EvaluateConfig", "EvaluationPrompt", "Method"]

WARMUP_MAX_TOKENS = 32
COUNTER_READS = 50
COUNTER_INTERVAL_SECONDS = 0.1
MAX_BEYOND_SHARE = 0.05
TELLS_REQUESTS = (0, 32)


def speculative_config(way: Way, config: EvaluateConfig, draft_path: str | None = None) -> dict[str, Any] | None:
    """vLLM's `speculative_config` for a way of decoding; None for `none`.

    Args:
        draft_path: local folder of the exported speculator; only eagle3 needs it.

    Raises:
        InputError: eagle3 without a draft.
    """
    if way.method == "none":
        return None
    shared = {"method": way.method, "num_speculative_tokens": way.num_speculative_tokens}
    if way.method == "ngram":
        return {
            **shared,
            "prompt_lookup_max": config.prompt_lookup_max,
            "prompt_lookup_min": config.prompt_lookup_min,
        }
    if not draft_path:
        raise InputError("evaluate.methods", "eagle3 needs an exported draft; leave it out to measure without one")
    return {**shared, "model": draft_path}


def request_metrics_flags(way: Way, version: str) -> list[str]:
    """Flags by which vLLM says of each answer when its tokens came and what became of each draft.

    Its counters on /metrics are of the whole server, so they know neither contexts nor domains.

    Args:
        version: of vLLM; none for one that is older than those that are known to have the flags.
    """
    found = re.match(r"(\d+)\.(\d+)", version)
    if found is None or (int(found[1]), int(found[2])) < TELLS_REQUESTS:
        return []
    each_step = [] if way.method == BASELINE else ["--per-request-spec-decode-metrics=detailed"]
    return ["--enable-per-request-metrics", *each_step]


@dataclass(frozen=True)
class Slot:
    """One measurement to take: which way of decoding, under which sampling and load, in which round (from 0)."""

    round_index: int
    concurrency: int
    num_prompts: int
    way: Way
    sampling: Sampling = GREEDILY

    def __str__(self) -> str:
        sampled = "" if self.sampling.greedy else f" at {self.sampling.temperature:g}"
        return f"{self.way.name} x{self.concurrency}{sampled}"


def measurement_order(config: EvaluateConfig, ways: Sequence[Way], samplings: Sequence[Sampling]) -> list[Slot]:
    """Every measurement of one dataset, rounds interleaved.

    The ways of a round and load stand next to each other, and the one that begins changes with each round, so that
    neither drift nor place in the order favours one.

    Args:
        ways: those whose servers stand at the same time.
    """
    slots = []
    for round_index in range(config.rounds):
        shift = round_index % len(ways)
        turned = [*ways[shift:], *ways[:shift]]
        for sampling in samplings:
            for concurrency, num_prompts in zip(config.concurrency, config.num_prompts, strict=True):
                slots += [Slot(round_index, concurrency, num_prompts, way, sampling) for way in turned]
    return slots


@dataclass(frozen=True)
class RequestResult:
    """One answered (or failed) request.

    Attributes:
        latency_seconds: from sending to the whole answer.
        domain: of its prompt.
        figures: what vLLM says of this request; None where it says nothing.
    """

    sample_id: str
    latency_seconds: float
    completion_token_ids: tuple[int, ...]
    error: str | None = None
    prompt_token_ids: tuple[int, ...] = ()
    domain: str = "general"
    figures: RequestFigures | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_token_ids) + len(self.completion_token_ids)


@dataclass(frozen=True)
class Measurement:
    """One way of decoding under one load in one round. `requests` are in the order of the prompts."""

    way: Way
    dataset: str
    concurrency: int
    round_index: int
    wall_seconds: float
    counters: SpeculationCounters
    requests: tuple[RequestResult, ...]
    sampling: Sampling = GREEDILY

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
    def prompt_token_ids(self) -> Sequence[int]: ...

    @property
    def completion_token_ids(self) -> Sequence[int]: ...

    @property
    def server_metrics(self) -> Mapping[str, Any] | None: ...


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
    chosen = prompts[: slot.num_prompts]
    warmup = [chosen[index % len(chosen)] for index in range(config.warmup_requests)]
    settled = time.perf_counter() + config.settle_seconds
    await _run_requests(client, warmup, slot, min(config.max_tokens, WARMUP_MAX_TOKENS))
    await asyncio.sleep(max(0.0, settled - time.perf_counter()))
    before = await settled_counters(read_counters)
    started = time.perf_counter()
    requests = await _run_requests(client, chosen, slot, config.max_tokens)
    wall_seconds = time.perf_counter() - started
    counters = await settled_counters(read_counters) - before
    failed = [request for request in requests if request.error is not None]
    if len(failed) > config.max_failed_share * len(requests):
        raise StageFailed(
            f"{slot.way.name} with {slot.concurrency} in flight on {dataset}: {len(failed)} of {len(requests)} "
            f"requests failed, first {failed[0].sample_id}: {failed[0].error}"
        )
    return Measurement(
        slot.way, dataset, slot.concurrency, slot.round_index, wall_seconds, counters, requests, slot.sampling
    )


async def _run_requests(
    client: CompletionClientLike, prompts: Sequence[EvaluationPrompt], slot: Slot, max_tokens: int
) -> tuple[RequestResult, ...]:
    """Send the prompts under the slot's load; the results are in the order of the prompts."""
    results: list[RequestResult | None] = [None] * len(prompts)
    waiting = iter(enumerate(prompts))

    async def stream() -> None:
        for index, prompt in waiting:
            results[index] = await _request(client, prompt, prompt.request(slot.sampling, max_tokens))

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(min(slot.concurrency, len(prompts))):
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
        return RequestResult(prompt.sample_id, time.perf_counter() - started, (), str(error), domain=prompt.domain)
    return RequestResult(
        prompt.sample_id,
        time.perf_counter() - started,
        tuple(completion.completion_token_ids),
        prompt_token_ids=tuple(completion.prompt_token_ids),
        domain=prompt.domain,
        figures=request_figures(completion.server_metrics),
    )


def refuse_beyond_trained(taken: Measurement, config: EvaluateConfig, trained_length_tokens: int) -> None:
    """Raise InputError where answers end beyond the longest sequence that the new draft was trained on.

    A single answer, or less than a twentieth of many, changes little and is let pass.
    """
    if config.allow_beyond_trained_length or EAGLE3 not in config.methods:
        return
    lengths = [request.num_tokens for request in taken.requests if request.error is None]
    beyond = [length for length in lengths if length > trained_length_tokens]
    if len(beyond) > max(1, MAX_BEYOND_SHARE * len(lengths)):
        raise InputError(
            "evaluate.allow_beyond_trained_length",
            f"{len(beyond)} of {len(lengths)} answers on {taken.dataset} end beyond {trained_length_tokens:,} "
            f"tokens, the longest sequence that the draft was trained on (one at {max(beyond):,}): train on longer "
            "answers, lower evaluate.max_tokens, or set this to true to measure all the same",
        )


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
