"""Collectives in the graphs of a rank, in number and bytes, beside those that the partition model counts."""

from __future__ import annotations

import functools
import math
from dataclasses import replace

import families
import pytest
import torch
from selection import ALL, without
from torch import fx

from forebay.read_mesh import read_mesh
from forebay.rewriter.capture.concretise import concretise, inline_blocks
from forebay.rewriter.capture.language_model import capture_model
from forebay.rewriter.capture.step_graphs import step_inputs
from forebay.rewriter.ir.graph import CapturedModel, is_collective
from forebay.rewriter.ir.plan import PlanError, Workload
from forebay.rewriter.ir.schedule.admission import Admission
from forebay.rewriter.ir.schedule.batch_schedule import BatchSchedule
from forebay.rewriter.ir.schedule.cache_placement import CachePlacement
from forebay.rewriter.ir.schedule.micro_batches import MicroBatches
from forebay.rewriter.ir.share import RankShare, ranks_of
from forebay.rewriter.machine.presets import PRESETS
from forebay.rewriter.partition.collectives import ChipMesh, one_way
from forebay.rewriter.partition.layouts import ChipLayout, PhaseWork, element_sizes, layer_cost
from forebay.rewriter.pipeline.shard_captured import shard_captured
from forebay.rewriter.predict.estimator import MachineEstimator
from forebay.rewriter.predict.model_shapes import shape_from_graphs
from forebay.rewriter.switches import Switches

WORK, EIGHT = Workload(batch=3, prompt=7, new_tokens=4), Workload(batch=8, prompt=7, new_tokens=4)
STEPS = MachineEstimator(PRESETS["tpu-v4"])
# Heads, features: four ranks have as many each.
EVEN = without(("llama", "opt", "gpt_neox", "gpt2", "phi3", "bigcode"), ("gpt_neox", "gpt2", "phi3"))


@functools.cache
def model(family: str) -> CapturedModel:
    return capture_model(families.bigcode()) if family == "bigcode" else families.captured(family)


def exchanged(captured: CapturedModel, share: RankShare, tokens: int, work: Workload = WORK
              ) -> list[tuple[int, str, tuple[int, ...], int]]:
    """(layer, operator, ranks, elements that a rank gives) of each collective of a step over so many tokens."""
    part, _ = shard_captured(captured, share, Switches())
    part = part.prefill if tokens > 1 and part.prefill is not None else part
    flat = inline_blocks(concretise(part.step, step_inputs(part, work, tokens)))
    return [(node.meta.get("layer", -1), str(node.target).split(".")[1], ranks_of(str(node.args[-1])),
             math.prod(given_to(node).shape)) for node in flat.graph.nodes if is_collective(node)]


def some_of(ranks: int) -> tuple[int, ...]:
    """Ranks that are looked at: the first and the last, which differ along every axis."""
    return tuple(range(ranks)) if ALL else (0, ranks - 1)


def counted(family: str, layout: ChipLayout, shape: tuple[int, ...], tokens: int, work: Workload = WORK
            ) -> list[tuple[str, int, float]]:
    """(collective, ranks, elements of the larger end) of what the model counts of a layer."""
    mesh = ChipMesh(shape, (1e9,) * len(shape), one_way(0.0))
    step = PhaseWork("step", work.batch, tokens, work.context)
    layer = shape_from_graphs(model(family)).layers[0]
    cost = layer_cost(layer, layout, mesh, step, STEPS, parallel=family == "gpt_neox")
    return sorted((c.kind, mesh.size(c.axes), c.nbytes / element_sizes("bfloat16").activation)
                  for c in cost.collectives if mesh.size(c.axes) > 1)


def given_to(node: fx.Node) -> torch.Tensor:
    operand = node.args[0]
    assert isinstance(operand, fx.Node)
    value = operand.meta["val"]
    assert isinstance(value, torch.Tensor)
    return value


def as_counted(operator: str, ranks: tuple[int, ...], elements: int) -> list[tuple[str, int, float]]:
    """A collective as the model names them, with the elements of its larger end. An all-reduce is the reduce-scatter of
    partial sums and the all-gather of the next product's input."""
    gather, scatter = ("all-gather", 1), ("reduce-scatter", 1)
    kinds = {"all_reduce": (gather, scatter), "reduce_scatter_tensor": (scatter,),
             "all_gather_into_tensor": (("all-gather", len(ranks)),), "all_to_all_single": (("all-to-all", 1),)}
    return [(kind, len(ranks), float(elements * times)) for kind, times in kinds[operator]]


