"""activation_append_q on the CPU: bits of the rows, what cannot be held, and what it must refuse."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.library import opcheck

from forebay.kernels import operators
from forebay.kernels.cache.activation_append_q import reference as module
from forebay.kernels.formats import packing, row_sizes

OP = operators.ACTIVATION_APPEND_Q.overload


def arguments(
    features: int = 100, bits: int = 8, group: int = 64, dtype: torch.dtype = torch.float16
) -> dict[str, Any]:
    """Strided rows of 0xff, whose scales are NaN, and tokens for any of them."""
    row = row_sizes.row_nbytes(features, bits, group)
    cache = torch.full((3, 9, row + 4), 0xFF, dtype=torch.uint8)[:, :7, :row]
    x = (5 * torch.randn(3, 2, features, generator=torch.Generator().manual_seed(3)) + 1).to(dtype)
    return {"cache": cache, "x": x, "rows": torch.tensor([[0, 1], [6, 2], [3, 5]]), "bits": bits, "group": group}


@pytest.mark.parametrize("dtype", (torch.float32, torch.float16, torch.bfloat16))
@pytest.mark.parametrize(
    ("features", "bits", "group"), ((576, 8, 64), (80, 8, 64), (100, 8, 64), (50, 8, 32), (75, 4, 32))
)
def test_writes_the_bits_of_the_reference(path: str, features: int, bits: int, group: int, dtype: torch.dtype) -> None:
    args = arguments(features, bits, group, dtype)
    args["x"][0, 0, :group] = 0.75  # a constant group
    whole = args["cache"].as_strided((3, 9, args["cache"].stride(1)), args["cache"].stride())
    before, wanted = whole.clone(), module.reference(*args.values())
    OP(*args.values())
    assert torch.equal(args["cache"], wanted)
    assert torch.equal(whole[:, 7:], before[:, 7:]) and torch.equal(whole[..., -4:], before[..., -4:])
    for b, places in enumerate(args["rows"]):
        rows = args["cache"][b, places]
        scale = packing.unpack_rows(rows, features, bits, group, torch.float16)[1].float()
        error = (module.unpack(rows, features, bits, group) - args["x"][b].float()).abs()
        assert (error <= scale.repeat_interleave(group, -1)[..., :features] * (0.5 + 1e-4)).all()
        rest = row_sizes.codes_nbytes(features, bits, group) + 4 * scale.shape[-1]
        assert not rows[:, rest:].any()


def test_features_that_are_not_contiguous_and_no_features_at_all(path: str) -> None:
    args = arguments()
    turned = args | {"cache": args["cache"].clone(), "x": args["x"].transpose(1, 2).contiguous().transpose(1, 2)}
    OP(*args.values())
    OP(*turned.values())
    assert torch.equal(args["cache"], turned["cache"])
    before = args["cache"].clone()
    OP(*(args | {"x": args["x"][:, :0], "rows": args["rows"][:, :0]}).values())
    assert torch.equal(args["cache"], before)


def test_what_cannot_be_held_reads_back_as_nan(path: str) -> None:
    """Only the group concerned; the next one holds what it did."""
    args = arguments(dtype=torch.float32)
    for b, value in enumerate((torch.nan, torch.inf, -1e6)):
        args["x"][b, 1, 3] = value
    OP(*args.values())
    for b, places in enumerate(args["rows"]):
        found = module.unpack(args["cache"][b, places], 100, 8, 64)
        assert found[1, :64].isnan().all() and found[0].isfinite().all()
        assert (found[1, 64:] - args["x"][b, 1, 64:]).abs().max() < 0.1


def test_opcheck() -> None:
    opcheck(OP, tuple(arguments().values()))


def test_bad_arguments_are_named() -> None:
    good = arguments()
    shifted = torch.zeros(3, 7, good["cache"].shape[2] + 1, dtype=torch.uint8)
    wrong: dict[str, list[Any]] = {
        "cache": [good["cache"].char(), good["cache"][..., 4:], good["cache"][0], good["cache"][1:], shifted[..., 1:]],
        "x": [good["x"].double(), good["x"][0], good["x"].int(), good["x"][..., :0]],
        "rows": [good["rows"].int(), good["rows"][1:], good["rows"] + 1, good["rows"] - 1],
        "bits": [2, 0],
        "group": [48, 0, 256],
    }
    before: Tensor = good["cache"].clone()
    for name, values in wrong.items():
        for value in values:
            with pytest.raises(ValueError, match=f"^activation_append_q: {name} "):
                OP(*(good | {name: value}).values())
    assert torch.equal(good["cache"], before)
