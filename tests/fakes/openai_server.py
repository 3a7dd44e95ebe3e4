"""An OpenAI-compatible HTTP server whose every answer a test can spoil.

It is a real server on a real socket (plain asyncio), so a client's time limits, retries and connection handling
are exercised as they are. It stands in for vLLM: `/v1/chat/completions`, `/v1/models`, `/health`, `/metrics`, and
`/v1/completions` for the log-probabilities of a prompt.

    with FakeOpenAIServer() as server:                 # in a thread of its own
        server.script("hello", Reply(status=503), Reply(text="hi"))
        ...
    async with FakeOpenAIServer() as server: ...       # in the running loop

Token ids are the UTF-8 bytes of the text, so a test can decode what it got. The answer to a request is, in this
order: the next `Reply` scripted for its prompt (the last one stays), `server.reply(prompt, nth)`, a good answer.
Run as a process of its own: `python -m tests.fakes.openai_server --port 8000`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import threading
from collections import Counter, deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any


class _Unset:
    """Marks a field of `Reply` that the server fills in rightly."""


UNSET = _Unset()


@dataclass(frozen=True)
class Reply:
    """One answer of the server: what a sound vLLM would say, and what is to be wrong with it."""

    text: str | None = "an answer"
    """`message.content`; None for a null content."""
    reasoning: str | None = None
    """The thinking, sent under `reasoning_field`."""
    reasoning_field: str = "reasoning"
    """`reasoning` (vLLM today) or `reasoning_content` (older servers)."""
    tool_calls: list[dict[str, Any]] | None = None
    finish_reason: str | None = "stop"
    token_ids: list[int] | _Unset | None = UNSET
    """Replaces `choices[0].token_ids`."""
    prompt_token_ids: list[int] | _Unset | None = UNSET
    """Replaces the top-level `prompt_token_ids`."""
    completion_tokens: int | None = None
    """Replaces `usage.completion_tokens`."""
    prompt_tokens: int | None = None
    """Replaces `usage.prompt_tokens`."""
    latency_seconds: float = 0.0
    """Waits this long before the answer."""
    status: int = 200
    error: str = "the fake was told to fail"
    """Message of the error body where the status is no 200."""
    headers: dict[str, str] = field(default_factory=dict)
    """Extra response headers, for example `{"Retry-After": "1"}`."""
    body: bytes | None = None
    """Sent as it is in place of the JSON answer (garbage)."""
    cut: bool = False
    """Closes the connection in the middle of the body."""
    drop: bool = False
    """Closes the connection without a byte of an answer."""
    kill: bool = False
    """The whole server vanishes: no more listening, every open connection reset."""
    hang: bool = False
    """Never answers, while `/health` still says 200."""


GapFunction = Callable[[list[int], int], float]
"""(tokens, place of one of them) -> how much less likely that one is than the likeliest in its place, in nats."""

ReplyFunction = Callable[[str, int], Reply]
"""(prompt, how many requests for that prompt came before) -> the answer."""


class FakeOpenAIServer:
    """The server. What it saw is in `requests`, `bodies`, `max_in_flight`; `stop()` makes it vanish.

    Args:
        reply: answers every prompt that has no script of its own.
        model: the one model it serves; a request for another is a 404, as with vLLM.
        api_key: where given, a request without it is a 401.
        port: 0 for any free one.
    """

    def __init__(
        self,
        reply: ReplyFunction | None = None,
        *,
        model: str = "verifier",
        api_key: str | None = None,
        port: int = 0,
    ) -> None:
        self.reply = reply
        self.model = model
        self.api_key = api_key
        self.port = port
        self.hold: Callable[[], Awaitable[None]] | None = None
        """Awaited by each completion request once it is in flight, before anything is answered."""
        self.health_status = 200
        self.metrics_text: str | None = ""
        """The /metrics page; where empty, one made of what the server has done; None for a 404."""
        self.num_generation_tokens = 0
        self.num_prompt_tokens = 0
        self.requests: Counter[str] = Counter()
        """Completion requests received, by prompt (the last message's content)."""
        self.bodies: deque[dict[str, Any]] = deque(maxlen=10_000)
        """JSON bodies of the completion requests, in order of arrival."""
        self.in_flight = 0
        self.max_in_flight = 0
        self.gap_nats: GapFunction = lambda tokens, place: 0.0
        """By which `/v1/completions` scores a prompt."""
        self.scoring: tuple[int, bytes] | None = None
        """Status and body that it answers instead."""
        self.scored: list[dict[str, Any]] = []
        """JSON bodies of the requests to it."""
        self.speculates = False
        """Whether the page of counters says that each answer was drafted: three tokens, two of them accepted."""
        self._scripts: dict[str, deque[Reply]] = {}
        self._connections: set[asyncio.StreamWriter] = set()
        self._server: asyncio.Server | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    @property
    def base_url(self) -> str:
        """What an OpenAI client takes: ends in `/v1`."""
        return f"http://127.0.0.1:{self.port}/v1"

    def script(self, prompt: str, *replies: Reply) -> None:
        """The first request for `prompt` gets the first reply and so on; the last one answers all that follow."""
        self._scripts[prompt] = deque(replies)

    async def start(self) -> None:
        """Listens in the running loop."""
        self._loop = asyncio.get_running_loop()
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port, limit=2**24, backlog=1024)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """Vanishes as a killed process does: no more listening, every open connection reset."""
        if self._server is None:
            return
        self._server.close()
        self._server = None
        for writer in list(self._connections):
            writer.transport.abort()
        await asyncio.sleep(0)

    def kill(self) -> None:
        """`stop` from another thread than the server's."""
        assert self._loop is not None
        asyncio.run_coroutine_threadsafe(self.stop(), self._loop).result(timeout=10)

    async def __aenter__(self) -> FakeOpenAIServer:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    def __enter__(self) -> FakeOpenAIServer:
        started = threading.Event()

        async def run() -> None:
            await self.start()
            started.set()
            await forever.wait()
            await self.stop()

        forever = asyncio.Event()
        self._forever = forever
        self._thread = threading.Thread(target=lambda: asyncio.run(run()), name="fake-openai", daemon=True)
        self._thread.start()
        if not started.wait(timeout=10):
            raise RuntimeError("the fake server did not start")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._loop is not None
        assert self._thread is not None
        self._loop.call_soon_threadsafe(self._forever.set)
        self._thread.join(timeout=10)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._connections.add(writer)
        try:
            while await self._one_request(reader, writer):
                pass
        except (ConnectionError, asyncio.IncompleteReadError):
            pass  # the client went away
        finally:
            self._connections.discard(writer)
            writer.close()

    async def _one_request(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Reads one request and answers it. Returns whether the connection stays open."""
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        path = head[0].split(" ")[1]
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:])}
        body = await reader.readexactly(int(headers.get("content-length") or 0))
        if path == "/v1/chat/completions":
            return await self._complete(json.loads(body), headers, reader, writer)
        if path == "/v1/completions":
            return await self._score(json.loads(body), writer)
        if path == "/v1/models":
            listing = {"object": "list", "data": [{"id": self.model, "object": "model"}]}
            return await _send(writer, 200, json.dumps(listing).encode())
        if path == "/health":
            return await _send(writer, self.health_status, b"")
        if path == "/metrics":
            return await self._send_metrics(writer)
        return await _send(writer, 404, _error_body(404, f"no such path: {path}"))

    async def _send_metrics(self, writer: asyncio.StreamWriter) -> bool:
        if self.metrics_text is None:
            return await _send(writer, 404, _error_body(404, "no metrics"))
        text = self.metrics_text or (
            f'vllm:generation_tokens_total{{engine="0"}} {self.num_generation_tokens}\n'
            f'vllm:prompt_tokens_total{{engine="0"}} {self.num_prompt_tokens}\n'
            f'vllm:num_requests_running{{engine="0"}} {self.in_flight}\n'
        )
        if self.speculates and not self.metrics_text:
            text += speculation_counters(self.num_generation_tokens)
        return await _send(writer, 200, text.encode(), content_type="text/plain; version=0.0.4")

    async def _complete(
        self,
        request: dict[str, Any],
        headers: dict[str, str],
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> bool:
        prompt = str(request["messages"][-1]["content"])
        reply = self._next_reply(prompt)
        self.requests[prompt] += 1
        self.bodies.append(request)
        if self.api_key is not None and headers.get("authorization") != f"Bearer {self.api_key}":
            return await _send(writer, 401, _error_body(401, "Unauthorized"))
        if request["model"] != self.model:
            return await _send(writer, 404, _error_body(404, f"The model `{request['model']}` does not exist."))
        self.in_flight += 1
        self.max_in_flight = max(self.max_in_flight, self.in_flight)
        try:
            if self.hold is not None:
                await self.hold()
            if reply.hang:
                await reader.read(1)  # returns when the client gives up
                return False
            if reply.latency_seconds:
                await asyncio.sleep(reply.latency_seconds)
        finally:
            self.in_flight -= 1
        if reply.drop:
            return False
        if reply.kill:
            await self.stop()
            return False
        self.num_generation_tokens += 1
        self.num_prompt_tokens += 1
        if reply.status != 200:
            body = _error_body(reply.status, reply.error) if reply.body is None else reply.body
        else:
            body = completion_body(request, reply) if reply.body is None else reply.body
        return await _send(writer, reply.status, body, extra=reply.headers, cut=reply.cut)

    async def _score(self, request: dict[str, Any], writer: asyncio.StreamWriter) -> bool:
        self.scored.append(request)
        status, body = self.scoring or (200, self._scores(request))
        return await _send(writer, status, body)

    def _scores(self, request: dict[str, Any]) -> bytes:
        """As vLLM answers `prompt_logprobs: 1`: nothing of the first token, else the token and the likeliest one."""
        tokens = request["prompt"]
        places: list[dict[str, Any] | None] = [None]
        for place in range(1, len(tokens)):
            gap = self.gap_nats(tokens, place)
            scored = {str(tokens[place]): {"logprob": -0.25 - gap, "rank": 2 if gap else 1, "decoded_token": "x"}}
            if gap:
                scored["-1"] = {"logprob": -0.25, "rank": 1, "decoded_token": "y"}
            places.append(scored)
        choice = {"index": 0, "text": "x", "finish_reason": "length", "prompt_logprobs": places}
        return json.dumps({"object": "text_completion", "model": request["model"], "choices": [choice]}).encode()

    def _next_reply(self, prompt: str) -> Reply:
        script = self._scripts.get(prompt)
        if script:
            return script.popleft() if len(script) > 1 else script[0]
        if self.reply is not None:
            return self.reply(prompt, self.requests[prompt])
        return Reply()


def speculation_counters(num_drafts: int) -> str:
    """vLLM's counters after so many drafts of three tokens, of which two were accepted."""
    counts = {"num_drafts": 1, "num_draft_tokens": 3, "num_accepted_tokens": 2}
    lines = [f'vllm:spec_decode_{name}_total{{engine="0"}} {each * num_drafts}\n' for name, each in counts.items()]
    per_position = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
    lines += [
        f'{per_position}{{engine="0",position="{place}"}} {each * num_drafts}\n'
        for place, each in enumerate((1, 1, 0))
    ]
    return "".join(lines)


def completion_body(request: dict[str, Any], reply: Reply) -> bytes:
    """The JSON that vLLM sends for a chat completion asked with `return_token_ids`."""
    asked = bool(request.get("return_token_ids"))
    prompt_ids = list("".join(str(message["content"]) for message in request["messages"]).encode())
    token_ids = [*((reply.reasoning or "") + (reply.text or "")).encode(), 0]  # 0 ends the turn
    message = {
        "role": "assistant",
        "content": reply.text,
        "tool_calls": reply.tool_calls or [],
        reply.reasoning_field: reply.reasoning,
    }
    choice = {
        "index": 0,
        "message": message,
        "logprobs": None,
        "finish_reason": reply.finish_reason,
        "stop_reason": None,
        "token_ids": _either(reply.token_ids, token_ids if asked else None),
    }
    num_prompt = len(prompt_ids) if reply.prompt_tokens is None else reply.prompt_tokens
    num_completion = len(token_ids) if reply.completion_tokens is None else reply.completion_tokens
    answer = {
        "id": "chatcmpl-0",
        "object": "chat.completion",
        "created": 0,
        "model": request["model"],
        "choices": [choice],
        "usage": {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_completion,
            "total_tokens": num_prompt + num_completion,
        },
        "prompt_token_ids": _either(reply.prompt_token_ids, prompt_ids if asked else None),
        "kv_transfer_params": None,
    }
    return json.dumps(answer).encode()


def _either(given: list[int] | _Unset | None, otherwise: list[int] | None) -> list[int] | None:
    return otherwise if isinstance(given, _Unset) else given


def _error_body(status: int, message: str) -> bytes:
    error = {"message": message, "type": "Error", "param": None, "code": status}
    return json.dumps({"error": error}).encode()


async def _send(
    writer: asyncio.StreamWriter,
    status: int,
    body: bytes,
    *,
    content_type: str = "application/json",
    extra: dict[str, str] | None = None,
    cut: bool = False,
) -> bool:
    """Writes one response. Returns whether the connection stays open: not after a cut."""
    lines = [f"HTTP/1.1 {status} -", f"Content-Type: {content_type}", f"Content-Length: {len(body)}"]
    lines += [f"{name}: {value}" for name, value in (extra or {}).items()]
    head = ("\r\n".join(lines) + "\r\n\r\n").encode()
    writer.write(head + (body[: len(body) // 2] if cut else body))
    await writer.drain()
    return not cut


async def _serve_forever(port: int, latency_seconds: float, num_words: int) -> None:
    reply = Reply(text="word " * num_words, latency_seconds=latency_seconds)
    async with FakeOpenAIServer(lambda _prompt, _nth: reply, port=port) as server:
        print(server.base_url, flush=True)
        await asyncio.Event().wait()


def main() -> None:
    """Serves good answers until interrupted; the first line on stdout is the base URL."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--latency-seconds", type=float, default=0.0)
    parser.add_argument("--words", type=int, default=100, help="length of every answer, 5 tokens a word")
    options = parser.parse_args()
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_serve_forever(options.port, options.latency_seconds, options.words))


if __name__ == "__main__":
    main()
