"""Layers placed alike share a block graph; lowering records it once and stamps it for each of them."""

from __future__ import annotations

import functools
from collections import Counter
from dataclasses import replace

import pytest
from families import FAMILIES, captured, rewritten
from selection import at_length, without
from torch import fx

from forebay.passes.place.allocate_buffers import plan_activations
from forebay.passes.place.repeat_layout import repeats
from forebay.passes.place.specialise_blocks import specialise_blocks
from forebay.rewriter.capture.concretise import concretise, inline_blocks, representative_layers
from forebay.rewriter.capture.language_model import capture_model
from forebay.rewriter.capture.step_graphs import step_graphs, step_inputs
from forebay.rewriter.ir.graph import META, CapturedModel, WeightInput, block_graphs, weight_name
from forebay.rewriter.ir.plan import Budget, Limits, Plan, Workload
from forebay.rewriter.ir.program import FileSlice, Launch, Program
from forebay.rewriter.ir.state import StateInput
from forebay.rewriter.machine.profile import Machine
from forebay.rewriter.pipeline.rewrite_captured import rewrite_captured
from forebay.rewriter.pipeline.step_pipeline import Pipeline
from forebay.rewriter.switches import Switches
from forebay.rewriter.verify.program import verify_program

WORK = Workload(batch=2, prompt=6, new_tokens=4)


def pipeline(family: str) -> Pipeline:
    lm = rewritten(family)
    files = {spec.name: FileSlice("weights", i << 24, spec.nbytes) for i, spec in enumerate(lm.weights.values())}
    return Pipeline(step_graphs(lm, files, WORK, family), WORK, Machine.default(), Switches())


