"""Give every activation an address: exact lifetimes, views understood, storage reused in place where that is safe."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import fx

from forebay.kernels.operators import of_target
from forebay.passes.allocators import Buffer
from forebay.passes.lower.out_variants import mutated_arguments, named_arguments
from forebay.passes.place.arrange_block import arrange, outlive_turns
from forebay.rewriter.ir import ops
from forebay.rewriter.ir.alignment import ALIGNMENT, aligned
from forebay.rewriter.ir.gathers import GATHER_BUFFER, gathers_weight, ring_nbytes
from forebay.rewriter.ir.graph import META, Layout, is_collective, storage_of, values_of
from forebay.rewriter.ir.plan import KEPT, MOVING, BufferPlacement, Plan, PlanError
from forebay.rewriter.ir.schedule.batch_schedule import ALONE, BatchSchedule

aten = torch.ops.aten


def allocate_buffers(gm: fx.GraphModule, plan: Plan) -> None:
    """Give the activations of a step graph the addresses that stand in the plan. The `Layout` in `gm.meta` tells which
    buffers there are, how large, and who lives in them. PlanError, naming it, for a buffer that the plan has not, or
    has smaller.
    """
    layout = gm.meta[META]
    assert isinstance(layout, Layout)
    planned = {b.name: b for b in plan.buffers if b.kind in MOVING}
    for name, b in layout.buffers.items():
        if name not in planned:
            raise PlanError(f"plan.buffers: allocate_buffers finds no buffer {name} of {b.nbytes} bytes; plan again")
        if planned[name].nbytes < b.nbytes:
            raise PlanError(f"plan.buffers: {name} has {planned[name].nbytes} bytes, and needs {b.nbytes}; plan again")
    placed = {name: replace(b, arena=planned[name].arena, offset=planned[name].offset)
              for name, b in layout.buffers.items()}
    gm.meta[META] = replace(layout, buffers=placed)


def place_activations(layout: Layout, plan: Plan, phase: str) -> tuple[BufferPlacement, ...]:
    """The buffers of `layout` for the steps of one phase, at the top end of the device arena, growing downwards.

    PlanError when activations would meet what `plan`, which has no other phase's buffers, keeps at the lower end
    (weights, slots, cache).
    """
    arena = plan.arenas["device"]
    floor = max((b.offset + b.nbytes for b in plan.buffers if b.arena == "device" and b.kind in KEPT), default=0)
    if layout.height > arena - floor:
        raise PlanError(f"plan.arenas.device: activations need {layout.height} bytes, but the arena of {arena} bytes "
                        f"has {arena - floor} left above weights, slots and cache; a smaller prefill chunk or batch "
                        "needs less")
    base = (arena - layout.height) // ALIGNMENT * ALIGNMENT
    return tuple(replace(b, offset=base + b.offset, phase=phase) for b in layout.buffers.values())


def plan_activations(gm: fx.GraphModule, reuse: bool = True, batching: BatchSchedule = ALONE) -> Layout:
    """Lifetimes and relative addresses (from 0) of all values of a flat graph that are neither weights nor cache.

    Without `reuse` every value keeps an address of its own for the whole step. `gm` is the graph of one micro-batch of
    `block`; the layout holds all of them.
    """
    nodes = list(gm.graph.nodes)
    end = len(nodes)
    position = {node: i for i, node in enumerate(nodes)}
    first: dict[tuple[fx.Node, int], int] = {}
    last: dict[tuple[fx.Node, int], int] = {}
    storages: dict[fx.Node, list[tuple[fx.Node, int]]] = {}
    # a lookup on the disk stream still reads its index until somebody waits for its rows, a collective its operand;
    # for what nobody reads the output waits
    lookups = (ops.gather_rows, aten.embedding.default)
    until = {n: min((position[u] for u in _waiting(n)), default=end - 1) if n.target in lookups or is_collective(n)
             else i for n, i in position.items()}
    for i, node in enumerate(nodes):
        if _owns_memory(node) and not (batching.gathering.buffers and gathers_weight(node)):
            for element in range(len(values_of(node))):
                first[node, element] = last[node, element] = i
        elif node.op == "placeholder" and node.meta.get(META) is None and values_of(node):
            first[node, 0], last[node, 0] = 0, end  # the caller writes it between steps
        for operand in node.all_input_nodes:
            touched = storages.get(operand)
            if touched is None:
                touched = storages[operand] = _storages(operand)
            for key in touched:
                if key in last:
                    last[key] = end if node.op == "output" else max(last[key], until[node])
    home = {key: _name(key) for key in first}
    if reuse:
        _reuse_in_place(nodes, position, first, last, home)

    groups: dict[str, list[tuple[fx.Node, int]]] = {}
    for key, name in home.items():
        groups.setdefault(name, []).append(key)
    requests, kinds, exact, live = [], {}, {}, {}
    for name, keys in groups.items():
        nbytes = exact[name] = max(values_of(n)[e].untyped_storage().nbytes() for n, e in keys)
        live[name] = min(first[k] for k in keys), max(last[k] for k in keys)
        lower, upper = live[name] if reuse else (0, end)
        requests.append(Buffer(name, lower, upper + 1, aligned(nbytes)))
        boundary = any(n.op == "placeholder" for n, _ in keys) or live[name][1] == end
        kinds[name] = "io" if boundary else "activation"
    outlive = outlive_turns(nodes, live, batching)
    if batching.gathering.buffers and (ring := ring_nbytes(nodes, batching.gathering.buffers)):
        requests.append(Buffer(GATHER_BUFFER, 0, end, ring))
        kinds[GATHER_BUFFER], exact[GATHER_BUFFER], live[GATHER_BUFFER] = "activation", ring, (0, end)
    boundary_names = {name for name, kind in kinds.items() if kind == "io"}
    placed = arrange(requests, boundary_names, outlive, exact, batching)
    ends: dict[str, list[str]] = {}
    for name, (_, stop) in live.items():
        if stop < end:
            ends.setdefault(nodes[stop].name, []).append(name)
    buffers = {
        name: BufferPlacement(name, kinds[base], "device", offset, nbytes, "step", *live[base])  # type: ignore[arg-type]
        for name, base, offset, nbytes in placed.places}
    named = {(node.name, element): buffer for (node, element), buffer in home.items()}
    return Layout(buffers, named, ends, placed.height, placed.lower_bound, placed.method)


def _waiting(node: fx.Node) -> Iterator[fx.Node]:
    """The operators that wait for a lookup: its readers, those of views of it in the place of the views."""
    for user in node.users:
        if user.op == "call_function" and (user.target is operator.getitem or user.meta.get("alias_of") is not None):
            yield from _waiting(user)
        else:
            yield user


def _owns_memory(node: fx.Node) -> bool:
    if node.op != "call_function" or node.target in (ops.fetch, ops.release, operator.getitem):
        return False
    return node.meta.get("alias_of") is None and bool(values_of(node))


def _storages(node: fx.Node) -> list[tuple[fx.Node, int]]:
    """All storages that reading `node` may touch: several where it is a tuple of results."""
    base, element = storage_of(node)
    if base is node:
        return [(node, i) for i in range(max(1, len(values_of(node))))]
    return [(base, element)]


def _name(key: tuple[fx.Node, int]) -> str:
    node, element = key
    return node.name if len(values_of(node)) == 1 else f"{node.name}.{element}"


def overwritable(node: fx.Node) -> list[fx.Node]:
    """The operands whose memory may take the node's result while they are read: element i of the result depends on
    their element i alone, as torch's tag `pointwise` promises, and the operator writes it after reading that."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or mutated_arguments(target):
        return []
    if target.namespace == "aten":
        return list(node.all_input_nodes) if torch.Tag.pointwise in target.tags else []
    arguments, own = named_arguments(node, target), of_target(target)
    named = [] if own is None else [arguments.get(name) for name in own.overwrites]
    given = [*node.args, *node.kwargs.values()]
    return [operand for operand in named if isinstance(operand, fx.Node) and given.count(operand) == 1]


