"""quantize_weights unpacks packed rows in the graph; fuse_dequantize folds that into products and lookups."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from tiny import Build, aten, flat_graph, run_graph
from torch import fx

from forebay.kernels import operators
from forebay.kernels.formats import row_sizes
from forebay.kernels.products.linear import operator as linear  # noqa: F401
from forebay.kernels.quantization.dequantize_rows import operator as dequantize_rows  # noqa: F401
from forebay.kernels.quantization.quantize.cpu import quantize_rows
from forebay.passes.quantize.quantize_weights import fuse_dequantize, quantize_weights
from forebay.rewriter.capture.concretise import concretise
from forebay.rewriter.ir.graph import META, RowFormat, WeightInput


def stored(weight: torch.Tensor, bits: int = 4, group: int = 32, transposed: bool = False) -> tuple:
    """A weight's format and its packed rows."""
    matrix = weight.T.contiguous() if transposed else weight
    n, k = matrix.shape
    form = RowFormat(f"w{bits}g{group}", bits, group, torch.float16, k, n, row_sizes.row_nbytes(k, bits, group),
                     weight.dtype, transposed)
    return form, quantize_rows(matrix, bits, group)


def packed_graph(build: Build, inputs: Mapping[str, torch.Tensor], weights: Mapping[str, torch.Tensor], **how: int
                 ) -> tuple[fx.GraphModule, dict[str, torch.Tensor], list[torch.Tensor]]:
    """The graph with its weights packed, their rows, and what it computes with the values these stand for."""
    made = {name: stored(w, transposed=name == "t0", **how) for name, w in weights.items()}  # type: ignore[arg-type]
    gm = flat_graph(build, inputs, weights)
    quantize_weights(gm, {name: form for name, (form, _) in made.items()})
    values = {name: operators.DEQUANTIZE_ROWS.overload(
        rows, f.in_features, f.bits, f.group_size, f.scale_dtype, f.dtype, f.transposed)
        for name, (f, rows) in made.items()}
    return gm, {name: rows for name, (_, rows) in made.items()}, run_graph(flat_graph(build, inputs, weights), inputs,
                                                                           values)


def targets(gm: fx.GraphModule) -> list[str]:
    return [str(n.target) for n in gm.graph.nodes if n.op == "call_function"]


def products(graph: fx.Graph, n: Mapping[str, fx.Node]) -> object:
    """A table looked up, a plain product, one with all that may follow, and GPT-2's x W + b."""
    x = graph.call_function(aten.embedding.default, (n["table"], n["ids"]))
    y = graph.call_function(aten.linear.default, (x, n["w0"], n["b0"]))
    z = graph.call_function(operators.LINEAR.overload, (y, n["w1"], None, x, x, "silu"))
    flat = graph.call_function(aten.view.default, (z, [6, 64]))
    return (graph.call_function(aten.addmm.default, (n["b1"], flat, n["t0"])),)


def model() -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    g = torch.Generator().manual_seed(0)
    inputs = {"ids": torch.tensor([[1, 5, 2], [0, 5, 9]]), "b0": torch.randn(64, generator=g),
              "b1": torch.randn(40, generator=g)}
    weights = {"table": torch.randn(12, 64, generator=g), "w0": torch.randn(64, 64, generator=g) / 8,
               "w1": torch.randn(64, 64, generator=g) / 8, "t0": torch.randn(64, 40, generator=g) / 8}
    return inputs, weights


