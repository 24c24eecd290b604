"""drop_values: attention over caches, and nothing else, becomes the operator that reads a share of the values."""

from __future__ import annotations

import pytest
import torch
from families import captured, rewritten

from forebay.kernels.attention.attention_q.operator import ATTENTION_Q
from forebay.kernels.attention.sparse_attention.operator import SPARSE_ATTENTION
from forebay.kernels.operators import ATTENTION
from forebay.passes.quantize.drop_values import drop_values
from forebay.rewriter.capture.step_graphs import step_graphs
from forebay.rewriter.ir.graph import CapturedModel
from forebay.rewriter.ir.plan import PlanError, Workload
from forebay.rewriter.ir.schedule.batch_schedule import BatchSchedule
from forebay.rewriter.ir.schedule.sparsity import Sparsity
from forebay.rewriter.pipeline.rewrite_captured import rewrite_captured
from forebay.rewriter.switches import Switches

WORK = Workload(2, 9, 4)


def attentions(model: CapturedModel) -> list[tuple[object, tuple]]:
    found = [(node.target, node.args) for gm in model.blocks().values() for node in gm.graph.nodes]
    kinds = {operator.overload for operator in (ATTENTION, ATTENTION_Q, SPARSE_ATTENTION)}
    return [(target, args) for target, args in found if target in kinds]


@pytest.mark.parametrize("cache", ("native", "kv4"))
def test_attention_alone_is_replaced_in_a_copy(cache: str) -> None:
    model = rewrite_captured(captured("gemma2"), Switches(), cache)
    before = attentions(model)
    assert model.choices is not None and before
    sparse = model.choices.sparse(0.25)
    assert attentions(model) == before, "the graphs that prefill stay"
    for (target, args), (_, plain) in zip(attentions(sparse), before, strict=True):
        assert target is SPARSE_ATTENTION.overload
        assert [str(a) for a in args] == [str(a) for a in (*plain[:7], 0.25, *plain[7:])]
    for name, block in model.blocks().items():
        other = sparse.step.get_submodule(name)
        same = [(a, b) for a, b in zip(block.graph.nodes, other.graph.nodes, strict=True)
                if a.target is not b.target and a.op == "call_function"]
        assert len(same) == sum(node.target in (ATTENTION.overload, ATTENTION_Q.overload) for node in block.graph.nodes)
    assert model.choices.sparse(0.25) is sparse, "made once"


def test_steps_over_one_token_have_it_and_others_have_not() -> None:
    graphs = step_graphs(rewritten("llama"), {}, WORK, "llama", batching=BatchSchedule(sparsity=Sparsity(0.5)))
    found = {tokens: {node.target for gm in graphs.step(tokens).modules() if hasattr(gm, "graph")
                      for node in gm.graph.nodes} for tokens in (1, 4)}
    assert SPARSE_ATTENTION.overload in found[1] and ATTENTION.overload not in found[1]
    assert SPARSE_ATTENTION.overload not in found[4] and ATTENTION.overload in found[4]


def test_a_graph_without_attention_keeps_its_nodes() -> None:
    gm = torch.fx.symbolic_trace(lambda x: torch.softmax(x, -1) @ x)
    before = str(gm.graph)
    drop_values(gm, 0.5)
    assert str(gm.graph) == before


def test_graphs_that_are_not_rewritten_are_refused() -> None:
    with pytest.raises(PlanError, match="sparse_values: graphs read fewer values once they are rewritten"):
        step_graphs(captured("llama"), {}, WORK, "llama", batching=BatchSchedule(sparsity=Sparsity(0.5)))
