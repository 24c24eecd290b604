"""linear_q: every implementation against float64, at odd shapes, row tiles and addresses, and what they
must refuse."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator

import pytest
import torch
from allocated import peak_allocated
from torch import Tensor

from forebay.kernels import operators
from forebay.kernels.build import compile
from forebay.kernels.cpu_support import native
from forebay.kernels.formats import packing, row_sizes
from forebay.kernels.formats.packing import Packing
from forebay.kernels.products.linear.reference import ACTIVATIONS, After
from forebay.kernels.products.linear_q.cpu import (
    bind_linear_q,
    default_choice,
    implementations,
    measure,
    scratch_nbytes,
    takes_int8,
)
from forebay.kernels.products.linear_q.reference import reference
from forebay.kernels.quantization.quantize.cpu import quantize_rows
from forebay.kernels.quantization.quantize.operator import quantize

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ROUNDING = {torch.float32: 1e-6, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
# Largest error of x as an integer, as a part of its group's largest magnitude.
STEP = {"int16": 0.5 / 32767, "bf16": 0.5 / 32767, "int8": 0.5 / 127, "flat": 0.0, "upcast": 0.0}
needs_compiler = pytest.mark.skipif(compile.compiler() is None, reason="no C++ compiler")
BF16 = 2.0**-8  # of x, and of the weights that many rows of it meet
ALL = [(bits, impl) for bits in (4, 8) for impl in ("int16", "bf16", "int8", "flat", "upcast")]
IMPLS = [pytest.param(*each, marks=() if each[1] == "upcast" else needs_compiler) for each in ALL]


@pytest.fixture(autouse=True)
def skip_without_avx2(request: pytest.FixtureRequest) -> None:
    given = getattr(request.node, "callspec", None) and request.node.callspec.params
    if given and "impl" in given and given["impl"] not in implementations(given["bits"]):
        pytest.skip(f"no {given['impl']} here")


def make(
    bits: int, n: int, k: int, group: int, scale_dtype: torch.dtype = torch.float16, symmetric: bool = False
) -> tuple[Tensor, Tensor]:
    """Packed rows at an address that is a multiple of 2 only, and the weight they stand for."""
    values = torch.randn(n, k) * 0.1
    if symmetric:
        codes, scale, _ = quantize(values, bits, group, 1, scale_dtype, "symmetric")
        packed = packing.pack_rows(codes, scale, None)
    else:
        packed = quantize_rows(values, bits, group, scale_dtype)
    raw = bytearray(packed.numel() + 128)
    begin = -torch.frombuffer(raw, dtype=torch.uint8).data_ptr() % 64 + 2
    rows = torch.frombuffer(raw, dtype=torch.uint8, count=packed.numel(), offset=begin).view(packed.shape)
    rows.copy_(packed)
    return rows, reference(torch.eye(k), rows, None, Packing(bits, k, group, scale_dtype, symmetric)).t()


@pytest.mark.parametrize("bits", (4, 8))
def test_what_formats_say_of_rows_is_what_products_read(bits: int) -> None:
    """By every implementation that is here: `quantize` and plans ask `product_refusal` alone."""
    read = 0
    for group, k in itertools.product((2, 8, 10, 16, 20, 32, 48, 64, 96, 160, 512, 544), (16, 48, 64, 112, 160)):
        x, out, stored = torch.randn(7, k), torch.empty(7, 5), Packing(bits, k, group)
        if row_sizes.product_refusal(k, group):
            rows = torch.zeros(5, stored.row_nbytes, dtype=torch.uint8)
            with pytest.raises(ValueError, match=r"linear_q: (group_size|in_features) must be"):
                bind_linear_q("upcast", x, rows, None, out, stored)
            continue
        read += 1
        rows, weight = make(bits, 5, k, group)
        for impl in implementations(bits):
            if impl == "int8" and not takes_int8(bits, group):
                with pytest.raises(ValueError, match=f"linear_q: impl must be one of .* for groups of {group}, got"):
                    bind_linear_q(impl, x, rows, None, out, stored)
                continue
            bind_linear_q(impl, x, rows, None, out, stored)()
            assert ((out - x.double() @ weight.t()).abs() <= tolerance(impl, x, weight, group, out, None)).all()
    assert read > 10


def tolerance(impl: str, x: Tensor, weight: Tensor, group: int, out: Tensor, bias: Tensor | None) -> Tensor:
    """A bound on each element's error: rounding of the result, fp32 sums, each x off by an integer's half step, of
    which two groups of 16 have one, and where all is rounded to bf16 each product off by that twice."""
    k, group = x.shape[-1], max(32, group)
    absolute = torch.nn.functional.pad(x.double().abs(), (0, -k % group)).unflatten(-1, (-1, group))
    off = (absolute.amax(-1, keepdim=True) * STEP[impl]).expand_as(absolute).flatten(-2)[..., :k]
    sums = x.double().abs() @ weight.abs().mT + (0 if bias is None else bias.double().abs())
    return off @ weight.abs().mT + sums * (ROUNDING[out.dtype] + 2e-6 + 2.01 * BF16 * (impl == "bf16")) + 1e-7


@pytest.mark.covering(2)
@pytest.mark.parametrize(("bits", "impl"), IMPLS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("m", (1, 2, 7, 8, 67))
@pytest.mark.parametrize("symmetric", (False, True))
def test_matches_float64(bits: int, impl: str, dtype: torch.dtype, m: int, symmetric: bool) -> None:
    torch.manual_seed(m)
    for n, k, group, scale_dtype in (
        (1, 1, 32, torch.float16), (29, 83, 32, torch.bfloat16), (13, 576, 64, torch.float16),
        (3, 1100, 64, torch.float16), (9, 300, 128, torch.bfloat16), (5, 530, 512, torch.float16),
        (1, 32, 16, torch.float16), (13, 544, 16, torch.bfloat16), (6, 2336, 16, torch.float16),
        (7, 300, 96, torch.float16), (5, 960, 160, torch.bfloat16), (4, 1100, 480, torch.float16),
    ):  # fmt: skip
        if impl == "int8" and (group == 16 or (bits == 8 and group & (group - 1))):
            continue
        rows, weight = make(bits, n, k, group, scale_dtype, symmetric)
        stored = Packing(bits, k, group, scale_dtype, symmetric)
        x = (torch.randn(m, k) * torch.randn(m, 1).exp()).to(dtype)
        for bias in (None, torch.randn(n)):
            wide = torch.full((m, n + 11), 7.0, dtype=dtype)
            out = wide[:, 5 : 5 + n]
            out.fill_(torch.nan)  # stale contents must not leak
            bind_linear_q(impl, x, rows, bias, out, stored)()
            want = reference(x, rows, bias, stored)
            assert ((out.double() - want).abs() <= tolerance(impl, x, weight, group, out, bias)).all()
            assert (wide[:, :5] == 7).all() and (wide[:, 5 + n :] == 7).all()


@pytest.mark.covering(1)
@pytest.mark.parametrize(("bits", "impl"), IMPLS)
@pytest.mark.parametrize("m", (1, 4, 7, 40))
def test_symmetric_rows_give_what_rows_with_their_lows_give(bits: int, impl: str, m: int) -> None:
    """Bit for bit, or but for the order of sums where products begin from what the middle code makes; the end of the
    matrix included: behind it lie bytes that would be NaN as lows."""
    torch.manual_seed(m)
    codes, scale, low = quantize(torch.randn(38, 96), bits, 32, 1, torch.float16, "symmetric")
    x, got, want = torch.randn(m, 96), torch.empty(m, 38), torch.empty(m, 38)
    own = packing.pack_rows(codes, scale, None)
    held = torch.full((own.numel() + 64,), 255, dtype=torch.uint8)
    rows = held[: own.numel()].view(own.shape)
    rows.copy_(own)
    bind_linear_q(impl, x, rows, None, got, Packing(bits, 96, 32, symmetric=True))()
    bind_linear_q(impl, x, packing.pack_rows(codes, scale, low), None, want, Packing(bits, 96, 32))()
    begins = impl in ("int16", "int8") and m > 5
    assert torch.allclose(got, want, rtol=0, atol=1e-4) if begins else torch.equal(got, want)


@pytest.mark.covering(2)
@pytest.mark.parametrize(("bits", "impl"), IMPLS)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activation_multiplier_and_residual(bits: int, impl: str, activation: str) -> None:
    """They round as operators apart would, and out may be the residual's memory."""
    torch.manual_seed(0)
    rows, _ = make(bits, 37, 200, 64)
    for dtype in DTYPES:
        x, multiplier = torch.randn(2, 3, 200).to(dtype), torch.randn(2, 3, 37).to(dtype)
        plain = torch.empty(2, 3, 37, dtype=dtype)
        bind_linear_q(impl, x, rows, None, plain, Packing(bits, 200, 64))()
        activate = {"": lambda y: y, "silu": torch.nn.functional.silu, "relu": torch.relu,
                    "gelu": torch.nn.functional.gelu,
                    "gelu_tanh": lambda y: torch.nn.functional.gelu(y, approximate="tanh")}[activation]  # fmt: skip
        out = torch.randn(2, 3, 37).to(dtype)
        want = activate(plain) * multiplier + out
        bind_linear_q(impl, x, rows, None, out, Packing(bits, 200, 64), after=After(activation, multiplier, out))()
        # The activation itself is known to some 2e-7, which may round to the neighbouring number.
        assert ((out - want).double().abs() <= (want.double().abs() + 3) * 2 * ROUNDING[dtype]).all()
        assert activation not in ("", "relu") or torch.equal(out, want)
        exact = activation in ("", "relu") or dtype == torch.float32
        assert exact <= bool(((out - want).double().abs() <= 4e-6 * (want.double().abs() + 3)).all())


