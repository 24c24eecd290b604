"""A trace shows what ran when, on the lane it ran on, beside the plan."""

from __future__ import annotations

import json
import resource
import threading
import time
import tracemalloc
from collections import Counter
from pathlib import Path

import pytest
from tiny import chain, planned

from forebay.rewriter.ir.plan import Budget
from forebay.rewriter.ir.program import COMPUTE, DISK, WRITE, Copy, FileSlice, Launch, Record, Release, Span, Wait
from forebay.runtime.devices.cpu.device import ThreadDevice
from forebay.runtime.disk.reader import open_reader
from forebay.runtime.run.executor import BoundProgram
from forebay.runtime.run.trace import SPAN as SPAN_RECORD
from forebay.runtime.run.trace import Trace, write_trace

SPAN = Span("device", 0, 8, "b")


@pytest.mark.parametrize(("item", "lane", "label"), [
    (Launch(COMPUTE, "op", (), {}, (), (), (), "mul"), COMPUTE, "mul"),
    (Wait(COMPUTE, 3), "compute waits", "event 3"),
    (Copy(DISK, FileSlice("f", 0, 8), SPAN, "fetch w"), "issue", "fetch w"),
])
def test_work_and_waiting_are_noted(item: object, lane: str, label: str) -> None:
    trace, ran = Trace(), []
    trace.timed(item, lambda: ran.append(1))()  # type: ignore[arg-type]
    assert ran == [1]
    (span,) = trace.spans()
    assert span[:2] == (lane, label) and 0 <= span[2] <= span[3]


@pytest.mark.parametrize("item", [Record(COMPUTE, 1), Release(COMPUTE, SPAN)])
def test_the_rest_runs_as_it_is(item: object) -> None:
    def call() -> None: ...

    assert Trace().timed(item, call) is call  # type: ignore[arg-type]


