"""Launches as graphs, with a stand-in for CUDA's: while it captures, what is dispatched is kept and not computed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from no_gpu import Event, Stream
from torch.utils._python_dispatch import TorchDispatchMode

from forebay.kernels.gpu_support.scratch import Scratch
from forebay.rewriter.ir.program import COMPUTE, Launch, Program, Record, Span, TensorRef, Wait
from forebay.runtime.devices.cuda.device import CudaDevice
from forebay.runtime.devices.cuda.graphs import LEAST
from forebay.runtime.run.executor import BoundProgram

FLOATS = 16


class Reader:
    def fault(self) -> None: ...

    def close(self) -> None: ...


class Graph(TorchDispatchMode):
    """Keeps the operators that are called between capture_begin and capture_end, and calls them when replayed."""

    made: list[Graph]
    refuse = False

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[tuple[Any, ...]] = []
        self.options: dict[str, Any] = {}
        self.replays = 0
        self.fault = ""
        Graph.made.append(self)

    def capture_begin(self, **options: Any) -> None:
        self.options = options
        self.__enter__()

    def capture_end(self) -> None:
        self.__exit__(None, None, None)
        if self.fault:
            raise RuntimeError("capture was invalidated")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if Graph.refuse:
            self.fault = "operation not permitted when stream is capturing"
            raise RuntimeError(self.fault)
        self.kept.append((func, args, kwargs or {}))
        return (kwargs or {}).get("out", args[0])

    def replay(self) -> None:
        self.replays += 1
        for func, args, kwargs in self.kept:
            func(*args, **kwargs)


@pytest.fixture(autouse=True)
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(Graph, "made", [], raising=False)
    monkeypatch.setattr(Graph, "refuse", False)
    for name, value in (("is_available", lambda: True), ("Event", Event), ("Stream", Stream),
                        ("stream", lambda stream: torch.inference_mode()), ("current_stream", Stream),
                        ("set_stream", lambda stream: None), ("CUDAGraph", Graph),
                        ("graph_pool_handle", lambda: (0, 1)), ("_sleep", lambda cycles: None),
                        ("current_device", lambda: 0)):  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr("forebay.runtime.devices.cuda.device.IDLE", [])
    yield


def ref(at: int, arena: str = "device") -> TensorRef:
    return TensorRef(arena, 4 * at, "float32", (1,), (1,), f"x{at}")


def add(a: int, b: int, out: int, arena: str = "device") -> Launch:
    """x[out] = x[a] + x[b]"""
    spans = tuple(Span(arena, 4 * at, 4, f"x{at}") for at in (a, b, out))
    kwargs = {"self": ref(a, arena), "other": ref(b, arena)}
    return Launch(COMPUTE, "aten.add.out", (), kwargs, (ref(out, arena),), spans[:2], spans[2:], f"add{out}")


def bind(*step: Any, graphs: bool = True) -> tuple[BoundProgram, torch.Tensor]:
    """The step on a device whose memory holds 1, 2, 0, 0, …"""
    device = CudaDevice(Reader(), graphs=graphs)  # type: ignore[arg-type]
    device.device_memory = torch.zeros(4 * FLOATS, dtype=torch.uint8)
    memory = device.device_memory.view(torch.float32)
    memory[:2] = torch.tensor([1.0, 2.0])
    program = Program("step", step, (), {"device": 4 * FLOATS}, {})
    bound = BoundProgram(program, device)
    for worker in device.workers.values():
        worker.close()
    return bound, memory


def fibonacci(first: int, last: int) -> tuple[Launch, ...]:
    return tuple(add(i - 2, i - 1, i) for i in range(first, last))


def test_a_run_is_made_once_captured_once_and_replayed_on_what_memory_holds_then() -> None:
    bound, memory = bind(*fibonacci(2, 2 + LEAST))
    for start, graphs, replays in ((1.0, 0, 0), (3.0, 1, 1), (5.0, 1, 2)):
        memory[0], memory[2:] = start, 0.0
        bound.run()
        want = [start, 2.0]
        for _ in range(LEAST):
            want.append(want[-1] + want[-2])
        assert memory[: len(want)].tolist() == want
        assert (len(Graph.made), sum(g.replays for g in Graph.made)) == (graphs, replays)
    assert len(Graph.made[0].kept) == LEAST  # each launch of the Program, and nothing else
    assert Graph.made[0].options == {"pool": (0, 1), "capture_error_mode": "thread_local"}


def test_where_the_scratch_moves_graphs_are_captured_anew() -> None:
    """A program that is bound later may need more of it: what was captured before would write where it was."""
    bound, memory = bind(*fibonacci(2, 2 + LEAST))
    device = bound.device
    assert isinstance(device, CudaDevice)
    device.scratch = Scratch(torch.device("cpu"))
    made = []
    for needed in (64, 64, 64, 4096, 4096, 4096):
        device.scratch.hold(needed, 0)
        memory[2:] = 0.0
        bound.run()
        assert memory[2 + LEAST - 1] > 0
        made.append((len(Graph.made), sum(g.replays for g in Graph.made)))
    assert made == [(0, 0), (1, 1), (1, 2), (1, 2), (2, 3), (2, 4)]


def test_graphs_end_where_copies_are_ordered() -> None:
    long = 2 + LEAST
    bound, memory = bind(*fibonacci(2, long), Record(COMPUTE, 1), Wait(COMPUTE, 1), *fibonacci(long, 2 * LEAST + 2),
                         Record(COMPUTE, 2), add(0, 1, 2 * LEAST + 2))
    assert len(bound._step) == 6
    for _ in range(3):
        bound.run()
    assert [len(g.kept) for g in Graph.made] == [LEAST, LEAST]
    assert {g.options["pool"] for g in Graph.made} == {(0, 1)}
    assert memory[2 * LEAST + 1] == 2 * memory[2 * LEAST] - memory[2 * LEAST - 2]


def test_few_launches_and_switched_off_are_launched_one_by_one() -> None:
    for bound, memory in (bind(*fibonacci(2, 1 + LEAST)), bind(*fibonacci(2, 9), graphs=False)):
        for _ in range(3):
            bound.run()
        assert not Graph.made
        assert memory[2] == 3.0


def test_what_touches_host_memory_is_never_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    host = torch.zeros(FLOATS)
    real = CudaDevice.tensor
    monkeypatch.setattr(CudaDevice, "tensor", lambda self, r: host[r.offset // 4 :][:1] if r.arena == "host"
                        else real(self, r))
    bound, _ = bind(*fibonacci(2, 2 + LEAST), add(0, 1, 1, "host"), *fibonacci(2, 2 + LEAST))
    host[0] = 1.0
    for _ in range(4):
        bound.run()
    assert host[1] == 4.0  # 1 more with every step
    assert [len(g.kept) for g in Graph.made] == [LEAST, LEAST]


def test_a_refused_capture_is_launched_one_by_one_for_good() -> None:
    bound, memory = bind(*fibonacci(2, 2 + LEAST))
    Graph.refuse = True
    for _ in range(4):
        memory[2:] = 0.0
        bound.run()
        assert memory[2:6].tolist() == [3.0, 5.0, 8.0, 13.0]
    refused, empty = Graph.made
    assert refused.fault and not (refused.kept or empty.kept or empty.replays)


def test_a_trace_times_each_launch() -> None:
    from forebay.runtime.run.trace import Trace

    bound, _ = bind(*fibonacci(2, 2 + LEAST))
    trace = Trace()
    traced = BoundProgram(bound.program, bound.device, trace)
    for _ in range(3):
        traced.run()
    assert not Graph.made
    assert [label for lane, label, *_ in trace.spans()] == [f"add{i}" for i in range(2, 2 + LEAST)] * 3


def test_what_launches_keep_is_taken_before_they_are_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[dict[str, int]] = []
    monkeypatch.setattr(CudaDevice, "hold", lambda self, held: seen.append(held))
    bind(replace(add(0, 1, 2), held=(("scratch", 5),)), replace(add(0, 1, 3), held=(("scratch", 9), ("graphs", 1))))
    assert seen == [{"scratch": 9, "graphs": 1}]
    bind(add(0, 1, 2))
    assert len(seen) == 1