@pytest.mark.parametrize(("bits", "impl"), IMPLS)
def test_row_tiles_give_the_same_bits(bits: int, impl: str) -> None:
    """Rows [n0, n1) of the packed matrix, into a column slice of out, are what the whole gives there."""
    rows, _ = make(bits, 70, 150, 64)
    x, bias = torch.randn(9, 150).bfloat16(), torch.randn(70).bfloat16()
    whole, out = torch.empty(2, 9, 70, dtype=torch.bfloat16).unbind()
    bind_linear_q(impl, x, rows, bias, whole, Packing(bits, 150, 64))()
    for n0 in range(0, 70, 27):
        tile = rows[n0 : n0 + 27].clone()
        bind_linear_q(impl, x, tile, bias[n0 : n0 + 27], out[:, n0 : n0 + 27], Packing(bits, 150, 64))()
    if impl == "upcast":  # torch's sums depend on the shape
        assert ((out - whole).double().abs() <= 2.0**-7 * whole.double().abs() + 1e-3).all()
    else:
        assert torch.equal(out, whole)


@pytest.mark.parametrize(("bits", "impl"), IMPLS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_that_integers_cannot_hold(bits: int, impl: str, dtype: torch.dtype) -> None:
    """NaN and infinity give what torch gives, tiny rows keep their digits, and other rows are as without them."""
    torch.manual_seed(1)
    rows, weight = make(bits, 21, 90, 32)
    x = torch.randn(12, 90).to(dtype)
    residual = torch.randn(12, 21)
    clean, out = torch.empty(12, 21), residual.clone()
    bind_linear_q(impl, x, rows, None, clean, Packing(bits, 90, 32), after=After(residual=residual))()
    x[1, 3], x[4, 89], x[4, 0], x[10, 7] = torch.inf, torch.inf, -torch.inf, torch.nan
    if dtype != torch.float16:
        x[6] = torch.randn(90).to(dtype) * 1e-33
    bind_linear_q(impl, x, rows, None, out, Packing(bits, 90, 32), after=After(residual=out))()
    want = x.float() @ weight.float().t() + residual
    assert torch.equal(out.isnan(), want.isnan())
    assert torch.equal(out.isposinf(), want.isposinf()) and torch.equal(out.isneginf(), want.isneginf())
    typical = [i for i in range(12) if i not in (1, 4, 6, 10)]
    assert torch.equal(out[typical], clean[typical])
    assert (out[6] - want[6]).abs().max() < 1e-5 if dtype != torch.float16 else True
    alone = torch.empty(1, 21)
    bind_linear_q(impl, x[6:7], rows, None, alone, Packing(bits, 90, 32))()
    exact = x[6:7].double() @ weight.mT
    assert ((alone.double() - exact).abs() <= tolerance(impl, x[6:7], weight, 32, alone, None)).all()
    zero = torch.zeros(1, 90).to(dtype)
    bind_linear_q(impl, zero, rows, None, alone, Packing(bits, 90, 32))()
    assert (alone == 0).all()


@pytest.mark.parametrize(("bits", "impl"), IMPLS)
def test_negative_scales(bits: int, impl: str) -> None:
    """GGUF's blocks may have them."""
    rows, _ = make(bits, 5, 64, 32)
    scale = packing.unpack_rows(rows, 64, bits, 32, torch.float16)[1]
    scale.neg_()
    x, out = torch.randn(3, 64), torch.empty(3, 5)
    bind_linear_q(impl, x, rows, None, out, Packing(bits, 64, 32))()
    want = reference(x, rows, None, Packing(bits, 64, 32))
    assert (out.double() - want).norm() < {"int8": 2e-2, "bf16": 1e-2}.get(impl, 1e-4) * want.norm()


@pytest.mark.parametrize(("bits", "impl"), IMPLS)
def test_scratch_stays_within_its_bound(bits: int, impl: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a small limit rows are taken fewer at a time, and the result stands."""
    monkeypatch.setattr("forebay.kernels.products.linear_q.cpu.SCRATCH_NBYTES", 1 << 14)
    monkeypatch.setattr(native, "_held", threading.local())
    rows, weight = make(bits, 30, 333, 64)
    x, out = torch.randn(70, 333).bfloat16(), torch.empty(70, 30)
    call = bind_linear_q(impl, x, rows, None, out, Packing(bits, 333, 64))
    call()
    want = x.double() @ weight.mT
    assert ((out.double() - want).abs() <= tolerance(impl, x, weight, 64, out, None)).all()
    if impl != "upcast":
        held = native._held.floats.nbytes
        assert 0 < held <= scratch_nbytes(impl, torch.bfloat16, 70, 30, 333, 64) <= 1 << 14


@pytest.mark.parametrize(("m", "n", "k"), [(1, 96, 256), (3, 997, 96), (300, 300, 64), (9, 5, 4096), (200, 700, 2)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_torch_takes_is_bounded_by_the_products_size(m: int, n: int, k: int, dtype: torch.dtype) -> None:
    """Every allocation counted; a small product is not said to take what the largest may."""
    rows, _ = make(4, n, k, 32)
    x, out, multiplier = (torch.randn(shape).to(dtype) for shape in ((m, k), (m, n), (m, n)))
    call = bind_linear_q("upcast", x, rows, None, out, Packing(4, k, 32), After("silu", multiplier))
    call()
    bound = scratch_nbytes("upcast", dtype, m, n, k, 32)
    assert 0 < peak_allocated(call) <= bound <= 64 * k + 8 * m + 4 * (m * k + 6 * n * max(32, k) + 4 * m * n)


@pytest.mark.parametrize(("bits", "impl"), IMPLS)
def test_bound_call_reads_present_contents_from_any_thread(bits: int, impl: str) -> None:
    rows, _ = make(bits, 48, 64, 32)
    x, out = torch.randn(4, 64), torch.empty(4, 48)
    call = bind_linear_q(impl, x, rows, None, out, Packing(bits, 64, 32))
    for _ in range(2):
        x.normal_()
        rows.copy_(quantize_rows(torch.randn(48, 64), bits, 32))
        worker = threading.Thread(target=call)
        worker.start()
        worker.join()
        want = reference(x, rows, None, Packing(bits, 64, 32))
        assert (out.double() - want).norm() < {"int8": 2e-2, "bf16": 1e-2}.get(impl, 1e-4) * want.norm()


@pytest.mark.parametrize(("bits", "impl"), IMPLS)
def test_empty_sizes(bits: int, impl: str) -> None:
    out = torch.full((3, 4), torch.nan)
    nothing, bias = torch.empty(4, 0, dtype=torch.uint8), torch.arange(4.0)
    bind_linear_q(impl, torch.empty(3, 0), nothing, bias, out, Packing(bits, 0, 32))()
    assert torch.equal(out, torch.arange(4.0).expand(3, 4))
    rows, _ = make(bits, 4, 5, 32)
    bind_linear_q(impl, torch.empty(0, 5), rows, None, torch.empty(0, 4), Packing(bits, 5, 32))()
    bind_linear_q(impl, torch.ones(2, 5), rows[:0], None, torch.empty(2, 0), Packing(bits, 5, 32))()


@pytest.mark.parametrize("bits", (4, 8))
@pytest.mark.parametrize(
    ("argument", "change"),
    (
        ("x", {"x": torch.ones(3, 9)}),
        ("x", {"x": torch.ones(3, 8, dtype=torch.int32)}),
        ("x", {"x": torch.ones(8, 3).t()}),
        ("rows", {"rows": torch.zeros(4, 33, dtype=torch.uint8)}),
        ("rows", {"rows": torch.zeros(4, 48)}),
        ("rows", {"rows": torch.zeros(48, 4, dtype=torch.uint8).t()}),
        ("bias", {"bias": torch.ones(5)}),
        ("out", {"out": torch.ones(3, 5)}),
        ("out", {"out": torch.ones(4, 3).t()}),
        ("group_size", {"group_size": 48}),
        ("group_size", {"group_size": 24}),
        ("group_size", {"group_size": 0}),
        ("in_features", {"group_size": 16}),
        ("group_size", {"group_size": 1024}),
        ("scale_dtype", {"scale_dtype": torch.float32}),
        ("bits", {"bits": 3}),
        ("activation", {"after": After("swish")}),
        ("multiplier", {"after": After(multiplier=torch.ones(4))}),
        ("residual", {"after": After(residual=torch.ones(3, 4).half())}),
        ("impl", {"impl": "fast"}),
    ),
)
def test_refuses_by_name(bits: int, argument: str, change: dict) -> None:
    rows, _ = make(bits, 4, 8, 32)
    given = {"impl": "upcast", "x": torch.ones(3, 8), "rows": rows, "bias": torch.ones(4), "out": torch.ones(3, 4),
             "stored": Packing(bits, 8, 32)} | change  # fmt: skip
    given["stored"] = given["stored"]._replace(**{name: given.pop(name) for name in Packing._fields if name in given})
    before = given["out"].clone()
    with pytest.raises(ValueError, match=f"linear_q: {argument} "):
        bind_linear_q(**given)
    assert torch.equal(given["out"], before)


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(native, "load", lambda: None)
    yield


@pytest.mark.parametrize("bits", (4, 8))
def test_without_a_compiler_torch_does_the_work(bits: int, no_compiler: None) -> None:
    rows, _ = make(bits, 7, 100, 64)
    assert implementations(bits) == ("upcast",) and default_choice(bits, 64, 64) == "upcast"
    x = torch.randn(2, 5, 100)
    got = operators.LINEAR_Q.overload(x, rows, None, None, None, "silu", bits, 100, 64, torch.float16)
    want = reference(x, rows, None, Packing(bits, 100, 64), After("silu"))
    assert (got.double() - want).abs().max() < 1e-5
    with pytest.raises(ValueError, match="needs a C"):
        bind_linear_q("flat", x, rows, None, got, Packing(bits, 100, 64))


@pytest.mark.parametrize("bits", (4, 8))
def test_default_choice_is_available_measurable_and_close(bits: int) -> None:
    """The default adds nothing that bf16 or 4 bits had not lost many times over: 1e-4 of the product's norm."""
    rows, _ = make(bits, 64, 640, 64)
    for m in (1, 8, 70):
        impl = default_choice(bits, m, 64)
        assert impl in implementations(bits) and impl != "int8"
        x, out = torch.randn(m, 640) * torch.randn(m, 640).exp(), torch.empty(m, 64)
        bind_linear_q(impl, x, rows, None, out, Packing(bits, 640, 64))()
        want = reference(x, rows, None, Packing(bits, 640, 64))
        assert (out.double() - want).norm() < 1e-4 * want.norm()
    for impl in implementations(bits):
        assert measure(impl, torch.bfloat16, 2, 32, Packing(bits, 64, 32), repeats=3, cache_nbytes=1 << 14) > 0


@pytest.mark.parametrize("bits", (4, 8))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_opcheck(bits: int, dtype: torch.dtype) -> None:
    rows, _ = make(bits, 21, 70, 32)
    x, residual, multiplier = (torch.randn(2, 3, size).to(dtype) for size in (70, 21, 21))
    for args in (
        (x, rows, None, None, None, "", bits, 70, 32, torch.float16),
        (x.transpose(0, 1), rows, torch.randn(21), None, residual.transpose(0, 1), "silu", bits, 70, 32, torch.float16),
        (x, rows, None, multiplier, residual, "gelu", bits, 70, 32, torch.float16),
    ):
        torch.library.opcheck(operators.LINEAR_Q.overload, args)
