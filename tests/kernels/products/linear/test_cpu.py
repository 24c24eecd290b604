"""linear: every implementation against float64, at odd shapes and addresses, and what it must refuse."""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from forebay.kernels import operators
from forebay.kernels.build import compile
from forebay.kernels.cpu_support import native
from forebay.kernels.products.linear import cpu as linear_cpu
from forebay.kernels.products.linear import reference as linear_reference
from forebay.kernels.products.linear.reference import PLAIN, After
from tests.kernels import emulated

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Relative to the sum of magnitudes: half a unit of the output's last place, and fp32 sums.
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 1.05 * 2.0**-8, torch.float16: 1.05 * 2.0**-11}
needs_compiler = pytest.mark.skipif(compile.compiler() is None, reason="no C++ compiler")
IMPLS = ("aten", pytest.param("flat", marks=needs_compiler), "upcast")


def at_offset(tensor: Tensor, offset_nbytes: int) -> Tensor:
    """A copy whose first element lies offset_nbytes beyond a 64-byte boundary."""
    raw = bytearray(tensor.numel() * tensor.element_size() + 128)
    begin = -torch.frombuffer(raw, dtype=torch.uint8).data_ptr() % 64 + offset_nbytes
    made = torch.frombuffer(raw, dtype=tensor.dtype, count=tensor.numel(), offset=begin).view(tensor.shape)
    assert made.data_ptr() % 64 == offset_nbytes
    return made.copy_(tensor)


def assert_close(
    out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, added: Tensor | None, conv1d: bool, roundings: int = 1
) -> None:
    """Element by element, the error is small beside the sum of magnitudes that make the element."""
    want = linear_reference.reference(x, weight, bias, conv1d=conv1d)
    scale = linear_reference.reference(x.abs(), weight.abs(), None if bias is None else bias.abs(), conv1d=conv1d)
    if added is not None:
        want, scale = want + added.double(), scale + added.double().abs()
    tolerance = TOLERANCE[out.dtype] * roundings
    assert ((out.double() - want).abs() <= tolerance * scale + 1e-7).all()


@pytest.mark.covering(2)
@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("conv1d", (False, True))
@pytest.mark.parametrize("m", (1, 2, 3, 4, 7, 9, 16, 31, 67))
def test_matches_float64(impl: str, dtype: torch.dtype, conv1d: bool, m: int) -> None:
    torch.manual_seed(m)
    for n, k, accumulate in ((1, 1, False), (29, 83, True), (33, 40, False), (130, 9, True)):
        x = torch.randn(m, k).to(dtype)
        weight = at_offset(torch.randn(*((k, n) if conv1d else (n, k))).to(dtype), 2)
        for bias in (None, torch.randn(n).to(dtype)):
            wide = torch.full((m, n + 11), 7.0, dtype=dtype)
            out = wide[:, 5 : 5 + n]
            out.fill_(torch.nan)  # stale contents must not leak
            added = None
            if accumulate:
                added = torch.randn(m, n).to(dtype)
                out.copy_(added)
            linear_cpu.run(impl, x, weight, bias, out, accumulate, conv1d)
            # aten may round products, the bias's sum and the accumulated sum apart.
            assert_close(out, x, weight, bias, added, conv1d, roundings=3 if impl == "aten" else 1)
            assert (wide[:, :5] == 7).all() and (wide[:, 5 + n :] == 7).all()


@pytest.mark.parametrize("impl", IMPLS[1:])
@pytest.mark.parametrize("conv1d", (False, True))
@pytest.mark.parametrize(("m", "n", "k", "dtype"), (
    (5, 900, 4500, torch.bfloat16), (40, 130, 600, torch.bfloat16), (270, 33, 300, torch.float32)))
def test_long_sums_and_many_columns(impl: str, conv1d: bool, m: int, n: int, k: int, dtype: torch.dtype) -> None:
    """Longer than every block, of rows too: the partial sums of the blocks meet."""
    x = torch.randn(m, k).to(dtype)
    weight = torch.randn(*((k, n) if conv1d else (n, k))).to(dtype)
    out = torch.full((m, n), torch.nan)
    linear_cpu.run(impl, x, weight, None, out, conv1d=conv1d)
    assert_close(out, x, weight, None, None, conv1d)


