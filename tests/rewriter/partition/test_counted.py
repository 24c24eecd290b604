"""Collectives in the graphs of a rank, in number and bytes, beside those that the partition model counts."""

from __future__ import annotations

import math

import families
import pytest
import torch
from torch import fx

from forebay.rewriter.capture.concretise import concretise, inline_blocks
from forebay.rewriter.capture.step_graphs import step_inputs
from forebay.rewriter.ir.graph import CapturedModel, is_collective
from forebay.rewriter.ir.plan import Workload
from forebay.rewriter.ir.share import RankShare, ranks_of
from forebay.rewriter.machine.presets import PRESETS
from forebay.rewriter.partition.collectives import ChipMesh, one_way
from forebay.rewriter.partition.layouts import ChipLayout, PhaseWork, element_sizes, layer_cost
from forebay.rewriter.predict.estimator import MachineEstimator
from forebay.rewriter.predict.model_shapes import shape_from_graphs
from forebay.rewriter.shard_captured import shard_captured
from forebay.rewriter.switches import Switches

WORK = Workload(batch=3, prompt=7, new_tokens=4)


def exchanged(captured: CapturedModel, share: RankShare, tokens: int) -> list[tuple[int, str, int, int]]:
    """(layer, operator, ranks, elements of a rank) of each collective of a step over so many tokens."""
    part, _ = shard_captured(captured, share, Switches())
    flat = inline_blocks(concretise(part.step, step_inputs(part, WORK, tokens)))
    return [(node.meta.get("layer", -1), str(node.target).split(".")[1], len(ranks_of(str(node.args[-1]))),
             math.prod(given_to(node).shape)) for node in flat.graph.nodes if is_collective(node)]


def given_to(node: fx.Node) -> torch.Tensor:
    operand = node.args[0]
    assert isinstance(operand, fx.Node)
    value = operand.meta["val"]
    assert isinstance(value, torch.Tensor)
    return value


@pytest.mark.parametrize("family", ["llama", "opt", "gpt_neox", "gpt2"])
@pytest.mark.parametrize("tokens", [1, 7])
def test_layers_exchange_what_the_model_of_one_dimension_counts(family: str, tokens: int) -> None:
    """An all-reduce is the reduce-scatter of partial sums and the all-gather of the next product's input."""
    captured, ranks = families.captured(family), 2
    mesh, times = ChipMesh((ranks,), (1e9,), one_way(0.0)), MachineEstimator(PRESETS["tpu-v4"])
    work = PhaseWork("step", WORK.batch, tokens, WORK.context)
    layer = shape_from_graphs(captured).layers[0]
    cost = layer_cost(layer, ChipLayout("1d", (), (), "heads"), mesh, work, times)
    counted = sorted((c.kind, c.nbytes / element_sizes("bfloat16").activation) for c in cost.collectives
                     if mesh.size(c.axes) > 1)
    found = [each for each in exchanged(captured, RankShare((ranks,), 0), tokens) if each[0] == 0]
    assert {op for _, op, *_ in found} == {"all_reduce"} and {n for *_, n, _ in found} == {ranks}
    assert counted == sorted((kind, float(elements)) for *_, elements in found
                             for kind in ("all-gather", "reduce-scatter"))


def test_stages_exchange_a_hidden_state_at_each_border_and_the_logits() -> None:
    captured = families.captured("opt")
    hidden, vocabulary = 64, captured.vocab_size
    for rank in range(4):
        handed = [each for each in exchanged(captured, RankShare((2,), rank, 2), 7) if each[1] == "broadcast_"]
        assert handed == [(-1, "broadcast_", 2, 3 * 7 * hidden), (-1, "broadcast_", 2, 3 * vocabulary)]
