"""This process among the ranks that run a model together."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Collection, Iterable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from forebay.rewriter.ir.program import COLLECT, Launch, Program
from forebay.rewriter.ir.share import ranks_of
from forebay.runtime.comm.faults import look_out
from forebay.runtime.comm.launched import has_launcher, local_rank
from forebay.runtime.comm.loops import yield_loops
from forebay.runtime.comm.watch import RankFault, RankWatch
from forebay.runtime.devices.device import RuntimeFault
from forebay.runtime.devices.kinds import kind_of

T = TypeVar("T")
WATCH_S = 1.0
PATIENCE = timedelta(hours=4)  # of a collective; who hangs is found out by the watch, long before
_watch: RankWatch | None = None
_groups: dict[tuple[int, ...], dist.ProcessGroup] = {}


def join_ranks(device_kind: str) -> tuple[int, int]:
    """This process's rank, and how many there are; of those that torchrun started, or of a process group that the
    caller made. RuntimeFault where there is neither."""
    global _watch
    if not dist.is_initialized():
        if not has_launcher():
            raise RuntimeFault("mesh: this process is one alone; start as many as the mesh has ranks with torchrun "
                               "--nproc-per-node=N, or call torch.distributed.init_process_group first")
        store, rank, ranks = next(dist.rendezvous("env://", timeout=timedelta(seconds=120)))
        store.set_timeout(timedelta(seconds=120))
        kind = kind_of(device_kind)
        kind.select(local_rank(rank))
        dist.init_process_group(kind.collectives, store=store, rank=rank,
                                world_size=ranks, timeout=PATIENCE)
    if _watch is None:
        _watch = RankWatch(dist.distributed_c10d._get_default_store(), dist.get_rank(), dist.get_world_size())
        look_out(_watch)
    return dist.get_rank(), dist.get_world_size()


def tell_others(error: BaseException) -> None:
    """Tell the other ranks by what this one fails, unless it is by one of them."""
    if _watch is not None and not isinstance(error, RankFault) and _watch.fault() is None:
        _watch.tell(error)


def from_all(value: T) -> list[T]:
    """Gather a value from each rank, by rank. RankFault names a rank that fails meanwhile, or is out of reach."""
    found: list[Any] = [None] * dist.get_world_size()
    failed: list[Exception] = []
    device = torch.cuda.current_device() if torch.cuda.is_initialized() else None  # each thread has one of its own

    def gather() -> None:
        try:
            if device is not None:
                torch.cuda.set_device(device)
            dist.all_gather_object(found, value)
        except Exception as error:
            failed.append(error)

    thread = threading.Thread(target=gather, name="forebay-from-all", daemon=True)  # who hangs cannot be ended
    thread.start()
    thread.join(WATCH_S)
    while thread.is_alive():
        fault = _watch.fault() if _watch is not None else None
        thread.join(WATCH_S)
        if fault is not None and thread.is_alive():
            raise fault
    if failed:
        raise named(failed[0]) from failed[0]
    return found


def named(error: BaseException) -> BaseException:
    """The fault of the rank because of which an exchange failed with `error`; `error` itself where none is known."""
    return (_watch.named() if _watch is not None else None) or error


Exchanges = list[tuple[tuple[int, ...], str]]  # of a Program in order: who takes part, and a digest of all else


def exchanges_of(program: Program) -> Exchanges:
    """A Program's collectives in their order: the ranks of each, and a digest of the data and its size."""
    found = []
    for item in program.step:
        if isinstance(item, Launch) and item.stream == COLLECT:
            *how, group = item.args[1:]
            given = item.args[0]
            said = repr((item.op, how, given.dtype, given.shape, item.label))
            found.append((ranks_of(group), hashlib.sha256(said.encode()).hexdigest()[:16]))
    return found


def first_unmet(exchanges: Sequence[Exchanges]) -> tuple[int, int] | None:
    """A rank, and another one that it would wait for without end, if each rank makes its exchanges in order and each
    exchange waits for all that take part; None where all are made."""
    at = [0] * len(exchanges)

    def next_of(rank: int) -> tuple[tuple[int, ...], str] | None:
        return exchanges[rank][at[rank]] if at[rank] < len(exchanges[rank]) else None

    pending = list(range(len(exchanges)))
    while pending:
        rank = pending.pop()
        while (wanted := next_of(rank)) is not None and all(next_of(other) == wanted for other in wanted[0]):
            for other in wanted[0]:
                at[other] += 1
            pending += [other for other in wanted[0] if other != rank]
    for rank in range(len(exchanges)):
        if (wanted := next_of(rank)) is not None:
            return rank, next(other for other in wanted[0] if next_of(other) != wanted)
    return None


def require_same_exchanges(programs: Iterable[tuple[str, Program]]) -> None:
    """Make the process groups of the ranks' Programs. RuntimeFault unless in those of the same steps each exchange
    finds all that take part: else ranks would wait for each other for ever."""
    mine = [(name, exchanges_of(program)) for name, program in programs]
    theirs = from_all(mine)
    for i, (name, _) in enumerate(mine):
        own = [steps[i] if i < len(steps) else ("", []) for steps in theirs]
        unmet = next(((dist.get_rank(), other) for other, (theirs_is, _) in enumerate(own) if theirs_is != name), None)
        if unmet is None:
            unmet = first_unmet([exchanges for _, exchanges in own])
        if unmet is not None:
            raise RuntimeFault(f"rank {unmet[1]} exchanges otherwise than rank {unmet[0]} in the {name}: their plans "
                               "do not go together; plan anew on all ranks")
    make_groups({group for steps in theirs for _, exchanges in steps for group, _ in exchanges})


def make_groups(wanted: Collection[tuple[int, ...]]) -> None:
    """Make the groups among `wanted` that are not there, on all ranks in one order, members or not: torch names a group
    by how many were made before."""
    for ranks in sorted(set(wanted) - set(_groups)):
        everybody = ranks == tuple(range(dist.get_world_size()))
        found = dist.group.WORLD if everybody else dist.new_group(list(ranks))
        assert found is not None
        _groups[ranks] = found
    yield_loops()


def group_of(ranks: tuple[int, ...]) -> dist.ProcessGroup:
    """The process group of some ranks, once `require_same_exchanges` has seen a Program in which they exchange."""
    return _groups[ranks]


def leave_ranks() -> None:
    """Part from the other ranks once all are done."""
    global _watch
    if _watch is not None:
        from_all(None)
        _watch.close()
        look_out(None)
        _watch = None
        _groups.clear()
        dist.destroy_process_group()
