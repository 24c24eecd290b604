"""CUDA streams and events on a machine without a GPU: what is issued is done at once."""

from __future__ import annotations


class Stream:
    cuda_stream = 0

    def __init__(self, priority: int = 0) -> None: ...

    def wait_stream(self, other: object) -> None: ...

    def wait_event(self, event: object) -> None: ...

    def synchronize(self) -> None: ...


class Event:
    def record(self, stream: object) -> None: ...

    def synchronize(self) -> None: ...
