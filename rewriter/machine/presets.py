"""Rates of machines that are not here, for planning elsewhere: every number with its source; JSON both ways."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from forebay.rewriter.machine.profile import Machine, load_machine

GIB, TIB = 1 << 30, 1 << 40
FITTED = "fitted, see docs/papers.md: "


class PresetError(ValueError):
    """A machine preset or file that cannot be used; the message names the field."""


@dataclass(frozen=True)
class MachineRates:
    """What the offloading cost model needs of a machine: usable bytes per tier, and attained (not peak) rates.

    flops and bytes are per second. `attention_*` are of the device's attention: operations in prefill, K and V bytes
    read in decode; `host_attention_bytes_per_s` is the same of the host (0: the host does not compute).
    `dequantise_bytes_per_s` counts bytes of the model's own format that an unfused dequantisation writes (0: fused
    only). `pageable_bytes_per_s` is host to device from memory that is not pinned, `packed_pageable_bytes_per_s` the
    same for packed codes, through a pinned relay. `peak_*` and `interconnect_*` are the vendor's, for rooflines with
    efficiencies of their own. `sources` has a line for every other field.
    """

    name: str
    device_nbytes: int
    host_nbytes: int
    disk_nbytes: int
    gemm_flops: float
    attention_flops: float
    memory_bytes_per_s: float
    attention_bytes_per_s: float
    dequantise_bytes_per_s: float
    host_attention_bytes_per_s: float
    host_to_device_bytes_per_s: float
    pageable_bytes_per_s: float
    packed_pageable_bytes_per_s: float
    device_to_host_bytes_per_s: float
    disk_read_bytes_per_s: float
    disk_write_bytes_per_s: float
    dispatch_s: float
    peak_flops: float
    peak_memory_bytes_per_s: float
    interconnect_bytes_per_s: float
    sources: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def validate(self) -> None:
        """Raise PresetError naming the first field that cannot be true, or that has no source."""
        if not self.name:
            raise PresetError("machine preset: name: must not be empty")
        may_be_zero = {"host_nbytes", "disk_nbytes", "dequantise_bytes_per_s", "host_attention_bytes_per_s",
                       "disk_read_bytes_per_s", "disk_write_bytes_per_s", "dispatch_s", "interconnect_bytes_per_s"}
        for field in _numbers():
            value = getattr(self, field)
            if not math.isfinite(value) or value < 0 or (value == 0 and field not in may_be_zero):
                raise PresetError(f"machine preset {self.name}: {field}: must be finite and "
                                  f"{'not below' if field in may_be_zero else 'above'} 0, is {value!r}")
            if not self.sources.get(field):
                raise PresetError(f"machine preset {self.name}: sources.{field}: is missing; say where it is from")
        if self.disk_nbytes and not (self.disk_read_bytes_per_s and self.disk_write_bytes_per_s):
            raise PresetError(f"machine preset {self.name}: disk_read_bytes_per_s: a disk needs rates both ways")
        for low, high in (("gemm_flops", "peak_flops"), ("attention_flops", "peak_flops"),
                          ("memory_bytes_per_s", "peak_memory_bytes_per_s"),
                          ("pageable_bytes_per_s", "host_to_device_bytes_per_s"),
                          ("packed_pageable_bytes_per_s", "host_to_device_bytes_per_s")):
            if getattr(self, low) > getattr(self, high):
                raise PresetError(f"machine preset {self.name}: {low}: {getattr(self, low):.3g} exceeds {high} "
                                  f"{getattr(self, high):.3g}")

    def to_json(self) -> str:
        """JSON text that `rates_from_json` reads back to an equal object."""
        return json.dumps(dataclasses.asdict(self), indent=1)


def _numbers() -> list[str]:
    return [f.name for f in dataclasses.fields(MachineRates) if f.name not in ("name", "sources")]


def rates_from_json(text: str) -> MachineRates:
    """Read and validate; raises PresetError naming the field that is missing, unknown, ill-typed or untrue."""
    try:
        data = json.loads(text)
    except ValueError as error:
        raise PresetError(f"machine preset is not JSON: {error}") from error
    if not isinstance(data, dict):
        raise PresetError(f"machine preset: expected an object, found {type(data).__name__}")
    kinds = {f.name: str(f.type) for f in dataclasses.fields(MachineRates)}
    for field in data:
        if field not in kinds:
            raise PresetError(f"machine preset: {field}: is not a known field")
    values: dict[str, object] = {}
    for field, kind in kinds.items():
        if field not in data:
            raise PresetError(f"machine preset: {field}: is missing")
        value = data[field]
        accepted: tuple[type, ...] = {"str": (str,), "int": (int,), "float": (int, float)}.get(kind, (dict,))
        if not isinstance(value, accepted) or isinstance(value, bool):
            raise PresetError(f"machine preset: {field}: expected {accepted[-1].__name__}, found {value!r}")
        values[field] = float(value) if kind == "float" else value  # type: ignore[arg-type]
    rates = MachineRates(**values)  # type: ignore[arg-type]
    rates.validate()
    return rates


def load_rates(machine: str) -> MachineRates:
    """A preset by name, or a file: a preset's JSON, or the profile `forebay machine` wrote."""
    found = PRESETS.get(machine.lower())
    if found is not None:
        return found
    path = Path(machine)
    if not path.is_file():
        raise PresetError(f"{machine!r} is neither a file nor a machine preset; presets are {', '.join(PRESETS)}")
    text = path.read_text(encoding="utf-8")
    try:
        if '"gemm"' in text:
            return rates_of_machine(load_machine(path))
        return rates_from_json(text)
    except ValueError as error:
        raise PresetError(f"{machine}: {error}") from error


