"""Captured graphs as data, and back: what runs is the same, and nothing outside the tables is ever called."""

from __future__ import annotations

import json
import operator
from typing import Any

import pytest
import torch
import transformers as T
from families import FAMILIES, captured, rewritten
from selection import without
from small_experts import small_config

from forebay.exported.allowed import ATEN, name_of, target_of
from forebay.exported.captured_data import captured_from_data, captured_to_data
from forebay.exported.errors import ExportError
from forebay.exported.graph_data import graph_from_data, graph_to_data
from forebay.rewriter.capture.concretise import concretise
from forebay.rewriter.capture.language_model import capture_model
from forebay.rewriter.capture.step_graphs import step_inputs
from forebay.rewriter.ir.graph import CapturedModel
from forebay.rewriter.ir.plan import Workload
from forebay.rewriter.pipeline.rewrite_captured import rewrite_captured
from forebay.rewriter.switches import Switches

SIZES = Workload(3, 5, 6)


ROPE = dict(rope_theta=10000.0, short_factor=[1.0] * 8, long_factor=[4.0] * 8, original_max_position_embeddings=16)
MORE = {"longrope": lambda: FAMILIES["phi3"](original_max_position_embeddings=16, rope_parameters=ROPE | dict(
    rope_type="longrope")),
        "dynamic": lambda: FAMILIES["llama"](2, rope_parameters=ROPE | dict(rope_type="dynamic", factor=2.0)),
        "falcon": lambda: T.FalconConfig(vocab_size=199, hidden_size=64, num_hidden_layers=2, num_attention_heads=4),
        "mpt": lambda: T.MptConfig(vocab_size=199, d_model=64, n_layers=2, n_heads=4, max_seq_len=64),
        "beam": lambda: small_config("beam", num_hidden_layers=1, layer_types=["full_attention"], sliding_window=6,
                                     mlp_layer_types=["dense"]),  # scales queries by position: [B, 1, S, 1]
        "phimoe": lambda: small_config("phimoe", num_hidden_layers=1),
        "ernie4_5_moe": lambda: small_config("ernie4_5_moe", num_hidden_layers=2, moe_num_experts=4, moe_k=2),
        "zaya": lambda: small_config("zaya", num_hidden_layers=2, num_experts_per_tok=1, router_hidden_size=16),
        "apertus": lambda: small_config("apertus", num_hidden_layers=1)}


def stored(family: str) -> tuple[CapturedModel, dict[str, Any], dict[str, torch.Tensor]]:
    model = rewrite_captured(capture_model(MORE[family]()), Switches()) if family in MORE else rewritten(family)
    keys = {name: f"c{i}" for i, name in enumerate(model.constants)}
    data = json.loads(json.dumps(captured_to_data(model, keys)))
    return model, data, {keys[name]: value for name, value in model.constants.items()}


def nodes_of(model: CapturedModel) -> list[tuple]:
    """What a step computes at fixed sizes: every node with its operation, arguments and layout."""
    gm = concretise(model.step, step_inputs(model, SIZES, SIZES.prompt))
    found = []
    for graph in (gm, *(m for m in gm.children() if isinstance(m, torch.fx.GraphModule))):
        for node in graph.graph.nodes:
            value = node.meta.get("val")
            layout = (tuple(value.shape), value.stride(), value.dtype) if isinstance(value, torch.Tensor) else None
            args = torch.fx.map_arg((node.args, node.kwargs), lambda n: f"%{n.name}")
            found.append((node.op, str(node.target), node.name, str(args), layout, node.meta.get("forebay")))
    return found


@pytest.mark.parametrize("family", without([*FAMILIES, *MORE], ("zaya", "apertus")))
def test_a_model_read_back_computes_the_same(family: str) -> None:
    model, data, tensors = stored(family)
    read = captured_from_data(data, tensors)
    assert nodes_of(read) == nodes_of(model)
    assert (read.layers, read.layer_weights, read.states, read.vocab_size, read.max_positions, read.token_types) == (
        model.layers, model.layer_weights, model.states, model.vocab_size, model.max_positions, model.token_types)
    assert read.rope_switch_length == model.rope_switch_length == (16 if family == "longrope" else 0)
    assert read.weights == model.weights and read.constants.keys() == model.constants.keys()


