"""rotary_append and its paged forms on the CPU equal the reference; opcheck; bad arguments."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.library import opcheck

from forebay.kernels import operators
from forebay.kernels.cache.rotary_append.operator import kv_append_paged, rotary_append, rotary_append_paged
from forebay.kernels.cache.rotary_append.reference import paged_reference, reference
from forebay.kernels.formats import paged
from forebay.kernels.formats.table import BLOCK_FORMATS


def heads(dtype: torch.dtype) -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 3, n, 32).to(dtype).transpose(1, 2) for n in (4, 2, 2))
    return q, k, v, *torch.randn(2, 1, 3, 32).to(dtype).unbind()


@pytest.mark.parametrize("dtype", (torch.float32, torch.float16, torch.bfloat16))
def test_tensors(dtype: torch.dtype) -> None:
    arguments = (*heads(dtype), torch.tensor([0, 4]))
    caches = torch.randn(2, 2, 2, 7, 32).to(dtype).unbind()
    want = reference(*arguments, *caches)
    out = rotary_append(*arguments, *caches)
    for got, exact in zip((out, *caches), want, strict=True):
        assert torch.equal(got, exact)


@pytest.mark.parametrize("format", tuple(BLOCK_FORMATS))
def test_pool(format: str) -> None:
    q, k, v, cos, sin = heads(torch.float16)
    layout = paged.BlockLayout(16, 2, 32, format, torch.float16)
    pool, slots = torch.zeros(2, layout.record_nbytes, dtype=torch.uint8), torch.tensor([[5, -1, 31], [1, 32, 17]])
    want, want_pool = paged_reference(q, k, v, cos, sin, slots, pool, layout)
    assert torch.equal(rotary_append_paged(q, k, v, cos, sin, slots, pool, 16, format, 0), want)
    assert torch.equal(pool, want_pool)
    again = torch.zeros_like(pool)
    kv_append_paged(k, v, slots, again, 16, format, 0)
    table = torch.tensor([[0, 1]], dtype=torch.int32)
    read = [paged.read(one, layout, table, torch.float32)[1] for one in (again, pool)]
    assert torch.equal(*read)


def test_opcheck() -> None:
    q, k, v, cos, sin = heads(torch.float16)
    layout = paged.BlockLayout(16, 2, 32, "block4", torch.float16)
    pool, slots = torch.zeros(2, layout.record_nbytes, dtype=torch.uint8), torch.arange(6).view(2, 3)
    caches = torch.zeros(2, 2, 2, 7, 32).half().unbind()
    opcheck(operators.ROTARY_APPEND.overload, (q, k, v, cos, sin, torch.tensor([0, 4]), *caches))
    opcheck(operators.ROTARY_APPEND_PAGED.overload, (q, k, v, cos, sin, slots, pool, 16, "block4", 0))
    opcheck(operators.KV_APPEND_PAGED.overload, (k, v, slots, pool, 16, "block4", 0))


def test_bad_arguments_are_named() -> None:
    q, k, v, cos, sin = heads(torch.float16)
    layout = paged.BlockLayout(16, 2, 32, "block8", torch.float16)
    pool, slots = paged.allocate(layout, 1), torch.zeros(2, 3, dtype=torch.int64)
    before = pool.clone()
    for message, arguments in {
        "q must be \\[B": (q[:, :, :2], k, v, cos, sin, slots, pool, 16, "block8", 0),
        "v must be": (q, k, v[:, :1], cos, sin, slots, pool, 16, "block8", 0),
        "slots must be": (q, k, v, cos, sin, slots.int(), pool, 16, "block8", 0),
        "format must be": (q, k, v, cos, sin, slots, pool, 16, "kv5", 0),
        "pool must be": (q, k, v, cos, sin, slots, pool, 32, "block8", 0),
    }.items():
        with pytest.raises(ValueError, match=f"rotary_append_paged: {message}"):
            rotary_append_paged(*arguments)
    assert torch.equal(pool, before)
