"""Connections that end when their client keeps them waiting, so that nobody can take them all."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from typing import ClassVar

import h11
from uvicorn.protocols.http.h11_impl import STATUS_PHRASES, H11Protocol

from forebay.serving.refusal import Refusal


@dataclass(frozen=True)
class ConnectionLimits:
    """Limits of clients on a server's resources.

    Attributes:
        most: Connections; beyond, the one that has waited longest for its client's request is closed.
        head_s: Seconds until a request's headers are there.
        send_s: Seconds in which a closing connection must send something.
    """

    most: int
    head_s: float
    send_s: float


class PatientConnection(H11Protocol):
    """uvicorn's connection within `limits`, with refusals in OpenAI's form.

    A closing connection is aborted when no byte of it has left for `send_s` (at most twice that). Without this it stays
    as long as the client does, and the server's end waits for it.
    """

    limits: ClassVar[ConnectionLimits]

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._left = 0
        self._watch = self.loop.call_later(self.limits.send_s, self._look)
        self._wait_for_head()
        self._make_room()

    def connection_lost(self, exc: Exception | None) -> None:
        self._watch.cancel()
        self._late.cancel()
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        self._late.cancel()
        self._wait_for_head()
        super().on_response_complete()  # begins the next request, if it is there

    def handle_events(self) -> None:
        super().handle_events()
        if self.is_answering:
            self._late.cancel()

    def send_400_response(self, msg: str) -> None:
        self._refuse(Refusal(400, "this is not valid HTTP/1.1, or its headers are too long"))

    @property
    def is_answering(self) -> bool:
        """Whether a request is under way whose headers are there."""
        return self.cycle is not None and not self.cycle.response_complete

    @property
    def waits_for_client(self) -> bool:
        """Whether the next request, or the rest of one, is yet to come, and nothing is left to be sent."""
        return not self.transport.get_write_buffer_size() and (not self.is_answering or self.cycle.more_body)

    def _wait_for_head(self) -> None:
        self.waits_since = self.loop.time()
        self._late = self.loop.call_later(self.limits.head_s, self._give_up)

    def _give_up(self) -> None:
        if self.transport.is_closing() or self.is_answering:
            return
        if self.conn.trailing_data[0]:
            self._refuse(Refusal(408, f"the headers did not arrive within {self.limits.head_s:g} s"))
        else:
            self.transport.close()

    def _make_room(self) -> None:
        others = [each for each in self.connections if isinstance(each, PatientConnection) and each is not self
                  and not each.transport.is_closing()]
        if len(others) < self.limits.most:
            return
        waiting = [each for each in others if each.waits_for_client]
        if waiting:
            min(waiting, key=lambda each: each.waits_since).transport.abort()

    def _refuse(self, refusal: Refusal) -> None:
        """Send a refusal in place of a response, and close."""
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.abort()  # within a response
            return
        body = json.dumps(refusal.body()).encode()
        head = h11.Response(status_code=refusal.status, reason=STATUS_PHRASES[refusal.status], headers=[
            (b"content-type", b"application/json"), (b"content-length", str(len(body)).encode()),
            (b"connection", b"close")])
        for event in (head, h11.Data(data=body), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def _look(self) -> None:
        left = self.transport.get_write_buffer_size() if self.transport.is_closing() else 0
        if left and left == self._left:
            self.transport.abort()
            return
        self._left = left
        self._watch = self.loop.call_later(self.limits.send_s, self._look)


def connection_type(limits: ConnectionLimits) -> type[PatientConnection]:
    """The type of a server's connections."""
    return type("LimitedConnection", (PatientConnection,), {"limits": limits})
