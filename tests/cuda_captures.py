"""A model of CUDA's streams, events and graphs, with the rules of captures; a graph runs in any order that its edges
allow."""

from __future__ import annotations

import contextlib
import itertools
import random
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from forebay.rewriter.ir.program import Copy, Launch, Record, Rows, Span, Wait, place_of, span_of
from forebay.runtime.devices import landing
from forebay.runtime.devices.cuda import device, graphs, pinned, whole_steps
from forebay.runtime.devices.cuda.whole_steps import Captured

UNCAPTURED = "dependency created on uncaptured work in another stream"
UNJOINED = "capture sequence contains a fork that was not joined to the primary stream"
CAPTURING = "operation not permitted when stream is capturing"
TWICE = "beginAllocateToPool: already recording to mempool_id"
DRAWING = "Cannot prepare for replay during capturing stage"
ENDED = "operation not permitted on an event last recorded in a capturing stream"


class Node:
    """A call of a graph, or an event that it records."""

    def __init__(self, call: Callable[[], object], after: set[Node], stream: str) -> None:
        self.call, self.after, self.stream = call, set(after), stream

    def before(self) -> set[Node]:
        """All that has ended when it begins."""
        found, left = set[Node](), [*self.after]
        while left:
            node = left.pop()
            if node not in found:
                found.add(node)
                left += node.after
        return found


class Capture:
    def __init__(self, origin: Stream) -> None:
        self.origin, self.nodes, self.streams, self.fault = origin, list[Node](), {origin}, ""

    def refuse(self, fault: str) -> None:
        self.fault = self.fault or fault
        raise RuntimeError(fault)


class Stream:
    cuda_stream = 0

    def __init__(self, driver: Driver, name: str) -> None:
        self.driver, self.name = driver, name
        self.capture: Capture | None = None
        self.front: set[Node] = set()  # what the next captured call comes after
        self.late: list[Node] = []  # of a replayed graph, what nobody has waited for

    def wait_event(self, event: Event) -> None:
        if event.capture is not None:
            if event.capture not in self.driver.open:
                raise RuntimeError(ENDED)
            if self.capture is None:
                self.capture, self.front = event.capture, set()
                self.capture.streams.add(self)
            self.front |= event.front
        elif self.capture is not None:
            self.capture.refuse(UNCAPTURED)
        elif event.of is not None and not (event.external and self.driver.hasty):
            event.of.catch_up(event)

    def wait_stream(self, other: Stream) -> None:
        event = Event(self.driver)
        event.record(other)
        self.wait_event(event)

    def synchronize(self) -> None:
        if self.capture is not None:
            self.capture.refuse(CAPTURING)
        self.catch_up()

    def catch_up(self, event: Event | None = None) -> None:
        """Run what is late, up to an event that a graph recorded."""
        now = self.late
        if event is not None and event.external:
            reached = set[Node]() if event.node is None else event.node.before() | {event.node}
            now = [node for node in self.late if node in reached]
        self.late = [node for node in self.late if node not in now]
        self.driver.run(now)


class Event:
    def __init__(self, driver: Driver, external: bool = False) -> None:
        self.driver, self.external = driver, external
        self.capture: Capture | None = None
        self.front: set[Node] = set()
        self.of: Stream | None = None
        self.node: Node | None = None  # of the graph that records it

    def record(self, stream: Stream) -> None:
        if stream.capture is None:
            self.capture, self.of = None, stream
        elif self.external:
            self.node, self.of = self.driver.node(stream, lambda: None), stream.capture.origin
            stream.front = {self.node}
        else:
            self.capture, self.front = stream.capture, set(stream.front)

    def synchronize(self) -> None:
        if self.capture is not None:
            raise RuntimeError(ENDED)
        if self.of is not None:
            self.of.catch_up(self)


