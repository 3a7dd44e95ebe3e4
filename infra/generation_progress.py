"""Counts of a generation stage while it runs: what a progress bar, a log line and a gauge read."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field

from infra.errors import StageFailed
from infra.responses import Row
from infra.schemas import STATUS_FAILED


@dataclass
class GenerationProgress:
    """Counts the rows of a stage while they are made; what a progress bar reads. For one event loop.

    `generate_rows(..., on_row=progress.add)` fills it; one object serves all shards of a stage.
    """

    num_rows: int
    """Rows that are to be made."""
    max_failed_share: float = 1.0
    """`add` raises once more rows have failed than this share of `num_rows`: no other row can mend that."""
    rows_by_status: Counter[str] = field(default_factory=Counter)
    num_completion_tokens: int = 0
    started: float = field(default_factory=time.monotonic)

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

    @property
    def rows_done(self) -> int:
        return self.rows_by_status.total()

    @property
    def elapsed_seconds(self) -> float:
        return time.monotonic() - self.started

    @property
    def tokens_per_second(self) -> float:
        """Completion tokens of finished rows per second since the start."""
        return self.num_completion_tokens / max(self.elapsed_seconds, 1e-9)

    @property
    def eta_seconds(self) -> float | None:
        """Seconds until the last row at the rate so far; None before the first row."""
        if not self.rows_done:
            return None
        return self.elapsed_seconds * (self.num_rows - self.rows_done) / self.rows_done
