"""kv_append: positions per sequence, strides, and what it must refuse."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from forebay.kernels import operators
from forebay.kernels.cache.kv_append.cpu import bind_kv_append
from forebay.kernels.cache.kv_append.operator import KV_APPEND
from forebay.kernels.cache.kv_append.reference import reference

kv_append = KV_APPEND.overload


def make(start: list[int], new: int, length: int = 11, dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    batch, heads, dim = len(start), 3, 5
    # Caches and inputs strided as a runtime has them: a slice of an arena, and [B, S, H, D] transposed.
    k_cache, v_cache = torch.randn(2, batch, heads, length + 2, dim).to(dtype)[:, :, :, :length].unbind()
    k, v = torch.randn(2, batch, new, heads, dim).to(dtype).transpose(2, 3).unbind()
    return k_cache, v_cache, k, v, torch.tensor(start)


@pytest.mark.parametrize("start", ([0], [4, 4, 4], [0, 7, 3], [10, 0, 10]))
@pytest.mark.parametrize("new", (1, 2, 4, 0))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_matches_reference(start: list[int], new: int, dtype: torch.dtype) -> None:
    start = [min(begin, 11 - new) for begin in start]
    args = make(start, new, dtype=dtype)
    want_k, want_v = reference(*args)
    assert new == 0 or not torch.equal(want_k, args[0])
    kv_append(*args)
    assert torch.equal(args[0], want_k) and torch.equal(args[1], want_v)


@pytest.mark.parametrize("new", (1, 3))
def test_bound_call_reads_present_start(new: int) -> None:
    k_cache, v_cache, k, v, start = make([0, 0, 0], new)
    call = bind_kv_append(k_cache, v_cache, k, v, start)
    for begins in ([0, 0, 0], [5, 2, 7], [8, 8, 8]):
        start.copy_(torch.tensor(begins))
        k.normal_()
        want = reference(k_cache, v_cache, k, v, start)
        call()
        assert torch.equal(k_cache, want[0]) and torch.equal(v_cache, want[1])


@pytest.mark.parametrize("start", ([11], [-1], [3, 11, 0], [3, -1]))
@pytest.mark.parametrize("new", (1, 2))
def test_refuses_positions_outside_the_cache(start: list[int], new: int) -> None:
    args = make(start, new)
    before = args[0].clone(), args[1].clone()
    with pytest.raises(ValueError, match="kv_append: start"):
        kv_append(*args)
    with pytest.raises(ValueError, match="kv_append: start"):
        bind_kv_append(*args)()
    assert torch.equal(args[0], before[0]) and torch.equal(args[1], before[1])


@pytest.mark.parametrize(
    ("index", "argument", "bad"),
    (
        (0, "k_cache", torch.zeros(2, 3, 11)),
        (1, "v_cache", torch.zeros(2, 3, 10, 5)),
        (2, "k", torch.zeros(2, 4, 1, 5)),
        (2, "k", torch.zeros(2, 3, 1, 5).half()),
        (3, "v", torch.zeros(2, 3, 2, 5)),
        (4, "start", torch.zeros(2, dtype=torch.int32)),
        (4, "start", torch.zeros(3, dtype=torch.int64)),
    ),
)
def test_refuses_by_name(index: int, argument: str, bad: Tensor) -> None:
    args = list(make([0, 0], 1))
    args[index] = bad
    with pytest.raises(ValueError, match=f"kv_append: {argument} "):
        kv_append(*args)


@pytest.mark.parametrize("start", ([2, 2], [1, 4]))
def test_opcheck(start: list[int]) -> None:
    torch.library.opcheck(operators.KV_APPEND.overload, make(start, 1))
