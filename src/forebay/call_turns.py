"""One call at a time uses a model's memory: threads take turns, and a call within a call is refused."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Self


class ModelCall:
    """One call of a model by its user. Steps that carry the same `ModelCall` belong together.

    Attributes:
        name: The method that the user called, as errors name it.
    """

    def __init__(self, name: str) -> None:
        self.name = name


class CallTurns:
    """The turns of calls that share one memory.

    Attributes:
        lock: Held by the thread whose turn it is. Hold it alone, without `taken`, for work that leaves the memory as it
            is, which may then also be done in a callback.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._running: ModelCall | None = None

    @contextmanager
    def taken(self, call: ModelCall) -> Iterator[None]:
        """Give `call` the memory, once the calls of other threads have ended.

        Raises:
            RuntimeError: Another call runs in this thread, so `call` comes from one of its callbacks. Nothing has
                changed then.
        """
        with self.lock:
            outer = self._running
            if outer not in (None, call):
                raise RuntimeError(_reason(call.name, outer.name))
            self._running = call
            try:
                yield
            finally:
                self._running = outer


class TakesTurns:
    """A model whose calls share one memory: turns of callers, and closing."""

    _turns: CallTurns

    def turn(self, call: ModelCall) -> AbstractContextManager[None]:
        """Give `call` the memory, as `CallTurns.taken` does; RuntimeError in a callback of another call."""
        return self._turns.taken(call)

    def refuse_within(self, name: str) -> None:
        """Raise RuntimeError, as `turn` does, where this thread is in the middle of a call."""
        with self.turn(ModelCall(name)):
            pass

    def close(self) -> None:
        """Give back memory, once the calls of other threads have ended; the next `generate` takes it again.

        Raises:
            RuntimeError: A callback of one of the model's own calls asks for it.
        """
        with self.turn(ModelCall("close")):
            self._end_sessions()
            self._give_back()

    def _give_back(self) -> None:
        """Give back what outlives sessions."""

    def _end_sessions(self) -> None:
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _reason(name: str, outer: str) -> str:
    if name in ("close", "reserve", "start_trace"):
        return (f"{name}: the model is in the middle of {outer}, which needs its memory; call {name} after {outer} "
                "returns")
    return (f"{name}: the model is in the middle of {outer}, whose KV cache {name} would overwrite; call {name} after "
            f"{outer} returns, or wrap the model a second time")
