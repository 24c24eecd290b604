"""A pass from outside the package: a function and its place in the list, and no other line."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from extending.made_models import greedy, prompts, saved, streamed
from families import captured, gpt2
from selection import at_length
from torch import fx

from forebay.passes.fuse.fuse_rotary import fuse_rotary
from forebay.rewriter.ir.draft import Draft
from forebay.rewriter.ir.plan import Plan
from forebay.rewriter.pipeline.pass_list import PASSES, register_pass
from forebay.rewriter.pipeline.rewrite_captured import rewrite_captured
from forebay.rewriter.pipeline.run_passes import Pass
from forebay.rewriter.switches import Switches
from forebay.rewriter.verify.bisect import PassChangedResult
from forebay.rewriter.verify.graph import GraphError

aten = torch.ops.aten


def cubes_as_products(gm: fx.GraphModule) -> None:
    """Make x ** 3, which calls a library's `pow` for each element, two products."""
    for node in gm.graph.find_nodes(op="call_function", target=aten.pow.Tensor_Scalar):
        if node.args[1] == 3:
            with gm.graph.inserting_before(node):
                square = gm.graph.call_function(aten.mul.Tensor, (node.args[0], node.args[0]))
                cube = gm.graph.call_function(aten.mul.Tensor, (square, node.args[0]))
            for made in (square, cube):
                made.meta |= {"val": node.meta["val"], "made_by": "cubes_as_products"}
            node.replace_all_uses_with(cube)
            gm.graph.erase_node(node)


CUBES = Pass(cubes_as_products, "captured", "each graph", "products that end in an activation are folded",
             optional=True)


@pytest.fixture(autouse=True)
def passes() -> Iterator[None]:
    before = [*PASSES]
    yield
    PASSES[:] = before


@pytest.mark.parametrize(("checked", "how"), [
    at_length("FOREBAY_VERIFY", "graphs"), ("FOREBAY_BISECT", "1")])
def test_a_pass_from_outside_rewrites_a_streamed_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, checked: str, how: str
) -> None:
    register_pass(CUBES, after="fuse_residual")
    folder, model = saved(gpt2(activation_function="gelu_new"), tmp_path / "model")
    ids = prompts()
    monkeypatch.setenv(checked, how)
    found, launches = streamed(folder, ids)
    torch.testing.assert_close(found, greedy(model, ids), rtol=1e-4, atol=1e-5)
    assert "aten.mul.out" in launches and "aten.pow.Tensor_Scalar_out" not in launches
    monkeypatch.setenv("FOREBAY_SKIP", CUBES.name)
    plain, before = streamed(folder, ids)
    torch.testing.assert_close(plain, found, rtol=1e-4, atol=1e-5)
    assert "aten.pow.Tensor_Scalar_out" in before, "FOREBAY_SKIP leaves it out"


def subtracts(gm: fx.GraphModule) -> None:
    """Wrong on purpose: sums become differences."""
    for node in gm.graph.find_nodes(op="call_function", target=aten.add.Tensor):
        if node.meta["val"].is_floating_point():
            node.target = aten.sub.Tensor


def narrows(gm: fx.GraphModule) -> None:
    """Wrong on purpose: a value that is said to have half of its columns."""
    for node in gm.graph.find_nodes(op="call_function", target=aten.pow.Tensor_Scalar):
        node.meta["val"] = node.meta["val"][..., :1]


def test_a_pass_from_outside_is_compared_and_checked_as_others_are() -> None:
    model = captured("gpt2")
    register_pass(replace(CUBES, run=subtracts), after="shard")
    with pytest.raises(PassChangedResult, match="subtracts is the first pass"):
        rewrite_captured(model, Switches(bisect=True))
    register_pass(replace(CUBES, run=narrows), after="fuse_rotary")
    with pytest.raises(GraphError, match="narrows left block_0 unsound"):
        rewrite_captured(model, Switches(verify_graphs=True))


def last(draft: Draft, plan: Plan) -> None:
    SEEN.append((len(draft.items), plan.schedule.prefill_chunk))


SEEN: list[tuple[int, int]] = []


def test_a_pass_of_the_last_phase_is_given_the_draft_and_the_plan(tmp_path: Path) -> None:
    register_pass(Pass(last, "lowered", "draft", "it only looks"), after="hoist_prefetch")
    folder, _ = saved(gpt2(), tmp_path / "model")
    streamed(folder, prompts())
    assert SEEN and all(items and chunk for items, chunk in SEEN)


@pytest.mark.parametrize(("each", "after", "said"), [
    (replace(CUBES, run=fuse_rotary), "fuse_swiglu", "there is a pass fuse_rotary already"),
    (CUBES, "fuse_all", "no pass 'fuse_all' of phase captured"),
    (CUBES, "select_gemm", "no pass 'select_gemm' of phase captured; they are take_stage"),
])
def test_a_place_that_is_none_is_refused(each: Pass, after: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        register_pass(each, after=after)
