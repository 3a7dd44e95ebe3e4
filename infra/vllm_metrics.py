"""What a vLLM server counts, read from the text of its /metrics page (Prometheus exposition format 0.0.4).

One series per engine: counters are summed over engines. Each counter also has a `_created` series, a time stamp
that must not be summed; names are matched whole, so it never is.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import zip_longest

from infra.errors import ServerError

# Label values may hold braces, so the last one that a value follows is the end.
_SAMPLE = re.compile(r"^(?P<name>[a-zA-Z_:][\w:]*)(?:\{(?P<labels>.*)\})?\s+(?P<value>\S+)(?:\s+-?\d+)?$")
_POSITION = re.compile(r'(?:^|,)\s*position="(\d+)"')
_ENGINE = re.compile(r'(?:^|,)\s*(?:engine|dp_rank)="(\w+)"')
# What vLLM and SGLang (started with --enable-metrics) call the same things.
_PROGRESS_NAMES = {
    "num_generation_tokens": ("vllm:generation_tokens_total", "sglang:generation_tokens_total"),
    "num_prompt_tokens": ("vllm:prompt_tokens_total", "sglang:prompt_tokens_total"),
    "num_requests_running": ("vllm:num_requests_running", "sglang:num_running_reqs"),
    "num_requests_waiting": ("vllm:num_requests_waiting", "sglang:num_queue_reqs"),
    "kv_cache_usage": ("vllm:kv_cache_usage_perc", "sglang:token_usage"),
}
_PROGRESS_FIELDS = {name: field for field, names in _PROGRESS_NAMES.items() for name in names}


@dataclass(frozen=True)
class SpeculationCounters:
    """Counts of speculative decoding since the server started; all zero where nothing is speculated.

    Attributes:
        num_drafts: times that a draft was proposed and verified, once per request and engine step.
        num_draft_tokens: tokens proposed.
        num_accepted_tokens: proposed tokens that the verifier accepted; the bonus token is not among them.
        accepted_per_position: [num_speculative_tokens] drafts accepted through each position.
    """

    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    accepted_per_position: tuple[int, ...] = ()

    def __sub__(self, earlier: SpeculationCounters) -> SpeculationCounters:
        """What was counted since `earlier`.

        Raises:
            ServerError: a count went down, so the server was restarted in between and the difference means nothing.
        """
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


def parse_counters(text: str) -> SpeculationCounters:
    """Counters of speculative decoding in a /metrics page, summed over engines."""
    totals = {"num_drafts": 0, "num_draft_tokens": 0, "num_accepted_tokens": 0}
    per_position: dict[int, int] = {}
    for name, labels, value in _samples(text, "vllm:spec_decode_"):
        count = name.removeprefix("vllm:spec_decode_").removesuffix("_total")
        if name.endswith("_total") and count in totals:
            totals[count] += round(value)
        elif name == "vllm:spec_decode_num_accepted_tokens_per_pos_total":
            found = _POSITION.search(labels)
            if found is None:
                raise ServerError(f"vLLM reports {name}{{{labels}}} without a position: unknown format of /metrics")
            position = int(found[1])
            per_position[position] = per_position.get(position, 0) + round(value)
    num_positions = max(per_position, default=-1) + 1
    return SpeculationCounters(
        **totals, accepted_per_position=tuple(per_position.get(position, 0) for position in range(num_positions))
    )


def parse_progress(text: str) -> ServerProgress:
    """Token counts and load in a /metrics page, summed over engines; a count that is absent is 0."""
    engines = parse_engines(text).values()
    usages = [engine.kv_cache_usage for engine in engines if engine.kv_cache_usage is not None]
    return ServerProgress(
        num_generation_tokens=sum(engine.num_generation_tokens for engine in engines),
        num_prompt_tokens=sum(engine.num_prompt_tokens for engine in engines),
        num_requests_running=sum(engine.num_requests_running for engine in engines),
        num_requests_waiting=sum(engine.num_requests_waiting for engine in engines),
        kv_cache_usage=max(usages, default=None),
    )


def parse_engines(text: str) -> dict[str, ServerProgress]:
    """The same for each engine (data-parallel rank) by its number; empty where the page counts no tokens."""
    engines: dict[str, dict[str, float]] = {}
    for name, labels, value in _samples(text, ("vllm:", "sglang:")):
        if (field := _PROGRESS_FIELDS.get(name)) is not None:
            found = _ENGINE.search(labels)
            counts = engines.setdefault(found[1] if found else "", {})
            counts[field] = counts.get(field, 0.0) + value
    return {engine: _server_progress(counts) for engine, counts in engines.items()}


def _server_progress(counts: dict[str, float]) -> ServerProgress:
    return ServerProgress(
        num_generation_tokens=round(counts.get("num_generation_tokens", 0.0)),
        num_prompt_tokens=round(counts.get("num_prompt_tokens", 0.0)),
        num_requests_running=round(counts.get("num_requests_running", 0.0)),
        num_requests_waiting=round(counts.get("num_requests_waiting", 0.0)),
        kv_cache_usage=counts.get("kv_cache_usage"),
    )


def _samples(text: str, prefix: str | tuple[str, ...]) -> Iterator[tuple[str, str, float]]:
    """Name, labels and value of each sample whose name begins with `prefix`."""
    for line in text.splitlines():
        if line.startswith(prefix) and (sample := _SAMPLE.match(line)):
            value = float(sample["value"])
            if math.isfinite(value):
                yield sample["name"], sample["labels"] or "", value
