"""Native calls and chains of them."""

from __future__ import annotations

import pytest
import torch

from forebay.kernels.attention.attention.cpu import bind_attention
from forebay.kernels.build import compile
from forebay.kernels.cache.kv_append.cpu import bind_kv_append
from forebay.kernels.cpu_support import native
from forebay.kernels.norms.rms_norm.cpu import bind_rms_norm
from forebay.kernels.products.linear.cpu import bind_linear

pytestmark = pytest.mark.skipif(compile.compiler() is None, reason="no C++ compiler")


def small_model(dtype: torch.dtype):
    """Calls that depend on each other in order, and their result."""
    torch.manual_seed(0)
    x, norm = torch.randn(2, 1, 16).to(dtype), torch.randn(16).to(dtype)
    weights = [torch.randn(16, 16).to(dtype) / 4 for _ in range(3)]
    normed, out = torch.empty_like(x), torch.empty(2, 1, 2, 8, dtype=dtype)
    made = [torch.empty(2, 1, 16, dtype=dtype) for _ in weights]
    q, k, v = (m.view(2, 1, 2, 8).transpose(1, 2) for m in made)
    cache_k, cache_v, start = torch.zeros(2, 2, 5, 8, dtype=dtype), torch.zeros(2, 2, 5, 8, dtype=dtype), \
        torch.tensor([0, 3])
    calls = [bind_rms_norm(x, norm, 1e-5, normed)]
    calls += [bind_linear("flat", normed, w, None, m) for w, m in zip(weights, made, strict=True)]
    calls.append(bind_kv_append(cache_k, cache_v, k, v, start))
    calls.append(bind_attention(q, cache_k, cache_v, start, 0.3, 0, 0.0, out))
    return calls, out, start, made


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_a_chain_does_what_its_calls_do(dtype: torch.dtype) -> None:
    calls, out, _, made = small_model(dtype)
    assert all(isinstance(call, native.NativeCall) for call in calls)
    for call in calls:
        call()
    want = out.clone()
    for t in (out, *made):
        t.fill_(torch.nan)
    (whole,) = native.chained(calls)
    whole()
    assert torch.equal(out, want) and not out.isnan().any()


def test_a_refusal_names_its_operator_and_stops_the_chain() -> None:
    calls, out, start, _ = small_model(torch.float32)
    (whole,) = native.chained(calls)
    start[1] = 5
    out.fill_(7)
    with pytest.raises(ValueError, match="kv_append: start must leave positions within 0"):
        whole()
    assert (out == 7).all(), "nothing behind the refusal runs"
    with pytest.raises(ValueError, match="attention: start"):
        calls[-1]()
    start[1] = 4
    whole()


def test_only_neighbours_are_chained_and_not_too_many() -> None:
    calls, _, _, _ = small_model(torch.float32)
    ran: list[int] = []
    other = lambda: ran.append(1)  # noqa: E731
    found = native.chained([calls[0], other, calls[1], calls[2], other])
    assert found[0] is calls[0] and found[1] is other and len(found) == 4
    many = native.chained(calls[:1] * (native.CHAIN_MOST + 2))
    assert len(many) == 2
    assert native.chained([]) == []
