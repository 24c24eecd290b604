"""A collective of a Program as a call of torch.distributed."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from forebay.rewriter.ir.operator_names import overload_of
from forebay.rewriter.ir.program import Launch
from forebay.rewriter.ir.share import ranks_of
from forebay.runtime.comm.ranks import group_of, named
from forebay.runtime.comm.watch import RankFault
from forebay.runtime.devices.device import Call, RuntimeFault

functional = torch.ops._c10d_functional
Exchange = Callable[..., object]  # of the result, the operand, the process group, and what else the operator is given


def _all_reduce(out: torch.Tensor, given: torch.Tensor, group: dist.ProcessGroup, *_: object) -> None:
    out.copy_(given)
    dist.all_reduce(out, group=group)


_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # the older name warns since 2.13
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
EXCHANGES: dict[object, Exchange] = {
    functional.all_reduce.default: _all_reduce,
    functional.all_gather_into_tensor.default: lambda out, given, group, *_: _all_gather(out, given, group=group),
    functional.reduce_scatter_tensor.default: lambda out, given, group, *_: _reduce_scatter(out, given, group=group),
    functional.all_to_all_single.default: lambda out, given, group, *_: dist.all_to_all_single(out, given, group=group),
    functional.broadcast_.default: lambda out, given, group, source: dist.broadcast(
        out, group=group, group_src=source),
}


def bind_collective(launch: Launch, args: tuple, out: torch.Tensor) -> Call:
    """The call of a collective on memory of this rank. RuntimeFault names it where it fails, or nobody runs beside."""
    if not dist.is_initialized():
        raise RuntimeFault(f"{launch.label}: {launch.op} exchanges with other ranks, and this process has none; start "
                           "it with torchrun")
    given, *how, name = args
    group, exchange = group_of(ranks_of(name)), EXCHANGES[overload_of(launch.op)]

    def call() -> None:
        try:
            exchange(out, given, group, *how)
        except Exception as error:
            other = named(error)
            said = str(other).splitlines()[0] if other is error else str(other)
            raise RankFault(f"{launch.label}: the exchange with {name} failed: {said}") from error

    return call
