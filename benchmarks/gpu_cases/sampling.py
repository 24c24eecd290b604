"""Sampling."""

from __future__ import annotations

import functools

import torch

from benchmarks.gpu_cases.case import Case, Place, Work, normal, repeated
from forebay.kernels.logits.sampling import reference as sample


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
    """Llama-3-8B's vocabulary."""
    rules = (None, (0.8, 0, 1.0), (0.8, 50, 0.95))
    return [Case("sampling", functools.partial(sampling_work, rule=rule)) for rule in rules]
