"""Steps as one CUDA graph each: launches, and copies between host memory and the GPU.

Streams of copies are forked off the compute stream where a capture begins, and joined where it ends. The last copies of
a step are for the next one. Its graph begins after them on the compute stream: CUDA refuses waits from one capture into
another. An event in the graph tells that the results are there, before those last copies end.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from forebay.rewriter.ir.program import (
    COMPUTE,
    DEVICE,
    HOST,
    LOOKUP,
    MOVES,
    Copy,
    Item,
    Launch,
    Record,
    Rows,
    Span,
    TensorRef,
    Wait,
    copy_nbytes,
    place_of,
    row_major_strides,
)
from forebay.runtime.devices.cuda.graphs import CapturePool, capturing, graphed, on_device
from forebay.runtime.devices.device import Call
from forebay.runtime.devices.lookups import is_lookup
from forebay.runtime.devices.outward import NamedRows, copy_runs
from forebay.runtime.devices.streamed import joined_launches

LOG = logging.getLogger("forebay")
MOST_NAMED = 4096  # rows of one copy: each program of the kernel that moves them looks at all their numbers
# Mean bytes of a step's copies from which on no graph is made. A link of 55 GB/s then takes 76 us for a copy, and the
# host about 20 us to issue it with its launches, waits and records.
LONG_NBYTES = 4 << 20
LATE_CYCLES = 10_000_000  # some milliseconds, far longer than a copy of a number takes

Captured = Sequence[tuple[Item, Call | None]]


@dataclass
class Captures:
    """Graphs of a device: of launches that follow one another, or of steps with their copies.

    Attributes:
        streams: CUDA's streams by the name of those in Programs. Lookups have one too.
        tensor: The tensor at a place in an arena.
        memory: The bytes of a span.
        named: What the tensors that name rows were told to hold.
        finish: Waits for everything issued.
        version: Of the scratch: graphs that were captured with another one are captured anew.
        launches: Whether launches are captured.
        whole: Whether steps are, with their copies.
        replaying: Whether the last step was a graph. Its copies have the streams' order through the compute stream
            alone, so all work ends before a step of the other kind.
        known: Tells that the results of that graph are there; None: when all of it has ended.
    """

    streams: Mapping[str, torch.cuda.Stream]
    tensor: Callable[[TensorRef], torch.Tensor]
    memory: Callable[[Span], torch.Tensor]
    named: NamedRows
    finish: Callable[[], None]
    version: Callable[[], int]
    launches: bool
    whole: bool
    replaying: bool = False
    known: torch.cuda.Event | None = None

    @functools.cached_property
    def pool(self) -> CapturePool:
        """Memory of the graphs' temporaries."""
        return CapturePool()

    def joined(self, items: Sequence[tuple[Item, Call]]) -> list[Call]:
        """The calls of items: one where they are a step that a graph holds."""
        if not self.launches:
            return [call for _, call in items]
        calls = joined_launches(items, lambda run: graphed(run, self.pool, self.version))
        if not self.whole or not any(isinstance(item, Launch) for item, _ in items):
            return calls
        kept = obstacle([item for item, _ in items])
        if kept is not None:
            LOG.info("%s is issued item by item: %s", _name_of(items), kept)
            return [self.leave, *calls]
        return [WholeStep(self, [(item, self._ready(item, call)) for item, call in items], calls)]

    def leave(self) -> None:
        """Begin a step that is no graph."""
        if self.replaying:
            self.finish()
        self.replaying = False

    def until_known(self, stream: torch.cuda.Stream) -> None:
        """Make a stream wait for the results of what was issued last."""
        if self.known is None:
            stream.wait_stream(self.streams[COMPUTE])
        else:
            stream.wait_event(self.known)

    def _ready(self, item: Item, call: Call) -> Call | None:
        """The call that issues an item on the current stream: None for what only orders others."""
        if isinstance(item, Launch):
            return call
        if not isinstance(item, Copy):
            return None
        place, target, rows = place_of(item.src), place_of(item.dst), _rows_of(item)
        assert isinstance(place, Span) and isinstance(target, Span)
        source, end = self.memory(place), self.memory(target)
        if rows is None:
            return functools.partial(copy_runs, ((0, 0, place.nbytes),), source, end, non_blocking=True)
        from forebay.kernels.products.expert_slots.gpu import bind_fetch_rows

        assert rows.index is not None
        index, back = self.tensor(rows.index), rows is item.dst
        table, dense = (end, source) if back else (source, end)
        bind = functools.partial(bind_fetch_rows, table, out=dense, row_nbytes=rows.row_nbytes, alike=rows.alike,
                                 back=back)
        bind(index=_none_named(index))()  # compiles the kernel, which no capture may
        return bind(index=index)


