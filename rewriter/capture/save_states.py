"""Steps that check drafted tokens, over states that cannot take a token back.

Such a step begins with `forebay.keep_state` on each of these states: it saves the state of a sequence, or where the
step before computed tokens that were refused (input `refused` [B]), goes back to the one saved before that step. The
accepted tokens are then computed again, ahead of the next drafts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial

from torch import fx
from torch.fx._lazy_graph_module import _LazyGraphModule

from forebay.kernels.operators import KEEP_STATE
from forebay.rewriter.ir.graph import META, CapturedModel, copy_node
from forebay.rewriter.ir.state import SavedState, StateInput, StateTensor, state_name

COUNT, REFUSED = "count", "refused"
Places = Mapping[str, fx.Node]  # placeholders of a graph by name


def save_states(captured: CapturedModel) -> CapturedModel:
    """`captured`, whose step saves all states that are not rewindable; itself where there are none."""
    saved = [[SavedState(spec) for spec in states if not spec.rewindable] for states in captured.states]
    if not any(saved):
        return captured
    kept = {layer: [tensor for spec in specs for tensor in spec.tensors] for layer, specs in enumerate(saved)}
    blocks = {name: _copied(block, partial(_save, kept[captured.layers.index(name)]))
              for name, block in captured.blocks().items()}
    more: dict[int, list[fx.Node]] = {}

    def declare(graph: fx.Graph, env: Places) -> None:
        refused = _like(graph, env[COUNT], REFUSED)
        for layer, tensors in kept.items():
            more[layer] = [_like(graph, env[state_name(own, layer)], state_name(tensor.name, layer), StateInput(
                layer, tensor.name, SavedState.kind)) for tensor, own in _with_own(tensors)] + [refused] * bool(tensors)

    step = _copied(captured.step, declare, blocks)
    for call in step.graph.find_nodes(op="call_module"):
        call.args = (*call.args, *more[call.meta["layer"]])
    return replace(captured, step=step, states=tuple(
        (*states, *specs) for states, specs in zip(captured.states, saved, strict=True)))


def _with_own(tensors: Iterable[StateTensor]) -> list[tuple[StateTensor, str]]:
    """Saved tensors, and the names of those that they are copies of."""
    return [(tensor, tensor.name.removeprefix(SavedState.PREFIX)) for tensor in tensors]


def _save(tensors: list[StateTensor], graph: fx.Graph, env: Places) -> None:
    """Let a block begin with what saves its states."""
    pairs = [(env[state_name(own)], _like(graph, env[state_name(own)], state_name(tensor.name)))
             for tensor, own in _with_own(tensors)]
    refused = _like(graph, env[COUNT], REFUSED) if pairs else None
    for state, saved in pairs:
        node = graph.call_function(KEEP_STATE.overload, (state, saved, refused))
        node.meta |= {"val": None, "made_by": "save_states"}


def _like(graph: fx.Graph, node: fx.Node, name: str, mark: StateInput | None = None) -> fx.Node:
    """A placeholder of the same sizes as another."""
    new = graph.create_node("placeholder", name, name=name)
    new.meta |= node.meta | ({} if mark is None else {META: mark})
    return new


def _copied(
    gm: fx.GraphModule, more: Callable[[fx.Graph, Places], None], blocks: Mapping[str, fx.GraphModule] | None = None
) -> fx.GraphModule:
    """A copy of a graph, with what `more` puts after its placeholders, which calls `blocks`."""
    graph, env = fx.Graph(), dict[fx.Node, fx.Node]()
    inputs = gm.graph.find_nodes(op="placeholder")
    env.update((node, copy_node(graph, node, env)) for node in inputs)
    more(graph, {node.name: env[node] for node in inputs})
    for node in gm.graph.nodes:
        if node.op != "placeholder":
            env[node] = copy_node(graph, node, env)
    return _LazyGraphModule(dict(blocks or {}), graph)
