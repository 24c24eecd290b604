"""The server's endpoints: OpenAI's completions and chat completions, models, health, metrics and a page."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from forebay.commands.terminal import reason_of
from forebay.runtime.run.sampling import Sampling
from forebay.serving.answer_text import AnswerText
from forebay.serving.batcher import STOPPING, Batcher, Heard, Pending
from forebay.serving.metrics import TYPE, Metrics
from forebay.serving.openai_responses import chunk, whole
from forebay.serving.refusal import Refusal
from forebay.serving.requests import PLAIN, Inquiry, read_inquiry, tokens_of
from forebay.serving.state import gauges, state

MOST_BODY_NBYTES = 4 << 20
HEAD_S = 30.0  # for the headers of a request to arrive
BODY_S = 30.0  # for its body
SEND_S = 60.0  # for a client to take what it is sent, until it counts as gone
OPEN = ("/", "/health")  # answered without the key
MOST_CONNECTIONS = 1024  # open at once, and requests under way
CLIENT_LEFT = 499  # nobody sees it but the metrics


@dataclass(frozen=True)
class ServingOptions:
    """What a server is told beside its model: its model's name, the key that requests must bear (None: none), and the
    names of its host that they may use (None: any); how long and how many its clients may be; how tokens are drawn for
    requests that do not say."""

    name: str
    api_key: str | None = None
    hosts: frozenset[str] | None = None
    send_s: float = SEND_S
    body_s: float = BODY_S
    head_s: float = HEAD_S
    most_connections: int = MOST_CONNECTIONS
    sampling: Sampling = PLAIN


def make_app(
    batcher: Batcher, tokenize: Callable[[Inquiry], list[int]], decode: Callable[[list[int]], str],
    options: ServingOptions, metrics: Metrics,
) -> ASGIApp:
    """The application; `tokenize` (Refusal for what has no tokens) is called in threads."""
    at = _Endpoints(batcher, tokenize, decode, options, metrics)
    app = Starlette(routes=[
        Route("/v1/completions", at.complete, methods=["POST"]),
        Route("/v1/chat/completions", at.complete, methods=["POST"]),
        Route("/v1/models", at.models), Route("/v1/models/{name:path}", at.model),
        Route("/health", at.health), Route("/metrics", at.metrics_text), Route("/state", at.state),
        Route("/", at.page)],
        exception_handlers={Refusal: _refused, HTTPException: _no_route, Exception: _failed})
    return _Guard(app, options, metrics)


def _refused(request: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, Refusal)
    headers = {429: {"Retry-After": "1"}, 401: {"WWW-Authenticate": "Bearer"}}.get(error.status)
    return JSONResponse(error.body(), error.status, headers)


def _no_route(request: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    what = {404: f"there is nothing at {request.url.path[:200]}; see /v1/models",
            405: f"{request.method[:20]} is not for {request.url.path[:200]}"}.get(error.status_code, error.detail)
    return JSONResponse(Refusal(error.status_code, what).body(), error.status_code, error.headers)


def _failed(request: HttpRequest, error: Exception) -> Response:
    return JSONResponse(Refusal(500, f"the server failed: {reason_of(error)}").body(), 500)


class _Guard:
    """Asks for the key and the host, counts responses, and refuses what is too much or cut off by the server's end."""

    def __init__(self, app: ASGIApp, options: ServingOptions, metrics: Metrics) -> None:
        self.app, self.options, self.metrics = app, options, metrics
        self._key = options.api_key.encode() if options.api_key is not None else None
        self._under_way = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers, path, began = dict(scope["headers"]), scope["path"], False

        async def counted(message: Any) -> None:
            nonlocal began
            if message["type"] == "http.response.start":
                began = True
                known = path if path in PATHS else "other"
                self.metrics.responded(known, message["status"])
            await send(message)

        refusal = self._refusal(headers, path)
        if refusal is not None:
            await _refused(HttpRequest(scope), refusal)(scope, receive, counted)
            return
        self._under_way += 1
        try:
            await self.app(scope, receive, counted)
        except asyncio.CancelledError:  # the server ends, and its time to finish is over
            if began:
                raise
            await _refused(HttpRequest(scope), Refusal(503, STOPPING))(scope, receive, counted)
        finally:
            self._under_way -= 1

    def _refusal(self, headers: dict[bytes, bytes], path: str) -> Refusal | None:
        hosts = self.options.hosts
        if hosts is not None and _host(headers.get(b"host", b"")) not in hosts:
            return Refusal(403, "this server answers for localhost alone; start it with another --host or an --api-key")
        if self._key is not None and path not in OPEN:
            scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
            if scheme.lower() != b"bearer" or not hmac.compare_digest(key.strip(), self._key):
                return Refusal(401, "send the server's key, as Authorization: Bearer KEY", code="invalid_api_key")
        if self._under_way >= self.options.most_connections and path not in OPEN:
            return Refusal(503, f"{self._under_way} requests are under way; try again later")
        return None


