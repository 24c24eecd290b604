"""`forebay::sampling`: next tokens from logits, greedily or by a given uniform number per row.

Greedy: the first largest logit, a NaN counting as the largest, as of torch.argmax. Else, in this order: only logits
that are at least the top_k-th largest stay (0: all); of these, those stay for which the probability of all that are no
larger, at this temperature, exceeds 1 - top_p (equal logits stay or go together); the token is the first of them, in
the vocabulary's order, whose cumulative probability exceeds the uniform number. A row over which softmax is NaN (one
with NaN or inf, or with -inf alone) is answered greedily.
"""

from __future__ import annotations

import torch
from torch import Tensor

from forebay.kernels.logits.sampling.reference import check, reference, sampled
from forebay.kernels.operator import Operator, each_once


@torch.library.custom_op("forebay::sampling", mutates_args=(), device_types="cpu")
def sampling(logits: Tensor, uniforms: Tensor | None, temperature: float, top_k: int, top_p: float) -> Tensor:
    """logits [B, V], uniforms fp32 [B] in [0, 1) or None for greedy -> tokens int64 [B]; the module says how.

    The uniform numbers are the only source of chance. ValueError names the argument that is wrong.
    """
    check(logits, uniforms, temperature, top_k, top_p)
    return sampled(logits, uniforms, temperature, top_k, top_p, torch.float32)


@sampling.register_kernel("cuda")
def _(logits: Tensor, uniforms: Tensor | None, temperature: float, top_k: int, top_p: float) -> Tensor:
    from forebay.kernels.logits.sampling.gpu import sampling as launch

    check(logits, uniforms, temperature, top_k, top_p)
    out = logits.new_empty(logits.shape[0], dtype=torch.int64)
    launch(logits, uniforms, temperature, top_k, top_p, out)
    return out


@sampling.register_fake
def _(logits: Tensor, uniforms: Tensor | None, temperature: float, top_k: int, top_p: float) -> Tensor:
    return logits.new_empty(logits.shape[0], dtype=torch.int64)


SAMPLING = Operator(torch.ops.forebay.sampling.default, reference, each_once)
