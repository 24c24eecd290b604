"""insert_transfers makes every read of a streamed weight a fetch, tiled where the plan says so."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from tiny import Tiny, aten, chain, placements, plan_for, run_graph, tiny
from torch import fx

from forebay.passes.place.insert_transfers import insert_transfers
from forebay.rewriter.ir import ops
from forebay.rewriter.ir.graph import META, Transfer, weight_name
from forebay.rewriter.ir.products import tileable

TRANSFERS = (ops.fetch, ops.release, ops.gather_rows, ops.new_output, ops.linear_tile, ops.matmul_tile)


def targets(gm: fx.GraphModule) -> list[str]:
    return [getattr(n.target, "__name__", str(n.target)) for n in gm.graph.nodes if n.op == "call_function"]


def rewritten(model: Tiny, stream: Mapping[str, int | str], slots: int = 2) -> fx.GraphModule:
    gm = model.graph()
    insert_transfers(gm, plan_for(placements(model, stream), slots))
    gm.graph.lint()
    return gm


def assert_same(model: Tiny, gm: fx.GraphModule, exact: bool = True) -> None:
    for ours, expected in zip(run_graph(gm, model.inputs, model.weights), model.expected(), strict=True):
        if exact:
            assert torch.equal(ours, expected)
        else:
            torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)


def assert_nothing_reads_streamed(model: Tiny, gm: fx.GraphModule, stream: Mapping[str, int | str]) -> None:
    for node in gm.graph.nodes:
        for operand in node.all_input_nodes:
            if weight_name(operand) in stream:
                assert node.target in (ops.fetch, ops.gather_rows), f"{node} reads {operand}"


def two_products(folder: Path, *, transposed: bool = False) -> Tiny:
    """y = x W + b in OPT's and in GPT-2's orientation, one weight used by two products, a lookup in a tied table."""
    generator = torch.Generator().manual_seed(3)
    weights = {
        "table": torch.randn(20, 8, generator=generator), "w": torch.randn(8, 8, generator=generator),
        "b": torch.randn(8, generator=generator),
    }
    inputs = {"ids": torch.tensor([[1, 19, 0], [4, 4, 7]])}

    def build(graph: fx.Graph, nodes: Mapping[str, fx.Node]) -> object:
        x = graph.call_function(aten.embedding.default, (nodes["table"], nodes["ids"]))
        x = graph.call_function(aten.view.default, (x, [6, 8]))
        if transposed:
            x = graph.call_function(aten.addmm.default, (nodes["b"], x, nodes["w"]))
            x = graph.call_function(aten.mm.default, (x, nodes["w"]))
        else:
            x = graph.call_function(aten.linear.default, (x, nodes["w"], nodes["b"]))
            x = graph.call_function(aten.linear.default, (x, nodes["w"]))
        return (graph.call_function(aten.linear.default, (x, nodes["table"])),)

    return tiny(folder, build, inputs, weights)


def test_one_fetch_and_one_release_around_each_use(tmp_path: Path) -> None:
    model = chain(tmp_path)
    gm = rewritten(model, {"w0": 0, "w1": 0, "w2": 0})
    assert targets(gm) == ["fetch", "linear.default", "release", "relu.default"] * 3
    marks = [n.meta[META] for n in gm.graph.nodes if n.target is ops.fetch]
    assert marks == [Transfer(i, f"w{i}", 0, 32, i % 2) for i in range(3)]
    assert_nothing_reads_streamed(model, gm, {"w0": 0, "w1": 0, "w2": 0})
    assert_same(model, gm)


@pytest.mark.parametrize(("tile_rows", "tiles"), [(32, 1), (31, 2), (16, 2), (11, 3), (1, 32)])
def test_product_is_split_into_row_tiles(tmp_path: Path, tile_rows: int, tiles: int) -> None:
    model = chain(tmp_path, layers=1)
    gm = rewritten(model, {"w0": tile_rows})
    fetches = [n for n in gm.graph.nodes if n.target is ops.fetch]
    assert len(fetches) == tiles
    rows = [(n.args[1], n.args[2]) for n in fetches]
    assert rows[0][0] == 0 and rows[-1][1] == 32
    assert all(a[1] == b[0] for a, b in itertools.pairwise(rows))
    assert all(tuple(n.meta["val"].shape) == (n.args[2] - n.args[1], 32) for n in fetches)
    assert all(0 < upper - lower <= tile_rows for lower, upper in rows)
    assert_same(model, gm, exact=False)


@pytest.mark.parametrize("transposed", [False, True])
def test_every_orientation_tiles_and_a_tied_table_is_one_weight(tmp_path: Path, transposed: bool) -> None:
    """The head's table is looked up by row, and fetched in tiles for the product: one weight, never held twice."""
    model = two_products(tmp_path, transposed=transposed)
    stream = {"w": 3, "table": 7}
    ways = placements(model, stream)
    ways["table"] = type(ways["table"])("table", "disk", ways["table"].nbytes, tile_rows=7, gather=True)
    gm = model.graph()
    insert_transfers(gm, plan_for(ways))
    gm.graph.lint()
    assert targets(gm).count("gather_rows") == 1
    assert targets(gm).count("fetch") == 2 * 3 + 3  # both products of w, and the head
    assert "embedding.default" not in targets(gm)
    assert_nothing_reads_streamed(model, gm, stream)
    assert_same(model, gm, exact=False)


