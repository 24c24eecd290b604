"""The cheapest values to keep: what K and V are made of where heads do not share keys, else K and V themselves."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from families import gemma2, gpt2, gpt_neox, llama, mistral, opt
from torch import fx

from forebay.passes.checkpoint.checkpoint_kv import layer_cuts
from forebay.passes.checkpoint.smallest_cut import Cut, smallest_cut, token_nbytes
from forebay.rewriter.capture.language_model import capture_model
from forebay.rewriter.ir.products import linear_arguments
from forebay.rewriter.pipeline.rewrite_captured import rewrite_captured
from forebay.rewriter.switches import Switches


def first_block(config: Any) -> fx.GraphModule:
    captured = rewrite_captured(capture_model(config, dtype=torch.float32), Switches())
    return captured.blocks()[captured.layers[0]]


def tables_of(block: fx.GraphModule) -> list[str]:
    return [n.name for n in block.graph.find_nodes(op="placeholder") if n.name.startswith("position_embeddings")]


@pytest.mark.parametrize("make", [opt, gpt2, gpt_neox])
def test_heads_of_their_own_make_the_hidden_state_the_smallest(make: Any) -> None:
    block = first_block(make())
    cut = smallest_cut(block, tables_of(block))
    assert cut is not None and cut.smaller and 2 * cut.nbytes == cut.kv_nbytes
    (kept,) = cut.kept
    assert any(linear_arguments(user) is not None or user.target is torch.ops.aten.addmm.default
               for user in kept.users), "of values of one size the last before the products"


@pytest.mark.parametrize("make", [lambda: llama(2), mistral])
def test_shared_heads_leave_keys_and_values(make: Any) -> None:
    block = first_block(make())
    cut = smallest_cut(block, tables_of(block))
    assert cut is not None and not cut.smaller and cut.made == () and set(cut.kept) == set(cut.append.args[2:4])
    behind = smallest_cut(block, tables_of(block), behind_products=True)
    assert behind is not None and behind.made and behind.nbytes >= behind.kv_nbytes


def test_a_dear_product_is_not_made_again() -> None:
    block = first_block(opt())

    def price(node: fx.Node) -> float:
        return 1e6 if linear_arguments(node) is not None else 0.0

    cut = smallest_cut(block, price=price)
    assert cut is not None and not cut.smaller


@pytest.mark.parametrize("make", [opt, gpt2, gemma2, lambda: llama(2)])
def test_no_other_single_value_is_smaller(make: Any) -> None:
    """Every value whose removal parts the tokens from K and V, found by trying each."""
    block = first_block(make())
    cut = smallest_cut(block, tables_of(block), behind_products=True)
    assert cut is not None
    inputs = [n for n in block.graph.find_nodes(op="placeholder") if n.name == "hidden"]
    products = [n for n in cut.made if linear_arguments(n) is not None or n.target is torch.ops.aten.addmm.default]
    found = [token_nbytes(n) for n in block.graph.nodes if token_nbytes(n) and not any(
        reaches(start, end, n) for start, end in itertools.product(inputs, products))]
    assert sum(token_nbytes(n) for n in cut.kept) == min(found)


def reaches(start: fx.Node, end: fx.Node, without: fx.Node) -> bool:
    """Whether a way leads from `start` to `end` that avoids a value."""
    waiting, seen = [start], {without}
    while waiting:
        node = waiting.pop()
        if node is end:
            return end is not without
        if node not in seen:
            seen.add(node)
            waiting += [user for user in node.users if isinstance(user.meta.get("val"), torch.Tensor | tuple | list)]
    return False


def test_every_kind_of_layer_has_its_cut() -> None:
    captured = rewrite_captured(capture_model(gemma2(), dtype=torch.float32), Switches())
    cuts = layer_cuts(captured.step)
    assert set(cuts) == set(captured.layers) and all(isinstance(cut, Cut) for cut in cuts.values())
