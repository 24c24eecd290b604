"""Check the invariants of passes (passes/README.md) on graphs."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_aggregate

from forebay.rewriter.capture.concretise import concretise
from forebay.rewriter.ir import ops
from forebay.rewriter.ir.graph import META, Gemm, Transfer, WeightInput, block_graphs, values_of
from forebay.rewriter.ir.printable import PrintableError
from forebay.rewriter.ir.state import StateInput

SMALL = (2, 3, 12)  # at these sizes captured graphs are looked at: sequences, tokens of each, room in the cache


class GraphError(PrintableError, RuntimeError):
    """A pass left a graph that does not hold together; the message names the pass, the graph and the node."""


def check_concrete(gm: fx.GraphModule, passed: str, sound: dict[fx.Node, tuple] | None = None) -> None:
    """GraphError unless the step graph `gm` and the blocks that it calls are sound: of fixed sizes, each value of the
    layout that its operation gives and known to be of the storage that it shows, each fetch released once. The
    operations of nodes that are as they were when they were found `sound` are not run again; others join these."""
    known = {} if sound is None else sound
    for name, graph in _graphs(gm):
        try:
            _structure(graph, inner=bool(name))
            for node in graph.graph.nodes:
                if node.op == "call_function" and not _same(known.get(node, ()), state := _state(node)):
                    _value(node)
                    known[node] = state
            _transfers(graph)
            _storage_is_named_directly(graph)
        except _Unsound as error:
            raise GraphError(f"{passed} left {name or 'the step graph'} unsound: {error}") from error


def check_captured(gm: fx.GraphModule, passed: str) -> fx.GraphModule:
    """`gm`, a captured step graph, at small sizes; GraphError unless it is sound and each value has there the shape
    that its symbols say."""
    for name, graph in _graphs(gm):
        try:
            _structure(graph, inner=bool(name))
        except _Unsound as error:
            raise GraphError(f"{passed} left {name or 'the step graph'} unsound: {error}") from error
    try:
        small = at_small_sizes(gm)
    except Exception as error:
        raise GraphError(f"{passed} left captured graphs that do not run: {error} {getattr(error, '__notes__', '')}") \
            from error
    found = dict(_graphs(small))
    for name, graph in _graphs(gm):
        try:
            _same_shapes(graph, found[name])
        except _Unsound as error:
            raise GraphError(f"{passed} left {name or 'the step graph'} unsound: {error}") from error
    return small


def at_small_sizes(gm: fx.GraphModule) -> fx.GraphModule:
    """A captured step graph with its symbolic sizes fixed to `SMALL`: inputs are [B], [B, S] or [B, heads, L, D], of
    which B, S and L are symbols, or so many times one."""
    inputs = {}
    for node in gm.graph.find_nodes(op="placeholder"):
        value = node.meta["val"]
        shape = [size if isinstance(size, int) else _size(
            size, dict.fromkeys(size.node.expr.free_symbols, SMALL[i]), {}) for i, size in enumerate(value.shape)]
        inputs[node.name] = torch.empty(shape, dtype=value.dtype, device="meta")
    return concretise(gm, inputs)


class _Unsound(Exception):
    """An error in one graph."""


def _graphs(gm: fx.GraphModule) -> Iterator[tuple[str, fx.GraphModule]]:
    yield "", gm
    yield from block_graphs(gm).items()


def _structure(gm: fx.GraphModule, inner: bool) -> None:
    """Check the rules that hold with fixed and symbolic sizes: fx's own rules, no calls within blocks, a value on every
    node, marks where they belong."""
    try:
        gm.graph.lint()
    except Exception as error:
        raise _Unsound(f"graph.lint: {error}") from error
    for node in gm.graph.nodes:
        if node.op == "output":
            continue
        if inner and node.op == "call_module":
            raise _Unsound(f"{node.name} calls a block from within a block")
        if "val" not in node.meta:
            raise _Unsound(f"{node.name} has no meta['val']; None where it gives nothing")
        mark, allowed = node.meta.get(META), _marks(node)
        if mark is not None and not isinstance(mark, allowed):
            raise _Unsound(f"{node.name} is marked {mark!r}; a {node.op} may bear "
                           f"{' or '.join(kind.__name__ for kind in allowed) or 'nothing'}")


def _marks(node: fx.Node) -> tuple[type, ...]:
    if node.op == "placeholder":
        return WeightInput, StateInput
    if node.op == "call_function":
        return (Transfer,) if node.target is ops.fetch else (Gemm,)
    return ()


def _value(node: fx.Node) -> None:
    """The node's operation, run on the layouts of its operands: it gives that of `val`, and storage of its own or that
    of the operand which `alias_of` tells."""
    args, kwargs = map_aggregate((node.args, node.kwargs), _operand)  # type: ignore[arg-type, misc]
    try:
        with torch.no_grad():
            made = node.target(*args, **kwargs)  # type: ignore[operator]
    except Exception as error:
        raise _Unsound(f"{node.name} does not run on the layouts of its operands: {error}") from error
    given = [made] if isinstance(made, torch.Tensor) else [v for v in made or () if isinstance(v, torch.Tensor)]
    stated = values_of(node)
    if node.target is torch.ops.aten.copy.default:  # its meta kernel lays fresh memory out as no device does
        given = [torch.empty_strided(v.shape, s.stride(), dtype=v.dtype, device="meta")
                 for v, s in zip(given, stated, strict=True)]
    if [_layout(v) for v in given] != [_layout(v) for v in stated]:
        raise _Unsound(f"{node.name} gives {[_layout(v) for v in given]}, meta['val'] says "
                       f"{[_layout(v) for v in stated]}")
    shown = {v.untyped_storage()._cdata for v in given}
    # of an operation with several results, which may show several storages, alias_of names but one
    bases = {arg.meta.get("alias_of") or arg for arg in node.all_input_nodes if _storages(arg) & shown}
    base = node.meta.get("alias_of")
    if base is None and bases:
        raise _Unsound(f"{node.name} shows the storage of {_names(bases)}, and alias_of says that it has its own")
    if base is not None and base not in bases and not (base.meta.get("alias_of") is None and _storages(base) & shown):
        raise _Unsound(f"{node.name} shows {_names(bases) or 'storage of its own'}, and alias_of names {base.name}")


def _state(node: fx.Node) -> tuple[Any, ...]:
    """Return the parts that `_value` reads, as the very objects."""
    base = node.meta.get("alias_of")
    shown = [node, *node.all_input_nodes, *([] if base is None else [base])]
    return (node.target, node.args, node.kwargs, *shown, *(each.meta["val"] for each in shown),
            *(each.meta.get("alias_of") for each in shown))


def _same(before: tuple[Any, ...], after: tuple[Any, ...]) -> bool:
    """Return whether both hold the same objects."""
    return len(before) == len(after) and all(map(operator.is_, before, after))


def _storages(node: fx.Node) -> set[int]:
    return {value.untyped_storage()._cdata for value in values_of(node)}


def _operand(arg: Any) -> Any:
    if isinstance(arg, fx.Node):
        return arg.meta["val"]
    return torch.device("meta") if isinstance(arg, torch.device) else arg


def _layout(tensor: torch.Tensor) -> tuple:
    return tuple(tensor.shape), tensor.stride(), tensor.dtype


def _names(nodes: set[fx.Node]) -> str:
    return ", ".join(sorted(node.name for node in nodes))


def _storage_is_named_directly(gm: fx.GraphModule) -> None:
    seen: set[fx.Node] = set()
    for node in gm.graph.nodes:
        base = node.meta.get("alias_of")
        if base is not None and base not in seen:
            raise _Unsound(f"{node.name} shows {base.name}, which is not a node before it")
        if base is not None and base.meta.get("alias_of") is not None:
            raise _Unsound(f"{node.name} shows {base.name}, which is itself a view; alias_of names storage directly")
        seen.add(node)


def _transfers(gm: fx.GraphModule) -> None:
    """Each fetch is numbered in order and has one release, behind its last reader."""
    place = {node: i for i, node in enumerate(gm.graph.nodes)}
    fetches = gm.graph.find_nodes(op="call_function", target=ops.fetch)
    for index, fetch in enumerate(fetches):
        mark = fetch.meta.get(META)
        if not isinstance(mark, Transfer) or mark.index != index:
            raise _Unsound(f"{fetch.name} is fetch number {index} of its graph and is marked {mark!r}")
        readers = set(_readers(fetch))
        releases = [node for node in readers if node.target is ops.release]
        if len(releases) != 1:
            raise _Unsound(f"{fetch.name} has {len(releases)} releases")
        last = max(readers, key=place.__getitem__)
        if last is not releases[0]:
            raise _Unsound(f"{fetch.name} is released before {last.name} reads it")
    released = [node.args[0] for node in gm.graph.find_nodes(op="call_function", target=ops.release)]
    if any(tile not in fetches for tile in released):
        raise _Unsound(f"{next(t for t in released if t not in fetches)} is released and was not fetched")


def _readers(node: fx.Node) -> Iterator[fx.Node]:
    """Users of a value, and users of every view of it."""
    for user in node.users:
        yield user
        if user.meta.get("alias_of") is not None:
            yield from _readers(user)


def _same_shapes(gm: fx.GraphModule, small: fx.GraphModule) -> None:
    """Each value of a captured graph, its symbols replaced by the sizes of the inputs, is that of the graph at small
    sizes, which was made by running every operation."""
    found = {node.name: node for node in small.graph.nodes}
    sizes: dict[Any, int] = {}
    for node in gm.graph.find_nodes(op="placeholder"):
        for symbol, size in zip(node.meta["val"].shape, found[node.name].meta["val"].shape, strict=True):
            if isinstance(symbol, torch.SymInt):
                many, (one,) = symbol.node.expr.as_coeff_Mul()[0], symbol.node.expr.free_symbols
                sizes[one] = size // int(many)
    known: dict[Any, int] = {}
    for node in gm.graph.nodes:
        if node.op != "call_function" or node.name not in found:
            continue  # numbers, and what nobody reads, are gone
        stated = [(tuple(_size(s, sizes, known) for s in v.shape), v.dtype) for v in values_of(node)]
        given = [(tuple(v.shape), v.dtype) for v in values_of(found[node.name])]
        if stated != given:
            raise _Unsound(f"{node.name} gives {given} at sizes {sizes}, meta['val'] says {stated}")


def _size(size: int | torch.SymInt, sizes: dict[Any, int], known: dict[Any, int]) -> int:
    """`size` as a number. `known` keeps those of expressions: a graph has few, and sympy takes 1 ms for each."""
    if isinstance(size, int):
        return size
    expr = size.node.expr
    if expr not in known:
        known[expr] = int(expr.subs(sizes))
    return known[expr]
