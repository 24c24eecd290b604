"""block_copy in Triton moves the bytes that the reference moves, whatever the dtype and the size of a block."""

from __future__ import annotations

import os

os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest
import torch

from forebay.kernels.cache.block_copy.gpu import block_copy
from forebay.kernels.cache.block_copy.reference import reference


@pytest.mark.parametrize(("dtype", "shape"), ((torch.float16, (3, 5)), (torch.uint8, (10007,)), (torch.float32, ()),
                                              (torch.bfloat16, (2, 3, 64)), (torch.int8, (3000, 4))))  # fmt: skip
def test_equals_reference(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    source, destination = (torch.randint(-100, 100, (n, *shape)).to(dtype) for n in (9, 11))
    begin, end = torch.tensor([0, 8, 3, -1, 5, 9]), torch.tensor([10, 2, 5, 1, -1, 0], dtype=torch.int32)
    want = reference(source, begin, destination, end)
    block_copy(source, begin, destination, end)
    assert torch.equal(destination, want)


def test_pool_with_room_between_blocks() -> None:
    source, destination = torch.randint(0, 255, (4, 80), dtype=torch.uint8), torch.zeros(4, 64, dtype=torch.uint8)
    block_copy(source[:, :48], torch.tensor([3, 1]), destination[:, :48], torch.tensor([0, 2]))
    assert torch.equal(destination[[0, 2], :48], source[[3, 1], :48])
    assert not destination[[1, 3]].any() and not destination[:, 48:].any()


def test_bad_arguments_are_named() -> None:
    source, destination, table = torch.ones(4, 8), torch.zeros(4, 8), torch.tensor([0, 1])
    bad = {
        "destination must have blocks": (source, table, destination.half(), table),
        "source must be \\[blocks": (torch.ones(4, 8, 2).mT, table, torch.zeros(4, 2, 8), table),
        "from_blocks must be int32": (source, table.float(), destination, table),
        "to_blocks must be contiguous of shape": (source, table, destination, table[:1]),
        "to_blocks must be on": (source, table, destination, table.to("meta")),
        "source must be on": (source.to("meta"), table, destination, table),
    }
    for message, arguments in bad.items():
        with pytest.raises(ValueError, match=f"block_copy: {message}"):
            block_copy(*arguments)
    assert not destination.any()