def _reuse_in_place(
    nodes: list[fx.Node], position: dict[fx.Node, int], first: dict, last: dict, home: dict[tuple[fx.Node, int], str]
) -> None:
    """Merge a result into an operand that it may overwrite, that dies there and has the very same layout."""
    group_last = {name: last[key] for key, name in home.items()}
    for node in nodes:
        if (node, 0) not in home:
            continue
        value = values_of(node)[0]
        for operand in sorted(overwritable(node), key=lambda n: first.get(storage_of(n), -1)):  # the residual first
            key = storage_of(operand)
            shown = operand.meta.get("val")
            if key not in home or key[0].op == "placeholder" or not isinstance(shown, torch.Tensor):
                continue
            name = home[key]
            same = (shown.shape == value.shape and shown.stride() == value.stride() and shown.dtype == value.dtype
                    and shown.storage_offset() == 0
                    and shown.untyped_storage().nbytes() == value.untyped_storage().nbytes())
            if same and group_last[name] == position[node] and not _read_otherwise(node, key, operand):
                home[node, 0] = name
                group_last[name] = last[node, 0]
                break


def _read_otherwise(node: fx.Node, key: tuple[fx.Node, int], operand: fx.Node) -> bool:
    """Return whether `node` also reads the storage through a different view (a broadcast, a slice), which would be
    torn."""
    return any(storage_of(other) == key and other is not operand for other in node.all_input_nodes)
