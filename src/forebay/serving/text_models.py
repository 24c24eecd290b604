"""A server of embeddings, or of scores of documents, as OpenAI's, Jina's and Cohere's clients ask for them."""

from __future__ import annotations

import asyncio
import base64
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from forebay.embedding.embedder import Embedder, TextModel
from forebay.embedding.reranker import Reranker
from forebay.rewriter.ir.plan import PlanError
from forebay.serving.app import HANDLERS, ServingOptions, guarded, read_body
from forebay.serving.metrics import Metrics
from forebay.serving.refusal import Refusal
from forebay.serving.request_fields import RequestFields
from forebay.serving.requests import no_such_model
from forebay.serving.run_server import UvicornServer, server_config, signals_to

MOST_TEXTS = 2048  # of a request
Computes = Callable[[], Any]


class TextServerRun:
    """A server of one model that runs in `run` until SIGTERM, SIGINT or `stop`."""

    def __init__(self, model: TextModel, options: ServingOptions, grace_s: float) -> None:
        self.model, self.options, self._grace_s = model, options, grace_s
        self._uvicorn: UvicornServer | None = None
        self._worker = ThreadPoolExecutor(1, "embedding")  # holds the weights
        self.created = int(time.time())

    def run(self, at: socket.socket, on_start: Callable[[], None] = lambda: None) -> None:
        """Serve at a bound socket, which is closed at the end; PlanError for a budget without room for the weights."""
        ways = [Route("/v1/embeddings", self.embed, methods=["POST"])] if isinstance(self.model, Embedder) else [
            Route("/v1/rerank", self.rerank, methods=["POST"]), Route("/rerank", self.rerank, methods=["POST"])]
        app = Starlette(routes=[*ways, Route("/v1/models", self.models), Route("/health", self.health)],
                        exception_handlers=HANDLERS)
        config = server_config(guarded(app, self.options, Metrics()), self.options, self._grace_s)
        self._uvicorn = UvicornServer(config, on_start, lambda: None)
        held = self.model.held()
        try:
            self._worker.submit(held.__enter__).result()
            try:
                with signals_to(self.stop):
                    at.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections have it from here
                    asyncio.run(self._uvicorn.serve([at]))
            finally:
                self._worker.submit(held.__exit__, None, None, None).result()
        finally:
            at.close()
            self._worker.shutdown()

    def stop(self) -> None:
        """End `run` as a signal does; from any thread."""
        if self._uvicorn is not None:
            self._uvicorn.should_exit = True

    async def embed(self, request: HttpRequest) -> Response:
        fields, model = await self._fields(request), self.model
        assert isinstance(model, Embedder)
        texts = _texts(fields, "input")
        form, prompt = fields.get("encoding_format"), fields.get("prompt_name")
        width = fields.integer("dimensions", 1, model.get_sentence_embedding_dimension())
        if form not in (None, "float", "base64"):
            raise Refusal(400, 'encoding_format must be "float" or "base64"', "encoding_format")
        if prompt is not None and prompt not in model.prompts:
            raise Refusal(400, f"prompt_name must be one of {', '.join(map(repr, model.prompts)) or 'none'}",
                          "prompt_name")

        def compute() -> tuple[Any, int]:
            return (model.encode(texts, prompt, normalize_embeddings=width is not None, truncate_dim=width),
                    model.count_tokens(texts))

        found, tokens = await self._computed(compute, "input")
        rows = [base64.b64encode(row.tobytes()).decode() if form == "base64" else row.tolist() for row in found]
        return JSONResponse({
            "object": "list", "model": self.options.name, "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
            "data": [{"object": "embedding", "index": i, "embedding": row} for i, row in enumerate(rows)]})

    async def rerank(self, request: HttpRequest) -> Response:
        fields, model = await self._fields(request), self.model
        assert isinstance(model, Reranker)
        query, documents = fields.get("query"), _texts(fields, "documents")
        if not isinstance(query, str) or not query:
            raise Refusal(400, "query must be text", "query")
        most = fields.integer("top_n", 1, 1 << 31)
        shown = fields.get("return_documents") is not False

        def compute() -> tuple[Any, int]:
            return model.rank(query, documents, most), model.count_tokens([*documents, query])

        found, tokens = await self._computed(compute, "documents")
        return JSONResponse({"model": self.options.name, "usage": {"total_tokens": tokens}, "results": [
            {"index": each["corpus_id"], "relevance_score": each["score"],
             **({"document": {"text": documents[each["corpus_id"]]}} if shown else {})} for each in found]})

    async def models(self, request: HttpRequest) -> Response:
        return JSONResponse({"object": "list", "data": [{
            "id": self.options.name, "object": "model", "created": self.created, "owned_by": "forebay",
            "max_model_len": self.model.max_seq_length}]})

    async def health(self, request: HttpRequest) -> Response:
        return JSONResponse({"status": "ok"})

    async def _fields(self, request: HttpRequest) -> RequestFields:
        fields = RequestFields(await read_body(request, self.options.body_s))
        if fields.get("model") not in (None, "", self.options.name):
            raise no_such_model(self.options.name, ())
        return fields

    async def _computed(self, compute: Computes, field: str) -> Any:
        """Return the result of the thread with the weights; Refusal (400) where memory is too little for a text."""
        try:
            return await asyncio.get_running_loop().run_in_executor(self._worker, compute)
        except PlanError as error:
            raise Refusal(400, str(error), field) from error


def _texts(fields: RequestFields, name: str) -> list[str]:
    value = fields.get(name)
    texts = [value] if isinstance(value, str) else value
    texts = [each.get("text") if isinstance(each, dict) else each for each in texts] if isinstance(texts, list) else []
    if not 0 < len(texts) <= MOST_TEXTS or not all(isinstance(each, str) for each in texts):
        raise Refusal(400, f"{name} must be text, or a list of 1 to {MOST_TEXTS} texts", name)
    return texts