@pytest.mark.parametrize(("bits", "group"), [(4, 32), (8, 64)])
def test_folded_and_unfolded_compute_the_same(bits: int, group: int) -> None:
    inputs, weights = model()
    gm, rows, expected = packed_graph(products, inputs, weights, bits=bits, group=group)
    gm.graph.lint()
    assert targets(gm).count("forebay.dequantize_rows.default") == 4
    for node in gm.graph.find_nodes(op="placeholder"):
        if node.target in weights:
            assert node.meta["val"].dtype == torch.uint8 and node.meta[META] == WeightInput(node.target,
                                                                                           f"w{bits}g{group}")
    torch.testing.assert_close(run_graph(gm, inputs, rows)[0], expected[0], rtol=1e-5, atol=1e-5)
    fuse_dequantize(gm)
    gm.graph.lint()
    found = targets(gm)
    assert found.count("forebay.linear_q.default") == 3 and "aten.addmm.default" not in found
    assert found.index("aten.embedding.default") < found.index("forebay.dequantize_rows.default"), "rows, then values"
    assert found.count("forebay.dequantize_rows.default") == 1
    torch.testing.assert_close(run_graph(gm, inputs, rows)[0], expected[0], rtol=1e-3, atol=1e-3)
    sizes = {n.name: torch.empty_like((inputs | rows)[n.target], device="meta")
             for n in gm.graph.find_nodes(op="placeholder")}
    out = concretise(gm, sizes).graph.output_node().args[0][0]  # type: ignore[index]
    assert out.meta["val"].shape == expected[0].shape  # type: ignore[union-attr]


def test_what_no_product_consumes_stays_unpacked_apart() -> None:
    """A weight that is added, and a stored transpose under x W^T, compute right without being folded."""
    def build(graph: fx.Graph, n: Mapping[str, fx.Node]) -> object:
        y = graph.call_function(aten.linear.default, (n["x"], n["t0"]))
        return (graph.call_function(aten.add.Tensor, (y, n["w0"])),)

    inputs = {"x": torch.randn(32, 32)}
    gm, rows, expected = packed_graph(build, inputs, {"t0": torch.randn(32, 32), "w0": torch.randn(32, 32)})
    before = targets(gm)
    fuse_dequantize(gm)
    assert targets(gm) == before and before.count("forebay.dequantize_rows.default") == 2
    torch.testing.assert_close(run_graph(gm, inputs, rows)[0], expected[0], rtol=1e-5, atol=1e-5)


def test_products_read_the_rows_of_all_experts_or_of_one() -> None:
    """A matrix of each expert, flattened, taken apart, and whole."""
    def build(graph: fx.Graph, n: Mapping[str, fx.Node]) -> object:
        flat = graph.call_function(aten.flatten.using_ints, (n["e0"], 0, 1))
        every = graph.call_function(aten.linear.default, (n["x"], flat))
        own = [graph.call_function(aten.linear.default, (n["x"], graph.call_function(
            aten.select.int, (n["e0"], 0, expert)))) for expert in (2, 0)]
        return (every, *own, graph.call_function(aten.mul.Tensor, (n["e1"], 2)))

    inputs, (form, rows) = {"x": torch.randn(5, 32)}, stored(torch.randn(24, 32))
    gm = flat_graph(build, inputs, {name: torch.empty(3, 8, 32) for name in ("e0", "e1")})
    quantize_weights(gm, {"e0": form, "e1": form})
    fuse_dequantize(gm)
    gm.graph.lint()
    found = targets(gm)
    assert found.count("forebay.linear_q.default") == 3 and found.count("forebay.dequantize_rows.default") == 1
    values = operators.DEQUANTIZE_ROWS.overload(rows, 32, 4, 32, torch.float16, torch.float32, False).view(3, 8, 32)
    x = inputs["x"]
    expected = (x @ values.flatten(0, 1).T, x @ values[2].T, x @ values[0].T, 2 * values)
    for got, want in zip(run_graph(gm, inputs, {"e0": rows, "e1": rows}), expected, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(("width", "group"), [(48, 16), (64, 48), (64, 8)])
def test_rows_that_products_do_not_read_stay_unpacked_apart(width: int, group: int) -> None:
    def build(graph: fx.Graph, n: Mapping[str, fx.Node]) -> object:
        return (graph.call_function(aten.linear.default, (n["x"], n["w0"])),)

    gm, *_ = packed_graph(build, {"x": torch.randn(5, width)}, {"w0": torch.randn(8, width)}, group=group)
    before = targets(gm)
    fuse_dequantize(gm)
    assert targets(gm) == before == ["forebay.dequantize_rows.default", "aten.linear.default"]


def test_other_weights_are_left_alone() -> None:
    inputs, weights = model()
    gm = flat_graph(products, inputs, weights)
    before = targets(gm)
    quantize_weights(gm, {"elsewhere": stored(torch.randn(32, 32))[0]})
    fuse_dequantize(gm)
    assert targets(gm) == before
