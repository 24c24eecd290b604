"""Clients and disks that misbehave: every request has an answer or an error, none hangs, the others go on."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from selection import ALL
from serving.served import (
    ASK,
    NEW,
    Running,
    asked,
    connected,
    made,
    read_all,
    request_bytes,
    save_model,
    serving,
    wait_until,
)
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner

from forebay.commands import plan_serving
from forebay.commands.app import app
from forebay.commands.chat_template import ChatTemplate
from forebay.runtime.devices.device import RuntimeFault
from forebay.runtime.run.session import Session
from forebay.serving.app import make_app
from forebay.serving.batcher import TRIES
from forebay.serving.metrics import Metrics
from forebay.serving.run_server import bound_socket
from forebay.serving.text_codec import TextCodec

FUZZED = 10_000 if ALL else 300


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Running]:
    with serving(folder, body_s=1.0) as running:
        yield running
        assert not running.ended
    assert running.ended == [None]


@pytest.mark.parametrize("stream", [False, True])
def test_clients_that_vanish_leave_their_places(folder: Path, stream: bool) -> None:
    """One that is being answered, and one that waits for the only place."""
    with serving(folder, batch_slots=1) as server:
        batcher = server.run.batcher
        whole = server.complete(**ASK)[1]["choices"][0]["text"]
        server.gate.clear()
        running = asked(server, stream=stream)
        wait_until(lambda: any(p.first_s for p in batcher.running.values()))
        waiting = asked(server, stream=stream)
        wait_until(lambda: batcher.waiting == 1)
        waiting.close()
        wait_until(lambda: batcher.waiting == 0)
        [pending] = batcher.running.values()
        running.close()
        wait_until(lambda: pending.left)
        server.gate.set()
        wait_until(lambda: not batcher.running)
        assert len(pending.answer.ids) < NEW
        assert [p.entered_s for p in batcher.recent if p.left and p is not pending] == [0.0]
        assert server.complete(**ASK)[1]["choices"][0]["text"] == whole
        assert 'requests_ended_total{how="left"} 2' in server.send("GET", "/metrics")[1].decode()


def test_a_client_that_reads_nothing_is_heard_no_more(server: Running, folder: Path) -> None:
    """The application given a client that takes the beginning and nothing else: so little text no socket holds up."""
    batcher = server.run.batcher
    options = replace(server.run.service.options, send_s=0.1, hosts=None)
    text = TextCodec(PreTrainedTokenizerFast.from_pretrained(folder), ChatTemplate(None), 200, (2,))
    app = make_app(batcher, text, options, Metrics())
    body, sent = json.dumps({**ASK, "prompt": "w1 w2", "stream": True}).encode(), []

    async def receive() -> dict[str, Any]:
        if not sent:
            sent.append("asked")
            return {"type": "http.request", "body": body, "more_body": False}
        await asyncio.sleep(60)
        raise AssertionError

    async def send(message: Any) -> None:
        sent.append(message["type"])
        if message["type"] == "http.response.body":
            await asyncio.sleep(60)

    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "query_string": b"", "http_version": "1.1",
             "headers": [(b"content-type", b"application/json")], "scheme": "http", "root_path": ""}
    asyncio.run(asyncio.wait_for(app(scope, receive, send), 20))  # type: ignore[arg-type]
    assert sent == ["asked", "http.response.start", "http.response.body"]
    assert [p.left for p in (*batcher.recent, *batcher.running.values()) if p.ids == [5, 6]] == [True]


@pytest.mark.parametrize("half_closed", [False, True])
def test_a_connection_whose_client_takes_nothing_of_its_end_is_given_up(folder: Path, half_closed: bool) -> None:
    """More than sockets hold: the model's name. One that reads in time has all of it, slowly as it may."""
    name, page = "n" * (24 << 20), b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    with serving(folder, name=name, send_s=0.3, grace_s=60) as server:
        slow, stuck = connected(server), connected(server)
        for at in (slow, stuck):
            at.sendall(page)
        if half_closed:
            stuck.shutdown(socket.SHUT_WR)
        taken = 0
        while part := slow.recv(1 << 20):
            taken += len(part)
            time.sleep(0.01)
        assert taken > len(name)
        began = time.monotonic()
        server.run.stop()  # nobody has read `stuck`
        wait_until(lambda: bool(server.ended), 30)
        assert time.monotonic() - began < 30
        with contextlib.suppress(ConnectionResetError):
            assert len(read_all(stuck)) < len(name)


