"""Operators of ours over operands of any strides: each record states what its kernels take, and lowering asks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from forebay.kernels import operators
from forebay.kernels.formats import packing, row_sizes
from forebay.kernels.formats.packing import Packing
from forebay.kernels.operators import OPERATORS
from forebay.passes.lower.launches import Launches, LoweringError
from forebay.rewriter.ir.graph import META, Gemm
from forebay.rewriter.ir.products import is_product, linear_arguments
from forebay.rewriter.ir.program import Launch, TensorRef
from forebay.runtime.run.bind import bind_launch

aten, ours = torch.ops.aten, torch.ops.forebay
# write a state and give a result: torch does not
STATES = ("choose_tokens", "short_conv", "linear_recurrence", "selective_scan", "wkv")
REFUSED = {("activation_append_q", 0, "turned"), ("activation_append_q", 0, "stepped")}  # by tracing
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {  # copies of a tensor that lie otherwise
    "dense": lambda t: t.contiguous(),
    "turned": lambda t: t.mT.contiguous().mT,
    "stepped": lambda t: torch.stack((t, t), -1)[..., 0],
    "wide": lambda t: torch.cat((t, t), -1)[..., : t.shape[-1]],
    "far": lambda t: torch.stack((t, t), 1)[:, 0],
    "swapped": lambda t: t.transpose(0, -2).contiguous().transpose(0, -2),
}


def rows_of(n: int, k: int) -> Tensor:
    codes = ours.quantize(torch.randn(n, k), 4, 32, 1, torch.float16)
    return packing.pack_rows(*codes)


def cases() -> Iterator[tuple[str, Any, tuple]]:
    """Name, overload and dense arguments of a use of every operator that we have."""
    x, weight, bias, residual = torch.randn(2, 3, 64), torch.randn(16, 64), torch.randn(16), torch.randn(2, 3, 16)
    stored, q = Packing(4, 64, 32), torch.randn(2, 4, 3, 32)
    start, length = torch.tensor([0, 2]), 8
    k, v = torch.randn(2, 2, length, 32), torch.randn(2, 2, length, 32)
    group = row_sizes.cache_group_size(32, 8)
    packed = [torch.zeros(2, 2, length, row_sizes.cache_row_nbytes(32, 8), dtype=torch.uint8) for _ in "kv"]
    new = torch.randn(2, 2, 3, 32), torch.randn(2, 2, 3, 32)
    ours.kv_append_q(*packed, k, v, torch.zeros(2, dtype=torch.int64), 8, group)
    yield "aten.linear", aten.linear.default, (x, weight, bias)
    yield "aten.addmm", aten.addmm.default, (bias, x[0], weight.T.contiguous())
    yield "linear", ours.linear.default, (x, weight, bias, residual, residual, "silu")
    yield "linear_q", ours.linear_q.default, (x, rows_of(16, 64), bias, residual, residual, "silu", *stored)
    picked = torch.tensor([[0, 2], [1, 2], [2, 0]]).expand(2, 3, 2).contiguous(), torch.rand(2, 3, 2)
    yield "experts", ours.experts.default, (
        x, *picked, torch.randn(3, 3 * 64 * 16), 16, False, "silu", True, False, False, False, False, 0.0, 0.0)
    yield "assign_slots", ours.assign_slots.default, (
        picked[0], torch.zeros(6, dtype=torch.int64), torch.zeros(29, dtype=torch.int64), 3, 3, 3, False, 2,
        torch.tensor([4, 0, 2]), 9, torch.tensor([1, 0]))
    yield "attention", ours.attention.default, (q, k, v, start, 0.2, 0, 0.0)
    yield "attention_q", ours.attention_q.default, (q, *packed, start, 0.2, 0, 0.0, 8, group)
    means = torch.randn(2, 2, 24, k.shape[3] // 8)
    yield "choose_blocks", ours.choose_blocks.default, (q[:, :, :1], means, start, start, 0.2, 0.5, 8)
    yield "mean_keys", ours.mean_keys.default, (k, means, start, start, 3, 8)
    yield "choose_tokens", ours.choose_tokens.default, (
        torch.randn(2, 3, 12, 16), torch.randn(2, 3, 12), torch.randn(2, 3, 16), torch.randn(2, 1, length, 16), start,
        2)
    rows = torch.randn(2, 1, length, 16 + 8)
    yield "expanded_attention", ours.expanded_attention.default, (
        q, rows, rows, start, 0.2, 0, 0.0, torch.randn(4, 24 + 12, 16), 24)
    yield "kv_append", ours.kv_append.default, (k, v, *new, start)
    yield "kv_append_q", ours.kv_append_q.default, (*packed, *new, start, 8, group)
    kept = torch.zeros(2, length, row_sizes.row_nbytes(64, 8, 64), dtype=torch.uint8)
    yield "activation_append_q", ours.activation_append_q.default, (kept, x, torch.arange(6).view(2, 3), 8, 64)
    k, count = torch.randn(2, 3, 2, 32), torch.tensor([3, 2])
    yield "short_conv", ours.short_conv.default, (
        x, torch.randn(64, 4), torch.randn(64), torch.randn(2, 3, 64), start, count, "silu")
    yield "keep_state", ours.keep_state.default, (torch.randn(2, 3, 64), torch.randn(2, 3, 64), start)
    yield "linear_recurrence", ours.linear_recurrence.default, (
        k, k, torch.randn(2, 3, 4, 16), -torch.rand(2, 3, 4), torch.rand(2, 3, 4), torch.randn(2, 4, 32, 16), start,
        count)
    yield "selective_scan", ours.selective_scan.default, (
        x, torch.rand(2, 3, 64), -torch.rand(64, 8), torch.randn(2, 3, 8), torch.randn(2, 3, 8),
        torch.randn(2, 64, 8), start, count)
    yield "wkv", ours.wkv.default, (
        x, torch.randn(2, 3, 64), -torch.rand(64), torch.randn(64), torch.rand(2, 3, 64), start, count)
    yield "rms_norm", ours.rms_norm.default, (x, torch.randn(64), 1e-5)
    yield "layer_norm", ours.layer_norm.default, (x, torch.randn(64), torch.randn(64), 1e-5)
    yield "rotary", ours.rotary.default, (q, torch.randn(1, 3, 32), torch.randn(1, 3, 32))
    yield "quantize", ours.quantize.default, (weight, 4, 32, 1, torch.float16)
    yield "dequantize", ours.dequantize.default, (
        *ours.quantize(weight, 4, 32, 1, torch.float16), 4, 32, 1, 64, torch.float32)
    yield "dequantize_rows", ours.dequantize_rows.default, (
        rows_of(16, 64), 64, 4, 32, torch.float16, torch.float32, False)
    yield "sampling", ours.sampling.default, (torch.randn(3, 64), torch.rand(3), 1.0, 0, 0.9)


with torch.random.fork_rng():
    torch.manual_seed(0)
    CASES = {name: (target, args) for name, target, args in cases()}
ONE = {"expanded_attention": (1, 2)}  # arguments that are one tensor
ODD = [(name, i, layout) for name, (_, args) in CASES.items() for i, value in enumerate(args)
       if isinstance(value, Tensor) and i not in ONE.get(name, ())[1:] for layout in LAYOUTS
       if (layout in ("dense", "stepped") or value.dim() > 1) and (name, i, layout) not in REFUSED]


def launches_of(target: Any, args: tuple, impl: int) -> tuple[list[Launch], dict[str, Tensor]]:
    """The launches of one node over these tensors, and its memory by name; results are poisoned."""
    graph, memory = fx.Graph(), {}

    def given(i: int, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        node = graph.placeholder(f"given{i}")
        node.meta["val"] = memory[node.name] = value
        return node

    node = graph.call_function(target, tuple(given(i, value) for i, value in enumerate(args)))
    node.meta["val"] = target(*(a.to("meta") if isinstance(a, Tensor) else a for a in args))
    linear = linear_arguments(node)
    if is_product(node):
        packed = linear is not None and linear.packing is not None
        choice = (operators.LINEAR_Q if packed else operators.LINEAR).implementations
        assert choice is not None
        names = choice.candidates("w4g32" if packed else "float32")
        node.meta[META] = Gemm(names[impl % len(names)])

    def ref(of: fx.Node, result: int = 0) -> TensorRef:
        value = of.meta["val"]
        value = value[result] if isinstance(value, tuple) else value
        name = of.name if of.op == "placeholder" else f"result{result}"
        if name not in memory:
            memory[name] = torch.full((value.untyped_storage().nbytes(),), 0xFF, dtype=torch.uint8).view(
                value.dtype).as_strided(value.shape, value.stride())
        return TensorRef("device", 0, str(value.dtype)[6:], tuple(value.shape), tuple(value.stride()), name)

    return Launches(ref, lambda launch: launch).of(node), memory


def separate(name: str, args: Sequence[Any]) -> list[Any]:
    """Copies of the arguments of a case, one of those that are one tensor."""
    found = [a.clone() if isinstance(a, Tensor) else a for a in args]
    for i in ONE.get(name, ()):
        found[i] = found[ONE[name][0]]
    return found


def test_every_operator_has_a_case() -> None:
    assert {str(target) for target, _ in CASES.values()} >= {str(operator.overload) for operator in OPERATORS}


@pytest.mark.parametrize(("name", "argument", "layout"), sorted(REFUSED))
def test_tracing_refuses_memory_that_is_written_as_rows(name: str, argument: int, layout: str) -> None:
    target, args = CASES[name]
    odd = [LAYOUTS[layout](a) if i == argument else a for i, a in enumerate(args)]
    with pytest.raises(ValueError, match=f"{name}: cache must have contiguous rows"):
        target(*(torch.empty_strided(a.shape, a.stride(), dtype=a.dtype, device="meta") if isinstance(a, Tensor) else a
                 for a in odd))


@pytest.mark.parametrize(("name", "argument", "layout"), ODD)
def test_an_operand_may_lie_otherwise(name: str, argument: int, layout: str) -> None:
    target, args = CASES[name]
    given = separate(name, args)
    wanted = target(*given)
    wanted = [] if wanted is None else list(wanted) if isinstance(wanted, tuple) else [wanted]
    for impl in range(3):
        odd = separate(name, args)
        moved = LAYOUTS[layout](odd[argument])
        odd = [moved if a is odd[argument] else a for a in odd]
        try:
            launches, memory = launches_of(target, tuple(odd), impl)
        except LoweringError as error:
            assert name in STATES and layout != "dense" and "whose operands must lie as its layouts say" in str(error)
            return
        for launch in launches:
            bind_launch(launch, lambda ref: memory[ref.buffer])()  # noqa: B023
        found = [memory[f"result{i}"] for i in range(len(wanted))]
        written = [(got, want) for got, want in zip(odd, given, strict=True) if isinstance(got, Tensor)]
        for got, want in [*zip(found, wanted, strict=True), *written]:
            torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3)
        operator = operators.of_target(target)
        if layout == "dense" and (operator is None or operator.bind):  # what lies as stated is not left to torch
            assert launches[0].op == (operator or operators.LINEAR).name
        if not launches[0].impl:
            break
