"""The operator on the CPU: the definition, what it refuses, and torch's own checks of it."""

from __future__ import annotations

import pytest
import torch
from kernels_blocks import LIMIT, fill_cache, relative_error
from torch.library import opcheck

from forebay.kernels import operators
from forebay.kernels.attention.decode_attention import reference as module
from forebay.kernels.formats.paged import BlockLayout

OP = operators.DECODE_ATTENTION.overload


def arguments(cache, q: torch.Tensor, *rest: float) -> tuple:  # type: ignore[no-untyped-def]
    layout = cache.layout
    place = (layout.kv_heads, layout.tokens, layout.format, layout.group_size)
    return (q, cache.pool, cache.table, cache.lengths, *place, 0.25, *rest)


def queries(cache, heads: int) -> torch.Tensor:  # type: ignore[no-untyped-def]
    shape = (len(cache.lengths), heads, cache.layout.head_dim)
    return torch.randn(shape, generator=torch.Generator().manual_seed(9)).to(cache.layout.dtype)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
@pytest.mark.parametrize("format", ["native", "block8", "block4"])
@pytest.mark.parametrize(("window", "softcap"), [(0, 0.0), (13, 2.0), (-13, 0.0)])
def test_matches_the_definition(dtype: torch.dtype, format: str, window: int, softcap: float) -> None:
    cache = fill_cache(BlockLayout(16, 2, 40, format, dtype), [61, 1, 0, 16])
    q = queries(cache, 6)
    found = OP(*arguments(cache, q, window, softcap))
    wanted = module.reference(q, cache.pool, cache.table, cache.lengths, cache.layout, 0.25, window, softcap)
    assert relative_error(found, wanted) <= LIMIT[dtype]
    assert not found[2].any(), "a sequence without positions"


@pytest.mark.parametrize("format", ["native", "block4"])
def test_opcheck(format: str) -> None:
    cache = fill_cache(BlockLayout(16, 1, 16, format, torch.bfloat16), [20, 3])
    cache.pool[cache.pool == 0xFF] = 0  # opcheck compares results, and NaN is unequal to itself
    opcheck(OP, arguments(cache, queries(cache, 2)))


def test_bad_arguments_are_named() -> None:
    cache = fill_cache(BlockLayout(16, 2, 16, "native", torch.float16), [20])
    good = arguments(cache, queries(cache, 4), 0, 0.0)
    changes: list[tuple[str, int, object]] = [
        ("q", 0, good[0].float()), ("q", 0, good[0][0]), ("q", 0, good[0].mT.contiguous().mT),
        ("pool", 1, good[1][:, 16:]),
        ("table", 2, good[2].long()), ("lengths", 3, good[3].int()), ("lengths", 3, torch.tensor([999])),
        ("lengths", 3, torch.tensor([-1])), ("table", 2, good[2] + 99), ("kv_heads", 0, good[0][:, :3]),
        ("block_tokens", 5, 12), ("format", 6, "fp8"),
    ]  # fmt: skip
    for name, place, value in changes:
        with pytest.raises(ValueError, match=f"^decode_attention: {name} "):
            OP(*good[:place], value, *good[place + 1 :])
    for low, high, name in ((-20.0, 11.0, "low"), (-9.0, 12.0, "high")):
        with pytest.raises(ValueError, match=f"^decode_attention: {name} "):
            OP(*good, 0.0, low, high)
