"""Make every read of a weight that is not on the device explicit."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import fx

from forebay.rewriter.ir import ops
from forebay.rewriter.ir.graph import META, STREAMED, Transfer, weight_name
from forebay.rewriter.ir.plan import Plan, Schedule, WeightPlacement
from forebay.rewriter.ir.products import linear_arguments, reads_table, tileable

aten = torch.ops.aten


def insert_transfers(gm: fx.GraphModule, plan: Plan) -> None:
    """Put a `fetch` before and a `release` after each use of a streamed weight; afterwards no operator reads a weight
    that is not in device memory.

    `gm` is a flat graph. A matrix product whose weight has `tile_rows` is split into one product per tile; a lookup
    of a weight with `gather` becomes `gather_rows`, and experts of a table with a pool come from there
    (`experts_from_pool`). Fetches are numbered in graph order, slot = number mod slots. A
    weight that several operators read is fetched once where the slots can hold it from the first to the last of them,
    otherwise for each.
    """
    graph = gm.graph
    order = {node: i for i, node in enumerate(graph.nodes)}
    replaced: dict[fx.Node, fx.Node] = {}
    for node in [n for n in graph.nodes if n.op == "placeholder"]:
        name = weight_name(node)
        if name is None or not plan.streams(name):
            continue
        placement = plan.weight(name)
        whole: list[fx.Node] = []
        for user in list(node.users):
            if user.op == "call_module":
                continue  # the block reads it, and has a graph of its own
            if placement.gather and _is_lookup(user, node):
                replaced[user] = _replace_lookup(graph, user, node)
            elif placement.on_host and reads_table(user, node):
                continue  # the host computes it where the table lies: `delegate_launches`
            elif placement.pool_slots and reads_table(user, node):
                replaced[user] = _replace_experts(graph, user, placement.pool_slots, plan.schedule)
            elif placement.tile_rows and placement.tile_rows < node.meta["val"].shape[0] and tileable(user, node):
                replaced[user] = _tile_product(graph, user, node, placement)
            else:
                whole.append(user)
        if whole:
            _fetch_whole(graph, node, whole, order)
    for node in graph.nodes:
        base = node.meta.get("alias_of")
        if base in replaced:
            node.meta["alias_of"] = replaced[base]
    if not plan.schedule.batching.micro_batches.takes_turns:  # else slots hold all of a layer's weights
        while (held := _held_too_long(graph, plan.schedule.slots)) is not None:
            _fetch_for_each(graph, held)
    number_transfers(gm, plan)


def number_transfers(gm: fx.GraphModule, plan: Plan) -> None:
    """Stamp every fetch with its place in the step and its slot."""
    fetches = [n for n in gm.graph.nodes if n.target is ops.fetch]
    for index, node in enumerate(fetches):
        weight, lower, upper = node.args
        assert isinstance(weight, fx.Node)
        name = weight_name(weight)
        assert name is not None
        node.meta[META] = Transfer(index, name, lower, upper, index % plan.schedule.slots)  # type: ignore[arg-type]


def _is_lookup(user: fx.Node, weight: fx.Node) -> bool:
    return user.target is aten.embedding.default and user.args[0] is weight


def _call(
    graph: fx.Graph, like: fx.Node, target: object, args: tuple, val: torch.Tensor | None, name: str | None = None
) -> fx.Node:
    node = graph.create_node("call_function", target, args, name=name)  # type: ignore[arg-type]
    node.meta = {"val": val, "alias_of": None, "layer": like.meta.get("layer", -1), "made_by": "insert_transfers"}
    return node


def _replace_lookup(graph: fx.Graph, user: fx.Node, weight: fx.Node) -> fx.Node:
    with graph.inserting_before(user):
        rows = _call(graph, user, ops.gather_rows, (weight, user.args[1]), user.meta["val"], user.name + STREAMED)
    user.replace_all_uses_with(rows)
    graph.erase_node(user)
    return rows


def _replace_experts(graph: fx.Graph, user: fx.Node, slots: int, schedule: Schedule) -> fx.Node:
    how = slots, float(schedule.routed.hit_rate), schedule.routed.ahead, schedule.host_hop
    with graph.inserting_before(user):
        out = _call(graph, user, ops.experts_from_pool, (*user.args[:4], *how, *user.args[4:]), user.meta["val"],
                    user.name + STREAMED)
    user.replace_all_uses_with(out)
    graph.erase_node(user)
    return out


def _tiles(rows: int, tile_rows: int) -> Iterator[tuple[int, int]]:
    for lower in range(0, rows, tile_rows):
        yield lower, min(rows, lower + tile_rows)


def _tile_product(graph: fx.Graph, user: fx.Node, weight: fx.Node, placement: WeightPlacement) -> fx.Node:
    value = weight.meta["val"]
    if reads_table(user, weight):
        return _tile_experts(graph, user, weight, placement)
    linear = linear_arguments(user)
    after: tuple = ()
    target: object
    if linear is not None:
        target, x, bias = ops.linear_tile, linear.x, linear.bias
        after = linear[3:] if any(linear[3:]) else ()
    else:
        target = ops.matmul_tile
        bias, x = user.args[:2] if user.target is aten.addmm.default else (None, user.args[0])
    columns = user.meta["val"].shape[-1]
    with graph.inserting_before(user):
        out = _call(graph, user, ops.new_output, (x, columns), user.meta["val"], user.name + STREAMED)
        for lower, upper in _tiles(value.shape[0], placement.tile_rows):
            tile = _call(graph, user, ops.fetch, (weight, lower, upper),
                         value.new_empty((upper - lower, *value.shape[1:])))
            _call(graph, user, target, (out, x, tile, bias, lower, *after), None)
            _call(graph, user, ops.release, (tile,), None)
    user.replace_all_uses_with(out)
    graph.erase_node(user)
    return out


def _tile_experts(graph: fx.Graph, user: fx.Node, weight: fx.Node, placement: WeightPlacement) -> fx.Node:
    """Experts some at a time, in their order: each adds what it gives to what those before it gave."""
    value, made, (x, index, weights, _, *form) = weight.meta["val"], user.meta["val"], user.args
    count = value.shape[0]
    with graph.inserting_before(user):
        out = _call(graph, user, ops.new_output, (x, made.shape[-1]), made, user.name + STREAMED)
        for lower, upper in _tiles(count, placement.tile_rows):
            tile = _call(graph, user, ops.fetch, (weight, lower, upper),
                         value.new_empty((upper - lower, *value.shape[1:])))
            _call(graph, user, ops.experts_tile, (out, x, index, weights, tile, lower, count, *form), None)
            _call(graph, user, ops.release, (tile,), None)
    user.replace_all_uses_with(out)
    graph.erase_node(user)
    return out


def _fetch_whole(graph: fx.Graph, weight: fx.Node, users: list[fx.Node], order: dict[fx.Node, int]) -> None:
    value = weight.meta["val"]
    if any(user not in order for user in users):  # tiles that this pass made
        order.update({node: i for i, node in enumerate(graph.nodes)})
    first = min(users, key=order.__getitem__)
    with graph.inserting_before(first):
        tile = _call(graph, first, ops.fetch, (weight, 0, value.shape[0] if value.dim() else 1),
                     value.new_empty(value.shape))
    for user in users:
        user.replace_input_with(weight, tile)
    for view in [n for n in tile_readers(tile) if n.meta.get("alias_of") is weight]:
        view.meta["alias_of"] = tile
    last = max(tile_readers(tile), key=order.__getitem__)
    with graph.inserting_after(last):
        _call(graph, last, ops.release, (tile,), None)


def _held_too_long(graph: fx.Graph, slots: int) -> fx.Node | None:
    """The first fetch that several operators share, and whose slot a later fetch wants before the last of them."""
    fetched: list[fx.Node] = []
    number: dict[fx.Node, int] = {}
    for node in graph.nodes:
        if node.target is ops.fetch:
            number[node] = len(fetched)
            fetched.append(node)
        elif node.target is ops.release:
            tile = node.args[0]
            if len(fetched) - number[tile] > slots and len(_operators(tile)) > 1:
                return tile  # type: ignore[no-any-return]
    return None


def _operators(tile: fx.Node) -> list[fx.Node]:
    """The operators that read a fetched weight, or a view of it, in the graph's order; none where the caller does."""
    found = {node for node in tile_readers(tile) if node.meta.get("alias_of") is None}
    return [] if any(node.op == "output" for node in found) else [n for n in tile.graph.nodes if n in found]


