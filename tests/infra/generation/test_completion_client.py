"""Time limits, attempts and waits, and servers told apart from rows, against a server that misbehaves on command."""

from __future__ import annotations

import asyncio
import contextlib
import time
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import httpx2
import pytest

from infra.errors import ServerError
from infra.generation.completion_endpoint import retry_after_seconds
from infra.inference import CompletionClient, GenerateConfig, generate_rows
from tests.asking import PROBE, QUICK, assert_failed, connect, one_row, prompt, prompts, wait_until
from tests.fakes.openai_server import FakeOpenAIServer, Reply


async def test_case_6_a_slow_answer_is_one_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """The OpenAI client's default limit (600 s, here 0.2 s) and its hidden retries play no part."""
    monkeypatch.setattr("openai._base_client.DEFAULT_TIMEOUT", httpx2.Timeout(0.2))
    row = await one_row(Reply(latency_seconds=0.8), timeout_seconds=20.0)
    assert (row["status"], row["requests"]) == ("ok", 1)
    assert row["latency_seconds"] > 0.8


async def test_a_request_that_times_out_on_a_sound_server_counts_as_an_attempt() -> None:
    row = await one_row(Reply(hang=True), timeout_seconds=0.5, max_attempts=2)
    assert_failed(row, "2 attempts", "within 0.5 s")
    assert row["requests"] == 2


@pytest.mark.parametrize("status", [400, 404, 422])
async def test_a_refused_request_is_a_failed_row_at_once_with_the_servers_reason(status: int) -> None:
    row = await one_row(Reply(status=status, error="maximum context length is 8192 tokens"))
    assert_failed(row, str(status), "maximum context length is 8192 tokens")
    assert row["requests"] == 1


TROUBLES = {
    "429": Reply(status=429),
    "500": Reply(status=500),
    "502": Reply(status=502, body=b"<html>bad gateway</html>"),
    "503": Reply(status=503),
    "504": Reply(status=504),
    "cut": Reply(cut=True),
    "garbage": Reply(body=b'{"choices": [}'),
    "no choices": Reply(body=b'{"choices": []}'),
    "not an object": Reply(body=b"[]"),
    "aborted": Reply(finish_reason="abort"),
}


@pytest.mark.parametrize("trouble", TROUBLES.values(), ids=TROUBLES.keys())
async def test_a_passing_trouble_is_asked_again_and_a_lasting_one_is_a_failed_row(trouble: Reply) -> None:
    config = GenerateConfig(**QUICK)
    async with FakeOpenAIServer() as server, CompletionClient(server.base_url, "key", "verifier", config) as client:
        server.script("passes", trouble, trouble, trouble, Reply())
        server.script("lasts", trouble)
        passed, failed = await generate_rows(client, [prompt("passes"), prompt("lasts")], config)
    assert passed["status"] == "ok"
    assert_failed(failed, "given up after 4 attempts")
    assert (server.requests["passes"], server.requests["lasts"]) == (4, 4)


async def test_a_connection_closed_before_any_answer_is_no_refused_connection() -> None:
    async with FakeOpenAIServer() as server, connect(server, gone_after_seconds=60, max_attempts=2) as client:
        server.script("hello", Reply(drop=True))
        (row,) = await generate_rows(client, [prompt("hello")], GenerateConfig())
    assert_failed(row, "2 attempts", "cut")


async def test_retry_after_is_waited_for() -> None:
    async with FakeOpenAIServer() as server, connect(server) as client:
        server.script("hello", Reply(status=429, headers={"Retry-After": "0.5"}), Reply())
        began = time.monotonic()
        await client.complete([{"role": "user", "content": "hello"}], {"temperature": 0})
    assert 0.5 <= time.monotonic() - began < 10


