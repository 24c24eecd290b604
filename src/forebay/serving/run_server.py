"""A server on its socket: uvicorn around the application and the batcher, until a signal."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from forebay.commands.chat_template import ChatTemplate
from forebay.images.chats import ImageChats
from forebay.language_model import LanguageModel
from forebay.rewriter.ir.turns import SERVER_TURNS, StepTurns
from forebay.serving.app import ServingOptions, make_app
from forebay.serving.batcher import Batcher
from forebay.serving.connection import ConnectionLimits, connection_type
from forebay.serving.metrics import Metrics
from forebay.serving.prefill_batcher import PrefillBatcher
from forebay.serving.served_images import ServedImages
from forebay.serving.text_codec import TextCodec

BACKLOG = 128  # connections that wait to be accepted
OTHER_FILES = 128  # that the process may open besides its connections
LOOPBACK = ("localhost", "127.0.0.1", "[::1]")


@dataclass(frozen=True)
class Service:
    """A model as a server runs it: a planned model, its tokenizer and the tokens that end answers, in slots of `prompt`
    and `new_tokens`, which take `turns`; at most `queue` requests wait. Images have `image_nbytes` of memory, and may
    be files of this machine with `image_files`; of 0 none are taken. Computed prompts go to a process that decodes at
    the socket `handoff`; of "" they decode here."""

    lm: LanguageModel
    tokenizer: Any
    eos: tuple[int, ...]
    prompt: int
    new_tokens: int
    queue: int
    options: ServingOptions
    turns: StepTurns = SERVER_TURNS
    image_nbytes: int = 0
    image_files: bool = False
    handoff: str = ""


def bound_socket(host: str, port: int) -> socket.socket:
    """A socket at the address, not listening yet; OSError if it cannot be had.

    The address may have connections of a server that has ended. Until it listens, it is for this socket alone: a second
    server fails here, not after it has planned.
    """
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    found = socket.socket(family, kind, protocol)
    try:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind(address)
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
    except BaseException:
        found.close()
        raise
    return found


class UvicornServer(uvicorn.Server):
    """Tells when it listens and when it is to stop."""

    def __init__(self, config: uvicorn.Config, on_start: Callable[[], None], on_stop: Callable[[], None]) -> None:
        super().__init__(config)
        self.on_start, self.on_stop = on_start, on_stop

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.on_start()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.on_stop()  # before what waits is waited for
        await super().shutdown(sockets)


class ServerRun:
    """A server that runs in `run` until SIGTERM, SIGINT or `stop`; what runs then is finished within `grace_s`."""

    def __init__(self, service: Service, grace_s: float) -> None:
        self.service, self.metrics = service, Metrics()
        self._uvicorn: UvicornServer | None = None
        make = partial(PrefillBatcher, service.handoff) if service.handoff else Batcher
        self.batcher = make(service.lm, service.prompt, service.new_tokens, frozenset(service.eos), service.queue,
                            self.metrics, on_broken=self.stop, turns=service.turns)
        self._grace_s = grace_s

    def run(self, at: socket.socket, on_start: Callable[[], None] = lambda: None) -> BaseException | None:
        """Serve at a bound socket, which is closed at the end; why the model failed, if that ended it."""
        service, tokenizer = self.service, self.service.tokenizer
        with ChatTemplate(tokenizer) as template, ChatTemplate(tokenizer) as of_images:
            images = ServedImages(service.lm, ImageChats(service.lm.checkpoint.folder, of_images, service.image_files),
                                  service.image_nbytes) if service.image_nbytes else None
            text = TextCodec(tokenizer, template, service.lm.captured.vocab_size, service.eos, images)
            app = make_app(self.batcher, text, self.service.options, self.metrics)
            self._uvicorn = UvicornServer(server_config(app, service.options, self._grace_s), on_start,
                                          self.batcher.drain)
            try:
                with signals_to(self.stop):
                    self.batcher.start()
                    at.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections have it from here
                    asyncio.run(self._uvicorn.serve([at]))
            finally:
                at.close()
                self.batcher.drain()
                self.batcher.join()
                self.service.lm.close()
        return self.batcher.broken

    def stop(self) -> None:
        """End `run` as a signal does; from any thread."""
        if self._uvicorn is not None:
            self._uvicorn.should_exit = True


def server_config(app: ASGIApp, options: ServingOptions, grace_s: float) -> uvicorn.Config:
    """Return how uvicorn serves an application, whose requests it finishes within `grace_s` at the end."""
    return uvicorn.Config(
        app, log_config=None, log_level="critical", lifespan="off", ws="none", loop="asyncio", backlog=BACKLOG,
        http=connection_type(_connection_limits(options)), server_header=False, proxy_headers=False,
        timeout_graceful_shutdown=max(1, int(grace_s)))


def _connection_limits(options: ServingOptions) -> ConnectionLimits:
    """The options' limits, with no more connections than the process may open files for."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    room = max(files // 2, files - BACKLOG - OTHER_FILES)
    most = options.most_connections if files == resource.RLIM_INFINITY else min(options.most_connections, room)
    return ConnectionLimits(most, options.head_s, options.send_s)


@contextlib.contextmanager
def signals_to(stop: Callable[[], None]) -> Iterator[None]:
    """Let SIGINT and SIGTERM stop the server, before uvicorn handles them and when it raises them once more."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, lambda number, frame: stop())
              for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
