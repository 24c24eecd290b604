"""A server that runs in a thread of the test's process."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def running(
    run: Callable[[socket.socket, Callable[[], None]], object], at: socket.socket, stop: Callable[[], None]
) -> Iterator[None]:
    """`run(at, on_start)` in a thread, from its start on; at the end it is stopped, and waited for."""
    started = threading.Event()
    thread = threading.Thread(target=run, args=(at, started.set), daemon=True)
    thread.start()
    assert started.wait(60)
    try:
        yield
    finally:
        stop()
        thread.join(60)
        assert not thread.is_alive(), "the server does not end"
