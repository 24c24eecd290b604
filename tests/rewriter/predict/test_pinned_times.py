"""What the simulator says of a made-up profile, to the last digit: a change of the cost library may not move it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from tiny import chain, lowered, placements, plan_for

from forebay.rewriter.ir.program import (
    COMPUTE,
    DISK,
    UPLOAD,
    Copy,
    FileSlice,
    Item,
    Launch,
    Rows,
    Span,
    TensorRef,
)
from forebay.rewriter.machine.points import AttentionPoint, Contention, GemmPoint
from forebay.rewriter.machine.profile import Link, Machine, Tier
from forebay.rewriter.predict.estimator import MachineEstimator
from forebay.rewriter.predict.simulate import item_cost, simulate

CPU = Machine(
    "made-up", "2026-01-01", {}, 2, 2, "cpu",
    {"device": Tier(4 << 30, 13e9), "host": Tier(4 << 30, 13e9), "disk": Tier(32 << 30, 0.0)},
    (Link("disk", "device", 1.3e9, 1.7e-4, "direct", 2, 4 << 20), Link("disk", "host", 1.1e9, 1.9e-4, "direct"),
     Link("host", "device", 5e9, 3e-6, "memcpy"), Link("device", "host", 5e9, 3e-6, "memcpy")),
    tuple(GemmPoint(impl, dtype, m, n, k, slower * (3e-6 + 2e-9 * n + n * k * m**0.5 * 1.1e-10))
          for impl, dtype, slower in (("flat", "bfloat16", 1.0), ("aten", "bfloat16", 1.3), ("flat", "w4g64", 0.4))
          for m in (1, 4, 16) for n, k in ((2048, 2048), (512, 2048), (64, 64))),
    6e9, 7e-6, 4e9,
    attention=tuple(AttentionPoint("bfloat16", b, f, 5e-6 + 1.5e-10 * b + 3e-11 * f)
                    for b, f in ((10**5, 10**5), (10**6, 10**5), (10**6, 10**7), (10**4, 10**4))),
    contention=Contention(1.7, 1.2, 1.4, 1.05), choice_elements_per_s=1e9)
GPU = replace(CPU, name="made-up GPU", device_kind="NVIDIA H200", dispatch_s=8e-6, memory_bytes_per_s=2e12,
              attention_bytes_per_s=3e12, attention=(), contention=Contention(),
              tiers=CPU.tiers | {"device": Tier(140 << 30, 4e12)})


def span(nbytes: int, arena: str = "device", name: str = "b") -> Span:
    return Span(arena, 0, nbytes, name)


def ref(*shape: int, dtype: str = "bfloat16") -> TensorRef:
    return TensorRef("device", 0, dtype, shape, tuple([1] * len(shape)), "b")


def launch(op: str, reads: tuple[Span, ...], writes: int, args: tuple = (), impl: str = "", **kwargs: object) -> Launch:
    return Launch(COMPUTE, op, args, kwargs, (), reads, (span(writes, name="out"),), "l", impl=impl)


def product(m: int, n: int, k: int, impl: str, dtype: str = "bfloat16") -> Launch:
    nbytes = n * k * (4 if dtype == "float32" else 2)
    return launch("forebay.linear", (span(nbytes), span(2 * m * k)), 2 * m * n,
                  (ref(m, k, dtype=dtype), ref(n, k, dtype=dtype), None), impl, form="nk", accumulate=False)


CACHE = ref(2, 4, 300, 64)
VALUES = replace(CACHE, offset=2 * 2 * 4 * 300 * 64)
ITEMS: dict[str, Item] = {
    "read": Copy(DISK, FileSlice("f", 0, 10**6), span(10**6), "c"),
    "read to the host": Copy(DISK, FileSlice("f", 0, 10**6), span(10**6, "host"), "c"),
    "upload": Copy(UPLOAD, span(10**6, "host"), span(10**6), "c"),
    "rows": Copy(DISK, Rows(FileSlice("f", 0, 12800), 128, ref(2, 3, dtype="int64")), span(768), "c"),
    "product": product(2, 1024, 1024, "flat"),
    "product of another size": product(40, 3000, 1000, "aten_x"),
    "product, best": product(1, 700, 900, ""),
    "product, unmeasured": product(3, 500, 600, "flat", "float32"),
    "lookup": launch("aten.embedding.out", (span(10**6),), 4096),
    "append": launch("forebay.kv_append", (span(512, name="k"), span(10**6, name="out")), 10**6),
    "attention": launch("forebay.attention", (span(10**5),), 10**4, (ref(2, 8, 5, 64), CACHE, VALUES)),
    "attention, unmeasured": launch("forebay.attention", (span(10**5),), 10**4,
                                    (ref(2, 8, 5, 64, dtype="float32"), CACHE, VALUES)),
    "norm": launch("forebay.rms_norm", (span(6000),), 6000),
}
# Seconds alone, slowed, slows, latency, and of the issuing thread.
PINNED: dict[str, dict[str, tuple[float, ...]]] = {
    "cpu": {
        "read": (0.000769230769231, 1.0, 1.0, 0.00017, 0.0001),
        "read to the host": (0.000909090909091, 1.0, 1.0, 0.00019, 0.0001),
        "upload": (0.0002, 1.0, 1.0, 3e-06, 0.0001),
        "rows": (0.000179846160105, 1.0, 1.0, 0.0, 0.0001),
        "product": (0.000175464902992, 1.661486986, 1.3730408902, 0.0, 0.0),
        "product of another size": (0.00432625, 1.2561865179, 1.08933056253, 0.0, 0.0),
        "product, best": (8.07e-05, 1.7, 1.4, 0.0, 0.0),
        "product, unmeasured": (9.98153846154e-05, 1.6649352651, 1.37545468557, 0.0, 0.0),
        "lookup": (7.68266666667e-06, 1.24101140096, 1.07870798067, 0.0, 0.0),
        "append": (7.08533333333e-06, 1.20555861151, 1.05389102805, 0.0, 0.0),
        "attention": (0.000285835739714, 1.2148014003952, 1.06036098027664, 0.0, 0.0),
        "attention, unmeasured": (0.0001606, 1.22634351949, 1.06844046365, 0.0, 0.0),
        "norm": (8e-06, 1.25769230769, 1.09038461538, 0.0, 0.0),
    },
    "gpu": {
        "read": (0.000769230769231, 1.0, 1.0, 0.00017, 0.0001),
        "read to the host": (0.000909090909091, 1.0, 1.0, 0.00019, 0.0001),
        "upload": (0.0002, 1.0, 1.0, 3e-06, 0.0001),
        "rows": (0.000179846160105, 1.0, 1.0, 0.0, 0.0001),
        "product": (0.000168464902992, 1.0, 1.0, 0.0, 8e-06),
        "product of another size": (0.00431925, 1.0, 1.0, 0.0, 8e-06),
        "product, best": (7.37e-05, 1.0, 1.0, 0.0, 8e-06),
        "product, unmeasured": (3.0165e-07, 1.0, 1.0, 0.0, 8e-06),
        "lookup": (2.048e-09, 1.0, 1.0, 0.0, 8e-06),
        "append": (2.56e-10, 1.0, 1.0, 0.0, 8e-06),
        "attention": (2.048e-07, 1.0, 1.0, 0.0, 8e-06),
        "attention, unmeasured": (2.048e-07, 1.0, 1.0, 0.0, 8e-06),
        "norm": (3e-09, 1.0, 1.0, 0.0, 8e-06),
    },
}


@pytest.mark.parametrize("name", ITEMS)
@pytest.mark.parametrize(("kind", "machine"), [("cpu", CPU), ("gpu", GPU)])
def test_an_item_takes_what_it_took(kind: str, machine: Machine, name: str) -> None:
    *found, both_ways = item_cost(ITEMS[name], MachineEstimator(machine))
    pinned = PINNED[kind][name]
    assert both_ways == (1.0, 1.0)
    if kind == "gpu" and isinstance(ITEMS[name], Copy):  # nothing waits for the thread that issues copies to a GPU
        found, pinned = found[:4], pinned[:4]
    assert tuple(found) == pytest.approx(pinned, rel=1e-9, abs=0.0)


def test_a_step_takes_what_it_took(tmp_path: Path) -> None:
    """Six streamed layers through three slots: reads bind, and are slowed by what they run beside."""
    model = chain(tmp_path, 6)
    plan = plan_for(placements(model, {n: 0 for n in model.weights if n[0] == "w"}), 3, None, arena=1 << 17)
    program = lowered(model, plan, True)
    line = simulate(program, CPU)
    assert line.time_s == pytest.approx(0.0007049705628151253, rel=1e-9)
    assert line.busy_time_s == pytest.approx({COMPUTE: 0.00010490656281512511, DISK: 0.0007048160272913803}, rel=1e-9)
    line = simulate(program, GPU)
    assert line.time_s == pytest.approx(0.0010389046153846159, rel=1e-9)
