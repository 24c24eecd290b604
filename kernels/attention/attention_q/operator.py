"""`forebay::attention_q`: `forebay::attention` over a cache of packed rows (see `kv_append_q` for their layout).

The C++ kernel (`attention_q.cpp`) unpacks 64 positions at a time on its stack, once per 32 query rows; memory
holds packed rows only. Keys and values stay rotated: it is the queries, and once the result, that the kernel rotates.
Without a compiler the visible part of the cache is unpacked by torch. On a GPU it is Triton's kernels of `attention`
that read packed rows, in registers.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from forebay.kernels.attention.attention_q import cpu
from forebay.kernels.attention.attention_q.reference import check, reference
from forebay.kernels.attention.costs import (
    attention_cost,
    chosen_of,
    cpu_shape,
    gathered_nbytes,
    gpu_refusal,
    gpu_workspace_nbytes,
)
from forebay.kernels.attention.scoring import HELD, Scoring, SoftmaxRange
from forebay.kernels.define import define_operator
from forebay.kernels.operator import Call, Use


def _attention_q(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, start: Tensor, scale: float, window: int, softcap: float, bits: int,
    group: int, phi: float = 0.0, low: float = 0.0, high: float = 0.0, chosen: Tensor | None = None,
) -> Tensor:
    """q [B, H, S, D], packed caches uint8 [B, Hkv, L, R], start int64 [B] -> [B, S, H, D]; window 0, softcap 0: none.
    phi, low, high and chosen as of `forebay::attention`.

    q and caches may be strided. ValueError names the argument that is wrong.
    """
    batch, heads, queries, dim = q.shape
    return q.new_empty(batch, queries, heads, dim)


def _bind_cuda(use: Use) -> Call:
    from forebay.kernels.attention.attention_q.gpu import bind_attention_q as bind

    if chosen_of(use) is not None:
        raise NotImplementedError("attention_q: queries attend among chosen tokens on the CPU alone")
    return bind(*(*_bound(use), SoftmaxRange(*use.args[9:12])))


def _bound(use: Use) -> tuple[Any, ...]:
    """The arguments that launchers of both devices have."""
    return *use.args[:4], Scoring(*use.args[4:7]), *use.args[7:9], *use.out


ATTENTION_Q = define_operator(
    _attention_q,
    check=lambda q, k_cache, v_cache, start, *how: check(
        q, k_cache, v_cache, start, *how[3:5], *how[8:]),
    reference=reference,
    cost=attention_cost,
    bind={"cpu": lambda use: cpu.bind_attention_q(*(*_bound(use), chosen_of(use))), "cuda": _bind_cuda},
    workspace={
        "cpu": lambda use: cpu.workspace_nbytes(*cpu_shape(use)) + gathered_nbytes(use),
        "cuda": lambda use: gpu_workspace_nbytes(use, *use.args[7:9]),
    },
    refusal={"cuda": gpu_refusal},
    layouts={"k_cache": "columns", "v_cache": "columns", "start": "dense", "chosen": "dense"},
    caches=("k_cache", "v_cache"),
    score_ranges=HELD,
    timed_as="attention",
)
