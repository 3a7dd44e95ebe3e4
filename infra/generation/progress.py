"""Counts of a generation stage while it runs: what a progress bar, a log line and a gauge read."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from infra.errors import StageFailed
from infra.generation.responses import Row
from infra.schemas import STATUS_FAILED
from infra.vllm_metrics import ServerProgress

# What "now" means in a rate: long enough to hold some rows of a large model, short enough to show a stall.
WINDOW_SECONDS = 60.0


class Rate:
    """How fast a count grows, over the last `WINDOW_SECONDS`."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, float]] = deque()

    def sample(self, total: float, now: float) -> None:
        """Takes the count at a time in seconds. A count that went down (a new server) begins anew."""
        if self._samples and total < self._samples[-1][1]:
            self._samples.clear()
        self._samples.append((now, total))
        while len(self._samples) > 2 and self._samples[1][0] <= now - WINDOW_SECONDS:
            self._samples.popleft()

    @property
    def per_second(self) -> float | None:
        """None before there are two samples."""
        if len(self._samples) < 2:
            return None
        (first_at, first), (last_at, last) = self._samples[0], self._samples[-1]
        return (last - first) / max(last_at - first_at, 1e-9)


@dataclass
class GenerationProgress:
    """Counts the rows of a stage while they are made. For one event loop.

    `generate_rows(..., on_row=progress.add)` fills it; one object serves all shards of a stage. `sample` and
    `see_servers` are called now and then by whoever shows it (`tasks.generation_watch`).
    """

    num_rows: int
    """Rows of the whole stage."""
    max_failed_share: float = 1.0
    """`add` raises once more rows have failed than this share of `num_rows`: no other row can mend that."""
    rows_before: Counter[str] = field(default_factory=Counter)
    """Rows among them that are there already, by status: committed earlier, or taken from an earlier stage."""
    num_completion_tokens: int = 0
    """Of the rows made."""
    started: float = field(default_factory=time.monotonic)
    servers: ServerProgress | None = None
    """The servers' load when it was last seen, over all of them; None where they do not tell."""

    def __post_init__(self) -> None:
        self.rows_by_status = Counter(self.rows_before)
        self._num_before_start = self.rows_before.total()
        self._row_rate, self._token_rate, self._server_token_rate = Rate(), Rate(), Rate()

    def add(self, row: Row) -> None:
        """Counts a finished row.

        Raises:
            StageFailed: too many rows have failed for the stage to be accepted.
        """
        self.rows_by_status[row["status"]] += 1
        self.num_completion_tokens += row["num_completion_tokens"]
        num_failed = self.rows_by_status[STATUS_FAILED]
        if row["status"] == STATUS_FAILED and num_failed > self.max_failed_share * self.num_rows:
            raise StageFailed(
                f"{num_failed} of {self.num_rows} rows have failed, more than the allowed share of "
                f"{self.max_failed_share:g}, so generation stops; the last error: {row['error']}"
            )

    def see_before(self, rows: Counter[str]) -> None:
        """Takes another count of `rows_before`: other nodes have committed rows meanwhile."""
        self.rows_by_status += rows
        self.rows_by_status -= self.rows_before
        self.rows_before = rows

    def sample(self, now: float | None = None) -> None:
        """Takes the counts of this moment for the rates of the sliding window."""
        now = time.monotonic() if now is None else now
        self._row_rate.sample(self.rows_made, now)
        self._token_rate.sample(self.num_completion_tokens, now)

    def see_servers(self, loads: Sequence[ServerProgress], now: float | None = None) -> None:
        """Takes the load of every server that told it; without any the last one is forgotten."""
        if not loads:
            self.servers = None
            return
        usages = [load.kv_cache_usage for load in loads if load.kv_cache_usage is not None]
        self.servers = ServerProgress(
            num_generation_tokens=sum(load.num_generation_tokens for load in loads),
            num_prompt_tokens=sum(load.num_prompt_tokens for load in loads),
            num_requests_running=sum(load.num_requests_running for load in loads),
            num_requests_waiting=sum(load.num_requests_waiting for load in loads),
            kv_cache_usage=max(usages, default=None),
        )
        self._server_token_rate.sample(self.servers.num_generation_tokens, time.monotonic() if now is None else now)

    @property
    def rows_done(self) -> int:
        return self.rows_by_status.total()

    @property
    def rows_made(self) -> int:
        """Rows done by this object's requests."""
        return self.rows_done - self.rows_before.total()

    @property
    def elapsed_seconds(self) -> float:
        return time.monotonic() - self.started

    @property
    def rows_per_second(self) -> float:
        """Over the sliding window."""
        return self._row_rate.per_second or 0.0

    @property
    def tokens_per_second(self) -> float:
        """Completion tokens of finished rows per second since the start."""
        return self.num_completion_tokens / max(self.elapsed_seconds, 1e-9)

    @property
    def tokens_per_second_now(self) -> float:
        """Over the sliding window: the servers' own count where they tell it, else that of finished rows.

        The servers' is the better one, for it also counts the tokens of unfinished rows.
        """
        if self.servers is not None and self._server_token_rate.per_second is not None:
            return self._server_token_rate.per_second
        return self._token_rate.per_second or 0.0

    @property
    def eta_seconds(self) -> float | None:
        """Seconds until the last row at the rate so far, of all nodes; None before the first row of this one."""
        if not self.rows_made:
            return None
        num_made = max(self.rows_done - self._num_before_start, self.rows_made)
        return self.elapsed_seconds * (self.num_rows - self.rows_done) / num_made

    def __str__(self) -> str:
        """In one line: rows by status, rates, and the servers' load."""
        statuses = ", ".join(f"{count} {status}" for status, count in sorted(self.rows_by_status.items()) if count)
        said = [
            statuses or "no row yet",
            f"{self.tokens_per_second_now:.0f} tokens/s now, {self.tokens_per_second:.0f} overall",
        ]
        if self.servers is not None:
            cache = self.servers.kv_cache_usage
            said.append(
                f"{self.servers.num_requests_running} requests running, {self.servers.num_requests_waiting} waiting"
                + ("" if cache is None else f", KV cache {cache:.0%} full")
            )
        return " · ".join(said)
