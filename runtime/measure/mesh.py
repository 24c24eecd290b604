"""Measure what ranks do to each other: the exchanges that their Programs make, issued as `ThreadDevice` issues them,
and products while all compute. Every rank calls this alike; what is found is the same on all."""

from __future__ import annotations

import contextlib
import datetime
import functools
import itertools
import os
import time
from collections.abc import Callable
from statistics import fmean, median

import torch
import torch.distributed as dist

from forebay.kernels.operator import Call
from forebay.rewriter.ir.program import COLLECT
from forebay.rewriter.machine.mesh_links import RING_STEPS, ExchangeLink, MeshLinks
from forebay.rewriter.machine.profile import Machine
from forebay.runtime.comm.collectives import EXCHANGES, functional
from forebay.runtime.comm.faults import rank_fault
from forebay.runtime.comm.ranks import from_all, group_of, make_groups
from forebay.runtime.devices.kind import DeviceKind
from forebay.runtime.devices.kinds import device_here, kind_of
from forebay.runtime.devices.streams import Ticket, Worker
from forebay.runtime.disk.temporary import temporary_file
from forebay.runtime.measure.contention import ReadFlow
from forebay.runtime.measure.kernels import READ_NBYTES, burst_s, cold_products
from forebay.runtime.measure.machine import landing_memory
from forebay.runtime.measure.steady import steady_link

NBYTES = (256, 2 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20)  # hidden states of a token, up to logits
BETWEEN = (1024, 1024)  # (n, k) of the product before each exchange: threads then wake as they do in a step
REPEATS = 8  # exchanges of a turn, whose mean counts: where cores are few, most take 0.5 ms and some 3 more
TURNS, ROUNDS = 5, 9  # of exchanges, and of products
FILE_NBYTES = 64 << 20  # read by each rank
TURN_S = 0.05  # of products alone, and beside those of other ranks
ROWS = (1, 64)  # products bound by memory, and by arithmetic
BESIDE_NBYTES, BESIDE = 1 << 20, 16  # all-reduces beside products, as of a prompt's hidden states
SHAPE = (2048, 2048)


def measure_mesh(
    machine: Machine, folder: str | os.PathLike[str], say: Callable[[str, float], None] = lambda stage, done: None
) -> MeshLinks:
    """Exchanges among all ranks, and among as many neighbours as divide them, over all sizes in turns; medians. Reads
    by the engine of `machine` of a file of FILE_NBYTES for each rank, which `folder` has until then."""
    rank, ranks, device = dist.get_rank(), dist.get_world_size(), kind_of(device_here())
    members = [size for size in range(2, ranks + 1) if ranks % size == 0]
    make_groups([group for size in members for group in _neighbours(ranks, size)])
    links = []
    with contextlib.closing(Worker(COLLECT, rank_fault)) as worker:
        pairs = list(itertools.product(members, RING_STEPS))
        for i, (size, kind) in enumerate(pairs):
            say(f"{kind.strip('_')} among {size}", 0.9 * i / len(pairs))
            mine = next(group for group in _neighbours(ranks, size) if rank in group)
            turn = ExchangeTurns(kind, mine, worker, device)
            bandwidth, latency, r2 = steady_link(NBYTES, TURNS, turn.time_s)
            links.append(ExchangeLink(kind, size, bandwidth, latency, r2))
        say("products beside exchanges", 0.88)
        overlap_penalty = _overlap_penalty(tuple(range(ranks)), worker) if device.on_host_cores else 0.0
    say("products at once", 0.9)
    memory, flops = (_products_slowed(m) for m in ROWS) if device.on_host_cores else (1.0, 1.0)
    say("reads at once", 0.95)
    reads = _reads_slowed(machine, folder)
    return MeshLinks(ranks, dist.get_backend(), datetime.date.today().isoformat(), tuple(links), memory, flops, reads,
                     overlap_penalty)


def _neighbours(ranks: int, size: int) -> list[tuple[int, ...]]:
    return [tuple(range(first, first + size)) for first in range(0, ranks, size)]