class Graph:
    """Runs at once, or as late as those who wait for its stream or for its events allow. A capture that fails leaves
    behind what torch 2.11 does: memory that is recorded, and random numbers that no replay may have."""

    def __init__(self, driver: Driver) -> None:
        self.driver, self.replays = driver, 0
        self.nodes: list[Node] = []
        driver.graphs.append(self)

    def capture_begin(self, pool: object = None, capture_error_mode: str = "global") -> None:
        assert capture_error_mode == "thread_local", "other threads read files meanwhile"
        self.pool = next(self.driver.pools) if pool is None else pool
        if self.pool in self.driver.recording:
            raise RuntimeError(TWICE)
        self.driver.recording.add(self.pool)
        self.driver.drawing = True
        stream = self.driver.current()
        stream.synchronize()
        stream.capture, stream.front = Capture(stream), set()
        self.driver.open.append(stream.capture)

    def capture_end(self) -> None:
        capture = self.driver.open.pop()
        assert capture.origin is self.driver.current()
        joined = set(capture.origin.front).union(*(node.before() for node in capture.origin.front))
        for stream in capture.streams:
            stream.capture = None
            if not capture.fault and stream.front - joined:
                capture.fault = UNJOINED
        if capture.fault or (self.driver.refuses and capture.nodes):
            raise RuntimeError(capture.fault or "capture was invalidated")
        self.driver.recording.remove(self.pool)
        self.nodes, self.driver.drawing = capture.nodes, False

    def replay(self) -> None:
        stream = self.driver.current()
        assert stream.capture is None
        if self.driver.drawing:
            raise RuntimeError(DRAWING)
        stream.catch_up()
        self.replays += 1
        stream.late = [*self.nodes]
        if self.driver.random.random() < 0.3 and not self.driver.hasty:
            stream.catch_up()


class Driver:
    """Stands in for torch.cuda.

    Args:
        seed: Of the orders in which graphs run.
        external: Whether torch knows events that graphs record.
        hasty: Whether waits for those are met too early.
    """

    def __init__(self, seed: int = 0, external: bool = True, hasty: bool = False) -> None:
        self.random, self.external, self.hasty, self.refuses = random.Random(seed), external, hasty, False
        self.graphs: list[Graph] = []
        self.open: list[Capture] = []
        self.recording, self.drawing = set[object](), False  # memory that captures take; numbers are drawn in one
        self.pools = itertools.count()
        self.made = 0
        self._current = threading.local()
        registered = SimpleNamespace(cudaHostRegister=lambda *_: 0, cudaHostUnregister=lambda *_: 0)
        self.cuda = SimpleNamespace(
            is_available=lambda: True, Event=self.event, Stream=self.stream, stream=self.entered,
            current_stream=self.current, set_stream=lambda stream: setattr(self._current, "stream", stream),
            CUDAGraph=lambda: Graph(self), graph_pool_handle=lambda: next(self.pools), cudart=lambda: registered,
            _sleep=lambda cycles: None, current_device=lambda: 0)
        self.allocator = SimpleNamespace(_cuda_endAllocateToPool=lambda device, pool: self.recording.remove(pool),
                                         _cuda_releasePool=lambda device, pool: None)

    def stream(self, priority: int = 0) -> Stream:
        self.made += 1
        return Stream(self, f"stream {self.made}")

    def event(self, external: bool = False) -> Event:
        if external and not self.external:
            raise TypeError("'external' is an invalid keyword argument")
        return Event(self, external)

    def current(self) -> Stream:
        if getattr(self._current, "stream", None) is None:
            self._current.stream = Stream(self, threading.current_thread().name)
        return self._current.stream

    @contextlib.contextmanager
    def entered(self, stream: Stream) -> Iterator[None]:
        before, self._current.stream = self.current(), stream
        try:
            yield
        finally:
            self._current.stream = before

    def issue(self, stream: Stream, call: Callable[[], Any]) -> None:
        """Make a call on a stream: a node of a graph where it is captured."""
        if stream.capture is None:
            call()
        else:
            stream.front = {self.node(stream, call)}

    def node(self, stream: Stream, call: Callable[[], object]) -> Node:
        assert stream.capture is not None
        made = Node(call, stream.front, stream.name)
        stream.capture.nodes.append(made)
        return made

    def run(self, nodes: list[Node]) -> None:
        """Make calls in any order that lets each come after those it is to come after."""
        left = dict.fromkeys(nodes)
        while left:
            ready = [node for node in left if not node.after & left.keys()]
            node = self.random.choice(ready)
            del left[node]
            node.call()