class WholeStep:
    """A step as one call: the first issues it item by item, which compiles kernels and takes what memory they keep; the
    second captures it; it and all later calls replay the capture. What cannot be captured is issued item by item for
    good."""

    def __init__(self, steps: Captures, items: Captured, calls: Sequence[Call]) -> None:
        self.steps, self.items, self.calls = steps, items, tuple(calls)
        self.lookups = [item for item, _ in items if isinstance(item, Copy) and is_lookup(item)]
        for item in self.lookups:
            steps.named.moved(item)  # from now on it keeps which rows they name
        self.ran, self.refused = False, ""  # by what error
        self.graph: torch.cuda.CUDAGraph | None = None
        self.known: torch.cuda.Event | None = None
        self.seen = 0

    def __call__(self) -> None:
        steps = self.steps
        if self.seen != steps.version():
            steps.leave()  # the graph may run still
            self.graph, self.ran = None, False
        if self.ran and not self.refused:
            for item in self.lookups:
                steps.named.known(item)  # raises where there is no such row: a kernel would not
            if not steps.replaying:
                steps.finish()
            if self.graph is None:
                self.graph = self._captured()
        if self.graph is not None:
            self.graph.replay()
            steps.replaying, steps.known = True, self.known
            return
        steps.leave()
        for call in self.calls:
            call()
        self.ran, self.seen = True, steps.version()

    def _captured(self) -> torch.cuda.CUDAGraph | None:
        graph, compute = torch.cuda.CUDAGraph(), self.steps.streams[COMPUTE]
        used = dict.fromkeys(item.stream for item, _ in self.items if item.stream != COMPUTE)
        streams = [self.steps.streams[name] for name in used]
        self.known = None
        if streams and tells_early(compute, streams[0]):
            self.known = torch.cuda.Event(external=True)
        try:
            with capturing(graph, self.steps.pool):
                for stream in streams:
                    stream.wait_stream(compute)
                self._issue()
                for stream in self._naming():
                    compute.wait_stream(stream)  # tensors that name rows may be written once the results are known
                if self.known is not None:
                    self.known.record(compute)
                for stream in streams:
                    compute.wait_stream(stream)
        except RuntimeError as error:
            self.refused = f"{type(error).__name__}: {error}"
            LOG.info("%s is issued item by item: %s", _name_of(self.items), error)
            return None
        return graph

    def _issue(self) -> None:
        """Issue every item on its stream. A Wait for what was recorded before this step is met: the step before has
        ended where a graph begins."""
        events: dict[int, torch.cuda.Event] = {}
        for item, call in self.items:
            stream = self.steps.streams[item.stream]
            if isinstance(item, Record):
                events[item.event] = torch.cuda.Event()
                events[item.event].record(stream)
            elif isinstance(item, Wait):
                if item.event in events:
                    stream.wait_event(events[item.event])
            elif call is not None:
                issue(stream, call)

    def _naming(self) -> list[torch.cuda.Stream]:
        names = dict.fromkeys(item.stream for item, _ in self.items if isinstance(item, Copy) and _rows_of(item))
        return [self.steps.streams[name] for name in names]


def issue(stream: torch.cuda.Stream, call: Call) -> None:
    """Make a call on a stream."""
    with torch.cuda.stream(stream):
        call()


def _name_of(items: Captured) -> str:
    return f"the step that begins with {next(item.label for item, _ in items if isinstance(item, Launch))}"


def obstacle(items: Sequence[Item]) -> str | None:
    """Say why no graph holds these items, or why it would gain nothing; None where one is to hold them."""
    for item in items:
        if isinstance(item, Launch) and not (item.stream == COMPUTE and on_device(item)):
            return f"{item.label} does not run on the GPU alone"
        if isinstance(item, Copy) and (why := _not_held(item)):
            return f"{item.label} {why}"
        if isinstance(item, Record | Wait) and item.stream not in (COMPUTE, LOOKUP, *MOVES):
            return f"it orders the stream {item.stream}"
    sizes = [copy_nbytes(item) for item in items if isinstance(item, Copy)]
    if not sizes:
        return "it has no copies"
    mean = sum(sizes) // len(sizes)
    return f"the link takes longer for its copies of {mean} bytes than the host" if mean >= LONG_NBYTES else None


def _not_held(item: Copy) -> str | None:
    """Say why a graph cannot hold a copy; None where it can."""
    rows, places = _rows_of(item), (place_of(item.src), place_of(item.dst))
    if any(not isinstance(place, Span) or place.arena not in (DEVICE, HOST) for place in places):
        return "reads or writes a file"
    if rows is None:
        return None
    index = rows.index
    if index is None or rows.count is not None or rows.apart or index.arena != DEVICE or (
            index.stride != row_major_strides(index.shape)):
        return "moves rows that no list on the GPU names"
    if math.prod(index.shape) > MOST_NAMED:
        return f"moves more than {MOST_NAMED} rows"
    return None


def _rows_of(item: Copy) -> Rows | None:
    return next((end for end in (item.src, item.dst) if isinstance(end, Rows)), None)


def _none_named(index: torch.Tensor) -> torch.Tensor:
    """Numbers that are no rows, at an address with the alignment of `index`: the same kernel is compiled."""
    shift = index.data_ptr() // index.element_size() % 2
    return torch.full((index.numel() + shift,), -1, dtype=index.dtype, device=index.device)[shift:]


@functools.cache
def tells_early(compute: torch.cuda.Stream, other: torch.cuda.Stream) -> bool:
    """Return whether an event within a graph holds another stream back until its place in each run, as this GPU and
    this torch have it. Else results are known when the whole graph has ended."""
    try:
        event, graph = torch.cuda.Event(external=True), torch.cuda.CUDAGraph()
        number, seen = (torch.zeros(1, dtype=torch.int64, device="cuda") for _ in range(2))

        def late() -> None:
            torch.cuda._sleep(LATE_CYCLES)
            number.add_(1)

        issue(compute, late)  # which loads what no capture may
        compute.synchronize()
        with capturing(graph, CapturePool()):
            issue(compute, late)
            event.record(compute)
            issue(compute, functools.partial(torch.cuda._sleep, LATE_CYCLES))
        for turn in (2, 3):  # in the second, the event of the first has been recorded
            graph.replay()
            other.wait_event(event)
            issue(other, functools.partial(seen.copy_, number))
            other.synchronize()
            compute.synchronize()
            if int(seen) != turn:
                return False
        return True
    except (AttributeError, RuntimeError, TypeError) as error:
        LOG.info("results of a step are known when all its copies have ended: %s", error)
        return False