def rates_of_machine(machine: Machine) -> MachineRates:
    """Rates of a measured profile: the best product rate, its slowest copy for pageable memory, its fastest links."""
    gemm = max((2.0 * p.m * p.n * p.k / p.time_s for p in machine.gemm), default=0.0)
    if not gemm:
        raise PresetError(f"machine profile {machine.name}: gemm: holds no measured product; measure the machine again")
    tiers = machine.tiers

    def rate(src: str, dst: str) -> float:
        found = [x.bandwidth_bytes_per_s for x in machine.links if (x.src, x.dst) == (src, dst)]
        return max(found, default=0.0)

    host = tiers.get("host")
    up = rate("host", "device") or machine.memory_bytes_per_s
    slow = min((x.bandwidth_bytes_per_s for x in machine.links if (x.src, x.dst) == ("host", "device")), default=up)
    measured = f"measured by forebay machine on {machine.date or 'an unknown day'}"
    rates = MachineRates(
        machine.name, tiers["device"].capacity_nbytes, host.capacity_nbytes if host else 0,
        tiers["disk"].capacity_nbytes, gemm, gemm, machine.memory_bytes_per_s, machine.attention_bytes_per_s, 0.0,
        machine.attention_bytes_per_s if machine.device_kind == "cpu" else 0.0, up, slow, slow,
        rate("device", "host") or up, rate("disk", "host") or rate("disk", "device"),
        rate("host", "disk") or rate("device", "disk"), machine.dispatch_s, gemm, machine.memory_bytes_per_s, 0.0,
        {field: measured for field in _numbers()})
    rates.validate()
    return rates


