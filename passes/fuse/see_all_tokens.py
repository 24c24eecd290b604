"""Attend to all tokens where an indexer would choose no fewer: the indexer goes, and the weights that it reads."""

from __future__ import annotations

from torch import fx

from forebay.kernels.operators import CHOOSE_TOKENS, of_target
from forebay.rewriter.ir.graph import block_graphs


def see_all_tokens(step: fx.GraphModule) -> None:
    """Let the attention of each layer of a captured step graph, and of its block graphs, see all earlier tokens. Inputs
    that nothing reads any more go."""
    gone: dict[str, set[int]] = {}
    for name, block in block_graphs(step).items():
        gone[name] = _without_choices(block)
    inputs = set[fx.Node]()
    for call in step.graph.find_nodes(op="call_module"):
        dropped = gone[call.target]  # type: ignore[index]
        inputs |= {arg for i, arg in enumerate(call.args) if i in dropped and isinstance(arg, fx.Node)}
        call.args = tuple(arg for i, arg in enumerate(call.args) if i not in dropped)
    _without_choices(step)
    for node in [node for node in inputs if not node.users]:
        step.graph.erase_node(node)


def _without_choices(gm: fx.GraphModule) -> set[int]:
    """Erase operators that choose tokens, and inputs that they alone read; returns the positions of these inputs."""
    graph, inputs = gm.graph, gm.graph.find_nodes(op="placeholder")
    read = [bool(node.users) for node in inputs]
    for node in graph.find_nodes(op="call_function", target=CHOOSE_TOKENS.overload):
        for user in list(node.users):
            operator = of_target(user.target)
            assert operator is not None
            place = operator.arguments.index("chosen")
            user.args = _trimmed(user.args[:place], operator.overload._schema.arguments)
        graph.erase_node(node)
    graph.eliminate_dead_code()
    gone = {i for i, node in enumerate(inputs) if read[i] and not node.users}
    for i in gone:
        graph.erase_node(inputs[i])
    return gone


def _trimmed(args: tuple, declared: list) -> tuple:
    """Arguments without the last ones that are as the schema's defaults."""
    end = len(args)
    while args[end - 1] is None or args[end - 1] == declared[end - 1].default_value:
        end -= 1
    return args[:end]
