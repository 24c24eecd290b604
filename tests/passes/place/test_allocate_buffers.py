"""allocate_buffers gives every value memory of its exact size for exactly as long as someone reads it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from selection import examples
from tiny import Tiny, allocated, aten, chain, flat_graph, placements, plan_for, run_program, tiny
from torch import fx

from forebay.kernels import operators
from forebay.passes.lower.lower import lower
from forebay.passes.lower.out_variants import mutated_arguments, out_variant
from forebay.passes.lower.place_copies import place_copies
from forebay.passes.place.allocate_buffers import allocate_buffers, plan_activations
from forebay.passes.place.insert_transfers import insert_transfers
from forebay.rewriter.ir.alignment import ALIGNMENT
from forebay.rewriter.ir.graph import META, Layout, storage_of, values_of
from forebay.rewriter.ir.plan import Plan, PlanError
from forebay.rewriter.verify.program import verify_program


def graph_of(build: object, **inputs: torch.Tensor) -> fx.GraphModule:
    return flat_graph(build, inputs, {})  # type: ignore[arg-type]


def assert_no_overlap(layout: Layout) -> None:
    buffers = list(layout.buffers.values())
    for i, a in enumerate(buffers):
        assert a.offset >= 0
        for b in buffers[i + 1 :]:
            together = a.first <= b.last and b.first <= a.last
            apart = a.offset + a.nbytes <= b.offset or b.offset + b.nbytes <= a.offset
            assert apart or not together, f"{a} and {b}"


def assert_lifetimes_cover_every_use(gm: fx.GraphModule, layout: Layout) -> None:
    """From the graph alone: who makes a storage, and who reads it, itself or through a view."""
    for i, node in enumerate(gm.graph.nodes):
        for read in (node, *node.all_input_nodes):
            base, element = storage_of(read)
            if values_of(read) and (base.name, element) in layout.home:
                b = layout.buffers[layout.home[base.name, element]]
                assert b.first <= i <= b.last, f"{node} uses {b.name} outside of [{b.first}, {b.last}]"


def test_chain_takes_two_values_not_all(tmp_path: Path) -> None:
    model = chain(tmp_path, layers=6)
    gm = model.graph()
    layout = plan_activations(gm)
    assert_no_overlap(layout)
    assert_lifetimes_cover_every_use(gm, layout)
    one = 2 * 32 * 4
    assert layout.height <= 3 * one, "input, and two activations that alternate"
    assert layout.height >= layout.lower_bound
    assert {b.nbytes for b in layout.buffers.values()} == {one}


def test_without_reuse_every_value_keeps_its_place(tmp_path: Path) -> None:
    gm = chain(tmp_path, layers=4).graph()
    layout = plan_activations(gm, reuse=False)
    assert len(layout.buffers) == 1 + 8
    assert layout.height == 9 * 256
    assert len({b.offset for b in layout.buffers.values()}) == 9
    assert_lifetimes_cover_every_use(gm, layout)
    ended = [name for names in layout.ends.values() for name in names]
    assert sorted(ended) == sorted(name for name, b in layout.buffers.items() if b.kind == "activation")


def test_sizes_are_those_of_the_storage_not_of_the_view() -> None:
    """A column slice, a transposed copy, a broadcast, and elements of 1, 2 and 8 bytes."""

    def build(graph: fx.Graph, nodes: Mapping[str, fx.Node]) -> object:
        x = graph.call_function(aten.mul.Tensor, (nodes["x"], 2.0))  # [6, 10]
        turned = graph.call_function(aten.t.default, (x,))
        doubled = graph.call_function(aten.add.Tensor, (turned, turned))  # [10, 6], column-major: 240 bytes
        part = graph.call_function(aten.slice.Tensor, (doubled, 1, 2, 5))  # a view: 3 columns of 6
        half = graph.call_function(aten._to_copy.default, (part,), {"dtype": torch.bfloat16})
        mask = graph.call_function(aten.gt.Scalar, (part, 0.0))
        index = graph.call_function(aten.argmax.default, (part,))
        return (half, mask, index)

    gm = graph_of(build, x=torch.randn(6, 10))
    layout = plan_activations(gm)
    made = {n.name: str(n.target) for n in gm.graph.nodes}
    sizes = {made[node]: layout.buffers[name].nbytes for (node, _), name in layout.home.items()}
    assert sizes["aten.mul.Tensor"] == sizes["aten.add.Tensor"] == 6 * 10 * 4
    assert sizes["aten._to_copy.default"] == 10 * 3 * 2
    assert sizes["aten.gt.Scalar"] == 10 * 3
    assert sizes["aten.argmax.default"] == 8
    assert not any("slice" in target or "t.default" in target for target in sizes), "views take no memory"
    assert_no_overlap(layout)
    assert_lifetimes_cover_every_use(gm, layout)
    slice_node = next(n for n in gm.graph.nodes if n.target is aten.slice.Tensor)
    base, element = storage_of(slice_node)
    read = layout.buffers[layout.home[base.name, element]]
    assert list(gm.graph.nodes)[read.last].target is aten.argmax.default, "alive while its view is read"


def test_several_results_are_several_buffers() -> None:
    def build(graph: fx.Graph, nodes: Mapping[str, fx.Node]) -> object:
        import operator

        top = graph.call_function(aten.topk.default, (nodes["x"], 3))
        values, index = (graph.call_function(operator.getitem, (top, i)) for i in range(2))
        x = graph.call_function(aten.exp.default, (values,))
        return (graph.call_function(aten.gather.default, (x, 1, index)),)

    gm = graph_of(build, x=torch.randn(4, 9))
    layout = plan_activations(gm)
    sizes = sorted(b.nbytes for b in layout.buffers.values())
    assert sizes == [4 * 3 * 4, 4 * 3 * 4, 4 * 3 * 8, 4 * 9 * 4]  # exp in place of values: gather, values, index, x
    assert_no_overlap(layout)
    assert_lifetimes_cover_every_use(gm, layout)


def homes(gm: fx.GraphModule) -> dict[str, str]:
    return {node: name for (node, _), name in plan_activations(gm).home.items()}


def test_pointwise_result_takes_the_place_of_an_operand_that_dies() -> None:
    def build(graph: fx.Graph, nodes: Mapping[str, fx.Node]) -> object:
        a = graph.call_function(aten.mul.Tensor, (nodes["x"], nodes["x"]))
        b = graph.call_function(aten.silu.default, (a,))
        return (graph.call_function(aten.add.Tensor, (b, nodes["x"])),)

    found = homes(graph_of(build, x=torch.randn(4, 4)))
    assert found["silu_default"] == found["mul_tensor"] == found["add_tensor"]
    assert found["mul_tensor"] != found["x"], "the caller's input is never overwritten"


@pytest.mark.parametrize("why", ["read later", "broadcast", "two views", "other dtype", "not pointwise", "sliced"])
def test_no_place_is_taken_while_it_may_be_read(why: str) -> None:
    def build(graph: fx.Graph, nodes: Mapping[str, fx.Node]) -> object:
        def call(op: object, *args: object, **kwargs: object) -> fx.Node:
            return graph.call_function(op, args, kwargs)  # type: ignore[arg-type]

        a = call(aten.mul.Tensor, nodes["x"], 2.0)
        if why == "read later":
            b = call(aten.exp.default, a)
            return (call(aten.sub.Tensor, b, a),)
        if why == "broadcast":
            row = call(aten.mul.Tensor, nodes["row"], 2.0)
            return (call(aten.add.Tensor, row, nodes["x"]),)
        if why == "two views":
            return (call(aten.add.Tensor, a, call(aten.t.default, a)),)
        if why == "other dtype":
            return (call(aten.gt.Tensor, a, nodes["x"]),)
        if why == "not pointwise":
            return (call(aten.cumsum.default, a, 0),)
        return (call(aten.exp.default, call(aten.slice.Tensor, a, 0, 1, 3)),)

    gm = graph_of(build, x=torch.randn(4, 4), row=torch.randn(4))
    layout = plan_activations(gm)
    names = [layout.home[node.name, 0] for node in gm.graph.nodes if (node.name, 0) in layout.home]
    if why == "read later":  # the subtraction may then take the place of either
        exp = next(n for n in gm.graph.nodes if n.target is aten.exp.default)
        mul = next(n for n in gm.graph.nodes if n.target is aten.mul.Tensor)
        assert layout.home[exp.name, 0] != layout.home[mul.name, 0]
    else:
        assert len(set(names)) == len(names)
    assert_no_overlap(layout)
    assert_lifetimes_cover_every_use(gm, layout)


def pointwise_operators() -> list[torch._ops.OpOverload]:
    """Every ATen operator with an out variant whose result may take the place of an operand."""
    found = []
    for name in sorted(torch._C._dispatch_get_all_op_names()):
        namespace, _, rest = name.partition("::")
        base, _, overload = rest.partition(".")
        if namespace != "aten" or not hasattr(aten, base):
            continue
        op = getattr(getattr(aten, base), overload or "default", None)
        if op is None or torch.Tag.pointwise not in op.tags or mutated_arguments(op) or out_variant(op) is None:
            continue
        found.append(op)
    return found


def example_arguments(op: torch._ops.OpOverload) -> list[object] | None:
    """Tensors within (0.1, 0.9) for the tensors, halves for the numbers; None where that is no valid call."""
    given: list[object] = []
    for argument in op._schema.arguments:
        kind = str(argument.type)
        if kind == "Tensor":
            given.append(torch.rand(5, 7) * 0.8 + 0.1)
        elif argument.has_default_value():
            break
        else:
            given.append({"number": 0.5, "Scalar": 0.5, "float": 0.5, "int": 1, "bool": False}.get(kind))
    try:
        return given if isinstance(op(*given), torch.Tensor) else None
    except (RuntimeError, TypeError, ValueError):
        return None


def test_every_pointwise_operator_may_write_over_an_operand() -> None:
    """What torch's tag promises: `out` may be any operand of its dtype, and the result is the same."""
    tried = 0
    for op in pointwise_operators():
        given = example_arguments(op)
        if given is None:
            continue
        expected, variant = op(*given), out_variant(op)
        assert variant is not None
        out = next(a.name for a in variant._schema.arguments if a.is_out)
        for i, value in enumerate(given):
            if isinstance(value, torch.Tensor) and value.dtype == expected.dtype and value.shape == expected.shape:
                taken = [v.clone() if isinstance(v, torch.Tensor) else v for v in given]
                variant(*taken, **{out: taken[i]})
                torch.testing.assert_close(taken[i], expected, rtol=0, atol=0, equal_nan=True, msg=f"{op}, operand {i}")
                tried += 1
    assert tried > 100


