"""Seconds of what steps are made of, each alone: the one place where shapes, formats and a machine become times."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from forebay.kernels.formats.table import packed_format
from forebay.rewriter.ir.program import dtype_itemsize
from forebay.rewriter.machine.profile import Machine

# Of each copy beside a GPU whose profile lacks the number: what it, its waits and its record take of the thread that
# issues launches (assumed: a step of 8 MiB copies on an H200, each with 30 us to itself, was link-bound).
ISSUED_S = 2e-5


class Estimator(Protocol):
    """The costs behind every prediction; another estimator may replace the machine's own.

    Bytes and operations are counts, m, n and k those of a product [m, k] times [n, k] transposed; tiers are "device",
    "host" and "disk". All times are in seconds.
    """

    @property
    def serial(self) -> bool:
        """Whether the thread that issues launches also computes them."""

    @property
    def near_disk(self) -> str:
        """The tier that reads from disk land in."""

    @property
    def dispatch_s(self) -> float:
        """Seconds of the issuing thread per launch."""

    @property
    def torch_dispatch_s(self) -> float:
        """Seconds of the issuing thread per launch of an operator of torch's."""

    @property
    def copy_issue_s(self) -> float:
        """Seconds of the issuing thread per copy."""

    @property
    def slice_issue_s(self) -> float:
        """Seconds of the issuing thread per further slice of files that a copy reads."""

    @property
    def row_request_s(self) -> float:
        """Seconds of each further read of a row gather."""

    def work_s(self, flops: float, nbytes: float) -> float:
        """Matrix work nobody measured: the longer of its operations and its traffic (the roofline)."""

    def product_s(self, dtype: str, m: float, n: int, k: int, *, nbytes: float, impl: str = "") -> float:
        """A product with a weight of this dtype or packed format, by `impl` if that is known, else by the fastest;
        `nbytes` is what it touches."""

    def attention_s(self, dtype: str, nbytes: float, flops: float) -> float:
        """Attention on the device over `nbytes` of K and V of a dtype or cache format ("kv4")."""

    def host_attention_s(self, nbytes: float, flops: float = 0.0) -> float:
        """The same on a host beside a GPU; inf where it does not compute."""

    def host_product_s(self, kind: str, nbytes: float, flops: float) -> float:
        """Matmuls of a host beside a GPU with `nbytes` of weights of a dtype or packed format; inf where it does not
        compute."""

    @property
    def in_place_byte_s(self) -> float:
        """Seconds per byte of host memory that kernels of the device read in place; inf where they cannot."""

    def touch_s(self, nbytes: float) -> float:
        """Pointwise work on the device that reads and writes so many bytes."""

    def pack_s(self, cache_format: str, elements: float) -> float:
        """Making so many values packed rows of a cache, where that takes longer than touching them."""

    def byte_s(self, src: str, dst: str) -> float:
        """A byte more in a copy from tier to tier; KeyError names the links there are."""

    def latency_s(self, src: str, dst: str) -> float:
        """Return the fixed time of a copy, in seconds."""

    def exchange_s(self, kind: str, ranks: int, nbytes: float) -> float:
        """An exchange of a kind (torch's name) that leaves so many bytes on each rank, once all are there."""

    def beside_ranks(self, share: float) -> float:
        """Return how many times as long a launch that takes `share` of the memory's rate takes while all ranks
        compute."""

    @property
    def reads_beside_ranks(self) -> float:
        """How many times as long reads from disk take while all ranks read."""

    @property
    def overlap_penalty(self) -> float:
        """Share (0..1) of an exchange's time by which what is computed beside it takes longer."""

    def choice_s(self, elements: int) -> float:
        """Choosing tokens from so many logits."""

    def memory_share(self, nbytes: float, time_s: float) -> float:
        """Share (0..1) of the rate at which the device is read that touching `nbytes` in `time_s` takes."""

    def slowed(self, share: float) -> float:
        """Return how many times as long such work takes while copies from disk run."""

    def slows(self, share: float) -> float:
        """Return how many times as long these take beside it."""

    @property
    def reads_core_share(self) -> float:
        """Share (0..1) of all cores' time that copies from or to disk take, where the cores compute too."""

    def both_ways(self, nbytes: int) -> tuple[float, float]:
        """Return how many times as long a write of so many bytes to disk takes beside reads, and reads beside it."""


