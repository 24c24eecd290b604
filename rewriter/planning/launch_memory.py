"""Memory that launches take outside the arenas, on a CPU and on a GPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import fx

from forebay.kernels import operators
from forebay.kernels.formats.packing import Packing
from forebay.kernels.formats.table import packed_format
from forebay.kernels.operator import Product
from forebay.kernels.products.linear import choices
from forebay.rewriter.ir.graph import values_of
from forebay.rewriter.ir.program import COMPUTE, SCRATCH, Launch, TensorRef, workspace_nbytes

# How torch's allocator takes memory from a GPU (CUDACachingAllocator.cpp, torch 2.13): blocks of at most SMALL lie in
# segments of SMALL_SEGMENT, below LARGE of LARGE_SEGMENT, and others are rounded up to a multiple of ROUND.
MIB = 1 << 20
SMALL, SMALL_SEGMENT, LARGE, LARGE_SEGMENT, ROUND = MIB, 2 * MIB, 10 * MIB, 20 * MIB, 2 * MIB


def reserved_nbytes(nbytes: int) -> int:
    """Bytes that torch takes from a GPU to hold so many."""
    if nbytes == 0 or nbytes > SMALL:
        return LARGE_SEGMENT if 0 < nbytes < LARGE else -(-nbytes // ROUND) * ROUND
    return SMALL_SEGMENT


def with_memory(launch: Launch, device: str) -> Launch:
    """The launch with what it takes on a device ("cpu", "cuda") beside what it says already.

    On a GPU Forebay's kernels share one scratch and torch's products one workspace of cuBLAS, which are kept; a run
    whose plan named no product of torch's was seen to hold that too (H100, torch 2.11). What torch's operators take in
    passing is taken twice: a launch runs once by itself, and its graph has memory of its own.
    """
    operator = operators.find(launch.op)
    own = 0 if operator is None else operator.workspace_nbytes(launch, device)
    if device == "cpu":
        return replace(launch, workspace_nbytes=launch.workspace_nbytes + own) if own else launch
    back = 0 if operator is None else operator.passing(launch)
    passing = reserved_nbytes(launch.workspace_nbytes + back)
    held = {"rounding of the arena": ROUND, "graphs": passing, SCRATCH: own - back,
            "rounding of the scratch": reserved_nbytes(own - back) - (own - back),
            "cuBLAS": reserved_nbytes(choices.cublas_nbytes())}
    return replace(launch, workspace_nbytes=passing, held=tuple((name, n) for name, n in held.items() if n))


def unplaced(node: fx.Node, result: int = 0) -> TensorRef:
    """A reference with the layout of a node's value, before it has an address."""
    value = values_of(node)[result]
    return TensorRef("device", 0, str(value.dtype)[6:], tuple(value.shape), tuple(value.stride()), "")


def phase_workspace(launches: Mapping[int, Sequence[Launch]], tokens: int, prefill: bool) -> tuple[int, int, int]:
    """Bytes of workspace of steps over `tokens` tokens and over one, from their `launches`: of all of them, of those
    that remain where the host attends for all but a `prefill`, and of what it then takes."""
    every = [launch for n in {1, tokens} for launch in launches[n]]
    staying, there = [launch for launch in launches[tokens] if prefill], 0
    for launch in launches[1] if prefill else every:
        operator = operators.find(launch.op)
        if operator is not None and operator.caches:
            there = max(there, operator.workspace_nbytes(launch, "cpu"))
        else:
            staying.append(launch)
    return workspace_nbytes(every), workspace_nbytes(staying), there


def product_launch(product: Product, impl: str, device: str, activations: str = "float16") -> Launch:
    """x [M, K] W^T with what it takes on a device; of packed weights on a CPU nothing, which leaves the choice free.
    `activations` is the dtype of what meets packed weights."""
    weight, m, n, k = product
    operator, dtype, how = operators.LINEAR, weight, dict[str, Any](form="nk", accumulate=False)
    sizes, stored = [(m, k), (n, k), (m, n)], packed_format(weight)
    if stored is not None:
        packing = Packing(stored.bits, k, stored.group_size, symmetric=stored.symmetric)
        operator, dtype, how, sizes[1] = operators.LINEAR_Q, activations, packing._asdict(), (n, packing.row_nbytes)
    x, w, out = (TensorRef("device", 0, dtype, size, (size[1], 1), "") for size in sizes)
    launch = Launch(COMPUTE, operator.name, (x, w, None), how, (out,), (), (), "", impl=impl)
    launch = replace(launch, flops=operator.cost(launch).flops)
    return launch if stored is not None and device == "cpu" else with_memory(launch, device)


def least_gpu_nbytes() -> int:
    """What every plan for a GPU counts beside its arena: rounding, scratch, and cuBLAS's workspace with what a small
    product by torch takes."""
    return ROUND + 3 * SMALL_SEGMENT + reserved_nbytes(choices.cublas_nbytes())