def _fetch_for_each(graph: fx.Graph, tile: fx.Node) -> None:
    """Put a fetch of its own before each operator that reads `tile`, in place of one for all."""
    for reader in _operators(tile):
        with graph.inserting_before(reader):
            own = _call(graph, reader, ops.fetch, tile.args, tile.meta["val"].new_empty(tile.meta["val"].shape))
            seen = _copied_views(graph, tile, own)
        for node in reader.all_input_nodes:
            if node in seen:
                reader.replace_input_with(node, seen[node])
        for copy in reversed(list(seen.values())[1:]):
            if not copy.users:
                graph.erase_node(copy)
        with graph.inserting_after(reader):
            _call(graph, reader, ops.release, (own,), None)
    unread = [node for node in tile.users if node.target is ops.release]
    unread += [node for node in graph.nodes if node.meta.get("alias_of") is tile]
    for node in (*reversed(unread), tile):
        graph.erase_node(node)


def _copied_views(graph: fx.Graph, tile: fx.Node, own: fx.Node) -> dict[fx.Node, fx.Node]:
    """The views of `tile` as views of another fetch `own`, by the nodes that they stand in for; itself first."""
    seen, shown = {tile: own}, {n for n in tile_readers(tile) if n.meta.get("alias_of") is tile}
    for view in [n for n in graph.nodes if n in shown]:
        copy = seen[view] = graph.node_copy(view, lambda node: seen.get(node, node))
        copy.meta = {**view.meta, "alias_of": own}
    return seen


def tile_readers(tile: fx.Node) -> Iterator[fx.Node]:
    """Users of a value, and users of every view of it; not who gives it back."""
    for user in tile.users:
        if user.target is not ops.release:
            yield user
        if user.meta.get("alias_of") is not None:
            yield from tile_readers(user)
