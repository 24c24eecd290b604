"""Costs follow the machine profile: bytes over bandwidth, measured products, dispatch once per launch."""

from __future__ import annotations

import random
from dataclasses import replace
from statistics import mean

import pytest

from forebay.kernels.operators import ATTENTION
from forebay.rewriter.ir.alignment import PAGE_NBYTES
from forebay.rewriter.ir.program import (
    COMPUTE,
    DISK,
    UPLOAD,
    Band,
    Copy,
    FileSlice,
    Launch,
    Record,
    Release,
    Rows,
    Span,
    TensorRef,
    Wait,
)
from forebay.rewriter.machine.points import GemmPoint
from forebay.rewriter.machine.profile import Link, Machine, Tier
from forebay.rewriter.predict.estimator import MachineEstimator
from forebay.rewriter.predict.item_costs import item_time_s, lookup_reads
from forebay.rewriter.predict.simulate import item_cost
from forebay.runtime.disk.chunks import Read, split_bands, split_rows

MACHINE = replace(
    Machine.default(), memory_bytes_per_s=1e9, dispatch_s=1e-6, attention_bytes_per_s=2e9,
    links=(Link("disk", "device", 1e8, 1e-3, "direct"), Link("disk", "host", 2e8, 1e-3, "direct"),
           Link("host", "device", 4e8, 1e-5, "memcpy")),
    gemm=(GemmPoint("slow", "float32", 4, 8, 16, 5e-3), GemmPoint("fast", "float32", 4, 8, 16, 2e-3)))
TIMES = MachineEstimator(MACHINE)


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
    assert item_time_s(item, TIMES) == pytest.approx(time_s)  # type: ignore[arg-type]


def test_torchs_operators_have_launches_of_their_own() -> None:
    times = MachineEstimator(replace(MACHINE, torch_dispatch_s=9e-6))
    for op, dispatch_s in (("aten.silu.out", 9e-6), ("forebay.rms_norm", 1e-6)):
        assert item_time_s(launch(op, 3000, 1000), times) == pytest.approx(dispatch_s + 4000 / 2e9)


@pytest.mark.parametrize("band", [
    Band(0, 700, 2304, ((1152, 1152),)), Band(64, 90, 400_000, ((8, 90_000),)), Band(512, 1, 0, ((0, 70_000),)),
    Band(0, 40, 8192, ((0, 8192),))], ids=["columns", "far apart", "alone", "whole rows"])
def test_pieces_of_rows_cost_what_is_read_for_them(band: Band) -> None:
    src = FileSlice("f", 4096, band.count * band.row_nbytes, (band,))
    read = split_bands(Read("f", src.offset, src.nbytes, 1 << 20, 0, 0, lambda error: None, src.bands), True, 1 << 20,
                       1 << 20)
    taken = sum(chunk.nbytes for chunk in read)
    time_s = item_time_s(Copy(DISK, src, span(src.nbytes), "c"), TIMES)
    assert time_s * 1e8 == pytest.approx(taken, abs=2 * PAGE_NBYTES * len(read))
    assert src.nbytes <= time_s * 1e8 + 1


@pytest.mark.parametrize(("row_nbytes", "counted"), [(64, PAGE_NBYTES), (3 * PAGE_NBYTES, 3 * PAGE_NBYTES)])
def test_a_lookup_reads_whole_pages_and_waits_for_each_read(row_nbytes: int, counted: int) -> None:
    """Rows of a table so large that no two of them lie near each other."""
    rows = Rows(FileSlice("f", 0, row_nbytes << 30), row_nbytes, ref(2, 3, dtype="int64"))
    time_s = item_time_s(Copy(DISK, rows, span(6 * row_nbytes), "c"), TIMES)
    assert time_s == pytest.approx(1e-3 + 5 * MACHINE.row_request_s + 6 * counted / 1e8, rel=1e-4)


@pytest.mark.parametrize(("count", "row_nbytes", "rows"), [(50, 1536, 1000), (50, 1536, 20_000), (800, 512, 60_000)])
def test_a_lookup_is_counted_as_the_reader_cuts_it(count: int, row_nbytes: int, rows: int) -> None:
    draws = random.Random(0)
    cut = [split_rows(0, row_nbytes, draws.sample(range(rows), count), 0, 1 << 22) for _ in range(40)]
    requests, nbytes = lookup_reads(count, row_nbytes, rows * row_nbytes)
    assert requests == pytest.approx(mean(map(len, cut)), rel=0.15)
    assert nbytes == pytest.approx(mean(sum(chunk.nbytes for chunk in chunks) for chunks in cut), rel=0.15)


