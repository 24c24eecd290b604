"""choose_cache_blocks: means of keys in steps over prompts, chosen blocks in steps over one token, and refusals."""

from __future__ import annotations

import pytest
import torch
from families import captured, rewritten

from forebay.kernels.operators import ATTENTION, CHOOSE_BLOCKS, KV_APPEND, MEAN_KEYS
from forebay.passes.quantize.choose_cache_blocks import CannotChoose, choose_cache_blocks
from forebay.rewriter.capture.step_graphs import step_graphs
from forebay.rewriter.ir.graph import CapturedModel
from forebay.rewriter.ir.plan import PlanError, Workload
from forebay.rewriter.ir.schedule.batch_schedule import BatchSchedule
from forebay.rewriter.ir.schedule.cache_placement import CachePlacement
from forebay.rewriter.ir.schedule.sparsity import Sparsity
from forebay.rewriter.ir.state import KeyMeansState
from forebay.rewriter.pipeline.rewrite_captured import rewrite_captured
from forebay.rewriter.switches import Switches

WORK, OURS = Workload(2, 25, 4), {o.overload: o for o in (ATTENTION, CHOOSE_BLOCKS, KV_APPEND, MEAN_KEYS)}
BATCHING = BatchSchedule(cache=CachePlacement("disk", 8, 2), sparsity=Sparsity(0.5))


def order(model: CapturedModel) -> list[list[object]]:
    """The operators over the cache of each block, in order."""
    return [[OURS[node.target] for node in gm.graph.nodes if node.target in OURS] for gm in model.blocks().values()]


def test_blocks_are_changed_in_copies() -> None:
    model = rewritten("llama")
    assert model.choices is not None
    prompts, decoding = model.choices.choosing(1.0, 8), model.choices.choosing(0.5, 8)
    assert order(model) == [[KV_APPEND, ATTENTION]], "the graphs of others stay"
    assert order(prompts) == [[KV_APPEND, MEAN_KEYS, ATTENTION]]
    assert order(decoding) == [[CHOOSE_BLOCKS, KV_APPEND, MEAN_KEYS, ATTENTION]]
    assert model.choices.choosing(0.5, 8) is decoding, "made once"
    for changed in (prompts, decoding):
        assert [type(states[-1]) for states in changed.states] == [KeyMeansState] * len(model.states)
    block = next(iter(decoding.blocks().values()))
    chosen, append, means, attend = (node for node in block.graph.nodes if node.target in OURS)
    place = append.args[4]
    assert place.all_input_nodes[0] is chosen and attend.args[3] is place and means.args[2] is place
    assert means.args[3].target == "start" and chosen.args[2].target == "start"


def test_steps_over_one_token_choose_and_others_do_not() -> None:
    graphs = step_graphs(rewritten("llama"), {}, WORK, "llama", batching=BATCHING)
    found = {tokens: {node.target for gm in graphs.step(tokens).modules() if hasattr(gm, "graph")
                      for node in gm.graph.nodes} & OURS.keys() for tokens in (1, 4)}
    assert found[1] == OURS.keys() and found[4] == OURS.keys() - {CHOOSE_BLOCKS.overload}


def test_a_prompt_gives_what_it_gave() -> None:
    """The graph of prompts runs, and gives the untouched graph's logits."""
    plain, changed = (step_graphs(rewritten("llama"), {}, WORK, "llama", batching=batching).step(8)
                      for batching in (BatchSchedule(cache=BATCHING.cache), BATCHING))
    made = torch.Generator().manual_seed(0)
    values = {}
    for gm in (plain, changed):
        for node in gm.graph.find_nodes(op="placeholder"):
            value = node.meta["val"]
            if node.name not in values:
                values[node.name] = torch.randn(value.shape, generator=made) if value.is_floating_point() else (
                    torch.randint(0, 8, value.shape, generator=made))
    values["start"] = torch.zeros_like(values["start"])
    found = [torch.fx.Interpreter(gm).run(*[values[n.name].clone() for n in gm.graph.find_nodes(op="placeholder")])
             for gm in (plain, changed)]
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize(("family", "cache", "tokens", "why"), [
    ("llama", "native", 12, "blocks of 12 tokens hold no whole means of 8 keys"),
    ("llama", "kv4", 8, "does not append to one native cache"),
    ("gemma2", "native", 8, "attends to a part of the cache")])
def test_models_that_cannot_are_refused(family: str, cache: str, tokens: int, why: str) -> None:
    model = rewrite_captured(captured(family), Switches(), cache)
    assert model.choices is not None
    with pytest.raises(PlanError, match=f"kv_blocks: .*{why}"):
        model.choices.choosing(0.5, tokens)


def test_a_graph_without_layers_is_left_alone() -> None:
    gm = torch.fx.symbolic_trace(lambda x: torch.softmax(x, -1) @ x)
    before = str(gm.graph)
    with pytest.raises(CannotChoose, match="no layers"):
        choose_cache_blocks(gm, 0.5, 8)
    assert str(gm.graph) == before


def test_graphs_that_are_not_rewritten_are_refused() -> None:
    with pytest.raises(PlanError, match="kv_blocks: graphs that are not rewritten"):
        step_graphs(captured("llama"), {}, WORK, "llama", batching=BATCHING)
