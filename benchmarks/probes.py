"""What a machine does just now: plain reads and writes, products, memory; and predictions at these paces."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import platform
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from forebay.rewriter.ir.program import Copy, Rows, copy_nbytes, tier_of
from forebay.rewriter.ir.state import KEY_MEANS_TENSOR, state_name
from forebay.rewriter.machine.profile import Machine
from forebay.runtime.disk.chunks import Write
from forebay.runtime.disk.reader import KINDS, open_reader, open_writer
from forebay.runtime.disk.spill_file import SpillFile
from forebay.runtime.measure.kernels import FILL, GEMM_SHAPES, cold_products
from forebay.runtime.measure.machine import landing_memory, read_time_s
from forebay.runtime.measure.steady import settled_rate
from forebay.runtime.run.arena import Arena

MIB = 1 << 20
PROBE_NBYTES = 16 * MIB  # of a read: about what a step has in flight, into as much memory
PROBE_S = 0.3
READS_S = 0.1
LEAST_BUSY = 0.05


class Probe:
    """Plain reads of the model's largest file by the engine that the profile chose, each from where the last ended, and
    the profile's products of so many rows, `by` that implementation or the fastest, for weights outside the caches."""

    def __init__(self, folder: Path, machine: Machine, dtype: str, batch: int, by: str = "") -> None:
        self.calls: list[tuple[float, Iterator[Any]]] = []  # seconds by the profile, and the product over other weights
        for n, k in GEMM_SHAPES[:3]:
            impl = by or machine.best_gemm(dtype, batch, n, k)
            products = cold_products(batch, n, k, getattr(torch, dtype), impl)
            self.calls.append((machine.gemm_time_s(impl, dtype, batch, n, k), products))
        self.path = str(max(folder.glob("*.safetensors"), key=os.path.getsize))
        self.size = os.path.getsize(self.path)
        link = machine.link("disk", "device")
        self.reader = open_reader(link.method, link.depth, link.chunk_nbytes)
        self.latency_s = link.latency_s
        self.memory = landing_memory(PROBE_NBYTES)
        self.at = 0

    def bytes_per_s(self, least_s: float = READS_S) -> float:
        """The rate of reads over so many seconds. The latency of a read is left out, because the next read of a step
        hides it. As in a profile, the fastest count where others slow most of them."""
        span, times = min(PROBE_NBYTES, self.size // MIB * MIB), list[float]()
        while sum(times) < least_s:
            if self.at + span > self.size:
                self.at = 0
            took_s = read_time_s(self.reader, self.path, self.at, span, self.memory)
            times.append(max(took_s - self.latency_s, took_s / 2))
            self.at += span
        return settled_rate([span / time_s for time_s in times])

    def pace(self, busy: float = 1.0) -> float:
        """How many times as long as in the profile its products take, one of each shape after the other: the mean, as
        a step has hundreds of launches and waits for the slow ones too.

        `busy`: the share of the time in which a step computes. Products are so far apart here too, because who rests
        is given a core at once where others use the cores."""
        alone = taken = 0.0
        end = time.perf_counter() + PROBE_S
        while not alone or time.perf_counter() < end:
            for alone_s, products in self.calls:
                start = time.perf_counter()
                next(products)()
                taken += time.perf_counter() - start
                alone += alone_s
                if busy < 1:
                    time.sleep(alone_s * (1 / max(busy, LEAST_BUSY) - 1))
        return taken / alone


class ReadWatch:
    """Looks every 20 ms at what a process had the disk read, page faults included, while it is entered."""

    PERIOD_S = 0.02

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.seen: list[tuple[float, int]] = []
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> ReadWatch:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._end.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._end.wait(self.PERIOD_S):
            try:
                text = Path(f"/proc/{self.pid}/io").read_text()
            except OSError:
                return
            self.seen.append((time.monotonic(), int(text.partition("\nread_bytes: ")[2].split()[0])))

    def step_nbytes(self, took_s: float, steps: int) -> float:
        """Bytes that a step read, of so many at the end that took so long."""
        at, last = self.seen[-1]
        return (last - max(nbytes for then, nbytes in self.seen if then <= at - took_s)) / steps


def at_pace(machine: Machine, bytes_per_s: float, pace: float) -> Machine:
    """The profile with another rate of reads from disk, and all computation `pace` times as long."""
    links = tuple(replace(x, bandwidth_bytes_per_s=bytes_per_s) if x.src == "disk" else x for x in machine.links)
    return replace(
        machine, links=links, gemm=tuple(replace(p, time_s=p.time_s * pace) for p in machine.gemm),
        attention=tuple(replace(p, time_s=p.time_s * pace) for p in machine.attention),
        memory_bytes_per_s=machine.memory_bytes_per_s / pace)


def memory_bytes_per_s(repeats: int) -> float:
    """The best rate of reading 256 MiB by all threads."""
    values, times = torch.ones(64 * MIB), []
    for _ in range(repeats):
        began = time.perf_counter()
        values.sum()
        times.append(time.perf_counter() - began)
    return values.nbytes / min(times)


def write_rate(folder: str, machine: Machine) -> float:
    """Bytes per second of plain writes to a spill file by the profile's engine."""
    link, memory, size = machine.link("device", "disk"), Arena(64 * MIB), 4 * MIB
    memory.bytes.fill_(FILL)
    landed, errors = threading.Semaphore(0), list[BaseException]()

    def on_done(error: BaseException | None) -> None:
        errors.extend([error] if error else [])
        landed.release()

    engine = link.method if link.method in KINDS else "auto", link.depth or None, link.chunk_nbytes or None
    with contextlib.closing(SpillFile("probe", folder, memory.nbytes)) as file, contextlib.closing(
            open_writer(*engine)) as writer:
        times = []
        for _ in range(3):  # the first finds space that was only promised, which is slower to write
            start = time.perf_counter()
            for at in range(0, memory.nbytes, size):
                writer.write(file, Write(at, size, ((memory.address + at, size),), on_done))
            for _ in range(0, memory.nbytes, size):
                landed.acquire()
            times.append(time.perf_counter() - start)
    if errors:
        raise errors[0]
    return memory.nbytes / min(times[1:])


def moved_nbytes(lm: Any) -> tuple[float, float]:
    """Bytes that a decode step in the middle of its phase reads from the disk and writes to it, as planned."""
    crossing = crossing_nbytes(lm)
    return (sum(nbytes for way, nbytes in crossing.items() if way.startswith("disk->")),
            sum(nbytes for way, nbytes in crossing.items() if way.endswith("->disk")))


def crossing_nbytes(lm: Any) -> dict[str, float]:
    """Bytes that a decode step in the middle of its phase moves over each link ("host->device"), as planned."""
    moved: dict[str, float] = {}
    for item in lm.steps.program(1).step:
        if isinstance(item, Copy):
            typical = min((end.typical for end in (item.src, item.dst) if isinstance(end, Rows)), default=1.0)
            way = f"{tier_of(item.src)}->{tier_of(item.dst)}"
            moved[way] = moved.get(way, 0.0) + typical * copy_nbytes(item)
    return moved


def moved_so_far() -> tuple[int, int]:
    """Bytes that this process has read from and written to storage."""
    found = dict(line.split(":") for line in Path("/proc/self/io").read_text().splitlines())
    return int(found["read_bytes"]), int(found["write_bytes"])


def fill_cache(lm: Any) -> None:
    """Write every byte of the cache, on the device and in its spill file: space that was never written is read from no
    disk, and memory that was never touched from one page. Means of keys are random, so that blocks anywhere are read.
    """
    device = lm.session.device
    for b in lm.plan.buffers:
        if b.kind == "cache" and b.arena in device.arenas:
            memory = device.arenas[b.arena].bytes[b.offset : b.offset + b.nbytes]
            if b.name.startswith(state_name(KEY_MEANS_TENSOR)):
                memory.view(torch.bfloat16).normal_()
            else:
                memory.fill_(FILL)
    if lm.plan.schedule.batching.cache.tier == "disk":
        file, block = device.spill["cache"], mmap.mmap(-1, 8 * MIB)
        ctypes.memset(ctypes.addressof(ctypes.c_char.from_buffer(block)), FILL, len(block))
        for at in range(0, file.nbytes, len(block)):
            os.pwritev(file.fd, [memoryview(block)[: min(len(block), file.nbytes - at)]], at)


def processor() -> str:
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        facts = {key.strip(): value for key, _, value in (line.partition(": ") for line in lines)}
        bf16 = [flag for flag in ("avx512_bf16", "amx_bf16") if flag in facts.get("flags", "").split()]
        return (f"{facts.get('model name', platform.processor())} (family {facts.get('cpu family')}, model "
                f"{facts.get('model')}), {os.cpu_count()} cores, bf16 instructions: {', '.join(bf16) or 'none'}")
    return platform.processor() or platform.machine()
