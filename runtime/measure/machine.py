"""Measure this machine: tiers, links and kernels, in about 4 s (quick) or three minutes.

What fits poorly is measured again. Others that use the cores add time to some repetitions, so the fastest count then.

On a GPU the first time takes longer: Triton compiles the kernels that are measured."""

from __future__ import annotations

import contextlib
import datetime
import errno
import importlib.metadata
import os
import platform
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from forebay.kernels.build.process_limits import core_count
from forebay.rewriter.ir.alignment import PAGE_NBYTES
from forebay.rewriter.machine.both_ways import BothWays
from forebay.rewriter.machine.links import onto_device
from forebay.rewriter.machine.points import Contention, GemmPoint
from forebay.rewriter.machine.profile import Link, Machine, Tier
from forebay.rewriter.machine.quality import believable
from forebay.runtime.devices.cpu import measure as measure_cpu
from forebay.runtime.devices.cuda import measure as measure_cuda
from forebay.runtime.devices.cuda.kind import CUDA
from forebay.runtime.devices.kind import DeviceKind
from forebay.runtime.devices.kinds import HOST, device_here, kind_of
from forebay.runtime.devices.streams import wait_watched
from forebay.runtime.disk.reader import DiskReader, Read, available_kinds, open_reader, readers_beside
from forebay.runtime.disk.temporary import temporary_file
from forebay.runtime.measure.contention import measure_contention
from forebay.runtime.measure.copies import BUFFER_NBYTES
from forebay.runtime.measure.issue import issue_times_s
from forebay.runtime.measure.kernels import (
    MIB,
    READ_NBYTES,
    attention_points,
    choice_elements_per_s,
    cold_memory,
    host_product_rates,
    pack_elements_per_s,
)
from forebay.runtime.measure.neighbours import Neighbours
from forebay.runtime.measure.requests import row_request_s
from forebay.runtime.measure.steady import settled_rate, steady_link
from forebay.runtime.measure.writes import measure_writes
from forebay.runtime.run.arena import Arena

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
QUICK_CANDIDATES = 3
TIE = 0.95  # engines this close to the fastest are told apart by CPU time, which the computation wants

StageProgress = Callable[[str, float], None]


class DeviceMeasures(Protocol):
    """The measurements of a device's folder, in its `measure.py`."""

    def links(self, read: Link, write: Link, quick: bool) -> list[Link]: ...

    def copy_bytes_per_s(self, rounds: int) -> float: ...

    def gemm_points(self, quick: bool, say: StageProgress) -> tuple[GemmPoint, ...]: ...

    def dispatch_s(self, rounds: int) -> float: ...

    def attention_bytes_per_s(self, rounds: int) -> float: ...

    def device_tier(self, rounds: int) -> Tier: ...


MEASURES: dict[str, DeviceMeasures] = {HOST.kernels: measure_cpu, CUDA.kernels: measure_cuda}  # by the kind's kernels


@dataclass(frozen=True)
class DiskTrial:
    """The result of one engine configuration on cold reads: bytes per second, and the cores it kept busy meanwhile."""

    kind: str
    depth: int
    chunk_nbytes: int
    bytes_per_s: float
    cores: float


def measure_machine(folder: str | os.PathLike[str], *, quick: bool, progress: StageProgress | None = None) -> Machine:
    """Measure everything a plan needs; the disk tier is the file system of `folder`.

    Writes 512 MiB (quick: 64 MiB) to a file in `folder` that has no name and so vanishes with the process, however
    that ends. `progress` is called with a stage's name and the fraction done. A fit that stays poor becomes a guess
    (`believable`). Raises OSError when there is no room.
    """
    say = progress or (lambda stage, done: None)
    device_kind = device_here()
    kind, rounds = kind_of(device_kind), 5 if quick else 15
    own = MEASURES[kind.kernels]
    neighbours = Neighbours()
    say("disk", 0.0)
    read, write, (contention, core_share), both_ways, request_s, issue_s = _disk_links(folder, kind, quick, say)
    say("memory", 0.4)
    links = [read, write, *own.links(read, write, quick)]
    memory = own.copy_bytes_per_s(rounds)
    say("kernels", 0.5)
    gemm = own.gemm_points(quick, say)
    say("attention", 0.9)
    host = MEASURES[HOST.kernels].device_tier(1 if quick else 9)
    device = host if kind.on_host_cores else own.device_tier(3 if quick else 9)  # RAM is measured once
    machine = Machine(
        name=platform.node() or "this machine",
        date=datetime.date.today().isoformat(),
        versions=versions(),
        cores=core_count(),
        threads=torch.get_num_threads(),
        device_kind=device_kind,
        tiers={"device": device, "host": host, "disk": Tier(shutil.disk_usage(folder).free, 0.0)},
        links=tuple(links),
        gemm=gemm,
        memory_bytes_per_s=memory,
        dispatch_s=own.dispatch_s(rounds),
        attention_bytes_per_s=own.attention_bytes_per_s(rounds),
        folder=os.path.abspath(folder),
        attention=attention_points(quick) if kind.on_host_cores else (),
        contention=contention,
        reads_core_share=core_share,
        both_ways=both_ways,
        pack_elements_per_s=pack_elements_per_s(quick) if kind.on_host_cores else {},
        choice_elements_per_s=choice_elements_per_s(quick),
        **(_beside_host(quick, rounds) if not kind.on_host_cores else {}),
        torch_dispatch_s=measure_cpu.torch_dispatch_s(rounds) if kind.on_host_cores else 0.0,
        copy_issue_s=issue_s[0] if kind.on_host_cores else measure_cuda.copy_issue_s(rounds),
        slice_issue_s=issue_s[1],
        row_request_s=request_s,
        others_share=neighbours.share(),
    )
    cold_memory.cache_clear()
    machine = believable(_counted_once(machine) if machine.one_memory else machine)
    machine.validate()
    say("done", 1.0)
    return machine


