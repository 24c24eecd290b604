"""Memory of a GPU that launches take outside the arenas, as torch's allocator gives it."""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction

from forebay.kernels import operators
from forebay.kernels.products.linear import choices
from forebay.rewriter.ir.program import SCRATCH, Launch

KERNELS = "cuda"  # the key of operators' bindings
# How torch's allocator takes memory from a GPU (CUDACachingAllocator.cpp, torch 2.13): blocks of at most SMALL lie in
# segments of SMALL_SEGMENT, below LARGE of LARGE_SEGMENT, and others are rounded up to a multiple of ROUND.
MIB = 1 << 20
SMALL, SMALL_SEGMENT, LARGE, LARGE_SEGMENT, ROUND = MIB, 2 * MIB, 10 * MIB, 20 * MIB, 2 * MIB

# Blocks that a draw from one row holds at once, by bytes for each word: masks, numbers, places and a sort's memory.
DRAW_BLOCKS = {1: 2, 4: 6, 8: 3, 12: 1}


def reserved_nbytes(nbytes: int) -> int:
    """Bytes that torch takes from a GPU to hold so many."""
    if nbytes == 0 or nbytes > SMALL:
        return LARGE_SEGMENT if 0 < nbytes < LARGE else -(-nbytes // ROUND) * ROUND
    return SMALL_SEGMENT


def with_cuda_memory(launch: Launch) -> Launch:
    """Add what a launch takes on a GPU beside what it says already.

    Forebay's kernels share one scratch, and torch's products one workspace of cuBLAS. Both are kept. A run whose plan
    named no product of torch's was seen to hold that workspace too (H100, torch 2.11). Memory that torch's operators
    take and give back is counted twice: a launch runs once by itself, and its graph has memory of its own.
    """
    operator = operators.find(launch.op)
    own = 0 if operator is None else operator.workspace_nbytes(launch, KERNELS)
    back = 0 if operator is None else operator.allocator_transient_nbytes(launch)
    transient = reserved_nbytes(launch.workspace_nbytes + back)
    held = {"rounding of the arena": ROUND, "graphs": transient, SCRATCH: own - back,
            "rounding of the scratch": reserved_nbytes(own - back) - (own - back),
            "cuBLAS": reserved_nbytes(choices.cublas_nbytes())}
    return replace(launch, workspace_nbytes=transient, held=tuple((name, n) for name, n in held.items() if n))


def draw_nbytes(words: int) -> int:
    """Bytes that torch takes from a GPU to draw a token from so many logits, with top-k, top-p and min-p.

    Blocks of one size share segments, as many as fit. Source: `probabilities` of `runtime/run/sampling.py`, and for the
    copies that a sort makes Sort.cu of torch 2.13 with cub's DeviceRadixSort.
    """
    segments, whole = {SMALL_SEGMENT: Fraction(0), LARGE_SEGMENT: Fraction(0)}, 0
    for each, count in DRAW_BLOCKS.items():
        nbytes = each * words
        if nbytes >= LARGE:
            whole += count * reserved_nbytes(nbytes)
        elif nbytes:
            segment = SMALL_SEGMENT if nbytes <= SMALL else LARGE_SEGMENT
            segments[segment] += Fraction(count, segment // nbytes)
    return whole + sum(math.ceil(share) * segment for segment, share in segments.items())


def least_workspace_nbytes() -> int:
    """Bytes that every plan for a GPU counts beside its arena.

    These are rounding, scratch, and cuBLAS's workspace with what a small product by torch takes.
    """
    return ROUND + 3 * SMALL_SEGMENT + reserved_nbytes(choices.cublas_nbytes())