def test_retry_after_holds_seconds_or_a_date() -> None:
    later = format_datetime(datetime.now(UTC) + timedelta(seconds=30), usegmt=True)
    assert retry_after_seconds({"retry-after": "2"}) == 2.0
    assert retry_after_seconds({"retry-after": later}) == pytest.approx(30, abs=10)
    assert retry_after_seconds({"retry-after": "soon"}) is None
    assert retry_after_seconds({}) is None


async def test_the_key_is_sent_and_a_wrong_one_is_said() -> None:
    async with FakeOpenAIServer(api_key="right") as server, connect(server) as client:
        (row,) = await generate_rows(client, [prompt("hello")], GenerateConfig())
    assert_failed(row, "401", "Unauthorized")


async def test_a_proxy_of_the_environment_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("NO_PROXY", "no_proxy"):
        with contextlib.suppress(KeyError):
            monkeypatch.delenv(name)
    assert (await one_row(Reply()))["status"] == "ok"


# --- rows and servers told apart


async def test_a_server_that_nobody_can_connect_to_is_gone_and_no_row_is_to_blame() -> None:
    async with FakeOpenAIServer() as server:
        pass
    async with connect(server) as client:
        began = time.monotonic()
        with pytest.raises(ServerError, match="not reached"):
            await generate_rows(client, prompts(20), GenerateConfig())
        assert 0.3 <= time.monotonic() - began < 10
        with pytest.raises(ServerError):
            await client.complete([], {"temperature": 0})


async def test_a_short_pause_of_the_server_costs_no_attempt() -> None:
    async with FakeOpenAIServer() as server:
        port = server.port
    later = FakeOpenAIServer(port=port)
    async with connect(later, gone_after_seconds=10, max_attempts=1) as client:
        asking = asyncio.create_task(client.complete([{"content": "hello"}], {"temperature": 0}))
        await asyncio.sleep(0.3)
        async with later:
            assert (await asking).content == "an answer"


async def test_an_engine_that_hangs_while_health_is_fine_is_told_by_a_probe() -> None:
    """Case 7, the client's part: the watchdog sees the silence, the probe settles it, all shards are let go."""
    hung = FakeOpenAIServer(lambda _p, _n: Reply(hang=True))
    async with hung as server, connect(server, timeout_seconds=120) as client:
        shards = [
            asyncio.create_task(generate_rows(client, prompts(200, shard), GenerateConfig())) for shard in "ab"
        ]
        await wait_until(lambda: client.silent_seconds >= 0.2)
        with pytest.raises(ServerError, match="one token"):
            await client.probe(timeout_seconds=0.1)
        ended = await asyncio.wait_for(asyncio.gather(*shards, return_exceptions=True), timeout=20)
    assert [type(error) for error in ended] == [ServerError, ServerError]


async def test_a_server_that_asks_to_be_left_in_peace_is_not_silent() -> None:
    async with FakeOpenAIServer() as server, connect(server) as client:
        server.script("hello", Reply(status=429, headers={"Retry-After": "60"}))
        asking = asyncio.create_task(client.complete([{"content": "hello"}], {"temperature": 0}))
        await wait_until(lambda: server.requests["hello"] == 1 and client.silent_seconds == 0.0)
        await asyncio.sleep(0.3)
        assert (client.in_flight, client.silent_seconds) == (1, 0.0)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking


async def test_a_server_that_answers_nothing_but_errors_is_gone_rather_than_every_row_failed() -> None:
    async with FakeOpenAIServer(lambda _p, _n: Reply(status=500)) as server, connect(server) as client:
        with pytest.raises(ServerError, match="one token"):
            await generate_rows(client, prompts(20), GenerateConfig())
    assert server.requests[PROBE] == 1


async def test_all_requests_timing_out_is_a_hung_server_after_one_attempt_each() -> None:
    hung = FakeOpenAIServer(lambda _p, _n: Reply(hang=True))
    async with hung as server, connect(server, timeout_seconds=0.5) as client:
        with pytest.raises(ServerError):
            await generate_rows(client, prompts(5), GenerateConfig())
    assert {server.requests[f"p{index}"] for index in range(5)} == {1}
