"""linear_q in Triton against float64."""

from __future__ import annotations

import os

os.environ.setdefault("TRITON_INTERPRET", "1")


import pytest
import torch
from closeness import assert_near, poisoned
from ptx_blocks import evaluate
from torch import Tensor
from torch.nn import functional

from forebay.kernels.formats import codebooks, packing
from forebay.kernels.formats.packing import Packing
from forebay.kernels.gpu_support.scratch import scratch_of
from forebay.kernels.operator import Product
from forebay.kernels.products.linear import choices, selection
from forebay.kernels.products.linear.reference import PLAIN, After
from forebay.kernels.products.linear.selection import KIND_OF_BITS
from forebay.kernels.products.linear_q.gpu import bind_linear_q, linear_q
from forebay.kernels.products.linear_q.reference import reference as linear_q_reference
from forebay.kernels.quantization.quantize.reference import dequantize_reference, reference


def weight(
    n: int, k: int, bits: int, group: int, scale_dtype: torch.dtype, symmetric: bool = False
) -> tuple[Tensor, Tensor]:
    """(rows, what they stand for in fp32)."""
    parts = reference(torch.randn(n, k) / k**0.5, bits, group, 1, scale_dtype, "symmetric" if symmetric else "minmax")
    made = dequantize_reference(*parts, bits, group, 1, k)
    return packing.pack_rows(*parts[:2], None if symmetric else parts[2]), made


@pytest.mark.covering(2)
@pytest.mark.parametrize("bits", (4, 8))
@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16))
@pytest.mark.parametrize(
    ("impl", "m", "n", "k", "group"),
    (
        ("gemv", 1, 9, 203, 32),
        ("gemv_32x512_s2", 2, 13, 1100, 128),
        ("flat", 1, 70, 203, 64),
        ("flat_64x128_s2", 7, 66, 331, 32),
        ("flat", 16, 33, 259, 128),
        ("large", 70, 37, 70, 64),
        ("", 3, 40, 72, 64),
        ("flat", 12, 67, 512, 64),  # K in whole tiles, of several groups and of one
        ("flat", 5, 20, 512, 32),
        ("flat_64x128_s2", 16, 33, 256, 128),
        ("aten", 5, 33, 203, 64),
        ("", 256, 33, 70, 32),
        ("large", 66, 37, 256, 128),
        ("gemv", 2, 13, 544, 16),
        ("flat", 5, 33, 256, 16),
        ("flat", 3, 20, 288, 16),
        ("", 1, 20, 300, 96),  # by torch: groups that our kernels do not take
        ("aten", 5, 33, 600, 256),
        ("raw", 1, 130, 203, 64),
        ("raw_64x128_s2", 8, 66, 331, 128),
        ("raw", 16, 33, 384, 64),
        ("raw_128x128_s3", 21, 9, 640, 128),
        ("raw", 70, 20, 300, 64),  # three tiles of rows; groups that fill no turn
        ("raw", 128, 20, 256, 128),
        ("raw", 19, 20, 203, 32),
        ("raw", 3, 40, 256, 32),
    ),
)
@pytest.mark.parametrize("symmetric", (False, True))
def test_near_float64(
    impl: str, m: int, n: int, k: int, group: int, symmetric: bool, dtype: torch.dtype, bits: int
) -> None:
    torch.manual_seed(m + n + k)
    rows, w = weight(n, k, bits, group, dtype, symmetric)
    stored = Packing(bits, k, group, dtype, symmetric)
    x, bias, residual = torch.randn(m, k).to(dtype), torch.randn(n).to(dtype), torch.randn(m, n).to(dtype)
    out = poisoned(m, n, dtype=dtype)
    assert linear_q(x, rows, bias, stored, After("gelu", residual=residual), out, impl) is out
    assert_near(out, functional.gelu(x.double() @ w.double().T + bias.double()) + residual.double())


