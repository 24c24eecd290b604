"""Seconds of collectives over the axes of a mesh of chips (docs/partitioning.md derives them)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from forebay.rewriter.machine.mesh_links import MeshLinks
from forebay.rewriter.machine.profile import Machine

CollectiveKind = Literal["all-gather", "reduce-scatter", "all-to-all"]
TORCHS: dict[CollectiveKind, str] = {"all-gather": "all_gather_into_tensor", "reduce-scatter": "reduce_scatter_tensor",
                                     "all-to-all": "all_to_all_single"}
INPUT, OUTPUT = "input", "output partial sums"  # of a layer's products: what most collectives exchange
INNER = "inner"  # what is between two products
# Of a TPU v4: six links a chip, two along each axis. Slices of whole cubes of 4x4x4 are joined into rings along all
# axes; smaller ones are cut from a cube and end at its faces (Jouppi et al. 2023, section 2).
TORUS_AXES, CUBE = 3, 4
# Seconds of one step of a ring. TPU v4: from one figure of Pope et al., section 4.4, that stands in no table (36.9 ms a
# token, PaLM 540B, bfloat16, 64 sequences): `benchmarks.papers.pope.fitted_step_s`.
TPU_STEP_S = 4.01e-6


@dataclass(frozen=True)
class RingProtocol:
    """One way to make a collective: seconds before its first step, seconds of each step beside its bytes, and the share
    of the links' rate that it reaches."""

    begin_s: float
    step_s: float
    rate_share: float


# NCCL's ring protocols (LL, LL128, Simple), by its own tuning model (src/graph/tuning.cc: baseLat, hwLat of a ring over
# NVLink and over PCIe, and their share of the bandwidth); a collective takes the one that is fastest for its size.
NVLINK = (RingProtocol(3.6e-6, 0.47e-6, 1 / 3), RingProtocol(10.0e-6, 1.9e-6, 0.92), RingProtocol(8.4e-6, 3.4e-6, 1.0))
PCIE = (RingProtocol(3.6e-6, 1.0e-6, 1 / 3), RingProtocol(10.0e-6, 2.5e-6, 0.92), RingProtocol(8.4e-6, 5.7e-6, 1.0))
NVLINK_BYTES_PER_S = 64e9  # one direction of 16 lanes of PCIe 5.0: what is faster is no PCIe


class MeshError(ValueError):
    """A mesh that cannot be; the message says which of its numbers is at fault and what would do."""


@dataclass(frozen=True)
class ChipMesh:
    """Chips in a grid of `shape`, with a link along each axis.

    Attributes:
        bytes_per_s: Rate of a chip along each axis, both directions of a ring together.
        protocols: The ways to make a collective.
        torus: Whether bytes to chips further along a ring pass those between; else a switch joins the chips of an axis.
        overlap_penalty: Share of a collective's time by which a matmul that runs at the same time takes longer (0: the
            collective is hidden; 1: the chip's cores make it).
        measured: Collectives as ranks were seen to make them, in place of the formulas.

    Raises:
        MeshError: A size is below 1, or a rate is not above 0.
    """

    shape: tuple[int, ...]
    bytes_per_s: tuple[float, ...]
    protocols: tuple[RingProtocol, ...]
    torus: bool = True
    overlap_penalty: float = 0.0
    measured: MeshLinks | None = None

    def __post_init__(self) -> None:
        if not self.shape or any(size < 1 for size in self.shape):
            raise MeshError(f"mesh {self.name}: each axis needs at least 1 chip, e.g. 4x4x4")
        if len(self.bytes_per_s) != len(self.shape):
            raise MeshError(f"links: {len(self.bytes_per_s)} rates for {len(self.shape)} axes; give one for each axis")
        for rate in self.bytes_per_s:
            if not (math.isfinite(rate) and rate > 0):
                raise MeshError(f"links: {rate:g} bytes per second; a rate is finite and above 0")
        for each in self.protocols:
            if not (math.isfinite(each.step_s) and each.step_s >= 0):
                raise MeshError(f"step_s: {each.step_s:g}; seconds of a step are finite and not below 0")

    @property
    def chips(self) -> int:
        return math.prod(self.shape)

    @property
    def name(self) -> str:
        return "x".join(map(str, self.shape))

    @property
    def axes(self) -> tuple[int, ...]:
        """The axes along which there is more than one chip."""
        return tuple(i for i, size in enumerate(self.shape) if size > 1)

    def size(self, axes: tuple[int, ...]) -> int:
        """Chips along these axes together."""
        return math.prod(self.shape[i] for i in axes)