class _Torch:
    """torch with a `cuda` in the memory of the host."""

    def __init__(self, driver: Driver) -> None:
        self.cuda, self._C = driver.cuda, driver.allocator

    def zeros(self, *sizes: int, device: str = "cpu", **how: Any) -> torch.Tensor:
        return torch.zeros(*sizes, **how)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def install(monkeypatch: pytest.MonkeyPatch, driver: Driver) -> None:
    """Put a driver in the place of CUDA's, for devices; runs of launches alone are no graphs."""
    for module in (device, landing, pinned, graphs, whole_steps):
        monkeypatch.setattr(module, "torch", _Torch(driver))
    monkeypatch.setattr(device, "IDLE", [])
    monkeypatch.setattr(whole_steps, "issue", driver.issue)
    monkeypatch.setattr(whole_steps, "graphed", lambda run, *_: [call for _, call in run])


def edges_amiss(items: Captured, graph: Graph) -> list[str]:
    """Items of a step whose node comes after other nodes than their stream and their Waits say."""
    nodes = {id(node.call): node for node in graph.nodes}
    front: dict[str, set[Node]] = {}
    recorded: dict[int, set[Node]] = {}
    amiss = []
    for item, call in items:
        before = front.setdefault(item.stream, set())
        if isinstance(item, Record):
            recorded[item.event] = {*before}
        elif isinstance(item, Wait):
            before |= recorded.get(item.event, set())
        elif isinstance(item, Launch | Copy):
            node = nodes[id(call)]
            if node.after != before:
                amiss.append(item.label)
            front[item.stream] = {node}
    return amiss


def races(items: Captured, graph: Graph) -> list[tuple[str, str]]:
    """Items that touch the same memory, one of which writes it, and neither of which comes after the other; but for
    copies that leave alone the rows that the other goes by."""
    nodes = {id(node.call): node for node in graph.nodes}
    touched = [(nodes[id(call)], item.label, *_touched(item)) for item, call in items
               if isinstance(item, Launch | Copy)]
    before = {node: node.before() for node, *_ in touched}
    spared = {item.label: [span_of(ref) for ref in item.src.spares] for item, _ in items
              if isinstance(item, Copy) and isinstance(item.src, Rows)}
    found = []
    for i, (later, label, reads, writes) in enumerate(touched):
        for earlier, other, read, written in touched[:i]:
            if (_meet(writes, read) or _meet(writes, written) or _meet(reads, written)) and not (
                    earlier in before[later] or later in before[earlier]) and not (
                    _meet(spared.get(label, []), read) or _meet(spared.get(other, []), reads)):
                found.append((other, label))
    return found


def _touched(item: Launch | Copy) -> tuple[list[Span], list[Span]]:
    if isinstance(item, Launch):
        return [*item.reads], [*item.writes]
    named = [span_of(ref) for end in (item.src, item.dst) if isinstance(end, Rows) for ref in end.index_tensors]
    ends = [place for place in (place_of(item.src), place_of(item.dst)) if isinstance(place, Span)]
    return [ends[0], *named], [ends[1]]


def _meet(some: list[Span], others: list[Span]) -> bool:
    return any(a.arena == b.arena and a.offset < b.offset + b.nbytes and b.offset < a.offset + a.nbytes
               for a in some for b in others)
