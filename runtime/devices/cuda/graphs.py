"""Launches that follow one another as one CUDA graph: captured once, sent to the GPU together after."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import Any

import torch

from forebay.rewriter.ir.program import Launch
from forebay.runtime.devices.device import Call

LOG = logging.getLogger("forebay")
LEAST = 4  # launches; fewer take the host no longer one by one (1 to 2 us each) than a graph does
FAILED: list[torch.cuda.CUDAGraph] = []  # torch's allocator of pinned memory asks these at every capture


class CapturePool:
    """Memory of the temporaries of graphs that never run at once. `handle` is torch's number of it."""

    def __init__(self) -> None:
        self.handle: Any = torch.cuda.graph_pool_handle()

    def leave(self, failed: torch.cuda.CUDAGraph) -> None:
        """Undo what torch leaves of a capture that CUDA ended with an error; later captures have another pool.

        torch believes that it goes on: it refuses other captures with this pool, and `empty_cache` fails. In torch 2.11
        the GPU's random numbers stay in capture too, so that none are drawn and no graph is replayed. A capture that
        succeeds ends that.
        """
        FAILED.append(failed)
        with contextlib.suppress(AttributeError, RuntimeError):  # of a torch that has ended it itself
            device = torch.cuda.current_device()
            torch._C._cuda_endAllocateToPool(device, self.handle)
            torch._C._cuda_releasePool(device, self.handle)
        self.handle = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        torch.cuda._sleep(1)  # loads what no capture may
        graph.capture_begin(pool=torch.cuda.graph_pool_handle(), capture_error_mode="thread_local")
        torch.cuda._sleep(1)
        graph.capture_end()


class LaunchGraph:
    """Launches as one call: the first makes them one by one, which compiles kernels and takes what memory they keep;
    the second captures them; it and all later calls replay the capture. What cannot be captured (an operator that
    waits for the GPU) is launched one by one for good. A capture holds addresses: where `version` is another than it
    was then (the stream's scratch is elsewhere), all begins again.

    All captures share `pool`: nothing in it outlives its run, and runs of a device follow one another on one stream.
    """

    def __init__(self, label: str, launches: Sequence[Call], pool: CapturePool, version: Callable[[], int]) -> None:
        self.label, self.launches, self.pool, self.version = label, tuple(launches), pool, version
        self.ran = self.refused = False
        self.graph: torch.cuda.CUDAGraph | None = None
        self.seen = 0

    def __call__(self) -> None:
        if self.seen != self.version():
            if self.graph is not None:
                torch.cuda.current_stream().synchronize()  # it may run still
            self.graph, self.ran = None, False
        if self.graph is None and self.ran and not self.refused:
            self.graph = self._captured()
            self.refused = self.graph is None
        if self.graph is not None:
            self.graph.replay()
            return
        for launch in self.launches:
            launch()
        self.ran, self.seen = True, self.version()

    def _captured(self) -> torch.cuda.CUDAGraph | None:
        graph = torch.cuda.CUDAGraph()
        try:
            with capturing(graph, self.pool):
                for launch in self.launches:
                    launch()
        except RuntimeError as error:
            LOG.info("%s and what follows it is launched one by one: %s", self.label, error)
            return None
        return graph


@contextlib.contextmanager
def capturing(graph: torch.cuda.CUDAGraph, pool: CapturePool) -> Iterator[None]:
    """Capture what this thread launches on the current stream; other threads copy and read on, so theirs is no part."""
    graph.capture_begin(pool=pool.handle, capture_error_mode="thread_local")
    try:
        yield
    except BaseException:
        with contextlib.suppress(RuntimeError):  # the capture is invalid, and says so
            _end(graph, pool)
        raise
    _end(graph, pool)


def _end(graph: torch.cuda.CUDAGraph, pool: CapturePool) -> None:
    try:
        graph.capture_end()
    except RuntimeError:
        pool.leave(graph)
        raise


def graphed(run: Sequence[tuple[Launch, Call]], pool: CapturePool, version: Callable[[], int]) -> list[Call]:
    """The launches of a run with those that may be captured together made graphs, each anew where `version` changes. A
    launch that touches host memory is not captured: where it computes on the host, a replay would leave it out."""
    calls: list[Call] = []
    for captured, group in groupby(run, key=lambda pair: on_device(pair[0])):
        pairs = tuple(group)
        launches = [call for _, call in pairs]
        if captured and len(launches) >= LEAST:
            calls.append(LaunchGraph(pairs[0][0].label, launches, pool, version))
        else:
            calls += launches
    return calls


def on_device(launch: Launch) -> bool:
    return all(span.arena == "device" for span in (*launch.reads, *launch.writes))