PATHS = ("/v1/completions", "/v1/chat/completions", "/v1/models", "/health", "/metrics", "/state", "/")


def _host(value: bytes) -> str:
    """The host of a Host header, without its port."""
    text = value.decode("latin-1").lower()
    return text.partition("]")[0] + "]" if text.startswith("[") else text.partition(":")[0]


class _Endpoints:
    """The endpoints, over one batcher."""

    def __init__(
        self, batcher: Batcher, tokenize: Callable[[Inquiry], list[int]], decode: Callable[[list[int]], str],
        options: ServingOptions, metrics: Metrics,
    ) -> None:
        self.batcher, self.tokenize, self.decode, self.options = batcher, tokenize, decode, options
        self.metrics, self.created = metrics, int(time.time())
        self._page = Path(__file__).with_name("page.html").read_bytes()

    async def complete(self, request: HttpRequest) -> Response:
        chat = request.url.path == "/v1/chat/completions"
        inquiry = read_inquiry(await self._body(request), self.options.name, chat=chat,
                               sampling=self.options.sampling)
        work = self.batcher
        ids, new_tokens = await asyncio.to_thread(tokens_of, inquiry, self.tokenize, work.prompt, work.new_tokens)
        loop, heard = asyncio.get_running_loop(), asyncio.Queue[Heard]()

        def hear(what: Heard) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is left to hear
                loop.call_soon_threadsafe(heard.put_nowait, what)

        seed = inquiry.seed if inquiry.seed is not None else secrets.randbits(62)
        pending = Pending(ids, new_tokens, inquiry.sampling, seed,
                          AnswerText(self.decode, inquiry.stops, self.batcher.eos), hear)
        self.batcher.submit(pending)
        answer = _Answering(self.batcher, pending, heard, inquiry, self.options)
        try:
            first = await answer.first(request.receive)
        except BaseException:
            self.batcher.leave(pending)
            raise
        if first is None:
            return Response(status_code=CLIENT_LEFT)
        if first.refusal is not None:
            raise first.refusal
        if inquiry.stream:
            return _EventStream(answer, first)
        usage = {"prompt_tokens": len(ids), "completion_tokens": first.tokens, "total_tokens": len(ids) + first.tokens}
        return JSONResponse(whole(answer.heading, chat, pending.answer.text, first.finish, usage))

    async def _body(self, request: HttpRequest) -> bytes:
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":  # others are sent by any page in a browser without asking
            raise Refusal(415, "send the body as Content-Type: application/json")
        parts, size = [], 0
        try:
            async with asyncio.timeout(self.options.body_s):
                async for part in request.stream():
                    size += len(part)
                    if size > MOST_BODY_NBYTES:
                        raise Refusal(413, f"the body is longer than {MOST_BODY_NBYTES} bytes; send less")
                    parts.append(part)
        except TimeoutError as error:
            raise Refusal(408, f"the body did not arrive within {self.options.body_s:g} s") from error
        return b"".join(parts)

    async def models(self, request: HttpRequest) -> Response:
        return JSONResponse({"object": "list", "data": [self._model()]})

    async def model(self, request: HttpRequest) -> Response:
        if request.path_params["name"] != self.options.name:
            raise Refusal(404, f"there is no such model here; this server has {self.options.name!r}", "model",
                          "model_not_found")
        return JSONResponse(self._model())

    def _model(self) -> dict[str, Any]:
        return {"id": self.options.name, "object": "model", "created": self.created, "owned_by": "forebay"}

    async def health(self, request: HttpRequest) -> Response:
        broken = self.batcher.broken
        return JSONResponse({"status": "ok"} if broken is None else {"status": "failed", "reason": str(broken)},
                            200 if broken is None else 503)

    async def metrics_text(self, request: HttpRequest) -> Response:
        return PlainTextResponse(self.metrics.text(gauges(self.batcher)), media_type=TYPE)

    async def state(self, request: HttpRequest) -> Response:
        return JSONResponse(state(self.batcher))

    async def page(self, request: HttpRequest) -> Response:
        policy = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'"
        return Response(self._page, media_type="text/html; charset=utf-8",
                        headers={"Content-Security-Policy": f"{policy}; frame-ancestors 'none'"})


