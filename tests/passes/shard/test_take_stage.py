"""The pass `take_stage`: layers, weights and caches of each stage, what stages hand on, when, and what is refused."""

from __future__ import annotations

from itertools import combinations, pairwise

import families
import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import fx

from forebay.passes.shard.split import ShardError
from forebay.passes.shard.take_stage import take_stage
from forebay.rewriter.capture.step_graphs import step_graphs
from forebay.rewriter.ir.graph import CapturedModel, is_pipeline_send, weight_name
from forebay.rewriter.ir.plan import Budget, Workload
from forebay.rewriter.ir.program import COLLECT, COMPUTE, FileSlice, Launch, Program, Record, Wait
from forebay.rewriter.ir.schedule.batch_schedule import BatchSchedule
from forebay.rewriter.ir.schedule.micro_batches import MicroBatches
from forebay.rewriter.ir.share import RankShare, ranks_of
from forebay.rewriter.machine.profile import Machine
from forebay.rewriter.pipeline.rewrite_captured import rewrite_captured, with_blocks
from forebay.rewriter.pipeline.shard_captured import cut_evenly, shard_captured, stage_begins
from forebay.rewriter.pipeline.step_pipeline import Pipeline
from forebay.rewriter.switches import Switches
from forebay.rewriter.verify.graph import check_captured

WORK = Workload(batch=6, prompt=8, new_tokens=4)


def stages_of(captured: CapturedModel, stages: int, tensor: int = 1) -> list[CapturedModel]:
    return [shard_captured(captured, RankShare((tensor,), rank, stages), Switches())[0]
            for rank in range(stages * tensor)]


def handed(gm: fx.GraphModule) -> list[tuple]:
    """(name, source, ranks) of what a step graph exchanges with other stages."""
    return [(n.name, n.args[1], ranks_of(str(n.args[2]))) for n in gm.graph.nodes if is_pipeline_send(n)]


@pytest.mark.parametrize("family", families.FAMILIES)
def test_stages_have_each_layer_once_and_the_ends_what_stands_there(family: str) -> None:
    whole = families.captured(family)
    count = len(whole.layers)
    parts = stages_of(whole, count)
    assert sum((part.layers for part in parts), ()) == whole.layers
    assert sum((part.layer_weights for part in parts), ()) == whole.layer_weights
    assert sum((part.states for part in parts), ()) == whole.states
    assert set().union(*(part.weights for part in parts)) == set(whole.weights)
    tables = {weight_name(n) for node in whole.step.graph.nodes if node.op == "call_function" for n in
              node.all_input_nodes}
    for i, part in enumerate(parts):
        check_captured(part.step, "take_stage")
        assert set(part.weights) - set(part.layer_weights[0].values()) <= tables
        assert [n.name for n in part.step.graph.find_nodes(op="placeholder")][:3] == ["input_ids", "start", "last"]
        before = [(f"handed_on_{i - 1}", 0, (i - 1, i))] if i else []
        behind = [(f"handed_on_{i}", 0, (i, i + 1))] if i < count - 1 else []
        everybody = [(f"handed_on_{count - 1}", count - 1, tuple(range(count)))]
        assert handed(part.step) == before + behind + everybody
    assert not handed(whole.step), "the captured graphs were changed"


def test_ranks_of_a_stage_meet_those_of_others_at_their_own_place() -> None:
    parts = stages_of(families.captured("opt"), 2, 2)
    for rank, part in enumerate(parts):
        assert [ranks for *_, ranks in handed(part.step)] == [(rank % 2, rank % 2 + 2)] * 2
        (block,) = part.blocks().values()
        sums = [ranks_of(n.args[2]) for n in block.graph.nodes if "all_reduce" in str(n.target)]
        assert sums == [(0, 1) if rank < 2 else (2, 3)] * 2


@given(st.lists(st.integers(1, 30), min_size=1, max_size=9), st.integers(1, 9))
def test_the_largest_stage_is_as_small_as_can_be(sizes: list[int], stages: int) -> None:
    stages = min(stages, len(sizes))
    begins = cut_evenly(sizes, stages)
    assert begins[0] == 0 and begins[-1] == len(sizes) and len(begins) == stages + 1

    def largest(cuts: tuple[int, ...]) -> int:
        assert all(a < b for a, b in pairwise(cuts))
        return max(sum(sizes[a:b]) for a, b in pairwise(cuts))

    ways = combinations(range(1, len(sizes)), stages - 1)
    assert largest(begins) == min(largest((0, *way, len(sizes))) for way in ways)


def test_too_many_stages_and_layers_that_read_earlier_ones_are_refused() -> None:
    whole = families.captured("opt")
    with pytest.raises(ShardError, match="3 stages need as many layers, and the model has 2"):
        stage_begins(whole, 3)
    step = with_blocks(families.captured("llama"))
    first, second, third = step.graph.find_nodes(op="call_module")
    third.args = (second, first, *third.args[2:])
    with pytest.raises(ShardError, match=r"read 2 values of those before \(layer_1, layer_0\): stages send one"):
        take_stage(step, RankShare((1,), 0, 2), (0, 2, 3))


def program(rank: int, batching: BatchSchedule) -> tuple[Program, int]:
    """A decode step of a stage of two of an OPT, and how many of its items stand before what follows its layers."""
    part = rewrite_captured(stages_of(families.captured("opt"), 2)[rank], Switches())
    files = {name: FileSlice("weights", 64 * i, spec.nbytes) for i, (name, spec) in enumerate(part.weights.items())}
    pipeline = Pipeline(step_graphs(part, files, WORK, "opt", batching=batching), WORK, Machine.default(), Switches())
    found = pipeline.program(pipeline.plan(Budget(device=2 << 20)), 1)
    return found, 1 + max(i for i, item in enumerate(found.step) if isinstance(item, Launch) and item.layer == 0)


@pytest.mark.parametrize("order", ["row", "zigzag"])
def test_stages_overlap_and_meet_once_all_micro_batches_are_done(order: str) -> None:
    batching = BatchSchedule(MicroBatches(3, order))  # type: ignore[arg-type]
    (first, end), (second, _) = program(0, batching), program(1, batching)
    exchanges = [[i.label for i in p.step if isinstance(i, Launch) and i.stream == COLLECT] for p in (first, second)]
    assert exchanges[0] == exchanges[1] == [f"handed_on_{n}@{k}" for n in range(2) for k in range(3)]
    events = {item.event for item in first.step if isinstance(item, Record) and item.stream == COLLECT}
    waits = [i for i, item in enumerate(first.step) if isinstance(item, Wait) and item.stream == COMPUTE
             and item.event in events]
    assert len(waits) == 3, "a micro-batch waits for the last of its exchanges, which end in order"
    assert min(waits) > end, "the first stage waits for the second while it has layers to compute"
    # what a micro-batch is handed is waited for by it alone, and given away before the next one's layers
    labels = [i.label for i in first.step if isinstance(i, Launch) and (i.layer == 0 or i.stream == COLLECT)]
    assert labels.index("handed_on_0@0") < next(i for i, label in enumerate(labels) if label.endswith("@1"))
