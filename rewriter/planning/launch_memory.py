"""Memory that launches take outside the arenas, on a CPU and on a GPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from torch import fx

from forebay.kernels import operators
from forebay.kernels.formats.packing import Packing
from forebay.kernels.formats.table import packed_format
from forebay.kernels.operator import Product
from forebay.rewriter.ir.graph import values_of
from forebay.rewriter.ir.program import COMPUTE, Item, Launch, TensorRef, workspace_nbytes
from forebay.runtime.devices.kind import DeviceKind
from forebay.runtime.devices.kinds import HOST


def unplaced(node: fx.Node, result: int = 0) -> TensorRef:
    """A reference with the layout of a node's value, before it has an address."""
    value = values_of(node)[result]
    return TensorRef("device", 0, str(value.dtype)[6:], tuple(value.shape), tuple(value.stride()), "")


T = TypeVar("T", Launch, Item)


def with_draw(items: Sequence[T], nbytes: int) -> list[T]:
    """Count what drawing a token takes with the last launch: tokens are drawn after a step, when nothing else runs.

    Args:
        items: A step's launches, or all of its items.
        nbytes: Bytes that a draw takes of the device outside its arena.
    """
    found = list(items)
    for i, item in reversed(list(enumerate(found))):
        if isinstance(item, Launch) and item.stream == COMPUTE:
            found[i] = replace(item, workspace_nbytes=max(item.workspace_nbytes, nbytes))
            break
    return found


def phase_workspace(launches: Mapping[int, Sequence[Launch]], tokens: int, prefill: bool) -> tuple[int, int, int, int]:
    """Bytes of workspace of steps over `tokens` tokens and over one, from their `launches`: of all of them, of those
    that remain where the host attends for all but a `prefill`, of what it then takes, and of what it takes where it
    computes with experts in steps over `tokens`."""
    every = [launch for n in {1, tokens} for launch in launches[n]]
    staying, there = [launch for launch in launches[tokens] if prefill], 0
    for launch in launches[1] if prefill else every:
        operator = operators.find(launch.op)
        if operator is not None and operator.caches:
            there = max(there, operator.workspace_nbytes(launch, HOST.kernels))
        else:
            staying.append(launch)
    experts = (operators.EXPERTS.workspace_nbytes(launch, HOST.kernels) for launch in launches[tokens]
               if operators.find(launch.op) is operators.EXPERTS)
    return workspace_nbytes(every), workspace_nbytes(staying), there, max(experts, default=0)


def product_launch(product: Product, impl: str, device: DeviceKind, activations: str = "float16") -> Launch:
    """x [M, K] W^T with what it takes on a device; of packed weights on host cores nothing, so that any may be chosen.
    `activations` is the dtype of what meets packed weights."""
    weight, m, n, k = product
    operator, dtype, how = operators.LINEAR, weight, dict[str, Any](form="nk", accumulate=False)
    sizes, stored = [(m, k), (n, k), (m, n)], packed_format(weight)
    if stored is not None:
        packing = Packing(stored.bits, k, stored.group_size, symmetric=stored.symmetric, codebook=stored.codebook)
        operator, dtype, how, sizes[1] = operators.LINEAR_Q, activations, packing._asdict(), (n, packing.row_nbytes)
    x, w, out = (TensorRef("device", 0, dtype, size, (size[1], 1), "") for size in sizes)
    launch = Launch(COMPUTE, operator.name, (x, w, None), how, (out,), (), (), "", impl=impl)
    launch = replace(launch, flops=operator.cost(launch).flops)
    return launch if stored is not None and device.on_host_cores else device.with_memory(launch)