@dataclass(frozen=True)
class MachineEstimator:
    """Times by a machine: fits of what was measured of it, and its rates for the rest."""

    machine: Machine

    @property
    def serial(self) -> bool:
        return self.machine.kind.on_host_cores

    @property
    def near_disk(self) -> str:
        return self.machine.near_disk

    @property
    def dispatch_s(self) -> float:
        return self.machine.dispatch_s

    @property
    def torch_dispatch_s(self) -> float:
        return self.machine.torch_dispatch_s or self.machine.dispatch_s

    @property
    def copy_issue_s(self) -> float:
        return self.machine.copy_issue_s or (0.0 if self.serial else ISSUED_S)

    @property
    def slice_issue_s(self) -> float:
        return self.machine.slice_issue_s if self.serial else 0.0

    @property
    def row_request_s(self) -> float:
        return self.machine.row_request_s

    def work_s(self, flops: float, nbytes: float) -> float:
        rate = self.machine.product_flops
        return max(flops / rate if rate else 0.0, nbytes / self._read_bytes_per_s)

    def product_s(self, dtype: str, m: float, n: int, k: int, *, nbytes: float, impl: str = "") -> float:
        machine = self.machine
        measured = machine.gemm_impls(dtype)
        if not measured:
            return self.work_s(2.0 * m * n * k, nbytes)
        name = impl.split("_")[0]  # of "flat_64x256_s4": settings are those that shapes were measured with
        return machine.gemm_time_s(name if name in measured else machine.best_gemm(dtype, m, n, k), dtype, m, n, k)

    def attention_s(self, dtype: str, nbytes: float, flops: float) -> float:
        if dtype in self.machine.attention_fits() and nbytes:
            return self.machine.attention_time_s(dtype, nbytes, flops)
        rate = self.machine.attention_flops
        return max(flops / rate if rate else 0.0, nbytes / self.machine.attention_bytes_per_s)

    def host_attention_s(self, nbytes: float, flops: float = 0.0) -> float:
        rate = self.machine.attention_bytes_per_s if self.serial else self.machine.host_attention_bytes_per_s
        most = self.machine.host_product_flops
        return max(nbytes / rate, flops / most if most else 0.0) if rate else math.inf

    def host_product_s(self, kind: str, nbytes: float, flops: float) -> float:
        rate, most = _rate_alike(self.machine.host_product_bytes_per_s, kind), self.machine.host_product_flops
        return max(nbytes / rate, flops / most if most else 0.0) if rate else math.inf

    @property
    def in_place_byte_s(self) -> float:
        rate = self.machine.host_read_bytes_per_s
        return 1 / rate if rate else math.inf

    def touch_s(self, nbytes: float) -> float:
        return nbytes / (2 * self.machine.memory_bytes_per_s)  # a copy moves each byte twice

    def pack_s(self, cache_format: str, elements: float) -> float:
        rate = self.machine.pack_elements_per_s.get(cache_format)
        return elements / rate if rate else 0.0

    def byte_s(self, src: str, dst: str) -> float:
        return 1 / self.machine.link(src, dst).bandwidth_bytes_per_s

    def latency_s(self, src: str, dst: str) -> float:
        return self.machine.link(src, dst).latency_s

    def exchange_s(self, kind: str, ranks: int, nbytes: float) -> float:
        return self.machine.mesh.exchange_s(kind, ranks, nbytes, self.machine.kind)

    def beside_ranks(self, share: float) -> float:
        return self.machine.mesh.slowed(share)

    @property
    def reads_beside_ranks(self) -> float:
        return self.machine.mesh.reads_slowed

    @property
    def overlap_penalty(self) -> float:
        mesh = self.machine.mesh  # a GPU's links work by themselves, unless they were seen not to
        return mesh.overlap_penalty if mesh.exchanges or self.machine.kind.on_host_cores else 0.0

    def choice_s(self, elements: int) -> float:
        rate = self.machine.choice_elements_per_s
        return elements / rate if rate else 0.0

    def memory_share(self, nbytes: float, time_s: float) -> float:
        return min(1.0, nbytes / (time_s * self._read_bytes_per_s)) if time_s > 0 else 0.0

    def slowed(self, share: float) -> float:
        return self.machine.contention.slowed(share)

    def slows(self, share: float) -> float:
        return self.machine.contention.slows(share)

    @property
    def reads_core_share(self) -> float:
        return self.machine.reads_core_share if self.serial else 0.0

    def both_ways(self, nbytes: int) -> tuple[float, float]:
        return self.machine.side_by_side(nbytes)

    @property
    def _read_bytes_per_s(self) -> float:
        return self.machine.tiers["device"].bandwidth_bytes_per_s or 2 * self.machine.memory_bytes_per_s


def _rate_alike(rates: Mapping[str, float], kind: str) -> float:
    """The rate of a dtype or packed format: where it has none that of one of as many bits, or the least of all."""
    bits = {known: packed.bits if (packed := packed_format(known)) else 8 * dtype_itemsize(known)
            for known in (kind, *rates)}
    alike = [rate for known, rate in rates.items() if bits[known] == bits[kind]]
    return rates.get(kind) or min(alike or rates.values(), default=0.0)


def side_by_side_s(compute: float, stream: float, slowed: float, slows: float) -> float:
    """Seconds until both are done, where each takes that many times as long while the other runs, and no more than one
    after the other."""
    if compute * slowed >= stream * slows:
        together = stream * slows + compute - stream * slows / slowed
    else:
        together = compute * slowed + stream - compute * slowed / slows
    return min(compute + stream, together)
