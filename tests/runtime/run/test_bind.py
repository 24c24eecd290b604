"""Launches bound as a GPU would run them: Triton's kernels, here under its interpreter, on CPU tensors."""

from __future__ import annotations

import os

os.environ.setdefault("TRITON_INTERPRET", "1")

import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
from selection import at_length
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("triton")

from forebay.kernels import operators
from forebay.kernels.attention.attention import reference as attention
from forebay.kernels.attention.attention_q import reference as attention_q
from forebay.kernels.attention.costs import gpu_workspace_nbytes
from forebay.kernels.cache.kv_append_q import reference as kv_append_q
from forebay.kernels.formats import packing, row_sizes
from forebay.kernels.formats.packing import Packing
from forebay.kernels.norms.rms_norm import reference as rms_norm
from forebay.kernels.operator import Operator, Product, Tensors
from forebay.kernels.positions.rotary import reference as rotary
from forebay.kernels.products.linear import choices, selection
from forebay.kernels.products.linear import reference as linear
from forebay.kernels.products.linear_q import reference as linear_q
from forebay.kernels.quantization.quantize.operator import quantize
from forebay.rewriter.ir.program import COMPUTE, Launch
from forebay.runtime.devices.device import RuntimeFault
from forebay.runtime.run.bind import bind_launch, bind_operator

LIMIT = 1e-3  # of the largest value: fp16


def bound(op: str, args: tuple, out: torch.Tensor | None = None, impl: str = "", **kwargs: Any) -> Any:
    """The call for a launch of `op`, its result poisoned."""
    if out is not None and not kwargs.get("accumulate"):
        out.fill_(torch.nan)
    launch = Launch(COMPUTE, f"forebay.{op}", (), {}, (), (), (), "node", 0, 0, 0, impl)
    operator = operators.find(launch.op)
    assert operator is not None
    return bind_operator(operator, launch, Tensors(args, kwargs, () if out is None else (out,), impl), "cuda")


def assert_near(found: torch.Tensor, wanted: torch.Tensor) -> None:
    assert not found.isnan().any()
    assert (found.double() - wanted).abs().max() <= LIMIT * wanted.abs().max().clamp(min=1)


def halves(*shape: int) -> torch.Tensor:
    return torch.randn(*shape).half()


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize(
    ("m", "impl"), ((1, "gemv"), (2, "gemv_8x512_s1"), (3, "flat_64x64_s2"), (20, "large_128x64x64_s1"), (3, "aten"))
)
def test_linear_with_all_that_follows_it(m: int, impl: str) -> None:
    x, weight, bias = halves(1, m, 160), halves(40, 160) / 8, halves(40)
    wide = halves(1, m, 96)
    out, multiplier, residual = wide[..., 8:48], halves(1, m, 40), halves(1, m, 40)
    after = {"activation": "silu", "multiplier": multiplier, "residual": residual}
    call = bound("linear", (x, weight, bias), out, impl, form="nk", accumulate=False, **after)
    beside = wide[..., :8].clone(), wide[..., 48:].clone()
    call()
    assert_near(out, linear.reference(x, weight, bias, linear.After(**after)))
    assert torch.equal(wide[..., :8], beside[0]) and torch.equal(wide[..., 48:], beside[1])
    x.neg_()  # a call reads what is there when it is made
    call()
    assert_near(out, linear.reference(x, weight, bias, linear.After(**after)))


@pytest.mark.parametrize("dtype", (torch.float16, torch.float32))
def test_row_tiles_of_a_transposed_weight_add_up(dtype: torch.dtype) -> None:
    x, weight, bias = (t.to(dtype) for t in (halves(3, 96), halves(96, 40) / 8, halves(40)))
    out = torch.empty(3, 40, dtype=dtype)
    bound("linear", (x[:, :64], weight[:64], bias), out, "flat", form="kn", accumulate=False)()
    bound("linear", (x[:, 64:], weight[64:], None), out, "flat", form="kn", accumulate=True)()
    assert_near(out, linear.reference(x, weight, bias, conv1d=True))


