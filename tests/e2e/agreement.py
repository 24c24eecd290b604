"""Compare generated tokens with a reference model, tolerating only what rounding can decide."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

NextLogits = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # input_ids, attention_mask -> [B, V]


@dataclass
class Agreement:
    """Tokens that were the same, and rows that left the reference at a near tie with agreeing logits."""

    tokens: int = 0
    near_ties: int = 0


def assert_same_tokens(
    ours: torch.Tensor, expected: torch.Tensor, mask: torch.Tensor, reference: torch.nn.Module, next_logits: NextLogits
) -> Agreement:
    """`ours` [B, T] equals `expected` [B, T] row by row. Where a row differs first, the reference's own two best logits
    must be within 1e-3 of each other, ours must agree with all of the reference's to 1e-4 of the largest, and the rest
    of the row is not compared (its prompts differ from there on). `mask` [B, P] is the prompts' attention mask."""
    prompt = mask.shape[1]
    found = Agreement()
    assert ours.shape == expected.shape
    for row in range(ours.shape[0]):
        for t in range(prompt, expected.shape[1]):
            if ours[row, t] == expected[row, t]:
                found.tokens += 1
                continue
            ids = expected[row : row + 1, :t]
            seen = torch.cat((mask[row : row + 1], torch.ones(1, t - prompt, dtype=mask.dtype)), 1)
            with torch.no_grad():
                logits = reference(input_ids=ids, attention_mask=seen).logits[0, -1].float()
            best = logits.topk(2).values
            where = f"row {row}, new token {t - prompt}: {ours[row, t].item()} for {expected[row, t].item()}"
            assert best[0] - best[1] < 1e-3, f"{where}; the reference's margin is {(best[0] - best[1]).item():.2e}"
            error = (next_logits(ids, seen)[0].float() - logits).abs().max() / logits.abs().max()
            assert error <= 1e-4, f"{where}; a near tie, but the logits differ by {error.item():.2e}"
            found.near_ties += 1
            break
    return found
