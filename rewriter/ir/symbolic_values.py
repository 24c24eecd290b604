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
KNOWN = "_forebay_known"  # values by what was asked, as an attribute of their mode
InputLayout = tuple[torch.dtype, tuple[int | str, ...]]  # dtype and shape, with names of `SIZES` for others


def symbolic_value(target: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Compute the result of `target` for values of symbolic sizes. Composite operators are Python's: torch 2.11's own
    `linear` asks for sizes that are no numbers. What was asked before of values of the same sizes, in the graphs of one
    model, is given again: ranks, layers and pieces ask for much the same, and each takes milliseconds."""
    from torch._dispatch.python import enable_python_dispatcher
    from torch._subclasses.fake_tensor import FakeTensor

    operands = (each for arg in args for each in (arg if isinstance(arg, list | tuple) else (arg,)))
    mode = next((each.fake_mode for each in operands if isinstance(each, FakeTensor)), None)
    key = None
    if mode is not None and not getattr(getattr(target, "_schema", None), "is_mutable", True):
        key = target, _asked(args), _asked(kwargs)
        try:
            known = vars(mode).setdefault(KNOWN, {})  # lives and goes with the values that it holds
            if key in known:
                return known[key]
        except TypeError:  # an argument that has no hash
            key = None
    with enable_python_dispatcher():
        found = target(*args, **kwargs)
    if key is not None:
        known[key] = found
    return found


def _asked(value: Any) -> Any:
    """All of an argument that the layout of an operator's result depends on. How large a storage is that it views is
    told in other terms each time, and nobody asks before sizes are fixed."""
    if isinstance(value, torch.Tensor):
        sizes = (*value.shape, *value.stride(), value.storage_offset())
        return "tensor", value.dtype, value.device, len(value.shape), _asked(sizes)
    if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
        return "symbol", value.node.expr
    if isinstance(value, Mapping):
        return "mapping", tuple((name, _asked(each)) for name, each in value.items())
    if isinstance(value, tuple | list):
        return type(value), tuple(map(_asked, value))
    return type(value), value


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
            values: dict[fx.Node, Any] = {node: fake(node) for node in graph.graph.find_nodes(op="placeholder")}
            for node in graph.graph.nodes:
                if node.op == "call_module":
                    values[node] = values[node.args[0]]
                elif node.op == "call_function":
                    with mode:
                        args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)  # type: ignore[arg-type]
                        values[node] = symbolic_value(node.target, args, kwargs)  # type: ignore[arg-type]
                elif node.op == "output":
                    break
                node.meta["val"] = values[node]