@pytest.mark.parametrize("bits", (4, 8))
def test_linear_of_packed_rows(bits: int) -> None:
    x, weight, residual = halves(2, 1, 200), halves(24, 200), halves(2, 1, 24)
    rows = packing.pack_rows(*quantize(weight, bits, 32, 1, torch.float16))
    out = torch.empty(2, 1, 24, dtype=torch.float16)
    stored, after = Packing(bits, 200, 32), linear.After(residual=residual)
    bound("linear_q", (x, rows, None), out, "flat", residual=residual, **stored._asdict())()
    assert_near(out, linear_q.reference(x, rows, None, stored, after))


@pytest.mark.parametrize(("queries", "window", "softcap"), ((1, 0, 0.0), (1, 5, 3.0), (6, 0, 0.0), (6, 4, 3.0)))
def test_attention_of_one_query_and_of_several(queries: int, window: int, softcap: float) -> None:
    q = halves(2, queries, 6, 16).transpose(1, 2)
    k, v, start = halves(2, 2, 40, 16), halves(2, 2, 40, 16), torch.tensor([3, 30])
    out = torch.empty(2, queries, 6, 16, dtype=torch.float16)
    bound("attention", (q, k, v, start, 0.3, window, softcap), out)()
    assert_near(out, attention.reference(q, k, v, start, 0.3, window, softcap))


def test_kv_append_writes_its_positions_alone() -> None:
    caches = [torch.full((2, 2, 9, 8), 7.0).half() for _ in "kv"]
    wanted = [c.clone() for c in caches]
    k, v, start = halves(2, 2, 3, 8), halves(2, 2, 3, 8), torch.tensor([1, 5])
    bound("kv_append", (*caches, k, v, start))()
    for b, s in enumerate((1, 5)):
        wanted[0][b, :, s : s + 3], wanted[1][b, :, s : s + 3] = k[b], v[b]
    assert all(torch.equal(c, w) for c, w in zip(caches, wanted, strict=True))


def test_norm_and_rotary() -> None:
    x, weight = halves(2, 3, 48), halves(48)
    out = torch.empty_like(x)
    bound("rms_norm", (x, weight, 1e-5), out)()
    assert_near(out, rms_norm.reference(x.double(), weight.double(), 1e-5))
    q, cos, sin = halves(2, 3, 4, 16).transpose(1, 2), halves(1, 3, 16), halves(1, 3, 16)
    out = torch.empty(2, 4, 3, 16, dtype=torch.float16)
    bound("rotary", (q, cos, sin), out)()
    assert_near(out, rotary.reference(q.double(), cos.double(), sin.double()))


def test_what_is_not_ours_is_left_to_torch() -> None:
    launch = Launch(COMPUTE, "aten.add.out", (), {}, (), (), (), "node", 0, 0, 0, "")
    assert operators.find(launch.op) is None
    one, out = torch.ones(2), torch.empty(2)
    launch = replace(launch, kwargs={"self": one, "other": one, "alpha": 2}, out=(out,))  # type: ignore[arg-type]
    bind_launch(launch, lambda ref: ref)()  # type: ignore[arg-type, return-value]
    assert out.tolist() == [3.0, 3.0]


@pytest.mark.parametrize("device", ("cpu", "cuda"))
@pytest.mark.parametrize("operator", [o for o in operators.OPERATORS if o.implementations is not None])
def test_nobody_chooses_for_a_launch_that_names_no_implementation(operator: Operator, device: str) -> None:
    stored = Packing(4, 64, 32)
    packed = operator is operators.LINEAR_Q
    weight = packing.pack_rows(*quantize(torch.randn(8, 64), 4, 32, 1, torch.float16)) if packed else torch.randn(8, 64)
    how = stored._asdict() if packed else {"form": "nk", "accumulate": False}
    use = Tensors((torch.randn(3, 64), weight, None), how, (torch.empty(3, 8),))
    launch = Launch(COMPUTE, operator.name, (), {}, (), (), (), "node")
    with pytest.raises(RuntimeFault, match=rf"^node: {operator.name} names none of its implementations"):
        bind_operator(operator, launch, use, device)
    with pytest.raises(ValueError, match="impl must be one of"):
        operator.bind["cpu"](use)
    with pytest.raises(RuntimeFault, match=rf"^node: {operator.name} does not run on this CPU: .*impl must be one of"):
        bind_operator(operator, launch, use._replace(impl="none such"), "cpu")


def test_an_operator_of_ours_without_a_gpu_kernel_is_refused() -> None:
    with pytest.raises(RuntimeFault, match=r"^node: forebay\.quantize has no kernel for a GPU"):
        bound("quantize", (), halves(2))


