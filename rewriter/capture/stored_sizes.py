"""Captured graphs that were read from a file: sizes of their inputs as stored, and from them a value for every node."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from forebay.rewriter.ir.graph import CapturedModel

if TYPE_CHECKING:
    from torch._subclasses.fake_tensor import FakeTensorMode

STORED = "stored_sizes"  # in the meta of a placeholder that was read: its dtype, and its shape with "B", "S" and "L"
SIZES = {"B": 3, "S": 7, "L": 19}  # examples: unequal, and none is 1


def fill_values(captured: CapturedModel) -> None:
    """Give every node of a model that was read the `meta["val"]` that capture gives, of symbolic sizes; passes over
    captured graphs look at it. Raises what an operation raises that does not run on its operands."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())

    def fake(node: fx.Node) -> torch.Tensor:
        dtype, shape = node.meta[STORED]
        example = torch.empty([SIZES.get(n, n) for n in shape], dtype=dtype)
        dynamic = [DimDynamic.DYNAMIC if n in SIZES else DimDynamic.STATIC for n in shape]
        return mode.from_tensor(example, symbolic_context=StatelessSymbolicContext(dynamic_sizes=dynamic))

    with torch.no_grad():
        for graph in (*captured.blocks().values(), captured.step):
            _fill(graph, fake, mode)


def _fill(gm: fx.GraphModule, fake: Callable[[fx.Node], torch.Tensor], mode: FakeTensorMode) -> None:
    """Run a graph on fakes; a block gives what its first argument is: a hidden state."""
    values: dict[fx.Node, Any] = {}
    for node in gm.graph.nodes:
        if node.op == "output":
            return
        if node.op == "placeholder":
            values[node] = fake(node)
        elif node.op == "call_module":
            values[node] = values[node.args[0]]
        else:
            with mode:
                args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)  # type: ignore[arg-type]
                values[node] = node.target(*args, **kwargs)  # type: ignore[operator]
        node.meta["val"] = values[node]