def test_bodies_that_do_not_arrive_or_are_too_long(server: Running) -> None:
    late = connected(server)
    late.sendall(request_bytes(b"x" * 100)[:-50])
    assert late.recv(64).startswith(b"HTTP/1.1 408")
    assert server.send("POST", "/v1/completions", b"[" * 3_000_000)[0] == 400
    large = connected(server)
    large.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
                  b"Content-Length: 999999999\r\n\r\n" + b" " * 4_300_000)
    assert large.recv(64).startswith(b"HTTP/1.1 413")
    assert server.complete(**ASK)[0] == 200


def spoilt(chance: random.Random) -> tuple[str, bytes]:
    """A request of which something is not as it should be, or all is."""
    odd: list[Any] = [None, True, -1, 0, 1.5, 1e308, 1 << 80, "", "w1", "\ud800", "\x00", [], {}, [[]], {"a": []},
                      [None], "w1 " * 400, [1, 2], [1 << 70], "é" * 9, float("nan"), float("inf")]
    chat = chance.random() < 0.5
    fields: dict[str, Any] = {**ASK, "max_tokens": 1}
    if chat:
        del fields["prompt"]
        fields["messages"] = [{"role": "w1", "content": "w2"}]
    for _ in range(chance.randrange(3)):
        names = [*fields, "stop", "seed", "stream", "top_p", "n", "stream_options", "model", "tools", "odd"]
        fields[chance.choice(names)] = chance.choice(odd)
    if chat and chance.random() < 0.3 and isinstance(fields.get("messages"), list):
        fields["messages"] = [*fields["messages"], chance.choice([*odd, {"role": chance.choice(odd), "content": "w"},
                                                                 {"role": "w1", "content": chance.choice(odd)}])]
    body = json.dumps(fields).encode()
    if chance.random() < 0.4:
        at, raw = chance.randrange(len(body)), bytearray(body)
        raw[at : at + chance.randrange(4)] = chance.randbytes(chance.randrange(4))
        body = bytes(raw)
    return f"/v1/{'chat/' * chat}completions", body


