"""A position for every new token, in any order: rows are those that appending one token at a time writes."""

from __future__ import annotations

import os

os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest
import torch

from forebay.kernels.cache.kv_append_q import reference
from forebay.kernels.cache.kv_append_q.operator import KV_APPEND_Q
from forebay.kernels.formats import row_sizes

OP = KV_APPEND_Q.overload
PLACES = torch.tensor([[5, 0, 3], [1, 6, 2]])


def made(bits: int, dim: int = 64) -> list:
    """Token-major caches of 0xff [2, 3, 7, R], and K and V of three tokens for each sequence."""
    group, row = row_sizes.cache_group_size(dim, bits), row_sizes.cache_row_nbytes(dim, bits)
    caches = torch.full((2, 2, 7, 3, row), 0xFF, dtype=torch.uint8).transpose(2, 3)
    x = torch.randn(2, 2, 3, 3, dim, generator=torch.Generator().manual_seed(bits)).transpose(2, 3)
    return [*caches, *x, PLACES, bits, group]


def one_at_a_time(arguments: list) -> list[torch.Tensor]:
    caches = [cache.clone() for cache in arguments[:2]]
    k, v, places, *packing = arguments[2:]
    for s in range(places.shape[1]):
        OP(*caches, k[:, :, s : s + 1], v[:, :, s : s + 1], places[:, s].contiguous(), *packing)
    return caches


@pytest.mark.parametrize("bits", [8, 4])
def test_on_the_cpu(path: str, bits: int) -> None:
    """And what has no position keeps its bytes."""
    arguments = made(bits)
    wanted = one_at_a_time(arguments)
    if path == "torch":
        assert all(map(torch.equal, reference.reference(*arguments), wanted))
    OP(*arguments)
    for cache, want in zip(arguments[:2], wanted, strict=True):
        assert torch.equal(cache, want)
        assert (cache[0, :, [1, 2, 4, 6]] == 0xFF).all()


@pytest.mark.parametrize("bits", [8, 4])
def test_on_a_gpu(bits: int) -> None:
    """Interpreted; a position outside the cache is left out."""
    pytest.importorskip("triton")
    from forebay.kernels.cache.kv_append_q.gpu import bind_kv_append_q

    arguments, before = made(bits), made(bits)
    singles = [cache.clone() for cache in before[:2]]
    for s in range(3):
        bind_kv_append_q(*singles, *(x[:, :, s : s + 1] for x in before[2:4]), PLACES[:, s].contiguous(), *before[5:])()
    bind_kv_append_q(*arguments)()
    assert all(map(torch.equal, arguments[:2], singles))
    outside = made(bits)
    outside[4] = torch.tensor([[7, -1, 3], [1, 6, 2]])
    bind_kv_append_q(*outside)()
    assert torch.equal(outside[0][0, :, 3], singles[0][0, :, 3]) and (outside[0][0, :, [0, 1, 5, 6]] == 0xFF).all()


@pytest.mark.parametrize("wrong", [torch.tensor([[5, 0, 7], [1, 6, 2]]), torch.tensor([[5, 0, -1], [1, 6, 2]]),
                                   PLACES[:, :2], PLACES.int()])
def test_what_is_no_position_is_refused_before_anything_is_written(path: str, wrong: torch.Tensor) -> None:
    arguments = made(8)
    arguments[4] = wrong
    with pytest.raises(ValueError, match=r"^kv_append_q: start "):
        OP(*arguments)
    assert (arguments[0] == 0xFF).all()