def test_latents_are_read_once() -> None:
    """Of rows that are keys and values the bytes count once, and of all other caches twice, as do those of queries."""
    start, width, times = ref(2, dtype="int64"), 24, MachineEstimator(replace(MACHINE, attention_flops=0.0))
    rows, others = (replace(ref(2, 1, 100, width, dtype="bfloat16"), offset=at) for at in (0, 9600))
    for queries in (1, 5):
        q, pairs = ref(2, 4, queries, width), 2 * 4 * queries * (200 - queries + 1) // 2
        for values, caches in ((rows, 1), (others, 2)):
            item = replace(launch("forebay.attention", args=(q, rows, values, start, 1.0, 0, 0.0)), out=(q,))
            cost = ATTENTION.cost(item)
            assert cost.read_nbytes == 2 * 4 * queries * width * 4 + caches * 2 * 100 * width * 2 + 2 * 8
            assert cost.flops == 2 * pairs * 2 * width and cost.written_nbytes == 2 * 4 * queries * width * 4
            assert item_time_s(item, times) == pytest.approx(1e-6 + caches * 2 * 100 * width * 2 / 2e9)


def test_matmuls_by_heads_take_their_operations() -> None:
    times = MachineEstimator(replace(MACHINE, product_flops=1e9))
    few, many = (replace(launch("aten.bmm.out", 3000, 1000), flops=flops) for flops in (1000, 50_000))
    assert item_time_s(few, times) == pytest.approx(1e-6 + 4000 / 2e9)
    assert item_time_s(many, times) == pytest.approx(1e-6 + 5e-5)
    unknown = MachineEstimator(replace(MACHINE, product_flops=0.0))
    assert item_time_s(many, unknown) == pytest.approx(1e-6 + 4000 / 2e9)


def test_keys_and_values_are_made_of_latents_at_the_rate_of_matmuls() -> None:
    """Of attention over expanded latents: 4 heads of 8 + 4 numbers a key and 6 a value, from latents of 16."""
    q, rows, up = ref(2, 4, 5, 12), ref(2, 1, 100, 20), ref(4, 14, 16)
    args = (q, rows, rows, ref(2, dtype="int64"), 1.0, 0, 0.0, up, 8)
    item = replace(launch("forebay.expanded_attention", args=args), out=(ref(2, 5, 4, 6),))
    pairs, made = 2 * 4 * 5 * (200 - 5 + 1) // 2, 2 * 2 * 4 * 100 * 16 * 14
    for attention_flops, product_flops in ((1e6, 1e9), (1e9, 1e6)):
        times = MachineEstimator(replace(MACHINE, attention_flops=attention_flops, product_flops=product_flops))
        expected = 2 * pairs * (12 + 6) / attention_flops + made / product_flops
        assert item_time_s(item, times) == pytest.approx(expected, rel=0.01)


def attention(queries: int, tokens: int, window: int = 0) -> Launch:
    cache = ref(2, 4, tokens, 8)
    args = (ref(2, 4, queries, 8), cache, cache, ref(2, dtype="int64"), 1.0, window, 0.0)
    return launch("forebay.attention", 2 * 2 * 4 * tokens * 8 * 4, 64, args)


@pytest.mark.parametrize(("queries", "seen", "window", "alike"), [
    (1, 300, 0, 300), (1, 900, 0, 512), (16, 300, 0, 300), (1, 300, 100, 100), (1, 50, 100, 50)])
def test_attention_reads_what_its_queries_usually_see(queries: int, seen: int, window: int, alike: int) -> None:
    """As if the cache held no more; without a word all that it holds."""
    other = {1: 7.0, 16: 9.0, queries: float(seen)}
    item = attention(queries, 512, window)
    assert item_time_s(item, TIMES, other) == pytest.approx(item_time_s(attention(queries, alike), TIMES))
    assert item_time_s(attention(queries, 512), TIMES) > item_time_s(attention(queries, 511), TIMES)


@pytest.mark.parametrize(("impl", "time_s"), [("slow", 5e-3), ("fast", 2e-3), ("", 2e-3)])
@pytest.mark.parametrize(("form", "weight"), [("nk", (8, 16)), ("kn", (16, 8))])
def test_a_product_takes_what_its_implementation_was_measured_to_take(
    impl: str, time_s: float, form: str, weight: tuple[int, int]
) -> None:
    item = launch("forebay.linear", 9, 9, (ref(2, 2, 16), ref(*weight), None), impl, form=form, accumulate=False)
    assert item_time_s(item, TIMES) == pytest.approx(1e-6 + time_s)