@pytest.mark.covering(1)
@pytest.mark.parametrize("family", EVEN)
@pytest.mark.parametrize("tokens", [1, 7])
@pytest.mark.parametrize("ranks", [2, 4])
def test_layers_exchange_what_the_model_of_one_dimension_counts(family: str, tokens: int, ranks: int) -> None:
    found = [each for each in exchanged(model(family), RankShare((ranks,), 0), tokens) if each[0] == 0]
    assert len(found) == (1 if family == "gpt_neox" else 2)
    assert sorted(item for _, *each in found for item in as_counted(*each)) == counted(
        family, ChipLayout("1d", (), (), "heads", copied=True), (ranks,), tokens)


@pytest.mark.covering(1)
@pytest.mark.parametrize("family", EVEN)
@pytest.mark.parametrize("tokens", [1, 7])
def test_layers_exchange_what_the_model_of_two_dimensions_counts(family: str, tokens: int) -> None:
    """Beside it, each norm's one or two numbers a token: of its squares, or of its mean and variance."""
    rows, wide = WORK.batch * tokens, 2
    for rank in some_of(4):
        found = [each for each in exchanged(model(family), RankShare((2, 2), rank, 1, "2d"), tokens) if each[0] == 0]
        norms = [(op, elements) for _, op, _, elements in found if elements <= 2 * rows]
        assert norms == [("all_reduce", rows)] * 2 if family in ("llama", "phi3") else (
            [("all_gather_into_tensor", 2 * rows)] * (1 if family == "gpt_neox" else 2))
        along = {op: ranks for _, op, ranks, elements in found if elements > 2 * rows}
        first = rank - rank % wide
        assert along["reduce_scatter_tensor"] == along["all_gather_into_tensor"] == (first, first + 1)
        assert along["all_reduce"] == (rank % wide, rank % wide + wide)
        assert sorted(item for _, *each in found if each[-1] > 2 * rows for item in as_counted(*each)) == counted(
            family, ChipLayout("2d", (1,), (), "heads", copied=True), (2, 2), tokens)


@pytest.mark.covering(1)
@pytest.mark.parametrize("family", EVEN)
@pytest.mark.parametrize("tokens", [1, 7])
def test_chunks_of_sums_are_exchanged_as_often_as_the_model_counts(family: str, tokens: int) -> None:
    """In four chunks over several tokens and in two over one, in one dimension and in two; beside it the norms'."""
    chunks = 4 if tokens > 1 else 2
    for shape, layout in (((2,), "1d"), ((4,), "1d"), ((2, 2), "2d")):
        way = ChipLayout("1d" if layout == "1d" else "2d", () if layout == "1d" else (1,), (), "heads", True, chunks)
        for rank in some_of(math.prod(shape)):
            share = RankShare(shape, rank, 1, "1d" if layout == "1d" else "2d", chunks=(4, 2))
            found = [each for each in exchanged(model(family), share, tokens) if each[0] == 0]
            assert [op for _, op, *_ in found].count("all_reduce") >= chunks * (1 if family == "gpt_neox" else 2)
            assert sorted(item for _, *each in found if each[-1] > 2 * WORK.batch * tokens
                          for item in as_counted(*each)) == counted(family, way, shape, tokens)


@pytest.mark.covering(1)
@pytest.mark.parametrize("family", EVEN)
@pytest.mark.parametrize("tokens", [1, 7])
@pytest.mark.parametrize(("attention", "chunks"), [("heads", 1), ("heads", 2), ("batch", 1)])
def test_chunks_of_inputs_are_gathered_as_often_as_the_model_counts(family: str, tokens: int, attention: str,
                                                                    chunks: int) -> None:
    """In four chunks over several tokens and in two over one, whatever sums of the products before are exchanged in:
    those behind are at once. Beside it the norms'."""
    gathers, work = (4 if tokens > 1 else 2), WORK if attention == "heads" else EIGHT
    way = ChipLayout("2d", (1,), (), attention, attention == "heads", chunks, gathers)  # type: ignore[arg-type]
    for rank in some_of(4):
        share = RankShare((2, 2), rank, 1, "2d", attention, chunks=(chunks, chunks), gather_chunks=(4, 2))  # type: ignore[arg-type]
        found = [each for each in exchanged(model(family), share, tokens, work) if each[0] == 0]
        large = [each for each in found if each[-1] > 2 * work.batch * tokens]
        levels = 1 if family == "gpt_neox" else 2
        assert [op for _, op, *_ in large].count("all_gather_into_tensor") == gathers * levels
        assert [op for _, op, *_ in large].count("all_reduce") == levels
        assert sorted(item for _, *each in large for item in as_counted(*each)) == counted(
            family, way, (2, 2), tokens, work)


