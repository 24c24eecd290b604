"""FOREBAY_BISECT: find the first pass after which a graph computes something else."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx

from forebay.kernels.formats.packing import pack_rows
from forebay.kernels.operators import DEQUANTIZE_ROWS
from forebay.kernels.quantization.quantize.operator import quantize
from forebay.kernels.quantization.quantize.reference import coded_rows
from forebay.rewriter.ir.graph import RowFormat, values_of, weight_name
from forebay.rewriter.verify.graph import SMALL

NamedTensors = Mapping[str, torch.Tensor]
RunStep = Callable[[NamedTensors, NamedTensors], list[torch.Tensor]]


class PassChangedResult(RuntimeError):
    """A pass changed what the graph computes; the message names it and the difference."""


class Bisection:
    """Holds random inputs and the outputs that the untouched graph gives for them. Weights that become packed rows in
    one of `formats` are random rows, and what these stand for."""

    def __init__(self, gm: fx.GraphModule, formats: Mapping[str, RowFormat] | None = None, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.inputs: dict[str, torch.Tensor] = {}
        self.rows: dict[str, torch.Tensor] = {}
        self.weights: dict[str, torch.Tensor] = {}  # by their names in the model
        for node in gm.graph.find_nodes(op="placeholder"):
            value = _random_like(node, generator)
            stored = (formats or {}).get(weight_name(node) or "")
            if stored is not None:
                self.rows[node.name], value = _packed(value, stored)
            self.inputs[node.name] = value
            if (name := weight_name(node)) is not None:
                self.weights[name] = value
        self.expected = self._run(gm)

    def _input(self, node: fx.Node) -> torch.Tensor:
        """A fresh copy of an input; of its rows once it is packed, of an empty cache of rows. One that a pass added is
        empty, or names the last place of a cache, which is nobody's."""
        wanted = values_of(node)[0]
        if node.name not in self.inputs:
            return torch.full(wanted.shape, 0 if wanted.is_floating_point() else SMALL[2] - 1, dtype=wanted.dtype)
        value = self.inputs[node.name]
        if value.dtype != wanted.dtype:
            value = self.rows.get(node.name, torch.zeros(wanted.shape, dtype=wanted.dtype))
        return value.clone()

    def _run(self, gm: fx.GraphModule) -> list[torch.Tensor]:
        inputs = [self._input(node) for node in gm.graph.find_nodes(op="placeholder")]
        with torch.no_grad():
            result = _Interpreter(gm).run(*inputs, enable_io_processing=False)
        flat, _ = torch.utils._pytree.tree_flatten(result)
        return [t for t in flat if isinstance(t, torch.Tensor)]

    def compare(self, gm: fx.GraphModule, name: str, rounds: bool = False) -> None:
        """Raise PassChangedResult if `gm` gives other outputs than the graph did before all passes. A pass that
        `rounds` to a format may move them by 0.3 of the largest; what they are then is what later passes must give."""
        self._hold(self._run(gm), name, rounds)

    def compare_step(self, run: RunStep, name: str) -> None:
        """Raise PassChangedResult if the lowered step, which `run` runs on weights and inputs by name, gives other
        outputs than the graph did."""
        self._hold(run(self.weights, self.inputs), name)

    def _hold(self, found: list[torch.Tensor], name: str, rounds: bool = False) -> None:
        for i, (a, b) in enumerate(zip(self.expected, found, strict=True)):
            scale = a.float().nan_to_num().abs().max().item() or 1.0
            known = ~(a.isnan() & b.isnan())  # random weights can make a variance negative
            error = ((a.float() - b.float()).abs()[known].max().item() if known.any() else 0.0) / scale
            if not error <= (0.3 if rounds else 1e-4 if a.dtype == torch.float32 else 2e-2):
                raise PassChangedResult(f"FOREBAY_BISECT: {name} is the first pass that changes the result: output {i} "
                                        f"differs by {error:.2e} of its largest value")
        if rounds:
            self.expected = found


class _Interpreter(fx.Interpreter):
    """Reads block graphs as they are now, not as they were when their Python was written."""

    def call_module(self, target: Any, args: tuple, kwargs: dict) -> Any:
        block = self.fetch_attr(target)
        return fx.Interpreter(block).run(*args, enable_io_processing=False)


def _random_like(node: fx.Node, generator: torch.Generator) -> torch.Tensor:
    value = values_of(node)[0]
    if value.dtype.is_floating_point:
        return torch.randn(value.shape, generator=generator).mul_(0.05).to(value.dtype)
    return torch.zeros(value.shape, dtype=value.dtype)


def _packed(value: torch.Tensor, stored: RowFormat) -> tuple[torch.Tensor, torch.Tensor]:
    """A weight as packed rows, and the weight that these stand for."""
    matrix = value.mT if stored.transposed else value
    if stored.codebook:
        rows = coded_rows(matrix.float(), stored.bits, stored.group_size, stored.symmetric, stored.codebook)
        return rows, DEQUANTIZE_ROWS.overload(rows, *_unpacking(stored))
    rounding = "symmetric" if stored.symmetric else "minmax"
    codes, scale, low = quantize(matrix.contiguous(), stored.bits, stored.group_size, 1, stored.scale_dtype, rounding)
    rows = pack_rows(codes, scale, None if stored.symmetric else low)
    return rows, DEQUANTIZE_ROWS.overload(rows, *_unpacking(stored))


def _unpacking(stored: RowFormat) -> tuple[Any, ...]:
    """Arguments of the unpacking of such rows."""
    return (stored.in_features, stored.bits, stored.group_size, stored.scale_dtype, stored.dtype, stored.transposed,
            stored.symmetric, stored.codebook)
