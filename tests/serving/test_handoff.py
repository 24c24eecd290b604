"""Prefill and decode apart: tokens are those of one session, and a process that ends leaves no request waiting."""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from in_thread import running
from prefixed import NEW as NEW_TOKENS
from prefixed import opened, prompts_of, save_family
from selection import at_length
from serving.served import ASK, BATCH_SLOTS, BUDGET, NEW, PROMPT, Running, made, serving, wait_until

import forebay
from forebay.rewriter.ir.turns import SERVER_TURNS
from forebay.rewriter.machine.profile import Machine
from forebay.runtime.run.handoff import ComputedPrompt, DecodeScheduler, HandoffError, PrefillScheduler, handoff_slots
from forebay.runtime.run.request import Request
from forebay.runtime.run.sampling import Sampling
from forebay.runtime.run.scheduler import answer_arriving
from forebay.serving.decode_server import DecodeServer, bound_path
from forebay.serving.handoff_wire import Terms, Wire, message_of, request_of

FAMILIES = ["llama", "lfm2", *map(at_length, ("gemma2", "mamba", "falcon_h1", "qwen3_5_text", "deepseek_v3"))]


def answered(lm: Any, requests: dict[int, Request], make: Any = None) -> dict[int, list[int]]:
    """The tokens of requests that arrive as slots fall free."""
    left, said = dict(requests), dict[int, list[int]]()

    def arriving(free: int, idle: bool) -> dict[int, Request] | None:
        came = {number: left.pop(number) for number in list(left)[:free]}
        return came or (None if idle else {})

    answer_arriving(lm.session, arriving, on_next=lambda *_: True, on_end=said.__setitem__, make=make)
    return said


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_are_those_of_one_session(family: str, tmp_path: Path) -> None:
    """Drawn and greedy ones, of prompts of 1 to 30 tokens, into slots of another plan, whatever states there are."""
    save_family(family, tmp_path)
    ways = (Sampling(), Sampling(True, 0.9, 20, logit_bias=((5, 2.5),)), Sampling(repetition_penalty=1.3))
    requests = {i: Request(ids, NEW_TOKENS, partial(torch.Generator().manual_seed, i), ways[i % 3])
                for i, ids in enumerate(prompts_of(1, 9))}
    one, other = opened(tmp_path, batch_slots=2), opened(tmp_path, batch_slots=3, prompt=40)
    expected = answered(one, requests)
    slots, computed = [handoff_slots(lm.session, lm.captured.states) for lm in (one, other)], {}
    assert not Terms.of(one, slots[0]).mismatch(Terms.of(other, slots[1]))
    assert "as large --prompt" in Terms.of(other, slots[1]).mismatch(Terms.of(one, slots[0]))

    def hand_on(number: int, request: Request, first: int, cache: Any) -> bool:
        message = json.loads(json.dumps(message_of(number, request, first, number)))
        computed[number] = ComputedPrompt(request_of(message), first, cache())
        return number != 4  # which goes on where it is

    here = answered(one, requests, partial(PrefillScheduler, slots[0], hand_on))
    assert here.keys() == {4} | {i for i, tokens in expected.items() if len(tokens) == 1}
    del computed[4]
    there = answered(other, {i: each.request for i, each in computed.items()},
                     partial(DecodeScheduler, slots[1], computed))
    assert not computed and {**here, **there} == expected


@pytest.mark.parametrize(("changed", "why"), [
    ({"blocks": ()}, "at least 2 batch_slots, and for a cache on the device"), ({"rope_switch_length": 8}, "rotary")])
def test_sessions_that_cannot_hand_prompts_on_say_so(changed: dict[str, Any], why: str) -> None:
    batching = SimpleNamespace(admitted=1)
    plan = SimpleNamespace(prefill_overlays_kv_cache=False, schedule=SimpleNamespace(batching=batching))
    session: Any = SimpleNamespace(**{"plan": plan, "blocks": None, "rope_switch_length": 0, **changed})
    with pytest.raises(HandoffError, match=why):
        handoff_slots(session, ())


@contextlib.contextmanager
def decoding(folder: Path, path: str, batch_slots: int = 2) -> Iterator[DecodeServer]:
    """A process that decodes, in a thread."""
    lm = forebay.wrap(folder, BUDGET, batch_slots=batch_slots, prompt=PROMPT, new_tokens=NEW, machine=Machine.default())
    server = DecodeServer(lm, PROMPT, NEW, frozenset({2}), SERVER_TURNS)
    with running(server.run, bound_path(path), server.stop):
        yield server


