"""Keep of a step graph the layers of one stage, which takes hidden states from the one before and hands its own on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_aggregate

from forebay.passes.shard.split import ShardError, same, shape_of
from forebay.rewriter.ir.graph import META, WeightInput, copy_node, values_of
from forebay.rewriter.ir.share import RankShare, group_name
from forebay.rewriter.ir.state import StateInput, state_name

aten, functional = torch.ops.aten, torch.ops._c10d_functional


def take_stage(gm: fx.GraphModule, share: RankShare, begins: Sequence[int]) -> None:
    """Make a captured step graph that of stage `share.stage`: its layers are those from `begins[stage]` on, numbered
    from 0, its caches theirs. Of what earlier layers made it has what the stage before hands on; logits, which the last
    stage makes, reach all. Only the rank with the same place in each stage takes part in that. What does not come from
    layers, such as rotary factors, each stage computes. ShardError where not a hidden state alone is handed on.
    """
    _Staged(gm, share, begins).run()


class _Staged:
    """A step graph on its way to a stage's: `env` has the new nodes."""

    def __init__(self, gm: fx.GraphModule, share: RankShare, begins: Sequence[int]) -> None:
        self.gm, self.share = gm, share
        self.first, self.end = begins[share.stage], begins[share.stage + 1]
        self.given = self._handed_on(self.first) if share.stage else None
        self.ends = share.stage == share.stages - 1
        (self.logits,) = gm.graph.output_node().all_input_nodes
        self.made = self.logits if self.ends else self._handed_on(self.end)
        self.graph = fx.Graph()
        self.env: dict[fx.Node, fx.Node] = {}

    def run(self) -> None:
        needed = self._needed()
        for node in self.gm.graph.nodes:
            if self.given is not None and node is self.given:
                self.env[node] = self._received(node)
            elif node.op == "placeholder" and (node in needed or node.meta.get(META) is None):
                self.env[node] = self._input(node)
            elif node.op != "output" and node in needed:
                new = self.env[node] = copy_node(self.graph, node, self.env, self._name(node))
                if node.op == "call_module":
                    new.meta["layer"] -= self.first
                if node is self.made and not self.ends:
                    self._exchange(new, self.share.stage, (self.share.stage, self.share.stage + 1), 0)
        everybody = tuple(range(self.share.stages))
        logits = self.env[self.logits] if self.ends else self._empty(self.logits)
        out = self._exchange(logits, self.share.stages - 1, everybody, self.share.stages - 1)
        output = self.gm.graph.output_node()
        self.graph.output(map_aggregate(output.args[0], lambda n: out if n is self.logits else n))
        self.graph.output_node().meta = dict(output.meta)
        self.gm.graph = self.graph

    def _handed_on(self, border: int) -> fx.Node:
        """Return the values that cross from the layers before number `border` to later ones."""
        depth: dict[fx.Node, int] = {}  # layers that a value comes from
        crossing: dict[fx.Node, None] = {}
        layers = 0
        for node in self.gm.graph.nodes:
            before = max((depth[n] for n in node.all_input_nodes), default=0)
            layers += node.op == "call_module"
            depth[node] = layers if node.op == "call_module" else before
            if depth[node] > border:
                crossing |= dict.fromkeys(n for n in node.all_input_nodes if 0 < depth[n] <= border)
        if len(crossing) != 1:
            raise ShardError(f"layers from number {border} on read {len(crossing)} values of those before "
                             f"({', '.join(n.name for n in crossing)}): stages send one; leave stages out")
        return next(iter(crossing))

    def _needed(self) -> set[fx.Node]:
        """Return the nodes that the stage computes, and their inputs."""
        needed: set[fx.Node] = set()
        pending = [self.made]
        while pending:
            node = pending.pop()
            if node not in needed and node is not self.given:
                needed.add(node)
                pending += node.all_input_nodes
        return needed

    def _name(self, node: fx.Node) -> str:
        return f"layer_{node.meta['layer'] - self.first}" if node.op == "call_module" else node.name

    def _input(self, node: fx.Node) -> fx.Node:
        mark = node.meta.get(META)
        assert mark is None or isinstance(mark, WeightInput | StateInput)
        if not isinstance(mark, StateInput):
            return copy_node(self.graph, node, {})
        mine = replace(mark, layer=mark.layer - self.first)
        name = state_name(mine.tensor, mine.layer)
        new = self.graph.create_node("placeholder", name, name=name)
        new.meta.update(node.meta, **{META: mine})
        return new

    # -- what stages exchange

    def _received(self, node: fx.Node) -> fx.Node:
        before = self.share.stage - 1
        return self._exchange(self._empty(node), before, (before, before + 1), 0)

    def _exchange(self, value: fx.Node, giver: int, stages: Sequence[int], source: int) -> fx.Node:
        """Give `value`, or have it given: both sides have it in one memory, and one name for the exchange."""
        group = group_name([self.share.at_stage(stage) for stage in stages])
        return self._call(functional.broadcast_.default, (value, source, group), value.meta["val"],
                          f"handed_on_{giver}")

    def _empty(self, like: fx.Node) -> fx.Node:
        """Memory for a value of another stage, whose sizes are numbers or those of the ids."""
        ids = next(iter(self.env.values()))
        known = shape_of(ids)
        sizes: list[Any] = []
        for size in shape_of(like):
            dim = next((i for i, own in enumerate(known) if same(own, size)), None)
            if not isinstance(size, int) and dim is None:
                raise ShardError(f"{like.name}: a size {size} that is not one of the ids' cannot be handed on")
            sizes.append(size if isinstance(size, int) else self._call(
                aten.sym_size.int, (ids, dim), aten.sym_size.int(ids.meta["val"], dim)))
        (value,) = values_of(like)
        return self._call(aten.empty.memory_format, (sizes,), value.new_empty(value.shape), kwargs={
            "dtype": value.dtype, "device": value.device, "pin_memory": False})

    def _call(self, target: Any, args: tuple, value: Any, name: str | None = None,
              kwargs: dict[str, Any] | None = None) -> fx.Node:
        new = self.graph.create_node("call_function", target, args, kwargs or {}, name=name)
        new.meta.update(val=value, made_by=take_stage.__name__)
        return new
