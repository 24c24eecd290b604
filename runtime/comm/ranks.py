"""This process among the ranks that run a model together."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from forebay.rewriter.ir.program import COLLECT, Launch, Program
from forebay.runtime.comm.faults import look_out
from forebay.runtime.comm.launched import has_launcher, local_rank
from forebay.runtime.comm.watch import RankFault, RankWatch
from forebay.runtime.devices.device import RuntimeFault

T = TypeVar("T")
PATIENCE = timedelta(hours=4)  # of a collective; who hangs is found out by the watch, long before
_watch: RankWatch | None = None


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
        if device_kind != "cpu":
            torch.cuda.set_device(local_rank(rank))
        dist.init_process_group("gloo" if device_kind == "cpu" else "cpu:gloo,cuda:nccl", store=store, rank=rank,
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
    """What each rank gives, by rank. RankFault names a rank that fails meanwhile."""
    found: list[Any] = [None] * dist.get_world_size()
    try:
        dist.all_gather_object(found, value)
    except Exception as error:
        raise named(error) from error
    return found


def named(error: BaseException) -> BaseException:
    """The fault of the rank because of which an exchange failed with `error`; `error` itself where none is known."""
    return (_watch.named() if _watch is not None else None) or error


def exchanges_of(program: Program) -> str:
    """A digest of a Program's collectives in their order: who takes part, what is exchanged and how much of it."""
    digest = hashlib.sha256()
    for item in program.step:
        if isinstance(item, Launch) and item.stream == COLLECT:
            out = item.out[0]
            digest.update(repr((item.op, item.args[1:], out.dtype, out.shape, item.label)).encode())
    return digest.hexdigest()[:16]


def require_same_exchanges(programs: Iterable[tuple[str, Program]]) -> None:
    """Raise RuntimeFault unless the ranks' Programs of the same steps have the same collectives in the same order: else
    each would wait for another one for ever."""
    mine = [(name, exchanges_of(program)) for name, program in programs]
    for other, theirs in enumerate(from_all(mine)):
        if theirs != mine:
            first = next((a for a, b in zip(mine, theirs, strict=False) if a != b), mine[0])
            raise RuntimeFault(f"rank {other} exchanges otherwise than rank {dist.get_rank()} in the {first[0]}: their "
                               "plans do not go together; plan anew on all ranks")


def leave_ranks() -> None:
    """Part from the other ranks once all are done."""
    global _watch
    if _watch is not None:
        from_all(None)
        _watch.close()
        look_out(None)
        _watch = None
        dist.destroy_process_group()
