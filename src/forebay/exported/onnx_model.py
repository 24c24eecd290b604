"""A captured language model as an ONNX model: prefill and decode in one graph, inputs and outputs as others name them.

input_ids, attention_mask [batch, total], position_ids, past_key_values.N.key and .value [batch, kv_heads, past, head]
in, logits [batch, sequence, vocab], present.N.key and .value out. Tensors lie in a file beside, each at a
page boundary.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import onnx
import torch
from torch import fx

import forebay
from forebay.exported.errors import ExportError
from forebay.exported.onnx_aten import meaning_of
from forebay.exported.onnx_graph import Graph, value_info
from forebay.exported.onnx_merged import beside, merged
from forebay.kernels.formats import packing
from forebay.kernels.onnx_meaning import Dialect, OnnxValue, Parts
from forebay.kernels.operators import of_target
from forebay.rewriter.checkpoints.checkpoint import Progress
from forebay.rewriter.checkpoints.named_errors import naming
from forebay.rewriter.checkpoints.packed_writer import PendingTensor
from forebay.rewriter.checkpoints.write_tensors import FLUSH_NBYTES, require_free
from forebay.rewriter.ir.graph import META, CacheInput, CapturedModel, RowFormat, WeightInput, values_of

MODEL, DATA = "model.onnx", "model.onnx.data"
UNKNOWN = "of the step: "  # begins the name of an input that the ONNX model has not
aten = torch.ops.aten


def write_onnx(
    out: Path, captured: CapturedModel, items: Mapping[str, PendingTensor], dialect: Dialect, int8_activations: bool,
    progress: Progress | None, check: Callable[[], None],
) -> None:
    """Write model.onnx and model.onnx.data into `out`: `captured` (rewritten, steps giving "all" logits) with the
    weights `items`, one piece of a tensor at a time. ExportError names an operator without a meaning, and its layer."""
    g = Graph(dialect, int8_activations)
    g.file = DATA
    logits = _Conversion(g, captured, items).step()
    g.nodes.append(onnx.helper.make_node("Identity", [logits], ["logits"]))
    model = g.model(*_interface(captured), ("forebay", forebay.__version__))
    odd = sorted({name for node in model.graph.node for name in node.input if name.startswith(UNKNOWN)})
    if odd:
        raise ExportError(f"the model computes with the number of tokens ({odd[0].removeprefix(UNKNOWN)}) itself, "
                          "which is no input of an ONNX model: positions alone are; export the model as a bundle")
    require_free(out, g.data_nbytes)
    _write_data(out / DATA, g, progress)
    check()
    onnx.save(model, out / MODEL)
    onnx.checker.check_model(out / MODEL)


def _interface(captured: CapturedModel) -> tuple[list[Any], list[Any]]:
    ids = torch.int64
    inputs = [value_info("input_ids", ids, ("batch", "sequence")),
              value_info("attention_mask", ids, ("batch", "total")),
              value_info("position_ids", ids, ("batch", "sequence"))]
    outputs = [value_info("logits", captured.dtype, ("batch", "sequence", captured.vocab_size))]
    for i, spec in enumerate(captured.cache):
        for side in ("key", "value"):
            inputs.append(value_info(f"past_key_values.{i}.{side}", spec.dtype,
                                     ("batch", spec.kv_heads, "past", spec.head_dim)))
            outputs.append(value_info(f"present.{i}.{side}", spec.dtype,
                                      ("batch", spec.kv_heads, "present", spec.head_dim)))
    return inputs, outputs


def _write_data(path: Path, g: Graph, progress: Progress | None) -> None:
    with naming(path), open(path, "wb", buffering=0) as file:
        fd, unflushed = file.fileno(), 0
        os.ftruncate(fd, g.data_nbytes)
        for offset, read in g.data:
            at = offset
            for piece in read():
                view = piece.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
                at, unflushed = at + view.nbytes, unflushed + view.nbytes
                start = at - view.nbytes
                while view:
                    count = os.pwrite(fd, view[:FLUSH_NBYTES], start)
                    view, start = view[count:], start + count
                if unflushed >= FLUSH_NBYTES:
                    os.fsync(fd)
                    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
                    unflushed = 0
                if progress is not None:
                    progress(at, g.data_nbytes)
        os.fsync(fd)


class _Conversion:
    """One walk over a captured model."""

    def __init__(self, g: Graph, captured: CapturedModel, items: Mapping[str, PendingTensor]) -> None:
        self.g, self.captured, self.items = g, captured, items
        self.made: dict[fx.Node, Any] = {}  # what a product made of the products beside it

    def step(self) -> OnnxValue:
        env: dict[fx.Node, Any] = {}
        for node in self.captured.step.graph.find_nodes(op="placeholder"):
            env[node] = self._input(node)
        return self._graph(self.captured.step.graph, env, "the model outside its layers")

    def _graph(self, graph: fx.Graph, env: dict[fx.Node, Any], where: str) -> Any:
        for node in graph.nodes:
            if node.op == "output":
                return env[node.args[0]]
            if node.op == "call_module":
                layer = node.meta["layer"]
                block: Any = self.captured.step.get_submodule(str(node.target))
                given = zip(block.graph.find_nodes(op="placeholder"), (env[a] for a in node.args), strict=True)
                inner = {placeholder: _within(placeholder, value) for placeholder, value in given}
                self.g.prefix = f"layer.{layer}/"
                env[node] = _described(node, self._graph(block.graph, inner, f"layer {layer}"))
                self.g.prefix = ""
            elif node.op == "call_function":
                env[node] = self._call(node, env, where)
        raise ExportError(f"{where} gives nothing")

    def _call(self, node: fx.Node, env: dict[fx.Node, Any], where: str) -> Any:
        if _is_positions(node):
            return OnnxValue("position_ids", torch.int64, (None, None))
        ours = of_target(node.target)
        meaning = meaning_of(node.target) if ours is None else ours.onnx
        reason = "" if meaning is not None else "it has none"
        if node in self.made:
            return self.made.pop(node)
        products = beside(node)
        joined = merged(self.g, products, env) if len(products) > 1 else None
        args, kwargs = fx.map_arg((node.args, node.kwargs), env.__getitem__)  # type: ignore[arg-type]
        made: Any = None
        if meaning is not None:
            try:
                made = meaning(self.g, *(args if joined is None else joined[0]), **kwargs)
            except NotImplementedError as error:
                reason = str(error)
        if reason:
            raise ExportError(f"{where} computes {node.target} ({node.name}), whose meaning in ONNX is not known "
                              f"({reason}); export the model as a bundle")
        if joined is not None:
            parts = self.g.op("Split", made, self.g.constant(joined[1]), outputs=len(products), axis=-1)
            self.made.update((other, _described(other, part)) for other, part in zip(products, parts, strict=True))
            return self.made.pop(node)
        return _described(node, made)

    def _input(self, node: fx.Node) -> Any:
        mark = node.meta.get(META)
        value = node.meta["val"]
        shape = [n if isinstance(n, int) else None for n in value.shape]
        if isinstance(mark, CacheInput):
            side = "key" if mark.side == "k" else "value"
            return OnnxValue(f"past_key_values.{mark.layer}.{side}", value.dtype, shape)
        if not isinstance(mark, WeightInput):
            return OnnxValue(node.name if node.name == "input_ids" else UNKNOWN + node.name, value.dtype, shape)
        if mark.name in self.captured.constants:
            constant = self.captured.constants[mark.name].detach()
            return self.g.weight(mark.name, constant.dtype, constant.shape, lambda: iter([constant]))
        item, stored = self.items[mark.name], self.captured.weights[mark.name].stored

        def contents() -> Iterator[torch.Tensor]:
            return item.pieces()[1]

        if stored is None:
            return self.g.weight(mark.name, item.dtype, item.shape, contents)
        return OnnxValue(mark.name, torch.uint8, item.shape, _parts(self.g, mark.name, stored, contents))


def _parts(
    g: Graph, name: str, stored: RowFormat, contents: Callable[[], Iterator[torch.Tensor]]
) -> Parts:
    """Codes [N, g, bytes], scales and lows [N, g] of packed rows, as tensors of the file."""
    groups = -(-stored.in_features // stored.group_size)
    nbytes = stored.group_size * stored.bits // 8

    def part(which: int) -> Callable[[], Iterator[torch.Tensor]]:
        return lambda: (packing.unpack_rows(rows, stored.in_features, stored.bits, stored.group_size,
                                            stored.scale_dtype)[which] for rows in contents())

    low = None if _is_symmetric(stored, contents) else g.weight(
        f"{name}.low", stored.scale_dtype, (stored.out_features, groups), part(2))
    return (g.weight(f"{name}.codes", torch.uint8, (stored.out_features, groups, nbytes), part(0)),
            g.weight(f"{name}.scale", stored.scale_dtype, (stored.out_features, groups), part(1)),
            low)


def _is_symmetric(stored: RowFormat, contents: Callable[[], Iterator[torch.Tensor]]) -> bool:
    """Whether the middle code stands for 0 in all groups; the first that differs ends the reading."""
    for rows in contents():
        _, scale, low = packing.unpack_rows(rows, stored.in_features, stored.bits, stored.group_size,
                                            stored.scale_dtype)
        if not torch.equal(low.float(), scale.float() * -(1 << (stored.bits - 1))):
            return False
    return True


def _is_positions(node: fx.Node) -> bool:
    """Whether it is start[:, None] + arange(S): the positions of the step's tokens, which are an input of the model."""
    if node.target is not aten.add.Tensor or len(node.args) != 2 or node.kwargs:
        return False
    first, second = node.args
    return (isinstance(first, fx.Node) and first.target is aten.unsqueeze.default and first.args[1:] == (1,)
            and first.args[0].name == "start" and first.args[0].op == "placeholder"  # type: ignore[union-attr]
            and isinstance(second, fx.Node) and second.target is aten.arange.default)


def _described(node: fx.Node, made: Any) -> Any:
    """What a meaning gave, with dtype and shape of the node's values."""
    if made is None:
        return None
    values = values_of(node)
    if isinstance(made, tuple):
        return tuple(_value(name, value) for name, value in zip(made, values, strict=True))
    return _value(made, values[0]) if values else OnnxValue(made, torch.int64, sizes=[str(node.meta.get("val"))])


def _within(placeholder: fx.Node, value: OnnxValue) -> OnnxValue:
    """An operand of a block with its sizes as the block's graph writes them."""
    if value.parts is not None:
        return value
    return OnnxValue(value, value.dtype, value.shape, None, [str(n) for n in placeholder.meta["val"].shape])


def _value(name: str, value: torch.Tensor) -> OnnxValue:
    parts = name.parts if isinstance(name, OnnxValue) else None
    return OnnxValue(name, value.dtype, [n if isinstance(n, int) else None for n in value.shape], parts,
                     [str(n) for n in value.shape])