def gated(graph: fx.Graph, nodes: Mapping[str, fx.Node]) -> tuple[fx.Node, fx.Node]:
    """2x + silu(x G^T) * (x U^T), and the gate."""
    linear = operators.LINEAR.overload
    residual = graph.call_function(aten.mul.Tensor, (nodes["x"], 2.0))
    gate = graph.call_function(linear, (nodes["x"], nodes["g"], None, None, None, "silu"))
    return graph.call_function(linear, (nodes["x"], nodes["u"], None, gate, residual, "")), gate


@pytest.mark.parametrize("kept", ["", "gate", "residual"])
def test_product_takes_the_place_of_what_it_adds_or_multiplies_by(kept: str) -> None:
    def build(graph: fx.Graph, nodes: Mapping[str, fx.Node]) -> object:
        product, gate = gated(graph, nodes)
        return (product, *{"": (), "gate": (gate,), "residual": (product.args[4],)}[kept])

    gm = graph_of(build, x=torch.randn(3, 8), g=torch.randn(8, 8), u=torch.randn(8, 8))
    layout = plan_activations(gm)
    residual, gate, product = (layout.home[n.name, 0] for n in gm.graph.nodes if n.op == "call_function")
    assert product == (gate if kept == "residual" else residual)
    assert residual != gate
    assert_no_overlap(layout)
    assert_lifetimes_cover_every_use(gm, layout)


