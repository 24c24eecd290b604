"""block_copy on the CPU equals the reference; opcheck; bad arguments."""

from __future__ import annotations

import pytest
import torch
from torch.library import opcheck

from forebay.kernels import operators
from forebay.kernels.cache.block_copy.operator import block_copy
from forebay.kernels.cache.block_copy.reference import reference


@pytest.mark.parametrize(("dtype", "shape"), ((torch.float16, (3, 5)), (torch.uint8, ()), (torch.bfloat16, (64,))))
def test_equals_reference(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    source, destination = (torch.randint(0, 100, (n, *shape)).to(dtype) for n in (9, 11))
    begin, end = torch.tensor([0, 8, 3, -1, 5, 9]), torch.tensor([10, 2, 5, 1, -1, 0], dtype=torch.int32)
    want = reference(source, begin, destination, end)
    block_copy(source, begin, destination, end)
    assert torch.equal(destination, want)


def test_gather_and_scatter_return_the_blocks() -> None:
    pool, order = torch.randn(8, 2, 3), torch.randperm(8)[:5]
    staged, again = torch.zeros(5, 2, 3), torch.zeros(8, 2, 3)
    block_copy(pool, order, staged, torch.arange(5))
    block_copy(staged, torch.arange(5), again, order)
    assert torch.equal(again[order], pool[order])


def test_opcheck() -> None:
    table = torch.tensor([0, 2])
    opcheck(operators.BLOCK_COPY.overload, (torch.randn(4, 8), table, torch.zeros(3, 8), table))


def test_bad_arguments_are_named() -> None:
    source, destination, table = torch.ones(4, 8), torch.zeros(4, 8), torch.tensor([0, 1])
    for message, arguments in {
        "destination must have": (source, table, destination.half(), table),
        "from_blocks must be": (source, table.float(), destination, table),
        "to_blocks must be": (source, table, destination, table[:1]),
    }.items():
        with pytest.raises(ValueError, match=f"block_copy: {message}"):
            block_copy(*arguments)
    assert not destination.any()
