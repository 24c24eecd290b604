"""Steps as one graph each, with a model of captures in the place of CUDA's: no GPU is needed."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from cuda_captures import UNCAPTURED, UNJOINED, Driver, Graph, edges_amiss, install, races

from forebay.kernels.gpu_support.scratch import Scratch
from forebay.rewriter.ir.program import (
    ATTEND,
    COMPUTE,
    DISK,
    DOWNLOAD,
    LOOKUP,
    RETURN,
    UPLOAD,
    Copy,
    FileSlice,
    Item,
    Launch,
    Program,
    Record,
    Rows,
    Span,
    TensorRef,
    Wait,
)
from forebay.runtime.devices.cuda.device import CudaDevice
from forebay.runtime.devices.cuda.whole_steps import WholeStep, obstacle, tells_early
from forebay.runtime.devices.device import RuntimeFault
from forebay.runtime.run.arena import Arena
from forebay.runtime.run.executor import BoundProgram
from forebay.runtime.run.trace import Trace

WEIGHTS, SLOTS, ROWS = 6, 3, 8
X, SUM, FOUND, SLOT, TOKEN, STORED, LOADED, BYTES = 0, 8, 16, 24, 48, 56, 64, 72  # of the device
WEIGHT, TABLE, LANDED, CACHE, HOST_BYTES = 0, 48, 112, 120, 184  # of host memory


class Reader:
    def fault(self) -> None: ...

    def close(self) -> None: ...


def ref(at: int, dtype: str = "float64", arena: str = "device") -> TensorRef:
    return TensorRef(arena, at, dtype, (1,), (1,), f"x{at}")


def span(at: int, arena: str = "device") -> Span:
    return Span(arena, at, 8, f"x{at}")


def add(a: int, b: int, out: int, stream: str = COMPUTE) -> Launch:
    return Launch(stream, "aten.add.out", (), {"self": ref(a), "other": ref(b)}, (ref(out),), (span(a), span(b)),
                  (span(out),), f"add {a} {b}")


def named(table: int, index: int, skips: bool = True) -> Rows:
    return Rows(Span("host", table, 8 * ROWS, "table"), 8, ref(index, "int64"), skips=skips)


def fetch(number: int) -> tuple[Copy, Record]:
    copy = Copy(UPLOAD, span(WEIGHT + 8 * number, "host"), span(SLOT + 8 * (number % SLOTS)), f"fetch {number}")
    return copy, Record(UPLOAD, 100 + number)


def program() -> Program:
    """x + table[token] + the sum of weights, which stream; also stored in row stored[0] of a cache, to which what lay
    there before is added first: a load that waits for the step before alone."""
    step: list[Item] = [
        Wait(RETURN, 7), Copy(RETURN, named(CACHE, STORED), span(LOADED), "load"), Record(RETURN, 5),
        Record(COMPUTE, 1), Wait(LOOKUP, 1), Copy(LOOKUP, named(TABLE, TOKEN, False), span(LANDED, "host"), "look up"),
        Record(LOOKUP, 2), Wait(UPLOAD, 2), Copy(UPLOAD, span(LANDED, "host"), span(FOUND), "bring"), Record(UPLOAD, 3),
        Wait(COMPUTE, 3), add(X, FOUND, SUM)]
    for number in range(WEIGHTS):
        step += [Wait(COMPUTE, 100 + number), add(SUM, SLOT + 8 * (number % SLOTS), SUM), Record(COMPUTE, 10 + number),
                 Wait(UPLOAD, 10 + number), *fetch((number + SLOTS) % WEIGHTS)]
    step += [Wait(COMPUTE, 5), add(SUM, LOADED, SUM), Record(COMPUTE, 6), Wait(DOWNLOAD, 6),
             Copy(DOWNLOAD, span(SUM), named(CACHE, STORED), "store"), Record(DOWNLOAD, 7)]
    prologue = [Record(DOWNLOAD, 7), *(item for number in range(SLOTS) for item in fetch(number))]
    return Program("step", tuple(step), tuple(prologue), {"device": BYTES, "host": HOST_BYTES}, {})


class Case:
    """A device whose memory is the host's, and what its steps are to give."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, driver: Driver | None = None, **options: Any) -> None:
        self.driver = driver or Driver()
        install(monkeypatch, self.driver)
        self.device = CudaDevice(Reader(), whole=True, **options)  # type: ignore[arg-type]
        self.device.device_memory, self.device.host = torch.zeros(BYTES, dtype=torch.uint8), Arena(HOST_BYTES)
        self.memory, self.near = self.device.host.bytes, self.device.device_memory.view(torch.float64)
        self.memory.view(torch.float64)[: WEIGHTS] = 10.0 ** torch.arange(WEIGHTS)
        self.memory[TABLE:LANDED].view(torch.float64).copy_(1e7 * torch.arange(ROWS))
        self.memory[CACHE:].zero_()
        self.cache = [0.0] * ROWS

    def bound(self, program: Program) -> BoundProgram:
        return BoundProgram(replace(program, inputs={
            "x": ref(X), "token": ref(TOKEN, "int64"), "stored": ref(STORED, "int64")}), self.device)

    def check(self, bound: BoundProgram, x: float, token: int, row: int) -> None:
        """A step gives what it is to, however late its last copies are."""
        bound.write({"x": torch.tensor([x]).double(), "token": torch.tensor([token]), "stored": torch.tensor([row])})
        bound.run()
        self.cache[row] += 111111.0 + x + 1e7 * token
        assert self.near[SUM // 8] == self.cache[row]

    def close(self) -> None:
        self.device.finish()
        assert self.memory[CACHE:].view(torch.float64).tolist() == self.cache
        self.device.host = None
        self.device.close()


def whole(bound: BoundProgram) -> WholeStep:
    (step,) = bound._step
    assert isinstance(step, WholeStep)
    return step


@pytest.mark.parametrize("driver", [Driver(0), Driver(1), Driver(2), Driver(3, external=False), Driver(4, hasty=True)],
                         ids=["0", "1", "2", "no events", "hasty events"])
def test_a_step_and_its_copies_are_one_graph(monkeypatch: pytest.MonkeyPatch, driver: Driver) -> None:
    """In any order that its edges allow, with inputs written while the copies for the next step run."""
    case = Case(monkeypatch, driver)
    bound = case.bound(program())
    bound.start()
    for turn in range(12):
        case.check(bound, turn, turn % ROWS, turn * turn % 3)
    step = whole(bound)
    assert step.graph in driver.graphs and step.graph.replays == 11
    assert (step.known is None) == (driver.hasty or not driver.external)
    assert len(step.graph.nodes) == 6 + 2 * WEIGHTS + (step.known is not None)  # launches and copies, and nothing else
    if step.known is not None:
        late = {*step.graph.nodes} - step.known.node.before() - {step.known.node}
        calls = [node.call for node in late]
        assert [item.label for item, call in step.items if call in calls] == ["fetch 0", "fetch 1", "fetch 2"]
    case.close()


def test_each_wait_is_an_edge_and_without_any_edge_items_race(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(monkeypatch)
    bound = case.bound(program())
    bound.start()
    for turn in range(2):
        case.check(bound, turn, 1, 1)
    step = whole(bound)
    graph = step.graph
    assert isinstance(graph, Graph) and not edges_amiss(step.items, graph) and not races(step.items, graph)
    crossing = 0
    for node in [node for node in graph.nodes if any(node.call is call for _, call in step.items)]:
        for earlier in sorted(node.after, key=graph.nodes.index):
            node.after.remove(earlier)
            assert edges_amiss(step.items, graph)
            if earlier.stream != node.stream and earlier not in node.before():
                crossing += 1
                assert races(step.items, graph), (node.stream, earlier.stream)
            node.after.add(earlier)
    assert crossing > 2 * WEIGHTS and not races(step.items, graph)
    case.close()


def test_the_model_refuses_what_cuda_does() -> None:
    driver = Driver()
    compute, other = driver.stream(), driver.stream()
    earlier = driver.event()
    earlier.record(other)
    for wrong, fault in ((lambda: compute.wait_event(earlier), UNCAPTURED), (compute.synchronize, "not permitted"),
                         (lambda: other.wait_stream(compute), None),
                         (lambda: (other.wait_stream(compute), driver.issue(other, lambda: None)), UNJOINED)):
        graph = Graph(driver)
        with driver.entered(compute):
            graph.capture_begin(capture_error_mode="thread_local")
            driver.issue(compute, lambda: None)
            if fault in (UNCAPTURED, "not permitted"):
                with pytest.raises(RuntimeError, match=fault):
                    wrong()
            else:
                wrong()
            if fault is None:
                graph.capture_end()
            else:
                with pytest.raises(RuntimeError, match=fault):
                    graph.capture_end()
        assert compute.capture is other.capture is None
    inner = driver.event()
    with driver.entered(compute):
        graph.capture_begin(capture_error_mode="thread_local")
        inner.record(compute)
        graph.capture_end()
    with pytest.raises(RuntimeError, match="last recorded in a capturing stream"):
        other.wait_event(inner)


def test_a_wait_left_out_of_the_capture_gives_other_results(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model is no check unless it finds that."""
    found = 0
    for seed in range(4):
        case = Case(monkeypatch, Driver(seed))
        bound = case.bound(program())
        step = whole(bound)
        step.items = [(item, call) for item, call in step.items if item != Wait(COMPUTE, 100 + WEIGHTS - 1)]
        bound.start()
        try:
            for turn in range(6):
                case.check(bound, turn, 0, 0)
        except AssertionError:
            found += 1
        case.device.host = None
    assert found


def test_what_cannot_be_captured_is_issued_item_by_item_for_good(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "forebay")
    case = Case(monkeypatch)
    case.driver.refuses = True
    bound = case.bound(program())
    bound.start()
    for turn in range(4):
        case.check(bound, turn, 1, 0)
    step = whole(bound)
    assert step.graph is None and "begins with add 0 16 is issued item by item: capture was invalid" in caplog.text
    made = len(case.driver.graphs)
    case.check(bound, 1, 1, 1)
    assert len(case.driver.graphs) == made
    case.close()


def test_a_capture_that_fails_costs_no_other_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch leaves its memory and its random numbers in a capture that CUDA ended with an error."""
    case = Case(monkeypatch)
    first, failing, later = (case.bound(program()) for _ in range(3))
    first.start()
    for bound, refuses in ((first, False), (failing, True), (first, False), (later, False), (first, False)):
        case.driver.refuses = refuses
        for turn in range(3):
            case.check(bound, turn, turn, 0)
    assert whole(first).graph.replays == 8 and whole(later).graph.replays == 2 and whole(failing).graph is None
    assert whole(failing).refused == "RuntimeError: capture was invalidated" and not whole(first).refused
    assert not case.driver.recording and not case.driver.drawing
    case.close()


def test_where_the_scratch_moves_a_step_is_captured_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(monkeypatch)
    bound = case.bound(program())
    bound.start()
    scratch = case.device.scratch = Scratch(torch.device("cpu"))
    step, seen = whole(bound), []
    for turn, needed in enumerate((64, 64, 64, 4096, 4096, 4096)):
        scratch.hold(needed, 0)
        case.check(bound, turn, 2, 2)
        seen.append(step.graph)
    assert seen[0] is seen[3] is None and seen[1] is seen[2] is not seen[4] is seen[5] is not None
    case.close()


def test_all_ends_between_a_graph_and_a_step_that_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """They have no events in common. A step that no graph holds comes between, or another one's first."""
    case = Case(monkeypatch)
    finish, ended = case.device.finish, list[int]()
    case.device.captures.finish = lambda: (ended.append(1), finish())[1]
    beside = Launch(ATTEND, "aten.add.out", (), {}, (), (), (), "attend")
    kept = replace(program(), step=(*program().step, Record(ATTEND, 50)))
    assert obstacle([beside]) == "attend does not run on the GPU alone"
    bounds = {"a": case.bound(program()), "b": case.bound(program()), "c": case.bound(kept)}
    assert len(bounds["c"]._step) > 1
    bounds["a"].start()
    for turn, (name, ends) in enumerate(zip("aaaacccbbbaab", (0, 1, 0, 0, 1, 0, 0, 0, 1, 0, 0, 0, 0), strict=True)):
        ended.clear()
        case.check(bounds[name], turn, 1, turn % ROWS)
        assert len(ended) == ends, (turn, name)
        step = bounds[name]._step[0]
        graphed = isinstance(step, WholeStep) and step.graph is not None
        assert (case.device.captures.known is not None) == graphed == case.device.captures.replaying
    case.close()


@pytest.mark.parametrize(("item", "why"), [
    (Copy(DISK, FileSlice("w", 0, 8), span(0, "host"), "fetch w"), "fetch w reads or writes a file"),
    (Copy(DOWNLOAD, span(0), Span("spill", 0, 8, "s"), "store s"), "store s reads or writes a file"),
    (Copy(RETURN, replace(named(CACHE, 0), count=ref(8)), span(0), "load"), "load moves rows that no list on the GPU"),
    (Copy(RETURN, replace(named(CACHE, 0), index=ref(0, "int64", "host")), span(0), "load"), "load moves rows that no"),
    (Copy(RETURN, replace(named(CACHE, 0), index=replace(ref(0), shape=(2, 2), stride=(1, 2))), span(0), "x"), "list"),
    (Copy(RETURN, replace(named(CACHE, 0), index=replace(ref(0), shape=(5000,))), span(0), "load"), "more than 4096"),
    (replace(add(0, 1, 2), reads=(span(0, "host"),)), "add 0 1 does not run on the GPU alone"),
    (add(0, 1, 2, "collect"), "does not run on the GPU alone"),
    (Copy(UPLOAD, replace(span(0, "host"), nbytes=4 << 20), replace(span(0), nbytes=4 << 20), "fetch"),
     "the link takes longer for its copies of 4194304 bytes than the host"),
    (Wait(DISK, 1), "it orders the stream disk"), (add(0, 1, 2), "it has no copies")])
def test_what_no_graph_holds_is_named(item: Item, why: str) -> None:
    assert why in (obstacle([add(0, 8, 16), item]) or "")
    assert obstacle([add(0, 8, 16), Copy(UPLOAD, span(0, "host"), span(0), "fetch"), Record(LOOKUP, 1)]) is None


def test_a_row_that_does_not_exist_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(monkeypatch)
    bound = case.bound(program())
    bound.start()
    for turn in range(3):
        case.check(bound, turn, turn, 0)
    bound.write({"token": torch.tensor([ROWS])})
    with pytest.raises(RuntimeFault, match="look up: row 8 of a table of 8"):
        bound.run()
    case.check(bound, 1, 1, 1)
    case.close()


@pytest.mark.parametrize("options", [{"graphs": False}, {"poison": True}, {"sync": True}, {"trace": Trace()}])
def test_steps_of_which_each_item_is_seen_are_no_graphs(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    case = Case(monkeypatch, **options)
    bound = case.bound(program())
    assert len(bound._step) > 10 and not any(isinstance(call, WholeStep) for call in bound._step)
    bound.start()
    for turn in range(3):
        case.check(bound, turn, 1, turn)
    assert not case.driver.graphs
    case.close()


@pytest.mark.parametrize(("driver", "told"), [
    (Driver(), True), (Driver(external=False), False), (Driver(hasty=True), False)])
def test_events_in_graphs_are_tried_before_they_are_relied_on(
    monkeypatch: pytest.MonkeyPatch, driver: Driver, told: bool
) -> None:
    install(monkeypatch, driver)
    compute = driver.stream()
    with driver.entered(compute):
        assert tells_early(compute, driver.stream()) == told  # type: ignore[arg-type]