def test_a_product_of_an_unmeasured_dtype_takes_at_least_its_bytes() -> None:
    weight = ref(8, 16, dtype="float16")
    item = launch("forebay.linear", 3000, 1000, (ref(4, 16), weight, None), form="nk", accumulate=False)
    read, copied = (MachineEstimator(replace(MACHINE, tiers=MACHINE.tiers | {"device": Tier(1 << 30, rate)}))
                    for rate in (5e9, 0.0))
    assert item_time_s(item, read) == pytest.approx(1e-6 + 4000 / 5e9)
    assert item_time_s(item, copied) == pytest.approx(1e-6 + 4000 / 2e9), "as a copy goes"


GPU = replace(
    MACHINE, product_flops=0.0, device_kind="NVIDIA H200", dispatch_s=1e-5, memory_bytes_per_s=2e12,
    tiers={"device": Tier(140 << 30, 4e12), "host": Tier(100 << 30, 1e10), "disk": Tier(1 << 40, 0.0)},
    gemm=tuple(GemmPoint(impl, "w4g64", m, n, k, 1e-6 + n * k * slower / 6e12) for n, k in ((8192, 2048), (8192, 8192))
               for impl, m, slower in (("flat", 2, 1), ("flat", 16, 1), ("large", 256, 4))))
GPU_TIMES = MachineEstimator(GPU)
PACKED_NBYTES = 8192 * (8192 // 2 + 8192 // 64 * 4)  # rows of w4g64: codes, scales and lows


def packed(m: int, impl: str, bits: int = 4) -> Launch:
    args = (ref(m, 8192, dtype="bfloat16"), ref(8192, PACKED_NBYTES // 8192, dtype="uint8"), None)
    how = {"bits": bits, "in_features": 8192, "group_size": 64, "scale_dtype": "float16"}
    return launch("forebay.linear_q", PACKED_NBYTES, m * 8192 * 2, args, impl, **how)


@pytest.mark.parametrize(("m", "impl", "time_s"), [
    (1, "flat_64x256_s4", 1e-6 + 8192**2 / 6e12), (16, "flat_32x128_s1", 1e-6 + 8192**2 / 6e12),
    (64, "large_128x128x64_s2", 1e-6 + 4 * 8192**2 / 6e12), (256, "large", 1e-6 + 4 * 8192**2 / 6e12),
    (512, "large_128x128x64_s2", 2 * (1e-6 + 4 * 8192**2 / 6e12)), (8, "", 1e-6 + 8192**2 / 6e12),
])
def test_a_packed_product_on_a_gpu_takes_what_kernels_of_its_name_were_measured_to_take(
    m: int, impl: str, time_s: float
) -> None:
    assert item_time_s(packed(m, impl), GPU_TIMES) == pytest.approx(time_s), "not what the host's memory would"


def test_what_was_not_measured_on_a_gpu_goes_at_the_rate_of_its_memory() -> None:
    times = [item_time_s(item, GPU_TIMES) for item in (
        packed(1, "flat_64x128_s1", 8), launch("forebay.rms_norm", 10**6, 10**6))]
    assert times == pytest.approx([(PACKED_NBYTES + 2 * 8192) / 4e12, 2e6 / 4e12])


def test_a_gpu_computes_while_its_launches_are_issued() -> None:
    item = launch("forebay.rms_norm", 10**6, 10**6)
    cost = item_cost(item, GPU_TIMES)
    assert (cost.issue_s, cost.time_s) == (1e-5, item_time_s(item, GPU_TIMES))
    assert item_cost(item, TIMES).issue_s == 0.0 and item_time_s(item, TIMES) > 1e-6


def test_a_link_the_machine_lacks_is_named() -> None:
    with pytest.raises(KeyError, match="device->host"):
        item_time_s(Copy(UPLOAD, span(8), span(8, "host"), "c"), TIMES)


def test_rows_of_a_cache_take_what_packing_them_takes() -> None:
    new, rows, start = ref(2, 8, 5, 64), ref(2, 8, 300, 40, dtype="uint8"), ref(2, dtype="int64")
    append = launch("forebay.kv_append_q", 10**4, 10**4, (rows, rows, new, new, start, 4, 32))
    slow = replace(MACHINE, pack_elements_per_s={"kv4": 1e7, "kv8": 1e9})
    assert item_time_s(append, MachineEstimator(slow)) == pytest.approx(1e-6 + 2 * 2 * 8 * 5 * 64 / 1e7)
    fast = item_time_s(append, MachineEstimator(replace(MACHINE, pack_elements_per_s={"kv4": 1e15})))
    assert fast == pytest.approx(item_time_s(append, MachineEstimator(MACHINE)), rel=1e-4), "bytes bind, as unmeasured"
