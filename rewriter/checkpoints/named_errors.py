"""Panics of the tokenizers library, which is written in Rust, as errors of Python."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress


@contextmanager
def panicking() -> Iterator[None]:
    """Raise a panic of the tokenizers library, which is no Exception (pyo3 has it beside them), as a ValueError of one
    line, without the hundreds that the library prints to stderr."""
    panicked = False
    _STDERR.hold()
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        panicked = True
        raise ValueError(f"the tokenizers library broke off: {' '.join(str(error).split())}") from None
    finally:
        _STDERR.let_go(panicked)


class _HeldStderr:
    """File descriptor 2, kept in memory while any thread holds it; then printed, but for the time of a panic."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._holders = 0
        self._panicked = False
        self._own: int | None = None
        self._memory: int | None = None

    def hold(self) -> None:
        with self._lock:
            self._holders += 1
            if self._holders > 1:
                return
            with suppress(OSError):  # too many open files, say: then all is printed
                self._own = os.dup(2)
                self._memory = os.memfd_create("stderr")
                os.dup2(self._memory, 2)

    def let_go(self, panicked: bool) -> None:
        with self._lock:
            self._holders -= 1
            self._panicked |= panicked
            if self._holders:
                return
            own, memory, panicked = self._own, self._memory, self._panicked
            self._own, self._memory, self._panicked = None, None, False
            if own is not None:
                os.dup2(own, 2)
                os.close(own)
            if memory is not None:
                with suppress(OSError), open(memory, "rb") as held:
                    if not panicked and (size := held.seek(0, os.SEEK_END)):
                        held.seek(0)
                        os.write(2, held.read(size))


_STDERR = _HeldStderr()
