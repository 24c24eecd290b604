"""Time what steps are made of on a GPU: on the device itself, apart from what it costs a thread to issue them.

Products and attention are Forebay's Triton kernels, which Triton compiles once and keeps on disk. Shapes and rows are
therefore few: the quick measurement compiles about a dozen.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from statistics import median

import torch

from forebay.kernels.formats.packing import Packing
from forebay.kernels.formats.table import TIMED_WEIGHTS
from forebay.kernels.operator import Call, Operator, Product, Tensors
from forebay.kernels.operators import ATTENTION, KV_APPEND, RMS_NORM, ROTARY
from forebay.rewriter.ir.program import COMPUTE, UPLOAD, Copy, Item, Record, Span, Wait
from forebay.rewriter.machine.points import GemmPoint
from forebay.rewriter.machine.profile import Link, Tier
from forebay.runtime.devices.cuda.driver import driver_function
from forebay.runtime.devices.cuda.kind import CUDA
from forebay.runtime.devices.cuda.pinned import pinned_arena, seen_by_gpu
from forebay.runtime.devices.device import RuntimeFault
from forebay.runtime.disk.reader import open_reader
from forebay.runtime.measure.copies import BUFFER_NBYTES, copy_link
from forebay.runtime.measure.kernels import TimedProduct, product_of, timed_products

# The GPU is kept busy so long while calls are issued, the next where that was too short; 2, 8 and 34 ms at 2 GHz.
BUSY_CYCLES = (4 << 20, 16 << 20, 64 << 20)
BURST = 16  # calls that are timed together
# (n, k). The quick ones are of one width, where K is split into equally many parts, so that kernels serve both.
GEMM_SHAPES = ((8192, 2048), (8192, 8192), (1024, 4096), (14336, 4096))
QUICK_SHAPES = 2
GEMM_M, QUICK_M = (1, 2, 8, 16, 64, 256), (2, 16, 256)  # 1 and 2 rows take as long: they read the weight
STREAM_NBYTES = 256 << 20  # several times an L2
COLD = 4  # weights that products take turns over, in sizes of the L2
LAUNCHES = 20  # of each kind; far fewer than a stream holds before issuing waits for the device
SLOTS, TILE_NBYTES = 4, 4096  # of copies whose issuing is timed: small, so that the link takes less
HOST_PAGE_TABLES = 100  # cudaDevAttrPageableMemoryAccessUsesHostPageTables (driver_types.h)
KV_HEADS, HEADS, HEAD_DIM, TOKENS = 8, 32, 128, 32768  # 128 MiB of K and V in 16 bit


def device_burst_s(turn: Iterator[Call], count: int) -> float:
    """Seconds on the GPU of one of the next `count` calls, all issued before the first begins, so that none waits for
    the thread that issues. Calls that take longer to issue than the GPU is kept busy, 34 ms, are timed with that."""
    calls = [next(turn) for _ in range(count)]
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for cycles in BUSY_CYCLES:
        torch.cuda.synchronize()
        torch.cuda._sleep(cycles)
        begin.record()
        for call in calls:
            call()
        late = begin.query()  # the GPU had come to the first before the last was issued
        end.record()
        end.synchronize()
        if not late:
            break
    return begin.elapsed_time(end) / 1e3 / count


def device_time_s(call: Call, rounds: int) -> float:
    """Median seconds of a call on the GPU, after one that is not timed."""
    call()
    turn = itertools.repeat(call)
    return median(device_burst_s(turn, BURST) for _ in range(rounds))


def copy_bytes_per_s(rounds: int) -> float:
    """Bytes copied per second within the GPU's memory; each is read and written."""
    source = torch.ones(STREAM_NBYTES, dtype=torch.uint8, device=_device())
    target = torch.empty_like(source)
    return STREAM_NBYTES / device_time_s(lambda: target.copy_(source), rounds)


