"""swiglu, sparse_values and sampling."""

from __future__ import annotations

import functools

import torch
from torch.nn import functional

from benchmarks.gpu_cases.case import LIMITS, Aim, Case, Place, Work, checked, normal, repeated
from forebay.kernels.attention.sparse_values import reference as sparse
from forebay.kernels.logits.sampling import reference as sample
from forebay.kernels.products.swiglu import reference as gated


def swiglu_work(place: Place, m: int) -> Work:
    from forebay.kernels.products.swiglu.gpu import swiglu

    k, n = place.size(4096, 72), place.size(14336, 37)
    nbytes = 2 * (2 * n * k + m * (n + k))
    x, out = normal(place, m, k), torch.empty(m, n, dtype=torch.bfloat16, device=place.device)
    weights = [(g, g.flip(0)) for g in repeated(lambda: normal(place, n, k, scale=k**-0.5), place.copies(nbytes))]
    ours = [functools.partial(swiglu, x, gate, up, "silu", out) for gate, up in weights]

    def eager(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        return functional.silu(functional.linear(x, gate)) * functional.linear(x, up)

    verify = checked(ours[0], out, lambda: gated.reference(x, *weights[0]))
    return Work(f"M={m} K={k} N={n}", ours, verify, LIMITS[torch.bfloat16], nbytes, 4 * m * n * k,
                {"cuBLAS": [functools.partial(eager, *w) for w in weights]},
                (Aim("bandwidth", 0.75), Aim("cuBLAS", 1.0)))  # fmt: skip


def sparse_values_work(place: Place) -> Work:
    from forebay.kernels.attention.sparse_values.gpu import sparse_values

    batch, heads, seen, dim = place.size(16, 2), place.size(56, 3), place.size(4096, 70), place.size(128, 40)
    keep = seen // 10
    nbytes = batch * heads * (keep * dim * 2 + seen * 4)
    weights = normal(place, batch, heads, 1, seen, dtype=torch.float32, scale=3.0).softmax(-1)
    make = functools.partial(normal, place, batch, heads, seen, dim, dtype=torch.float16)
    values = list(repeated(make, min(2, place.copies(nbytes))))
    out = torch.empty(batch, 1, heads, dim, dtype=torch.float16, device=place.device)
    ours = [functools.partial(sparse_values, weights, v, keep, out) for v in values]
    verify = checked(ours[0], out, lambda: sparse.reference(weights, values[0], keep))
    dense = [functools.partial(torch.matmul, weights.half(), v) for v in values]
    return Work(f"{batch}x{heads}x{dim}, {keep} of {seen}, topk included", ours, verify, LIMITS[torch.float16], nbytes,
                rivals={"dense matmul": dense})  # fmt: skip


def sampling_work(place: Place, rule: tuple[float, int, float] | None) -> Work:
    from forebay.kernels.logits.sampling.gpu import sampling

    batch, vocabulary = place.size(64, 2), place.size(128256, 500)
    nbytes = batch * vocabulary * 2
    uniforms = torch.linspace(0, 0.99, batch, device=place.device) if rule else None
    temperature, top_k, top_p = rule or (1.0, 0, 1.0)
    logits = list(repeated(lambda: normal(place, batch, vocabulary, scale=2.0), place.copies(nbytes)))
    out = torch.empty(batch, dtype=torch.int64, device=place.device)
    ours = [functools.partial(sampling, one, uniforms, temperature, top_k, top_p, out) for one in logits]

    def verify() -> float:
        out.fill_(-1)
        ours[0]()
        want = sample.reference(logits[0], uniforms, temperature, top_k, top_p)
        return float((out != want).float().mean())  # a cumulative sum next to a uniform number may round either way

    rivals = {} if rule else {"argmax": [functools.partial(torch.argmax, one, -1) for one in logits]}
    name = f"T={temperature} k={top_k} p={top_p}" if rule else "greedy"
    return Work(f"{batch}x{vocabulary} {name}", ours, verify, 0.05 if rule else 0.0, nbytes, rivals=rivals)


def cases(tiny: bool) -> list[Case]:
    """Llama-3-8B's feed-forward network and vocabulary, OPT-30B's values."""
    rules = (None, (0.8, 0, 1.0), (0.8, 50, 0.95))
    return [
        *(Case("swiglu", functools.partial(swiglu_work, m=m)) for m in (1, 2, 8, 16)),
        Case("sparse_values", sparse_values_work),
        *(Case("sampling", functools.partial(sampling_work, rule=rule)) for rule in rules),
    ]
