"""kv_append in Triton equals the reference, and leaves out what lies outside the cache."""

from __future__ import annotations

import os

os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest
import torch

from forebay.kernels.cache.kv_append.gpu import bind_kv_append
from forebay.kernels.cache.kv_append.reference import reference


@pytest.mark.parametrize("dtype", (torch.float32, torch.float16, torch.bfloat16))
@pytest.mark.parametrize("queries", (1, 3))
def test_equals_reference(queries: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    k_cache, v_cache = torch.randn(2, 9, 3, 16).to(dtype).transpose(1, 2), torch.randn(2, 3, 9, 24).to(dtype)
    k, v = torch.randn(2, queries, 3, 16).to(dtype).transpose(1, 2), torch.randn(2, 3, queries, 24).to(dtype)
    start = torch.tensor([0, 9 - queries])
    want = reference(k_cache, v_cache, k, v, start)
    bind_kv_append(k_cache, v_cache, k, v, start)()
    assert torch.equal(k_cache, want[0]) and torch.equal(v_cache, want[1])


def test_positions_outside_are_left_out() -> None:
    k_cache, v_cache = torch.zeros(2, 1, 4, 8), torch.zeros(2, 1, 4, 8)
    new = torch.ones(2, 1, 3, 8)
    bind_kv_append(k_cache, v_cache, new, new, torch.tensor([2, -2]))()
    kept = torch.tensor([[0.0, 0, 1, 1], [1, 0, 0, 0]])
    assert torch.equal(k_cache[:, 0, :, 0], kept) and torch.equal(v_cache, k_cache)


def test_bad_arguments_are_named() -> None:
    cache, new, start = torch.zeros(2, 1, 4, 8), torch.ones(2, 1, 3, 8), torch.zeros(2, dtype=torch.int64)
    bad = {
        "k_cache must have four": (cache[0], cache, new, new, start),
        "k must be of": (cache, cache, new.half(), new, start),
        "v must have shape": (cache, cache, new, new[:, :, :1], start),
        "v_cache must have shape": (cache, cache[:1], new, new, start),
        "start must be of": (cache, cache, new, new, start.int()),
        "start must be on": (cache, cache, new, new, start.to("meta")),
    }
    for message, arguments in bad.items():
        with pytest.raises(ValueError, match=f"kv_append: {message}"):
            bind_kv_append(*arguments)()
    assert not cache.any()