@functools.cache
def streaming(family: str) -> tuple[Pipeline, Plan]:
    """Planned once for all tests, which change neither."""
    made = pipeline(family)
    smallest = made.smallest_budget()
    whole = smallest + sum(u.nbytes for u in made.needs.uses)
    plan = made.plan(Budget((smallest + whole) // 2))
    assert plan.prediction.streamed_nbytes > 0
    return made, plan


@pytest.mark.parametrize("family", without(
    FAMILIES, ("qwen2", "mistral", "phi3", "opt_projected", "gpt_neox", "qwen3")))
def test_a_copy_for_every_way_to_place_a_layer(family: str) -> None:
    made, plan = streaming(family)
    gm = made.graphs.step(1)
    calls = gm.graph.find_nodes(op="call_module")
    kinds = [str(call.target) for call in calls]
    specialise_blocks(gm, plan)

    def placement(call: fx.Node) -> tuple:
        names = [n for arg in call.args if isinstance(arg, fx.Node) and (n := weight_name(arg)) is not None]
        return tuple((plan.streams(n), plan.weight(n).tile_rows if plan.streams(n) else 0) for n in names)

    ways = {(kind, placement(call)) for kind, call in zip(kinds, calls, strict=True)}
    assert len(block_graphs(gm)) == len(ways)
    for call in calls:
        block = gm.get_submodule(str(call.target))
        assert isinstance(block, fx.GraphModule)
        marks = [n.meta.get(META) for n in block.graph.find_nodes(op="placeholder")]
        for mark, arg in zip(marks, call.args, strict=True):
            assert isinstance(arg, fx.Node)
            assert type(mark) is type(arg.meta.get(META)), "every weight and cache is marked, nothing else is"
        assert sum(isinstance(m, StateInput) for m in marks) == 2 and any(isinstance(m, WeightInput) for m in marks)


def test_a_graph_without_calls_is_left_alone() -> None:
    made, plan = streaming("llama")
    gm = inline_blocks(made.graphs.step(1))
    before = [n.name for n in gm.graph.nodes]
    specialise_blocks(gm, plan)
    assert [n.name for n in gm.graph.nodes] == before and block_graphs(gm) == {}


def launches(program: Program) -> Counter:
    return Counter((i.op, i.label, i.layer) for i in program.step if isinstance(i, Launch))


@pytest.mark.parametrize("family", FAMILIES)
def test_stamped_layers_do_what_each_layer_by_itself_would(family: str) -> None:
    """The same launches, proved, whether equal layers share addresses or each has its own."""
    made, plan = streaming(family)
    assert not made.steps.each_layer, "equal layers find their inputs in the same places"
    apart = pipeline(family)
    apart.steps = replace(apart.steps, each_layer=True)
    kept = tuple(b for b in plan.buffers if b.phase == "all" or b.kind == "cache")
    roomy = {"device": plan.arenas["device"] + (1 << 20)}
    by_itself = apart.complete(replace(plan, arenas=roomy, budget=Limits(1 << 30), buffers=kept))
    for tokens in (1, 6):
        shared, program = made.program(plan, tokens), apart.program(by_itself, tokens)
        for p in (shared, program):
            verify_program(p)
        assert launches(shared) == launches(program)
        assert shared.streamed_nbytes() == program.streamed_nbytes()
        touched = Counter(span.buffer for i in shared.step if isinstance(i, Launch) for span in i.reads)
        assert {w.name for w in plan.weights if w.tier == "device"} <= set(touched), "every layer reads its own weights"


def deep_llama(layers: int) -> CapturedModel:
    from transformers import LlamaConfig

    config = LlamaConfig(hidden_size=32, num_hidden_layers=layers, num_attention_heads=2, num_key_value_heads=1,
                         intermediate_size=48, vocab_size=64)
    return rewrite_captured(capture_model(config), Switches())


def test_layers_whose_inputs_move_do_not_share_addresses() -> None:
    lm = deep_llama(6)
    step = concretise(lm.step, step_inputs(lm, WORK, 1))
    short, representatives = representative_layers(step)
    assert representatives == {0: 0, 1: 1, 2: 1, 3: 1, 4: 1, 5: 5}
    layout = replace(plan_activations(inline_blocks(short)), representatives=representatives)
    assert repeats(step, layout)
    block = step.get_submodule(str(step.graph.find_nodes(op="call_module")[1].target))
    assert isinstance(block, fx.GraphModule)
    result = block.graph.output_node().all_input_nodes[0]
    base = result.meta.get("alias_of") or result
    home = dict(layout.home) | {(f"layer1_{base.name}", 0): "elsewhere"}
    assert not repeats(step, replace(layout, home=home))


def test_a_deep_model_is_lowered_layer_by_layer_where_layers_do_not_repeat(monkeypatch: pytest.MonkeyPatch) -> None:
    lm = deep_llama(6)
    files = {spec.name: FileSlice("weights", i << 20, spec.nbytes) for i, spec in enumerate(lm.weights.values())}

    def programs() -> tuple[Pipeline, list[Program]]:
        made = Pipeline(step_graphs(lm, files, WORK, "deep"), WORK, Machine.default(), Switches())
        plan = made.plan(Budget(made.smallest_budget() + lm.weight_nbytes // 2))
        return made, [made.program(plan, tokens) for tokens in (1, plan.schedule.prefill_chunk)]

    shared, expected = programs()
    monkeypatch.setattr("forebay.rewriter.pipeline.step_pipeline.repeats",
                        lambda gm, layout: bool(not layout.representatives))
    apart, found = programs()
    assert not shared.steps.each_layer and apart.steps.each_layer
    for a, b in zip(expected, found, strict=True):
        assert {label for _, label, _ in launches(a)} >= {f"layer{i}_attention" for i in range(6)}
        assert {op for op, _, _ in launches(a)} == {op for op, _, _ in launches(b)}


def test_few_layers_keep_the_second_of_each_kind_and_the_last() -> None:
    lm = captured("gemma2")
    step = concretise(lm.step, step_inputs(lm, WORK, 1))
    short, representatives = representative_layers(step)
    kept = [call.meta["layer"] for call in short.graph.find_nodes(op="call_module")]
    kinds = list(lm.layers)
    assert all(representatives[layer] == layer for layer in kept)
    assert all(kinds[layer] == kinds[like] for layer, like in representatives.items())
    for kind in set(kinds):
        assert max(i for i, k in enumerate(kinds) if k == kind) in kept


@pytest.mark.parametrize("dense", [at_length((0, 1, 2)), (3, 4), at_length((0, 8))])
def test_layers_after_the_last_of_a_kind_are_represented_too(dense: tuple[int, ...]) -> None:
    from transformers import Qwen3MoeConfig

    config = Qwen3MoeConfig(hidden_size=32, num_hidden_layers=9, num_attention_heads=2, num_key_value_heads=1,
                            head_dim=16, intermediate_size=48, moe_intermediate_size=16, num_experts=4,
                            num_experts_per_tok=2, vocab_size=64, mlp_only_layers=list(dense))
    lm = rewrite_captured(capture_model(config), Switches())
    step = concretise(lm.step, step_inputs(lm, WORK, 1))
    short, representatives = representative_layers(step)
    assert all(lm.layers[layer] == lm.layers[like] for layer, like in representatives.items())
    assert len(set(representatives.values())) < 9, "a layer is left out"
    layout = replace(plan_activations(inline_blocks(short)), representatives=representatives)
    assert repeats(step, layout)
    assert layout.height == plan_activations(inline_blocks(step)).height