@pytest.mark.parametrize("bits", [4, at_length(8)])
def test_a_quantized_cache_is_written_and_read(bits: int) -> None:
    group, row = row_sizes.cache_group_size(64, bits), row_sizes.cache_row_nbytes(64, bits)
    caches = [torch.full((2, 2, 20, row), 0xFF, dtype=torch.uint8) for _ in "kv"]
    start = torch.tensor([0, 0])
    for queries, begins in ((7, (0, 0)), (3, (7, 5)), (1, (10, 8))):
        start.copy_(torch.tensor(begins))
        k, v = halves(2, 2, queries, 64), halves(2, 2, queries, 64)
        q, out = halves(2, queries, 4, 64).transpose(1, 2), torch.empty(2, queries, 4, 64, dtype=torch.float16)
        bound("kv_append_q", (*caches, k, v, start, bits, group))()
        bound("attention_q", (q, *caches, start, 0.2, 0, 0.0, bits, group), out)()
        assert_near(out, attention_q.reference(q, *caches, start, 0.2, 0, 0.0, bits, group))
    read = kv_append_q.unpack(caches[0][0, :, 10], 64, bits, group)
    assert (read - k[0, :, 0]).norm() < (0.15 if bits == 4 else 0.01) * k[0, :, 0].float().norm()


@pytest.mark.parametrize(
    ("message", "op", "args", "out", "impl"),
    (
        ("takes 3 rows", "linear", ((3, 64), (8, 64), None), (3, 8), "gemv"),
        ("impl must be one of", "linear", ((3, 64), (8, 64), None), (3, 8), "upcast"),
        ("out must have shape", "linear", ((3, 64), (8, 64), None), (3, 7), "flat"),
        ("head_dim of 1 .. 640", "attention", ((1, 2, 1, 700), (1, 2, 4, 700), (1, 2, 4, 700)), (1, 1, 2, 700), ""),
        ("rows of at most 16384", "rms_norm", ((2, 16385), (16385,)), (2, 16385), ""),
    ),
)
def test_a_refusal_comes_when_the_launch_is_bound(message: str, op: str, args: tuple, out: tuple, impl: str) -> None:
    tensors = [None if shape is None else halves(*shape) for shape in args]
    rest = {"linear": (), "attention": (torch.zeros(1, dtype=torch.int64), 1.0, 0, 0.0), "rms_norm": (1e-5,)}[op]
    kwargs = {"form": "nk", "accumulate": False} if op == "linear" else {}
    with pytest.raises(RuntimeFault, match=rf"^node: forebay.{op} does not run on this GPU: .*{message}"):
        bound(op, (*tensors, *rest), halves(*out), impl, **kwargs)


def test_missing_triton_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "forebay.kernels.norms.rms_norm.gpu", None)
    with pytest.raises(RuntimeFault, match=r"^node: forebay\.rms_norm on a GPU needs Triton"):
        bound("rms_norm", (halves(2, 8), halves(8), 1e-5), halves(2, 8))


@pytest.mark.parametrize(
    ("weight", "m"), (("float16", 1), ("bfloat16", 16), ("w8g128", 200), ("w4g64", 3), ("w8g128", 9))
)
def test_plans_name_gpu_implementations_and_count_what_they_take(weight: str, m: int) -> None:
    n, k = 1024, 4096
    impl = choices.choose(Product(weight, m, n, k), "NVIDIA H200")
    splits = int(impl.rsplit("_s", 1)[1])
    counted = choices.workspace_nbytes(impl, Product(weight, m, n, k))
    # Each part of K has an fp32 sum for every element, tiles padded.
    assert counted >= (4 * m * n * splits if splits > 1 else 0)
    assert counted <= (1 << 20) + 4 * max(m, 16) * n * splits * 2


