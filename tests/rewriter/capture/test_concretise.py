import functools
import operator

import pytest
import torch
from selection import without
from torch import fx

from forebay.rewriter.capture.concretise import concretise, inline_blocks
from forebay.rewriter.ir.graph import CapturedModel, weight_name
from forebay.rewriter.ir.state import StateInput
from tests.families import FAMILIES, captured

aten = torch.ops.aten


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def inputs(lm: CapturedModel, batch: int, seq: int, length: int = 32) -> dict[str, torch.Tensor]:
    ints = functools.partial(meta, dtype=torch.int64)
    found = {"input_ids": ints(batch, seq), "start": ints(batch), "last": ints(batch)}
    for i, (c,) in enumerate(lm.states):
        found |= {f"cache_{s}_{i}": meta(batch, c.kv_heads, length, c.head_dim, dtype=c.dtype) for s in "kv"}
    return found


def hand_made() -> fx.GraphModule:
    """Views, a fresh copy, several outputs, size arithmetic, a write in place, and a dead node."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    y = graph.placeholder("y")
    size = graph.call_function(aten.sym_size.int, (x, 0))
    half = graph.call_function(operator.floordiv, (size, 2))
    first = graph.call_function(aten.slice.Tensor, (x, 0, 0, half))
    parts = graph.call_function(aten.split.Tensor, (first, 2, 1))
    left = graph.call_function(operator.getitem, (parts, 0))
    topk = graph.call_function(aten.topk.default, (x, 2))
    values = graph.call_function(operator.getitem, (topk, 0))
    graph.call_function(aten.mul.Tensor, (x, 3.0))
    same = graph.call_function(aten.contiguous.default, (left,))
    graph.call_function(aten.copy_.default, (y, x))
    total = graph.call_function(aten.add.Tensor, (same, 1.0))
    graph.output((total, values, first))
    return fx.GraphModule({}, graph)


def by_name(gm: fx.GraphModule) -> dict[str, fx.Node]:
    return {node.name: node for node in gm.graph.nodes}


def test_aliases_and_dead_code_of_a_small_graph():
    gm = concretise(hand_made(), {"x": meta(6, 4), "y": meta(6, 4)})
    nodes = by_name(gm)
    alias = {name: str(node.meta["alias_of"]) for name, node in nodes.items() if node.op != "output"}
    assert alias == {
        "x": "None",
        "y": "None",
        "slice_tensor": "x",
        "split_tensor": "x",
        "getitem": "x",
        "topk_default": "None",
        "getitem_1": "topk_default",
        "contiguous_default": "None",
        "copy__default": "y",
        "add_tensor": "None",
    }
    assert nodes["slice_tensor"].args[3] == 3


def test_caller_may_pass_one_tensor_for_many_inputs():
    same = meta(6, 4)
    nodes = by_name(concretise(hand_made(), {"x": same, "y": same}))
    assert nodes["y"].meta["alias_of"] is None
    assert nodes["copy__default"].meta["alias_of"] is nodes["y"]


def test_unknown_missing_and_unfitting_inputs_are_named():
    lm = captured("llama")
    good = inputs(lm, 2, 3)
    with pytest.raises(ValueError, match="no input 'tokens'"):
        concretise(lm.step, good | {"tokens": meta(2)})
    with pytest.raises(ValueError, match="'cache_v_1' has no fixed size"):
        concretise(lm.step, {k: v for k, v in good.items() if k != "cache_v_1"})
    with pytest.raises(ValueError, match="'cache_k_0' must be"):
        concretise(lm.step, good | {"cache_k_0": meta(2, 5, 32, 16)})
    with pytest.raises(ValueError, match="'start' must be"):
        concretise(lm.step, good | {"start": meta(2)})


@pytest.mark.parametrize("family", without(FAMILIES, ("qwen2", "qwen3", "mistral", "phi3", "opt")))
@pytest.mark.parametrize(("batch", "seq"), [(1, 1), (3, 1), (2, 7)])
def test_no_symbolic_size_is_left(family, batch, seq):
    lm = captured(family)
    fixed = concretise(lm.step, inputs(lm, batch, seq))
    for gm in (fixed, *(fixed.get_submodule(name) for name in set(lm.layers)), inline_blocks(fixed)):
        for node in gm.graph.nodes:
            assert "sym_size" not in str(node.target) and node.target is not operator.mul
            value = node.meta.get("val")
            if isinstance(value, torch.Tensor):
                assert value.is_meta
                assert all(type(s) is int for s in (*value.shape, *value.stride(), value.storage_offset()))
    assert tuple(fixed.graph.output_node().args[0].meta["val"].shape) == (batch, lm.vocab_size)


def test_the_original_graph_is_untouched():
    lm = captured("llama")
    before = str(lm.step.graph), [id(n.meta["val"]) for n in lm.step.graph.nodes if "val" in n.meta]
    inline_blocks(concretise(lm.step, inputs(lm, 2, 3)))
    assert before == (str(lm.step.graph), [id(n.meta["val"]) for n in lm.step.graph.nodes if "val" in n.meta])


@pytest.mark.parametrize("family", FAMILIES)
def test_flat_aliases_agree_with_storage_of_a_real_run(family):
    """Two nodes alias in the flat graph exactly if their tensors share memory when it is run."""
    lm = captured(family)
    fixed = inline_blocks(concretise(lm.step, inputs(lm, 2, 3)))
    tensors: dict[fx.Node, torch.Tensor] = {}

    class Watch(fx.Interpreter):
        def run_node(self, n: fx.Node) -> object:
            result = super().run_node(n)
            if isinstance(result, torch.Tensor) and n.op != "output":
                tensors[n] = result
            return result

    torch.manual_seed(0)
    values = []
    for node in fixed.graph.find_nodes(op="placeholder"):
        like = node.meta["val"]
        integral = not like.dtype.is_floating_point
        values.append(torch.zeros(like.shape, dtype=like.dtype) if integral else torch.randn(like.shape).to(like.dtype))
    with torch.no_grad():
        Watch(fixed).run(*values)
    storage: dict[int, fx.Node] = {}
    for node, tensor in tensors.items():
        base = storage.setdefault(tensor.untyped_storage()._cdata, node)
        assert node.meta["alias_of"] is (None if base is node else base), node
        like = node.meta["val"]
        assert (tensor.shape, tensor.stride(), tensor.storage_offset()) == (
            like.shape,
            like.stride(),
            like.storage_offset(),
        ), node


def test_layers_never_alias_one_another():
    lm = captured("llama")
    flat = inline_blocks(concretise(lm.step, inputs(lm, 2, 3)))
    layers = {node.meta["layer"] for node in flat.graph.nodes if "layer" in node.meta}
    assert layers == {0, 1, 2}
    for node in flat.graph.nodes:
        if "layer" in node.meta:
            assert node.name.startswith(f"layer{node.meta['layer']}_")
            base = node.meta["alias_of"]
            assert base is None or base.op == "placeholder" or base.meta.get("layer") in (None, node.meta["layer"])
            assert base is None or base.graph is flat.graph
    assert not flat.graph.find_nodes(op="call_module", target="block_0")


def test_step_calls_own_their_outputs():
    lm = captured("llama")
    fixed = concretise(lm.step, inputs(lm, 2, 3))
    calls = fixed.graph.find_nodes(op="call_module", target="block_0")
    assert len(calls) == 3 and all(n.meta["alias_of"] is None for n in calls)
    assert len({n.meta["val"].untyped_storage()._cdata for n in calls}) == 3


def test_a_block_is_fixed_once_per_shape(monkeypatch):
    from forebay.rewriter.capture import concretise as module

    walked = []
    run = module._Concretiser._run
    monkeypatch.setattr(module._Concretiser, "_run", lambda self, n: walked.append(n.name) or run(self, n))
    lm = captured("llama")
    concretise(lm.step, inputs(lm, 2, 3))
    assert walked.count("attention") == 1

    walked.clear()
    mixed = inputs(lm, 2, 3) | {f"cache_{s}_1": meta(2, 2, 48, 16) for s in "kv"}
    fixed = concretise(lm.step, mixed)
    assert walked.count("attention") == 2
    assert [n.target for n in fixed.graph.nodes if n.op == "call_module"] == ["block_0", "block_0_1", "block_0"]


def test_block_that_returns_its_input_aliases_it():
    block_graph = fx.Graph()
    a, b = block_graph.placeholder("a"), block_graph.placeholder("b")
    block_graph.call_function(aten.add_.Tensor, (b, a))
    block_graph.output(block_graph.call_function(aten.view.default, (a, [-1])))
    graph = fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    row = graph.call_function(aten.select.int, (x, 0, 1))
    out = graph.create_node("call_module", "block", (row, y))
    out.meta["layer"] = 0
    graph.output(out)
    fixed = concretise(
        fx.GraphModule({"block": fx.GraphModule({}, block_graph)}, graph), {"x": meta(3, 4), "y": meta(4)}
    )
    called = by_name(fixed)["block"]
    assert called.meta["alias_of"] is by_name(fixed)["x"]
    assert called.meta["val"].storage_offset() == 4
    flat = by_name(inline_blocks(fixed))
    assert flat["layer0_view_default"].meta["alias_of"] is flat["x"]
    assert flat["layer0_add__tensor"].meta["alias_of"] is flat["y"]


def test_marks_of_ours_survive():
    lm = captured("gemma2")
    flat = inline_blocks(concretise(lm.step, inputs(lm, 1, 1)))
    placeholders = flat.graph.find_nodes(op="placeholder")
    assert [weight_name(n) for n in placeholders if weight_name(n)] == [*lm.weights, *lm.constants]
    assert sum(isinstance(n.meta.get("forebay"), StateInput) for n in placeholders) == 2 * len(lm.layers)