def _gpu(
    name: str, *, device_gb: int, peak_tflops: float, peak_gb_per_s: float, link: tuple[float, float, str],
    host_gib: int, disk: tuple[int, float, float], interconnect_gb_per_s: float, sheet: str, host: str,
) -> MachineRates:
    """A preset from a data sheet, with attained rates that are stated assumptions, the same for every such preset."""
    pinned, pageable, link_source = link
    share = "assumed share of the peak: "
    numbers: dict[str, tuple[float, str]] = {
        "gemm_flops": (0.7 * peak_tflops * 1e12, share + "0.7, large half-precision products"),
        "attention_flops": (0.4 * peak_tflops * 1e12, share + "0.4, fused attention in prefill"),
        "memory_bytes_per_s": (0.8 * peak_gb_per_s * 1e9, share + "0.8, streaming reads"),
        "attention_bytes_per_s": (0.6 * peak_gb_per_s * 1e9, share + "0.6, decode attention"),
        "dequantise_bytes_per_s": (peak_gb_per_s * 1e9 / 14, "T4's fitted ratio to its memory peak, one to 14"),
        "host_attention_bytes_per_s": (9e9, "as on the T4 preset's host (fitted there)"),
        "host_to_device_bytes_per_s": (pinned * 1e9, link_source),
        "pageable_bytes_per_s": (pageable * 1e9, "assumed: half of pinned, the copy passes host memory twice"),
        "packed_pageable_bytes_per_s": (pageable * 1e9, "assumed: as any other bytes that are not pinned"),
        "device_to_host_bytes_per_s": (pinned * 1e9, link_source),
        "disk_read_bytes_per_s": (disk[1] * 1e9, host), "disk_write_bytes_per_s": (disk[2] * 1e9, host),
        "dispatch_s": (5e-6, "assumed: an asynchronous launch"),
        "peak_flops": (peak_tflops * 1e12, sheet), "peak_memory_bytes_per_s": (peak_gb_per_s * 1e9, sheet),
        "interconnect_bytes_per_s": (interconnect_gb_per_s * 1e9, sheet if interconnect_gb_per_s else "none"),
    }
    sources = {field: source for field, (_, source) in numbers.items()}
    sources |= {"device_nbytes": f"{sheet}; 94 % of it, the rest is the runtime's", "host_nbytes": host,
                "disk_nbytes": host}
    return MachineRates(name, int(0.94 * device_gb * 1e9), host_gib * GIB, int(disk[0] * 1e9),
                        sources=sources, **{field: value for field, (value, _) in numbers.items()})


_LLMGEN = "FlexGen's published fit of this machine (FlexLLMGen, experimental/cost_model.py)"
_PAPER = "FlexGen, section 6 and Table 1"
T4 = MachineRates(
    name="t4", device_nbytes=15 * GIB, host_nbytes=204 * GIB, disk_nbytes=1500 * GIB,
    gemm_flops=21.24e12, attention_flops=9.97e12, memory_bytes_per_s=0.8 * 320e9, attention_bytes_per_s=79e9,
    dequantise_bytes_per_s=22.65e9, host_attention_bytes_per_s=9.35e9, host_to_device_bytes_per_s=12.89 * GIB,
    pageable_bytes_per_s=4.82 * GIB, packed_pageable_bytes_per_s=7.88e9, device_to_host_bytes_per_s=4.82 * GIB,
    disk_read_bytes_per_s=2.77e9, disk_write_bytes_per_s=1e9, dispatch_s=5e-6, peak_flops=65e12,
    peak_memory_bytes_per_s=320e9, interconnect_bytes_per_s=0.0,
    sources={
        "device_nbytes": f"{_PAPER}: 16 GB; usable: {_LLMGEN}", "host_nbytes": f"{_PAPER}: 208 GB; usable: {_LLMGEN}",
        "disk_nbytes": f"{_PAPER}: 1.5 TB; {_LLMGEN}", "gemm_flops": _LLMGEN, "attention_flops": _LLMGEN,
        "memory_bytes_per_s": "NVIDIA T4 data sheet, 320 GB/s; 0.8 of it attained (assumed, as on every preset)",
        "attention_bytes_per_s": f"{_LLMGEN}: 0.079 Tflop/s, one operation per byte of K and V",
        "dequantise_bytes_per_s": FITTED + "Table 2, FlexGen (c), OPT-6.7B, prompt 512",
        "host_attention_bytes_per_s": FITTED + "Table 2, FlexGen, OPT-30B, prompt 512",
        "host_to_device_bytes_per_s": _LLMGEN,
        "pageable_bytes_per_s": f"assumed: {_LLMGEN}, the rate of copies back to the host",
        "packed_pageable_bytes_per_s": FITTED + "Table 2, FlexGen (c), OPT-30B, prompt 1024",
        "device_to_host_bytes_per_s": _LLMGEN,
        "disk_read_bytes_per_s": FITTED + "Table 2, FlexGen, OPT-175B, prompt 512 (section 6: about 2 GB/s, plus what "
                                          "the page cache returns)",
        "disk_write_bytes_per_s": "FlexGen, section 6: about 1 GB/s", "dispatch_s": "assumed: an asynchronous launch",
        "peak_flops": "NVIDIA T4 data sheet", "peak_memory_bytes_per_s": "NVIDIA T4 data sheet",
        "interconnect_bytes_per_s": "none"})

