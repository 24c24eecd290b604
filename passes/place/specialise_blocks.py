"""Give layers whose weights are placed alike a block graph of their own."""

from __future__ import annotations

from torch import fx
from torch.fx._lazy_graph_module import _LazyGraphModule

from forebay.rewriter.ir.graph import META, copy_node, weight_name
from forebay.rewriter.ir.plan import Plan


def specialise_blocks(gm: fx.GraphModule, plan: Plan) -> None:
    """Point every block call of a step graph at a copy of its block made for layers of equal placement: the same
    weights resident, the others streamed in the same tiles.

    A copy's placeholders carry the marks (weight names, cache) of the first layer that calls it, so that later passes
    read its placements in the plan as they stand. Graphs without block calls are left alone.
    """
    made: dict[object, str] = {}
    for call in gm.graph.find_nodes(op="call_module"):
        block = str(call.target)
        key = (block, _placement(call, plan))
        if key not in made:
            name = f"{block}_v{sum(known.startswith(f'{block}_v') for known in made.values())}"
            gm.add_submodule(name, _marked_copy(gm.get_submodule(block), call))  # type: ignore[arg-type]
            made[key] = name
        call.target = made[key]
    gm.delete_all_unused_submodules()


def _placement(call: fx.Node, plan: Plan) -> tuple:
    """Return a key that tells one layer's block from another of the same kind: for each weight how it is placed, and
    which of the call's arguments are the same weight."""
    found: list[object] = []
    first: dict[str, int] = {}
    for i, arg in enumerate(call.args):
        name = weight_name(arg) if isinstance(arg, fx.Node) else None
        if name is None or not plan.streams(name):
            found.append(None if name is None else first.setdefault(name, i))
        else:
            w = plan.weight(name)
            found.append((w.tier, w.tile_rows, w.gather, w.pool_slots, w.on_host, w.format, first.setdefault(name, i)))
    return tuple(found)


def _marked_copy(block: fx.GraphModule, call: fx.Node) -> fx.GraphModule:
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    inputs = iter(call.args)
    for node in block.graph.nodes:
        new = env[node] = copy_node(graph, node, env)
        base = node.meta.get("alias_of")
        if base is not None:
            new.meta["alias_of"] = env[base]
        if node.op == "placeholder":
            given = next(inputs)
            assert isinstance(given, fx.Node)
            new.meta[META] = given.meta.get(META)
    return _LazyGraphModule(block, graph)
