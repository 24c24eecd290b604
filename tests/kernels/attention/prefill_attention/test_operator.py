"""The operators on the CPU: the definition, what they refuse, and torch's own checks of them."""

from __future__ import annotations

import pytest
import torch
from kernels_blocks import LIMIT, fill_cache, relative_error
from torch.library import opcheck

from forebay.kernels import operators
from forebay.kernels.attention.attention import reference as attention
from forebay.kernels.attention.prefill_attention import reference as prefill_attention
from forebay.kernels.formats.paged import BlockLayout

OP = operators.PREFILL_ATTENTION.overload
PAGED = operators.PREFILL_ATTENTION_PAGED.overload


def made(dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    return [torch.randn(2, h, t, 24, generator=generator).to(dtype) for h, t in ((4, 5), (2, 40), (2, 40))]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=["fp16", "bf16", "fp32"])
@pytest.mark.parametrize(("window", "softcap"), [(0, 0.0), (7, 2.0), (-7, 0.0)])
def test_matches_the_definition(dtype: torch.dtype, window: int, softcap: float) -> None:
    q, k, v = made(dtype)
    start = torch.tensor([35, 0])
    found = OP(q, k, v, start, 0.2, window, softcap)
    assert relative_error(found, attention.reference(q, k, v, start, 0.2, window, softcap)) <= LIMIT[dtype]


@pytest.mark.parametrize("format", ["native", "block8", "block4"])
def test_blocks_match_the_definition(format: str) -> None:
    layout = BlockLayout(16, 2, 24, format, torch.bfloat16)
    cache = fill_cache(layout, [41, 5])
    q = made(torch.bfloat16)[0]
    start = cache.lengths - 5
    found = PAGED(q, cache.pool, cache.table, start, 2, 16, format, 0, 0.2)
    wanted = prefill_attention.paged_reference(q, cache.pool, cache.table, start, layout, 0.2)
    assert relative_error(found, wanted) <= 1e-2


def test_opcheck() -> None:
    opcheck(OP, (*made(torch.float16), torch.tensor([3, 35]), 0.2))
    cache = fill_cache(BlockLayout(16, 1, 24, "block8", torch.float16), [20, 9])
    cache.pool[cache.pool == 0xFF] = 0
    opcheck(PAGED, (made(torch.float16)[0], cache.pool, cache.table, cache.lengths - 5, 1, 16, "block8", 0, 0.2))


def test_bad_arguments_are_named() -> None:
    cache = fill_cache(BlockLayout(16, 2, 24, "native", torch.float16), [20, 20])
    good = (made(torch.float16)[0], cache.pool, cache.table, cache.lengths - 5, 2, 16, "native", 0, 0.2, 0)
    changes: list[tuple[str, int, object]] = [
        ("q", 0, good[0].float()), ("q", 0, good[0][0]), ("pool", 1, good[1].char()), ("table", 2, good[2][:1]),
        ("start", 3, good[3].int()), ("start", 3, torch.tensor([-1, 0])), ("lengths", 3, torch.tensor([990, 0])),
        ("kv_heads", 0, good[0][:, :3]), ("format", 6, "fp8"),
    ]  # fmt: skip
    for name, place, value in changes:
        with pytest.raises(ValueError, match=f"^prefill_attention_paged: {name} "):
            PAGED(*good[:place], value, *good[place + 1 :])
