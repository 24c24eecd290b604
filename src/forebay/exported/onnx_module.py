"""A traced module as an ONNX model: inputs and results by the names that it gives them, sizes that vary by theirs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx
import torch
from torch import fx

from forebay.exported.errors import ExportError
from forebay.exported.modules import TracedModule
from forebay.exported.onnx_convert import Conversion
from forebay.exported.onnx_file import DATA, write_model
from forebay.exported.onnx_graph import TYPES, Graph, value_info
from forebay.kernels.onnx_meaning import OnnxForm, OnnxValue
from forebay.rewriter.checkpoints.checkpoint import Progress
from forebay.rewriter.ir.graph import META, WeightInput
from forebay.version import package_version


def write_module(out: Path, traced: TracedModule, form: OnnxForm, progress: Progress | None) -> None:
    """Write model.onnx and its tensors into `out`. ExportError names an operator without a meaning, and its module."""
    g = Graph(form)
    g.file = DATA
    env: dict[fx.Node, Any] = {}
    names: dict[str, str] = {}  # of sizes that vary
    inputs = []
    for node in traced.gm.graph.find_nodes(op="placeholder"):
        mark, value = node.meta.get(META), node.meta.get("val")
        if isinstance(mark, WeightInput):
            held = traced.weights[mark.name]
            env[node] = g.weight(mark.name, held.dtype, held.shape, lambda held=held: iter([held]))  # type: ignore[misc]
        elif isinstance(value, torch.Tensor):
            if value.dtype not in TYPES:
                raise ExportError(f"the input {node.name} is {value.dtype}, which ONNX models here have not")
            known = [n if isinstance(n, int) else None for n in value.shape]
            env[node] = OnnxValue(node.name, value.dtype, known, None, [str(n) for n in value.shape])
            inputs.append(value_info(node.name, value.dtype, _shape(node.name, value, names)))
        else:
            env[node] = value
    made = Conversion(g, "export the module as pt2").convert(traced.gm, env, "")
    outputs = []
    for name, found, node in zip(traced.results, made, traced.gm.graph.output_node().args[0], strict=True):  # type: ignore[arg-type]
        if isinstance(node, fx.Node):
            g.nodes.append(onnx.helper.make_node("Identity", [g.used(found)], [name]))
            outputs.append(value_info(name, node.meta["val"].dtype, _shape(name, node.meta["val"], names)))
    write_model(out, g, g.model(inputs, outputs, ("forebay", package_version())), progress, lambda: None)


def _shape(name: str, value: torch.Tensor, names: dict[str, str]) -> list[int | str]:
    """A size that varies goes by the first input's that has it."""
    return [n if isinstance(n, int) else names.setdefault(str(n), f"{name}_{i}") for i, n in enumerate(value.shape)]
