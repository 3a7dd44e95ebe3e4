"""The vLLM server's life against a stand-in: an executable that takes vLLM's command line and serves real HTTP."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from infra import vllm_server
from infra.errors import InputError, ServerError
from infra.processes import descendants, living, process_token
from infra.serving import load_progress
from infra.vllm_server import VllmConfig, VllmServer

# Stands where vLLM's interpreter would: `FAKE -m vllm.entrypoints.openai.api_server --host ...`. What happens before
# it listens comes from the environment, which a VllmConfig can set.
FAKE_INTERPRETER = r"""
import json, os, sys, time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
options = dict(zip(sys.argv[3:], sys.argv[4:]))
starts = Path(os.environ["FAKE_FOLDER"], "starts")
starts.write_text((starts.read_text() if starts.exists() else "") + options["--port"] + "\n")
Path(os.environ["FAKE_FOLDER"], "environment.json").write_text(json.dumps(dict(os.environ)))
print("INFO loading", flush=True)
exec(os.environ.get("FAKE_START", ""))

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        if self.path == "/v1/models" and self.headers["Authorization"] != "Bearer " + os.environ["VLLM_API_KEY"]:
            return self.answer(401, "{}")
        models = json.dumps({"data": [{"id": options["--served-model-name"]}]})
        pages = {"/health": "", "/v1/models": models, "/metrics": os.environ.get("FAKE_METRICS", "")}
        self.answer(200, pages[self.path])
    def answer(self, code, text):
        self.send_response(code)
        self.end_headers()
        self.wfile.write(text.encode())