def _beside_host(quick: bool, rounds: int) -> dict[str, Any]:
    """Measure the rates of the host's cores next to a GPU, and how it reads the host's memory, by the profile's
    field."""
    rates, flops = host_product_rates(quick)
    return {"host_attention_bytes_per_s": MEASURES[HOST.kernels].attention_bytes_per_s(rounds),
            "host_product_bytes_per_s": rates, "host_product_flops": flops,
            "host_read_bytes_per_s": measure_cuda.host_read_bytes_per_s(rounds),
            "one_memory": CUDA.one_memory()}


def _counted_once(machine: Machine) -> Machine:
    """Return the profile of a GPU that computes in the host's RAM with room that is nowhere counted twice: all is the
    device's where disk reads land there, else an eighth is the host's, for copies on their way. Paths from and to the
    disk are those of the host's memory."""
    room = min(machine.tiers["device"].capacity_nbytes, machine.tiers["host"].capacity_nbytes)
    shared = 0 if machine.near_disk == "device" else room // 8
    tiers = {"device": room - shared, "host": shared}
    return replace(machine, links=machine.links + onto_device(machine.links), tiers={
        tier: replace(held, capacity_nbytes=tiers.get(tier, held.capacity_nbytes))
        for tier, held in machine.tiers.items()})


def versions() -> dict[str, str]:
    """Return the versions of software on which times depend, by name."""
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


# Disk


def disk_trials(path: str, nbytes: int, quick: bool) -> list[DiskTrial]:
    """Cold reads of a file by every candidate engine, interleaved.

    No candidate leaves the file in the page cache, so every read is cold as far as this machine's memory goes.
    """
    kinds = available_kinds()
    candidates = [c for c in CANDIDATES[: QUICK_CANDIDATES if quick else None] if c[0] in kinds]
    repeats, span = (2, 16 * MIB) if quick else (5, 128 * MIB)
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
        DiskTrial(*c, settled_rate([span / t for t, _ in pairs]), min(cpu / t for t, cpu in pairs))
        for c, pairs in times.items()
    ]


def choose_trial(trials: list[DiskTrial]) -> DiskTrial:
    """The engine to use: of those within 5 % of the fastest, the one that leaves the cores most alone."""
    fastest = max(trial.bytes_per_s for trial in trials)
    return min((t for t in trials if t.bytes_per_s >= TIE * fastest), key=lambda t: t.cores)


def _disk_links(
    folder: str | os.PathLike[str], kind: DeviceKind, quick: bool, say: StageProgress
) -> tuple[Link, Link, tuple[Contention, float], tuple[BothWays, ...], float, tuple[float, float]]:
    """Links from and to the disk, what computing and reading do to each other (`measure_contention`), and reading
    and writing, what a read of a lookup takes, and what any copy, and each further slice of one, takes
    of the thread that computes."""
    nbytes = (64 if quick else 512) * MIB
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
            sizes, rounds, tries = (LINK_NBYTES[:-1], 4, 1) if quick else (LINK_NBYTES, 5, None)
            bandwidth, latency, r2 = steady_link(sizes, rounds, lambda size, turn: read_time_s(
                reader, path, _place(turn, size, nbytes), size, memory), tries)
            issue_s = issue_times_s(reader, path, nbytes, memory, quick) if kind.on_host_cores else (0.0, 0.0)
        with contextlib.closing(open_reader(*readers_beside()[1])) as lookups:
            read_time_s(lookups, path, 0, PAGE_NBYTES, memory)
            request_s = row_request_s(lookups, path, nbytes, memory)
        say("disk beside products", 0.3)
        near = kind.near_disk
        contention = measure_contention(
            path, nbytes, Link("disk", near, 1.0, 0.0, best.kind, best.depth, best.chunk_nbytes), memory, quick
        ) if kind.on_host_cores else (Contention(), 0.0)
        core_share = best.cores / core_count() if contention[1] is None else contention[1]
        read = Link("disk", near, bandwidth, latency, best.kind, best.depth, best.chunk_nbytes, r2)
        say("disk writes", 0.35)
        write, both_ways = measure_writes(os.fspath(folder), near, path, nbytes, read, memory, quick)
    return read, write, (contention[0], min(1.0, core_share)), both_ways, request_s, issue_s


def _place(turn: int, nbytes: int, of: int) -> int:
    """Return the offset of the next read in a file of so many bytes: at a page, as reads past the page cache must."""
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
