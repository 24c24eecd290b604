"""Stores in predicted steps: their links, and what reading and writing the disk do to each other."""

from __future__ import annotations

from dataclasses import replace

import pytest
from carried import COUNT, Carried

from forebay.rewriter.ir.program import LOAD, WRITE, Copy, Item, Program, Record, Span, Wait
from forebay.rewriter.machine.both_ways import BothWays
from forebay.rewriter.machine.profile import Link, Machine, machine_from_json
from forebay.rewriter.predict.estimator import MachineEstimator
from forebay.rewriter.predict.simulate import item_cost, simulate
from forebay.runtime.devices.virtual import ItemCost, run_on_streams
from forebay.runtime.devices.virtual_threads import run_on_threads

BOTH = (BothWays(1 << 16, 4.0, 1.5), BothWays(1 << 20, 2.0, 3.0))
MACHINE = replace(Machine.default(), both_ways=BOTH, links=(
    Link("disk", "device", 1e9, 1e-4, "direct"), Link("device", "disk", 5e8, 3e-4, "direct"),
    Link("disk", "host", 1e9, 1e-4, "direct"), Link("host", "disk", 5e8, 3e-4, "direct"),
    Link("host", "device", 4e9, 1e-6, "memcpy"), Link("device", "host", 2e9, 2e-6, "memcpy")))


@pytest.mark.parametrize(("nbytes", "factors"), [
    (1, (4.0, 1.5)), (1 << 16, (4.0, 1.5)), (1 << 18, (3.0, 2.25)), (1 << 20, (2.0, 3.0)), (1 << 30, (2.0, 3.0))])
def test_factors_are_interpolated_by_the_size_of_writes(nbytes: int, factors: tuple[float, float]) -> None:
    assert MACHINE.side_by_side(nbytes) == pytest.approx(factors)
    assert replace(MACHINE, both_ways=BOTH[:1]).side_by_side(nbytes) == (4.0, 1.5)
    assert replace(MACHINE, both_ways=()).side_by_side(nbytes) == (2.0, 2.0), "unmeasured: shared evenly"


def test_a_profile_keeps_them_and_refuses_what_cannot_be() -> None:
    assert machine_from_json(MACHINE.to_json()).both_ways == BOTH
    for bad, field in ((BothWays(0, 1.0, 1.0), "nbytes"), (BothWays(1, 0.9, 1.0), "write_slowed"),
                       (BothWays(1, 1.0, float("nan")), "read_slowed")):
        with pytest.raises(ValueError, match=rf"both_ways\[0\]\.{field}"):
            replace(MACHINE, both_ways=(bad,)).validate()
    with pytest.raises(ValueError, match="must rise"):
        replace(MACHINE, both_ways=BOTH[::-1]).validate()


def test_a_store_costs_its_link_and_its_factors() -> None:
    nbytes = 1 << 20
    times = MachineEstimator(MACHINE)
    source, target = Span("device", 0, nbytes, "x"), Span("cache", 0, nbytes, "c")
    store = item_cost(Copy(WRITE, source, target, "store"), times)
    assert store[:5] == pytest.approx((nbytes / 5e8, 1.0, 1.0, 3e-4, times.copy_issue_s))
    assert store.both_ways == (2.0, 3.0)
    load = item_cost(Copy(LOAD, target, source, "load"), times)
    assert load.time_s == pytest.approx(nbytes / 1e9) and load.both_ways == (1.0, 1.0)


PAIR = (Copy("load", Span("cache", 0, 1, "a"), Span("device", 0, 1, "x"), "load"),
        Copy("write", Span("device", 1, 1, "y"), Span("cache", 4096, 1, "b"), "store"))


def cost(item: Item) -> ItemCost:
    if not isinstance(item, Copy):
        return ItemCost(0.0)
    return ItemCost(1.0) if item.label == "load" else ItemCost(2.0, both_ways=(2.0, 3.0))


@pytest.mark.parametrize(("order", "expected"), [
    # threads: side by side the load takes 3 s, in which the store does 1.5 of its 2; then it goes on alone
    (PAIR, {"load": 3.0, "store": 3.5}), (PAIR[::-1], {"load": 3.0, "store": 3.5})])
def test_reads_and_writes_slow_each_other_on_threads(order: tuple[Copy, ...], expected: dict[str, float]) -> None:
    step = (*order, Record("load", 1), Record("write", 2), Wait("compute", 1), Wait("compute", 2))
    _, spans, _ = run_on_threads(Program("p", step, (), {}, {}), cost, 1)
    assert {label: end for _, label, _, end in spans} == pytest.approx(expected)


def test_two_streams_of_reads_share_the_disk() -> None:
    weights = replace(PAIR[0], stream="disk")
    step = (PAIR[0], replace(weights, label="load"), Record("load", 1), Record("disk", 2), Wait("compute", 1),
            Wait("compute", 2))
    ends, *_ = run_on_threads(Program("p", step, (), {}, {}), cost, 1)
    assert ends[-1] == pytest.approx(2.0)


@pytest.mark.parametrize(("order", "expected"), [
    (PAIR, {"load": 1.0, "store": 2.5}),  # the store does half of a second's work while the load is under way
    (PAIR[::-1], {"load": 1.0 + 4.0 / 3.0, "store": 2.0})])  # in 2 s the load does two thirds
def test_on_streams_the_one_issued_later_is_slowed(order: tuple[Copy, ...], expected: dict[str, float]) -> None:
    _, spans = run_on_streams(Program("p", order, (), {}, {}), cost, 1)
    assert {label: end for _, label, _, end in spans} == pytest.approx(expected)


@pytest.mark.parametrize("kind", [Carried(3, 2), Carried(3, 2, hop=True), Carried(3, 2, tier="host")], ids=str)
@pytest.mark.parametrize("device", ["cpu", "a GPU"])
def test_a_step_with_stores_is_predicted_and_waits_for_slower_writes(kind: Carried, device: str) -> None:
    program = kind.program()
    machine = replace(MACHINE, device_kind=device)
    fast = simulate(program, machine)
    out = WRITE if kind.tier == "disk" else "download"
    assert fast.busy_time_s[out] > 0 and len([1 for s, *_ in fast.spans if s == out]) == kind.turns
    links = tuple(replace(x, latency_s=0.1) if x.dst == ("disk" if kind.tier == "disk" else "host") else x
                  for x in machine.links)
    slow = simulate(program, replace(machine, links=links))
    assert slow.time_s > fast.time_s + 0.1 and COUNT == 1000
