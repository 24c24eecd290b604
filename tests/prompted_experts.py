"""Prompts for small mixtures of experts, and what models make of them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import forebay
from forebay.rewriter.ir.plan import PlanError

PROMPT, NEW = 7, 6


def tokens(model: Any, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = model.generate(ids, attention_mask=mask, max_new_tokens=NEW, do_sample=False)
    return found


def prompts() -> tuple[torch.Tensor, torch.Tensor]:
    """Three prompts of unequal length."""
    ids = torch.randint(3, 128, (3, PROMPT), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[0, :3], mask[2, :1] = 0, 0
    return ids, mask


def smallest(folder: Path, **options: Any) -> int:
    with pytest.raises(PlanError, match="the smallest that can is") as refused:
        forebay.wrap(folder, {"device": 1000, "disk": folder}, batch=3, prompt=PROMPT, new_tokens=NEW, **options)
    return int(re.search(r"\((\d+) bytes", str(refused.value))[1])  # type: ignore[index]