def coded_rows(n: int, codes: Tensor, stored: Packing) -> Tensor:
    """Rows of codes, and scales of every size that a bf16 x leaves room for."""
    groups = -(-stored.in_features // stored.group_size)
    scale = torch.rand(n, groups) * 2.0 ** torch.randint(-14, 4, (n, groups))
    parts = (scale.bfloat16(), None) if stored.symmetric else codebooks.split_scales(scale)
    return packing.pack_rows(codes, *parts)


@pytest.mark.parametrize(("codebook", "bits"), [("e4m3", 8), *((codebook, 4) for codebook in codebooks.FOURS)])
def test_every_code_becomes_its_number(codebook: str, bits: int) -> None:
    """x picks one element after the other, so that sums are the numbers themselves."""
    values = codebooks.codebook_values(codebook)
    codes = torch.where(values.isnan(), 0, torch.arange(len(values))).to(torch.uint8)
    rows = packing.pack_rows(packing.pack_codes(codes[:, None].repeat(1, 128), bits),
                             *codebooks.split_scales(torch.ones(len(codes), 1)))  # fmt: skip
    x = torch.eye(128, dtype=torch.float16)[:9]
    got = linear_q(x, rows, None, Packing(bits, 128, 128, torch.bfloat16, codebook=codebook), impl="raw")
    assert torch.equal(got, values[codes.long()].half().expand(9, -1))


@pytest.mark.parametrize("codebook", list(codebooks.FOURS)[1:])
def test_the_instructions_that_look_codes_up(codebook: str) -> None:
    """All pairs of codes, at each of their places in a word whose other bits are anything."""
    from forebay.kernels.products.linear_q import gpu_raw

    a, b = (each.flatten() for each in torch.meshgrid(torch.arange(16), torch.arange(16), indexing="ij"))
    ptx = gpu_raw.LOOK_UP.value[codebooks.CODEBOOKS.index(codebook) - codebooks.CODEBOOKS.index("e2m1") - 1]
    values = codebooks.codebook_values(codebook).half().double()
    for part in range(4):
        kept = 0xFFFFFFFF ^ (0x000F000F << 4 * part)
        w = (torch.randint(0, 1 << 32, a.shape) & kept) | a << 4 * part | b << (4 * part + 16)
        places = w & 0x77777777
        inputs = [places >> 4 * part, places >> (4 * part + 12), w << (12 - 4 * part) & 0xFFFFFFFF]
        assert torch.equal(evaluate(ptx, inputs, torch.float16), torch.stack((values[a], values[b]), -1))


@pytest.mark.parametrize(("codebook", "bits", "group", "symmetric"),
                         [("e4m3", 8, 128, False), ("e4m3", 8, 32, False), ("e2m1", 4, 32, True),
                          ("nf4", 4, 64, False), ("iq2", 4, 32, True), ("e2m1", 4, 16, False)])
@pytest.mark.parametrize(("m", "n", "k", "impl"), [(3, 40, 256, ""), (19, 33, 300, "raw_64x128_s2"), (130, 9, 128, "")])
def test_codes_of_codebooks_are_multiplied_as_they_are(
    codebook: str, bits: int, group: int, symmetric: bool, m: int, n: int, k: int, impl: str
) -> None:
    torch.manual_seed(m + group)
    stored = Packing(bits, k, group, torch.bfloat16, symmetric, codebook)
    codes = torch.randint(0, 256, (n, -(-k // group) * group * bits // 8), dtype=torch.uint8)
    codes = torch.where(codes & 127 == 127, 0, codes).to(torch.uint8)  # e4m3's NaN
    rows, x, residual = coded_rows(n, codes, stored), torch.randn(m, k).half(), torch.randn(m, n).half()
    got = linear_q(x, rows, None, stored, After("silu", residual=residual), impl=impl)
    assert_near(got, linear_q_reference(x, rows, None, stored, After("silu", residual=residual)))


@pytest.mark.parametrize("bits", (4, 8))
def test_raw_codes_take_any_bf16(bits: int) -> None:
    """Each group is scaled by itself: one beyond fp16, one of the least normal numbers, one of zeros, one mixed."""
    torch.manual_seed(bits)
    rows, w = weight(20, 512, bits, 128, torch.bfloat16)
    x = torch.randn(3, 512)
    x[0, :128] *= 1e30
    x[1, :128] *= 2.0**-120
    x[1, 128:] = 0
    x[2, ::7] *= 1e4
    x = x.bfloat16()
    got = linear_q(x, rows, None, Packing(bits, 512, 128, torch.bfloat16), impl="raw")
    want = x.double() @ w.double().T
    for row in range(3):
        assert_near(got[row : row + 1], want[row : row + 1])


@pytest.mark.parametrize("bits", (4, 8))
def test_raw_codes_let_nothing_pass_for_a_number(bits: int) -> None:
    """Rows of x with NaN or infinity are NaN, columns of a scale that is NaN too, and no others."""
    torch.manual_seed(bits)
    rows, w = weight(6, 256, bits, 64, torch.float16)
    x = torch.randn(4, 256).bfloat16()
    x[0, 3], x[1, 200] = torch.nan, torch.inf
    packing.unpack_rows(rows, 256, bits, 64, torch.float16)[1][2, 0] = torch.nan
    got = linear_q(x, rows, None, Packing(bits, 256, 64), impl="raw")
    assert got[:2].isnan().all() and got[:, 2].isnan().all()
    assert_near(got[2:, [0, 1, 3, 4, 5]], (x.double() @ w.double().T)[2:, [0, 1, 3, 4, 5]])


def test_raw_codes_take_groups_that_fill_a_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """A table, whose shapes have groups of 128, names another for those of 16."""
    rows, _ = weight(8, 64, 4, 16, torch.float16)
    with pytest.raises(ValueError, match=r"^linear_q: group_size must be one of .* for 'raw', got 16"):
        linear_q(torch.ones(2, 64).half(), rows, None, Packing(4, 64, 16), impl="raw")
    table = (selection.TableEntry("linear_w4", 4096, 4096, ((1 << 30, "raw"),)),)
    monkeypatch.setattr(selection, "table_of", lambda name: table)
    names = [choices.choose(Product(f"w4g{group}", 8, 4096, 4096), "a GPU") for group in (128, 64, 32, 16)]
    assert [name.split("_")[0] for name in names] == ["raw", "raw", "raw", "flat"]


@pytest.mark.parametrize("impl", ("raw_64x128_s1", "raw_64x128_s3"))
def test_raw_codes_take_the_memory_that_is_counted(impl: str) -> None:
    torch.manual_seed(0)
    rows, w = weight(70, 700, 4, 64, torch.float16)
    x, stored = torch.randn(9, 700).half(), Packing(4, 700, 64)
    nbytes = selection.workspace_nbytes("linear_w4", impl, 9, 70, 700, 64)
    workspace = torch.zeros(nbytes + 64, dtype=torch.uint8)
    workspace[nbytes:] = 77
    for _ in range(2):  # counters are 0 again
        out = linear_q(x, rows, None, stored, impl=impl, workspace=workspace)
        assert_near(out, x.double() @ w.double().T)
    assert workspace[nbytes:].eq(77).all() and workspace[:nbytes][-4:].any(), "all of it, and no more"
    scratch = scratch_of(x.device, 0)
    scratch.values = torch.empty(0, dtype=torch.uint8)
    linear_q(x, rows, None, stored, impl=impl)
    assert scratch.values.numel() <= nbytes


@pytest.mark.parametrize("bits", (4, 8))
@pytest.mark.parametrize("place", ("apart", "residual"))
def test_weights_dequantized_tile_by_tile(bits: int, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each tile of 16 rows gives its columns; what follows the product reads its part of everything."""
    torch.manual_seed(bits)
    monkeypatch.setattr(choices, "DEQUANTISED_NBYTES", 16 * 100 * 2)
    assert choices.dequantized_rows(35, 100) == 16
    rows, w = weight(35, 100, bits, 32, torch.float16)
    x, bias = torch.randn(2, 3, 100).half(), torch.randn(35).half()
    multiplier, residual = torch.randn(2, 3, 35).half(), torch.randn(2, 3, 35).half()
    want = functional.silu(x.double() @ w.double().T + bias.double()) * multiplier.double() + residual.double()
    out = residual if place == "residual" else poisoned(2, 3, 35, dtype=torch.float16)
    run = bind_linear_q(x, rows, bias, Packing(bits, 100, 32), After("silu", multiplier, residual), out, "aten")
    scratch = scratch_of(x.device, 0)
    run()
    assert_near(out, want)
    assert scratch.values.numel() >= 16 * 100 * 2


@pytest.mark.parametrize("impl", ("", "aten"))
@pytest.mark.parametrize("bits", (4, 8))
def test_fp32_is_multiplied_by_torch(bits: int, impl: str) -> None:
    """By weights as they are stored: nothing is rounded to 16 bits."""
    torch.manual_seed(bits)
    rows, w = weight(35, 100, bits, 32, torch.float16)
    x, bias, residual = torch.randn(3, 100), torch.randn(35), torch.randn(3, 35)
    out = poisoned(3, 35, dtype=torch.float32)
    linear_q(x, rows, bias, Packing(bits, 100, 32), After("silu", residual=residual), out, impl)
    want = functional.silu(x.double() @ w.double().T + bias.double()) + residual.double()
    assert (out - want).norm() < 1e-6 * want.norm()


@pytest.mark.parametrize("bits", (4, 8))
def test_rows_of_a_wider_matrix_other_scales_and_a_multiplier(bits: int) -> None:
    torch.manual_seed(0)
    rows, w = weight(20, 100, bits, 32, torch.float16)
    wide = torch.full((20, rows.shape[1] + 32), 255, dtype=torch.uint8)
    wide[:, 16:-16] = rows
    x, other = torch.randn(1, 4, 100).bfloat16(), torch.randn(1, 4, 20).bfloat16()
    got = linear_q(x, wide[:, 16:-16], None, Packing(bits, 100, 32), After(multiplier=other))
    assert_near(got, x.double() @ w.double().T * other.double())


@pytest.mark.parametrize("impl", ("gemv", "flat"))
@pytest.mark.parametrize("bits", (4, 8))
def test_special_values_as_torch(bits: int, impl: str) -> None:
    torch.manual_seed(0)
    rows, w = weight(6, 70, bits, 32, torch.float16)
    x = torch.randn(2, 70).half()
    x[0, 3], x[1, 50] = torch.nan, torch.inf
    packing.unpack_rows(rows, 70, bits, 32, torch.float16)[1][2, 0] = torch.nan  # the scale of a group of row 2
    w[2, :32] = torch.nan
    got = linear_q(x, rows, None, Packing(bits, 70, 32), impl=impl)
    assert_near(got, x.double() @ w.to(x.dtype).double().T)


@pytest.mark.parametrize("bits", (4, 8))
def test_bad_arguments_are_named(bits: int) -> None:
    rows, _ = weight(8, 64, bits, 32, torch.float16)
    x, out = torch.ones(2, 64).half(), poisoned(2, 8, dtype=torch.float16)

    def refused(message: str, op: str = "linear_q", **changed: object) -> None:
        arguments: dict[str, object] = {
            "x": x, "rows": rows, "bias": None, "stored": Packing(bits, 64, 32), "after": PLAIN, "out": out,
        }  # fmt: skip
        with pytest.raises(ValueError, match=f"^{op}: {message}"):
            linear_q(**(arguments | changed))  # type: ignore[arg-type]

    refused("x must be of", x=x.double())
    refused("x must end in 64 columns", x=x[:, :60])
    refused("rows must be of", rows=rows.to(torch.int32))
    refused("rows must be \\[N, ", rows=rows[:, :-16])
    refused("rows must be on", rows=rows.to("meta"))
    wide = torch.zeros(8, rows.shape[1] + 8, dtype=torch.uint8)
    refused("rows must lie a multiple of 16", rows=wide[:, : rows.shape[1]])
    refused("rows must start at", rows=torch.zeros(rows.numel() + 8, dtype=torch.uint8)[8:].view(rows.shape))
    refused("group_size must be one of", stored=Packing(bits, 64, 48))
    long = torch.zeros(8, Packing(bits, 64, 96).row_nbytes, dtype=torch.uint8)
    refused("group_size must be one of .* for 'flat'", stored=Packing(bits, 64, 96), rows=long, impl="flat")
    refused("scale_dtype must be one of", stored=Packing(bits, 64, 32, torch.float32))
    refused("bias must have shape", bias=torch.ones(7).half())
    refused("residual must have shape", after=After(residual=torch.ones(2, 7).half()))
    refused("out must have shape", out=out[:1])
    refused("activation must be one of", after=After("tanh"))
    refused("impl must be one of", KIND_OF_BITS[bits], impl="int16")
    assert out.isnan().all()
