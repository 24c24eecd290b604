"""Time and memory of one block of generation as linear functions of where weights, cache and activations lie.

FlexGen's cost model (Appendix A.3), T = sum over layers of the maximum over links and compute, with what it leaves out:
two stages per layer, checkpoints of the layer input in place of K and V, formats, and how a runtime overlaps.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from forebay.rewriter.machine.presets import MachineRates
from forebay.rewriter.predict.model_shapes import ATTENTION, MLP, LayerShape, ModelShape

Affine = NDArray[np.float64]  # coefficients of the variables below, then the constant

TIERS = ("device", "host", "disk")
TENSORS = ("attention", "mlp", "outside", "kv", "checkpoint", "activation")
VARIABLES = tuple((tensor, tier) for tensor in TENSORS for tier in TIERS)
INDEX = {pair: i for i, pair in enumerate(VARIABLES)}
N = len(VARIABLES)
ONE = np.eye(N + 1)[N]
# Stored bits per element: codes, and two half-precision numbers per group (FlexGen, section 5).
WEIGHT_BITS = {"native": 0.0, "w4g32": 5.0, "w4g64": 4.5, "w4g128": 4.25, "w8": 8.25}
CACHE_BITS = {"native": 0.0, "kv4": 4.5, "kv8": 8.25}


@dataclass(frozen=True)
class Runtime:
    """How a system executes a block.

    overlap: "none" adds up all links and compute; "step" runs them side by side but ends them together after every
    micro-batch of every stage (FlexGen's Algorithm 1); "block" only keeps data in order, so that a layer's work over
    the whole block overlaps. Cache in host memory that is not pinned is first copied into a pinned relay by the thread
    that launches compute, so it does not overlap. Weights in host memory are pinned, go through pinned staging (copied
    there and on to the device side by side), are copied from pageable memory, or are relayed like such a cache.
    `activation_stream`: activations move beside compute, not on its stream. `one_hop_thread`: the thread that reads
    the disk also copies to the device. `fused`: quantised weights and cache are read by the products themselves.
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
class Block:
    """`micro_batches` micro-batches of `micro_batch` sequences that share one pass over the weights."""

    micro_batch: int
    micro_batches: int = 1
    order: Literal["row", "zigzag", "diagonal"] = "zigzag"
    weight_format: str = "native"
    cache_format: str = "native"
    host_attention: bool = False

    @property
    def size(self) -> int:
        """Sequences in the block."""
        return self.micro_batch * self.micro_batches


@dataclass(frozen=True)
class Piece:
    """Something that happens `count` times and takes the maximum (the sum if `serial`) of its lanes, in seconds."""

    phase: Literal["prefill", "decode"]
    count: float
    lanes: Mapping[str, Affine]
    serial: bool = False

    def rows(self) -> list[Affine]:
        """The affine functions whose maximum one occurrence takes."""
        return [np.sum(list(self.lanes.values()), axis=0)] if self.serial else list(self.lanes.values())


@dataclass(frozen=True)
class BlockCosts:
    """Everything a placement needs: pieces of time, bytes per tier, and the capacities those must respect."""

    pieces: tuple[Piece, ...]
    memory: Mapping[str, Affine]
    capacity: Mapping[str, int]
    tokens: int  # new tokens the block produces

    def time_s(self, x: Affine, phase: str | None = None) -> float:
        """Seconds of the block (or one phase of it) at the shares `x`, an array of N shares and a final 1."""
        return float(sum(p.count * max(row @ x for row in p.rows()) for p in self.pieces if phase in (None, p.phase)))

    def busy_s(self, x: Affine) -> dict[str, float]:
        """Seconds per lane over the whole block."""
        busy: dict[str, float] = {}
        for piece in self.pieces:
            for lane, row in piece.lanes.items():
                busy[lane] = busy.get(lane, 0.0) + piece.count * float(row @ x)
        return busy

    def nbytes(self, x: Affine) -> dict[str, float]:
        """Peak bytes per tier at the shares `x`."""
        return {tier: float(row @ x) for tier, row in self.memory.items()}


def var(tensor: str, *tiers: str) -> Affine:
    """The share of `tensor` on any of `tiers` (all: every tier)."""
    row = np.zeros(N + 1)
    for tier in tiers or TIERS:
        row[INDEX[tensor, tier]] = 1.0
    return row


def shares(weights: tuple[float, float, float], cache: tuple[float, float, float],
           activations: tuple[float, float, float], checkpoints: tuple[float, float, float] = (0, 0, 0)) -> Affine:
    """A placement by FlexGen's nine shares (device, host, disk); cache and checkpoint shares together add up to 1."""
    return np.array([*weights, *weights, *weights, *cache, *checkpoints, *activations, 1.0])


def weight_ratio(model: ModelShape, block: Block) -> float:
    """Stored bytes per byte of the model's own format."""
    bits = WEIGHT_BITS[block.weight_format]
    return bits / (8 * model.itemsize) if bits else 1.0


def cache_ratio(model: ModelShape, block: Block) -> float:
    bits = CACHE_BITS[block.cache_format]
    return bits / (8 * model.itemsize) if bits else 1.0


def block_costs(model: ModelShape, rates: MachineRates, block: Block, prompt: int, new_tokens: int, *,
                runtime: Runtime | None = None, capacity: Mapping[str, int] | None = None,
                context: float | None = None) -> BlockCosts:
    """Costs of prefilling `prompt` tokens and generating `new_tokens` for every sequence of `block`.

    The last new token is never appended, so decode runs new_tokens - 1 steps, over `context` cached tokens, by default
    prompt + new_tokens / 2 (the average, A.3). `capacity` overrides the machine's bytes per tier.
    """
    runtime = runtime or Runtime()
    context = prompt + new_tokens / 2 if context is None else context
    builder = _Builder(model, rates, block, runtime, prompt, new_tokens, context)
    limits = {"device": rates.device_nbytes, "host": rates.host_nbytes, "disk": rates.disk_nbytes, **(capacity or {})}
    return BlockCosts(tuple(builder.pieces()), builder.memory(), limits, block.size * new_tokens)


@dataclass(frozen=True)
class _Builder:
    model: ModelShape
    rates: MachineRates
    block: Block
    runtime: Runtime
    prompt: int
    new_tokens: int
    context: float

    # -- time

    def pieces(self) -> list[Piece]:
        found: list[Piece] = []
        first = self.model.layers[0]
        fill = self._weight_lanes(first, ATTENTION)
        found.append(Piece("prefill", 1, fill, serial=True))  # nothing runs beside the very first load
        for kind in self.model.layers:
            found += self._layer(kind, "prefill", self.prompt, self.prompt, 1)
            if self.new_tokens > 1:
                found += self._layer(kind, "decode", 1, self.context, self.new_tokens - 1)
        return [*found, self._head("prefill", 1), self._head("decode", self.new_tokens - 1)]

    def _layer(self, kind: LayerShape, phase: Literal["prefill", "decode"], tokens: int, context: float,
               steps: int) -> list[Piece]:
        count, batches = kind.count * steps, self.block.micro_batches
        loads = {stage: self._weight_lanes(kind, stage) for stage in (ATTENTION, MLP)}
        work = {stage: self._work_lanes(kind, stage, phase, tokens, context) for stage in (ATTENTION, MLP)}
        if self.runtime.overlap == "step":
            found = []
            for stage, other in ((ATTENTION, MLP), (MLP, ATTENTION)):
                first = _added(loads[other], work[stage])  # the next stage's weights come during this stage
                if self.block.order == "row":
                    found.append(Piece(phase, count * batches, first))
                    continue
                found.append(Piece(phase, count, first))
                if batches > 1:
                    found.append(Piece(phase, count * (batches - 1), work[stage]))
            return found
        passes = batches if self.block.order == "row" else 1
        lanes = _added(_scaled(_added(loads[ATTENTION], loads[MLP]), passes),
                       _scaled(_added(work[ATTENTION], work[MLP]), batches))
        return [Piece(phase, count, lanes, serial=self.runtime.overlap == "none")]

    def _weight_lanes(self, kind: LayerShape, stage: str) -> dict[str, Affine]:
        nbytes = kind.elements(stage) * self.model.itemsize * weight_ratio(self.model, self.block)
        host, disk = nbytes * var(stage, "host"), nbytes * var(stage, "disk")
        if self.runtime.host_weights == "relayed":
            return _added(self._load(0 * ONE, disk), {"compute": host / self._relay(self.block.weight_format)})
        return self._load(host, disk, self._weight_rate())

    def _relay(self, stored: str) -> float:
        """Bytes per second from memory that is not pinned through a pinned relay, by what is stored there."""
        return self.rates.pageable_bytes_per_s if stored == "native" else self.rates.packed_pageable_bytes_per_s

    def _weight_rate(self) -> float:
        """Weights from host memory; a pageable copy is a copy into pinned memory, then one from there."""
        pinned, pageable = self.rates.host_to_device_bytes_per_s, self.rates.pageable_bytes_per_s
        if self.runtime.host_weights == "staged" and pageable < pinned:
            return min(pinned, 1 / (1 / pageable - 1 / pinned))
        return pageable if self.runtime.host_weights == "pageable" else pinned

    def _load(self, host: Affine, disk: Affine, up: float = 0.0, to_device: bool = True) -> dict[str, Affine]:
        """Lanes that bring these bytes from host memory (at `up`, or pinned) and disk to the device, or to the host."""
        rates, lanes = self.rates, {}
        pinned = rates.host_to_device_bytes_per_s
        if to_device:
            lanes["host_to_device"] = host / (up or pinned) + disk / pinned
        if rates.disk_nbytes:
            hop = 1 / rates.host_to_device_bytes_per_s if to_device and self.runtime.one_hop_thread else 0.0
            lanes["disk_read"] = disk * (1 / rates.disk_read_bytes_per_s + hop)
        return lanes

    def _store(self, host: Affine, disk: Affine) -> dict[str, Affine]:
        lanes = {"device_to_host": (host + disk) / self.rates.device_to_host_bytes_per_s}
        if self.rates.disk_nbytes:
            lanes["disk_write"] = disk / self.rates.disk_write_bytes_per_s
        return lanes

    def _work_lanes(self, kind: LayerShape, stage: str, phase: str, tokens: int, context: float) -> dict[str, Affine]:
        """One micro-batch through one stage: activations both ways, products, and in the attention stage the cache."""
        rates, batch = self.rates, self.block.micro_batch
        moved = batch * tokens * kind.hidden * self.model.itemsize
        host, disk = moved * var("activation", "host"), moved * var("activation", "disk")
        lanes: dict[str, Affine] = {}
        if not self.runtime.activation_stream:
            copied = 1 / rates.host_to_device_bytes_per_s + 1 / rates.device_to_host_bytes_per_s
            lanes, host = {"compute": copied * host}, 0 * ONE
        lanes = _added(lanes, _added(self._load(host, disk), self._store(host, disk)))
        native = kind.elements(stage) * self.model.itemsize
        read = native * (weight_ratio(self.model, self.block) if self.runtime.fused else 1.0)
        compute = max(kind.flops(stage) * batch * tokens / rates.gemm_flops, read / rates.memory_bytes_per_s) * ONE
        if self.block.weight_format != "native" and not self.runtime.fused:
            compute = compute + native / self._dequantise() * ONE
        lanes = _added(lanes, {"compute": compute})
        if stage == ATTENTION:
            attend = self._prefill_attention if phase == "prefill" else self._decode_attention
            lanes = _added(lanes, attend(kind, context))
        return lanes

    def _dequantise(self) -> float:
        return self.rates.dequantise_bytes_per_s or self.rates.memory_bytes_per_s / 10

    def _cache_nbytes(self, kind: LayerShape, tokens: float) -> tuple[float, float, float]:
        """Bytes of one micro-batch's cache of one layer: K and V unquantised, as stored, and checkpoints."""
        kept = self.block.micro_batch * (min(tokens, kind.window) if kind.window else tokens)
        native = kept * kind.kv_elements * self.model.itemsize
        return native, native * cache_ratio(self.model, self.block), kept * kind.hidden * self.model.itemsize

    def _prefill_attention(self, kind: LayerShape, context: float) -> dict[str, Affine]:
        native, stored, checkpoint = self._cache_nbytes(kind, context + 1)
        attended = min(context, kind.window) if kind.window else context
        flops = 4 * self.block.micro_batch * context * attended * kind.heads * kind.head_dim
        compute = flops / self.rates.attention_flops * ONE
        if self.block.cache_format != "native" and not self.runtime.fused:
            compute = compute + native / self._dequantise() * var("kv")
        lanes = self._store(stored * var("kv", "host") + checkpoint * var("checkpoint", "host"),
                            stored * var("kv", "disk") + checkpoint * var("checkpoint", "disk"))
        return _added(lanes, {"compute": compute})

    def _decode_attention(self, kind: LayerShape, context: float) -> dict[str, Affine]:
        """Attention over the cache where it lies (host attention) or on the device, which then must get it."""
        rates, block = self.rates, self.block
        native, stored, checkpoint = self._cache_nbytes(kind, context)
        delegated = block.host_attention and rates.host_attention_bytes_per_s > 0
        on_device = var("kv", "device") if delegated else var("kv")
        compute = native / rates.attention_bytes_per_s * (on_device + var("checkpoint"))
        if block.cache_format != "native" and not self.runtime.fused:
            compute = compute + native / self._dequantise() * on_device
        recompute = kind.recompute_flops / (kind.hidden * self.model.itemsize) * checkpoint  # operations
        compute = compute + recompute / rates.gemm_flops * var("checkpoint")
        host = checkpoint * var("checkpoint", "host")
        disk = checkpoint * var("checkpoint", "disk")
        lanes: dict[str, Affine] = {}
        if delegated:
            compute = compute + native / rates.host_attention_bytes_per_s * var("kv", "host", "disk")
            lanes = self._load(0 * ONE, stored * var("kv", "disk"), to_device=False)
        else:
            host, disk = host + stored * var("kv", "host"), disk + stored * var("kv", "disk")
        if not self.runtime.pinned_cache:
            compute, host = compute + host / self._relay(block.cache_format), 0 * ONE
        lanes = _added(lanes, self._load(host, disk))
        _, new, new_checkpoint = self._cache_nbytes(kind, 1)
        lanes = _added(lanes, self._store(new * var("kv", "host") + new_checkpoint * var("checkpoint", "host"),
                                          new * var("kv", "disk") + new_checkpoint * var("checkpoint", "disk")))
        return _added(lanes, {"compute": compute})

    def _head(self, phase: Literal["prefill", "decode"], steps: int) -> Piece:
        """The output projection: one token per sequence and step."""
        batch, nbytes = self.block.micro_batch, self.model.head_elements * self.model.itemsize
        once = max(self.model.head_flops * batch / self.rates.gemm_flops, nbytes / self.rates.memory_bytes_per_s)
        stored = nbytes * weight_ratio(self.model, self.block)
        lanes = self._load(stored * var("outside", "host"), stored * var("outside", "disk"),
                           self._weight_rate())
        lanes = _added(lanes, {"compute": once * self.block.micro_batches * ONE})
        return Piece(phase, steps, lanes, serial=self.runtime.overlap == "none")

    # -- memory

    def memory(self) -> dict[str, Affine]:
        """Peak bytes per tier: homes of everything, and on the way device staging and working memory (A.3)."""
        model, block = self.model, self.block
        ratio, itemsize = weight_ratio(model, block), model.itemsize
        homes = {tier: 0 * ONE for tier in TIERS}
        stored, checkpoints = self._cache_homes()
        for tier in TIERS:
            for kind in model.layers:
                for stage in (ATTENTION, MLP):
                    homes[tier] = homes[tier] + kind.count * kind.elements(stage) * itemsize * ratio * var(stage, tier)
            outside = sum(t.elements for t in model.outside) * itemsize * ratio
            kept = block.size * self.prompt * model.layers[0].hidden * itemsize
            homes[tier] = (homes[tier] + outside * var("outside", tier) + stored * var("kv", tier)
                           + checkpoints * var("checkpoint", tier) + kept * var("activation", tier))
        return {"device": homes["device"] + self._device_work(), "host": homes["host"] + self._host_work(),
                "disk": homes["disk"]}

    def _cache_homes(self) -> tuple[float, float]:
        """Bytes of the whole block's cache over all layers as K and V, and as checkpoints."""
        tokens = self.prompt + self.new_tokens
        if self.block.order == "diagonal" and self.new_tokens > 1:  # sequences stand at different lengths (A.2.1)
            n = self.new_tokens
            tokens = int((2 * self.prompt + n) * (n - 1) / (2 * n)) + 1
        batches = 1 if self.block.order == "row" else self.block.micro_batches
        per_layer = [(k.count, *self._cache_nbytes(k, tokens)) for k in self.model.layers]
        return (sum(n * stored * batches for n, _, stored, _ in per_layer),
                sum(n * checkpoint * batches for n, _, _, checkpoint in per_layer))

    def _device_work(self) -> Affine:
        model, block, runtime = self.model, self.block, self.runtime
        itemsize, longest = model.itemsize, self.prompt + self.new_tokens
        work = 0 * ONE
        for stage in (ATTENTION, MLP):  # the stage that runs and the one that arrives
            largest = max(k.elements(stage) for k in model.layers) * itemsize
            work = work + largest * weight_ratio(model, block) * var(stage, "host", "disk")
        if block.weight_format != "native" and not runtime.fused:
            work = work + max(k.elements(s) for k in model.layers for s in (ATTENTION, MLP)) * itemsize * ONE
        tokens = block.micro_batch * self.prompt
        hidden = model.layers[0].hidden
        work = work + tokens * hidden * itemsize * var("activation", "host", "disk")
        live = max(k.activation_elements for k in model.layers) * tokens
        scores = max(2 * block.micro_batch * k.heads * self.prompt**2 for k in model.layers) if runtime.scores else 0
        work = work + max(live, scores) * itemsize * ONE
        native, stored, checkpoint = (max(x) for x in zip(*(self._cache_nbytes(k, longest) for k in model.layers),
                                                          strict=True))
        if not block.host_attention:
            work = work + 2 * stored * var("kv", "host", "disk")
        work = work + 2 * checkpoint * var("checkpoint", "host", "disk") + native * var("checkpoint")
        if block.cache_format != "native" and not runtime.fused:
            work = work + native * ONE
        return work

    def _host_work(self) -> Affine:
        """Staging of what comes from disk, and of host attention over a cache on disk."""
        model, block = self.model, self.block
        work = 0 * ONE
        for stage in (ATTENTION, MLP):
            largest = max(k.elements(stage) for k in model.layers) * model.itemsize * weight_ratio(model, block)
            work = work + largest * var(stage, "disk")
        stored = max(self._cache_nbytes(k, self.prompt + self.new_tokens)[1] for k in model.layers)
        return work + 2 * stored * var("kv", "disk")


def _added(a: Mapping[str, Affine], b: Mapping[str, Affine]) -> dict[str, Affine]:
    return {lane: a.get(lane, 0 * ONE) + b.get(lane, 0 * ONE) for lane in {**a, **b}}


def _scaled(lanes: Mapping[str, Affine], factor: float) -> dict[str, Affine]:
    return {lane: factor * row for lane, row in lanes.items()}
