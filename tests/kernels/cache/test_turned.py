"""Appends that turn queries and keys themselves give, to the bit, what rotary and append give one after the other."""

from __future__ import annotations

import os

os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest
import torch
from closeness import poisoned

from forebay.kernels.formats import row_sizes
from forebay.kernels.operator import Tensors
from forebay.kernels.operators import KV_APPEND, ROTARY, find

KV_APPEND_Q = find("forebay.kv_append_q")


def heads(batch: int, count: int, new: int, dim: int, dtype: torch.dtype) -> torch.Tensor:
    """[B, H, S, D] as a product's columns lie."""
    return torch.randn(batch, new, count, dim).to(dtype).transpose(1, 2)


@pytest.mark.parametrize("device", ("cuda", "cpu"))
@pytest.mark.parametrize(("dim", "bits"), ((10, 0), (256, 0), (64, 4), (128, 8), (256, 8)))
@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16))
@pytest.mark.parametrize(("query_heads", "kv_heads", "new"), ((7, 1, 1), (6, 3, 2), (18, 9, 1)))
@pytest.mark.covering(2)
def test_as_apart(
    device: str, dim: int, bits: int, dtype: torch.dtype, query_heads: int, kv_heads: int, new: int,
) -> None:
    torch.manual_seed(dim + new)
    batch = 1 if query_heads > 16 else 2
    group = row_sizes.cache_group_size(dim, bits) if bits else 0
    q, k, v = (heads(batch, n, new, dim, dtype) for n in (query_heads, kv_heads, kv_heads))
    angles = torch.randn(1 if kv_heads == 3 else batch, new, dim)
    cos, sin, start = angles.cos().to(dtype), angles.sin().to(dtype), torch.tensor([2, 0])[:batch]
    shape = (batch, kv_heads, 6, row_sizes.cache_row_nbytes(dim, bits) if bits else dim)
    append, how = (KV_APPEND_Q, (bits, group)) if bits else (KV_APPEND, ())
    assert append is not None
    found = [torch.zeros(shape, dtype=torch.uint8 if bits else dtype) for _ in range(4)]
    turned, expected, keys = poisoned(*q.shape, dtype=dtype), torch.empty_like(q), torch.empty_like(k)
    use = Tensors((*found[:2], k, v, start, *how), {"q": q, "cos": cos, "sin": sin}, (turned,))
    assert append.takes_rotary(use)
    append.bind[device](use)()
    for x, out in ((q, expected), (k, keys)):
        ROTARY.bind[device](Tensors((x, cos, sin), {}, (out,)))()
    append.bind[device](Tensors((*found[2:], keys, v, start, *how), {}, ()))()
    assert torch.equal(turned, expected) and not turned.isnan().any()
    assert torch.equal(found[0], found[2]) and torch.equal(found[1], found[3]) and found[0].any()


def test_positions_outside_are_left_out_and_queries_are_not() -> None:
    cache, dim = torch.zeros(2, 1, 4, 64, dtype=torch.float16), 64
    q, k = heads(2, 3, 1, dim, torch.float16), heads(2, 1, 1, dim, torch.float16)
    table, out = torch.ones(1, 1, dim, dtype=torch.float16), poisoned(2, 3, 1, dim, dtype=torch.float16)
    use = Tensors((cache, cache.clone(), k, k, torch.tensor([4, -1])), {"q": q, "cos": table, "sin": 0 * table}, (out,))
    KV_APPEND.bind["cuda"](use)()
    assert not cache.any() and torch.equal(out, q)


def test_what_cannot_be_turned_is_refused() -> None:
    assert KV_APPEND_Q is not None
    for dim, dtype in ((80, torch.float16), (32, torch.float16), (64, torch.float32)):
        group, nbytes = row_sizes.cache_group_size(dim, 8), row_sizes.cache_row_nbytes(dim, 8)
        q, cache = torch.zeros(1, 1, 1, dim, dtype=dtype), torch.zeros(1, 1, 4, nbytes, dtype=torch.uint8)
        named = {"q": q, "cos": q[0], "sin": q[0]}
        use = Tensors((cache, cache, q, q, torch.zeros(1, dtype=torch.int64), 8, group), named, (q.clone(),))
        assert not KV_APPEND_Q.takes_rotary(use)
        with pytest.raises(ValueError, match=r"^kv_append_q: q cannot be turned"):
            KV_APPEND_Q.bind["cuda"](use)
    k = torch.zeros(1, 1, 1, 64)
    with pytest.raises(ValueError, match=r"^kv_append: q must have the sequences"):
        KV_APPEND.bind["cuda"](Tensors((k, k, k, k, torch.zeros(1, dtype=torch.int64)),
                                       {"q": k.expand(1, 1, 2, 64), "cos": k[0].expand(1, 2, 64),
                                        "sin": k[0].expand(1, 2, 64)}, (k.expand(1, 1, 2, 64),)))