@pytest.mark.parametrize("through_a_view", [False, True])
def test_product_never_takes_the_place_of_its_input(through_a_view: bool) -> None:
    """x is the residual too: all of a row of x is read for every element."""

    def build(graph: fx.Graph, nodes: Mapping[str, fx.Node]) -> object:
        x = graph.call_function(aten.mul.Tensor, (nodes["x"], 2.0))
        same = graph.call_function(aten.view.default, (x, [3, 8])) if through_a_view else x
        return (graph.call_function(operators.LINEAR.overload, (x, nodes["u"], None, None, same, "")),)

    layout = plan_activations(graph_of(build, x=torch.randn(3, 8), u=torch.randn(8, 8)))
    assert len(set(layout.home.values())) == len(layout.home)


def streamed(model: Tiny, **options: object) -> tuple[fx.GraphModule, Plan]:
    plan = plan_for(placements(model, {n: 0 for n in model.weights if n[0] == "w"}), **options)  # type: ignore[arg-type]
    gm = model.graph()
    insert_transfers(gm, plan)
    return gm, plan


@pytest.mark.parametrize("reuse", [True, False])
def test_activations_stand_at_the_top_of_the_arena_and_compute_the_same(tmp_path: Path, reuse: bool) -> None:
    model = chain(tmp_path, layers=3)
    gm, plan = streamed(model)
    floor = max(b.offset + b.nbytes for b in plan.buffers)
    plan = allocated(gm, plan, reuse)
    layout = gm.meta[META]
    top = plan.arenas["device"]
    assert min(b.offset for b in layout.buffers.values()) >= floor
    assert max(b.offset + b.nbytes for b in layout.buffers.values()) <= top
    assert all(b.offset % ALIGNMENT == 0 for b in layout.buffers.values())
    assert not any("fetch" in name for name in layout.buffers), "a fetched tile lives in its slot"
    program = place_copies(lower(gm, plan, model.files, lambda launch: launch), plan)
    verify_program(program)
    got = run_program(program, plan, model, poison=True)[0]
    torch.testing.assert_close(got, model.expected()[0], rtol=1e-5, atol=1e-5)


