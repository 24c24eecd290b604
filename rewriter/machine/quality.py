"""How far a measured profile can be believed, and what stands in the place of the rest."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from forebay.kernels.operator import ROUNDED, Product
from forebay.kernels.operators import product_with
from forebay.rewriter.machine.points import AttentionPoint, GemmPoint
from forebay.rewriter.machine.profile import BUSY as BUSY
from forebay.rewriter.machine.profile import Machine

GOOD_R2 = 0.9  # on a quiet machine links and products fit at 0.95 and above, beside other work at 0.5 and below
MANY = 64  # rows of a product, or queries of attention, from which on operations bind
LOADED = 0.3  # of the cores' time: where others take more, nothing that lasts long is timed undisturbed


def believable(machine: Machine) -> Machine:
    """`machine` without what fits with an R² below GOOD_R2.

    Products of so many rows by an implementation then go by those of more and of fewer rows. Where few good fits are
    left for a kind of product, or one of a dtype's attention is poor, a roofline through its fastest points stands. A
    link that fits so poorly is as it was mostly seen already (`steady_link`). `guessed` says which, and why. Of a CPU
    also the rates for what has no points: as slow as the slowest kind of product over many rows, and of attention over
    a prompt."""
    reasons = [f"link {link.src} to {link.dst} by {link.method} (R2 {link.r2:.3f}): as it was mostly seen"
               for link in machine.links if link.r2 < GOOD_R2]
    gemm, attention = _good_products(machine, reasons), _good_attention(machine, reasons)
    machine = replace(machine, gemm=gemm, attention=attention, guessed=tuple(reasons))
    return _with_rates(machine) if machine.kind.on_host_cores else machine


def _good_products(machine: Machine, reasons: list[str]) -> tuple[GemmPoint, ...]:
    """The points of good fits. Where an implementation is left with half of its fits or fewer, a roofline for its dtype
    stands, because what counts is which implementation is the fastest. Poor fits of one that others beat at every size
    are left out and not told, because no plan takes it for so many rows."""
    good = list(machine.gemm)
    rounding = {dtype: _rounding(dtype) for dtype in dict.fromkeys(p.dtype for p in good)}
    best: dict[tuple[object, ...], float] = {}
    kinds = [(p.dtype, p.impl in rounding[p.dtype], p.m, p.n, p.k) for p in good]
    for p, kind in zip(good, kinds, strict=True):
        best[kind] = min(best.get(kind, math.inf), p.time_s)
    rivals = {(p.dtype, p.impl, p.m) for p, kind in zip(good, kinds, strict=True) if p.time_s <= best[kind]}
    for dtype in dict.fromkeys(p.dtype for p in machine.gemm):
        fits = {impl: by_m for (impl, other), by_m in machine.gemm_fits().items() if other == dtype}
        poor = {(impl, m): fit.r2 for impl, by_m in fits.items() for m, fit in by_m.items() if fit.r2 < GOOD_R2}
        for impl, m in [each for each in poor if (dtype, *each) not in rivals]:
            good = [p for p in good if (p.dtype, p.impl, p.m) != (dtype, impl, m)]
            del poor[impl, m]
        if not poor:
            continue
        few = any(2 * sum(impl == each for each, _ in poor) >= len(by_m) for impl, by_m in fits.items())
        (impl, m), r2 = min(poor.items(), key=lambda found: found[1])
        reason = f"products of {dtype} (R2 {r2:.3f} by {impl} at {m} rows)"
        if few:
            good = [p for p in good if p.dtype != dtype]
            if machine.kind.on_host_cores:
                good += _roofline([p for p in machine.gemm if p.dtype == dtype])
        else:
            good = [p for p in good if p.dtype != dtype or (p.impl, p.m) not in poor]
            more = f" and {len(poor) - 1} more fits" if len(poor) > 1 else ""
            reason += f"{more}: as between others of more and of fewer rows"
        reasons.append(reason)
    return tuple(good)


def _rounding(dtype: str) -> set[str]:
    """The implementations that round activations, which are no choice for a plan that keeps them as they are."""
    implementations = product_with(dtype).implementations
    assert implementations is not None
    shapes = [Product(dtype, m, 2048, 2048) for m in (1, MANY)]
    return {impl for shape in shapes for wish in ROUNDED for impl in implementations.rounding(shape, wish)}


def _roofline(points: Sequence[GemmPoint]) -> list[GemmPoint]:
    """The points of each implementation on its roofline: the time of a product is that of its weights at the best rate
    of any point, or that of its operations at the best rate of any, whichever is longer."""
    found: list[GemmPoint] = []
    for impl in dict.fromkeys(p.impl for p in points):
        own = [p for p in points if p.impl == impl]
        weights_s = min(p.time_s / (p.n * p.k) for p in own)
        flops_s = min(p.time_s / (p.m * p.n * p.k) for p in own)
        found += [replace(p, time_s=max(weights_s, p.m * flops_s) * p.n * p.k) for p in own]
    return found


def _good_attention(machine: Machine, reasons: list[str]) -> tuple[AttentionPoint, ...]:
    """The points of dtypes whose fits are all good; for others the roofline through their fastest points stands, as
    slow points in a place of their own always fit a line."""
    good = list(machine.attention)
    for dtype, fits in machine.attention_fits().items():
        per_byte, fit = min(fits.items(), key=lambda found: found[1].r2)
        if fit.r2 < GOOD_R2:
            own = [p for p in good if p.dtype == dtype]
            byte_s, flop_s = min(p.time_s / p.nbytes for p in own), min(p.time_s / p.flops for p in own)
            roofline = [replace(p, time_s=max(p.nbytes * byte_s, p.flops * flop_s)) for p in own]
            good = [p for p in good if p.dtype != dtype] + roofline
            reasons.append(f"attention of {dtype} (R2 {fit.r2:.3f} at {per_byte:g} operations per byte)")
    return tuple(good)


def _with_rates(machine: Machine) -> Machine:
    many: dict[str, float] = {}
    for p in machine.gemm:
        if p.m >= MANY:
            many[p.dtype] = max(many.get(p.dtype, 0.0), 2 * p.m * p.n * p.k / p.time_s)
    prompts = [p.flops / p.time_s for p in machine.attention if p.flops >= MANY * p.nbytes / 4]
    return replace(machine, product_flops=min(many.values(), default=machine.product_flops),
                   attention_flops=min(prompts, default=machine.attention_flops))