@pytest.mark.parametrize("cache", ["kv8", "kv4"])
def test_a_cache_of_packed_rows_can_still_be_asked_for(cache: str) -> None:
    model, data, tensors = stored("qwen3")
    there = rewrite_captured(captured("qwen3"), Switches(), cache)
    here = rewrite_captured(captured_from_data(data, tensors), Switches(), cache)
    assert here.states == there.states != model.states
    assert nodes_of(here) == nodes_of(there)


def test_every_name_is_one_operation_of_torch_that_writes_and_draws_nothing() -> None:
    for name in ATEN:
        overload = target_of(f"aten.{name}")
        assert isinstance(overload, torch._ops.OpOverload) and name_of(overload) == f"aten.{name}"
        assert not overload._schema.is_mutable, name
        assert torch.Tag.nondeterministic_seeded not in overload.tags or "dropout" in name, name
        assert not [a for a in overload._schema.arguments if str(a.type) == "str" and "file" in a.name], name


@pytest.mark.parametrize("name", ["aten.from_file.default", "aten.add_.Tensor", "aten.rand.default", "os.system",
                                  "python.eval", "prims.device_put.default", "forebay.nothing", "", "aten.add",
                                  "aten.__class__.x", "torch.ops.aten.add.Tensor", "aten.item.default"])
def test_a_name_outside_the_tables_is_never_looked_up(name: str) -> None:
    with pytest.raises(ValueError, match="not an operation that a bundle may hold"):
        target_of(name)


def bad(change: Any) -> list[dict[str, Any]]:
    nodes: list[dict[str, Any]] = [
        {"in": "x", "dtype": "float32", "shape": ["B", 4]}, {"op": "aten.relu.default", "as": "y", "args": ["%x"]},
        {"out": "%y"}]
    change(nodes)
    return nodes


@pytest.mark.parametrize(("change", "says"), [
    (lambda n: n.pop(), "result"),
    (lambda n: n[1].update(args=["%z"]), "no value of a node before"),
    (lambda n: n[1].update(args=["%y"]), "no value of a node before"),
    (lambda n: n[1].update(args=["x"]), "no value of a node before"),
    (lambda n: n[1].update(op="aten.relu_.default"), "may hold"),
    (lambda n: n[1].update(op=7), "named by text"),
    (lambda n: n[1].update({"as": "x"}), "another node's"),
    (lambda n: n[1].update({"as": "a b"}), "no name"),
    (lambda n: n[1].update(kwargs={"out": "%x"}), "no such arguments"),
    (lambda n: n[1].update(op="aten.add.Tensor", args=["%x", "%x", 2]), "no such arguments"),
    (lambda n: n[1].update(op="aten.add.Tensor", args=["%x"]), "add needs other"),
    (lambda n: n[1].update(kwargs={"self": "%x"}), "given an argument twice"),
    (lambda n: n[1].update(op="aten.arange.default", args=[1], kwargs={"device": 1 << 62}), "for device, found"),
    (lambda n: n[1].update(op="aten.cat.default", args=[["%x", None]]), "for tensors, found"),
    (lambda n: n[1].update(op="aten.sum.dim_IntList", args=["%x", [0.5]]), "for dim, found"),
    (lambda n: n[1].update(more=1), "unknown entry"),
    (lambda n: n[1].update(args=[{"device": "cuda"}]), "no device"),
    (lambda n: n[1].update(args=[{"eval": "1"}]), "no value"),
    (lambda n: n[1].update(args=[1 << 70]), "whole number"),
    (lambda n: n[1].update(args=[0]), "needs the value of a node for self, found 0"),
    (lambda n: n[1].update(op="forebay.rms_norm", args=["%x", None, 1e-5]), "needs the value of a node for weight"),
    (lambda n: n[1].update(op="forebay.rms_norm", args=["%x"]), "needs the value of a node for weight"),
    (lambda n: n[1].update(op="forebay.kv_append", args=["%x"] * 5), "a cache for k_cache, found x"),
    (lambda n: n[1].update(op="forebay.attention", args=["%x"] * 4 + [1.0, 0, 0.0]), "a cache for k, found x"),
    (lambda n: n[1].update(op="aten.zeros.default", args=[[1 << 40]]), "name its device"),
    (lambda n: n[0].update(shape=["S", 4]), "in their places"),
    (lambda n: n[0].update(shape=[-1, 4]), "in their places"),
    (lambda n: n[0].update(shape=["B", 4, 4, ""]), "in their places"),
    (lambda n: n[0].update(dtype="object"), "no dtype"),
    (lambda n: n.insert(1, {"call": "block_0", "as": "l", "args": ["%x"], "layer": 0}), "no block"),
    (lambda n: n.__setitem__(1, ["relu"]), "expected an object"),
])
def test_a_graph_that_is_none_is_refused_by_node(change: Any, says: str) -> None:
    graph_from_data(bad(lambda _: None), "graphs.step")
    with pytest.raises(ValueError, match=says):
        graph_from_data(bad(change), "graphs.step")


