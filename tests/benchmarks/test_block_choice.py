"""Blocks that a rule chooses: the estimates against scores, and which blocks queries see."""

from __future__ import annotations

import pytest
import torch

from benchmarks.block_choice import ESTIMATES, Rule, chosen, mass, rounded

BLOCK, BLOCKS = 4, 10
POSITION = torch.tensor([4, 38, 40])  # of queries; keys are there for 42 tokens


def made() -> tuple[torch.Tensor, torch.Tensor]:
    made = torch.Generator().manual_seed(0)
    return torch.randn(3, len(POSITION), 8, generator=made), torch.randn(3, 42, 8, generator=made)


def test_estimates_are_of_the_scores_in_a_part() -> None:
    q, keys = made()
    parts = keys[:, : BLOCK * BLOCKS].unflatten(1, (BLOCKS, BLOCK))
    scores = torch.einsum("htd,hpnd->htpn", q, parts)
    assert (ESTIMATES["bound"](q, parts) >= scores.amax(-1) - 1e-5).all()
    torch.testing.assert_close(ESTIMATES["mean"](q, parts), scores.mean(-1))
    torch.testing.assert_close(mass(q, parts), scores.logsumexp(-1))
    torch.testing.assert_close(rounded(16)(q, parts), scores.logsumexp(-1), atol=1e-2, rtol=0)
    assert not torch.allclose(rounded(1)(q, parts), scores.logsumexp(-1), atol=0.1)
    alike = parts[:, :, :1].expand_as(parts)
    for name in ("bound", "mean", "spread"):
        torch.testing.assert_close(ESTIMATES[name](q, alike), scores[..., 0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("estimate", ["bound", "mean", "spread", "mass", "2 bits"])
def test_queries_see_the_first_block_the_newest_and_the_weightiest(estimate: str) -> None:
    q, keys = made()
    keys[:, 4 * BLOCK : 5 * BLOCK] = 3 * q[:, 1:2]  # the second query's weightiest block is the fifth
    seen = chosen(q, keys, POSITION, Rule(estimate, 2, BLOCK, 0.3))
    blocks = seen[:, : BLOCK * BLOCKS].unflatten(1, (BLOCKS, BLOCK))
    assert (blocks.all(-1) == blocks.any(-1)).all(), "whole blocks"
    assert blocks[1].all(-1).nonzero().flatten().tolist() == [0, 4, 8, 9], "three of nine, and the one begun"
    assert blocks[2, [0, 9]].all() and blocks[2].all(-1).sum() == 3 and seen[2, 40:].all()
    assert blocks[0, :2].all(), "of one full block that one, and the one begun"


def test_a_share_of_all_sees_everything_before() -> None:
    q, keys = made()
    seen = chosen(q, keys, POSITION, Rule("mean", 2, BLOCK, 1.0))
    assert all(seen[i, : position + 1].all() for i, position in enumerate(POSITION.tolist()))
