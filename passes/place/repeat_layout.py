"""Whether the layout of a shallow graph serves a deep one: allocation must not grow with the number of layers."""

from __future__ import annotations

from torch import fx

from forebay.rewriter.ir.graph import META, Layout, storage_of, values_of


def repeats(gm: fx.GraphModule, layout: Layout) -> bool:
    """Return whether every layer of the step graph `gm` has its inputs in the same buffers as the layer that it equals.
    Each can then have that layer's addresses. `layout` was made on the flat graph of some of the layers.
    """
    homes: dict[tuple[fx.Node, int], str | None] = {}  # results of block calls -> buffer
    expected: dict[int, list[str | None]] = {}
    calls = gm.graph.find_nodes(op="call_module")

    def inputs_of(call: fx.Node) -> list[str | None]:
        found: list[str | None] = []
        for arg in call.args:
            if isinstance(arg, fx.Node) and arg.meta.get(META) is None and values_of(arg):
                base, element = storage_of(arg)
                known = homes.get((base, element))
                found.append(known if known is not None else layout.home.get((base.name, element)))
        return found

    for call in calls:
        layer = call.meta["layer"]
        like = layout.representatives.get(layer, layer)
        given = inputs_of(call)
        if expected.setdefault(like, given) != given:
            return False
        block = gm.get_submodule(str(call.target))
        assert isinstance(block, fx.GraphModule)
        placeholders = [n for n in block.graph.find_nodes(op="placeholder")]
        activations = [n for n, arg in zip(placeholders, call.args, strict=True)
                       if isinstance(arg, fx.Node) and arg.meta.get(META) is None and values_of(arg)]
        entered = dict(zip(activations, given, strict=True))
        for i, value in enumerate(block.graph.output_node().all_input_nodes):
            base, element = storage_of(value)
            home = entered.get(base) or layout.home.get((f"layer{like}_{base.name}", element))
            homes[call, i] = home
    return True
