"""`forebay::attention_q` in Triton: attention over packed rows, dequantized in registers.

The kernels are those of `decode_attention` and `prefill_attention`. Keys and values stay rotated: a tile of queries is
rotated as it is loaded, in decoding by every share of a sequence, and a result before it is rounded, in decoding where
the shares are merged.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from forebay.kernels.attention.attention_q import reference as operator
from forebay.kernels.attention.decode_attention import gpu as decode_attention
from forebay.kernels.attention.prefill_attention import gpu as prefill_attention
from forebay.kernels.attention.prefill_attention.gpu import GEMMA_2_SCORES
from forebay.kernels.attention.scoring import SYNCHRONISED, Scoring, SoftmaxRange
from forebay.kernels.formats import row_sizes
from forebay.kernels.gpu_support.arguments import check_tensor
from forebay.kernels.gpu_support.audit_case import (
    GEMMA_2_9B,
    LLAMA_3_8B,
    SMOLLM2_135M,
    AuditCase,
    HeadShape,
)
from forebay.kernels.gpu_support.cache_rows import check_rows, packed_view, unit_of
from forebay.kernels.gpu_support.cache_tiles import AttendedCache

OP = "attention_q"
HEADS_OF_80 = HeadShape(32, 32, 80)


def _check(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, start: Tensor, bits: int, group: int, out: Tensor
) -> None:
    operator.check(q, k_cache, v_cache, start, bits, group)
    check_tensor(OP, "q", q)
    batch, heads, queries, dim = q.shape
    for cache, name in ((k_cache, "k_cache"), (v_cache, "v_cache")):
        check_tensor(OP, name, cache, device=q.device, dtype=torch.uint8)
        check_rows(OP, cache, name, dim)
    check_tensor(OP, "start", start, device=q.device, dtype=torch.int64)
    check_tensor(OP, "out", out, device=q.device, dtype=q.dtype, shape=(batch, queries, heads, dim))


def bind_attention_q(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, start: Tensor, scoring: Scoring, bits: int, group: int, out: Tensor,
    softmax: SoftmaxRange = SYNCHRONISED,
) -> Callable[[], None]:  # fmt: skip
    """attention_q as a call without arguments, on the tensors' contents at each call; the checks are made here."""
    _check(q, k_cache, v_cache, start, bits, group, out)
    return _bind(q, (k_cache, v_cache), start, scoring, (bits, group), out, softmax, None)


def _bind(
    q: Tensor, caches: tuple[Tensor, Tensor], start: Tensor, scoring: Scoring, form: tuple[int, int], out: Tensor,
    softmax: SoftmaxRange, splits: int | None,
) -> Callable[[], None]:  # fmt: skip
    """The same of arguments that have been checked; `form` is bits and elements of a group."""
    view = packed_view(*caches, q.shape[3], *form)
    _, kv_heads, capacity, row_nbytes = caches[0].shape
    cache = AttendedCache(view, kv_heads, capacity, 2 * row_nbytes, start)
    if q.shape[2] == 1:
        return decode_attention.bind_view(q[:, :, 0], cache, scoring, softmax, splits, out[:, 0])
    return prefill_attention.bind_view(q, cache, scoring, out)


def attention_q(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, start: Tensor, scoring: Scoring, bits: int, group: int, out: Tensor,
    splits: int | None = None,
) -> None:  # fmt: skip
    """q [B, H, S, D], caches uint8 [B, Hkv, L, R], start int64 [B] -> out [B, S, H, D].

    Any strides but D's and a row's. The host is not synchronised, so start is not checked against L. `splits` are the
    shares of a sequence for one query; None: as many as plans count memory for. ValueError names the argument that is
    wrong, before the launch.
    """
    _check(q, k_cache, v_cache, start, bits, group, out)
    _bind(q, (k_cache, v_cache), start, scoring, (bits, group), out, SYNCHRONISED, splits)()


def _case(
    kind: str, bits: int, dtype: str, shape: HeadShape, queries: int = 1, in_suite: bool = True, **how: Any
) -> AuditCase:
    """Rows of kv8 (but of 256 elements) and of kv4 of 64 are no multiple of 16 bytes, nor are groups of 40: loads are
    8 or 4 bytes wide there."""
    _, kv_heads, dim = shape
    group, row_nbytes = row_sizes.cache_group_size(dim, bits), row_sizes.cache_row_nbytes(dim, bits)
    rows = torch.empty(1, kv_heads, 2, row_nbytes, dtype=torch.uint8)
    view = packed_view(rows, rows, dim, bits, group)
    name = f"attention_q/{kind}-kv{bits}"
    if queries == 1:
        made = decode_attention.case(name, dtype, view, shape, 2 * row_nbytes, **how)
        made = replace(made, aim=0.7 if dim == 128 and dtype != "fp32" else 0.0)
    else:
        made = prefill_attention.case(name, dtype, view, queries, shape, 2 * row_nbytes, **how)
    return replace(made, load_nbytes=unit_of(view.unit, group * bits // 8 if group < dim else 0), in_suite=in_suite)


def audit_cases() -> list[AuditCase]:
    """Llama-3-8B, SmolLM2-135M, Gemma-2-9B, and heads of 80, whose groups are not whole blocks of a rotation."""
    cases = [
        _case("decode", 4, "bf16", LLAMA_3_8B),
        _case("decode", 8, "bf16", LLAMA_3_8B),
        _case("decode", 4, "fp16", SMOLLM2_135M),
        _case("decode", 8, "fp16", SMOLLM2_135M, in_suite=False),
        _case("decode", 4, "bf16", GEMMA_2_9B, in_suite=False),
        _case("decode", 8, "bf16", GEMMA_2_9B, in_suite=False),
        _case("decode", 4, "fp16", HEADS_OF_80),
        _case("decode", 8, "fp16", HEADS_OF_80, in_suite=False),
        _case("decode", 4, "fp32", SMOLLM2_135M),
        _case("decode", 8, "fp32", LLAMA_3_8B, in_suite=False),
        _case("merged", 4, "bf16", LLAMA_3_8B, merge=True),
        _case("merged", 8, "bf16", LLAMA_3_8B, merge=True, in_suite=False),
        _case("merged", 4, "fp32", SMOLLM2_135M, merge=True),
        _case("decode", 4, "bf16", LLAMA_3_8B, amd=True),
        _case("decode", 8, "fp16", HEADS_OF_80, amd=True, in_suite=False),
    ]
    for ampere in (False, True):
        cases += [
            _case("long", 4, "bf16", LLAMA_3_8B, 2048, ampere=ampere),
            _case("long", 8, "bf16", LLAMA_3_8B, 2048, ampere=ampere),
            _case("chunk", 4, "bf16", LLAMA_3_8B, 64, ampere=ampere, in_suite=False),
            _case("short", 4, "fp16", HEADS_OF_80, 16, ampere=ampere),
            _case("long", 8, "fp16", HEADS_OF_80, 2048, ampere=ampere, in_suite=False),
            _case("window-softcap", 4, "bf16", GEMMA_2_9B, 2048, scoring=GEMMA_2_SCORES, ampere=ampere),
            _case("fp32", 4, "fp32", SMOLLM2_135M, 64, ampere=ampere),
            _case("fp32", 8, "fp32", LLAMA_3_8B, 64, ampere=ampere, in_suite=False),
        ]
    return cases