def read_bytes_per_s(rounds: int) -> float:
    """Return how fast computation reads the GPU's memory: a sum."""
    values = torch.ones(STREAM_NBYTES // 4, dtype=torch.float32, device=_device())
    return STREAM_NBYTES / device_time_s(values.sum, rounds)


def host_read_bytes_per_s(rounds: int) -> float:
    """Return how fast computation reads pinned host memory where it lies; 0 on a GPU that is not coherent with it.

    A GPU that shares the host's memory, or its page tables, is. Others reach pinned memory too, over a bus.
    """
    if not CUDA.one_memory() and not _uses_host_page_tables():
        return 0.0
    arena = pinned_arena(STREAM_NBYTES)
    try:
        arena.bytes.fill_(1)
        values = seen_by_gpu(arena)
        if not bool((values == 1).all()):
            raise RuntimeFault("the GPU reads other bytes than host memory holds")
        return STREAM_NBYTES / device_time_s(values.view(torch.float32).sum, rounds)
    finally:
        torch.cuda.synchronize()
        torch.cuda.cudart().cudaHostUnregister(arena.address)


def _uses_host_page_tables() -> bool:
    """Return whether the GPU reads pageable memory by the host's page tables, as by NVLink-C2C; HIP numbers its
    attributes otherwise, and such GPUs of AMD are integrated."""
    value = ctypes.c_int()
    try:
        ask = driver_function("cudaDeviceGetAttribute", "")
    except (OSError, AttributeError):
        return False
    return ask(ctypes.byref(value), HOST_PAGE_TABLES, torch.cuda.current_device()) == 0 and value.value == 1


def half(device: torch.device) -> torch.dtype:
    """The 16-bit type whose times stand for both: bf16, or fp16 on a GPU that does not multiply bf16."""
    return torch.bfloat16 if torch.cuda.get_device_capability(device) >= (8, 0) else torch.float16


def gemm_points(quick: bool, say: Callable[[str, float], None]) -> tuple[GemmPoint, ...]:
    """Times of [m, k] x [n, k]^T on the GPU in float32 by torch, and in 16 bits and of packed rows by Triton.

    Each is run by the implementation that a plan would name for its shape, and kept under that name's first part
    ("flat" of "flat_64x256_s4"): settings and splits follow from the shape. RuntimeFault where Triton is missing.
    """
    device = _device()
    shapes, rows = (GEMM_SHAPES[:QUICK_SHAPES], QUICK_M) if quick else (GEMM_SHAPES, GEMM_M)
    kinds = ("float32", str(half(device)).removeprefix("torch."), *TIMED_WEIGHTS)
    return timed_products(kinds, shapes, 5 if quick else 9, functools.partial(products, rows, device), say,
                          device_burst_s)


def products(rows: Sequence[int], device: torch.device, kind: str, n: int, k: int) -> Iterator[TimedProduct]:
    """By the implementation that a plan would name, for weights of a dtype, or packed rows for 16-bit x."""
    operator, how, dtype = product_of(kind, k, half(device))
    assert operator.implementations is not None
    packed = "bits" in how
    width, stored = (Packing(**how).row_nbytes, torch.uint8) if packed else (k, dtype)
    count = max(2, -(-_cold_nbytes(device) // (n * width * stored.itemsize)))
    weights = torch.full((count, n, width), 0x11 if packed else 1, dtype=stored, device=device)  # 0x11: small scales
    for m in rows:
        x, out = torch.ones(m, k, dtype=dtype, device=device), torch.empty(m, n, dtype=dtype, device=device)
        shape = Product(kind, m, n, k)
        name = operator.implementations.default["cuda"](shape, torch.cuda.get_device_name(device), str(dtype)[6:])
        if name == "aten" and not packed:
            calls: list[Call] = [functools.partial(torch.mm, x, weight.mT, out=out) for weight in weights]
        else:
            calls = [_bound(operator, Tensors((x, weight, None), how, (out,), name)) for weight in weights]
        yield name.split("_")[0], m, calls


def attention_bytes_per_s(rounds: int) -> float:
    """Bytes of K and V per second of decode attention of one long sequence in 16 bits, by Triton."""
    device = _device()
    dtype = half(device)
    q = torch.ones(1, HEADS, 1, HEAD_DIM, dtype=dtype, device=device)
    out = torch.ones(1, 1, HEADS, HEAD_DIM, dtype=dtype, device=device)
    k, v = (torch.ones(1, KV_HEADS, TOKENS, HEAD_DIM, dtype=dtype, device=device) for _ in range(2))
    start = torch.full((1,), TOKENS - 1, device=device)
    call = _bound(ATTENTION, Tensors((q, k, v, start, HEAD_DIM**-0.5, 0, 0.0), {}, (out,)))
    return (k.nbytes + v.nbytes) / device_time_s(call, rounds)


def dispatch_s(rounds: int) -> float:
    """Seconds of the issuing thread for one launch, the mean of those of a decoder layer; the GPU is not waited for."""
    calls = _layer_launches(_device())
    times = []
    for _ in range(1 + rounds):  # the first, which compiles, is not counted
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(LAUNCHES):
            for call in calls:
                call()
        times.append((time.perf_counter() - start) / (len(calls) * LAUNCHES))
    torch.cuda.synchronize()
    return median(times[1:])


def copy_issue_s(rounds: int) -> float:
    """Seconds of the issuing thread for one tile that streams from host memory: its copy, and beside it the two records
    and the two waits that order it with the launches before and after."""
    from forebay.runtime.devices.cuda.device import CudaDevice  # which imports Triton

    device = CudaDevice(open_reader(), graphs=False)
    try:
        device.allocate({"device": SLOTS * TILE_NBYTES, "host": SLOTS * TILE_NBYTES})
        calls = [call for slot in range(SLOTS) for item in _tile_items(slot)
                 if (call := device.bind(item, None)) is not None]
        times = []
        with device.issuing():
            for _ in range(1 + rounds):  # the first, which makes the events, is not counted
                torch.cuda.synchronize()
                start = time.perf_counter()
                for _ in range(LAUNCHES):
                    for call in calls:
                        call()
                times.append((time.perf_counter() - start) / (SLOTS * LAUNCHES))
        device.finish()
    finally:
        device.close()
    return median(times[1:])


def _tile_items(slot: int) -> tuple[Item, ...]:
    """The items of a tile that comes into a slot after a launch over what lay there."""
    source, target = (Span(tier, slot * TILE_NBYTES, TILE_NBYTES, f"slot{slot}") for tier in ("host", "device"))
    free, arrived = 2 * slot, 2 * slot + 1
    return (Record(COMPUTE, free), Wait(UPLOAD, free), Copy(UPLOAD, source, target, "tile"), Record(UPLOAD, arrived),
            Wait(COMPUTE, arrived))


def _layer_launches(device: torch.device) -> list[Call]:
    """The launches of a decoder layer as often as it has them: 2 norms, 7 products, rotation of q and of k, the append
    to the cache, attention, and by torch an activation, a product and 2 sums of elements."""
    dtype, (n, k), batch = half(device), GEMM_SHAPES[0], QUICK_M[0]

    def ones(*shape: int) -> torch.Tensor:
        return torch.ones(shape, dtype=dtype, device=device)

    x, table, cache = ones(batch, k), ones(batch, 1, HEAD_DIM), (ones(batch, KV_HEADS, LAUNCHES, HEAD_DIM),) * 2
    q, kv = ones(batch, HEADS, 1, HEAD_DIM), ones(batch, KV_HEADS, 1, HEAD_DIM)
    start = torch.zeros(batch, dtype=torch.int64, device=device)
    norm = _bound(RMS_NORM, Tensors((x, x[0], 1e-5), {}, (torch.empty_like(x),)))
    product = next(iter(next(iter(products((batch,), device, str(dtype).removeprefix("torch."), n, k)))[2]))
    turns = [_bound(ROTARY, Tensors((heads, table, table), {}, (torch.empty_like(heads),))) for heads in (q, kv)]
    append = _bound(KV_APPEND, Tensors((*cache, kv, kv, start), {}, ()))
    attended = torch.empty(batch, 1, HEADS, HEAD_DIM, dtype=dtype, device=device)
    attention = _bound(ATTENTION, Tensors((q, *cache, start, HEAD_DIM**-0.5, 0, 0.0), {}, (attended,)))
    out = torch.empty_like(x)
    activate = functools.partial(torch.sigmoid, x, out=out)
    multiply = functools.partial(torch.mul, x, x, out=out)
    add = functools.partial(torch.add, x, x, out=out)
    return [norm] * 2 + [product] * 7 + turns + [append, attention, activate, multiply, add, add]


def _device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def _cold_nbytes(device: torch.device) -> int:
    return COLD * torch.cuda.get_device_properties(device).L2_cache_size


def _bound(operator: Operator, use: Tensors) -> Call:
    """The call of one of our operators on a GPU, whose kernels import Triton."""
    try:
        return operator.bind["cuda"](use)
    except ImportError as error:
        raise RuntimeFault(
            f"measuring a GPU needs Triton, which cannot be imported ({error}); install the triton that belongs to "
            "this torch (`pip install triton`)"
        ) from error


def links(read: Link, write: Link, quick: bool) -> list[Link]:
    """Links beside the disk's own: the bus both ways, from pinned and from pageable memory."""
    device = torch.ones(BUFFER_NBYTES, dtype=torch.uint8, device=_device())
    found = []
    for method in ("pinned", "pageable"):
        host = torch.ones(BUFFER_NBYTES, dtype=torch.uint8, pin_memory=method == "pinned")
        found.append(copy_link(("host", "device", method), host, device, quick, torch.cuda.synchronize))
        found.append(copy_link(("device", "host", method), device, host, quick, torch.cuda.synchronize))
    return found


def device_tier(rounds: int) -> Tier:
    """The GPU's memory that is free now, and how fast it is read."""
    rate = read_bytes_per_s(rounds)
    torch.cuda.empty_cache()  # what measuring took is free again
    return Tier(torch.cuda.mem_get_info()[0], rate)