def test_views_of_a_tiled_result_and_of_a_fetched_weight_follow(tmp_path: Path) -> None:
    weights = {"w": torch.randn(6, 4), "s": torch.randn(6, 6)}
    inputs = {"x": torch.randn(2, 3, 4)}

    def build(graph: fx.Graph, nodes: Mapping[str, fx.Node]) -> object:
        y = graph.call_function(aten.linear.default, (nodes["x"], nodes["w"]))
        view = graph.call_function(aten.view.default, (y, [6, 6]))
        turned = graph.call_function(aten.t.default, (nodes["s"],))
        return (graph.call_function(aten.add.Tensor, (view, turned)),)

    model = tiny(tmp_path, build, inputs, weights)
    stream = {"w": 4, "s": 0}
    gm = rewritten(model, stream, slots=2)
    nodes = {str(n.target): n for n in gm.graph.nodes}
    made = next(n for n in gm.graph.nodes if n.target is ops.new_output)
    fetched = next(n for n in gm.graph.nodes if n.target is ops.fetch and weight_name(n.args[0]) == "s")
    assert nodes["aten.view.default"].meta["alias_of"] is made
    assert nodes["aten.t.default"].meta["alias_of"] is fetched
    order = list(gm.graph.nodes)
    release = next(n for n in fetched.users if n.target is ops.release)
    assert order.index(release) > order.index(nodes["aten.add.Tensor"]), "released while a view is still read"
    assert_nothing_reads_streamed(model, gm, stream)


def test_nothing_changes_where_everything_is_resident(tmp_path: Path) -> None:
    model = chain(tmp_path)
    before = [(n.op, n.target, str(n.args)) for n in model.graph().graph.nodes]
    gm = rewritten(model, {})
    assert [(n.op, n.target, str(n.args)) for n in gm.graph.nodes] == before


def test_a_tile_as_large_as_the_weight_is_no_tile(tmp_path: Path) -> None:
    gm = rewritten(chain(tmp_path, layers=1), {"w0": 32})
    assert "linear_tile" not in targets(gm)


def test_products_that_cannot_be_tiled_are_left_whole(tmp_path: Path) -> None:
    """x @ W where W is also the other operand, a bias that is a matrix, and a weight on the left."""
    weights = {"w": torch.randn(4, 4)}
    inputs = {"x": torch.randn(4, 4)}

    def build(graph: fx.Graph, nodes: Mapping[str, fx.Node]) -> object:
        w, x = nodes["w"], nodes["x"]
        square = graph.call_function(aten.mm.default, (w, w))
        left = graph.call_function(aten.mm.default, (w, x))
        biased = graph.call_function(aten.addmm.default, (x, square, w))
        return (graph.call_function(aten.add.Tensor, (left, biased)),)

    model = tiny(tmp_path, build, inputs, weights)
    graph = model.graph()
    w = next(n for n in graph.graph.nodes if weight_name(n) == "w")
    assert not any(tileable(user, w) for user in w.users)
    gm = rewritten(model, {"w": 1})
    assert [t for t in targets(gm) if t in ("fetch", "release")] == ["fetch", "release"]
    assert_same(model, gm)


def test_product_of_rows_that_do_not_lie_evenly_is_left_whole(tmp_path: Path) -> None:
    """A tile reads its operand where it lies; [2, 3 of 5, 4] is no matrix, [2, 1 of 5, 4] is one."""

    def build(graph: fx.Graph, nodes: Mapping[str, fx.Node]) -> object:
        parts = [graph.call_function(aten.slice.Tensor, (nodes["x"], 1, 1, end)) for end in (4, 2)]
        return tuple(graph.call_function(aten.linear.default, (part, nodes["w"])) for part in parts)

    model = tiny(tmp_path, build, {"x": torch.randn(2, 5, 4)}, {"w": torch.randn(6, 4)})
    gm = rewritten(model, {"w": 4})
    assert targets(gm).count("linear_tile") == 2 and targets(gm).count("linear.default") == 1
    assert_same(model, gm, exact=False)


def test_everything_inserted_is_stamped(tmp_path: Path) -> None:
    gm = rewritten(two_products(tmp_path), {"w": 3, "table": 0})
    made = [n for n in gm.graph.nodes if n.target in TRANSFERS]
    assert made and all(n.meta["made_by"] == "insert_transfers" and "val" in n.meta and "layer" in n.meta for n in made)


def test_a_weight_the_plan_does_not_name_is_resident(tmp_path: Path) -> None:
    """A constant has no placement; it never streams."""
    model = chain(tmp_path)
    ways = placements(model, {"w0": 0})
    del ways["b1"]
    gm = model.graph()
    insert_transfers(gm, plan_for(ways))
    assert targets(gm).count("fetch") == 1


def test_a_weight_read_far_apart_is_fetched_for_each_reader(tmp_path: Path) -> None:
    """Its slot is wanted in between; with a slot more it is held. Views of it are made of each fetch."""
    weights = {name: torch.randn(8, 8, generator=torch.Generator().manual_seed(i)) for i, name in enumerate("abc")}

    def build(graph: fx.Graph, nodes: Mapping[str, fx.Node]) -> object:
        x = graph.call_function(aten.mul.Tensor, (nodes["x"], nodes["a"]))
        for name in "bc":
            x = graph.call_function(aten.mul.Tensor, (x, nodes[name]))
        turned = graph.call_function(aten.t.default, (nodes["a"],))
        return (graph.call_function(aten.mul.Tensor, (x, turned)),)

    model = tiny(tmp_path, build, {"x": torch.ones(8, 8)}, weights)
    for slots, fetches in ((1, 4), (2, 4), (3, 3)):
        gm = rewritten(model, dict.fromkeys("abc", 0), slots)
        marks = [n.meta[META].weight for n in gm.graph.nodes if n.target is ops.fetch]
        assert len(marks) == fetches and marks[:3] == ["a", "b", "c"] and marks[3:] == ["a"] * (fetches - 3)
        assert_nothing_reads_streamed(model, gm, dict.fromkeys("abc", 0))
        assert_same(model, gm)
