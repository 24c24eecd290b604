"""Measure this machine: tiers, links and kernels, in about 15 s (quick) or three minutes. What fits poorly is measured
again, and kernels are not timed at all beside others that keep the cores busy.

On a GPU the first time takes longer: Triton compiles the kernels that are measured."""

from __future__ import annotations

import contextlib
import datetime
import errno
import functools
import importlib.metadata
import itertools
import os
import platform
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch

from forebay.rewriter.ir.alignment import PAGE_NBYTES
from forebay.rewriter.machine.both_ways import BothWays
from forebay.rewriter.machine.points import Contention
from forebay.rewriter.machine.profile import Link, Machine, Tier
from forebay.rewriter.machine.quality import LOADED, believable
from forebay.runtime.devices.streams import wait_watched
from forebay.runtime.disk.reader import DiskReader, Read, available_kinds, open_reader, readers_beside
from forebay.runtime.disk.temporary import temporary_file
from forebay.runtime.measure import cuda as measure_cuda
from forebay.runtime.measure.contention import measure_contention
from forebay.runtime.measure.issue import copy_issue_s
from forebay.runtime.measure.kernels import (
    GEMM_SHAPES,
    MIB,
    READ_NBYTES,
    attention_points,
    choice_elements_per_s,
    cold_products,
    gemm_points,
    pack_elements_per_s,
)
from forebay.runtime.measure.neighbours import Neighbours
from forebay.runtime.measure.requests import row_request_s
from forebay.runtime.measure.steady import steady_link
from forebay.runtime.measure.writes import measure_writes
from forebay.runtime.run.arena import Arena

BUFFER_NBYTES = 64 * MIB
LINK_NBYTES = (256 << 10, MIB, 4 * MIB, 16 * MIB, 64 * MIB)  # of the reads that a link is fitted to
# (engine, depth, chunk nbytes) worth trying; deeper or larger was never seen to gain.
CANDIDATES = (
    ("direct", 2, 4 * MIB),
    ("direct", 4, 1 * MIB),
    ("uring", 4, 2 * MIB),
    ("buffered", 1, 4 * MIB),
    ("uring", 8, 1 * MIB),
    ("direct", 1, 4 * MIB),
    ("direct", 2, 2 * MIB),
    ("uring", 2, 4 * MIB),
)
QUICK_CANDIDATES = 4
DISPATCHES = 301
TIE = 0.95  # engines this close to the fastest are told apart by CPU time, which the computation wants

StageProgress = Callable[[str, float], None]


@dataclass(frozen=True)
class DiskTrial:
    """What one engine configuration did on cold reads: bytes per second, and the cores it kept busy meanwhile."""

    kind: str
    depth: int
    chunk_nbytes: int
    bytes_per_s: float
    cores: float