def test_spans_from_many_threads_are_all_kept_in_the_order_of_their_ends() -> None:
    trace = Trace()

    def copy(number: int) -> None:
        note = trace.noting_copy(Copy(DISK, FileSlice("f", 0, 8), SPAN, f"copy {number}"))
        for _ in range(500):
            note(time.perf_counter(), number)

    threads = [threading.Thread(target=copy, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    spans, moved = list(trace.spans()), list(trace.moved())
    assert Counter(label for _, label, *_ in spans) == {f"copy {number}": 500 for number in range(8)}
    assert sorted(spans, key=lambda span: span[3]) == spans and sorted(moved, key=lambda copy: copy[2]) == moved
    assert sum(nbytes for *_, nbytes in moved) == 500 * sum(range(8)) == trace.link_nbytes()["disk", "device"]


def test_the_latest_spans_are_kept_and_all_bytes_counted() -> None:
    trace = Trace(room=5)
    inward, outward = Copy(DISK, FileSlice("f", 0, 8), SPAN, "in"), Copy(WRITE, SPAN, Span("spill", 0, 8, "s"), "out")
    begin = time.perf_counter()
    trace.noting_copy(outward)(begin, 7)
    note = trace.noting_copy(inward)
    for nbytes in range(1, 9):
        note(begin, nbytes)
        trace.timed(Wait(COMPUTE, nbytes), lambda: None)()
    assert trace.gone == 17 - 5
    spans, moved = list(trace.spans()), list(trace.moved())
    assert [label for _, label, *_ in spans] == ["event 6", "in", "event 7", "in", "event 8"]
    assert [copy[:2] + copy[3:] for copy in moved] == [
        ("device", "disk", 7), ("disk", "device", 21), ("disk", "device", 7), ("disk", "device", 8)]
    assert sorted(copy[2] for copy in moved) == [copy[2] for copy in moved]
    assert trace.link_nbytes() == {("device", "disk"): 7, ("disk", "device"): 36}


def test_a_trace_takes_no_more_memory_however_long_it_runs(tmp_path: Path) -> None:
    """Nor does writing it, but for the names of what ran."""
    def fill(trace: Trace, times: int) -> None:
        calls = [trace.timed(Wait(COMPUTE, event), lambda: None) for event in range(4)]
        for call in times * calls:
            call()

    tracemalloc.start()
    try:
        for room, times in ((1000, 500), (1000, 20_000)):
            before = tracemalloc.get_traced_memory()[0]
            trace = Trace(room)
            fill(trace, times)
            tracemalloc.reset_peak()
            held = tracemalloc.get_traced_memory()[0] - before
            write_trace(tmp_path / "trace.json", trace.spans(), moved=trace.moved())
            peak = tracemalloc.get_traced_memory()[1] - before
            assert held < room * SPAN_RECORD.size + 20_000 and peak < held + 200_000, (held, peak)
    finally:
        tracemalloc.stop()
    assert len(json.loads((tmp_path / "trace.json").read_text())["traceEvents"]) == 1000 + 3


def test_a_file_has_counters_of_bytes_per_link_in_order_of_time(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    write_trace(path, [], [], [("disk", "device", 1.0, 12), ("device", "disk", 1.5, 7), ("disk", "device", 2.0, 30)],
                {("disk", "device"): 42})
    counters = [(e["pid"], e["name"], e["ts"], e["args"]) for e in json.loads(path.read_text())["traceEvents"]
                if e["ph"] == "C"]
    assert counters == [
        (1, "disk to device", 1e6, {"bytes": 12}), (1, "device to disk", 1.5e6, {"bytes": 7}),
        (1, "disk to device", 2e6, {"bytes": 42}), (2, "disk to device", 0.0, {"bytes per step": 42})]


def test_file_has_a_process_each_for_actual_and_planned_and_a_lane_per_stream(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    write_trace(path, [("disk", "w0", 0.5, 1.0), ("compute", "mul", 1.0, 1.25)], iter([("compute", "mul", 0.0, 2.0)]))
    events = json.loads(path.read_text())["traceEvents"]
    names = {(e["name"], e["pid"], e.get("tid")): e["args"]["name"] for e in events if e["ph"] == "M"}
    assert names == {("process_name", 1, None): "actual", ("process_name", 2, None): "planned",
                     ("thread_name", 1, 1): "disk", ("thread_name", 1, 2): "compute", ("thread_name", 2, 1): "compute"}
    spans = [(e["pid"], e["tid"], e["name"], e["ts"], e["dur"]) for e in events if e["ph"] == "X"]
    assert spans == [(1, 1, "w0", 5e5, 5e5), (1, 2, "mul", 1e6, 2.5e5), (2, 1, "mul", 0.0, 2e6)]


def test_a_traced_step_shows_every_launch_and_every_read(tmp_path: Path) -> None:
    model = chain(tmp_path, width=64)
    plan, program = planned(model, Budget(30_000))
    trace = Trace()
    device = ThreadDevice(open_reader("buffered"), trace=trace)
    device.allocate(program.arenas)
    bound = BoundProgram(program, device, trace)
    bound.start()
    for _ in range(2):
        bound.run()
    device.finish()
    device.close()
    spans = list(trace.spans())
    launches = [i.label for i in program.step if isinstance(i, Launch)]
    copies = [i.label for i in program.step if isinstance(i, Copy)]
    assert [s[1] for s in spans if s[0] == COMPUTE] == 2 * launches
    reads = [s[1] for s in spans if s[0] == DISK]
    assert len(reads) == len(program.prologue) / 2 + 2 * len(copies) and set(reads) == set(copies)
    assert plan.prediction.streamed_nbytes > 0
    for lane, _, start, end in spans:
        assert start <= end, lane


@pytest.mark.parametrize("before", [None, "an older trace"])
def test_a_trace_that_finds_no_room_is_named_and_leaves_no_half(tmp_path: Path, before: str | None) -> None:
    """The system allows fewer bytes than it takes, as a full disk does."""
    path = tmp_path / "trace.json"
    if before is not None:
        path.write_text(before)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large") as raised:
            write_trace(path, [("lane", "label", i, i + 1) for i in range(10_000)])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert raised.value.filename == str(path)
    assert [(each.name, each.read_text()) for each in tmp_path.iterdir()] == [
        ("trace.json", text) for text in (before,) if text]
    write_trace(path, [("lane", "label", 0, 1)])
    assert json.loads(path.read_text())["traceEvents"]
