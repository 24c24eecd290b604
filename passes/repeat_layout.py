"""The layout of a deep graph from that of a shallow one, so that allocation does not grow with the number of layers."""

from __future__ import annotations

from torch import fx

from forebay.rewriter import ops
from forebay.rewriter.graph import META, STREAMED, Layout, storage_of


def repeat_layout(gm: fx.GraphModule, sample: fx.GraphModule) -> Layout | None:
    """Give every layer of `gm` the addresses and buffer names of its like in `sample`, a flat graph before transfers
    with some layers left out (the rest keep their numbers) and a `Layout` in its meta.

    None unless each layer's inputs lie where the sample's layer finds its own, so that a layer that was left out can
    stand between any two. Values made outside of layers live until their last reader in `gm`.
    """
    layout = sample.meta[META]
    assert isinstance(layout, Layout)
    by_name = {n.name: n for n in sample.graph.nodes}
    like = _like_layers(gm, sample)
    nodes = list(gm.graph.nodes)
    twin: dict[fx.Node, fx.Node] = {}
    for node in nodes:
        found = by_name.get(_in_layer(node, like))
        if found is not None:
            twin[node] = found
    home: dict[tuple[fx.Node, int], str] = {}
    homes_of: dict[fx.Node, list[tuple[int, str]]] = {}
    for (node, element), name in layout.home.items():
        homes_of.setdefault(node, []).append((element, name))
    ends: dict[fx.Node, list[str]] = {}
    outside = {name for (node, _), name in layout.home.items() if node.meta.get("layer", -1) in (-1, None)}
    last_read: dict[str, fx.Node] = {}
    for node in nodes:
        other = twin.get(node)
        if other is None:
            if node.op == "call_function" and node.meta.get("alias_of") is None and "made_by" not in node.meta:
                return None
            own: list[tuple[int, str]] = []
        else:
            own = homes_of.get(other, [])
            for name in layout.ends.get(other, ()):
                if name not in outside:
                    ends.setdefault(_last_tile(node), []).append(name)
        for element, name in own:
            home[node, element] = name
            if name in outside:
                last_read[name] = node
        if other is not None and not _same_inputs(node, other, home, layout):
            return None
        for operand in node.all_input_nodes:
            name = home.get(storage_of(operand), "")
            if name in outside:
                last_read[name] = node
    kept = {name for held in layout.ends.values() for name in held}
    for name, node in last_read.items():
        if name in kept:
            ends.setdefault(node, []).append(name)
    twins = {node: other.name for node, other in twin.items()}
    return Layout(dict(layout.buffers), home, ends, layout.height, layout.lower_bound, layout.method, twins)


def _last_tile(node: fx.Node) -> fx.Node:
    """The node itself, or where it is an output computed tile by tile, the last of its tiles."""
    if node.target is not ops.new_output:
        return node
    return [user for user in node.users if user.target in (ops.linear_tile, ops.matmul_tile)][-1]


def _plain(name: str) -> str:
    return name.removesuffix(STREAMED)


def _in_layer(node: fx.Node, like: dict[int, int]) -> str:
    """The node's name as its like in the sample has it."""
    layer = node.meta.get("layer")
    name = _plain(node.name)
    if layer is None or layer < 0:
        return name
    return f"layer{like.get(layer, layer)}_{name.removeprefix(f'layer{layer}_')}"


def _like_layers(gm: fx.GraphModule, sample: fx.GraphModule) -> dict[int, int]:
    """For each layer the sample's layer of the same block: itself if the sample has it, else the second of its kind,
    which has neighbours on both sides."""
    have: dict[int, str] = {n.meta["layer"]: n.meta.get("block", "") for n in sample.graph.nodes
                            if (n.meta.get("layer") or 0) >= 0 and "block" in n.meta}
    of_kind: dict[str, list[int]] = {}
    for layer, kind in have.items():
        of_kind.setdefault(kind, []).append(layer)
    like = {}
    for node in gm.graph.nodes:
        layer, kind = node.meta.get("layer"), node.meta.get("block")
        if layer is not None and kind in of_kind and layer not in like:
            like[layer] = layer if layer in have else of_kind[kind][min(1, len(of_kind[kind]) - 1)]
    return like


def _same_inputs(node: fx.Node, other: fx.Node, home: dict[tuple[fx.Node, int], str], layout: Layout) -> bool:
    """Whether the activations that a node reads are, buffer by buffer, those that its twin reads."""
    return _read(node, home) == _read(other, layout.home)


def _read(node: fx.Node, home: dict[tuple[fx.Node, int], str]) -> list[str]:
    return [name for operand in node.all_input_nodes if (name := home.get(storage_of(operand))) is not None]
