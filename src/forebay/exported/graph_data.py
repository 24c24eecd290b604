"""Captured graphs as plain data, JSON both ways: the schema of a bundle's graphs.

A graph is a list of nodes in order. An input is {"in": name, "dtype": …, "shape": […]} with the sizes "B", "S" and "L"
(sequences, tokens of each, room in the cache) for those that vary, and, for what it stands for, "weight": [name,
format], of some tables of experts with the number that routers pick from as well, or "state": [layer, tensor, kind,
window]. An operation is {"op": name, "as": node, "args": […], "kwargs": {…}},
a layer {"call": block, "as": node, "args": […], "layer": number}, the result {"out": value}. Among arguments "%x" is
the value of node x; numbers, booleans, null and lists are themselves; whatever else is an object of one entry that
names its kind.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx
from torch.fx._lazy_graph_module import _LazyGraphModule

from forebay.exported.allowed import name_of, target_of
from forebay.exported.errors import ExportError
from forebay.kernels import operators
from forebay.kernels.operator import HOST_MEMORY
from forebay.rewriter.capture.stored_sizes import STORED
from forebay.rewriter.ir.graph import META, WeightInput
from forebay.rewriter.ir.state import STATE_KINDS, StateInput

SIZES = "BSL"  # of an input's dimension 0, 1 and 2, where they vary; an earlier input's size has its letter anywhere
_DTYPES = {str(d)[6:]: d for d in (
    torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool, torch.complex64)}
_KINDS: dict[str, Callable[[str], Any]] = {
    "str": str,
    "dtype": _DTYPES.__getitem__,
    "device": lambda name: {HOST_MEMORY.type: HOST_MEMORY}[name],
    "layout": lambda name: {"strided": torch.strided}[name],
    "memory_format": lambda name: {"contiguous_format": torch.contiguous_format,
                                   "preserve_format": torch.preserve_format}[name],
    "float": lambda name: {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}[name],
}
NAME_LENGTH, DEPTH = 512, 8


def dtype_name(dtype: torch.dtype) -> str:
    """Return the stored name of a dtype: "float32"."""
    return str(dtype)[6:]


def dtype_named(name: object) -> torch.dtype:
    """The dtype stored as `name`; ValueError for none that a graph may have."""
    if not isinstance(name, str) or name not in _DTYPES:
        raise ValueError(f"{name!r} is no dtype that a graph may have")
    return _DTYPES[name]


def graph_to_data(gm: fx.GraphModule, where: str) -> list[dict[str, Any]]:
    """The nodes of a captured graph. ExportError, naming the layer by `where`, for what the schema cannot hold."""
    sizes: dict[object, str] = {}
    for node in gm.graph.find_nodes(op="placeholder"):
        first = next(iter(node.meta["val"].shape), 0)
        if not isinstance(first, int):  # hidden states may have another dimension before [B, S, H] (Gemma 3n)
            _input_to_data(node, sizes, where)
    return [_node_to_data(node, sizes, where) for node in gm.graph.nodes]


def _node_to_data(node: fx.Node, sizes: dict[object, str], where: str) -> dict[str, Any]:
    def plain(arg: Any) -> Any:
        return _value_to_data(arg, f"{where}: {node.name}")

    if node.op == "placeholder":
        return _input_to_data(node, sizes, where)
    if node.op == "output":
        return {"out": plain(node.args[0])}
    if node.op == "call_module":
        return {"call": str(node.target), "as": node.name, "args": plain(node.args), "layer": node.meta["layer"]}
    name = name_of(node.target)
    if node.op != "call_function" or name is None:
        raise ExportError(f"{where} computes {node.target} ({node.name}), which a bundle cannot hold; run the "
                          "model from its checkpoint")
    found = {"op": name, "as": node.name, "args": plain(node.args)}
    return found | {"kwargs": {key: plain(value) for key, value in node.kwargs.items()}} if node.kwargs else found


def _input_to_data(node: fx.Node, sizes: dict[object, str], where: str) -> dict[str, Any]:
    value, mark = node.meta["val"], node.meta.get(META)
    shape: list[int | str] = []
    for i, size in enumerate(value.shape):
        letter = size if isinstance(size, int) else sizes.get(size.node.expr) or SIZES[i : i + 1]
        if isinstance(letter, str) and (not letter or sizes.setdefault(size.node.expr, letter) != letter):
            raise ExportError(f"{where}: the input {node.name} has sizes {list(value.shape)}, and dimension {i} is not "
                              "the one that varies there elsewhere; run the model from its checkpoint")
        shape.append(letter)
    found: dict[str, Any] = {"in": node.name, "dtype": dtype_name(value.dtype), "shape": shape}
    if isinstance(mark, WeightInput):
        found["weight"] = [mark.name, mark.format, *([mark.among] if mark.among else [])]
    elif isinstance(mark, StateInput):
        found["state"] = [mark.layer, mark.tensor, mark.kind, mark.window]
    return found


def _value_to_data(arg: Any, where: str) -> Any:
    if isinstance(arg, fx.Node):
        return f"%{arg.name}"
    if isinstance(arg, list | tuple):
        return [_value_to_data(each, where) for each in arg]
    if isinstance(arg, str):
        return {"str": arg}
    if isinstance(arg, float) and not math.isfinite(arg):
        return {"float": str(arg)}
    if arg is None or isinstance(arg, bool | int | float):
        return arg
    for kind, of in (("dtype", torch.dtype), ("device", torch.device), ("layout", torch.layout),
                     ("memory_format", torch.memory_format)):
        if isinstance(arg, of):
            name = str(arg).removeprefix("torch.")
            try:
                _KINDS[kind](name)
            except KeyError:
                break
            return {kind: name}
    raise ExportError(f"{where} is given {arg!r}, which a bundle cannot hold; run the model from its checkpoint")


def graph_from_data(data: object, where: str, blocks: Mapping[str, fx.GraphModule] | None = None) -> fx.GraphModule:
    """The graph that `graph_to_data` wrote; `blocks` are those that it may call. ValueError, naming the node, for
    anything else: only operations of `allowed` are ever looked up, and none is called here."""
    graph = fx.Graph()
    nodes: dict[str, fx.Node] = {}
    if not isinstance(data, list) or not data:
        raise ValueError(f"{where}: expected a list of nodes")
    for i, entry in enumerate(data):
        try:
            if not isinstance(entry, dict):
                raise ValueError(f"expected an object, found {type(entry).__name__}")
            if ("out" in entry) != (i == len(data) - 1):
                raise ValueError("a graph has one result, and it is its last node")
            _add_node(graph, nodes, entry, blocks or {})
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            said = f"{type(error).__name__}: {error}" if not isinstance(error, ValueError) else str(error)
            raise ValueError(f"{where}, node {i}: {said}") from error
    return _LazyGraphModule(dict(blocks or {}), graph)


def _add_node(
    graph: fx.Graph, nodes: dict[str, fx.Node], entry: dict[str, Any], blocks: Mapping[str, fx.GraphModule]
) -> None:
    if "out" in entry:
        _only(entry, "out")
        graph.output(_value_from_data(entry["out"], nodes))
        return
    name = entry.get("in", entry.get("as"))
    if not isinstance(name, str) or not name.isidentifier() or len(name) > NAME_LENGTH or name in nodes:
        raise ValueError(f"{str(name)[:80]!r} is no name for a node, or another node's")
    if "in" in entry:
        _only(entry, "in", "dtype", "shape", "weight", "state")
        new = graph.create_node("placeholder", name, name=name)
        new.meta[STORED] = dtype_named(entry["dtype"]), _shape_from_data(entry["shape"])
        mark = _mark_from_data(entry)
        if mark is not None:
            new.meta[META] = mark
    elif "call" in entry:
        _only(entry, "call", "as", "args", "layer")
        if entry["call"] not in blocks:
            raise ValueError(f"no block {str(entry['call'])[:80]!r}")
        args = _list(entry["args"], nodes)
        wanted = blocks[entry["call"]].graph.find_nodes(op="placeholder")
        if len(args) != len(wanted) or not all(isinstance(arg, fx.Node) for arg in args):
            raise ValueError(f"{entry['call']} has {len(wanted)} inputs, which are values of nodes")
        odd = next((arg for arg, inner in zip(args, wanted, strict=True) if STORED in arg.meta and (
            len(arg.meta[STORED][1]) != len(inner.meta[STORED][1]))), None)
        if odd is not None:
            raise ValueError(f"{entry['call']} is given {odd.name} for an input of other dimensions")
        new = graph.create_node("call_module", entry["call"], tuple(args), name=name)
        new.meta["layer"] = _number(entry["layer"])
    else:
        _only(entry, "op", "as", "args", "kwargs")
        if not isinstance(entry["op"], str):
            raise ValueError("an operation is named by text")
        kwargs = entry.get("kwargs", {})
        if not isinstance(kwargs, dict):
            raise ValueError("kwargs must be an object")
        args = _list(entry["args"], nodes)
        new = graph.create_node("call_function", target_of(entry["op"]), tuple(args), {
            str(key): _value_from_data(value, nodes) for key, value in kwargs.items()}, name=name)
        _check_call(new)
    if new.name != name:
        raise ValueError(f"{name!r} cannot be a node's name")
    nodes[name] = new


def _check_call(node: fx.Node) -> None:
    """ValueError for arguments that the operation has not, lacks, or takes of another type, for one that is to be a
    tensor and is no node's value (torch takes numbers for its own operations' later operands), and for a tensor that
    would be made in real memory."""
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return
    known = [argument.name for argument in schema.arguments]
    by_position = known[: len(node.args)]
    positions = sum(not argument.kwarg_only for argument in schema.arguments)
    if len(node.args) > positions or node.kwargs.keys() - set(known):
        raise ValueError(f"{schema.name} has no such arguments")
    if node.kwargs.keys() & set(by_position):
        raise ValueError(f"{schema.name} is given an argument twice")
    operands = dict(zip(by_position, node.args, strict=True)) | node.kwargs
    ours = operators.of_target(node.target)
    for i, name in enumerate(known if ours is not None else known[:1]):
        operand = operands.get(name)
        if str(schema.arguments[i].type) == "Tensor" and not isinstance(operand, fx.Node):
            raise ValueError(f"{schema.name} needs the value of a node for {name}, found {str(operand)[:80]}")
        if ours is not None and name in ours.caches and not _is_cache(operand):
            raise ValueError(f"{schema.name} needs a cache for {name}, found {str(operand)[:80]}")
    for argument in schema.arguments:
        name = argument.name
        if name not in operands and not argument.has_default_value():
            raise ValueError(f"{schema.name} needs {name}")
        if name in operands and not _fits(str(argument.real_type), operands[name]):
            raise ValueError(f"{schema.name} takes {argument.real_type} for {name}, found {str(operands[name])[:80]}")
    if "device" in known and operands.get("device") is None and not node.all_input_nodes:
        raise ValueError(f"{schema.name} must name its device")


_TAKES: dict[str, tuple[type, ...]] = {  # types of schemas; torch takes numbers for tensors, and a node's for numbers
    "Tensor": (fx.Node, int, float), "number": (fx.Node, int, float), "int": (fx.Node, int),
    "float": (fx.Node, int, float), "bool": (bool,), "str": (str,), "Device": (torch.device,),
    "Layout": (torch.layout,), "ScalarType": (torch.dtype,), "MemoryFormat": (torch.memory_format,)}


def _fits(kind: str, value: Any) -> bool:
    """Return whether an argument of this type, as schemas print it, may be `value`."""
    if kind.startswith("Optional["):
        return value is None or _fits(kind[9:-1], value)
    if kind.startswith("List["):
        each = value if isinstance(value, list | tuple) else [value]  # one number for a list of them
        return all(_fits(kind[5:-1], element) for element in each)
    return isinstance(value, _TAKES[kind])


def _is_cache(operand: Any) -> bool:
    """Return whether an operand is an input [B, H, L, D] of its graph."""
    return isinstance(operand, fx.Node) and operand.op == "placeholder" and len(operand.meta[STORED][1]) == 4


def _shape_from_data(shape: object) -> tuple[int | str, ...]:
    if not isinstance(shape, list) or not all(
            (type(n) is int and 0 <= n < 1 << 40) or n in (*SIZES[i : i + 1], *SIZES[: min(i, 2)])
            for i, n in enumerate(shape)):
        raise ValueError(f"shape: expected sizes, or {', '.join(SIZES)} in their places")
    return tuple(shape)


def _mark_from_data(entry: Mapping[str, Any]) -> WeightInput | StateInput | None:
    if "weight" in entry:
        name, kept, *among = entry["weight"]
        if not isinstance(name, str) or not isinstance(kept, str) or "state" in entry:
            raise ValueError("weight: expected a name and a format")
        return WeightInput(name, kept, *(_number(each) for each in among[:1]))
    if "state" in entry:
        layer, tensor, kind, window = entry["state"]
        if not isinstance(tensor, str) or kind not in STATE_KINDS:
            raise ValueError(f"state: expected a tensor, and a kind of {', '.join(STATE_KINDS)}")
        return StateInput(_number(layer), tensor, kind, _number(window, negative=True))
    return None


def _value_from_data(data: Any, nodes: Mapping[str, fx.Node], depth: int = 0) -> Any:
    if isinstance(data, str):
        if data[:1] != "%" or data[1:] not in nodes:
            raise ValueError(f"{data[:80]!r} is no value of a node before")
        return nodes[data[1:]]
    if isinstance(data, list) and depth < DEPTH:
        return [_value_from_data(each, nodes, depth + 1) for each in data]
    if isinstance(data, dict):
        (kind, value), = data.items() if len(data) == 1 else [("", "")]
        if kind not in _KINDS or not isinstance(value, str):
            raise ValueError(f"no value is {str(data)[:80]}")
        try:
            return _KINDS[kind](value)
        except KeyError:
            raise ValueError(f"{value[:80]!r} is no {kind} that a graph may have") from None
    if data is None or isinstance(data, bool | float):
        return data
    return _number(data, negative=True)


def _list(data: object, nodes: Mapping[str, fx.Node]) -> list[Any]:
    if not isinstance(data, list):
        raise ValueError("args must be a list")
    return [_value_from_data(each, nodes) for each in data]


def _number(data: object, negative: bool = False) -> int:
    if type(data) is not int or not (-(1 << 63) if negative else 0) <= data < 1 << 63:
        raise ValueError(f"expected a whole number, found {str(data)[:80]}")
    return data


def _only(entry: Mapping[str, Any], *known: str) -> None:
    unknown = set(entry) - set(known)
    if unknown:
        raise ValueError(f"unknown entry {str(sorted(unknown)[0])[:80]!r}")