@dataclass(frozen=True)
class Collective:
    """One exchange along `axes`. `nbytes` is of one chip's larger end: what an all-gather leaves, what a reduce-scatter
    or an all-to-all begins with. `what` is exchanged."""

    kind: CollectiveKind
    axes: tuple[int, ...]
    nbytes: float
    what: str


def mesh_of(machine: Machine, shape: tuple[int, ...], links: tuple[float, ...] = (),
            step_s: float | None = None) -> ChipMesh:
    """Chips of `machine` in a grid; `links` are bytes per second by axis, by default the machine's interconnect.

    An axis of a TPU's torus has a third of that, and half as much where its ends are not joined: all that a chip at the
    end receives passes one link. Collectives among ranks that were measured on the machine take what they took then,
    unless `links` are given. `step_s` replaces the known times of steps. MeshError where the machine has no
    figure and none is given.
    """
    measured = machine.mesh if machine.mesh.exchanges else None
    if measured is not None and not links:
        links = (_rate(measured),) * len(shape)
        return ChipMesh(shape, links, one_way(0.0), False, measured.overlap_penalty, measured)
    torus = machine.kind.torus
    if torus and len([size for size in shape if size > 1]) > TORUS_AXES:
        raise MeshError(f"mesh {'x'.join(map(str, shape))}: {machine.name} has links along {TORUS_AXES} axes")
    if not links and math.prod(shape) > 1:
        if not machine.interconnect_bytes_per_s:
            raise MeshError(f"machine {machine.name}: interconnect_bytes_per_s is 0; give --links a rate by axis")
        if not torus and len([size for size in shape if size > 1]) > 1:
            raise MeshError(f"machine {machine.name}: its interconnect joins one axis; give --links a rate by axis")
    joined = len(shape) == TORUS_AXES and all(size % CUBE == 0 for size in shape)
    share = machine.interconnect_bytes_per_s / ((TORUS_AXES if joined else 2 * TORUS_AXES) if torus else 1)
    rates = links or tuple(share or 1.0 for _ in shape)
    if step_s is not None or torus:
        return ChipMesh(shape, rates, one_way(TPU_STEP_S if step_s is None else step_s), torus)
    overlap_penalty = machine.mesh.overlap_penalty if measured is not None or machine.kind.on_host_cores else 0.0
    return ChipMesh(shape, rates, NVLINK if min(rates) > NVLINK_BYTES_PER_S else PCIE, torus, overlap_penalty)


def one_way(step_s: float) -> tuple[RingProtocol, ...]:
    """Collectives whose every step takes so many seconds beside its bytes, and nothing else."""
    return (RingProtocol(0.0, step_s, 1.0),)


def collective_s(item: Collective, mesh: ChipMesh) -> float:
    """Seconds of a collective alone on the mesh.

    Along an axis of K chips an all-gather or reduce-scatter takes D (K - 1) / K over its links and K - 1 steps, where D
    is the larger end (Chan et al. 2007; Pope et al., A.1), by the fastest of the mesh's protocols; over several axes
    one after the other, each of which leaves K times as much as it found. Of an all-to-all all of D goes along each
    axis; on a torus a byte passes K / 4 chips on average and K / 2 at most, and through a switch it goes at once.
    """
    if mesh.measured is not None:
        return _measured_s(item, mesh, mesh.measured)
    seconds, at = 0.0, item.nbytes
    for i in sorted((i for i in item.axes if mesh.shape[i] > 1), key=lambda i: -mesh.bytes_per_s[i]):
        size = mesh.shape[i]
        if item.kind == "all-to-all":
            passed, steps = at * (size / 4 if mesh.torus else (size - 1) / size), size // 2 if mesh.torus else 1
        else:
            passed, steps = at * (size - 1) / size, size - 1
            at /= size
        seconds += min(each.begin_s + steps * each.step_s + passed / (each.rate_share * mesh.bytes_per_s[i])
                       for each in mesh.protocols)
    return seconds


def _measured_s(item: Collective, mesh: ChipMesh, links: MeshLinks) -> float:
    """Return the measured time of a collective over all its axes at once, as ranks run it: partial sums of a layer and
    the next one's input in one all-reduce, of which each has half."""
    ranks = mesh.size(item.axes)
    if ranks == 1:
        return 0.0
    if item.what in (INPUT, OUTPUT):
        return links.exchange_s("all_reduce", ranks, item.nbytes) / 2
    behind = item.nbytes / ranks if item.kind == "reduce-scatter" else item.nbytes
    return links.exchange_s(TORCHS[item.kind], ranks, behind)


def _rate(links: MeshLinks) -> float:
    """Bytes per second of the fastest kind of exchange."""
    return max(link.bandwidth_bytes_per_s for link in links.exchanges)
