"""A trace shows what ran when, on the lane it ran on, beside the plan."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest
from tiny import chain, planned

from forebay.rewriter.ir.plan import Budget
from forebay.rewriter.ir.program import COMPUTE, DISK, Copy, FileSlice, Launch, Record, Release, Span, Wait
from forebay.runtime.devices.threads import ThreadDevice
from forebay.runtime.disk.reader import open_reader
from forebay.runtime.run.executor import BoundProgram
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
    assert [(s[0], s[1]) for s in trace.spans] == [(lane, label)]
    assert 0 <= trace.spans[0][2] <= trace.spans[0][3]


@pytest.mark.parametrize("item", [Record(COMPUTE, 1), Release(COMPUTE, SPAN)])
def test_the_rest_runs_as_it_is(item: object) -> None:
    def call() -> None: ...

    assert Trace().timed(item, call) is call  # type: ignore[arg-type]


def test_spans_from_many_threads_are_all_kept() -> None:
    trace = Trace()
    threads = [threading.Thread(target=lambda: [trace.add("a", "b", 0.0, 1.0) for _ in range(500)]) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(trace.spans) == 4000


def test_a_file_has_counters_of_bytes_per_link_in_order_of_time(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    write_trace(path, [], [], [("disk", "device", 2.0, 30), ("device", "disk", 1.5, 7), ("disk", "device", 1.0, 12)],
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
    launches = [i.label for i in program.step if isinstance(i, Launch)]
    copies = [i.label for i in program.step if isinstance(i, Copy)]
    assert [s[1] for s in trace.spans if s[0] == COMPUTE] == 2 * launches
    reads = [s[1] for s in trace.spans if s[0] == DISK]
    assert len(reads) == len(program.prologue) / 2 + 2 * len(copies) and set(reads) == set(copies)
    assert plan.prediction.streamed_nbytes > 0
    for lane, _, start, end in trace.spans:
        assert start <= end, lane