def measure_machine(folder: str | os.PathLike[str], *, quick: bool, progress: StageProgress | None = None) -> Machine:
    """Measure everything a plan needs; the disk tier is the file system of `folder`.

    Writes 512 MiB (quick: 128 MiB) to a file in `folder` that has no name and so vanishes with the process, however
    that ends. `progress` is called with a stage's name and the fraction done. What fits poorly however often it is
    measured, or was measured beside others, becomes a cautious guess (`believable`). Raises OSError when there is no
    room.
    """
    say = progress or (lambda stage, done: None)
    cuda = torch.cuda.is_available()
    near = "host" if cuda else "device"  # where disk reads land
    neighbours = Neighbours()
    say("disk", 0.0)
    read, write, (contention, core_share), both_ways, request_s, issue_s = _disk_links(folder, near, quick, say)
    say("memory", 0.4)
    links = [read, write, *(_cuda_links(quick) if cuda else _cpu_links(read, write, quick))]
    rounds = 5 if quick else 15
    memory = measure_cuda.copy_bytes_per_s(rounds) if cuda else _copy_bytes_per_s(rounds)
    say("kernels", 0.5)
    busy = not cuda and neighbours.share() > LOADED  # then times of kernels would not be believed
    gemm = () if busy else measure_cuda.gemm_points(quick, say) if cuda else gemm_points(quick, say)
    say("attention", 0.9)
    machine = Machine(
        name=platform.node() or "this machine",
        date=datetime.date.today().isoformat(),
        versions=versions(),
        cores=core_count(),
        threads=torch.get_num_threads(),
        device_kind=torch.cuda.get_device_name() if cuda else "cpu",
        tiers=_tiers(folder, cuda, quick),
        links=tuple(links),
        gemm=gemm,
        memory_bytes_per_s=memory,
        dispatch_s=measure_cuda.dispatch_s(rounds) if cuda else _dispatch_s(),
        attention_bytes_per_s=measure_cuda.attention_bytes_per_s(rounds) if cuda else _attention_bytes_per_s(rounds),
        folder=os.path.abspath(folder),
        attention=() if cuda or busy else attention_points(quick),
        contention=contention,
        reads_core_share=core_share,
        both_ways=both_ways,
        pack_elements_per_s={} if cuda or busy else pack_elements_per_s(quick),
        choice_elements_per_s=choice_elements_per_s(quick),
        copy_issue_s=issue_s,
        row_request_s=request_s,
        others_share=neighbours.share(),
        sources={"copy_issue_s": "threads of their own issue copies"} if cuda else {},
    )
    machine = believable(machine)
    machine.validate()
    say("done", 1.0)
    return machine


def versions() -> dict[str, str]:
    """What times depend on besides the machine: software, by name."""
    try:
        own = importlib.metadata.version("forebay")
    except importlib.metadata.PackageNotFoundError:
        own = "source"
    return {
        "forebay": own,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "kernel": platform.release(),
    }


def core_count() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))


# Disk


def disk_trials(path: str, nbytes: int, quick: bool) -> list[DiskTrial]:
    """Cold reads of a file by every candidate engine, interleaved, the median of each.

    No candidate leaves the file in the page cache, so every read is cold as far as this machine's memory goes.
    """
    kinds = available_kinds()
    candidates = [c for c in CANDIDATES[: QUICK_CANDIDATES if quick else None] if c[0] in kinds]
    repeats, span = (3, 64 * MIB) if quick else (5, 128 * MIB)
    span = min(span, nbytes // READ_NBYTES * READ_NBYTES)
    times: dict[tuple[str, int, int], list[tuple[float, float]]] = {c: [] for c in candidates}
    with contextlib.ExitStack() as stack:
        memory = landing_memory(BUFFER_NBYTES)
        readers = {c: stack.enter_context(contextlib.closing(open_reader(*c))) for c in candidates}
        for reader in readers.values():
            read_time_s(reader, path, 0, PAGE_NBYTES, memory)  # opens the file
        for repeat in range(repeats):
            for i, candidate in enumerate(candidates):
                offset = _place(repeat * len(candidates) + i, span, nbytes)
                cpu_s = time.process_time()
                time_s = read_time_s(readers[candidate], path, offset, span, memory)
                times[candidate].append((time_s, time.process_time() - cpu_s))
    return [
        DiskTrial(*c, span / median(t for t, _ in pairs), median(cpu / t for t, cpu in pairs))
        for c, pairs in times.items()
    ]


def choose_trial(trials: list[DiskTrial]) -> DiskTrial:
    """The engine to use: of those within 5 % of the fastest, the one that leaves the cores most alone."""
    fastest = max(trial.bytes_per_s for trial in trials)
    return min((t for t in trials if t.bytes_per_s >= TIE * fastest), key=lambda t: t.cores)


def _disk_links(
    folder: str | os.PathLike[str], near: str, quick: bool, say: StageProgress
) -> tuple[Link, Link, tuple[Contention, float], tuple[BothWays, ...], float, float]:
    """Links from and to the disk, what computing and reading do to each other (`measure_contention`), and reading
    and writing, what a read of a lookup takes, and what any copy takes of the thread that computes."""
    nbytes = (128 if quick else 512) * MIB
    free = shutil.disk_usage(folder).free
    if free < 2 * nbytes:
        raise OSError(
            errno.ENOSPC, f"measuring the disk needs {2 * nbytes} free bytes, there are {free}", os.fspath(folder)
        )
    with temporary_file(folder) as (descriptor, path):
        _fill(descriptor, nbytes)
        best = choose_trial(disk_trials(path, nbytes, quick))
        memory = landing_memory(BUFFER_NBYTES)
        with contextlib.closing(open_reader(best.kind, best.depth, best.chunk_nbytes)) as reader:
            read_time_s(reader, path, 0, PAGE_NBYTES, memory)
            bandwidth, latency, r2 = steady_link(LINK_NBYTES, 5, lambda size, turn: read_time_s(
                reader, path, _place(turn, size, nbytes), size, memory))
            issue_s = 0.0 if torch.cuda.is_available() else copy_issue_s(reader, path, nbytes, memory, quick)
        with contextlib.closing(open_reader(*readers_beside()[1])) as lookups:
            read_time_s(lookups, path, 0, PAGE_NBYTES, memory)
            request_s = row_request_s(lookups, path, nbytes, memory)
        say("disk beside products", 0.3)
        contention = (Contention(), 0.0) if torch.cuda.is_available() else measure_contention(
            path, nbytes, Link("disk", near, 1.0, 0.0, best.kind, best.depth, best.chunk_nbytes), memory, quick)
        read = Link("disk", near, bandwidth, latency, best.kind, best.depth, best.chunk_nbytes, r2)
        say("disk writes", 0.35)
        write, both_ways = measure_writes(os.fspath(folder), near, path, nbytes, read, memory, quick)
    return read, write, contention, both_ways, request_s, issue_s


def _place(turn: int, nbytes: int, of: int) -> int:
    """Where in a file of so many bytes a read begins in its turn: at a page, as reads past the page cache must."""
    return turn * nbytes % (of - nbytes + PAGE_NBYTES)


def _fill(fd: int, nbytes: int) -> None:
    """Fill a file up to `nbytes` with what no disk could compress, and leave none of it in the page cache."""
    block = os.urandom(16 * MIB)
    for at in range(0, nbytes, len(block)):
        part = memoryview(block)[: min(len(block), nbytes - at)]
        while part:
            part = part[os.write(fd, part) :]
    os.fdatasync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)


