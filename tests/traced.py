"""Graphs of small functions, for tests of passes on captured graphs."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import fx

aten = torch.ops.aten


def traced(function: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> fx.GraphModule:
    """The graph of a function of tensors as capture would have it: exported, with neither checks nor guards."""
    program = torch.export.export(_Module(function), inputs, strict=False)
    gm = program.module(check_guards=False)
    asserted = aten._assert_tensor_metadata.default  # capture leaves neither these nor guards in a graph
    for node in [n for n in gm.graph.nodes if n.op == "call_module" or n.target is asserted]:
        gm.graph.erase_node(node)
    gm.recompile()
    return gm


class _Module(torch.nn.Module):
    def __init__(self, function: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        return self.function(*inputs)


def count(gm: fx.GraphModule, target: object) -> int:
    """How many nodes of a graph call `target`."""
    return sum(n.target is target for n in gm.graph.nodes)