@pytest.mark.covering(1)
@pytest.mark.parametrize("family", EVEN)
@pytest.mark.parametrize("tokens", [1, 7])
def test_attention_over_the_batch_exchanges_what_the_model_counts(family: str, tokens: int) -> None:
    """On two and four ranks in one dimension, and on four in two: heads and features for sequences before attention,
    and back behind it. Nobody computes heads of keys and values that others compute."""
    for shape, layout in (((2,), "1d"), ((4,), "1d"), ((2, 2), "2d")):
        way = ChipLayout("1d" if layout == "1d" else "2d", () if layout == "1d" else (1,), (), "batch")
        for rank in some_of(math.prod(shape)):
            share = RankShare(shape, rank, 1, "1d" if layout == "1d" else "2d", "batch")
            found = [each for each in exchanged(model(family), share, tokens, EIGHT) if each[0] == 0]
            assert [op for _, op, *_ in found].count("all_to_all_single") == 2
            assert all(len(ranks) == share.beside for _, op, ranks, _ in found if op == "all_to_all_single")
            assert sorted(item for _, *each in found if each[-1] > 2 * EIGHT.batch * tokens
                          for item in as_counted(*each)) == counted(family, way, shape, tokens, EIGHT)


@pytest.mark.covering(1)
@pytest.mark.parametrize("family", EVEN)
@pytest.mark.parametrize(("shape", "layout"), [((2, 2), "x"), ((2, 2), "xyz"), ((2, 2, 2), "xy")])
def test_gathered_weights_are_those_that_the_model_counts(family: str, shape: tuple[int, ...], layout: str) -> None:
    """A gather for each matrix, where the model has one for all of a layer, with the vectors in it that ranks have
    whole, or gather along fewer axes. Else the layer exchanges what it is counted for, and decode steps as they would.
    """
    mesh, chips = ChipMesh(shape, (1e9,) * len(shape), one_way(0.0)), math.prod(shape)
    share = read_mesh(f"tensor={'x'.join(map(str, shape))},layout={layout}")
    over = mesh.size(share.gathered)
    way = ChipLayout(layout, (len(shape) - 1,), share.gathered, "batch")  # type: ignore[arg-type]
    specs = [model(family).weights[name] for name in set(model(family).layer_weights[0].values())]
    matrices, vectors = (sum(math.prod(spec.shape) for spec in specs if len(spec.shape) == dims) for dims in (2, 1))
    for rank in some_of(chips):
        mine = replace(share, rank=rank)
        found = [each for each in exchanged(model(family), mine, 7, EIGHT) if each[0] == 0]
        gathers = [(len(ranks), n) for _, op, ranks, n in found if op == "all_gather_into_tensor" and n > 192]
        assert sum(ranks * n for ranks, n in gathers) == matrices * over / chips
        assert {ranks for ranks, _ in gathers} == {over}
        others = sorted(item for _, op, ranks, n in found if op != "all_gather_into_tensor"
                        for item in as_counted(op, ranks, n))
        expected = counted(family, way, shape, 7, EIGHT)
        expected.remove(("all-gather", over, (matrices + vectors) * over / chips))
        assert others == expected
        decode = RankShare(shape, rank, 1, "2d", "batch")
        assert exchanged(model(family), mine, 1, EIGHT) == exchanged(model(family), decode, 1, EIGHT)


def test_sequences_that_ranks_cannot_share_evenly_or_whose_caches_move_are_refused() -> None:
    own, _ = shard_captured(model("llama"), RankShare((2,), 0, attention="batch"), Switches())
    assert step_inputs(own, EIGHT, 1)["cache_k_0"].shape == (4, 2, EIGHT.context, 16)
    with pytest.raises(PlanError, match="take a multiple of 2"):
        step_inputs(own, WORK, 1)
    for batching in (BatchSchedule(MicroBatches(2), CachePlacement("disk", 16, 3)),
                     BatchSchedule(MicroBatches(2), admission=Admission(2))):
        with pytest.raises(PlanError, match="take attention=heads"):
            step_inputs(own, EIGHT, 1, batching=batching)


def test_stages_exchange_a_hidden_state_at_each_border_and_the_logits() -> None:
    captured = families.captured("opt")
    hidden, vocabulary = 64, captured.vocab_size
    for rank in some_of(4):
        handed = [each for each in exchanged(captured, RankShare((2,), rank, 2), 7) if each[1] == "broadcast_"]
        assert [(*at, len(ranks), n) for *at, ranks, n in handed] == [
            (-1, "broadcast_", 2, 3 * 7 * hidden), (-1, "broadcast_", 2, 3 * vocabulary)]
    for rank in some_of(8):  # in two dimensions each its part of it
        handed = [each for each in exchanged(captured, RankShare((2, 2), rank, 2, "2d"), 7) if each[1] == "broadcast_"]
        assert [each[2:] for each in handed] == [((rank % 4, rank % 4 + 4), 3 * 7 * hidden // 2),
                                                 ((rank % 4, rank % 4 + 4), 3 * vocabulary)]