def read_time_s(reader: DiskReader, path: str, offset: int, nbytes: int, memory: Arena) -> float:
    """Seconds from the submission of consecutive reads to the end of the last; raises the first error. What lands where
    does not matter: the memory is used in turn."""
    starts = range(0, nbytes, READ_NBYTES)
    left, errors, ended = len(starts), list[BaseException](), threading.Event()
    lock = threading.Lock()

    def on_done(error: BaseException | None) -> None:
        nonlocal left
        with lock:
            left -= 1
            if error is not None:
                errors.append(error)
            if left == 0:
                ended.set()

    start = time.perf_counter()
    for at in starts:
        size = min(READ_NBYTES, nbytes - at)
        place = memory.address + at % (memory.nbytes - READ_NBYTES + 1) // READ_NBYTES * READ_NBYTES
        reader.submit(Read(path, offset + at, size, place, 0, 0, on_done))
    wait_watched(ended.wait, reader.fault)
    time_s = time.perf_counter() - start
    if errors:
        raise errors[0]
    return time_s


def landing_memory(nbytes: int) -> Arena:
    """Memory as the runtime reads into: huge pages, without which direct reads are a third slower; touched, so that no
    page fault is measured."""
    arena = Arena(nbytes)
    arena.bytes.fill_(1)
    return arena


# Memory


def _time_s(call: Callable[[], object], repeats: int) -> float:
    """Median seconds of a call after one warm-up; waits for the GPU if there is one."""
    sync = torch.cuda.synchronize if torch.cuda.is_available() else (lambda: None)
    call()
    times = []
    for _ in range(repeats):
        sync()
        start = time.perf_counter()
        call()
        sync()
        times.append(time.perf_counter() - start)
    return median(times)


