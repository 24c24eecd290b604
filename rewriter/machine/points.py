"""Single measurements of a machine: products, attention, and what computing and reading do to each other."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class GemmPoint:
    """[m, k] times [n, k] transposed took time_s with `impl`; dtype is torch's name without the prefix ("bfloat16"), or
    the format of packed rows ("w4g64"). On a GPU impl is the first part of the kernel's name ("flat_64x256_s4")."""

    impl: str
    dtype: str
    m: int
    n: int
    k: int
    time_s: float


@dataclass(frozen=True)
class AttentionPoint:
    """Attention that saw `nbytes` of K and V and did `flops` operations took time_s; dtype is torch's name without the
    prefix, or the format of a cache of packed rows ("kv4")."""

    dtype: str
    nbytes: int
    flops: int
    time_s: float


def intensity(flops: float, nbytes: float) -> float:
    """Operations per byte, as fits group attention by it: to two digits."""
    return float(f"{flops / nbytes:.2g}")


@dataclass(frozen=True)
class Contention:
    """How many times as long computing and reading from disk take side by side as each alone: for products that read
    memory as fast as it goes, and for products that only calculate. What lies between is interpolated."""

    memory_slowed: float = 1.0
    flops_slowed: float = 1.0
    link_beside_memory: float = 1.0
    link_beside_flops: float = 1.0

    def slowed(self, share: float) -> float:
        """Slowdown of a launch that takes `share` (0..1) of the memory's rate."""
        return self.flops_slowed + min(1.0, share) * (self.memory_slowed - self.flops_slowed)

    def slows(self, share: float) -> float:
        """Slowdown of reads from disk beside it."""
        return self.link_beside_flops + min(1.0, share) * (self.link_beside_memory - self.link_beside_flops)
