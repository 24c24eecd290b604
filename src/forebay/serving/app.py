"""The server's endpoints: OpenAI's completions and chat completions, models, health, metrics and a page."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import time
from dataclasses import dataclass
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from forebay.commands.terminal import reason_of
from forebay.runtime.run.sampling import Sampling
from forebay.serving.answering import Answering, PromptTokens
from forebay.serving.batcher import STOPPING, Batcher
from forebay.serving.choices import Reply
from forebay.serving.dialects.anthropic_messages import MessageReply, chat_of_messages
from forebay.serving.dialects.openai_responses import ResponseReply, chat_of_response
from forebay.serving.messages import read_messages
from forebay.serving.metrics import TYPE, Metrics
from forebay.serving.openai_replies import ChatReply, CompletionReply
from forebay.serving.refusal import Refusal
from forebay.serving.request_fields import RequestFields, header_text, read_object
from forebay.serving.requests import PLAIN, Inquiry, no_such_model, read_inquiry, read_template, tokens_of
from forebay.serving.state import gauges, state
from forebay.serving.text_codec import TextCodec
from forebay.serving.web_page import FILES, page_routes

MOST_BODY_NBYTES, MOST_IMAGES_NBYTES = 4 << 20, 32 << 20  # of a request's body: of text, and with images
HEAD_S = 30.0  # for the headers of a request to arrive
BODY_S = 30.0  # for its body
SEND_S = 60.0  # for a client to take what it is sent, until it counts as gone
OPEN = (*FILES, "/health")  # answered without the key
MOST_CONNECTIONS = 1024  # open at once, and requests under way
ROOM_S = 0.5  # for a request to end after its connection was closed to make room


@dataclass(frozen=True)
class ServingOptions:
    """Options of a server besides its model: the model's name, the key that requests must bear (None: none), and the
    names of its host that they may use (None: any); how long and how many its clients may be; how tokens are drawn for
    requests that do not say; whether fields that are not served are refused, not passed over (`strict`)."""

    name: str
    api_key: str | None = None
    hosts: frozenset[str] | None = None
    send_s: float = SEND_S
    body_s: float = BODY_S
    head_s: float = HEAD_S
    most_connections: int = MOST_CONNECTIONS
    sampling: Sampling = PLAIN
    strict: bool = False


def make_app(
    batcher: Batcher, text: TextCodec, options: ServingOptions, metrics: Metrics
) -> ASGIApp:
    """The application."""
    at = _Endpoints(batcher, text, options, metrics)
    app = Starlette(routes=[
        Route("/v1/completions", at.complete, methods=["POST"]),
        Route("/v1/chat/completions", at.complete, methods=["POST"]),
        Route("/v1/responses", at.respond, methods=["POST"]), Route("/v1/messages", at.message, methods=["POST"]),
        Route("/v1/responses/input_tokens", at.count_tokens, methods=["POST"]),
        Route("/v1/messages/count_tokens", at.count_tokens, methods=["POST"]),
        Route("/tokenize", at.tokenize, methods=["POST"]), Route("/detokenize", at.detokenize, methods=["POST"]),
        Route("/v1/models", at.models), Route("/v1/models/{name:path}", at.model),
        Route("/health", at.health), Route("/metrics", at.metrics_text), Route("/state", at.state),
        *page_routes()],
        exception_handlers=HANDLERS)
    return guarded(app, options, metrics)


def guarded(app: ASGIApp, options: ServingOptions, metrics: Metrics) -> ASGIApp:
    """An application that answers those alone who may ask."""
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


HANDLERS: Any = {Refusal: _refused, HTTPException: _no_route, Exception: _failed}


class _Guard:
    """Asks for the key and the host, counts responses, and refuses what is too much or cut off by the server's end."""

    def __init__(self, app: ASGIApp, options: ServingOptions, metrics: Metrics) -> None:
        self.app, self.options, self.metrics = app, options, metrics
        self._key = options.api_key.encode() if options.api_key is not None else None
        self._under_way = 0
        self._ended = asyncio.Event()  # a request, since somebody looked

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
        try:
            if refusal is None and path not in OPEN and not await self._finds_room():
                refusal = Refusal(503, f"{self._under_way} requests are under way; try again later")
            if refusal is not None:
                await _refused(HttpRequest(scope), refusal)(scope, receive, counted)
                return
            self._under_way += 1
            try:
                await self.app(scope, receive, counted)
            finally:
                self._under_way -= 1
                self._ended.set()
        except asyncio.CancelledError:  # the server ends, and its time to finish is over
            if began:
                raise
            await _refused(HttpRequest(scope), Refusal(503, STOPPING))(scope, receive, counted)

    async def _finds_room(self) -> bool:
        """Return whether there is room, after a short wait: closed connections take a moment to end their requests."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(ROOM_S):
                while self._under_way >= self.options.most_connections:
                    self._ended.clear()
                    await self._ended.wait()
        return self._under_way < self.options.most_connections

    def _refusal(self, headers: dict[bytes, bytes], path: str) -> Refusal | None:
        hosts = self.options.hosts
        if hosts is not None and _host(headers.get(b"host", b"")) not in hosts:
            return Refusal(403, "this server answers for localhost alone; start it with another --host or an --api-key")
        if self._key is not None and path not in OPEN:
            scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
            key = key.strip() if scheme.lower() == b"bearer" else headers.get(b"x-api-key", b"")  # Anthropic's
            if not hmac.compare_digest(key, self._key):
                return Refusal(401, "send the server's key, as Authorization: Bearer KEY", code="invalid_api_key")
        return None


PATHS = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/responses/input_tokens", "/v1/messages",
         "/v1/messages/count_tokens",
         "/tokenize", "/detokenize", "/v1/models", "/v1/embeddings", "/v1/rerank", "/rerank", "/health", "/metrics",
         "/state", *FILES)


def _host(value: bytes) -> str:
    """The host of a Host header, without its port."""
    text = value.decode("latin-1").lower()
    return text.partition("]")[0] + "]" if text.startswith("[") else text.partition(":")[0]


async def read_body(request: HttpRequest, within_s: float, most: int = MOST_BODY_NBYTES) -> bytes:
    """The JSON of a request's body, which arrives within so many seconds; Refusal (408, 413, 415) otherwise."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":  # others are sent by any page in a browser without asking
        raise Refusal(415, "send the body as Content-Type: application/json")
    parts, size = [], 0
    try:
        async with asyncio.timeout(within_s):
            async for part in request.stream():
                size += len(part)
                if size > most:
                    raise Refusal(413, f"the body is longer than {most} bytes; send less")
                parts.append(part)
    except TimeoutError as error:
        raise Refusal(408, f"the body did not arrive within {within_s:g} s") from error
    return b"".join(parts)


