"""Machines that are not here, from data sheets and papers, for planning elsewhere: every number with its source."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from forebay.rewriter.ir.files import read_input_text
from forebay.rewriter.ir.printable import PrintableError
from forebay.rewriter.machine.links import onto_device
from forebay.rewriter.machine.profile import Link, Machine, Tier, machine_from_json

GIB, TIB = 1 << 30, 1 << 40
FITTED = "fitted, see docs/papers.md: "


class PresetError(PrintableError, ValueError):
    """A machine name or file that cannot be used; the message names the field."""


def load_machine_or_preset(machine: str) -> Machine:
    """A preset by name, or a file: what `forebay machine` wrote, or a preset's JSON. PresetError names the field of a
    file that cannot be true, or the link that it lacks between two tiers."""
    found = PRESETS.get(machine.lower())
    if found is not None:
        return found
    path = Path(machine)
    if not path.exists():
        raise PresetError(f"{machine!r} is neither a file nor a machine preset; presets are {', '.join(PRESETS)}")
    text = read_input_text(path)
    try:
        found = machine_from_json(text)
        _check_links(found)
    except ValueError as error:
        raise PresetError(f"{machine}: {error}") from error
    return found


def _check_links(machine: Machine) -> None:
    """Each tier that has room must have links both ways."""
    if not machine.tiers["device"].capacity_nbytes:
        raise PresetError("tiers.device.capacity_nbytes must be above 0")
    pairs = [("host", "device")] if "host" in machine.tiers and machine.tiers["host"].capacity_nbytes else []
    pairs += [("disk", machine.near_disk)] if machine.tiers["disk"].capacity_nbytes else []
    known = {(link.src, link.dst) for link in machine.links}
    for a, b in [*pairs, *((b, a) for a, b in pairs)]:
        if (a, b) not in known:
            raise PresetError(f"links: there is none from {a} to {b}")


def _sheet(
    name: str, device_kind: str, *, nbytes: tuple[int, int, int], read: float, up: float, down: float,
    disk: tuple[float, float], attention: float, host_attention: float, product_flops: float, attention_flops: float,
    peaks: tuple[float, float, float], sources: dict[str, str], host_products: tuple[float, float] = (0.0, 0.0),
) -> Machine:
    """A machine from rates in bytes and operations per second; `sources` by short names, spread over the paths.

    nbytes: of device, host and disk; disk: reading and writing; peaks: operations, memory, interconnect; host_products:
    bytes of experts, and operations, of the host's cores (0: it does not compute with them).
    """
    links = (Link("host", "device", up, 1e-5, "pinned"), Link("device", "host", down, 1e-5, "pinned"),
             Link("disk", "host", disk[0], 1e-4, "direct"), Link("host", "disk", disk[1], 1e-4, "write"))
    tiers = {"device": Tier(nbytes[0], read), "host": Tier(nbytes[1], 0.0), "disk": Tier(nbytes[2], 0.0)}
    paths = {
        "tiers.device.capacity_nbytes": "device", "tiers.host.capacity_nbytes": "host",
        "tiers.disk.capacity_nbytes": "disk", "tiers.device.bandwidth_bytes_per_s": "read",
        "memory_bytes_per_s": "read", "links.host.device.bandwidth_bytes_per_s": "up",
        "links.device.host.bandwidth_bytes_per_s": "down", "links.disk.host.bandwidth_bytes_per_s": "disk read",
        "links.host.disk.bandwidth_bytes_per_s": "disk write", "attention_bytes_per_s": "attention",
        "host_attention_bytes_per_s": "host attention", "product_flops": "products",
        "host_product_bytes_per_s.bfloat16": "host products", "host_product_flops": "host operations",
        "attention_flops": "prompt attention", "peak_flops": "peak", "peak_memory_bytes_per_s": "peak memory",
        "interconnect_bytes_per_s": "interconnect"}
    found = {path: sources[short] for path, short in paths.items() if short in sources}
    found["memory_bytes_per_s"] += "; a copy reads and writes"
    found |= {f"links.{link.src}.{link.dst}.latency_s": "assumed: 10 us a copy, 100 us a request of the disk"
              for link in links}
    found["dispatch_s"] = "assumed: an asynchronous launch"
    found["row_request_s"] = "assumed: as on two cores of a CPU"
    found["copy_issue_s"] = "threads of their own issue copies"
    return Machine(
        name, "", {}, 1, 1, device_kind, tiers, links, (), read / 2, 5e-6, attention, copy_issue_s=0.0,
        host_attention_bytes_per_s=host_attention, product_flops=product_flops, attention_flops=attention_flops,
        host_product_bytes_per_s={"bfloat16": host_products[0]} if host_products[0] else {},
        host_product_flops=host_products[1], peak_flops=peaks[0], peak_memory_bytes_per_s=peaks[1],
         interconnect_bytes_per_s=peaks[2], sources=found)


def _gpu(
    name: str, device_kind: str, *, device_gb: float, peak_tflops: float, peak_gb_per_s: float,
    link: tuple[float, str], host_gib: int, disk: tuple[int, float, float], interconnect_gb_per_s: float, sheet: str,
    host: str, memory: tuple[float, str], cores: int, in_place: tuple[float, str] = (0.0, ""),
) -> Machine:
    """A preset from a data sheet, with attained rates that are stated assumptions, the same for every such preset.
    in_place: GB/s of host memory at its peak, as kernels read it."""
    up, link_source = link[0] * 1e9, link[1]
    flops, read = peak_tflops * 1e12, peak_gb_per_s * 1e9
    share = "assumed share of the peak: "
    found = _sheet(
        name, device_kind, nbytes=(int(0.94 * device_gb * 1e9), host_gib * GIB, int(disk[0] * 1e9)), read=0.8 * read,
        up=up, down=up, disk=(disk[1] * 1e9, disk[2] * 1e9), attention=0.6 * read, host_attention=0.7e9 * memory[0],
        product_flops=0.7 * flops, attention_flops=0.2 * flops, peaks=(flops, read, interconnect_gb_per_s * 1e9),
        host_products=(0.7e9 * memory[0], 0.5 * cores * 3e9 * 32),
        sources={
            "device": f"{sheet}; 94 % of it, the rest is the runtime's", "host": host, "disk": host,
            "read": share + "0.8, streaming reads", "up": link_source, "down": link_source, "disk read": host,
            "disk write": host, "attention": share + "0.6, decode attention",
            "host attention": f"{share}0.7 of {memory[0]:g} GB/s, as host products",
            "host products": f"{share}0.7 of {memory[0]:g} GB/s ({memory[1]}, assumed)",
            "host operations": f"{share}0.5 of {cores} cores (assumed) at 3 GHz, 32 operations a cycle with AVX2",
            "products": share + "0.7, large half-precision products",
            "prompt attention": share + "0.2, fused causal attention (0.4 with what the mask leaves out)",
            "peak": sheet, "peak memory": sheet, "interconnect": sheet})
    return found if not in_place[0] else dataclasses.replace(
        found, host_read_bytes_per_s=0.8e9 * in_place[0],
        sources={**found.sources, "host_read_bytes_per_s": f"{share}0.8 of {in_place[0]:g} GB/s, {in_place[1]}"})


def _one_memory(machine: Machine, source: str) -> Machine:
    """A preset whose GPU computes in the host's memory: all of it is the device's, and disk reads land there."""
    links, path = onto_device(machine.links), "links.{}.{}.{}"
    sources = {path.format(link.src, link.dst, number): machine.sources[path.format(*(
        "host" if tier == "device" else tier for tier in (link.src, link.dst)), number)]
               for link in links for number in ("bandwidth_bytes_per_s", "latency_s")}
    return dataclasses.replace(
        machine, one_memory=True, host_read_bytes_per_s=machine.tiers["device"].bandwidth_bytes_per_s,
        links=machine.links + links, tiers={**machine.tiers, "host": Tier(0, 0.0)}, sources={
            **machine.sources, **sources, "host_read_bytes_per_s": source,
            "tiers.host.capacity_nbytes": "is the device's"})


def _laptop(name: str, gib: int, cores: int, transfers: int, disk: tuple[float, float]) -> Machine:
    """A laptop without a GPU that counts: two channels of memory of so many million transfers a second."""
    peak, flops = transfers * 1e6 * 16, cores * 3.5e9 * 32
    of_memory, of_disk = f"DDR5-{transfers}, two channels of 8 bytes", "assumed: an NVMe disk at PCIe 4.0 x4"
    share = "assumed share of the peak: "
    sources = {
        "tiers.device.capacity_nbytes": f"assumed: {gib} GB, a quarter of it the system's and others'",
        "tiers.host.capacity_nbytes": "is the device's", "tiers.disk.capacity_nbytes": "assumed: 1 TB, half of it free",
        "tiers.device.bandwidth_bytes_per_s": share + "0.7, streaming reads",
        "tiers.host.bandwidth_bytes_per_s": "is the device's",
        "memory_bytes_per_s": share + "0.35; a copy reads and writes",
        "attention_bytes_per_s": share + "0.35, decode attention, as on two cores of a Zen 4",
        "product_flops": share + "0.5, large float32 products", "attention_flops": share + "0.1, as on a Zen 4",
        "peak_flops": f"{cores} cores, 3.5 GHz under load (assumed), 32 operations a cycle with AVX2",
        "peak_memory_bytes_per_s": of_memory, "dispatch_s": "as on two cores of a Zen 4",
        "copy_issue_s": "as on two cores of a Zen 4", "row_request_s": "as on two cores of a Zen 4"}
    links = []
    for near in ("device", "host"):
        links += [Link("disk", near, disk[0] * 1e9, 1e-4, "direct"), Link(near, "disk", disk[1] * 1e9, 1e-4, "write")]
    links += [Link("host", "device", 0.35 * peak, 1e-5, "memcpy"), Link("device", "host", 0.35 * peak, 1e-5, "memcpy")]
    for link in links:
        beside = of_disk if "disk" in (link.src, link.dst) else "as memory_bytes_per_s"
        sources |= {f"links.{link.src}.{link.dst}.{number}": beside
                    for number in ("bandwidth_bytes_per_s", "latency_s")}
    room = 3 * gib * GIB // 4
    return Machine(
        name, "", {}, cores, cores, "cpu",
        {"device": Tier(room, 0.7 * peak), "host": Tier(room, 0.7 * peak), "disk": Tier(int(500e9), 0.0)},
        tuple(links), (), 0.35 * peak, 2e-6, 0.35 * peak, product_flops=0.5 * flops, attention_flops=0.1 * flops,
        peak_flops=flops, peak_memory_bytes_per_s=peak, sources=sources)


_LLMGEN = "FlexGen's published fit of this machine (FlexLLMGen, experimental/cost_model.py)"
_PAPER = "FlexGen, section 6 and Table 1"
T4 = _sheet(
    "t4", "Tesla T4", nbytes=(15 * GIB, 204 * GIB, 1500 * GIB), read=0.8 * 320e9, up=12.89 * GIB, down=4.82 * GIB,
    disk=(2.77e9, 1e9), attention=79e9, host_attention=9.35e9, product_flops=21.24e12, attention_flops=9.97e12 / 2,
    peaks=(65e12, 320e9, 0.0), sources={
        "device": f"{_PAPER}: 16 GB; usable: {_LLMGEN}", "host": f"{_PAPER}: 208 GB; usable: {_LLMGEN}",
        "disk": f"{_PAPER}: 1.5 TB; {_LLMGEN}", "products": _LLMGEN,
        "prompt attention": f"{_LLMGEN}: 9.97 Tflop/s, half of which the causal mask leaves out",
        "read": "NVIDIA T4 data sheet, 320 GB/s; 0.8 of it attained (assumed, as on every preset)",
        "attention": f"{_LLMGEN}: 0.079 Tflop/s, one operation per byte of K and V",
        "host attention": FITTED + "Table 2, FlexGen, OPT-30B, prompt 512", "up": _LLMGEN, "down": _LLMGEN,
        "disk read": FITTED + "Table 2, FlexGen, OPT-175B, prompt 512 (section 6: about 2 GB/s, plus what the page "
                              "cache returns)",
        "disk write": "FlexGen, section 6: about 1 GB/s", "peak": "NVIDIA T4 data sheet",
        "peak memory": "NVIDIA T4 data sheet"})

_PCIE4 = (25.0, "PCIe 4.0 x16: 31.5 GB/s raw, 25 attained by pinned copies (assumed, 0.8)")
_PCIE5 = (50.0, "PCIe 5.0 x16: 63 GB/s raw, 50 attained by pinned copies (assumed, 0.8)")
_HOST = "assumed host: two sockets, one NVMe disk"
_DDR4 = (204.8, "one socket with eight channels of DDR4-3200")
_DDR5 = (307.2, "one socket with eight channels of DDR5-4800")
_TWO_CHANNELS = (89.6, "two channels of DDR5-5600")
_ASCEND = _gpu("ascend-910b3", "Ascend 910B3",
         memory=_DDR4, cores=32, device_gb=64, peak_tflops=313, peak_gb_per_s=1600, link=_PCIE4,
               host_gib=1024, disk=(3800, 6.0, 3.0), interconnect_gb_per_s=90,
               sheet="BestServe, section 4.1 (313 TFLOPS, 90 GB/s); memory 64 GB", host=_HOST)
PRESETS: dict[str, Machine] = {machine.name: machine for machine in (
    T4,
    _gpu("rtx3090", "NVIDIA GeForce RTX 3090",
         memory=_DDR4, cores=32, device_gb=24, peak_tflops=71, peak_gb_per_s=936, link=_PCIE4,
         host_gib=125, disk=(1000, 2.0, 1.0), interconnect_gb_per_s=0, sheet="NVIDIA GA102 white paper",
         host="FlexGen, Table 12 (125 GB, 1 TB SSD); disk rates as in its section 6 (assumed)"),
    _gpu("rtx4090", "NVIDIA GeForce RTX 4090",
         memory=_DDR4, cores=32, device_gb=24, peak_tflops=165.2, peak_gb_per_s=1008, link=_PCIE4,
         host_gib=821, disk=(2000, 5.0, 3.0), interconnect_gb_per_s=0, sheet="NVIDIA Ada white paper",
         host="HybridServe, section 5.1 (882 GB); disk assumed, PCIe 4.0 NVMe"),
    _gpu("a5000", "NVIDIA RTX A5000",
         memory=_DDR4, cores=32, device_gb=24, peak_tflops=111.1, peak_gb_per_s=768, link=_PCIE4,
         host_gib=1024, disk=(3800, 6.0, 3.0), interconnect_gb_per_s=0,
         sheet="NVIDIA RTX A5000 data sheet (222.2 TFLOPS with sparsity)", host=_HOST),
    _gpu("rtx4060-laptop", "NVIDIA GeForce RTX 4060 Laptop GPU",
         memory=_TWO_CHANNELS, cores=8, device_gb=8, peak_tflops=46.2, peak_gb_per_s=256,
         link=(12.5, "PCIe 4.0 x8: 15.8 GB/s raw, 12.5 attained by pinned copies (assumed, 0.8)"), host_gib=12,
         disk=(500, 5.0, 3.0), interconnect_gb_per_s=0,
         sheet="NVIDIA Ada, AD107: 3072 CUDA cores at 1.88 GHz; 128 bits of GDDR6 at 16 Gbit/s",
         host="assumed: a laptop with 16 GB, 12 GiB of it free, and a PCIe 4.0 NVMe disk"),
    _gpu("rtx5090", "NVIDIA GeForce RTX 5090",
         memory=_TWO_CHANNELS, cores=16, device_gb=32, peak_tflops=209.5, peak_gb_per_s=1792, link=_PCIE5,
         host_gib=60, disk=(2000, 10.0, 6.0), interconnect_gb_per_s=0, sheet="NVIDIA RTX Blackwell white paper",
         host="assumed: a desktop with 64 GB and a PCIe 5.0 NVMe disk"),
    _laptop("laptop-16gb", 16, 8, 5600, (5.0, 3.0)), _laptop("laptop-32gb", 32, 8, 5600, (5.0, 3.0)),
    _gpu("a100-80g", "NVIDIA A100-SXM4-80GB",
         memory=_DDR4, cores=32, device_gb=80, peak_tflops=312, peak_gb_per_s=2039, link=_PCIE4,
         host_gib=1024, disk=(3800, 6.0, 3.0), interconnect_gb_per_s=300, sheet="NVIDIA A100 data sheet", host=_HOST),
    _gpu("h100", "NVIDIA H100 80GB HBM3",
         memory=_DDR5, cores=48, device_gb=80, peak_tflops=989, peak_gb_per_s=3350, link=_PCIE5,
         host_gib=1024, disk=(3800, 12.0, 6.0), interconnect_gb_per_s=450, sheet="NVIDIA H100 SXM data sheet",
         host=_HOST),
    _gpu("h200", "NVIDIA H200",
         memory=_DDR5, cores=48, device_gb=141, peak_tflops=989, peak_gb_per_s=4800, link=_PCIE5, host_gib=1024,
         disk=(3800, 12.0, 6.0), interconnect_gb_per_s=450, sheet="NVIDIA H200 SXM data sheet", host=_HOST),
    _gpu("gh200", "NVIDIA GH200 480GB",
         memory=(512.0, "LPDDR5X, up to 512 GB/s"), cores=72, device_gb=96, peak_tflops=989, peak_gb_per_s=4000,
         link=(360.0, "NVLink-C2C: 450 GB/s each way, 360 attained by copies (assumed, 0.8)"), host_gib=400,
         disk=(3800, 12.0, 6.0), interconnect_gb_per_s=450, sheet="NVIDIA GH200 data sheet (96 GB of HBM3)",
         host="NVIDIA GH200 data sheet: 480 GB of LPDDR5X, 400 GiB of it free (assumed); disk assumed",
         in_place=(450.0, "each way of NVLink-C2C")),
    _one_memory(_gpu(
        "gb10", "NVIDIA GB10", memory=(273.0, "256 bits of LPDDR5X"), cores=20, device_gb=110, peak_tflops=125,
        peak_gb_per_s=273, link=(109.0, "a copy reads and writes the same memory: 0.4 of 273 GB/s (assumed)"),
        host_gib=1, disk=(3800, 6.0, 3.0), interconnect_gb_per_s=0,
        sheet="NVIDIA DGX Spark data sheet (128 GB at 273 GB/s, 110 of it free; an eighth of 1 PFLOP of sparse FP4)",
        host="assumed: a PCIe 4.0 NVMe disk"), "is the device's memory, by its own page tables"),
    _gpu("tpu-v4", "TPU v4",
         memory=_DDR4, cores=32, device_gb=32 * GIB / 1e9, peak_tflops=275, peak_gb_per_s=1200,
         link=(12.5, "assumed: PCIe 3.0 x16, 12.5 GB/s attained"), host_gib=256, disk=(1000, 2.0, 1.0),
         interconnect_gb_per_s=270, sheet="Pope et al. 2022, section 4 (TPU v4: 275 TFLOPS, 32 GiB, 1200 GB/s, "
                                          "270 GB/s interconnect)", host="assumed host"),
    dataclasses.replace(
        _ASCEND, peak_memory_bytes_per_s=1.6 * TIB, interconnect_bytes_per_s=90.0 * GIB, sources={
            **_ASCEND.sources,
            "peak_memory_bytes_per_s": "1.6 TB/s (vendor), taken as 1.6 TiB/s: BestServe's Table 3 then gives its "
                                       "RMSNorm row",
            "interconnect_bytes_per_s": "BestServe, section 4.1: 90 GB/s, taken as GiB"}),
)}
