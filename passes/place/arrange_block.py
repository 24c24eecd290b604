"""Addresses for the activations of all micro-batches of a block, from the lifetimes that they have in one of them."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from forebay.passes.allocators import Allocation, Buffer, allocate
from forebay.rewriter.ir.alignment import ALIGNMENT, aligned
from forebay.rewriter.ir.graph import META, is_pipeline_send, storage_of, weight_name
from forebay.rewriter.ir.schedule.batch_schedule import BatchSchedule
from forebay.rewriter.ir.state import StateInput

TIME_LIMIT_S = 1.0


@dataclass(frozen=True)
class Arrangement:
    """Each buffer as (name, name within a micro-batch, offset, nbytes), and what they take together in bytes."""

    places: tuple[tuple[str, str, int, int], ...]
    height: int
    lower_bound: int
    method: str


def outlive_turns(
    nodes: Sequence[fx.Node], live: Mapping[str, tuple[int, int]], batching: BatchSchedule
) -> frozenset[str]:
    """Return the buffers, alive over [first, last] of a flat graph's nodes, that live across another micro-batch's
    turn.

    In zigzag order turns end where a layer ends; outside the layers also within each operator that reads a matrix,
    which may come in tiles that all micro-batches use in turn, behind a lookup and around what stages hand on; and
    where the host attends, behind the last operator of a layer that touches the cache. In row order turns end early
    where all stages meet alone.
    """
    if batching.micro_batches.count == 1:
        return frozenset()
    if batching.micro_batches.order == "row":
        meet = max((i for i, node in enumerate(nodes) if is_pipeline_send(node)), default=len(nodes))
        return frozenset(name for name, (first, last) in live.items() if first < meet <= last)
    layers = [node.meta.get("layer", -1) for node in nodes]
    borders = [i for i in range(1, len(nodes)) if layers[i] != layers[i - 1]]  # the turn ends before node i
    if batching.attends_on_host(_tokens(nodes)):
        last = {layers[i]: i for i, node in enumerate(nodes) if layers[i] >= 0 and touches_cache(node)}
        borders = sorted({*borders, *(i + 1 for i in last.values())})
    within = [i for i, node in enumerate(nodes) if layers[i] < 0 and node.op == "call_function" and (
        is_pipeline_send(node) or any(reads_matrix(operand) for operand in node.all_input_nodes))]
    return frozenset(
        name for name, (first, last) in live.items()
        if bisect_right(borders, first) < bisect_right(borders, last)
        or bisect_left(within, first) < bisect_right(within, last))


def _tokens(nodes: Sequence[fx.Node]) -> int:
    """Tokens per sequence of the step that a flat graph computes; 0 where it has no ids."""
    return next((node.meta["val"].shape[1] for node in nodes
                 if node.op == "placeholder" and node.target == "input_ids"), 0)


def touches_cache(node: fx.Node) -> bool:
    """Return whether an operator reads or writes a cache."""
    return node.op == "call_function" and any(
        isinstance(storage_of(operand)[0].meta.get(META), StateInput) for operand in node.all_input_nodes)


def reads_matrix(operand: fx.Node) -> bool:
    """Return whether a value is a weight that may stream in tiles, or a view of one."""
    base = storage_of(operand)[0]
    value = base.meta.get("val")
    return weight_name(base) is not None and isinstance(value, torch.Tensor) and value.dim() > 1


def arrange(
    requests: Sequence[Buffer], boundary: Collection[str], outlive: Collection[str], exact: Mapping[str, int],
    batching: BatchSchedule,
) -> Arrangement:
    """Places for every request in `block.micro_batches` micro-batches: from below those that they use one after the
    other, then a region for each micro-batch with what outlives its turn, or a few that they share where that leaves
    the device, then inputs and outputs (`boundary`), which lie without gaps, `exact` bytes a micro-batch."""
    count = batching.micro_batches.count
    if count == 1:
        found = _allocated(requests)
        places = [(r.id, r.id, at, exact[r.id]) for r, at in zip(requests, found.offsets, strict=True)]
        return Arrangement(tuple(places), found.height, found.lower_bound, found.method)
    own = [r for r in requests if r.id in outlive and r.id not in boundary]
    shared = [r for r in requests if r.id not in outlive and r.id not in boundary]
    below, each = _allocated(shared), _allocated(own)
    places = [(r.id, r.id, at, exact[r.id]) for r, at in zip(shared, below.offsets, strict=True)]
    base, region, regions = aligned(below.height), aligned(each.height), max(batching.hidden_regions()) + 1
    places += [(f"{r.id}@{n}", r.id, base + n * region + at, exact[r.id])
               for n in range(regions) for r, at in zip(own, each.offsets, strict=True)]
    top = base + regions * region
    for r in requests:
        if r.id in boundary:
            places.append((r.id, r.id, top, count * exact[r.id]))
            top += aligned(count * exact[r.id])
    bound = below.lower_bound + regions * each.lower_bound + top - base - regions * region
    return Arrangement(tuple(places), top, bound, below.method)


def _allocated(requests: Sequence[Buffer]) -> Allocation:
    return allocate(requests, time_limit_s=TIME_LIMIT_S, alignment=ALIGNMENT)
