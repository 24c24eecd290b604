"""A value for every node of captured graphs, of symbolic sizes, from those of their inputs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

# examples of the sizes of inputs: sequences, tokens, length of the cache, and rows of checkpoints and tokens; unequal,
# and none is 1
SIZES = {"B": 3, "S": 7, "L": 19, "R": 3 * 19 + 3 * 7}
InputLayout = tuple[torch.dtype, tuple[int | str, ...]]  # dtype and shape, with names of `SIZES` for what is not fixed


def symbolic_value(target: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """What `target` gives for values of symbolic sizes. Composite operators are Python's: torch 2.11's own `linear`
    asks for sizes that are no numbers."""
    from torch._dispatch.python import enable_python_dispatcher

    with enable_python_dispatcher():
        return target(*args, **kwargs)


def fill_graphs(graphs: Iterable[fx.GraphModule], layout_of: Callable[[fx.Node], InputLayout]) -> None:
    """Give every node the `meta["val"]` that capture gives, where placeholders are as `layout_of` says; a call of a
    block gives what its first argument is: a hidden state. Raises what an operation raises that does not run.

    Inputs share the symbols of their sizes: with one for each dimension of each input, most of the time (1.8 s for a
    Llama) went into finding them equal.
    """
    from torch._dynamo.source import ConstantSource
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

    env = ShapeEnv()
    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=env)

    @functools.cache
    def symbol(name: str) -> int | torch.SymInt:
        source = ConstantSource(name)
        return env.create_symintnode(env.create_symbol(SIZES[name], source, DimDynamic.DYNAMIC), hint=SIZES[name],
                                     source=source)

    def fake(node: fx.Node) -> torch.Tensor:
        dtype, shape = layout_of(node)
        with mode:
            return torch.empty([symbol(n) if isinstance(n, str) else n for n in shape], dtype=dtype)

    with torch.no_grad():
        for graph in graphs:
            values: dict[fx.Node, Any] = {}
            for node in graph.graph.nodes:
                if node.op == "placeholder":
                    values[node] = fake(node)
                elif node.op == "call_module":
                    values[node] = values[node.args[0]]
                elif node.op == "call_function":
                    with mode:
                        args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)  # type: ignore[arg-type]
                        values[node] = symbolic_value(node.target, args, kwargs)  # type: ignore[arg-type]
                else:
                    break
                node.meta["val"] = values[node]
