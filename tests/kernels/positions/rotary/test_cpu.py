"""rotary: native and torch paths equal transformers' eager operators to the bit, over dtypes, sizes and strides."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from forebay.kernels.build import compile
from forebay.kernels.positions.rotary.cpu import bind_rotary
from forebay.kernels.positions.rotary.operator import ROTARY

rotary = ROTARY.overload

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
needs_compiler = pytest.mark.skipif(compile.compiler() is None, reason="no C++ compiler")


def make(shape: tuple[int, int, int, int], dtype: torch.dtype, tables: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """x as a transpose of [B, S, H, D]; cos and sin need not be a cosine and a sine."""
    torch.manual_seed(1)
    batch, heads, queries, dim = shape
    x = torch.randn(batch, queries, heads, dim).to(dtype).transpose(1, 2)
    cos, sin = torch.randn(2, tables, queries, dim).to(dtype).unbind()
    return x, cos, sin


def eager(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    made: Tensor = apply_rotary_pos_emb(x, x, cos, sin)[0]
    return made


def assert_same(got: Tensor, want: Tensor) -> None:
    """Equal to the bit, but for which NaN and for the sign of zero."""
    assert got.dtype == want.dtype
    torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tables", ("one", "each", "expanded"))
@pytest.mark.parametrize(
    "shape", ((1, 1, 1, 1), (2, 3, 1, 17), (3, 2, 5, 64), (2, 9, 1, 80), (1, 9, 70, 64), (2, 1, 3, 576))
)
def test_equals_eager(path: str, shape: tuple[int, int, int, int], tables: str, dtype: torch.dtype) -> None:
    x, cos, sin = make(shape, dtype, shape[0] if tables == "each" else 1)
    if tables == "expanded":
        cos, sin = (table.expand(shape[0], -1, -1) for table in (cos, sin))
    got, want = rotary(x, cos, sin), eager(x, cos, sin)
    assert_same(got, want)
    assert got.stride() == torch.empty_like(x).stride()
    dense = rotary(x.contiguous(), cos, sin)
    assert_same(dense, want)
    assert dense.is_contiguous()


@needs_compiler
def test_products_are_rounded_in_fp32() -> None:
    """A fused multiply-add would give other bits for these very numbers."""
    x, cos, sin = make((2, 4, 8, 64), torch.float32)
    turned = torch.cat((-x[..., 32:], x[..., :32]), -1)
    fused = (x.double() * cos.double().unsqueeze(1) + (turned * sin.unsqueeze(1)).double()).float()
    got = rotary(x, cos, sin)
    assert torch.equal(got, eager(x, cos, sin)) and not torch.equal(got, fused)


@pytest.mark.parametrize("dtype", DTYPES)
def test_strides_have_eager_order(path: str, dtype: torch.dtype) -> None:
    x, cos, sin = make((2, 3, 4, 32), dtype, 2)
    for view in (x, x.contiguous(), x.permute(1, 0, 2, 3).contiguous().permute(1, 0, 2, 3)):
        got, want = rotary(view, cos, sin), eager(view, cos, sin)
        assert_same(got, want)
        assert got.stride() == want.stride() == view.stride()


@pytest.mark.parametrize("dtype", DTYPES)
def test_slices_of_wider_tensors(path: str, dtype: torch.dtype) -> None:
    """q out of a fused [B, S, (H + 2 Hkv) D] projection, tables out of longer ones, out a slice of a wider tensor."""
    torch.manual_seed(3)
    x = torch.randn(2, 5, 10 * 24).to(dtype).view(2, 5, 10, 24)[:, :, 2:8].transpose(1, 2)
    cos, sin = torch.randn(2, 2, 9, 48).to(dtype)[:, :, 2:7, 7:31].unbind()
    wide = torch.full((2, 6, 5, 30), 7.0, dtype=dtype)
    bind_rotary(x, cos, sin, wide[..., 2:26])()
    assert_same(wide[..., 2:26], eager(x, cos, sin))
    assert (wide[..., :2] == 7).all() and (wide[..., 26:] == 7).all()


def test_spread_columns_fall_back() -> None:
    x, cos, sin = make((2, 3, 4, 32), torch.float32)
    assert_same(rotary(x[..., ::2], cos[..., :16], sin[..., :16]), eager(x[..., ::2], cos[..., :16], sin[..., :16]))
    assert_same(rotary(x[..., :16], cos[..., ::2], sin[..., ::2]), eager(x[..., :16], cos[..., ::2], sin[..., ::2]))


@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_infinity_and_rounding_are_torchs(path: str, dtype: torch.dtype) -> None:
    x, cos, sin = make((2, 3, 4, 40), dtype)
    x[0, 0, 0, 3], x[0, 1, 1, 39], x[1, 0, 2, 20] = torch.nan, torch.inf, -torch.inf
    x[1, 2] = torch.finfo(dtype).max
    x[0, 2] = torch.finfo(dtype).tiny
    cos[0, 3, 5], sin[0, 3, 7], sin[0, 0, 4] = torch.inf, torch.nan, 0
    got = rotary(x, cos, sin)
    assert_same(got, eager(x, cos, sin))
    assert got.isnan().any() and got.isinf().any()


def test_binding_reads_present_contents() -> None:
    x, cos, sin = make((1, 3, 2, 16), torch.float32)
    out = torch.empty_like(x)
    call = bind_rotary(x, cos, sin, out)
    for tensor in (x, cos, sin):
        tensor.copy_(torch.randn(tensor.shape))
    call()
    assert_same(out, eager(x, cos, sin))


def test_empty() -> None:
    for shape in ((0, 2, 3, 4), (2, 0, 3, 4), (2, 2, 0, 4), (2, 2, 3, 0)):
        assert rotary(*make(shape, torch.float32)).shape == shape


X, TABLE = torch.ones(2, 3, 4, 8), torch.ones(1, 4, 8)


@pytest.mark.parametrize(
    ("x", "cos", "sin", "out", "match"),
    (
        (X.double(), TABLE, TABLE, None, "rotary: x must be fp32"),
        (X, TABLE.bfloat16(), TABLE, None, "rotary: cos must be .* x's dtype"),
        (X[0], TABLE, TABLE, None, r"rotary: x must be \[B, H, S, D\]"),
        (X, TABLE[..., :4], TABLE, None, r"rotary: cos must be \[2 or 1, 4, 8\]"),
        (X, TABLE, TABLE.expand(3, 4, 8), None, r"rotary: sin must be \[2 or 1, 4, 8\]"),
        (X, TABLE, TABLE, X[:1], "rotary: out must have x's shape"),
        (X, TABLE, TABLE, X, "rotary: out must not share x's memory"),
        (X, TABLE, TABLE, X.to("meta"), "rotary: out must be on the CPU"),
    ),
)
def test_wrong_arguments_are_named(x: Tensor, cos: Tensor, sin: Tensor, out: Tensor | None, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        bind_rotary(x, cos, sin, torch.empty_like(x) if out is None else out)


def test_opcheck() -> None:
    for dtype in DTYPES:
        torch.library.opcheck(rotary, make((2, 3, 4, 16), dtype))
    x, cos, sin = make((2, 3, 4, 16), torch.float32)
    torch.library.opcheck(rotary, (x.contiguous(), cos.expand(2, 4, 16), sin.expand(2, 4, 16)))