class _Endpoints:
    """The endpoints, over one batcher."""

    def __init__(
        self, batcher: Batcher, text: TextCodec, options: ServingOptions, metrics: Metrics
    ) -> None:
        self.batcher, self.text, self.options = batcher, text, options
        self.metrics, self.created = metrics, int(time.time())
        self.adapters = tuple(batcher.lm.captured.adapters)

    async def complete(self, request: HttpRequest) -> Response:
        chat, options = request.url.path == "/v1/chat/completions", self.options
        inquiry = read_inquiry(await self._body(request), options.name, chat=chat, sampling=options.sampling,
                               strict=options.strict, adapters=self.adapters)
        form = ChatReply if chat else CompletionReply
        return await self._answer(request, inquiry, form(inquiry.adapter or options.name, inquiry.usage,
                                                         inquiry.top_logprobs, self.text.decode))

    async def message(self, request: HttpRequest) -> Response:
        inquiry = self._chat(chat_of_messages(read_object(await self._body(request))))
        return await self._answer(request, inquiry, MessageReply(inquiry.adapter or self.options.name))

    async def count_tokens(self, request: HttpRequest) -> Response:
        """Tokens of a request's prompt, as Anthropic and OpenAI have it."""
        messages = request.url.path == "/v1/messages/count_tokens"
        body = read_object(await self._body(request))
        inquiry = self._chat(chat_of_messages(body) if messages else chat_of_response(body))
        count = {"input_tokens": len((await asyncio.to_thread(self.text.tokenize, inquiry))[0])}
        return JSONResponse(count if messages else {"object": "response.input_tokens", **count})

    async def respond(self, request: HttpRequest) -> Response:
        body = read_object(await self._body(request))
        inquiry = self._chat(chat_of_response(body))
        return await self._answer(request, inquiry, ResponseReply(inquiry.adapter or self.options.name, body))

    def _chat(self, body: dict[str, Any]) -> Inquiry:
        return read_inquiry(body, self.options.name, chat=True, sampling=self.options.sampling,
                            strict=self.options.strict, adapters=self.adapters)

    async def _answer(self, request: HttpRequest, inquiry: Inquiry, reply: Reply) -> Response:
        work = self.batcher
        asked, warnings = await asyncio.to_thread(tokens_of, inquiry, self.text.tokenize, work.prompt, work.new_tokens)
        features = await asyncio.to_thread(self.text.features, inquiry)
        count = inquiry.choices * len(asked)
        parts = await asyncio.to_thread(self.text.parts, inquiry, asked[0][0], count)
        answering = Answering(work, inquiry, [PromptTokens(*each, features) for each in asked], parts.decode,
                              parts.parsers, parts.constraints)
        del features  # once computed with a prompt, they are no use
        response = await answering.respond(request.receive, reply, self.options.send_s)
        if told := header_text([*inquiry.warnings, *warnings]):
            response.headers["X-Forebay-Warning"] = told
        return response

    async def tokenize(self, request: HttpRequest) -> Response:
        """Token ids of a text or of a chat, as vLLM has it; `content` is llama.cpp's name of the text."""
        fields = RequestFields(await self._body(request))
        text = fields.get("prompt") if fields.get("content") is None else fields.get("content")
        messages = None if fields.get("messages") is None else read_messages(fields, fields.get("messages"))
        if messages is None and not isinstance(text, str):
            raise Refusal(400, "prompt must be text, or messages a list", "prompt")
        inquiry = Inquiry((text or " ",) if messages is None else (), messages, None, self.options.sampling, None,
                          template=read_template(fields))
        ids = [] if messages is None and not text else (await asyncio.to_thread(self.text.tokenize, inquiry))[0]
        return JSONResponse({"tokens": ids, "count": len(ids), "max_model_len": self._context})

    async def detokenize(self, request: HttpRequest) -> Response:
        """The text of token ids, as vLLM and llama.cpp have it."""
        fields = RequestFields(await self._body(request))
        ids = fields.get("tokens") or []
        if not isinstance(ids, list) or not all(type(i) is int and 0 <= i < self.text.vocab_size for i in ids):
            raise Refusal(400, f"tokens must be a list of token ids below {self.text.vocab_size}", "tokens")
        text = await asyncio.to_thread(self.text.decode, ids)
        return JSONResponse({"prompt": text, "content": text})

    async def _body(self, request: HttpRequest) -> bytes:
        most = MOST_BODY_NBYTES if self.text.images is None else MOST_IMAGES_NBYTES
        return await read_body(request, self.options.body_s, most)

    async def models(self, request: HttpRequest) -> Response:
        return JSONResponse({"object": "list", "data": [
            self._model(name) for name in (self.options.name, *self.adapters)]})

    async def model(self, request: HttpRequest) -> Response:
        name = request.path_params["name"]
        if name not in (self.options.name, *self.adapters):
            raise no_such_model(self.options.name, self.adapters)
        return JSONResponse(self._model(name))

    def _model(self, name: str) -> dict[str, Any]:
        """A model's entry, with its context as vLLM and llama.cpp name it."""
        return {"id": name, "object": "model", "created": self.created, "owned_by": "forebay",
                "max_model_len": self._context, "context_length": self._context,
                "meta": {"n_ctx_train": self._context, "n_vocab": self.text.vocab_size}}

    @property
    def _context(self) -> int:
        """Tokens of a prompt and its answer."""
        return self.batcher.prompt + self.batcher.new_tokens

    async def health(self, request: HttpRequest) -> Response:
        fault = self.batcher.fault
        return JSONResponse({"status": "failed", "reason": fault} if fault else {"status": "ok"}, 503 if fault else 200)

    async def metrics_text(self, request: HttpRequest) -> Response:
        return PlainTextResponse(self.metrics.text(gauges(self.batcher)), media_type=TYPE)

    async def state(self, request: HttpRequest) -> Response:
        server = {"models": [self.options.name, *self.adapters], "chat_template": self.text.has_template,
                  "images": self.text.images is not None, "new_tokens": self.batcher.new_tokens}
        return JSONResponse({**state(self.batcher), "server": server})
