"""A connection that is given up once it is to close and its client takes nothing of what is left."""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.h11_impl import H11Protocol


def connection_type(send_s: float) -> type[asyncio.Protocol]:
    """uvicorn's protocol, whose closing connections are aborted when no byte of theirs has left for `send_s` (twice
    that at most). Without it they stay as long as the client does, and the server's end waits for them."""

    class PatientConnection(H11Protocol):
        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self._left = 0
            self._watch = self.loop.call_later(send_s, self._look)

        def connection_lost(self, exc: Exception | None) -> None:
            self._watch.cancel()
            super().connection_lost(exc)

        def _look(self) -> None:
            left = self.transport.get_write_buffer_size() if self.transport.is_closing() else 0
            if left and left == self._left:
                self.transport.abort()
                return
            self._left = left
            self._watch = self.loop.call_later(send_s, self._look)

    return PatientConnection
