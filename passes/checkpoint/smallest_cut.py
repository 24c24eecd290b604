"""The values of a layer to keep so that K and V can be recomputed: a minimum cut of the graph that makes them.

Each value that depends on the tokens can be kept, at its bytes per token, or made again from what is kept before it,
at a price (HybridServe, section 4.1, keeps the input of the projections; which value that is, and whether it is smaller
than K and V, the cut finds for any layer). Where queries share keys K and V themselves are the smallest.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from forebay.kernels.operators import of_target
from forebay.rewriter.ir.graph import META, values_of
from forebay.rewriter.ir.products import linear_arguments

# Of a value's own bytes: what making it again costs at least, so that of equal cuts the one next to K and V is found.
LEAST_PRICE = 2.0**-20

Price = Callable[[fx.Node], float]


@dataclass(frozen=True)
class Cut:
    """A cut of a block graph. From the `kept` values the `made` ones are computed again, in the graph's order, up to
    the keys and values that `append` stores. The bytes are those per token of kept values, and of K and V."""

    append: fx.Node
    kept: tuple[fx.Node, ...]
    made: tuple[fx.Node, ...]
    nbytes: int
    kv_nbytes: int

    @property
    def smaller(self) -> bool:
        """Whether less is kept than K and V."""
        return bool(self.made) and self.nbytes < self.kv_nbytes


def smallest_cut(
    block: fx.GraphModule, tables: Collection[str] = (), price: Price = lambda node: 0.0, behind_products: bool = False
) -> Cut | None:
    """The cheapest way to have K and V of a block's tokens again; None for a block without a cache.

    `tables` are placeholders that follow from positions alone. `price` is what making a value again costs, in bytes per
    token, of which as many could be moved in the time. With `behind_products` K and V must be made again by their
    products, whatever is smaller.
    """
    append = next((node for node in block.graph.nodes
                   if (operator := of_target(node.target)) is not None and operator.appends), None)
    if append is None:
        return None
    ends = [node for node in append.args[2:4] if isinstance(node, fx.Node)]
    stored = dict(zip(ends, map(_row_nbytes, append.args[:2]), strict=True))

    def nbytes(node: fx.Node) -> int:
        return stored.get(node) or token_nbytes(node)

    import networkx as nx  # a tenth of a second, for plans with checkpoints alone

    inputs = set(token_inputs(block, tables))
    cone = [node for node in block.graph.nodes if node in _between(inputs, ends)]
    graph = nx.DiGraph()
    for node in cone:
        fixed = behind_products and any(map(_is_product, (node, *_ancestors(node, among=cone))))
        graph.add_edge((node, 0), (node, 1), capacity=math.inf if fixed else nbytes(node))
        again = math.inf if node in inputs else price(node) + LEAST_PRICE * token_nbytes(node)
        graph.add_edge("kept", (node, 0), capacity=again)
        for source in node.all_input_nodes:
            if source in cone:
                graph.add_edge((source, 1), (node, 0), capacity=math.inf)
        if node in ends:
            graph.add_edge((node, 1), "made", capacity=math.inf)
    _, (ahead, _) = nx.minimum_cut(graph, "kept", "made")
    kept = tuple(n for n in cone if (n, 0) in ahead and (n, 1) not in ahead)
    made = tuple(n for n in cone if (n, 0) not in ahead)
    return Cut(append, kept, made, sum(map(nbytes, kept)), sum(stored.values()))


def token_inputs(block: fx.GraphModule, tables: Collection[str] = ()) -> Iterator[fx.Node]:
    """The placeholders of a block graph that differ from token to token by more than its position."""
    for node in block.graph.find_nodes(op="placeholder"):
        values = values_of(node)
        if node.meta.get(META) is None and values and values[0].dim() > 1 and node.name not in tables:
            yield node


def _between(inputs: Collection[fx.Node], ends: Collection[fx.Node]) -> set[fx.Node]:
    """The nodes on the ways from `inputs` to `ends`, with both."""
    reached: set[fx.Node] = set()
    waiting = list(inputs)
    while waiting:
        node = waiting.pop()
        if node not in reached and (values_of(node) or node.op == "placeholder"):  # sizes are no ways
            reached.add(node)
            waiting += node.users
    return {end for end in ends if end in reached} | _ancestors(*ends, among=reached)


def _ancestors(*ends: Any, among: Collection[fx.Node] = ()) -> set[fx.Node]:
    found: set[fx.Node] = set()
    waiting = [source for end in ends if isinstance(end, fx.Node) for source in end.all_input_nodes]
    while waiting:
        node = waiting.pop()
        if node in among and node not in found:
            found.add(node)
            waiting += node.all_input_nodes
    return found


def _row_nbytes(cache: Any) -> int:
    """Bytes that a cache [B, Hkv, L, …] has of one token."""
    value = values_of(cache)[0]
    return int(value.shape[1]) * int(value.shape[3]) * value.element_size()


def _is_product(node: fx.Node) -> bool:
    return linear_arguments(node) is not None or node.target is torch.ops.aten.addmm.default


def token_nbytes(node: fx.Node) -> int:
    """Bytes of one token of a value."""
    return sum(math.prod(map(of_one_token, value.shape)) * value.element_size() for value in values_of(node))


def of_one_token(size: int | torch.SymInt) -> int:
    """A size where there is one sequence of one token."""
    if isinstance(size, int):
        return size
    expr = size.node.expr
    return int(expr.subs(dict.fromkeys(expr.free_symbols, 1)))
