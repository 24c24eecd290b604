"""The operators that a GPU runs compute what the references say (here on the CPU: they are plain torch)."""

from __future__ import annotations

import pytest
import torch

from forebay.kernels import attention
from forebay.runtime import gpu_library


@pytest.mark.parametrize(("queries", "window", "softcap"), [(1, 0, 0.0), (5, 0, 0.0), (5, 3, 0.0), (4, 3, 2.0)])
def test_attention(queries: int, window: int, softcap: float) -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 6, queries, 8), torch.randn(2, 2, 16, 8), torch.randn(2, 2, 16, 8)
    start = torch.tensor([4, 9])
    out = torch.full((2, queries, 6, 8), float("nan"))
    gpu_library.attention(q, k, v, start, 0.3, window, softcap, out)
    expected = attention.reference(q.double(), k.double(), v.double(), start, 0.3, window, softcap)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)


def test_append_and_product() -> None:
    torch.manual_seed(0)
    cache_k, cache_v = torch.zeros(2, 2, 8, 4), torch.zeros(2, 2, 8, 4)
    k, v = torch.randn(2, 2, 3, 4), torch.randn(2, 2, 3, 4)
    gpu_library.kv_append(cache_k, cache_v, k, v, torch.tensor([1, 5]))
    assert torch.equal(cache_k[0, :, 1:4], k[0]) and torch.equal(cache_v[1, :, 5:8], v[1])
    assert not cache_k[0, :, 4:].any() and not cache_v[1, :, :5].any()
    x, w, b = torch.randn(3, 5), torch.randn(5, 7), torch.randn(7)
    out = torch.full((3, 7), float("nan"))
    gpu_library.product(x, w, b, out, False)
    gpu_library.product(x, w, None, out, True)
    torch.testing.assert_close(out, 2 * (x @ w) + b)
