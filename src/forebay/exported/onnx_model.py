"""A captured language model as an ONNX model: prefill and decode in one graph, inputs and outputs as others name them.

input_ids, attention_mask [batch, total], position_ids, past_key_values.N.key and .value [batch, kv_heads, past, head]
in, logits [batch, sequence, vocab], present.N.key and .value out. In the form "static" no attention_mask is, and
past and present have one length, "room": a step writes its tokens at position_ids. Tensors lie in a file beside, each
at a page boundary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, cast

import onnx
import torch
from torch import fx

from forebay.exported.errors import ExportError
from forebay.exported.onnx_convert import Conversion
from forebay.exported.onnx_file import DATA, write_model
from forebay.exported.onnx_graph import Graph, value_info
from forebay.exported.position_table import position_table
from forebay.kernels.onnx_meaning import OnnxForm, OnnxValue, Parts
from forebay.rewriter.checkpoints.checkpoint import Progress
from forebay.rewriter.checkpoints.packed_writer import PendingTensor
from forebay.rewriter.ir.graph import META, CapturedModel, RowFormat, WeightInput
from forebay.rewriter.ir.state import KV_TENSORS, StateInput, kv_states
from forebay.version import package_version

ADVICE = "export the model as a bundle"
UNKNOWN = "of the step: "  # begins the name of an input that the ONNX model has not
aten = torch.ops.aten


def write_onnx(
    out: Path, captured: CapturedModel, items: Mapping[str, PendingTensor], form: OnnxForm, int8_activations: bool,
    progress: Progress | None, check: Callable[[], None],
) -> None:
    """Write model.onnx and model.onnx.data into `out`: `captured` (rewritten, steps giving "all" logits) with the
    weights `items`, one piece of a tensor at a time. ExportError names an operator without a meaning, and its layer."""
    g = Graph(form, int8_activations)
    g.file = DATA
    env = {node: _input(g, captured, items, node) for node in captured.step.graph.find_nodes(op="placeholder")}
    g.table_of = partial(_table, captured, env)
    logits = Conversion(g, ADVICE, _positions).convert(captured.step, env, "the model outside its layers")
    g.nodes.append(onnx.helper.make_node("Identity", [logits], ["logits"]))
    model = g.model(*_interface(captured, g.in_place), ("forebay", package_version()))
    odd = sorted({name for node in model.graph.node for name in node.input if name.startswith(UNKNOWN)})
    if odd:
        raise ExportError(f"the model computes with the number of tokens ({odd[0].removeprefix(UNKNOWN)}) itself, "
                          f"which is no input of an ONNX model: positions alone are; {ADVICE}")
    write_model(out, g, model, progress, check)


ONNX_NAMES = dict(zip(KV_TENSORS, ("key", "value"), strict=True))


def _interface(captured: CapturedModel, in_place: bool) -> tuple[list[Any], list[Any]]:
    ids = torch.int64
    inputs = [value_info("input_ids", ids, ("batch", "sequence")),
              *([] if in_place else [value_info("attention_mask", ids, ("batch", "total"))]),
              value_info("position_ids", ids, ("batch", "sequence"))]
    past, present = ("room", "room") if in_place else ("past", "present")
    outputs = [value_info("logits", captured.dtype, ("batch", "sequence", captured.vocab_size))]
    for i, spec in enumerate(kv_states(captured.states, "onnx")):
        for side in ONNX_NAMES.values():
            inputs.append(value_info(f"past_key_values.{i}.{side}", spec.dtype,
                                     ("batch", spec.kv_heads, past, spec.head_dim)))
            outputs.append(value_info(f"present.{i}.{side}", spec.dtype,
                                      ("batch", spec.kv_heads, present, spec.head_dim)))
    return inputs, outputs


def _input(g: Graph, captured: CapturedModel, items: Mapping[str, PendingTensor], node: fx.Node) -> OnnxValue:
    """Return the ONNX value for a placeholder of the step graph."""
    mark = node.meta.get(META)
    value = node.meta["val"]
    shape = [n if isinstance(n, int) else None for n in value.shape]
    if isinstance(mark, StateInput):
        side = ONNX_NAMES[mark.tensor]
        return OnnxValue(f"past_key_values.{mark.layer}.{side}", value.dtype, shape)
    if not isinstance(mark, WeightInput):
        return OnnxValue(node.name if node.name == "input_ids" else UNKNOWN + node.name, value.dtype, shape)
    if mark.name in captured.constants:
        constant = captured.constants[mark.name].detach()
        return g.weight(mark.name, constant.dtype, constant.shape, lambda: iter([constant]))
    item, stored = items[mark.name], captured.weights[mark.name].stored

    def contents() -> Iterator[torch.Tensor]:
        return item.pieces()[1]

    if stored is None:
        return g.weight(mark.name, item.dtype, item.shape, contents)
    return OnnxValue(mark.name, torch.uint8, item.shape, _parts(g, mark.name, stored, contents))


def _parts(
    g: Graph, name: str, stored: RowFormat, contents: Callable[[], Iterator[torch.Tensor]]
) -> Parts:
    """Codes [N, g, bytes], scales and lows [N, g] of packed rows, as tensors of the file."""
    if stored.codebook:
        raise ExportError(f"{name} is stored as {stored.name}, which ONNX has no operator for; quantize the model to "
                          "w4g32 or w8g32")
    groups = -(-stored.in_features // stored.group_size)
    nbytes = stored.group_size * stored.bits // 8

    def part(which: int) -> Callable[[], Iterator[torch.Tensor]]:
        return lambda: (cast(torch.Tensor, stored.packing().unpack(rows)[which]) for rows in contents())

    low = None if _is_symmetric(stored, contents) else g.weight(
        f"{name}.low", stored.scale_dtype, (stored.out_features, groups), part(2))
    return (g.weight(f"{name}.codes", torch.uint8, (stored.out_features, groups, nbytes), part(0)),
            g.weight(f"{name}.scale", stored.scale_dtype, (stored.out_features, groups), part(1)),
            low)


def _is_symmetric(stored: RowFormat, contents: Callable[[], Iterator[torch.Tensor]]) -> bool:
    """Return whether the middle code stands for 0 in all groups; the first that differs ends the reading."""
    for rows in contents() if not stored.symmetric else ():
        _, scale, low = stored.packing().unpack(rows)
        if low is None or not torch.equal(low.float(), scale.float() * -(1 << (stored.bits - 1))):
            return False
    return True


def _table(captured: CapturedModel, env: Mapping[fx.Node, Any], value: str) -> torch.Tensor | None:
    """Compute a value of the step for a token at each position, a row each, if it depends on positions alone."""
    node = next((n for n, made in env.items() if isinstance(made, OnnxValue) and str(made) == value), None)
    return None if node is None else position_table(captured, node)


def _positions(node: fx.Node) -> OnnxValue | None:
    """The model's input, where it is start[:, None] + arange(S): the positions of the step's tokens."""
    if node.target is not aten.add.Tensor or len(node.args) != 2 or node.kwargs:
        return None
    first, second = node.args
    found = (isinstance(first, fx.Node) and first.target is aten.unsqueeze.default and first.args[1:] == (1,)
            and first.args[0].name == "start" and first.args[0].op == "placeholder"  # type: ignore[union-attr]
            and isinstance(second, fx.Node) and second.target is aten.arange.default)
    return OnnxValue("position_ids", torch.int64, (None, None)) if found else None
