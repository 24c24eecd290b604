"""Sinks of attention in Triton, interpreted, against the definition."""

from __future__ import annotations

import os

os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest
import torch

pytest.importorskip("triton")

from filled_caches import LIMIT, relative_error

from forebay.kernels.attention.attention.operator import ATTENTION
from forebay.kernels.attention.attention.reference import reference
from forebay.kernels.attention.decode_attention.gpu import bind_decode_attention_contiguous
from forebay.kernels.attention.decode_attention.gpu_merge import MERGED
from forebay.kernels.attention.scoring import HELD, SYNCHRONISED, AttentionExtras, Scoring, SoftmaxRange
from forebay.kernels.operator import Tensors

SINKS = torch.tensor([-30.0, 0.3, 2.0, 40.0])  # far below, among and far above the scores


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("queries", [1, 5])
def test_sinks_take_their_share(dtype: torch.dtype, queries: int) -> None:
    generator, starts = torch.Generator().manual_seed(0), torch.tensor([30, 0])
    q = torch.randn(2, 4, queries, 16, generator=generator).to(dtype)
    k, v = (torch.randn(2, 2, 36, 16, generator=generator).to(dtype) for _ in "kv")
    out, sinks = torch.full((2, queries, 4, 16), torch.nan, dtype=dtype), SINKS.to(dtype)
    for window, softcap in ((0, 0.0), (7, 3.0)):
        given = (q, k, v, starts, 0.25, window, softcap, 0.0, 0.0, 0.0, sinks)
        ATTENTION.bind["cuda"](Tensors(given, {}, (out,)))()
        wanted = reference(q, k, v, starts, 0.25, window, softcap, extras=AttentionExtras(sinks))
        assert relative_error(out, wanted) < LIMIT[dtype]
        assert out[:, :, 3].abs().max() < 1e-3 < out[:, :, 2].abs().max()
    with pytest.raises(ValueError, match="sinks must"):
        ATTENTION.bind["cuda"](Tensors((*given[:10], sinks[:2]), {}, (out,)))


@pytest.mark.parametrize("softmax", [SYNCHRONISED, SoftmaxRange(1.5, *HELD[torch.float16])], ids=["own", "shared"])
def test_sinks_with_the_shares_of_a_long_sequence(softmax: SoftmaxRange) -> None:
    """Put together by a kernel, of shares with their own maximum or one in common."""
    length, splits = 64 * (MERGED + 1), MERGED + 1
    q, sinks = torch.randn(1, 4, 16).half(), SINKS.half()
    k, v = torch.randn(2, 1, 1, length, 16).half().unbind()
    start, out = torch.tensor([length - 1]), torch.full((1, 4, 16), torch.nan, dtype=torch.float16)
    bind_decode_attention_contiguous(q, k, v, start, Scoring(0.25), out, softmax, splits, sinks)()
    wanted = reference(q[:, :, None], k, v, start, 0.25, extras=AttentionExtras(sinks))[:, 0]
    assert relative_error(out, wanted) < LIMIT[torch.float16]
