"""What a vLLM server counts, read from the text of its /metrics page (Prometheus exposition format 0.0.4).

One series per engine: counters are summed over engines. Each counter also has a `_created` series, a time stamp
that must not be summed; names are matched whole, so it never is.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import Any

from infra.errors import ServerError

# Label values may hold braces, so the last one that a value follows is the end.
_SAMPLE = re.compile(r"^(?P<name>[a-zA-Z_:][\w:]*)(?:\{(?P<labels>.*)\})?\s+(?P<value>\S+)(?:\s+-?\d+)?$")
_POSITION = re.compile(r'(?:^|,)\s*position="(\d+)"')
_ENGINE = re.compile(r'(?:^|,)\s*engine="(\w+)"')
_RUNNING = ("vllm:num_requests_running", "sglang:num_running_reqs")
# What grows with every step of an engine. Not `sglang:generation_tokens_total`: it grows when a request ends.
_STEPS = ("vllm:generation_tokens_total", "vllm:prompt_tokens_total", "sglang:realtime_tokens_total")


@dataclass(frozen=True)
class SpeculationCounters:
    """Counts of speculative decoding since the server started; all zero where nothing is speculated.

    Attributes:
        num_drafts: times that a draft was proposed and verified, once per request and engine step.
        num_draft_tokens: tokens proposed.
        num_accepted_tokens: proposed tokens that the verifier accepted; the bonus token is not among them.
        accepted_per_position: [num_speculative_tokens] drafts accepted through each position.
        engines: each engine's own counts where there are several, by its number: the sum of one that began anew and
            of another that went on may rise.
    """

    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    accepted_per_position: tuple[int, ...] = ()
    engines: Mapping[str, SpeculationCounters] = field(default_factory=dict, compare=False, repr=False)

    def __sub__(self, earlier: SpeculationCounters) -> SpeculationCounters:
        """What was counted since `earlier`.

        Raises:
            ServerError: a count went down, so the server (or one engine of it) was restarted in between and the
                difference means nothing.
        """
        for engine, before in earlier.engines.items():
            self.engines.get(engine, SpeculationCounters()) - before
        positions = zip_longest(self.accepted_per_position, earlier.accepted_per_position, fillvalue=0)
        difference = SpeculationCounters(
            num_drafts=self.num_drafts - earlier.num_drafts,
            num_draft_tokens=self.num_draft_tokens - earlier.num_draft_tokens,
            num_accepted_tokens=self.num_accepted_tokens - earlier.num_accepted_tokens,
            accepted_per_position=tuple(now - before for now, before in positions),
        )
        counts = (difference.num_drafts, difference.num_draft_tokens, difference.num_accepted_tokens)
        if min(*counts, *difference.accepted_per_position, 0) < 0:
            raise ServerError(f"the server's counters went down, from {earlier} to {self}: it was restarted")
        return difference


@dataclass(frozen=True)
class ServerProgress:
    """Whether a server gets on with its work: /health says 200 for a hung engine too (vllm#39863).

    Attributes:
        num_generation_tokens: tokens generated since the server started.
        num_prompt_tokens: prompt tokens processed since the server started.
        num_requests_running: requests in the engines' current batches.
        num_requests_waiting: requests that wait for room in them.
        kv_cache_usage: share (0 to 1) of the fullest engine's key-value cache; None where it is not reported.
    """

    num_generation_tokens: int
    num_prompt_tokens: int
    num_requests_running: int
    num_requests_waiting: int
    kv_cache_usage: float | None


@dataclass(frozen=True)
class EngineWork:
    """One engine's work at one moment.

    Attributes:
        num_tokens: tokens processed so far, of prompts and completions, counted step by step.
        num_requests_running: requests in its current batch.
    """

    num_tokens: int
    num_requests_running: int


def parse_counters(text: str) -> SpeculationCounters:
    """Counters of speculative decoding in a /metrics page, summed over engines."""
    counts: dict[str, Counter[str]] = {}
    positions: dict[str, Counter[int]] = {}
    for name, labels, value in _samples(text, "vllm:spec_decode_"):
        found = _ENGINE.search(labels)
        engine = found[1] if found else ""
        counts.setdefault(engine, Counter())[name.removeprefix("vllm:spec_decode_")] += round(value)
        if name == "vllm:spec_decode_num_accepted_tokens_per_pos_total":
            at = _POSITION.search(labels)
            if at is None:
                raise ServerError(f"vLLM reports {name}{{{labels}}} without a position: unknown format of /metrics")
            positions.setdefault(engine, Counter())[int(at[1])] += round(value)
    engines = {engine: _counters(counts[engine], positions.get(engine, Counter())) for engine in counts}
    if len(engines) == 1:
        return next(iter(engines.values()))
    whole = _counters(sum(counts.values(), Counter[str]()), sum(positions.values(), Counter[int]()))
    return replace(whole, engines=engines)


def _counters(counts: Counter[str], positions: Counter[int]) -> SpeculationCounters:
    return SpeculationCounters(
        num_drafts=counts["num_drafts_total"],
        num_draft_tokens=counts["num_draft_tokens_total"],
        num_accepted_tokens=counts["num_accepted_tokens_total"],
        accepted_per_position=tuple(positions[place] for place in range(max(positions, default=-1) + 1)),
    )


@dataclass(frozen=True)
class RequestFigures:
    """What vLLM says of one request (`metrics` in its answer), where its server was started to say it.

    Attributes:
        ttft_seconds: from its arrival in the engine's queue to its first token.
        tpot_seconds: per token after the first one; None of an answer of one token.
        accepted: drafted tokens accepted in each step that verified a draft; the bonus token is not among them. In
            the last step vLLM counts what was accepted, not what was kept of it.
        drafted: tokens proposed in each of those steps.
    """

    ttft_seconds: float | None = None
    tpot_seconds: float | None = None
    accepted: tuple[int, ...] = ()
    drafted: tuple[int, ...] = ()


def request_figures(metrics: Mapping[str, Any] | None) -> RequestFigures | None:
    """Reads `metrics` of a chat completion (vLLM 0.32, `--enable-per-request-metrics` and
    `--per-request-spec-decode-metrics=detailed`); None where there are none.

    Raises:
        ServerError: they are of another form.
    """
    if metrics is None:
        return None
    try:
        queued_ms, first_ms = metrics.get("queue_time_ms"), metrics.get("time_to_first_token_ms")
        gap_ms = metrics.get("mean_itl_ms")
        speculation = metrics.get("speculative_decoding") or {}
        accepted = tuple(int(count) for count in speculation.get("per_step_accepted") or ())
        drafted = tuple(int(count) for count in speculation.get("per_step_drafted") or ())
        if len(accepted) != len(drafted):
            raise ValueError(f"{len(accepted)} accepted counts and {len(drafted)} drafted ones")
        return RequestFigures(
            # vLLM counts the first token's time from when the request is taken up; a user waits in the queue too.
            ttft_seconds=None if first_ms is None else (first_ms + (queued_ms or 0.0)) / 1000.0,
            tpot_seconds=None if gap_ms is None else gap_ms / 1000.0,
            accepted=accepted,
            drafted=drafted,
        )
    except (AttributeError, TypeError, ValueError) as error:
        raise ServerError(f"vLLM's metrics of a request are of an unknown form ({error}): {metrics}") from error


def parse_progress(text: str) -> ServerProgress:
    """Token counts and load in a /metrics page, summed over engines; a count that is absent is 0.

    Takes SGLang's names too (it must be started with `--enable-metrics`).
    """
    by_name: dict[str, list[float]] = {}
    for name, _, value in _samples(text, ("vllm:", "sglang:")):
        by_name.setdefault(name, []).append(value)

    def found(*names: str) -> list[float]:
        return [value for name in names for value in by_name.get(name, [])]

    return ServerProgress(
        num_generation_tokens=round(sum(found("vllm:generation_tokens_total", "sglang:generation_tokens_total"))),
        num_prompt_tokens=round(sum(found("vllm:prompt_tokens_total", "sglang:prompt_tokens_total"))),
        num_requests_running=round(sum(found(*_RUNNING))),
        num_requests_waiting=round(sum(found("vllm:num_requests_waiting", "sglang:num_queue_reqs"))),
        kv_cache_usage=max(found("vllm:kv_cache_usage_perc", "sglang:token_usage"), default=None),
    )


def parse_engines(text: str) -> dict[str, EngineWork]:
    """The work of each engine (data-parallel rank) by vLLM's number of it; empty where the page does not tell.

    Another server than vLLM is one engine without a number.
    """
    tokens: Counter[str] = Counter()
    running: Counter[str] = Counter()
    for name, labels, value in _samples(text, ("vllm:", "sglang:")):
        counted = tokens if name in _STEPS else running if name in _RUNNING else None
        if counted is not None:
            engine = _ENGINE.search(labels)
            counted[engine[1] if engine else ""] += round(value)
    return {engine: EngineWork(tokens[engine], running[engine]) for engine in tokens}


def _samples(text: str, prefix: str | tuple[str, ...]) -> Iterator[tuple[str, str, float]]:
    """Name, labels and value of each sample whose name begins with `prefix`."""
    for line in text.splitlines():
        if line.startswith(prefix) and (sample := _SAMPLE.match(line)):
            value = float(sample["value"])
            if math.isfinite(value):
                yield sample["name"], sample["labels"] or "", value