class ExchangeTurns:
    """Exchanges of one kind in one group, all groups of that size at once."""

    def __init__(self, kind: str, group: tuple[int, ...], worker: Worker, on: DeviceKind) -> None:
        self.kind, self.ranks, self.worker, self.device = kind, group, worker, on.kernels
        module = torch.get_device_module(on.kernels)
        self.synchronize = functools.partial(module.synchronize, module.current_device())  # each thread has its own
        self.group, self.exchange = group_of(group), EXCHANGES[getattr(functional, kind).default]
        weight, x = torch.ones(BETWEEN, device=self.device), torch.ones(BETWEEN[1], device=self.device)
        out = torch.empty(BETWEEN[0], device=self.device)
        self.product: Callable[[], object] = lambda: torch.mv(weight, x, out=out)

    def time_s(self, nbytes: int, turn: int) -> float:
        """Mean seconds of an exchange that leaves so many bytes, from when its last rank is there: all ranks wait for
        the last, so the least that any takes. Who gives a broadcast does not wait; of one there and one back rank 0
        takes half. The slowest group counts."""
        behind = nbytes * (len(self.ranks) if self.kind == "reduce_scatter_tensor" else 1)
        out = torch.ones(behind // 4, device=self.device)
        own = []
        for _ in range(REPEATS):
            self.product()
            own.append(self._there_and_back_s(out) if self.kind == "broadcast_" else self._once_s(out))
        found = from_all(own)
        times = []
        for group in _neighbours(len(found), len(self.ranks)):
            each = zip(*(found[rank] for rank in group), strict=True)
            times.append(fmean(t[0] / 2 if self.kind == "broadcast_" else min(t) for t in each))
        return max(times)

    def _once_s(self, out: torch.Tensor) -> float:
        size = len(self.ranks)
        if self.kind == "all_reduce":
            return self._run(lambda: self.exchange(out, out, self.group, "sum"))
        part = out[: len(out) // size]
        whole = out[: size * len(part)]
        if self.kind == "reduce_scatter_tensor":
            return self._run(lambda: self.exchange(part, whole, self.group, "sum", size))
        if self.kind == "all_to_all_single":
            made = torch.empty_like(whole)
            return self._run(lambda: self.exchange(made, whole, self.group))
        return self._run(lambda: self.exchange(whole, part, self.group, size))

    def _there_and_back_s(self, out: torch.Tensor) -> float:
        return sum(self._run(lambda source=source: self.exchange(out, out, self.group, source))  # type: ignore[misc]
                   for source in (0, len(self.ranks) - 1))

    def _run(self, call: Call) -> float:
        """Seconds from handing a call to the worker to being woken behind it."""
        start, ticket = time.perf_counter(), Ticket(watch=self.worker.fault)

        def ended() -> None:
            self.synchronize()
            ticket.done(self.worker.error)

        self.worker.submit(call)
        self.worker.submit(ended)
        ticket.wait()
        return time.perf_counter() - start


def _products_slowed(m: int) -> float:
    turn = cold_products(m, *SHAPE, torch.float32)
    count = max(1, int(TURN_S / burst_s(turn, 2)))
    return _slowed(lambda: burst_s(turn, count))


def _overlap_penalty(group: tuple[int, ...], worker: Worker) -> float:
    """Share of exchanges' time by which products beside them take longer, of the rank that is held up most: where cores
    make exchanges, they are not computing. Products, exchanges and both at once take turns; medians."""
    turn = cold_products(ROWS[1], *SHAPE, torch.float32)
    count = max(from_all(max(1, int(TURN_S / burst_s(turn, 2)))))
    values = torch.ones(2, BESIDE_NBYTES // 4)
    exchange, process_group = EXCHANGES[functional.all_reduce.default], group_of(group)

    def took_s(exchanges: int, products: int) -> float:
        from_all(None)
        start, ticket = time.perf_counter(), Ticket(watch=worker.fault)
        for _ in range(exchanges):
            worker.submit(lambda: exchange(values[1], values[0], process_group, "sum"))
        worker.submit(lambda: ticket.done(worker.error))
        if products:
            burst_s(turn, products)
        ticket.wait()
        return time.perf_counter() - start

    found = []
    for _ in range(ROUNDS):
        products, exchanges, both = took_s(0, count), took_s(BESIDE, 0), took_s(BESIDE, count)
        found.append(1 - (products + exchanges - both) / min(products, exchanges))
    return min(1.0, max(0.0, *from_all(median(found))))


def _reads_slowed(machine: Machine, folder: str | os.PathLike[str]) -> float:
    with temporary_file(folder) as (descriptor, path):
        for _ in range(0, FILE_NBYTES, READ_NBYTES):
            os.write(descriptor, os.urandom(READ_NBYTES))  # what no disk could compress
        os.fdatasync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        reads = ReadFlow(path, FILE_NBYTES, machine.link("disk", machine.near_disk), landing_memory(4 * READ_NBYTES))

        def byte_s() -> float:
            reads.start()
            time.sleep(TURN_S)
            return 1 / reads.stop()

        with contextlib.closing(reads.reader):
            return _slowed(byte_s)


def _slowed(time_s: Callable[[], float]) -> float:
    """Return how many times as long something takes while all ranks do it, the median of rounds in which each does it
    alone too; of the rank that is slowed most."""
    found = []
    for _ in range(ROUNDS):
        from_all(None)
        beside, alone = time_s(), 0.0
        for rank in range(dist.get_world_size()):
            from_all(None)
            if rank == dist.get_rank():
                alone = time_s()
        found.append(beside / alone)
    return max(1.0, *from_all(median(found)))