def _copy_link(src: str, dst: str, method: str, source: torch.Tensor, target: torch.Tensor, quick: bool) -> Link:
    """Fit a link over copies of growing prefixes of two byte tensors."""

    def time_s(nbytes: int, turn: int) -> float:
        return _time_s(functools.partial(target[:nbytes].copy_, source[:nbytes], non_blocking=True), 1)

    bandwidth, latency, r2 = steady_link((MIB, 4 * MIB, 16 * MIB, BUFFER_NBYTES), 3 if quick else 9, time_s)
    return Link(src, dst, bandwidth, latency, method, 1, 0, r2)


def _cpu_links(read: Link, write: Link, quick: bool) -> list[Link]:
    """Without a GPU `host` is the same RAM: the same disk links, and a memory copy to and from `device`."""
    source = torch.ones(BUFFER_NBYTES, dtype=torch.uint8)
    target = torch.ones(BUFFER_NBYTES, dtype=torch.uint8)
    return [
        Link("disk", "host", *_link_facts(read)),
        Link("host", "disk", *_link_facts(write)),
        _copy_link("host", "device", "memcpy", source, target, quick),
        _copy_link("device", "host", "memcpy", target, source, quick),
    ]


def _link_facts(x: Link) -> tuple[float, float, str, int, int, float]:
    return x.bandwidth_bytes_per_s, x.latency_s, x.method, x.depth, x.chunk_nbytes, x.r2


def _cuda_links(quick: bool) -> list[Link]:
    """PCIe both ways, from pinned and from pageable memory."""
    device = torch.ones(BUFFER_NBYTES, dtype=torch.uint8, device="cuda")
    links = []
    for method in ("pinned", "pageable"):
        host = torch.ones(BUFFER_NBYTES, dtype=torch.uint8, pin_memory=method == "pinned")
        links.append(_copy_link("host", "device", method, host, device, quick))
        links.append(_copy_link("device", "host", method, device, host, quick))
    return links


def _copy_bytes_per_s(rounds: int) -> float:
    source = torch.ones(BUFFER_NBYTES, dtype=torch.uint8)
    target = torch.empty_like(source)
    return BUFFER_NBYTES / _time_s(lambda: target.copy_(source), rounds)


def _read_bytes_per_s(rounds: int) -> float:
    """How fast computation reads RAM: a sum over 256 MiB, well past every cache."""
    values = torch.ones(64 * MIB, dtype=torch.float32)
    return values.nbytes / _time_s(values.sum, rounds)


def _tiers(folder: str | os.PathLike[str], cuda: bool, quick: bool) -> dict[str, Tier]:
    rounds = 3 if quick else 9
    ram = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    device = host = Tier(ram, _read_bytes_per_s(rounds))
    if cuda:
        rate = measure_cuda.read_bytes_per_s(rounds)
        torch.cuda.empty_cache()  # what measuring took is free again
        device = Tier(torch.cuda.mem_get_info()[0], rate)
    return {"device": device, "host": host, "disk": Tier(shutil.disk_usage(folder).free, 0.0)}


# Kernels


def _dispatch_s() -> float:
    """Seconds of a launch of a tiny operator behind a product, which leaves nothing of it in the caches: the median."""
    n, k = GEMM_SHAPES[0]
    x, products = torch.ones(8), itertools.cycle(cold_products(1, n, k, torch.bfloat16))
    found = []
    for _ in range(DISPATCHES):
        next(products)()
        start = time.perf_counter()
        torch.add(x, x, out=x)
        found.append(time.perf_counter() - start)
    return median(found)


def _attention_bytes_per_s(rounds: int) -> float:
    """Bytes of K and V per second of decode attention: one query of 16 heads over 8 KV heads of 64, 8192 tokens."""
    q = torch.ones(1, 16, 1, 64)  # [B, H, S, D]
    k, v = torch.ones(1, 8, 8192, 64), torch.ones(1, 8, 8192, 64)  # [B, Hkv, L, D]
    attend = torch.nn.functional.scaled_dot_product_attention
    return (k.nbytes + v.nbytes) / _time_s(lambda: attend(q, k, v, enable_gqa=True), rounds)