def test_an_operation_that_no_bundle_holds_is_named_with_its_layer() -> None:
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.empty(2, device="meta")
    graph.output(graph.call_function(torch.ops.aten.bernoulli.default, (x,)))
    with pytest.raises(ExportError, match=r"layer 7 computes aten\.bernoulli\.default"):
        graph_to_data(torch.fx.GraphModule({}, graph), "layer 7")


def test_graphs_that_do_not_belong_together_are_refused() -> None:
    _, data, tensors = stored("llama")
    for change, says in [
        (lambda d: d["states"].pop(), "not one for each layer"),
        (lambda d: d["layers"].append("block_0"), "in order"),
        (lambda d: d.update(vocab_size=5), "does not run"),
        (lambda d: d["weights"].pop(), "is not a weight"),
        (lambda d: d["weights"][0].update(shape=[3, 3]), "as it is elsewhere"),
        (lambda d: d["constants"].popitem(), "odd|is not a weight"),
        (lambda d: d.update(gives="first"), "is not one of"),
        (lambda d: d.pop("step"), "step"),
        (lambda d: d.update(extra=1), "unknown field"),
        (lambda d: d["states"][0][0].update(head_dim=17), "as it is elsewhere"),
        (lambda d: next(n for n in d["step"] if "call" in n)["args"].__setitem__(4, "%lm_head_weight"),
         "is given lm_head_weight for an input of other dimensions"),
    ]:
        edited = json.loads(json.dumps(data))
        change(edited)
        with pytest.raises(ValueError, match=says):
            captured_from_data(edited, tensors)


NUMBER = {"in": "input_ids", "dtype": "int64", "shape": ["B", "S"]}
GROWING: dict[str, list[dict[str, Any]]] = {
    "squares": [{"op": "python.mul", "as": f"n{i}", "args": [f"%n{i - 1}" if i else 7] * 2} for i in range(64)],
    "power": [{"op": "python.pow", "as": "n", "args": [7, 10**12]}],
    "string": [{"op": "python.mul", "as": "n", "args": [{"str": "x"}, 10**15]}],
    "padding": [{"op": "python.mod", "as": "n", "args": [{"str": "%999999999999d"}, 5]}],
    "list": [{"op": "python.mul", "as": "n", "args": [[1, 2], 10**15]}],
    "doubled": [{"op": "python.add", "as": f"n{i}", "args": [f"%n{i - 1}" if i else [1]] * 2} for i in range(64)],
}


@pytest.mark.parametrize("name", GROWING)
def test_arithmetic_of_a_stored_graph_does_not_grow_without_end(name: str) -> None:
    gm = graph_from_data([NUMBER, *GROWING[name], {"out": "%input_ids"}], "graphs.step")
    with pytest.raises(ValueError, match="64 bits"):
        concretise(gm, {"input_ids": torch.empty(2, 3, dtype=torch.int64, device="meta")})


def test_arithmetic_on_sizes_is_stored_again_as_it_was_read() -> None:
    sums = [{"op": f"python.{name}", "as": f"of_{name}", "args": [7, 3]}
            for name in ("add", "sub", "mul", "floordiv", "mod", "pow", "truediv")]
    data = [NUMBER, *sums, {"out": "%input_ids"}]
    gm = graph_from_data(data, "graphs.step")
    calls: list[Any] = [node.target for node in gm.graph.nodes if node.op == "call_function"]
    assert [name_of(call) for call in calls] == [entry["op"] for entry in sums]
    assert [call(7, 3) for call in calls] == [10, 4, 21, 2, 1, 343, 7 / 3]
    assert name_of(operator.mul) == "python.mul"
