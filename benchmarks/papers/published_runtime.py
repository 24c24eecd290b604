"""What FlexGen's, DeepSpeed's and Accelerate's own runtimes do that ours does not: relays of memory that is not pinned,
copies on the thread that computes, synchronisation after every stage, dequantization before use."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

from forebay.rewriter.machine.presets import FITTED, GIB, PRESETS
from forebay.rewriter.policy.block_costs import BlockModel, Phase, Piece
from forebay.rewriter.policy.shares import ONE, Affine, added, scaled
from forebay.rewriter.predict.model_shapes import ATTENTION, MLP

CODE_BITS = {"native": 0.0, "kv4": 4.5}  # of FlexGen's own cache (section 5): codes, two 16-bit numbers per 64 of them


@dataclass(frozen=True)
class Unpinned:
    """Bytes per second of what only these runtimes do: copies from memory that is not pinned, of numbers and of packed
    codes (through a pinned relay), and unfused dequantization, counted in bytes of the model's own format that it
    writes. `sources` has a line for each."""

    pageable_bytes_per_s: float
    packed_pageable_bytes_per_s: float
    dequantize_bytes_per_s: float
    sources: Mapping[str, str] = field(default_factory=dict)


def _assumed(name: str) -> Unpinned:
    machine = PRESETS[name]
    half = machine.link("host", "device").bandwidth_bytes_per_s / 2
    return Unpinned(half, half, machine.peak_memory_bytes_per_s / 14, {
        "pageable_bytes_per_s": "assumed: half of pinned, the copy passes host memory twice",
        "packed_pageable_bytes_per_s": "assumed: as any other bytes that are not pinned",
        "dequantize_bytes_per_s": "T4's fitted ratio to its memory peak, one to 14"})


UNPINNED = {
    "t4": Unpinned(4.82 * GIB, 7.88e9, 22.65e9, {
        "pageable_bytes_per_s": "assumed: FlexGen's published fit of this machine (FlexLLMGen, "
                                "experimental/cost_model.py), the rate of copies back to the host",
        "packed_pageable_bytes_per_s": FITTED + "Table 2, FlexGen (c), OPT-30B, prompt 1024",
        "dequantize_bytes_per_s": FITTED + "Table 2, FlexGen (c), OPT-6.7B, prompt 512"}),
    "rtx4090": _assumed("rtx4090"),
}


@dataclass(frozen=True)
class Runtime:
    """How a system executes a block.

    overlap: "none" adds up all links and compute; "step" runs them side by side but ends them together after every
    micro-batch of every stage (FlexGen's Algorithm 1); "block" only keeps data in order, so that a layer's work over
    the whole block overlaps. Cache in host memory that is not pinned is first copied into a pinned relay by the thread
    that launches compute, so it does not overlap. Weights in host memory are pinned, go through pinned staging (copied
    there and on to the device side by side), are copied from pageable memory, or are relayed like such a cache.
    `activation_stream`: activations move beside compute, not on its stream. `one_hop_thread`: the thread that reads
    the disk also copies to the device. `fused`: quantized weights and cache are read by the products themselves.
    `scores`: attention in prefill keeps its whole score matrix.
    """

    overlap: Literal["none", "step", "block"] = "block"
    pinned_cache: bool = True
    host_weights: Literal["pinned", "staged", "pageable", "relayed"] = "pinned"
    activation_stream: bool = True
    one_hop_thread: bool = False
    fused: bool = True
    scores: bool = False


@dataclass(frozen=True)
class PublishedModel(BlockModel):
    """A block as another system's runtime executes it."""

    runtime: Runtime = field(kw_only=True)
    unpinned: Unpinned = field(kw_only=True)

    def layer_pieces(self, phase: Phase, count: float, loads: Mapping[str, Mapping[str, Affine]],
                     work: Mapping[str, Mapping[str, Affine]]) -> list[Piece]:
        if self.runtime.overlap != "step":
            pieces = super().layer_pieces(phase, count, loads, work)
            return [Piece(p.phase, p.count, p.lanes, serial=self.runtime.overlap == "none") for p in pieces]
        found, batches = [], self.block.micro_batches
        for stage, other in ((ATTENTION, MLP), (MLP, ATTENTION)):
            first = added(loads[other], work[stage])  # the next stage's weights come during this stage
            if self.block.order == "row":
                found.append(Piece(phase, count * batches, first))
                continue
            found.append(Piece(phase, count, first))
            if batches > 1:
                found.append(Piece(phase, count * (batches - 1), work[stage]))
        return found

    def head_piece(self, phase: Phase, count: float, lanes: Mapping[str, Affine]) -> Piece:
        return Piece(phase, count, lanes, serial=self.runtime.overlap == "none")

    def load_weights(self, host: Affine, disk: Affine) -> dict[str, Affine]:
        if self.runtime.host_weights == "relayed":
            relayed = scaled({"compute": host}, self._relay_byte_s(self.block.weight_format))
            return added(self.load(0 * ONE, disk), relayed)
        return super().load_weights(host, disk)

    def host_weight_byte_s(self) -> float:
        """A pageable copy is a copy into pinned memory, then one from there; staging does both at once."""
        pinned, pageable = self.times.byte_s("host", "device"), 1 / self.unpinned.pageable_bytes_per_s
        if self.runtime.host_weights == "staged" and pageable > pinned:
            return max(pinned, pageable - pinned)
        return pageable if self.runtime.host_weights == "pageable" else pinned

    def load_cache(self, host: Affine, disk: Affine) -> dict[str, Affine]:
        if self.runtime.pinned_cache:
            return super().load_cache(host, disk)
        relayed = scaled({"compute": host}, self._relay_byte_s(self.block.cache_format))
        return added(self.load(0 * ONE, disk), relayed)

    def move_activations(self, host: Affine, disk: Affine) -> dict[str, Affine]:
        if self.runtime.activation_stream:
            return super().move_activations(host, disk)
        copied = self.times.byte_s("host", "device") + self.times.byte_s("device", "host")
        return added({"compute": copied * host}, super().move_activations(0 * ONE, disk))

    def disk_hop_s(self, to_device: bool) -> float:
        return self.times.byte_s("host", "device") if to_device and self.runtime.one_hop_thread else 0.0

    def expand_s(self, native_nbytes: float) -> float:
        return 0.0 if self.runtime.fused else native_nbytes / self.unpinned.dequantize_bytes_per_s

    def cache_ratio(self) -> float:
        bits = CODE_BITS[self.block.cache_format]
        return bits / (8 * self.model.itemsize) if bits else 1.0

    @property
    def product_format(self) -> str:
        return super().product_format if self.runtime.fused else self.model.dtype

    def working_nbytes(self) -> float:
        model, block, itemsize = self.model, self.block, self.model.itemsize
        nbytes = super().working_nbytes()
        if self.runtime.scores:
            scores = max(2 * block.micro_batch * k.heads * self.prompt**2 for k in model.layers)
            nbytes = max(nbytes, scores * itemsize)
        if block.weight_format != "native" and not self.runtime.fused:
            nbytes += max(k.elements(s) for k in model.layers for s in (ATTENTION, MLP)) * itemsize
        if block.cache_format != "native" and not self.runtime.fused:
            nbytes += max(self.cache_nbytes(k, self.prompt + self.new_tokens)[0] for k in model.layers)
        return nbytes

    def _relay_byte_s(self, stored: str) -> float:
        """Seconds per byte from memory that is not pinned through a pinned relay, by what is stored there."""
        rates = self.unpinned
        return 1 / (rates.pageable_bytes_per_s if stored == "native" else rates.packed_pageable_bytes_per_s)


def running(runtime: Runtime, unpinned: Unpinned) -> partial[PublishedModel]:
    """What makes block models of that runtime, in the place of `BlockModel`."""
    return partial(PublishedModel, runtime=runtime, unpinned=unpinned)
