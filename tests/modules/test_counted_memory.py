"""Results of operators are counted before they are made."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from modules.test_peak import allocated_peak
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from forebay.modules.counted_memory import CountedMemory, new_nbytes
from forebay.rewriter.ir.plan import PlanError

X, MASK = torch.randn(6, 40, 64), torch.arange(6 * 40).reshape(6, 40) % 3 == 0
PIXELS, KERNEL, HEADS = torch.randn(2, 3, 56, 56), torch.randn(16, 3, 14, 14), torch.randn(2, 4, 200, 16)
CALLS: dict[str, Callable[[], Any]] = {
    "views": lambda: X.transpose(0, 1)[:, 3:].split(2, 0), "in place": lambda: X.abs().mul_(2).clamp_(max=1),
    "factories": lambda: (torch.arange(300), torch.zeros(7, 9, dtype=torch.float16), torch.full((3,), 1.5)),
    "casts": lambda: X.to(torch.float64).to(torch.bool), "matmul": lambda: X @ X.transpose(1, 2),
    "softmax": lambda: F.softmax(X, -1, dtype=torch.float64), "layer norm": lambda: F.layer_norm(X, (64,)),
    "mask": lambda: X[MASK], "mask within": lambda: X[:, MASK[0], :5], "numbers and mask": lambda: X[[0], MASK[1]],
    "nonzero": MASK.nonzero, "select": lambda: X.masked_select(MASK[:, :, None]), "item": lambda: float(X.sum()),
    "unique": lambda: torch.tensor([3, 1, 3]).unique(), "repeat": lambda: X[0].repeat_interleave(3, 0),
    "repeats": lambda: torch.arange(9).repeat_interleave(torch.arange(9)), "cat": lambda: torch.cat([X, X], 1),
    "drawn": lambda: torch.multinomial(X[0].abs(), 2, generator=torch.Generator().manual_seed(0)),
    "several": lambda: (X.topk(3), X.max(1), X.sort(-1)), "patches": lambda: F.conv2d(PIXELS, KERNEL, stride=14),
    "convolution": lambda: F.conv2d(PIXELS, KERNEL[:, :, :3, :3]), "sound": lambda: F.conv1d(X, torch.randn(9, 40, 3)),
    "attention": lambda: F.scaled_dot_product_attention(HEADS, HEADS, HEADS),
    "masked attention": lambda: F.scaled_dot_product_attention(HEADS, HEADS, HEADS, torch.zeros(200, 200)),
    "half": lambda: F.linear(X.bfloat16(), torch.ones(30, 64, dtype=torch.bfloat16))}


class _Predicted(TorchDispatchMode):
    """Compares predictions for operators with what they make."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = {each.untyped_storage()._cdata for each in tree_leaves((args, kwargs))
                 if isinstance(each, torch.Tensor)}
        state, predicted = torch.get_rng_state(), new_nbytes(func, args, kwargs or {})
        assert torch.equal(state, torch.get_rng_state())
        out = func(*args, **(kwargs or {}))
        made = {each.untyped_storage()._cdata: each.untyped_storage().nbytes() for each in tree_leaves(out)
                if isinstance(each, torch.Tensor)}
        size = sum(nbytes for storage, nbytes in made.items() if storage not in known)
        assert size <= predicted and (predicted <= 2 * size + 64 or "conv" in str(func) or "unique" in str(func)
                                      or "attention" in str(func) or "mm" in str(func) or "masked" in str(func)), func
        return out


@pytest.mark.parametrize("name", CALLS)
def test_results_are_predicted(name: str) -> None:
    """By operator, and with torch's record of a whole call."""
    with torch.no_grad(), _Predicted():
        CALLS[name]()
    memory = CountedMemory(1 << 30, lambda: False, "the model")

    def run() -> None:
        with torch.no_grad(), memory:
            CALLS[name]()

    assert allocated_peak(run) <= memory.peak_nbytes + (16384 if name in ("nonzero", "mask") else 4096)


def test_no_operator_begins_without_room() -> None:
    """What could be freed is asked for first, and only as long as it helps."""
    freed: list[Any] = [torch.ones(250), torch.ones(250)]
    begun: list[Any] = []

    class Began(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            if not out.is_meta:
                begun.append(func)
            return out

    def free() -> bool:
        return bool(freed) and bool(freed.pop().numel())

    memory = CountedMemory(3000, free, "the model")
    memory.hold(freed)
    with Began(), memory:
        first = torch.zeros(500)
        assert len(freed) == 1 and memory.peak_nbytes == memory.count() == 3000
        began = len(begun)
        with pytest.raises(PlanError, match=r"these inputs need more than .* while the model computes them"):
            torch.zeros(501)
    assert len(begun) == began and not freed and memory.count() == first.nbytes


@pytest.mark.parametrize(("device", "nbytes"), [
    ("cpu", 400), ("cpu:0", 400), (torch.device("cpu", 0), 400), ("meta", 0)])
def test_memory_of_the_host_counts_by_any_name(device: torch.device | str, nbytes: int) -> None:
    assert new_nbytes(torch.ops.aten.zeros.default, ([100],), {"device": device, "dtype": torch.float32}) == nbytes