class Called(TorchDispatchMode):
    """Names of the operators that torch runs."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("place", ("apart", "residual", "multiplier"))
@pytest.mark.parametrize("parts", ("", "bias", "residual", "bias residual", "multiplier", "activation residual",
                                   "bias activation multiplier residual"))
def test_torchs_product_is_right_wherever_its_result_lies(parts: str, place: str) -> None:
    x, weight, bias = halves(5, 64), halves(24, 64) / 8, halves(24)
    given = {"multiplier": halves(5, 24), "residual": halves(5, 24)}
    after: dict[str, Any] = {name: tensor for name, tensor in given.items() if name in parts}
    if "activation" in parts:
        after["activation"] = "silu"
    used = bias if "bias" in parts else None
    want = linear.reference(x, weight, used, linear.After(**after))
    out = after[place] if place in after else torch.full((5, 24), torch.nan).half()
    held = out.clone()
    call = bound("linear", (x, weight, used), out, "aten", form="nk", accumulate=False, **after)
    out.copy_(held)
    call()
    assert_near(out, want)


@pytest.mark.parametrize(("parts", "operator"), (("", "aten.mm.out"), ("bias", "aten.addmm.out"),
                                                 ("residual", "aten.addmm.out"), ("accumulate", "aten.addmm.out")))
def test_torchs_product_goes_straight_into_the_result(parts: str, operator: str) -> None:
    x, weight, out = halves(5, 64), halves(24, 64), halves(5, 24)
    residual = {"residual": out} if parts == "residual" else {}
    call = bound("linear", (x, weight, halves(24) if parts == "bias" else None), out, "aten", form="nk",
                 accumulate=parts == "accumulate", **residual)
    with Called() as called:
        call()
    assert called.names == [operator]


def test_torchs_product_is_measured_where_it_may_be_the_fastest() -> None:
    assert "aten" in selection.candidates("linear", 512, 4096, 4096)
    assert "aten" in selection.candidates("linear", 17, 4096, 4096)
    assert "aten" not in selection.candidates("linear", 16, 4096, 4096)
    for kind in ("linear_w4", "linear_w8"):
        assert "aten" in selection.candidates(kind, 256, 4096, 4096)
        assert "aten" not in selection.candidates(kind, 255, 4096, 4096)
    assert selection.explicit("linear", "aten", 512, 64, 64) == "aten"


@pytest.mark.parametrize("bits", (4, 8))
def test_many_rows_over_packed_weights_are_torchs(bits: int) -> None:
    product = Product(f"w{bits}g64", 512, 4096, 14336)
    assert choices.choose(product, "NVIDIA H200") == "aten"
    assert choices.choose(product._replace(m=255), "NVIDIA H200").startswith("large")
    result = 2 * 2 * 512 * 4096  # apart, and again with what follows it
    assert choices.workspace_nbytes("aten", product) == 4096 * 14336 * 2 + result
    assert choices.transient_nbytes("aten", product) == result
    assert choices.dequantized_rows(28672, 7168) == 9344 == 146 * 64, "not the 9362 that fit"
    vocabulary = product._replace(n=128256, k=4096)  # in row tiles of 128 MiB
    assert choices.workspace_nbytes("aten", vocabulary) == (128 << 20) + 2 * 2 * 512 * 16384


def test_fp32_products_are_torchs() -> None:
    assert choices.choose(Product("float32", 4, 64, 64), "NVIDIA H200") == "aten"
    assert choices.workspace_nbytes("aten", Product("float32", 4, 64, 64)) >= 4 * 4 * 64


def test_the_workspace_that_torch_gives_cublas_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choices.cublas_nbytes() == 32 << 20
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.backends.cuda, "cublas_workspace_size", lambda: 5 << 20, raising=False)
    assert choices.cublas_nbytes() == 5 << 20
    assert choices.workspace_nbytes("aten", Product("float32", 4, 64, 64)) == 2 * 4 * 4 * 64


def test_decode_counts_the_shares_that_it_makes(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k = halves(2, 4, 1, 16), halves(2, 2, 4096, 16)
    taken, empty = [], torch.empty

    def counted(*shape: Any, **options: Any) -> torch.Tensor:
        made = empty(*shape, **options)
        taken.append(made.nbytes)
        return made

    out, start = torch.empty(2, 1, 4, 16, dtype=torch.float16), torch.zeros(2, dtype=torch.int64)
    call = bound("attention", (q, k, k, start, 1.0, 0, 0.0), out)
    monkeypatch.setattr(torch, "empty", counted)
    call()
    monkeypatch.undo()
    assert 0 < sum(taken) <= gpu_workspace_nbytes(Tensors((q, k), {}, ())) <= sum(taken) + (64 << 10)
