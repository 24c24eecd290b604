"""`forebay::attention`: causal attention of new queries over the whole cache, with a length for each sequence.

Query s of sequence b stands at position p = start[b] + s and sees the cache positions t <= p, with window w > 0 also t
> p - w, and with w < 0 only those of its own chunk of -w tokens, t >= p // -w * -w. Head h reads KV head h // (H /
Hkv). With `until` [B, S] it sees the positions t < until[b, s] instead, at least its own and at most those of the
step, as tokens of one image do. With softcap c > 0 a score x becomes c tanh(x / c). K and V of the new positions are
in the cache already. With a range of scores (FlashDecoding++Next, section III; `forebay calibrate` measures them) the
GPU's partial softmaxes of one query share a maximum; the result is the same but for rounding. The C++ kernel
(`attention.cpp`) reads every visible K and V once per 32 query rows and nothing beyond; without a compiler, and for
several queries with `until`, torch's scaled dot product attention does the work. With `chosen` [B, S, n] a query sees
the positions that `forebay::choose_tokens` gave it.
"""

from __future__ import annotations

from torch import Tensor

from forebay.kernels.attention.attention import cpu
from forebay.kernels.attention.attention.onnx import attention as attention_onnx
from forebay.kernels.attention.attention.reference import check, check_heads, reference
from forebay.kernels.attention.costs import (
    attention_cost,
    chosen_of,
    cpu_shape,
    gathered_nbytes,
    gpu_refusal,
    gpu_workspace_nbytes,
)
from forebay.kernels.attention.scoring import HELD, AttentionExtras, Scoring, SoftmaxRange
from forebay.kernels.define import define_operator
from forebay.kernels.operator import Call, Use


def _attention(
    q: Tensor, k: Tensor, v: Tensor, start: Tensor, scale: float, window: int, softcap: float,
    phi: float = 0.0, low: float = 0.0, high: float = 0.0, sinks: Tensor | None = None, until: Tensor | None = None,
    chosen: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """q [B, H, S, D], caches k and v [B, Hkv, L, D], start int64 [B] -> [B, S, H, D]; window 0 and softcap 0: none;
    a negative window: chunks. phi, low and high are a `SoftmaxRange`, by which a GPU computes one query (S = 1).

    `sinks` [H] are one score more for each query of a head, with which no value goes (gpt-oss). q and caches
    may be strided. ValueError names the argument that is wrong.
    """
    batch, heads, queries, dim = q.shape
    check_heads(heads, k.shape[1])
    return q.new_empty(batch, queries, heads, dim)


def _sinks(use: Use) -> Tensor | None:
    return use.args[10] if len(use.args) > 10 else None


def _until(use: Use) -> Tensor | None:
    return use.args[11] if len(use.args) > 11 else None


def _workspace(use: Use) -> int:
    shape = *cpu_shape(use), _until(use) is not None
    return cpu.workspace_nbytes(*shape) + gathered_nbytes(use)


def _bind_cpu(use: Use) -> Call:
    q, k, v, start, scale, window, softcap = use.args[:7]
    return cpu.bind_attention(q, k, v, start, scale, window, softcap, use.out[0],
                              AttentionExtras(_sinks(use), _until(use), chosen_of(use)))


def _bind_cuda(use: Use) -> Call:
    if _until(use) is not None:
        raise NotImplementedError("attention: tokens that see those after them are computed on the CPU alone")
    if chosen_of(use) is not None:
        raise NotImplementedError("attention: queries attend among chosen tokens on the CPU alone")
    from forebay.kernels.attention.decode_attention.gpu import bind_decode_attention_contiguous
    from forebay.kernels.attention.prefill_attention.gpu import bind_prefill_attention

    (q, k, v, start), (out,) = use.args[:4], use.out
    scoring, softmax = Scoring(*use.args[4:7]), SoftmaxRange(*use.args[7:10])
    if q.shape[2] == 1:
        return bind_decode_attention_contiguous(q[:, :, 0], k, v, start, scoring, out[:, 0], softmax, sinks=_sinks(use))
    return bind_prefill_attention(q, k, v, start, scoring, out, _sinks(use))


ATTENTION = define_operator(
    _attention,
    check=lambda q, k, v, start, *how: check(q, k, v, start, *how[6:]),
    reference=reference,
    cost=attention_cost,
    bind={"cpu": _bind_cpu, "cuda": _bind_cuda},
    workspace={"cpu": _workspace, "cuda": gpu_workspace_nbytes},
    refusal={"cuda": gpu_refusal},
    layouts={"start": "dense", "sinks": "dense", "until": "dense", "chosen": "dense"},
    caches=("k", "v"),
    score_ranges=HELD,
    timed_as="attention",
    onnx=attention_onnx,
)
