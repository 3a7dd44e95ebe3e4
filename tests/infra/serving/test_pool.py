"""Several servers asked as one, against real HTTP servers that hang, vanish, come back or stay away."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from infra.errors import InputError, ServerError
from infra.inference import GenerateConfig, generate_rows
from infra.serving.config import ServersConfig
from infra.serving.external import ExternalServer
from infra.serving.pool import MAX_SERVER_LOSSES, Launch, ServerPool
from tests.asking import PROBE, QUICK, assert_failed, prompts, wait_until
from tests.fakes.openai_server import FakeOpenAIServer, Reply


class Place:
    """Where one replica lives: a new server at each start, as `server(start)` makes it."""

    def __init__(self, server: Callable[[int], FakeOpenAIServer] = lambda _start: FakeOpenAIServer()) -> None:
        self._server = server
        self.servers: list[FakeOpenAIServer] = []
        self.running = 0
        self.open = asyncio.Event()
        """A start waits for it."""
        self.open.set()

    @contextlib.asynccontextmanager
    async def launch(self) -> AsyncIterator[ExternalServer]:
        await self.open.wait()
        async with self._server(len(self.servers) + 1) as fake:
            self.servers.append(fake)
            self.running += 1
            try:
                async with ExternalServer(fake.base_url, "key", "verifier", patience_seconds=5) as server:
                    yield server
            finally:
                self.running -= 1

    def asked(self, name: str) -> int:
        return sum(server.requests[name] for server in self.servers)


def pool_of(*launches: Launch, concurrency: int = 8, **servers: Any) -> ServerPool:
    limits = ServersConfig(**({"hang_timeout_seconds": 30.0} | servers))
    return ServerPool(launches, GenerateConfig(**QUICK, concurrency=concurrency), limits)


async def ask(pool: ServerPool, count: int, shard: str = "p") -> list[dict[str, Any]]:
    async with asyncio.timeout(20):
        return await generate_rows(pool, prompts(count, shard), GenerateConfig())


def hangs(*names: str) -> FakeOpenAIServer:
    return FakeOpenAIServer(lambda name, _n: Reply(hang=(not names and name != PROBE) or name in names))


async def test_case_7_a_hung_engine_is_replaced_and_each_of_its_rows_asked_once_more() -> None:
    """/health and /metrics answer, no token moves: lost within the bound, started again, nothing else asked twice."""
    place = Place(lambda start: hangs("p3", "p4") if start == 1 else FakeOpenAIServer())
    began = time.monotonic()
    async with pool_of(place.launch, hang_timeout_seconds=1.0) as pool:
        rows = await ask(pool, 20)
        assert 1.0 <= time.monotonic() - began < 10
    assert {row["status"] for row in rows} == {"ok"}
    assert len(place.servers) == 2
    assert {f"p{index}": place.asked(f"p{index}") for index in range(20)} == {
        f"p{index}": 2 if index in (3, 4) else 1 for index in range(20)
    }
    assert place.running == 0


@pytest.mark.seconds
async def test_a_server_that_works_slowly_is_left_alone() -> None:
    """No answer for three times the limit, but its tokens move."""
    fake = FakeOpenAIServer(lambda _p, _n: Reply(latency_seconds=3.0))
    place = Place(lambda _start: fake)

    async def work() -> None:
        while True:
            await asyncio.sleep(0.1)
            fake.num_generation_tokens += 1

    working = asyncio.create_task(work())
    async with pool_of(place.launch, hang_timeout_seconds=1.0) as pool:
        assert [row["status"] for row in await ask(pool, 4)] == ["ok"] * 4
    working.cancel()
    assert len(place.servers) == 1


async def test_requests_go_to_the_server_with_the_fewest_in_flight() -> None:
    first, second = Place(), Place()
    async with pool_of(first.launch, second.launch) as pool:
        await wait_until(lambda: all(replica.serving for replica in pool.replicas))
        one, other = first.servers[0], second.servers[0]

        async def until_the_other_had_most() -> None:
            await wait_until(lambda: other.requests.total() > 50, 20)

        one.hold = until_the_other_had_most
        await ask(pool, 60)
        assert (pool.in_flight, pool.window.locked()) == (0, False)
        assert sum(load.num_generation_tokens for load in await pool.progress()) >= 60
    assert one.max_in_flight + other.max_in_flight <= 9, "one window over both"
    assert one.max_in_flight == 4
    assert other.requests.total() > 3 * one.requests.total()


@pytest.mark.seconds
async def test_a_dead_servers_rows_move_to_the_others_while_it_starts_again() -> None:
    first = Place(lambda start: FakeOpenAIServer(lambda _p, _n: Reply(latency_seconds=0.3)))
    second = Place()
    async with pool_of(first.launch, second.launch) as pool:
        await wait_until(lambda: all(replica.serving for replica in pool.replicas))
        asking = asyncio.create_task(ask(pool, 40))
        await wait_until(lambda: first.servers[0].in_flight > 0)
        first.open.clear()
        await first.servers[0].stop()
        rows = await asking
        assert [row["status"] for row in rows] == ["ok"] * 40, "with the first one still away"
        assert not pool.replicas[0].serving
        first.open.set()
        await wait_until(lambda: pool.replicas[0].serving)
        back = first.servers[1]
        back.reply = None

        async def until_it_has_its_share() -> None:
            await wait_until(lambda: back.requests.total() > 10)

        second.servers[0].hold = until_it_has_its_share
        await ask(pool, 20, "q")
    assert back.requests.total() > 10, "it has its share again"


async def test_the_window_stays_bounded_when_all_load_falls_on_one_server() -> None:
    """Every request of a window of 200 fits the connections of the one server that is left."""
    full = asyncio.Event()

    async def until_full() -> None:
        if fake.in_flight == 200:
            full.set()
        await full.wait()

    fake = FakeOpenAIServer()
    async with pool_of(Place(lambda _start: fake).launch, concurrency=200) as pool:
        await wait_until(lambda: pool.replicas[0].serving)
        fake.hold = until_full
        await ask(pool, 200)
    assert fake.max_in_flight == 200


@pytest.mark.seconds
async def test_a_row_that_was_in_flight_when_many_servers_died_is_not_asked_again() -> None:
    place = Place(lambda _start: FakeOpenAIServer(lambda name, _n: Reply(kill=name == "p2")))
    async with pool_of(place.launch, concurrency=1) as pool:
        rows = await ask(pool, 5)
    assert_failed(rows[2], f"{MAX_SERVER_LOSSES} servers were lost")
    assert [row["status"] for row in rows] == ["ok", "ok", "failed", "ok", "ok"]
    assert place.asked("p2") == MAX_SERVER_LOSSES


async def test_no_server_left_is_an_error_and_no_row_is_to_blame() -> None:
    place = Place(lambda _start: hangs())
    async with pool_of(place.launch, hang_timeout_seconds=0.2, max_restarts=1) as pool:
        with pytest.raises(ServerError, match=r"No server is left\. Server 1 was lost 2 times.*no token has moved"):
            await ask(pool, 3)
    assert len(place.servers) == 2


async def test_a_server_that_cannot_be_started_leaves_the_work_to_the_others() -> None:
    @contextlib.asynccontextmanager
    async def never() -> AsyncIterator[ExternalServer]:
        raise ServerError("out of memory")
        yield

    async with pool_of(never, Place().launch) as pool:
        assert len(await ask(pool, 5)) == 5
        assert str(pool.replicas[0].given_up) == "out of memory"
    async with pool_of(never, never) as pool:
        with pytest.raises(ServerError, match=r"No server is left\. out of memory"):
            await ask(pool, 5)


async def test_wrong_input_ends_everything_at_once() -> None:
    @contextlib.asynccontextmanager
    async def refuses() -> AsyncIterator[ExternalServer]:
        raise InputError("vllm", "refuses its flags")
        yield

    async with pool_of(refuses, Place().launch) as pool:
        await wait_until(lambda: pool.replicas[1].serving)
        with pytest.raises(InputError, match="refuses its flags"):
            await ask(pool, 5)


async def test_leaving_ends_servers_that_serve_and_starts_that_go_on() -> None:
    serving, starting = Place(), Place()
    starting.open.clear()
    async with pool_of(serving.launch, starting.launch) as pool:
        await ask(pool, 3)
        assert serving.running == 1
    assert serving.running == 0
    assert starting.servers == []