def asked_at_once(server: Running, count: int = 9) -> list[tuple[int, Any]]:
    ways: list[dict[str, Any]] = [{"temperature": 0}, {"temperature": 1.2}, {"n": 2, "temperature": 0.9},
                                  {"logprobs": 2, "temperature": 0}, {"stop": ["w7", "w1"], "temperature": 1.5}]
    with ThreadPoolExecutor(count) as pool:
        replies = pool.map(lambda i: server.complete(prompt=" ".join(f"w{(i * j) % 50}" for j in range(1 + 2 * i)),
                                                     max_tokens=NEW - i % 3, seed=i, **ways[i % 5]), range(count))
        return [(status, body.get("choices", body)) for status, body in replies]


def test_a_server_answers_as_one_that_does_both(
    folder: Path, server: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While another process decodes, more requests than it has slots; clients that leave free slots there too."""
    expected = asked_at_once(server)
    assert all(status == 200 for status, _ in expected)
    path = str(tmp_path / "at")
    monkeypatch.setattr("forebay.serving.decode_server.HELLO_S", 1)
    with decoding(folder, path) as there, socket.socket(socket.AF_UNIX) as silent, contextlib.ExitStack() as stack:
        silent.connect(path)  # who says nothing does not keep others waiting
        here = stack.enter_context(serving(folder, handoff=path))
        assert asked_at_once(here) == expected
        with socket.create_connection(("127.0.0.1", here.port)) as leaves:
            body = json.dumps({**ASK, "stream": True}).encode()
            leaves.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
                           b"Content-Length: %d\r\n\r\n" % len(body) + body)
        wait_until(lambda: not there._numbers and not here.run.batcher.running)
        with pytest.raises(FileExistsError, match="another process decodes there"):
            bound_path(path)
    assert not Path(path).exists()


def test_a_process_that_ends_is_told_of_and_another_one_taken(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends while a prompt is on its way, and while it decodes: 500; then 503, until another one decodes."""
    path, sent = str(tmp_path / "at"), Wire.send

    def torn(self: Wire, message: Any, data: Any = None) -> None:
        if "ids" in message:
            self._socket.sendall(b"\0" * 6)
            self.close()
        sent(self, message, data)

    with contextlib.ExitStack() as stack:
        there = stack.enter_context(decoding(folder, path))
        here = stack.enter_context(serving(folder, handoff=path))
        with monkeypatch.context() as patch:
            patch.setattr(Wire, "send", torn)
            status, body = here.complete(**ASK)
            assert status == 500 and "ended on the way" in body["error"]["message"]
        wait_until(lambda: here.run.batcher._wire is not None)  # the same one, again
        with monkeypatch.context() as patch, ThreadPoolExecutor(BATCH_SLOTS) as pool:
            patch.setattr(Wire, "send", lambda self, message, data=None: (
                None if "tokens" in message else sent(self, message, data)))
            replies = [pool.submit(here.complete, **ASK) for _ in range(BATCH_SLOTS)]
            wait_until(lambda: len(here.run.batcher._elsewhere) == BATCH_SLOTS)
            there._wire.close()
            assert [reply.result()[0] for reply in replies] == [500] * BATCH_SLOTS
        there.stop()
        wait_until(lambda: not Path(path).exists() and here.run.batcher._wire is None)
        status, body = here.complete(**ASK)
        assert status == 503 and "cannot be reached" in body["error"]["message"]
        assert here.send("GET", "/health")[0] == 503
        with decoding(folder, path):
            wait_until(lambda: here.run.batcher._wire is not None)
            assert here.complete(**ASK)[0] == here.send("GET", "/health")[0] == 200


def test_a_server_does_not_start_without_a_process_that_decodes(folder: Path, tmp_path: Path) -> None:
    lm = forebay.wrap(folder, BUDGET, batch_slots=2, prompt=PROMPT, new_tokens=NEW, machine=Machine.default())
    running, at = made(folder, planned=lm, handoff=str(tmp_path / "none"))
    with pytest.raises(HandoffError, match="first start `forebay serve` there with --role decode"):
        running.run.run(at)