ThreadingHTTPServer(("127.0.0.1", int(options["--port"])), Handler).serve_forever()
"""

METRICS = """\
vllm:spec_decode_num_drafts_total{engine="0"} 15.0
vllm:generation_tokens_total{engine="0"} 111.0
"""


@pytest.fixture
def token() -> Iterator[str]:
    value = process_token("test", uuid.uuid4().hex)
    yield value
    for pid in living(value):
        os.kill(pid, signal.SIGKILL)


@pytest.fixture
def interpreter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FAKE_FOLDER", str(tmp_path))
    monkeypatch.setattr(vllm_server, "POLL_SECONDS", 0.05)
    path = tmp_path / "python"
    path.write_text(f"#!{sys.executable}\n{FAKE_INTERPRETER}")
    path.chmod(0o755)
    return path


def server_of(tmp_path: Path, token: str, *, start: str = "", **options: Any) -> VllmServer:
    config = VllmConfig(
        python=str(tmp_path / "python"),
        environment={"FAKE_START": start, "FAKE_METRICS": METRICS},
        startup_timeout_seconds=options.pop("startup_timeout_seconds", 30.0),
    )
    return VllmServer(
        config,
        model_path=tmp_path,
        served_name="the-model",
        log_path=tmp_path / "server.log",
        token=token,
        **options,
    )


async def get(url: str, headers: dict[str, str] | None = None) -> httpx.Response:
    async with httpx.AsyncClient(trust_env=False) as client:
        return await client.get(url, headers=headers)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(15):
        while not condition():  # noqa: ASYNC110 (a file or a process, not an event of ours)
            await asyncio.sleep(0.05)


@pytest.mark.usefixtures("interpreter")
async def test_serves_and_leaves_nothing(tmp_path: Path, token: str) -> None:
    server = server_of(tmp_path, token, speculative_config={"method": "ngram", "num_speculative_tokens": 3})
    assert not server.alive()
    async with server:
        assert server.alive()
        pids = living(token)
        command_lines = b"".join(Path(f"/proc/{pid}/cmdline").read_bytes() for pid in pids)
        assert server.api_key.encode() not in command_lines
        assert server.api_key not in " ".join(server.flags)
        headers = {"Authorization": f"Bearer {server.api_key}"}
        assert (await get(f"{server.base_url}/models", headers=headers)).status_code == 200
        assert (await get(f"{server.base_url}/models")).status_code == 401
        assert (await server.counters()).num_drafts == 15
        assert (await server.progress()).num_generation_tokens == 111
    assert not server.alive()
    assert living(token) == []
    with pytest.raises(httpx.ConnectError):
        await get(f"{server.base_url}/models")
    position = server.flags.index("--speculative-config")
    assert server.flags[position + 1] == '{"method": "ngram", "num_speculative_tokens": 3}'
    assert "--port" not in server.flags  # the same from start to start
    assert server.api_key not in (tmp_path / "server.log").read_text()


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize(
    "start",
    ["raise ValueError('no room for the model')", "print('RuntimeError: no room for the model'); sys.exit(1)"],
)
async def test_early_exit_shows_the_last_errors_at_once(tmp_path: Path, token: str, start: str) -> None:
    (tmp_path / "server.log").write_text("ValueError: of an earlier attempt\n")
    started = time.monotonic()
    with pytest.raises(ServerError, match=r"code 1 while starting(.|\n)*no room for the model") as caught:
        async with server_of(tmp_path, token, start=start):
            pass
    assert time.monotonic() - started < 10
    assert "earlier attempt" not in str(caught.value)
    assert len((tmp_path / "starts").read_text().split()) == 1


@pytest.mark.usefixtures("interpreter")
async def test_a_configuration_that_vllm_refuses_is_the_users(tmp_path: Path, token: str) -> None:
    said = "ValidationError: 1 validation error for ModelConfig\\n  Value error, It is too long. [type=value_error]"
    with pytest.raises(InputError, match=r"^vllm: vLLM refuses its configuration: It is too long\. The log is /"):
        async with server_of(tmp_path, token, start=f"print('{said}'); sys.exit(1)"):
            pass


@pytest.mark.usefixtures("interpreter")
async def test_a_flag_that_vllm_refuses_is_the_users(tmp_path: Path, token: str) -> None:
    start = "import argparse; argparse.ArgumentParser(prog='api_server.py').parse_args(['--no-such'])"
    with pytest.raises(InputError, match=r"^vllm: .*unrecognized arguments: --no-such$"):
        async with server_of(tmp_path, token, start=start):
            pass


@pytest.mark.seconds
@pytest.mark.usefixtures("interpreter")
async def test_not_ready_in_time(
    tmp_path: Path, token: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(load_progress, "NEWS_SECONDS", 0.3)
    start = (
        "time.sleep(1.5)\n"
        "print('Loading safetensors checkpoint shards:  40% Completed | 2/5 [00:01<00:02,  1.20it/s]', flush=True)\n"
        "time.sleep(60)"
    )
    with caplog.at_level(logging.INFO), pytest.raises(ServerError, match="startup_timeout_seconds") as caught:
        async with server_of(tmp_path, token, start=start, startup_timeout_seconds=6.0):
            pass
    assert living(token) == []
    assert "s of at most 6 s: it says: loading" in caplog.text
    assert caplog.text.count("s of at most 6 s: weights: 40 % (2 of 5)") == 1, "what is not new is not repeated"
    assert "40% Completed" in str(caught.value)


@pytest.mark.usefixtures("interpreter")
async def test_a_taken_port_is_tried_once_more_on_another(tmp_path: Path, token: str) -> None:
    start = (
        "import errno\nif starts.read_text().count('\\n') == 1: raise OSError(errno.EADDRINUSE, os.strerror(98))"
    )
    async with server_of(tmp_path, token, start=start) as server:
        assert server.alive()
    assert len(set((tmp_path / "starts").read_text().split())) == 2
    with pytest.raises(ServerError, match="Address already in use"):
        async with server_of(
            tmp_path, token, start="import errno; raise OSError(errno.EADDRINUSE, os.strerror(98))"
        ):
            pass
    assert len((tmp_path / "starts").read_text().split()) == 4


@pytest.mark.usefixtures("interpreter")
async def test_cancelling_the_start_leaves_nothing(tmp_path: Path, token: str) -> None:
    task = asyncio.ensure_future(server_of(tmp_path, token, start="time.sleep(60)").__aenter__())
    await until((tmp_path / "starts").exists)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert living(token) == []


@pytest.mark.usefixtures("interpreter")
async def test_a_server_that_dies_is_seen(tmp_path: Path, token: str) -> None:
    async with server_of(tmp_path, token) as server:
        (child,) = (pid for pid in living(token) if not descendants(pid))
        os.kill(child, signal.SIGKILL)
        await until(lambda: not server.alive())
        with pytest.raises(ServerError, match="does not give its metrics"):
            await server.metrics_text()


@pytest.mark.seconds
@pytest.mark.usefixtures("interpreter")
async def test_the_loop_is_not_blocked(tmp_path: Path, token: str) -> None:
    longest = 0.0

    async def beat() -> None:
        nonlocal longest
        while True:
            before = time.monotonic()
            await asyncio.sleep(0.01)
            longest = max(longest, time.monotonic() - before)

    beating = asyncio.ensure_future(beat())
    slow = "import signal; signal.signal(signal.SIGTERM, lambda *_: (time.sleep(4.0), os._exit(0)))"
    async with server_of(tmp_path, token, start=slow):
        leaving = time.monotonic()
    assert time.monotonic() - leaving > 4.0
    await asyncio.sleep(0.05)  # let a late beat be noted
    beating.cancel()
    assert longest < 3.0, "what takes four seconds held up the loop"


@pytest.mark.usefixtures("interpreter")
async def test_the_hub_is_used_only_for_models_that_are_not_here(
    tmp_path: Path, token: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    for model_path, offline in ((str(tmp_path), "1"), ("org/name", None)):
        config = VllmConfig(python=str(tmp_path / "python"))
        async with VllmServer(
            config, model_path=model_path, served_name="m", log_path=tmp_path / "log", token=token
        ):
            environment = json.loads((tmp_path / "environment.json").read_text())
        assert environment.get("HF_HUB_OFFLINE") == offline
        assert environment["VLLM_NO_USAGE_STATS"] == "1"
        assert environment["SPT_NOENV"] == "1"