STEPS = st.lists(st.tuples(st.sampled_from(["add", "mul", "tanh", "turn", "half", "sum", "fused"]), st.integers(0, 99),
                           st.integers(0, 99), st.integers(0, 99)), min_size=1, max_size=16)


@settings(max_examples=examples(60), deadline=None)
@given(steps=STEPS, kept=st.integers(0, 99))
def test_random_graphs_compute_the_same_in_their_planned_memory(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, int, int, int]], kept: int
) -> None:
    """Pointwise operators, views, and products with what follows them; dead memory is filled with NaN."""

    def build(graph: fx.Graph, nodes: Mapping[str, fx.Node]) -> object:
        def call(op: object, *args: object) -> fx.Node:
            return graph.call_function(op, args)  # type: ignore[arg-type]

        values, w = [nodes["x"]], nodes["w"]
        for name, *picks in steps:
            a, b, c = (values[p % len(values)] for p in picks)
            match name:
                case "add" | "mul":
                    made = call(aten.add.Tensor if name == "add" else aten.mul.Tensor, a, b)
                case "tanh":
                    made = call(aten.tanh.default, a)
                case "turn":
                    made = call(aten.t.default, a)
                case "half":  # a view of part, and the part next to itself
                    part = call(aten.slice.Tensor, a, 1, 0, 2)
                    made = call(aten.cat.default, [part, part], 1)
                case "sum":
                    made = call(aten.mul.Tensor, call(aten.cumsum.default, a, 0), 0.25)
                case _:
                    x, by, more = (call(aten.clone.default, v) for v in (a, b, c))
                    x = call(aten.contiguous.default, x)
                    made = call(operators.LINEAR.overload, x, w, None,
                                call(aten.contiguous.default, by) if picks[0] % 2 else None,
                                call(aten.contiguous.default, more), "silu" if picks[1] % 2 else "")
            values.append(made)
        return tuple(call(aten.mul.Tensor, value, 1.0) for value in (values[-1], values[kept % len(values)]))

    generator = torch.Generator().manual_seed(0)
    model = tiny(tmp_path_factory.mktemp("random"), build, {"x": torch.rand(4, 4, generator=generator) - 0.5},
                 {"w": torch.rand(4, 4, generator=generator) - 0.5})
    gm, plan = model.graph(), plan_for(placements(model, {}))
    plan = allocated(gm, plan)
    assert_no_overlap(gm.meta[META])
    program = place_copies(lower(gm, plan, model.files, lambda launch: launch), plan)
    verify_program(program)
    got = run_program(program, plan, model, poison=True)
    for one, other in zip(got, model.expected(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_constants_and_weights_take_no_activation_memory(tmp_path: Path) -> None:
    model = chain(tmp_path, layers=2)
    layout = plan_activations(model.graph())
    assert not set(layout.buffers) & set(model.weights)


def test_arena_that_is_too_small_is_refused_with_what_is_missing(tmp_path: Path) -> None:
    model = chain(tmp_path, layers=2)
    gm, plan = streamed(model)
    floor = max(b.offset + b.nbytes for b in plan.buffers)
    need = plan_activations(gm).height
    with pytest.raises(PlanError, match=rf"activations need {need} bytes.*{need - 1} left"):
        allocated(gm, replace(plan, arenas={"device": floor + need - 1}))
    allocated(gm, replace(plan, arenas={"device": floor + need + ALIGNMENT}))


def test_addresses_are_the_plans_and_one_that_is_not_there_is_named(tmp_path: Path) -> None:
    model = chain(tmp_path, layers=2)
    gm, plan = streamed(model)
    plan = allocated(gm, plan)
    moved = plan.buffers[-1]
    elsewhere = replace(moved, offset=moved.offset - 2 * moved.nbytes - 4 * ALIGNMENT)
    for change, message in ((elsewhere, ""), (replace(moved, nbytes=moved.nbytes - 1), f"has {moved.nbytes - 1} bytes"),
                            (replace(moved, name="other"), f"no buffer {moved.name} of {moved.nbytes} bytes")):
        edited = replace(plan, buffers=(*plan.buffers[:-1], change))
        if message:
            with pytest.raises(PlanError, match=message):
                allocate_buffers(gm, edited)
        else:
            allocate_buffers(gm, edited)
            assert gm.meta[META].buffers[moved.name].offset == elsewhere.offset


def test_a_lookup_reads_its_index_until_an_operator_waits() -> None:
    """A view of the rows waits for nothing: the index outlives what is computed between the view and its reader."""
    def build(graph: fx.Graph, nodes: Mapping[str, fx.Node]) -> object:
        index = graph.call_function(aten.add.Tensor, (nodes["tokens"], 1))
        rows = graph.call_function(aten.embedding.default, (nodes["table"], index))
        turned = graph.call_function(aten.permute.default, (rows, (1, 0, 2)))
        part = graph.call_function(aten.select.int, (turned, 0, 0))
        between = graph.call_function(aten.exp.default, (nodes["x"],))
        return (graph.call_function(aten.add.Tensor, (part, between)),)

    gm = graph_of(build, tokens=torch.arange(6).view(2, 3), table=torch.randn(9, 4), x=torch.randn(2, 4))
    nodes = {str(n.target): i for i, n in enumerate(gm.graph.nodes)}
    index, *_, reader = (i for i, n in enumerate(gm.graph.nodes) if n.target is aten.add.Tensor)
    layout = plan_activations(gm)
    held = layout.buffers[layout.home[list(gm.graph.nodes)[index].name, 0]]
    assert nodes["aten.select.int"] < nodes["aten.exp.default"] < reader == held.last