_PCIE4 = (25.0, 12.5, "PCIe 4.0 x16: 31.5 GB/s raw, 25 attained by pinned copies (assumed, 0.8)")
_PCIE5 = (50.0, 25.0, "PCIe 5.0 x16: 63 GB/s raw, 50 attained by pinned copies (assumed, 0.8)")
_HOST = "assumed host: two sockets, one NVMe disk"
PRESETS: dict[str, MachineRates] = {rates.name: rates for rates in (
    T4,
    _gpu("rtx3090", device_gb=24, peak_tflops=71, peak_gb_per_s=936, link=_PCIE4, host_gib=125,
         disk=(1000, 2.0, 1.0), interconnect_gb_per_s=0, sheet="NVIDIA GA102 white paper",
         host="FlexGen, Table 12 (125 GB, 1 TB SSD); disk rates as in its section 6 (assumed)"),
    _gpu("rtx4090", device_gb=24, peak_tflops=165.2, peak_gb_per_s=1008, link=_PCIE4, host_gib=821,
         disk=(2000, 5.0, 3.0), interconnect_gb_per_s=0, sheet="NVIDIA Ada white paper",
         host="HybridServe, section 5.1 (882 GB); disk assumed, PCIe 4.0 NVMe"),
    _gpu("a100-80g", device_gb=80, peak_tflops=312, peak_gb_per_s=2039, link=_PCIE4, host_gib=1024,
         disk=(3800, 6.0, 3.0), interconnect_gb_per_s=300, sheet="NVIDIA A100 data sheet", host=_HOST),
    _gpu("h100", device_gb=80, peak_tflops=989, peak_gb_per_s=3350, link=_PCIE5, host_gib=1024,
         disk=(3800, 12.0, 6.0), interconnect_gb_per_s=450, sheet="NVIDIA H100 SXM data sheet", host=_HOST),
    _gpu("h200", device_gb=141, peak_tflops=989, peak_gb_per_s=4800, link=_PCIE5, host_gib=1024,
         disk=(3800, 12.0, 6.0), interconnect_gb_per_s=450, sheet="NVIDIA H200 SXM data sheet", host=_HOST),
    _gpu("tpu-v4", device_gb=32, peak_tflops=275, peak_gb_per_s=1200,
         link=(12.5, 6.25, "assumed: PCIe 3.0 x16, 12.5 GB/s attained"), host_gib=256, disk=(1000, 2.0, 1.0),
         interconnect_gb_per_s=270, sheet="Pope et al. 2022, section 4 (TPU v4: 275 TFLOPS, 32 GiB, 1200 GB/s, "
                                          "270 GB/s interconnect)", host="assumed host"),
    dataclasses.replace(
        _gpu("ascend-910b3", device_gb=64, peak_tflops=313, peak_gb_per_s=1600, link=_PCIE4, host_gib=1024,
             disk=(3800, 6.0, 3.0), interconnect_gb_per_s=90,
             sheet="BestServe, section 4.1 (313 TFLOPS, 90 GB/s); memory 64 GB", host=_HOST),
        peak_memory_bytes_per_s=1.6 * TIB, interconnect_bytes_per_s=90.0 * GIB),
)}
PRESETS["ascend-910b3"] = dataclasses.replace(PRESETS["ascend-910b3"], sources={
    **PRESETS["ascend-910b3"].sources,
    "peak_memory_bytes_per_s": "1.6 TB/s (vendor), taken as 1.6 TiB/s: BestServe's Table 3 then gives its RMSNorm row",
    "interconnect_bytes_per_s": "BestServe, section 4.1: 90 GB/s, taken as GiB"})
