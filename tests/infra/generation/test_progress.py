"""What is seen of a running generation: counts, rates, the servers' load, gauges, and all of it at a bounded rate."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from typing import Any

import pytest
from prometheus_client import REGISTRY

from infra.errors import ServerError
from infra.fingerprint import stage_content
from infra.generation.progress import WINDOW_SECONDS, GenerationProgress, Rate
from infra.manifest import StageRef
from infra.vllm_metrics import ServerProgress
from tasks import generation_watch, progress
from tasks.generation_watch import watching
from tests.asking import wait_until

STAGE = StageRef("root", "responses", stage_content("responses", 1, {}, {}, {}))
LABELS = {"root": "root", "stage": "responses", "key": STAGE.key}


def load(tokens: int, running: int = 60, waiting: int = 4, cache: float | None = 0.5) -> ServerProgress:
    return ServerProgress(tokens, 0, running, waiting, cache)


def row(status: str = "ok", tokens: int = 50) -> dict[str, Any]:
    return {"status": status, "num_completion_tokens": tokens, "error": "no"}


# --- rates


def test_a_rate_is_over_the_window_only_and_begins_anew_with_a_new_server() -> None:
    rate = Rate()
    assert rate.per_second is None
    for second in range(0, 200, 5):
        rate.sample(100 * second if second < 100 else 10_000, now=float(second))
    assert rate.per_second == pytest.approx(0.0), f"nothing has come for more than {WINDOW_SECONDS:g} s"
    rate.sample(10, now=200.0)
    assert rate.per_second is None
    rate.sample(110, now=210.0)
    assert rate.per_second == 10.0


def test_rows_that_were_there_are_counted_but_are_in_no_rate() -> None:
    rows = GenerationProgress(num_rows=100, rows_before=Counter(ok=60, failed=1))
    rows.started -= 10
    rows.sample(now=0.0)
    for _ in range(10):
        rows.add(row())
    rows.sample(now=10.0)
    assert (rows.rows_done, rows.rows_made) == (71, 10)
    assert rows.rows_per_second == 1.0
    assert rows.tokens_per_second_now == 50.0
    assert rows.eta_seconds == pytest.approx(29, rel=0.1)
    assert str(rows).startswith("1 failed, 70 ok · 50 tokens/s now, 50 overall")


def test_the_servers_tokens_are_taken_where_they_tell_them() -> None:
    rows = GenerationProgress(num_rows=10)
    rows.see_servers([load(0), load(0)], now=0.0)
    rows.see_servers([load(700, cache=0.9), load(300, waiting=1)], now=10.0)
    assert rows.tokens_per_second_now == 100.0, "no row is finished yet"
    assert str(rows) == (
        "no row yet · 100 tokens/s now, 0 overall · 120 requests running, 5 waiting, KV cache 90% full"
    )
    rows.see_servers([])
    assert "running" not in str(rows)


# --- showing


class Servers:
    """A pool of one good server and one that does not answer."""

    def __init__(self) -> None:
        self.in_flight = 0
        self.asked = 0

    async def progress(self) -> list[ServerProgress]:
        self.asked += 1
        if self.asked == 2:
            raise ServerError("no metrics this time")
        return [load(1000 * self.asked)]


@pytest.fixture
def artifacts(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Descriptions sent to the UI; the time between two updates is short."""
    sent: list[str] = []

    async def create(percent: float, key: str, description: str) -> None:
        sent.append(description)
        raise RuntimeError("no server here")

    monkeypatch.setattr(progress, "acreate_progress_artifact", create)
    monkeypatch.setattr(progress, "UPDATE_SECONDS", 0.05)
    monkeypatch.setattr(generation_watch, "UPDATE_SECONDS", 0.05)
    monkeypatch.setattr(generation_watch, "SERVERS_EVERY_SECONDS", 0.1)
    return sent


def gauge(name: str, **labels: str) -> float | None:
    return REGISTRY.get_sample_value(f"draftsmith_{name}", LABELS | labels)


async def test_a_stage_is_shown_in_the_ui_and_as_gauges_and_what_breaks_there_stops_nothing(
    artifacts: list[str],
) -> None:
    rows, servers = GenerationProgress(num_rows=10, rows_before=Counter(ok=6)), Servers()
    began = time.monotonic()
    async with watching(STAGE, rows, servers):
        await wait_until(lambda: bool(artifacts))
        servers.in_flight = 4
        rows.add(row())
        rows.add(row("truncated"))
        await wait_until(lambda: servers.asked >= 4)
        assert gauge("requests_waiting") == 4
        assert gauge("kv_cache_usage") == 0.5
        assert (gauge("eta_seconds") or 0) > 0
    assert gauge("rows", status="ok") == 7
    assert gauge("rows", status="truncated") == 1
    assert gauge("rows_left") == 2
    assert gauge("requests_waiting") is None, "it holds only while the stage runs"
    assert artifacts[0].startswith("responses: 6 of 10 rows")
    assert "responses: 8 of 10 rows, about " in artifacts[-1]
    assert "7 ok, 1 truncated" in artifacts[-1]
    assert "60 requests running, 4 waiting, KV cache 50% full" in artifacts[-1]
    seconds = time.monotonic() - began
    assert servers.asked <= seconds / 0.1 + 1, "asked at a bounded rate"
    assert len(artifacts) <= seconds / 0.05 + 2


async def test_the_clock_begins_when_a_server_has_requests(artifacts: list[str]) -> None:
    rows, servers = GenerationProgress(num_rows=6), Servers()
    rows.started -= 1800
    async with watching(STAGE, rows, servers):
        await asyncio.sleep(0.2)
    assert rows.elapsed_seconds < 10


async def test_an_error_of_the_work_is_raised_itself(artifacts: list[str]) -> None:
    async def work() -> None:
        async with watching(STAGE, GenerationProgress(num_rows=6), Servers()):
            await asyncio.sleep(0.1)
            raise ServerError("gone")

    with pytest.raises(ServerError, match="gone"):
        await work()