@needs_compiler
@pytest.mark.parametrize(("x_dtype", "dtype"), ((torch.float32, torch.float32), (torch.float16, torch.float32),
                                                (torch.bfloat16, torch.float16), (torch.bfloat16, torch.bfloat16)))
def test_rows_that_scratch_holds_no_more_of(
    x_dtype: torch.dtype, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In several turns, of which the last is of a row; the scratch is as stated."""
    monkeypatch.setattr(linear_cpu, "SCRATCH_NBYTES", 1 << 14)
    monkeypatch.setattr(native, "_held", threading.local())
    for m, n, k in ((9, 30, 333), (48, 7, 70), (4, 200, 1000)):
        x, weight, out = torch.randn(m, k).to(x_dtype), torch.randn(n, k).to(dtype), torch.empty(m, n)
        linear_cpu.run("flat", x, weight, None, out)
        assert_close(out, x, weight, None, None, False)
        assert native._held.floats.nbytes <= max(1 << 14, 4 * k + linear_cpu.ROW_PADDING_NBYTES)


@needs_compiler
@pytest.mark.skipif("AVX" not in torch.backends.cpu.get_cpu_capability() or os.environ.get(
    "FOREBAY_TEST_PROCESSOR", "haswell") in ("x86-64", *emulated.PROCESSORS), reason="rows in groups are of AVX2")
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_gives_the_same_bits_beside_others(dtype: torch.dtype) -> None:
    """3 to 48 rows of fp32: what is rounded for one sequence does not hang on how many others there are."""
    torch.manual_seed(0)
    most = linear_cpu.GROUPS[-1]
    for n, k in ((50, 64), (131, 576), (64, 2048), (37, 4112)):
        x, weight, bias = torch.randn(most, k), torch.randn(n, k).to(dtype), torch.randn(n)
        every, out = torch.empty(most, n), torch.empty(most, n)
        linear_cpu.run("flat", x, weight, bias, every)
        for m in linear_cpu.GROUPS:
            linear_cpu.run("flat", x[-m:], weight, bias, out[:m])
            assert torch.equal(out[:m], every[-m:]), (n, k, m)


@pytest.mark.parametrize("impl", IMPLS[1:])
def test_mixed_dtypes_and_leading_dimensions(impl: str) -> None:
    x, weight, bias = torch.randn(2, 3, 40), torch.randn(24, 40).half(), torch.randn(24).bfloat16()
    out = torch.full((2, 3, 24), torch.nan, dtype=torch.bfloat16)
    linear_cpu.run(impl, x, weight, bias, out)
    assert_close(out, x, weight, bias, None, False)


@pytest.mark.parametrize("impl", IMPLS)
def test_row_tiles_make_the_whole(impl: str) -> None:
    """Tiles of a [N, K] weight are column slices of out; tiles of a [K, N] weight are partial sums."""
    x, weight = torch.randn(6, 50), torch.randn(70, 50)
    out = torch.full((6, 70), torch.nan)
    for n0 in range(0, 70, 32):
        linear_cpu.run(impl, x, weight[n0 : n0 + 32], None, out[:, n0 : n0 + 32])
    assert_close(out, x, weight, None, None, False)
    for k0 in range(0, 50, 16):
        tile = weight.t().contiguous()[k0 : k0 + 16]
        linear_cpu.run(impl, x[:, k0 : k0 + 16], tile, None, out, accumulate=k0 > 0, conv1d=True)
    assert_close(out, x, weight, None, None, False)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_and_infinity_propagate(impl: str, dtype: torch.dtype) -> None:
    for conv1d in (False, True):
        x, weight = torch.randn(5, 37).to(dtype), torch.randn(21, 37).to(dtype)
        x[1, 3], x[2, 36], weight[4, 7], weight[20, 36] = torch.inf, torch.nan, -torch.inf, torch.nan
        stored = weight.t().contiguous() if conv1d else weight
        out = torch.zeros(5, 21, dtype=dtype)
        linear_cpu.run(impl, x, stored, None, out, conv1d=conv1d)
        want = x.float() @ weight.float().t()
        assert torch.equal(out.isnan(), want.isnan())
        assert torch.equal(out.isposinf(), want.isposinf()) and torch.equal(out.isneginf(), want.isneginf())


@needs_compiler
def test_rounding_is_torchs() -> None:
    """Overflow, subnormals and ties round as torch's own conversion, in and out; instructions for bf16 take what is
    below its smallest normal number for zero."""
    bits = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16)
    for dtype in (torch.bfloat16, torch.float16):
        every = bits.view(dtype)
        every = every[every.isfinite()].reshape(-1, 1)
        out = torch.full_like(every, torch.nan, dtype=torch.float32)
        linear_cpu.run("flat", every, torch.ones(1, 1, dtype=dtype), None, out)
        flushed = (out == 0) & (every.float().abs() < torch.finfo(torch.bfloat16).tiny)
        assert torch.equal(torch.where(flushed, every.float(), out), every.float())
        ties = torch.cat((every.float() * (1 + 2.0**-9), every.float() * (1 + 2.0**-12), every.float() * 2))
        rounded = torch.full_like(ties, torch.nan, dtype=dtype)
        linear_cpu.run("flat", ties, torch.ones(1, 1), None, rounded)
        assert torch.equal(rounded, ties.to(dtype))


@pytest.mark.parametrize("impl", IMPLS)
def test_empty_sizes(impl: str) -> None:
    out = torch.full((3, 4), torch.nan)
    linear_cpu.run(impl, torch.empty(3, 0), torch.empty(4, 0), torch.arange(4.0), out)
    assert torch.equal(out, torch.arange(4.0).expand(3, 4))
    linear_cpu.run(impl, torch.empty(0, 5), torch.ones(4, 5), None, torch.empty(0, 4))
    linear_cpu.run(impl, torch.ones(2, 5), torch.ones(0, 5), None, torch.empty(2, 0))


@pytest.mark.parametrize("impl", IMPLS)
def test_bound_call_reads_present_contents_from_any_thread(impl: str) -> None:
    x, weight = torch.randn(4, 64).bfloat16(), torch.randn(48, 64).bfloat16()
    out = torch.empty(4, 48, dtype=torch.bfloat16)
    call = linear_cpu.bind_linear(impl, x, weight, None, out)
    for _ in range(2):
        x.normal_()
        weight.normal_()
        worker = threading.Thread(target=call)
        worker.start()
        worker.join()
        assert_close(out, x, weight, None, None, False)


@pytest.mark.parametrize("impl", IMPLS[1:])
def test_scratch_stays_within_its_bound(impl: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a small limit rows and tiles are cut, the result stands, and no more is held than stated."""
    monkeypatch.setattr(linear_cpu, "SCRATCH_NBYTES", 1 << 14)
    monkeypatch.setattr(native, "_held", threading.local())
    for m, n, k in ((70, 30, 333), (5, 600, 50)):
        x, weight, out = torch.randn(m, k).bfloat16(), torch.randn(n, k).bfloat16(), torch.empty(m, n)
        linear_cpu.run(impl, x, weight, None, out)
        assert_close(out, x, weight, None, None, False)
        held = native._held.floats.nbytes
        assert 0 < held <= linear_cpu.SCRATCH_NBYTES
        assert linear_cpu.scratch_nbytes(impl, torch.bfloat16, m, n, k) <= linear_cpu.SCRATCH_NBYTES


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize(
    ("argument", "change"),
    (
        ("x", {"x": torch.ones(3, 9)}),
        ("x", {"x": torch.ones(3, 8, dtype=torch.int32)}),
        ("x", {"x": torch.ones(8, 3).t()}),
        ("weight", {"weight": torch.ones(8)}),
        ("weight", {"weight": torch.ones(4, 8, dtype=torch.float64)}),
        ("weight", {"weight": torch.ones(8, 4).t()}),
        ("bias", {"bias": torch.ones(5)}),
        ("out", {"out": torch.ones(3, 5)}),
        ("out", {"out": torch.ones(4, 3).t()}),
        ("out", {"out": torch.ones(1, 3, 4)}),
    ),
)
def test_refuses_by_name(impl: str, argument: str, change: dict[str, Tensor]) -> None:
    given = {"x": torch.ones(3, 8), "weight": torch.ones(4, 8), "bias": torch.ones(4), "out": torch.ones(3, 4)}
    given.update(change)
    before = given["out"].clone()
    with pytest.raises(ValueError, match=f"linear: {argument} "):
        linear_cpu.run(impl, **given)
    assert torch.equal(given["out"], before)


def test_refuses_unknown_names_and_aten_of_mixed_dtypes() -> None:
    x, weight, out = torch.ones(3, 8), torch.ones(4, 8), torch.ones(3, 4)
    with pytest.raises(ValueError, match="impl must be one of"):
        linear_cpu.run("fast", x, weight, None, out)
    with pytest.raises(ValueError, match="linear: weight must have x's dtype"):
        linear_cpu.run("aten", x, weight.half(), None, out)


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Nor a cache folder with a library that was compiled before."""
    monkeypatch.setattr(compile, "compiler", lambda: None)
    monkeypatch.setenv("FOREBAY_CACHE", str(tmp_path))
    native.load.cache_clear()
    yield
    native.load.cache_clear()


def test_missing_compiler_falls_back_with_one_warning(no_compiler: None) -> None:
    with pytest.warns(RuntimeWarning, match=r"fall back to torch.*no C\+\+ compiler"):
        assert linear_cpu.implementations(torch.bfloat16) == ("aten", "upcast")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert linear_cpu.implementations(torch.float32) == ("aten",)
        for dtype in DTYPES:
            assert {linear_cpu.default_choice(dtype, m, 64, 64) for m in (1, 8, 512)} <= {"aten", "upcast"}
        with pytest.raises(ValueError, match="needs a C"):
            linear_cpu.run("flat", torch.ones(1, 1), torch.ones(1, 1), None, torch.ones(1, 1))


@pytest.mark.skipif(compile.compiler() is None, reason="no C++ compiler")
def test_failing_compiler_falls_back(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    broken = tmp_path / "c++"
    broken.write_text('#!/bin/sh\n[ "$1" = --version ] && exit 0\necho no such flag >&2\nexit 1\n')
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", str(broken))
    monkeypatch.setenv("FOREBAY_CACHE", str(tmp_path / "cache"))
    native.load.cache_clear()
    try:
        with pytest.warns(RuntimeWarning, match="no such flag"):
            assert native.load() is None
        assert [path.name for path in (tmp_path / "cache").iterdir()] == ["cpu.lock"]
    finally:
        monkeypatch.undo()
        native.load.cache_clear()


def test_default_choice_is_available_and_measurable() -> None:
    for dtype in DTYPES:
        for m in (1, 8, 512):
            assert linear_cpu.default_choice(dtype, m, 64, 64) in linear_cpu.implementations(dtype)
        for impl in linear_cpu.implementations(dtype):
            assert linear_cpu.measure(impl, dtype, 2, 32, 32, repeats=3, cache_nbytes=1 << 14) > 0
    assert linear_cpu.implementations(torch.int8) == ()


APART = {
    "": lambda x: x, "silu": functional.silu, "relu": functional.relu, "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
}


def followed(dtype: torch.dtype, m: int, n: int, k: int, conv1d: bool = False) -> tuple[Tensor, ...]:
    """x, weight, bias, multiplier and residual; the last two are column slices of something wider."""
    torch.manual_seed(m + n)
    multiplier, residual = torch.randn(2, m, n + 9).to(dtype)[..., 3 : n + 3].unbind()
    weight = torch.randn(*((k, n) if conv1d else (n, k))).to(dtype)
    return torch.randn(m, k).to(dtype) / k**0.5, weight, torch.randn(n).to(dtype), multiplier, residual


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", linear_reference.ACTIVATIONS)
def test_what_follows_the_product_is_what_the_operators_apart_make(
    impl: str, dtype: torch.dtype, activation: str
) -> None:
    cases = (((1, 29, 83), False, False), ((9, 130, 33), True, True), ((70, 17, 8), False, True))
    for (m, n, k), conv1d, accumulate in cases:
        x, weight, bias, multiplier, residual = followed(dtype, m, n, k, conv1d)
        added = torch.randn(m, n).to(dtype)
        for times, plus in ((None, None), (multiplier, None), (None, residual), (multiplier, residual)):
            product, out = added.clone(), added.clone()
            linear_cpu.run(impl, x, weight, bias, product, accumulate, conv1d)
            want = APART[activation](product)
            want = want if times is None else want * times
            want = want if plus is None else want + plus
            linear_cpu.run(impl, x, weight, bias, out, accumulate, conv1d, After(activation, times, plus))
            # Each function may fall on the other side of a rounding; sums of products run in the same order.
            error = (out.double() - want.double()).abs()
            limit = 4 * TOLERANCE[dtype] * (want.double().abs() + (0 if times is None else times.double().abs()) + 1)
            assert (error <= limit).all() and (error == 0).double().mean() > (0.3 if dtype == torch.float32 else 0.9)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("role", (1, 2))
def test_out_may_be_what_it_is_multiplied_by_or_added_to(impl: str, dtype: torch.dtype, role: int) -> None:
    for m, n, k in ((8, 70, 90), (67, 33, 40)):
        x, weight, _, other, _ = followed(dtype, m, n, k)
        apart, out = torch.empty(m, n, dtype=dtype), other.clone()
        linear_cpu.run(impl, x, weight, None, apart, after=PLAIN._replace(**{After._fields[role]: other}))
        linear_cpu.run(impl, x, weight, None, out, after=PLAIN._replace(**{After._fields[role]: out}))
        assert torch.equal(out, apart)


def test_scratch_that_a_session_made_serves_the_compile_backend() -> None:
    """Sessions run in inference mode, whose tensors torch's operators cannot write outside of it. In a thread of its
    own, which has no scratch yet."""
    x, weight = torch.ones(8, 16, dtype=torch.bfloat16), torch.ones(4, 16, dtype=torch.bfloat16)
    made: list[Tensor] = []

    def run() -> None:
        for mode in (True, False):
            out = torch.empty(8, 4, dtype=torch.bfloat16)
            with torch.inference_mode(mode):
                linear_cpu.run("upcast", x, weight, None, out)
            made.append(out)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert len(made) == 2 and all((out == 16).all() for out in made)


@pytest.mark.parametrize("impl", IMPLS)
def test_activations_of_extreme_values(impl: str) -> None:
    x = torch.tensor([-torch.inf, -200.0, -88.0, -5.0, -1e-30, 0.0, 1e-30, 5.0, 200.0, torch.inf, torch.nan])
    for activation, apart in APART.items():
        out = torch.empty(11, 1)
        linear_cpu.run(impl, x[:, None], torch.ones(1, 1), None, out, after=After(activation))
        want = apart(x)[:, None]
        assert torch.allclose(out[1:-2], want[1:-2], rtol=2e-6, atol=2e-6), activation
        # Of infinities torch, whose operators follow but in flat, makes NaN or the limit, as its vectors are wide (gelu
        # of infinity on AVX-512); ours: the limit above, below the limit or NaN.
        at_infinity = (torch.inf,) if impl == "flat" else (torch.inf, torch.nan)
        assert any(torch.equal(out[-2].nan_to_num(7.0), torch.tensor([v]).nan_to_num(7.0)) for v in at_infinity)
        limit = -torch.inf if not activation else 0.0
        assert out[0].isnan() or out[0] == limit, activation
        assert out[-1].isnan(), activation


@pytest.mark.parametrize(("argument", "after"), (
    ("activation", After("swish")),
    ("multiplier", After("", torch.ones(3, 5))),
    ("multiplier", After("", torch.ones(3, 4).half())),
    ("residual", After("", None, torch.ones(4))),
    ("residual", After("", None, torch.ones(4, 3).t())),
))
def test_refuses_what_follows_by_name(argument: str, after: After) -> None:
    with pytest.raises(ValueError, match=f"linear: {argument} "):
        linear_cpu.run("aten", torch.ones(3, 8), torch.ones(4, 8), None, torch.zeros(3, 4), after=after)


def test_opcheck() -> None:
    x, weight, bias, multiplier, residual = followed(torch.bfloat16, 6, 20, 16)
    torch.library.opcheck(operators.LINEAR.overload, (x, weight, bias, multiplier, residual, "silu"))
    torch.library.opcheck(operators.LINEAR.overload, (x.view(2, 3, 16), weight))
    out = operators.LINEAR.overload(x, weight, bias, multiplier, residual, "relu")
    assert torch.equal(out, functional.linear(x, weight, bias).relu() * multiplier + residual)
