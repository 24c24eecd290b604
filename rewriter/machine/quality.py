"""How far a measured profile can be believed, and what stands in the place of the rest."""

from __future__ import annotations

from dataclasses import replace

from forebay.rewriter.machine.points import AttentionPoint, Contention, GemmPoint
from forebay.rewriter.machine.profile import Machine, Tier

GOOD_R2 = 0.9  # on a quiet machine links and products fit at 0.95 and above, beside other work at 0.5 and below
BUSY = 0.15  # of the cores' time: what was timed while others took more is measured again when they do not
LOADED = 0.3  # where others take more, times of kernels are theirs as much as ours: up to 1.4 times too long below


def believable(machine: Machine) -> Machine:
    """`machine` with a cautious guess for every kind of product and of attention whose fit has an R² below GOOD_R2, and
    for all that a CPU was timed at where others took more than LOADED of it: `Machine.default()`'s. A link that fits
    so poorly is as slow as it was ever seen already (`steady_link`). `guessed` says which, and why."""
    reasons = [f"link {link.src} to {link.dst} by {link.method} (R2 {link.r2:.3f}): as slow as it was seen"
               for link in machine.links if link.r2 < GOOD_R2]
    loaded = machine.device_kind == "cpu" and machine.others_share > LOADED
    if loaded:
        reasons.append(f"all that the cores were timed at (others took {machine.others_share:.0%} of them)")
        machine = _unhurried(machine)
    gemm, attention = _good_products(machine, reasons), _good_attention(machine, reasons)
    return replace(machine, gemm=gemm, attention=attention, guessed=tuple(reasons))


def _good_products(machine: Machine, reasons: list[str]) -> tuple[GemmPoint, ...]:
    """The points of dtypes whose every fit is good; of the others the guess, all of a dtype at once, for what counts is
    which implementation is the fastest."""
    good = list(machine.gemm)
    for dtype in dict.fromkeys(p.dtype for p in machine.gemm):
        poor = {(impl, m): fit.r2 for (impl, other), fits in machine.gemm_fits().items() if other == dtype
                for m, fit in fits.items() if fit.r2 < GOOD_R2}
        if poor:
            (impl, m), r2 = min(poor.items(), key=lambda found: found[1])
            reasons.append(f"products of {dtype} (R2 {r2:.3f} by {impl} at {m} rows)")
            guess = Machine.default().gemm if machine.device_kind == "cpu" else ()
            good = [p for p in good if p.dtype != dtype] + [p for p in guess if p.dtype == dtype]
    return tuple(good)


def _good_attention(machine: Machine, reasons: list[str]) -> tuple[AttentionPoint, ...]:
    poor = {dtype: fit.r2 for dtype, fit in machine.attention_fits().items() if fit.r2 < GOOD_R2}
    reasons += [f"attention of {dtype} (R2 {r2:.3f})" for dtype, r2 in poor.items()]
    return tuple(p for p in machine.attention if p.dtype not in poor)


def _unhurried(machine: Machine) -> Machine:
    """`machine` with guesses for what its CPU was timed at, none better than what was seen."""
    guess = Machine.default()
    tiers = {name: Tier(t.capacity_nbytes, min(t.bandwidth_bytes_per_s, guess.tiers[name].bandwidth_bytes_per_s))
             for name, t in machine.tiers.items()}
    return replace(
        machine, tiers=tiers, gemm=guess.gemm, attention=(), contention=Contention(), both_ways=(),
        memory_bytes_per_s=min(machine.memory_bytes_per_s, guess.memory_bytes_per_s), dispatch_s=guess.dispatch_s,
        attention_bytes_per_s=min(machine.attention_bytes_per_s, guess.attention_bytes_per_s),
        choice_elements_per_s=guess.choice_elements_per_s)
