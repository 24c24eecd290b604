"""Memory of several micro-batches: what outlives a turn lies apart, and nothing that lives meets another."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny import aten, flat_graph
from torch import fx

from forebay.passes.allocators import Buffer
from forebay.passes.place.allocate_buffers import plan_activations
from forebay.passes.place.arrange_block import arrange
from forebay.rewriter.ir.schedule.batch_schedule import BatchSchedule
from forebay.rewriter.ir.schedule.micro_batches import MicroBatches

buffers = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 5), st.integers(1, 300), st.sampled_from("sob")),
                   min_size=1, max_size=8)


@given(buffers, st.integers(1, 4))
def test_no_byte_is_needed_twice(parts: list[tuple[int, int, int, str]], count: int) -> None:
    requests = [Buffer(f"b{i}", first, first + length + 1, -(-nbytes // 64) * 64)
                for i, (first, length, nbytes, _) in enumerate(parts)]
    exact = {f"b{i}": nbytes for i, (_, _, nbytes, _) in enumerate(parts)}
    kinds = {f"b{i}": kind for i, (*_, kind) in enumerate(parts)}  # shared in turn, outliving turns, boundary
    boundary, outlive = ({n for n, kind in kinds.items() if kind == which} for which in "bo")
    found = arrange(requests, boundary, outlive, exact, BatchSchedule(MicroBatches(count)))
    live = {r.id: (r.lower, r.upper) for r in requests}
    for (a, base_a, at_a, n_a), (b, base_b, at_b, n_b) in itertools.combinations(found.places, 2):
        if at_a + n_a <= at_b or at_b + n_b <= at_a:
            continue
        assert count == 1 or kinds[base_a] == kinds[base_b] != "b", f"{a} meets {b}"
        assert a.partition("@")[2] == b.partition("@")[2], f"{a} meets {b} of another micro-batch"
        assert live[base_a][1] <= live[base_b][0] or live[base_b][1] <= live[base_a][0], f"{a} meets {b}"
    assert all(at >= 0 and at + n <= found.height for _, _, at, n in found.places)
    own = sum(kind == "o" for kind in kinds.values())
    assert len(found.places) == len(requests) + (count - 1) * own * (count > 1)
    for name, base, _, nbytes in found.places:
        assert nbytes == exact[base] * (count if base in boundary else 1), name


def layers(graph: fx.Graph, nodes: Mapping[str, fx.Node]) -> object:
    """Two layers of (sigmoid(relu(x)) + x) W, and an operator behind them."""
    x = nodes["x"]
    for i in range(2):
        first = graph.call_function(aten.relu.default, (x,))
        inner = graph.call_function(aten.sigmoid.default, (first,))
        total = graph.call_function(aten.add.Tensor, (inner, x))
        x = graph.call_function(aten.linear.default, (total, nodes[f"w{i}"]))
        for node in (first, inner, total, x):
            node.meta["layer"] = i
    return (graph.call_function(aten.tanh.default, (x,)),)


def test_what_crosses_a_layer_lies_apart_and_the_rest_is_shared() -> None:
    gm = flat_graph(layers, {"x": torch.randn(2, 8)}, {f"w{i}": torch.randn(8, 8) for i in range(2)})
    one = plan_activations(gm, True)
    row, zigzag = (plan_activations(gm, True, BatchSchedule(MicroBatches(3, order))) for order in ("row", "zigzag"))  # type: ignore[arg-type]
    assert not any("@" in name for name in (*one.buffers, *row.buffers))
    apart = {name.partition("@")[0] for name in zigzag.buffers if "@" in name}
    shared = set(zigzag.buffers) - {f"{name}@{k}" for name in apart for k in range(3)}
    handed_on = {zigzag.home[n.name, 0] for n in gm.graph.nodes if n.target is aten.linear.default}
    assert apart == handed_on - {n for n, b in zigzag.buffers.items() if b.kind == "io"}
    first = next(n for n in gm.graph.nodes if n.target is aten.relu.default)
    assert zigzag.home[first.name, 0] in shared and len(zigzag.buffers) == len(shared) + 3 * len(apart)
    assert len(apart) == 1
    for name in ("x", one.home[gm.graph.output_node().all_input_nodes[0].name, 0]):
        assert zigzag.buffers[name].nbytes == row.buffers[name].nbytes == 3 * one.buffers[name].nbytes
