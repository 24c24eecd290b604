"""The messages between the process that computes prompts and the one that decodes: a socket of this machine, on which
each is a JSON object, and bytes after it. Nothing is unpickled."""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import threading
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

from forebay.language_model import LanguageModel
from forebay.runtime.run.cache_slots import CacheSlots
from forebay.runtime.run.request import Request
from forebay.runtime.run.sampling import Sampling

SEND_S = 30  # until a peer that takes nothing counts as gone
HEAD = struct.Struct("!IQ")


@dataclass(frozen=True)
class Terms:
    """Facts that each process tells the other one first. A prompt is of use there if `same` is equal, and slots have as
    much room.

    Attributes:
        same: The model's files, formats and adapters, the release, and the layout of a slot's cache.
        batch_slots: Slots of the plan.
        prompt: Tokens of a prompt.
        context: Tokens of a prompt and its answer.
    """

    same: Mapping[str, Any]
    batch_slots: int
    prompt: int
    context: int

    @classmethod
    def of(cls, lm: LanguageModel, slots: CacheSlots) -> Terms:
        identity, work = asdict(lm.prefix_identity), lm.plan.workload
        same = {name: identity[name] for name in ("model", "files", "release", "weights", "cache")}
        return cls({**same, "adapters": sorted(lm.captured.adapters), "layout": [list(each) for each in slots.layout]},
                   work.batch, work.prompt, work.context)

    def mismatch(self, decoding: Terms) -> str:
        """Return why prompts computed by this one cannot go to one that is `decoding`; "" if they can."""
        for name, value in self.same.items():
            if decoding.same.get(name) != value:
                return f"the other process has another {name}; start both with equal options and one release"
        if decoding.prompt < self.prompt or decoding.context < self.context:
            return (f"its slots are of {decoding.prompt} tokens of prompt and {decoding.context} in all, those of this "
                    f"server of {self.prompt} and {self.context}; start it with as large --prompt and --new-tokens")
        return ""


class Wire:
    """A connected socket. Any thread may send; one receives."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket, self._lock = connected, threading.Lock()
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", SEND_S, 0))

    def wait_at_most(self, seconds: int) -> None:
        """Let `receive` raise an OSError where nothing comes for so long; 0: never."""
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", seconds, 0))

    def send(self, message: Mapping[str, Any], data: torch.Tensor | None = None) -> None:
        """Send a message. OSError where the peer is gone, or takes nothing."""
        head = json.dumps(message).encode()
        rows = b"" if data is None else data.numpy().data
        with self._lock:
            self._socket.sendall(HEAD.pack(len(head), len(rows)) + head)
            self._socket.sendall(rows)

    def receive(self) -> tuple[dict[str, Any], torch.Tensor]:
        """The next message and its bytes. OSError where the peer is gone."""
        head, rows = HEAD.unpack(self._exactly(HEAD.size))
        return json.loads(self._exactly(head)), torch.frombuffer(self._exactly(rows), dtype=torch.uint8) if rows else (
            torch.empty(0, dtype=torch.uint8))

    def _exactly(self, nbytes: int) -> bytearray:
        found = bytearray(nbytes)
        left = memoryview(found)
        while left:
            count = self._socket.recv_into(left)
            if not count:
                raise ConnectionResetError("the other process has ended")
            left = left[count:]
        return found

    def close(self) -> None:
        """End the connection; whoever receives gets an OSError."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


def message_of(number: int, request: Request, first: int, seed: int) -> dict[str, Any]:
    """Return the message that hands a request on, whose first token was drawn by `seed`."""
    assert request.sampling is not None
    return {"number": number, "ids": request.ids.tolist(), "new_tokens": request.new_tokens, "first": first,
            "seed": seed, "sampling": asdict(request.sampling), "adapter": request.adapter}


def request_of(message: Mapping[str, Any]) -> Request:
    """Return the request of a message: its draws go on after the one of its first token."""
    def generator() -> torch.Generator:
        draws = torch.Generator().manual_seed(message["seed"])
        torch.rand(1, generator=draws)
        return draws

    fields = message["sampling"]
    bias = tuple((token, value) for token, value in fields["logit_bias"])
    return Request(torch.tensor(message["ids"]), message["new_tokens"], generator,
                   Sampling(**{**fields, "logit_bias": bias}), adapter=message["adapter"])