class _Answering:
    """One request between its client and the batcher."""

    def __init__(self, batcher: Batcher, pending: Pending, heard: asyncio.Queue[Heard], inquiry: Inquiry,
                 options: ServingOptions) -> None:
        self.batcher, self.pending, self.heard, self.inquiry, self.options = batcher, pending, heard, inquiry, options
        name = "chat.completion" if inquiry.is_chat else "text_completion"
        self.heading = {"id": ("chatcmpl-" if inquiry.is_chat else "cmpl-") + secrets.token_hex(12), "object": name,
                        "created": int(time.time()), "model": options.name}

    async def first(self, receive: Receive) -> Heard | None:
        """The first that is heard, or, where it is not to be streamed, the last; None if the client left before."""
        what = await self.unless_gone(receive, self._next_heard(not self.inquiry.stream))
        if what is None:
            self.batcher.leave(self.pending)
        return what

    async def _next_heard(self, last: bool) -> Heard:
        while True:
            what = await self.heard.get()
            if what.last or not last:
                return what

    @staticmethod
    async def unless_gone(receive: Receive, work: Awaitable[Any]) -> Any:
        """What `work` gives, or None if the client leaves before."""
        doing, gone = asyncio.ensure_future(work), asyncio.ensure_future(_gone(receive))
        try:
            await asyncio.wait((doing, gone), return_when=asyncio.FIRST_COMPLETED)
            return doing.result() if doing.done() else None
        finally:
            for task in (doing, gone):
                task.cancel()

    async def events(self, first: Heard) -> AsyncIterator[bytes]:
        """The answer as server-sent events."""
        chat, what = self.inquiry.is_chat, first
        if chat:
            yield _event(chunk(self.heading, chat, {"role": "assistant", "content": ""}, None))
        while what.refusal is None:
            if what.text:
                yield _event(chunk(self.heading, chat, {"content": what.text}, None))
            if what.last:
                yield _event(chunk(self.heading, chat, {}, what.finish))
                break
            what = await self.heard.get()
        if what.refusal is not None:
            yield _event(what.refusal.body())
        elif self.inquiry.usage:
            made, prompt = what.tokens, len(self.pending.ids)
            yield _event({**chunk(self.heading, chat, {}, None), "choices": [], "usage": {
                "prompt_tokens": prompt, "completion_tokens": made, "total_tokens": prompt + made}})
        yield b"data: [DONE]\n\n"


class _EventStream(Response):
    """Sends events as they come; a client that leaves, or takes nothing for too long, is heard no more."""

    media_type = "text/event-stream"

    def __init__(self, answering: _Answering, first: Heard) -> None:
        super().__init__(headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self.answering, self.first_heard = answering, first

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with contextlib.suppress(TimeoutError):  # an answer without its end, whose connection is closed
                await _Answering.unless_gone(receive, self._send_all(send))
        finally:
            self.answering.batcher.leave(self.answering.pending)

    async def _send_all(self, send: Send) -> None:
        async def within(message: dict[str, Any]) -> None:
            async with asyncio.timeout(self.answering.options.send_s):
                await send(message)

        await within({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        async for event in self.answering.events(self.first_heard):
            await within({"type": "http.response.body", "body": event, "more_body": True})
        await within({"type": "http.response.body", "body": b""})


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _event(value: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(value, ensure_ascii=False).encode() + b"\n\n"
