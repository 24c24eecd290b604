"""The launches of a step graph that read or write caches."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from torch import fx

from forebay.kernels.operators import of_target
from forebay.passes.lower.launches import Launches
from forebay.rewriter.ir.program import Launch
from forebay.rewriter.planning.launch_memory import unplaced


def cache_launches(step: fx.GraphModule) -> list[tuple[int, Launch]]:
    """Return the launches over caches in a step graph and its blocks: launches that are not placed yet, and how many
    are like each."""
    calls = Counter(call.target for call in step.graph.find_nodes(op="call_module"))
    graphs = [(1, step), *((count, step.get_submodule(str(target))) for target, count in calls.items())]
    launches = Launches(lambda node, result=0: replace(unplaced(node, result), buffer=node.name), lambda launch: launch)
    return [(count, launch) for count, graph in graphs for node in graph.graph.nodes  # type: ignore[union-attr]
            if (operator := of_target(node.target)) is not None and operator.caches for launch in launches.of(node)]
