"""Tables of values that a step computes from its tokens' positions alone, such as rotary tables, for all positions at
once."""

from __future__ import annotations

import torch
from torch import fx

from forebay.rewriter.ir.graph import META, CapturedModel, WeightInput

SOME = 3  # tokens of the step that the table is compared with


def position_table(captured: CapturedModel, node: fx.Node) -> torch.Tensor | None:
    """[positions, …]: what `node` [B, S, …] of the step graph holds for a token at each position that the model has.
    None where it follows from more than positions, or where no limit of them is known."""
    limit, needed = captured.max_positions, _ancestors(node)
    if limit < SOME or not all(_of_positions(captured, each, needed) for each in needed):
        return None
    graph = fx.Graph()
    made: dict[fx.Node, fx.Node] = {}
    for each in captured.step.graph.nodes:
        if each in needed:
            made[each] = graph.node_copy(each, made.__getitem__)
    graph.output(made[node])
    alone = fx.GraphModule({}, graph)
    table = _run(captured, alone, torch.zeros(1, dtype=torch.int64), limit)
    if table.shape[:2] != (1, limit):
        return None
    starts = torch.tensor([0, (limit - SOME) // 2, limit - SOME])  # a step elsewhere must find the same rows
    alike = table[0][starts[:, None] + torch.arange(SOME)]
    some = _run(captured, alone, starts, SOME)
    return table[0] if some.shape == alike.shape and torch.allclose(some, alike, 1e-5, 1e-6) else None


def _ancestors(node: fx.Node) -> set[fx.Node]:
    """The nodes that `node` is computed from, itself among them."""
    found: set[fx.Node] = set()
    left = [node]
    while left:
        each = left.pop()
        if each not in found:
            found.add(each)
            left += each.all_input_nodes
    return found


def _of_positions(captured: CapturedModel, node: fx.Node, needed: set[fx.Node]) -> bool:
    """Return whether a node is where tokens stand, how many there are, a constant, or an operation."""
    if node.op != "placeholder":
        return node.op == "call_function"
    mark = node.meta.get(META)
    if isinstance(mark, WeightInput):
        return mark.name in captured.constants
    sizes_alone = all(user.target is torch.ops.aten.sym_size.int for user in node.users if user in needed)
    return node.name == "start" or (node.name == "input_ids" and sizes_alone)


def _run(captured: CapturedModel, alone: fx.GraphModule, start: torch.Tensor, tokens: int) -> torch.Tensor:
    """Run the graph for `tokens` tokens of sequences that begin at `start` [B]."""
    known = {"start": start, "input_ids": torch.zeros(len(start), tokens, dtype=torch.int64)}
    marks = [(node.name, node.meta.get(META)) for node in alone.graph.find_nodes(op="placeholder")]
    given = [captured.constants[mark.name] if isinstance(mark, WeightInput) else known[name] for name, mark in marks]
    with torch.no_grad():
        found: torch.Tensor = fx.Interpreter(alone).run(*given)
    return found