def test_spoilt_requests_are_answered_or_refused(server: Running) -> None:
    """Never by an error of the server's own; and beside them a whole request is answered as ever."""
    whole = server.complete(**ASK)[1]["choices"][0]["text"]

    def send_some(worker: int) -> list[int]:
        chance, found = random.Random(worker), []
        for _ in range(FUZZED // 4):
            path, body = spoilt(chance)
            status, said = server.send("POST", path, body)
            assert status == 200 or (400 <= status < 500 and json.loads(said)["error"]["message"]), (body, said)
            assert b'"error"' not in said or status != 200, (body, said)
            found.append(status)
        return found

    with ThreadPoolExecutor(4) as pool:
        statuses = [status for some in pool.map(send_some, range(4)) for status in some]
    assert {200, 400} < set(statuses) and statuses.count(200) > len(statuses) // 20
    assert server.complete(**ASK)[1]["choices"][0]["text"] == whole


def test_a_port_that_another_took_meanwhile_is_told(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both were bound while neither listened, as servers that are started together plan for a while."""
    with bound_socket("127.0.0.1", 0) as other:
        port, plan = other.getsockname()[1], plan_serving.plan_serving

        def planned(*given: Any) -> Any:
            other.listen()
            return plan(*given)

        monkeypatch.setattr(plan_serving, "plan_serving", planned)
        found = CliRunner().invoke(app, ["serve", str(folder), "--port", str(port), "--budget", "9MB", "--prompt", "24",
                                         "--new-tokens", "8", "--batch-slots", "1"])
    assert found.exit_code == 2 and f"cannot listen at 127.0.0.1 port {port}: " in " ".join(found.stderr.split())


def test_what_is_no_http_ends_its_connection_alone(server: Running) -> None:
    chance, good = random.Random(1), request_bytes(json.dumps(ASK).encode())
    for _ in range(FUZZED // 5):
        raw = bytearray(good)
        for _ in range(1 + chance.randrange(4)):
            at = chance.randrange(120)
            raw[at : at + chance.randrange(6)] = chance.randbytes(chance.randrange(6))
        at = connected(server)
        at.sendall(bytes(raw))
        at.shutdown(socket.SHUT_WR)
        said = read_all(at)
        assert not said or said.startswith((b"HTTP/1.1 2", b"HTTP/1.1 4")), (raw, said)
        at.close()
    assert server.complete(**ASK)[0] == 200
    wait_until(lambda: not server.run.batcher.running)


def test_sigterm_finishes_what_runs(folder: Path) -> None:
    """A real signal in the main thread: the stream that runs comes to its end, what waits is told, nothing new is let
    in."""
    server, at = made(folder, batch_slots=1)
    found: dict[str, bytes] = {}

    def act() -> None:
        server.gate.clear()
        running, _ = asked(server, stream=True), wait_until(lambda: bool(server.run.batcher.running))
        waiting, _ = asked(server), wait_until(lambda: server.run.batcher.waiting == 1)
        os.kill(os.getpid(), signal.SIGTERM)
        found["waiting"] = read_all(waiting)
        server.gate.set()
        found["running"] = read_all(running)

    before = signal.getsignal(signal.SIGTERM)
    acting = threading.Thread(target=act)
    assert server.run.run(at, acting.start) is None
    acting.join(60)
    assert found["waiting"].startswith(b"HTTP/1.1 503") and b"stopping" in found["waiting"]
    assert found["running"].count(b"data: ") > 2 and b"data: [DONE]" in found["running"]
    assert b'"finish_reason": "length"' in found["running"] or b'"finish_reason": "stop"' in found["running"]
    assert signal.getsignal(signal.SIGTERM) is before
    with pytest.raises(OSError):
        connected(server)


def test_a_step_that_fails_is_told_and_the_next_request_is_answered(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(folder, batch_slots=1) as server:
        whole = server.complete(**ASK)[1]["choices"][0]["text"]
        _fail_steps(monkeypatch, lambda n: n in (2, 7))
        assert server.complete(**ASK)[0] == 500
        stream = asked(server, stream=True)
        events = b""
        while b"[DONE]" not in events:
            events += stream.recv(65536)
        assert events.startswith(b"HTTP/1.1 200") and b'"server_error"' in events
        assert server.complete(**ASK)[1]["choices"][0]["text"] == whole
        assert server.send("GET", "/health")[0] == 200
    assert server.ended == [None]


def test_a_model_that_fails_again_and_again_ends_the_server(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of many clients has an error, and `run` gives the reason."""
    with serving(folder, batch_slots=1) as server:
        _fail_steps(monkeypatch, lambda n: True)
        with ThreadPoolExecutor(TRIES + 4) as pool:
            statuses = list(pool.map(lambda _: server.complete(**ASK)[0], range(TRIES + 4)))
        assert statuses.count(500) == TRIES and statuses.count(503) == 4
        wait_until(lambda: bool(server.ended))
    assert isinstance(server.ended[0], RuntimeFault) and "spoilt" in str(server.ended[0])


def test_weights_that_change_on_disk_end_the_server(tmp_path: Path) -> None:
    save_model(tmp_path)
    with serving(tmp_path, batch_slots=1) as server:
        assert server.complete(**ASK)[0] == 200
        file = tmp_path / "model.safetensors"
        os.truncate(file, file.stat().st_size - 4096)
        status, said = server.complete(**ASK)
        assert status == 500 and "model.safetensors" in said["error"]["message"]
        wait_until(lambda: bool(server.ended))
    assert "model.safetensors" in str(server.ended[0])


def _fail_steps(monkeypatch: pytest.MonkeyPatch, fails: Callable[[int], bool]) -> None:
    """Steps from here on that raise, by their number."""
    step, count = Session.step, iter(range(1 << 30))

    def spoilt_step(session: Session, inputs: Any) -> Any:
        if fails(next(count)):
            raise RuntimeFault("a spoilt step")
        return step(session, inputs)

    monkeypatch.setattr(Session, "step", spoilt_step)
