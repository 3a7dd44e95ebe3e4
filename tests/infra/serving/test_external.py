"""A server of somebody else's: waited for with patience, refused at once where waiting cannot help."""

from __future__ import annotations

import asyncio
import time

import pytest

from infra.errors import InputError, ServerError
from infra.serving import external as external_server
from infra.serving.external import ExternalServer
from tests.fakes.openai_server import FakeOpenAIServer, Reply


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(external_server, "FIRST_WAIT_SECONDS", 0.05)


def external(server: FakeOpenAIServer, *, key: str = "key", patience_seconds: float = 5.0) -> ExternalServer:
    return ExternalServer(server.base_url, key, "verifier", patience_seconds=patience_seconds)


async def test_a_sound_server_is_used_and_its_metrics_read() -> None:
    async with FakeOpenAIServer(api_key="right") as fake, external(fake, key="right") as server:
        assert fake.requests.total() == 1, "one token, which a hung engine could not give"
        assert "vllm:generation_tokens_total" in await server.metrics_text()
        assert server.alive()


async def test_one_that_comes_up_later_is_waited_for() -> None:
    async with FakeOpenAIServer() as fake:
        port = fake.port
    later = FakeOpenAIServer(port=port)
    waiting = asyncio.create_task(external(later).__aenter__())
    await asyncio.sleep(0.2)
    async with later:
        server = await waiting
        await server.__aexit__(None, None, None)


@pytest.mark.parametrize("reply", [Reply(hang=True), Reply(status=500)], ids=["hangs", "errors"])
async def test_one_that_lists_its_models_and_answers_nothing_is_not_sound(reply: Reply) -> None:
    async with FakeOpenAIServer(lambda _p, _n: reply) as fake:
        began = time.monotonic()
        with pytest.raises(ServerError, match=rf"{fake.base_url} is not there after 0\.4 s"):
            async with external(fake, patience_seconds=0.4):
                pass
        assert time.monotonic() - began < 5, "the patience bounds a server that hangs, too"


async def test_one_that_stays_away_is_an_error_that_names_the_url() -> None:
    async with FakeOpenAIServer() as fake:
        pass
    with pytest.raises(ServerError, match=rf"{fake.base_url} is not there after 0\.3 s"):
        async with external(fake, patience_seconds=0.3):
            pass


async def test_a_wrong_key_is_the_users_and_never_shown() -> None:
    async with FakeOpenAIServer(lambda _p, _n: Reply(), api_key="right") as fake:
        with pytest.raises(InputError, match=r"external_key_variable: .* refuses the key") as caught:
            async with external(fake, key="wrong-secret"):
                pass
    assert "wrong-secret" not in str(caught.value)


async def test_another_model_is_the_users() -> None:
    async with FakeOpenAIServer(model="other") as fake:
        with pytest.raises(InputError, match=r"has no model 'verifier', only other; set generate\.servers\."):
            async with external(fake):
                pass
