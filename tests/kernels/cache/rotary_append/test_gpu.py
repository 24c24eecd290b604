"""rotary_append and its paged forms in Triton against plain torch: tensors, and pools in every format."""

from __future__ import annotations

import os

os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest
import torch
from closeness import assert_near, poisoned
from torch import Tensor

from forebay.kernels.cache.rotary_append import reference as op
from forebay.kernels.cache.rotary_append.gpu import kv_append_paged, rotary_append, rotary_append_paged
from forebay.kernels.formats import paged

Heads = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def heads(dim: int, dtype: torch.dtype) -> Heads:
    """q, k, v as transposes of [B, S, H, D], and cos, sin per sequence."""
    torch.manual_seed(dim)
    q, k, v = (torch.randn(2, 3, n, dim).to(dtype).transpose(1, 2) for n in (5, 2, 2))
    cos, sin = torch.randn(2, 2, 3, dim).to(dtype).unbind()
    return q, k, v, cos, sin


@pytest.mark.parametrize("dtype", (torch.float32, torch.float16, torch.bfloat16))
@pytest.mark.parametrize("dim", (64, 80))
def test_tensors(dim: int, dtype: torch.dtype) -> None:
    q, k, v, cos, sin = heads(dim, dtype)
    k_cache, v_cache = torch.randn(2, 2, 2, 9, dim).to(dtype).unbind()
    start, out = torch.tensor([0, 6]), poisoned(2, 5, 3, dim, dtype=dtype)
    wide = (t.double() for t in (q, k, v, cos, sin))
    want = op.reference(*wide, start, k_cache.double(), v_cache.double())
    rotary_append(q, k, v, cos, sin, start, k_cache, v_cache, out)
    for got, exact in zip((out, k_cache, v_cache), want, strict=True):
        assert_near(got, exact)


@pytest.mark.parametrize(("dim", "dtype"), ((64, torch.bfloat16), (80, torch.float16), (128, torch.float16)))
@pytest.mark.parametrize(
    ("format", "group"), (("native", 0), ("block8", 0), ("block4", 0), ("block8", 32), ("block4", 16))
)
def test_pool_equals_reference_to_the_bit(format: str, group: int, dim: int, dtype: torch.dtype) -> None:
    q, k, v, cos, sin = heads(dim, dtype)
    layout = paged.BlockLayout(16, 2, dim, format, dtype, group)
    pool = torch.zeros(4, layout.record_nbytes, dtype=torch.uint8)
    slots = torch.tensor([[5, -1, 40], [63, 64, 17]])  # -1 and 64 are left out
    out = poisoned(2, 5, 3, dim, dtype=dtype)
    want, want_pool = op.paged_reference(q, k, v, cos, sin, slots, pool, layout)
    rotary_append_paged(q, k, v, cos, sin, slots, pool, layout, out)
    assert torch.equal(out, want) and torch.equal(pool, want_pool)


def test_storing_alone_equals_paged_write() -> None:
    _, k, v, _, _ = heads(128, torch.bfloat16)
    layout = paged.BlockLayout(16, 2, 128, "block4", torch.bfloat16)
    pool = torch.zeros(2, layout.record_nbytes, dtype=torch.uint8)
    want, slots = pool.clone(), torch.arange(6).view(2, 3) * 5
    paged.write(want, layout, slots.flatten(), *(t.transpose(1, 2).flatten(0, 1) for t in (k, v)))
    kv_append_paged(k, v, slots, pool, layout)
    assert torch.equal(pool, want)


@pytest.mark.parametrize("format", ("block8", "block4"))
def test_special_groups(format: str) -> None:
    layout = paged.BlockLayout(16, 1, 64, format, torch.float16, 16)
    pool = torch.zeros(1, layout.record_nbytes, dtype=torch.uint8)
    k = torch.randn(1, 1, 1, 64).half()
    k[..., 3], k[..., 20], k[..., 32:48], k[..., 48:] = torch.nan, -torch.inf, 2.5, 0.0
    kv_append_paged(k, k, torch.zeros(1, 1, dtype=torch.int64), pool, layout)
    row = paged.read(pool, layout, torch.zeros(1, 1, dtype=torch.int32), torch.float32)[0][0, 0, 0]
    assert row[:32].isnan().all()
    assert torch.equal(row[32:], k[0, 0, 0, 32:].float())


def test_bad_arguments_are_named() -> None:
    q, k, v, cos, sin = heads(64, torch.float16)
    layout = paged.BlockLayout(16, 2, 64, "block4", torch.float16)
    pool, slots = paged.allocate(layout, 2), torch.zeros(2, 3, dtype=torch.int64)
    out, before = poisoned(2, 5, 3, 64, dtype=torch.float16), pool.clone()
    bad = {
        "q must have B": (q[:, :, :2], k, v, cos[:, :2], sin[:, :2], slots, pool, layout, out),
        "cos must have shape": (q, k, v, cos[:, :2], sin, slots, pool, layout, out),
        "v must be of": (q, k, v.float(), cos, sin, slots, pool, layout, out),
        "slots must be of": (q, k, v, cos, sin, slots.int(), pool, layout, out),
        "pool must be uint8": (q, k, v, cos, sin, slots, pool[:, 16:], layout, out),
        "out must have shape": (q, k, v, cos, sin, slots, pool, layout, out[:1]),
    }
    for message, arguments in bad.items():
        with pytest.raises(ValueError, match=f"rotary_append_paged: {message}"):
            rotary_append_paged(*arguments)
    assert torch.equal(pool, before)
