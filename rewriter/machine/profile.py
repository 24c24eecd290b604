"""A machine's profile, measured or from data sheets: tiers, links and kernels; JSON both ways, validated on load."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from forebay.kernels.formats.table import TIMED_WEIGHTS, packed_format, weight_format
from forebay.rewriter.ir.files import read_input_text, write_text
from forebay.rewriter.ir.from_json import from_json
from forebay.rewriter.machine.both_ways import BothWays, side_by_side
from forebay.rewriter.machine.fits import Fit, fit_times, on_curve
from forebay.rewriter.machine.links import Link as Link
from forebay.rewriter.machine.links import Tier as Tier
from forebay.rewriter.machine.mesh_links import MeshLinks
from forebay.rewriter.machine.points import AttentionPoint, Contention, GemmPoint, intensity
from forebay.runtime.devices.kind import DeviceKind
from forebay.runtime.devices.kinds import HOST, kind_of

FORMAT = 4  # of the JSON file; a kept profile of another format is measured anew
TIERS = ("device", "host", "disk")
HALVES = ("bfloat16", "float16")
ALIKE = 0.9  # of the rate at which a GPU reads its memory: rates that measurements do not tell apart
BUSY = 0.15  # of the cores' time: what was timed while others took more is measured again when they do not
# Of the computing thread, to issue a copy and be woken by it: on two cores steps in tiles of 1 MiB took 0.15 to 0.3 ms
# more per additional copy than in tiles of 2 to 4 MiB. To a GPU copies are issued by threads of their own.
CPU_COPY_ISSUE_S = 1e-4
ROW_REQUEST_S = 4e-5  # on two cores, with two to four requests in flight


@dataclass(frozen=True)
class Machine:
    """A machine: measured rates, and attained (not peak) rates where nothing was measured.

    memory_bytes_per_s: plain copy in the memory of `device`, bytes copied per second.
    dispatch_s: seconds of the issuing thread for a launch; a GPU computes meanwhile.
    torch_dispatch_s: the same of an operator of torch's on a processor (0: as others).
    copy_issue_s: seconds of the computing thread for a copy.
    slice_issue_s: the same for each further slice of files that a copy reads, as of experts (0: not measured).
    row_request_s: seconds of each further read of a row gather.
    attention_bytes_per_s: bytes of K and V per second in decode attention of one long sequence.
    host_attention_bytes_per_s: the same on the host of a GPU (0: it does not compute).
    host_product_bytes_per_s: the same of its matmuls with a token's experts, by dtype or packed format (none: as 0).
    host_product_flops: operations per second of its matmuls of many rows (0: bytes bind).
    host_read_bytes_per_s: bytes of pinned host memory per second that kernels of a GPU read where they lie (0: host
        memory is copied before they read it).
    one_memory: whether a GPU computes in the host's RAM, so that its memory and the host's are the same bytes.
    product_flops: operations per second of large matmuls, for dtypes without points (0: bytes bind).
    attention_flops: the same of attention over whole prompts.
    reads_core_share: share of all cores' time that a second of disk reads takes (0..1). A processor copies, and a
        virtual machine or a container pays for its disk from its own time.
    both_ways: slowdown of reads and writes at once, by size of writes (none: they share the disk evenly).
    pack_elements_per_s: by cache format, values packed per second (none: as fast as bytes go).
    choice_elements_per_s: logits read per second when tokens are chosen (0: at no cost).
    folder: folder of the measured disk tier; empty for a profile of no disk in particular.
    others_share: share of the cores' time that other processes took meanwhile (0..1).
    guessed: poor measurements with their reasons. A cautious guess replaces each until a later measurement.
    peak_flops, peak_memory_bytes_per_s, interconnect_bytes_per_s: the vendor's figures (0: not known).
    sources: origin of a number, by its path (`numbers`). Others were measured on `date`.
    """

    name: str
    date: str
    versions: Mapping[str, str]
    cores: int
    threads: int
    device_kind: str
    tiers: Mapping[str, Tier]
    links: tuple[Link, ...]
    gemm: tuple[GemmPoint, ...]
    memory_bytes_per_s: float
    dispatch_s: float
    attention_bytes_per_s: float
    folder: str = ""
    attention: tuple[AttentionPoint, ...] = ()
    contention: Contention = field(default_factory=Contention)
    reads_core_share: float = 0.0
    both_ways: tuple[BothWays, ...] = ()
    pack_elements_per_s: Mapping[str, float] = field(default_factory=dict)
    choice_elements_per_s: float = 0.0
    torch_dispatch_s: float = 0.0
    copy_issue_s: float = CPU_COPY_ISSUE_S
    slice_issue_s: float = 0.0
    row_request_s: float = ROW_REQUEST_S
    host_attention_bytes_per_s: float = 0.0
    host_product_bytes_per_s: Mapping[str, float] = field(default_factory=dict)
    host_product_flops: float = 0.0
    host_read_bytes_per_s: float = 0.0
    one_memory: bool = False
    product_flops: float = 0.0
    attention_flops: float = 0.0
    peak_flops: float = 0.0
    peak_memory_bytes_per_s: float = 0.0
    interconnect_bytes_per_s: float = 0.0
    others_share: float = 0.0
    guessed: tuple[str, ...] = ()
    sources: Mapping[str, str] = field(default_factory=dict)
    mesh: MeshLinks = field(default_factory=MeshLinks)
    format: int = field(default=FORMAT)

    def validate(self) -> None:
        """Raise ValueError naming the first field that cannot be true."""
        _require(self.format == FORMAT, "format", f"must be {FORMAT} (measure the machine again)", self.format)
        _require(bool(self.name), "name", "must not be empty", self.name)
        for name in ("cores", "threads", "memory_bytes_per_s", "attention_bytes_per_s"):
            _positive(name, getattr(self, name))
        for each in dataclasses.fields(self):
            if each.type == "float":
                _not_negative(each.name, getattr(self, each.name))
        for tier in ("device", "disk"):
            _require(tier in self.tiers, f"tiers.{tier}", "is missing", sorted(self.tiers))
        for tier, known in self.tiers.items():
            _require(tier in TIERS, f"tiers.{tier}", f"is no tier; tiers are {', '.join(TIERS)}", tier)
            _not_negative(f"tiers.{tier}.capacity_nbytes", known.capacity_nbytes)
            _not_negative(f"tiers.{tier}.bandwidth_bytes_per_s", known.bandwidth_bytes_per_s)
        for i, link in enumerate(self.links):
            for end in ("src", "dst"):
                _require(getattr(link, end) in TIERS, f"links[{i}].{end}", "must be a tier", getattr(link, end))
            _require(link.src != link.dst, f"links[{i}].dst", "must differ from src", link.dst)
            _positive(f"links[{i}].bandwidth_bytes_per_s", link.bandwidth_bytes_per_s)
            _not_negative(f"links[{i}].latency_s", link.latency_s)
            _not_negative(f"links[{i}].depth", link.depth)
            _not_negative(f"links[{i}].chunk_nbytes", link.chunk_nbytes)
            _require(math.isfinite(link.r2) and link.r2 <= 1, f"links[{i}].r2", "must be at most 1", link.r2)
        for kind, names in (("gemm", ("m", "n", "k", "time_s")), ("attention", ("nbytes", "flops", "time_s"))):
            for i, point in enumerate(getattr(self, kind)):
                for name in names:
                    _positive(f"{kind}[{i}].{name}", getattr(point, name))
        for name in ("pack_elements_per_s", "host_product_bytes_per_s"):
            for kind, rate in getattr(self, name).items():
                _positive(f"{name}.{kind}", rate)
        for name, factor in vars(self.contention).items():
            _require(math.isfinite(factor) and factor >= 1, f"contention.{name}", "must be at least 1", factor)
        _require(0 <= self.reads_core_share <= 1, "reads_core_share", "must lie between 0 and 1", self.reads_core_share)
        for i, both in enumerate(self.both_ways):
            _positive(f"both_ways[{i}].nbytes", both.nbytes)
            for name, factor in (("write_slowed", both.write_slowed), ("read_slowed", both.read_slowed)):
                _require(math.isfinite(factor) and factor >= 1, f"both_ways[{i}].{name}", "must be at least 1", factor)
            _require(not i or both.nbytes > self.both_ways[i - 1].nbytes, f"both_ways[{i}].nbytes",
                     "must rise", both.nbytes)
        self.mesh.validate()
        read = self.tiers["device"].bandwidth_bytes_per_s
        for name, rate, peak in (("product_flops", self.product_flops, self.peak_flops),
                                 ("attention_flops", self.attention_flops, self.peak_flops),
                                 ("tiers.device.bandwidth_bytes_per_s", read, self.peak_memory_bytes_per_s),
                                 ("attention_bytes_per_s", self.attention_bytes_per_s, self.peak_memory_bytes_per_s)):
            _require(not peak or rate <= peak, name, f"exceeds the peak of {peak:.4g}", rate)
        if not self.gemm and self.product_flops:  # a data sheet: none of it was measured
            for name, number in self.numbers().items():
                _require(not number or bool(self.sources.get(name)), f"sources.{name}",
                         "is missing; say where it is from", self.sources.get(name))

    def numbers(self) -> dict[str, float]:
        """Every number by its path, but for points of measurement and how links were measured."""
        found: dict[str, float] = {}
        for tier, held in self.tiers.items():
            found |= {f"tiers.{tier}.capacity_nbytes": held.capacity_nbytes,
                      f"tiers.{tier}.bandwidth_bytes_per_s": held.bandwidth_bytes_per_s}
        for link in self.links:
            at = f"links.{link.src}.{link.dst}"
            found |= {f"{at}.bandwidth_bytes_per_s": link.bandwidth_bytes_per_s, f"{at}.latency_s": link.latency_s}
        found |= {f"host_product_bytes_per_s.{kind}": rate for kind, rate in self.host_product_bytes_per_s.items()}
        return found | {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.type == "float"}

    def source(self, number: str) -> str:
        """Return the source of a number, by its path."""
        return self.sources.get(number, f"measured by forebay machine on {self.date or 'an unknown day'}")

    @property
    def uncalibrated(self) -> str:
        """Why times that it predicts were not checked; "" where its rates were measured."""
        if not self.gemm:
            return "times rest on data sheets and assumed shares of them"
        if self.guessed:
            count = "1 rate is a guess" if len(self.guessed) == 1 else f"{len(self.guessed)} rates are guesses"
            return f"{count}; run `forebay machine --measure` on a quiet machine to measure them"
        if self.others_share > BUSY:
            return (f"others used {self.others_share:.0%} of the cores while this machine was measured; "
                    "run `forebay machine --measure` on a quiet machine to measure it again")
        return ""

    @property
    def kind(self) -> DeviceKind:
        """The facts of its kind of device."""
        return kind_of(self.device_kind)

    @property
    def near_disk(self) -> str:
        """The tier that reads from disk land in. A GPU cannot read the disk. Where it computes in the host's memory,
        and reads pinned memory as fast as its own, that is the memory that it needs."""
        own = self.tiers["device"].bandwidth_bytes_per_s
        return "device" if self.one_memory and self.host_read_bytes_per_s >= ALIKE * own else self.kind.near_disk

    @property
    def host_hop(self) -> bool:
        """Whether copies from and to the disk hop through host memory."""
        return self.near_disk == "host"

    def link(self, src: str, dst: str, method: str | None = None) -> Link:
        """The fastest link from `src` to `dst` (by `method` if given); raises KeyError naming the links there are."""
        found = [x for x in self.links if (x.src, x.dst) == (src, dst) and method in (None, x.method)]
        if not found:
            known = ", ".join(f"{x.src}->{x.dst} ({x.method})" for x in self.links) or "none"
            by = f" by {method}" if method else ""
            raise KeyError(f"machine {self.name!r} has no link {src}->{dst}{by}; it has: {known}")
        return max(found, key=lambda x: x.bandwidth_bytes_per_s)

    def side_by_side(self, nbytes: int) -> tuple[float, float]:
        """Slowdown of a write of `nbytes` during reads, and of reads during it."""
        return side_by_side(self.both_ways, nbytes)

    def measured_as(self, dtype: str) -> str:
        """The dtype or packed format whose measurements serve for `dtype`.

        Without measurements of its own it is the format of as many bits in groups nearest in size. On a GPU it is the
        other 16-bit type, which has the same kernels and rates.
        """
        if dtype in self._gemm_dtypes:
            return dtype
        if (stored := packed_format(dtype)) is not None:
            packed = ((other, packed_format(other)) for other in self._gemm_dtypes)
            alike = {other: abs(math.log(rows.group_size / stored.group_size)) for other, rows in packed
                     if rows is not None and rows.bits == stored.bits}
            return min(alike, key=lambda other: alike[other], default=dtype)
        if dtype in HALVES and self.kind.halves_alike:
            return next((other for other in HALVES if other in self._gemm_dtypes), dtype)
        return dtype

    @functools.cached_property
    def _gemm_dtypes(self) -> dict[str, list[str]]:
        """Dtypes in the order measured, each with its implementations by name."""
        found: dict[str, set[str]] = {}
        for p in self.gemm:
            found.setdefault(p.dtype, set()).add(p.impl)
        return {dtype: sorted(impls) for dtype, impls in found.items()}

    def gemm_impls(self, dtype: str) -> list[str]:
        """The implementations measured for `dtype`, by name."""
        return self._gemm_dtypes.get(self.measured_as(dtype), [])

    def gemm_time_s(self, impl: str, dtype: str, m: float, n: int, k: int) -> float:
        """Seconds of one matmul of [m, k] with [n, k] transposed.

        For each measured m a fit over n and n * k; between measured m the times are interpolated on a log-log scale.
        Above the largest m time grows in proportion to m, below the smallest it stays. No matmul reads its weight
        faster than any that was measured did. Raises KeyError when `impl` was not measured for `dtype`.
        """
        measured = self.measured_as(dtype)
        fits = self.gemm_fits().get((impl, measured))
        if fits is None:
            known = ", ".join(sorted({f"{p.impl}/{p.dtype}" for p in self.gemm})) or "none"
            raise KeyError(f"machine {self.name!r} has no GEMM measured for {impl}/{dtype}; it has: {known}")
        return max(on_curve([(m0, fit.time_s(n, n * k)) for m0, fit in fits.items()], m),
                   n * k * self._weight_s[measured])

    def gemm_fits(self) -> Mapping[tuple[str, str], Mapping[int, Fit]]:
        """By (impl, dtype), for every measured m in rising order: time over n (rows cost something, however short) and
        n * k."""
        return self._gemm_fits

    @functools.cached_property
    def _gemm_fits(self) -> dict[tuple[str, str], dict[int, Fit]]:
        points: dict[tuple[str, str, int], list[tuple[tuple[float, ...], float]]] = {}
        for p in self.gemm:
            points.setdefault((p.impl, p.dtype, p.m), []).append(((p.n, p.n * p.k), p.time_s))
        found: dict[tuple[str, str], dict[int, Fit]] = {}
        for impl, dtype, m in sorted(points):
            found.setdefault((impl, dtype), {})[m] = fit_times(points[impl, dtype, m])
        return found

    @functools.cached_property
    def _weight_s(self) -> dict[str, float]:
        """By dtype, the least seconds per number of a weight of any measured matmul."""
        found: dict[str, float] = {}
        for p in self.gemm:
            found[p.dtype] = min(found.get(p.dtype, math.inf), p.time_s / (p.n * p.k))
        return found

    def attention_time_s(self, dtype: str, nbytes: float, flops: float) -> float:
        """Seconds of attention over so many bytes of K and V of a dtype or cache format.

        Between measured numbers of operations per byte, times are interpolated on a log-log scale. Above the highest
        they grow in proportion, below the lowest they stay. Raises KeyError for what has no points.
        """
        fits = self.attention_fits()[dtype]
        return on_curve([(per_byte, fit.time_s(nbytes)) for per_byte, fit in fits.items()], flops / nbytes)

    def attention_fits(self) -> Mapping[str, Mapping[float, Fit]]:
        """By dtype or cache format, for every measured number of operations per byte in rising order: time over bytes
        of K and V."""
        return self._attention_fits

    @functools.cached_property
    def _attention_fits(self) -> dict[str, dict[float, Fit]]:
        points: dict[tuple[str, float], list[tuple[tuple[float, ...], float]]] = {}
        for p in self.attention:
            points.setdefault((p.dtype, intensity(p.flops, p.nbytes)), []).append(((p.nbytes,), p.time_s))
        found: dict[str, dict[float, Fit]] = {}
        for dtype, per_byte in sorted(points):
            found.setdefault(dtype, {})[per_byte] = fit_times(points[dtype, per_byte])
        return found

    def best_gemm(self, dtype: str, m: float, n: int, k: int, among: Collection[str] | None = None) -> str:
        """The implementation with the smallest predicted time, of those `among` if given; raises KeyError when none was
        measured for `dtype`."""
        impls = [impl for impl in self.gemm_impls(dtype) if among is None or impl in among]
        if not impls:
            raise KeyError(f"machine {self.name!r} has no GEMM measured for {dtype}")
        return min(impls, key=lambda impl: self.gemm_time_s(impl, dtype, m, n, k))

    @staticmethod
    def default() -> Machine:
        """A guess at a small machine (2 cores, 8 GiB, an SSD), on the slow side, so that planning works unmeasured.

        GEMM times are a roofline: the larger of weight bytes at 8 GB/s (packed ones at 4) and 30 (float32) or 8
        (others) GFLOP/s.
        """
        memory, sizes = 8e9, {"float32": ("aten", 4.0, 8e9, 30e9), "bfloat16": ("aten", 2.0, 8e9, 8e9)}
        for name in TIMED_WEIGHTS:
            sizes[name] = ("flat", weight_format(name).ratio(2048, 1), memory / 2, 8e9)
        gemm = tuple(
            GemmPoint(impl, dtype, m, n, k, max(itemsize * n * k / rate, 2 * m * n * k / flops))
            for dtype, (impl, itemsize, rate, flops) in sizes.items()
            for n, k in ((2048, 2048), (5632, 2048)) for m in (1, 2, 4, 8, 16, 32, 64, 256))
        links = (
            Link("disk", "device", 1.5e9, 2e-4, "direct", 2, 4 << 20),
            Link("device", "disk", 0.5e9, 1e-3, "write"),
            Link("disk", "host", 1.5e9, 2e-4, "direct", 2, 4 << 20),
            Link("host", "disk", 0.5e9, 1e-3, "write"),
            Link("host", "device", 4e9, 1e-6, "memcpy"), Link("device", "host", 4e9, 1e-6, "memcpy"),
        )
        tiers = {"device": Tier(4 << 30, memory), "host": Tier(4 << 30, memory), "disk": Tier(32 << 30, 0.0)}
        return Machine("default-guess", "", {}, 2, 2, HOST.name, tiers, links, gemm, 4e9, 5e-6, 4e9,
                       product_flops=8e9, attention_flops=8e9)

    def to_json(self) -> str:
        """The profile as JSON text that `machine_from_json` reads back to an equal one."""
        return json.dumps(dataclasses.asdict(self), indent=1)


def machine_from_json(text: str) -> Machine:
    """Read and validate a profile; raises ValueError naming the field that is missing, unknown, ill-typed or untrue."""
    try:
        value = json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"machine profile is not JSON: {error}") from error
    if isinstance(value, dict) and "copy_issue_s" not in value and not (
            kind_of(str(value.get("device_kind", HOST.name))).on_host_cores):
        value["copy_issue_s"] = 0.0  # a profile of a GPU, older than this number
    machine: Machine = from_json(Machine, value, "machine profile")
    machine.validate()
    return machine


def load_machine(path: str | os.PathLike[str]) -> Machine:
    """Read and validate the profile in a file; errors name the file and the field."""
    try:
        return machine_from_json(read_input_text(path))
    except ValueError as error:
        raise ValueError(f"{os.fspath(path)}: {error}") from error


def save_machine(machine: Machine, path: str | os.PathLike[str]) -> None:
    """Validate and write a profile whole or not at all, making its folder."""
    machine.validate()
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    write_text(path, machine.to_json())


def _require(holds: bool, at: str, what: str, value: object) -> None:
    if not holds:
        raise ValueError(f"machine profile: {at} {what}, is {value!r}")


def _positive(at: str, value: float) -> None:
    _require(math.isfinite(value) and value > 0, at, "must be finite and above 0", value)


def _not_negative(at: str, value: float) -> None:
    _require(math.isfinite(value) and value >= 0, at, "must be finite and not below 0", value)
