"""Costs follow the machine profile: bytes over bandwidth, measured products, dispatch once per launch."""

from __future__ import annotations

from dataclasses import replace

import pytest

from forebay.rewriter.costs import PAGE, item_time_s
from forebay.rewriter.machine import GemmPoint, Link, Machine
from forebay.rewriter.program import (
    COMPUTE,
    DISK,
    UPLOAD,
    Copy,
    FileRows,
    FileSlice,
    Launch,
    Record,
    Release,
    Span,
    TensorRef,
    Wait,
)

MACHINE = replace(
    Machine.default(), memory_bytes_per_s=1e9, dispatch_s=1e-6, attention_bytes_per_s=2e9,
    links=(Link("disk", "device", 1e8, 1e-3, "direct"), Link("disk", "host", 2e8, 1e-3, "direct"),
           Link("host", "device", 4e8, 1e-5, "memcpy")),
    gemm=(GemmPoint("slow", "float32", 4, 8, 16, 5e-3), GemmPoint("fast", "float32", 4, 8, 16, 2e-3)))


def span(nbytes: int, arena: str = "device") -> Span:
    return Span(arena, 0, nbytes, "b")


def ref(*shape: int, dtype: str = "float32") -> TensorRef:
    return TensorRef("device", 0, dtype, shape, tuple([1] * len(shape)), "b")


def launch(op: str, reads: int = 0, writes: int = 0, args: tuple = (), impl: str = "", **kwargs: object) -> Launch:
    return Launch(COMPUTE, op, args, kwargs, (), (span(reads),), (span(writes),), "l", impl=impl)


@pytest.mark.parametrize(("item", "time_s"), [
    (Copy(DISK, FileSlice("f", 0, 10**6), span(10**6), "c"), 1e6 / 1e8),
    (Copy(DISK, FileSlice("f", 0, 10**6), span(10**6, "host"), "c"), 1e6 / 2e8),
    (Copy(UPLOAD, span(10**6, "host"), span(10**6), "c"), 1e6 / 4e8),
    (launch("aten.silu.out", 3000, 1000), 1e-6 + 4000 / 2e9),
    (launch("forebay.attention", 3000, 1000), 1e-6 + 4000 / 2e9),
    (Record(COMPUTE, 1), 0.0), (Wait(COMPUTE, 1), 0.0), (Release(COMPUTE, span(8)), 0.0),
])
def test_time_of_one_item(item: object, time_s: float) -> None:
    assert item_time_s(item, MACHINE) == pytest.approx(time_s)  # type: ignore[arg-type]


@pytest.mark.parametrize(("row_nbytes", "counted"), [(64, PAGE), (3 * PAGE, 3 * PAGE)])
def test_a_lookup_reads_whole_pages_and_waits_for_them(row_nbytes: int, counted: int) -> None:
    rows = FileRows("f", 0, row_nbytes, 100, ref(2, 3, dtype="int64"))
    time_s = item_time_s(Copy(DISK, rows, span(6 * row_nbytes), "c"), MACHINE)
    assert time_s == pytest.approx(1e-3 + 6 * counted / 1e8)


@pytest.mark.parametrize(("impl", "time_s"), [("slow", 5e-3), ("fast", 2e-3), ("", 2e-3)])
@pytest.mark.parametrize(("form", "weight"), [("nk", (8, 16)), ("kn", (16, 8))])
def test_a_product_takes_what_its_implementation_was_measured_to_take(
    impl: str, time_s: float, form: str, weight: tuple[int, int]
) -> None:
    item = launch("forebay.linear", 9, 9, (ref(2, 2, 16), ref(*weight), None), impl, form=form, accumulate=False)
    assert item_time_s(item, MACHINE) == pytest.approx(1e-6 + time_s)


def test_a_product_of_an_unmeasured_dtype_takes_at_least_its_bytes() -> None:
    weight = ref(8, 16, dtype="float16")
    item = launch("forebay.linear", 3000, 1000, (ref(4, 16), weight, None), form="nk", accumulate=False)
    assert item_time_s(item, MACHINE) == pytest.approx(1e-6 + 4000 / 2e9)


def test_a_link_the_machine_lacks_is_named() -> None:
    with pytest.raises(KeyError, match="device->host"):
        item_time_s(Copy(UPLOAD, span(8), span(8, "host"), "c"), MACHINE)
