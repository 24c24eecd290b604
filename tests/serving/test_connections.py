"""Connections that keep a server waiting, ports that are taken, and signals that come early."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import uvicorn
from serving.served import (
    ASK,
    Running,
    asked,
    connected,
    made,
    read_all,
    request_bytes,
    serving,
    wait_until,
)

from forebay.serving import app
from forebay.serving.run_server import bound_socket


def refused(said: bytes, status: int) -> str:
    """The message of a refusal in OpenAI's form, as it came over a connection."""
    head, _, body = said.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 %d " % status) and b"content-type: application/json" in head.lower(), said
    error = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return str(error["message"])


def test_headers_that_do_not_arrive_are_given_up(folder: Path) -> None:
    """Of a new connection, and of one that has had an answer; a silent connection is closed without a word."""
    begun = b"POST /v1/completions HTTP/1.1\r\nHost: local"
    with serving(folder, head_s=0.4, body_s=60) as server:
        new, silent, used, slow = (connected(server) for _ in range(4))
        new.sendall(begun)
        used.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert read_all(used, b"}").startswith(b"HTTP/1.1 200")
        used.sendall(begun)
        whole = request_bytes(json.dumps(ASK).encode())
        slow.sendall(whole[:-5])
        for at in (new, used):
            assert "headers did not arrive" in refused(read_all(at), 408)
        assert read_all(silent) == b""
        slow.sendall(whole[-5:])  # later than headers may be
        assert slow.recv(64).startswith(b"HTTP/1.1 200")


def test_connections_that_send_nothing_shut_nobody_out(folder: Path) -> None:
    """Nor those that send half of a request, of which there are more than the server takes; one that is answered
    stays."""
    with serving(folder, batch_slots=1, most_connections=4) as server:
        server.gate.clear()
        answered = asked(server, stream=True)
        wait_until(lambda: bool(server.run.batcher.running))
        silent = [connected(server) for _ in range(6)]
        half = [connected(server) for _ in range(6)]
        for at in half:
            at.sendall(request_bytes(b"x" * 100)[:-50])
        assert server.send("GET", "/health")[0] == 200
        server.gate.set()
        assert server.complete(**ASK)[0] == 200
        assert b"data: [DONE]" in read_all(answered, b"[DONE]")
        for at in silent:
            with contextlib.suppress(ConnectionResetError):
                assert at.recv(64) == b""
        for at in half:
            at.close()


def test_too_many_requests_at_once_are_told_and_health_is_answered(folder: Path) -> None:
    with serving(folder, batch_slots=1, most_connections=2) as server:
        server.gate.clear()
        held = [asked(server) for _ in range(2)]
        wait_until(lambda: bool(server.run.batcher.running) and server.run.batcher.waiting == 1)
        status, said = server.complete(**ASK)
        assert status == 503 and "2 requests are under way" in said["error"]["message"]
        assert server.send("GET", "/health")[0] == 200
        server.gate.set()
        for at in held:
            assert at.recv(64).startswith(b"HTTP/1.1 200")


def test_what_is_no_http_is_refused_in_the_form_of_other_errors(server: Running) -> None:
    for sent in (b"nonsense\r\n\r\n", b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"x" * 100_000):
        at = connected(server)
        at.sendall(sent)
        assert "not valid HTTP/1.1" in refused(read_all(at), 400)


def test_a_request_that_the_end_cuts_off_is_told(folder: Path) -> None:
    with serving(folder, batch_slots=1, grace_s=0) as server:
        server.gate.clear()
        waiting = asked(server)
        wait_until(lambda: bool(server.run.batcher.running))
        server.run.stop()
        assert "stopping" in refused(read_all(waiting), 503)
        server.gate.set()


def test_a_request_that_waits_for_room_is_told_of_the_end() -> None:
    """`app._Guard` alone: a server that ends cancels its requests, of which this one has no place yet."""
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def ended() -> None:
        options = SimpleNamespace(most_connections=0, hosts=None, api_key=None)
        guard: Any = app._Guard(None, options, SimpleNamespace(responded=lambda path, status: None))  # type: ignore[arg-type]
        scope = {"type": "http", "path": "/v1/completions", "headers": [], "method": "POST", "query_string": b""}
        task = asyncio.create_task(guard(scope, None, send))
        await asyncio.sleep(0.01)
        assert not sent and task.cancel()
        await task

    asyncio.run(ended())
    assert sent[0]["status"] == 503 and b"the server is stopping" in sent[1]["body"]


@pytest.mark.parametrize("early", [True, False])
def test_a_signal_before_uvicorn_hears_them_stops_the_server(
    folder: Path, monkeypatch: pytest.MonkeyPatch, early: bool
) -> None:
    """As the batcher starts, and as uvicorn begins."""
    server, at = made(folder, batch_slots=1)
    start, serve, lost = server.run.batcher.start, uvicorn.Server.serve, threading.Event()
    late = threading.Timer(20, lambda: (lost.set(), server.run.stop()))
    late.start()

    def started() -> None:
        start()
        if early:
            os.kill(os.getpid(), signal.SIGTERM)

    async def served(*given: Any, **named: Any) -> None:
        if not early:
            os.kill(os.getpid(), signal.SIGTERM)
        await serve(*given, **named)

    monkeypatch.setattr(server.run.batcher, "start", started)
    monkeypatch.setattr(uvicorn.Server, "serve", served)
    assert server.run.run(at) is None
    late.cancel()
    assert not lost.is_set()


def test_a_port_is_taken_from_the_first_moment_and_free_after_the_end(folder: Path) -> None:
    """Bound and not listening yet, a socket has it alone; connections of a server that has ended are no obstacle."""
    with bound_socket("127.0.0.1", 0) as first:
        assert not first.getsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR)
    with serving(folder) as server:
        with pytest.raises(OSError, match="in use"):
            bound_socket("127.0.0.1", server.port)
        assert server.send("GET", "/health", Connection="close")[0] == 200  # whose socket stays in TIME_WAIT
    again, at = made(folder, port=server.port)
    assert again.run.run(at, again.run.stop) is None
