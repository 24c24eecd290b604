"""Graphs of torch.compile as flat, functional graphs whose weights are named inputs."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

from forebay.rewriter.capture.compiled_module import ModuleGraph, OffloadError, capture_module
from forebay.rewriter.ir.graph import META, WeightInput, storage_of, values_of, weight_name

aten = torch.ops.aten


@pytest.fixture(autouse=True)
def no_gradients():
    torch.manual_seed(0)
    with torch.no_grad():
        yield


def traced(function, *args) -> fx.GraphModule:
    """The graph that Dynamo hands to a backend, its inputs in the order of `args`."""
    found = []

    def backend(gm, example_inputs):
        inputs = gm.graph.find_nodes(op="placeholder")
        position = {id(a): i for i, a in enumerate(args)}
        ordered = sorted(zip(example_inputs, inputs, strict=True), key=lambda pair: position[id(pair[0])])
        for before, after in itertools.pairwise(ordered):
            before[1].append(after[1])
        gm.recompile()
        found.append(gm)
        return gm.forward  # Dynamo passes arguments in the order in which it finds the placeholders afterwards

    torch._dynamo.reset()
    torch.compile(function, backend=backend, fullgraph=True)(*args)
    return found[0]


def run(captured: ModuleGraph, args, weights) -> list[torch.Tensor]:
    """Interpret the captured graph on the arguments it was captured for."""
    flat = captured.flat()
    by_name = {name: args[i] for i, name in weights.items()} | dict(captured.constants)
    values = [by_name[weight_name(n)] if weight_name(n) is not None else args[captured.inputs[n.name]]
              for n in flat.graph.find_nodes(op="placeholder")]
    return list(fx.Interpreter(flat).run(*values))


def targets(captured: ModuleGraph) -> list[object]:
    return [n.target for n in captured.graph.graph.nodes if n.op == "call_function"]


def test_linear_and_attention_stay_whole_and_weights_are_named():
    def f(x, w, b):
        q = F.linear(x, w, b).unflatten(-1, (2, 4)).transpose(1, 2)
        return F.scaled_dot_product_attention(q, q, q)

    args = (torch.randn(2, 5, 8), torch.randn(8, 8), torch.randn(8))
    captured = capture_module(traced(f, *args), args, {1: "proj.weight", 2: "proj.bias"})
    assert targets(captured).count(aten.linear.default) == 1
    assert targets(captured).count(aten.scaled_dot_product_attention.default) == 1
    marks = [n.meta.get(META) for n in captured.graph.graph.find_nodes(op="placeholder")]
    assert marks == [None, WeightInput("proj.weight"), WeightInput("proj.bias")]
    torch.testing.assert_close(run(captured, args, {1: "proj.weight", 2: "proj.bias"})[0], f(*args))


def test_every_value_has_fixed_sizes_on_meta_and_views_name_what_they_view():
    def f(x, w):
        y = x @ w
        return y[:, 1:].transpose(0, 1).reshape(-1)

    args = (torch.randn(3, 4), torch.randn(4, 6))
    for node in capture_module(traced(f, *args), args, {1: "w"}).flat().graph.nodes:
        for value in values_of(node):
            assert value.device.type == "meta" and all(type(s) is int for s in (*value.shape, *value.stride()))
        if node.op == "call_function":
            assert node.meta["layer"] == -1
            base, _ = storage_of(node)
            if node.target in (aten.slice.Tensor, aten.transpose.int):
                assert base.target in (aten.mm.default, aten.matmul.default)
            elif node.target is aten.reshape.default:  # of the copy that makes the transpose contiguous
                assert base.target is aten.clone.default
            else:
                assert node.meta["alias_of"] is None and base is node


@pytest.mark.parametrize("form", ["matmul", "mm", "addmm", "permute"])
def test_products_with_a_transposed_weight_become_linear(form):
    forms = {
        "matmul": lambda x, w, b: x @ w.t() + b,
        "mm": lambda x, w, b: torch.mm(x, w.transpose(0, 1)) + b,
        "addmm": lambda x, w, b: torch.addmm(b, x, w.t()),
        "permute": lambda x, w, b: torch.matmul(x, w.permute(1, 0)) + b,
    }
    args = (torch.randn(3, 8), torch.randn(5, 8), torch.randn(5))
    weights = {1: "w", 2: "b"}
    captured = capture_module(traced(forms[form], *args), args, weights)
    product = next(n for n in captured.graph.graph.nodes if n.target is aten.linear.default)
    assert weight_name(product.args[1]) == "w" and len(product.args) == (3 if form == "addmm" else 2)
    torch.testing.assert_close(run(captured, args, weights)[0], forms[form](*args))


def test_a_product_with_the_weight_as_it_stands_is_left_alone():
    args = (torch.randn(3, 8), torch.randn(8, 8))
    captured = capture_module(traced(lambda x, w: (x @ w, x.t() @ x), *args), args, {1: "w"})
    assert aten.linear.default not in targets(captured)


def test_in_place_operators_become_functional_and_inputs_changed_are_reported():
    def f(x, y):
        x.add_(1)
        z = (x + y).relu_()
        z[:, 0] = 5
        return z, 3

    args = (torch.randn(3, 4), torch.randn(3, 4))
    gm = traced(lambda x, y: f(x, y)[0], *(a.clone() for a in args))
    captured = capture_module(gm, args, {})
    assert captured.mutated == (0,)
    assert not any(t._schema.is_mutable for t in targets(captured) if isinstance(t, torch._ops.OpOverload))
    changed, result = run(captured, args, {})
    torch.testing.assert_close(changed, args[0] + 1)
    torch.testing.assert_close(result, f(args[0].clone(), args[1])[0])


def test_a_weight_that_is_changed_is_refused_by_name():
    args = (torch.randn(3), torch.randn(3))
    gm = traced(lambda x, w: w.add_(x) * 2, *(a.clone() for a in args))
    with pytest.raises(OffloadError, match=r"changes running\.mean"):
        capture_module(gm, args, {1: "running.mean"})


def test_one_storage_under_two_names_is_one_weight():
    w = torch.randn(6, 4)
    args = (torch.tensor([1, 2]), w, w.view(6, 4))

    def f(ids, table, head):
        return F.linear(F.embedding(ids, table), head)

    captured = capture_module(traced(f, args[0], w.clone(), w.clone()), args, {1: "table", 2: "head"})
    names = [weight_name(n) for n in captured.graph.graph.find_nodes(op="placeholder")]
    assert names == [None, "table"]
    torch.testing.assert_close(run(captured, args, {1: "table", 2: "head"})[0], f(*args))


def test_new_values_of_arguments_that_lie_in_inputs_or_weights_are_copied():
    args = (torch.randn(4, 4), torch.randn(4, 4))
    gm = traced(lambda x, w: x.copy_(w) * 2, args[0].clone(), args[1])
    captured = capture_module(gm, args, {1: "w"})
    for value in captured.flat().graph.output_node().all_input_nodes:
        assert storage_of(value)[0].op == "call_function"
    changed, doubled = run(captured, args, {1: "w"})
    assert torch.equal(changed, args[1]) and torch.equal(doubled, args[1] * 2)


def test_indexing_is_captured_for_numbers_and_refused_for_masks():
    args = (torch.randn(5, 4), torch.tensor([3, 0]))
    captured = capture_module(traced(lambda x, i: x[i] + x[:, i].t(), torch.randn(5, 5), args[1]),
                              (x := torch.randn(5, 5), args[1]), {})
    torch.testing.assert_close(run(captured, (x, args[1]), {})[0], x[args[1]] + x[:, args[1]].t())
    graph = fx.Graph()
    graph.output((graph.call_function(aten.index.Tensor, (graph.placeholder("x"), [graph.placeholder("i")])),))
    with pytest.raises(OffloadError, match=r"traced|depends on data"):
        capture_module(fx.GraphModule({}, graph), (x, torch.ones(5, dtype=torch.bool)), {})


def test_a_failure_inside_vmap_leaves_none_active():
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.call_function(torch._C._functorch._vmap_increment_nesting, (3, "error"))
    graph.output((graph.call_function(torch.nonzero, (x,)),))
    with pytest.raises(OffloadError, match="traced"):
        capture_module(fx.GraphModule({}, graph), (torch.ones(3),), {})
    assert torch._C._functorch.peek_interpreter_stack() is None
    assert torch.randn(3).shape == (3,)


def test_constants_of_the_trace_are_lifted():
    args = (torch.randn(3),)
    captured = capture_module(traced(lambda x: x * torch.tensor([1.0, 2.0, 3.0]), *args), args, {})
    assert [v.tolist() for v in captured.constants.values()] == [[1.0, 2.0, 3.0]]
    torch.testing.assert_close(run(captured, args, {})[0], args[0] * torch.tensor([1.0, 2.0, 3.0]))


@pytest.mark.parametrize("masked", ["no mask", "causal", "padding"])
@pytest.mark.parametrize("norm_first", [False, True])
def test_the_fused_encoder_layer_becomes_single_operators(norm_first, masked):
    layer = nn.TransformerEncoderLayer(16, 4, 24, batch_first=True, norm_first=norm_first, activation="gelu").eval()
    for p in layer.parameters():
        p.copy_(torch.randn_like(p) * 0.3)
    x = torch.randn(2, 5, 16)
    masks = {"no mask": {}, "causal": {"src_mask": nn.Transformer.generate_square_subsequent_mask(5)},
             "padding": {"src_key_padding_mask": torch.tensor([[False] * 5, [False] * 3 + [True] * 2])}}
    kwargs = masks[masked]
    calls = []

    def backend(gm, example_inputs):
        def call(*args):
            weights = {i: f"w{i}" for i, a in enumerate(args) if isinstance(a, nn.Parameter)}
            captured = capture_module(gm, args, weights)
            calls.append(targets(captured))
            return tuple(run(captured, args, weights))

        return call

    torch._dynamo.reset()
    got = torch.compile(layer, backend=backend, fullgraph=True)(x, **kwargs)
    expected = layer(x, **kwargs)
    kept = ~kwargs["src_key_padding_mask"] if masked == "padding" else torch.ones(2, 5, dtype=torch.bool)
    torch.testing.assert_close(got[kept], expected[kept], rtol=1e-4, atol=1e-5)
    assert calls[0].count(aten.linear.default) == 4


@pytest.mark.parametrize(("arg", "reason"), [
    (torch.zeros(3, dtype=torch.complex64).conj(), "a conjugate that torch puts off"),
    (torch.eye(3).to_sparse(), "layout torch.sparse_coo"),
])
def test_inputs_without_plain_data_are_refused(arg, reason):
    gm = traced(lambda x: x * 2, torch.zeros(3))
    with pytest.raises(OffloadError, match=reason):
        capture_module(gm, (arg,), {})


def test_conjugates_that_are_put_off_are_refused():
    args = (torch.randn(4, 2),)
    gm = traced(lambda x: torch.view_as_complex(x).conj() * 2, *args)
    with pytest.raises(OffloadError, match=r"_conj.* whose conjugation is put off"):
        capture_module(gm, args, {})


def test_sizes_that_depend_on_data_are_refused():
    args = (torch.tensor([0.0, 1.0, 2.0]),)
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.output((graph.call_function(torch.nonzero, (x,)),))
    with pytest.raises(OffloadError, match=r"traced|depends on data"):
        capture_module(fx.GraphModule({}, graph), args, {})


def test_aliased_inputs_are_refused_only_where_one_changes():
    x = torch.randn(4)
    args = (x, x[:2])
    pure = capture_module(traced(lambda a, b: a[:2] + b, x.clone(), x[:2].clone()), args, {})
    torch.testing.assert_close(run(pure, args, {})[0], x[:2] * 2)
    gm = traced(lambda a, b: a.add_(1)[:2] + b, x.clone(), x[:2].clone())
    with pytest.raises(OffloadError, match="another input shares"):
        capture_module(gm, args, {})
