"""Time and memory of one block of generation as linear functions of where weights, cache and activations lie.

FlexGen's cost model (Appendix A.3), T = sum over layers of the maximum over links and compute, with what it leaves out:
two stages per layer, checkpoints of the layer input in place of K and V, and formats. All memory that copies read is
pinned, and only data keep things in order, so that a layer's work over the whole block overlaps.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np

from forebay.kernels.formats.table import cache_format, weight_format
from forebay.rewriter.policy.shares import ONE, TIERS, Affine, added, scaled, var
from forebay.rewriter.predict.estimator import Estimator
from forebay.rewriter.predict.model_shapes import ATTENTION, MLP, LayerShape, ModelShape

Phase = Literal["prefill", "decode"]


@dataclass(frozen=True)
class BlockShape:
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

    phase: Phase
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


@dataclass(frozen=True)
class BlockModel:
    """How a block of `model` runs: prefill of `prompt` tokens, then `new_tokens`, for every sequence.

    The last new token is never appended, so decode runs new_tokens - 1 steps, over `context` cached tokens (0: prompt +
    new_tokens / 2, the average, A.3). Memory is for these; times and tokens are of `typical` prompts and answers where
    they are given. Another system's runtime is a subclass that overrides what it does otherwise.
    """

    model: ModelShape
    times: Estimator
    block: BlockShape
    prompt: int
    new_tokens: int
    capacity: Mapping[str, int]  # bytes per tier
    context: float = 0.0
    typical: tuple[int, int] | None = None

    def costs(self) -> BlockCosts:
        return BlockCosts(tuple(self.pieces()), self.memory(), self.capacity, self.block.size * self._timed[1])

    @property
    def _timed(self) -> tuple[int, int]:
        return self.typical or (self.prompt, self.new_tokens)

    # -- what another system does otherwise

    def layer_pieces(self, phase: Phase, count: float, loads: Mapping[str, Mapping[str, Affine]],
                     work: Mapping[str, Mapping[str, Affine]]) -> list[Piece]:
        """`count` layers from the lanes of each stage: loading its weights, and one micro-batch's work."""
        passes, batches = self.block.micro_batches if self.block.order == "row" else 1, self.block.micro_batches
        lanes = added(scaled(added(*loads.values()), passes), scaled(added(*work.values()), batches))
        return [Piece(phase, count, lanes)]

    def head_piece(self, phase: Phase, count: float, lanes: Mapping[str, Affine]) -> Piece:
        return Piece(phase, count, lanes)

    def load_weights(self, host: Affine, disk: Affine) -> dict[str, Affine]:
        """Lanes that bring these bytes of a stage's weights from host and disk to the device."""
        return self.load(host, disk, self.host_weight_byte_s())

    def host_weight_byte_s(self) -> float:
        """Seconds per byte of weights in host memory; 0: as pinned memory is copied."""
        return 0.0

    def load_cache(self, host: Affine, disk: Affine) -> dict[str, Affine]:
        return self.load(host, disk)

    def move_activations(self, host: Affine, disk: Affine) -> dict[str, Affine]:
        return added(self.load(host, disk), self.store(host, disk))

    def disk_hop_s(self, to_device: bool) -> float:
        """Seconds per byte that a reading thread is kept by what follows a read."""
        return 0.0

    def expand_s(self, native_nbytes: float) -> float:
        """Seconds to expand packed codes to so many bytes before use; products and attention here read codes."""
        return 0.0

    def weight_ratio(self) -> float:
        """Stored bytes per byte of the model's own format."""
        return weight_format(self.block.weight_format).ratio(self.model.layers[0].hidden, self.model.itemsize)

    def cache_ratio(self) -> float:
        return cache_format(self.block.cache_format).ratio(self.model.layers[0].head_dim, self.model.itemsize)

    @property
    def product_format(self) -> str:
        """The dtype or format that products read."""
        return self.model.dtype if self.block.weight_format == "native" else self.block.weight_format

    def working_nbytes(self) -> float:
        """Device bytes that a micro-batch's computation takes beside its inputs."""
        tokens = self.block.micro_batch * self.prompt
        return max(k.activation_elements for k in self.model.layers) * tokens * self.model.itemsize

    # -- time

    def pieces(self) -> list[Piece]:
        found: list[Piece] = []
        fill = self._weight_lanes(self.model.layers[0], ATTENTION)
        found.append(Piece("prefill", 1, fill, serial=True))  # nothing runs beside the very first load
        prompt, new_tokens = self._timed
        context = self.context or prompt + new_tokens / 2
        for kind in self.model.layers:
            found += self._layer(kind, "prefill", prompt, prompt, 1)
            if new_tokens > 1:
                found += self._layer(kind, "decode", 1, context, new_tokens - 1)
        return [*found, self._head("prefill", 1), self._head("decode", new_tokens - 1)]

    def _layer(self, kind: LayerShape, phase: Phase, tokens: int, context: float, steps: int) -> list[Piece]:
        loads = {stage: self._weight_lanes(kind, stage) for stage in (ATTENTION, MLP)}
        work = {stage: self._work_lanes(kind, stage, phase, tokens, context) for stage in (ATTENTION, MLP)}
        return self.layer_pieces(phase, kind.count * steps, loads, work)

    def _weight_lanes(self, kind: LayerShape, stage: str) -> dict[str, Affine]:
        nbytes = kind.elements(stage) * self.model.itemsize * self.weight_ratio()
        return self.load_weights(nbytes * var(stage, "host"), nbytes * var(stage, "disk"))

    def load(self, host: Affine, disk: Affine, host_byte_s: float = 0.0, to_device: bool = True) -> dict[str, Affine]:
        """Lanes that bring these bytes from host (at host_byte_s each, or pinned) and disk to the device, or, of the
        disk's, to the host."""
        times, lanes = self.times, {}
        through_host = times.near_disk == "host"
        if to_device:
            pinned = times.byte_s("host", "device") if self.capacity["host"] or through_host else 0.0
            lanes["host_to_device"] = (host_byte_s or pinned) * host + (pinned * disk if through_host else 0 * ONE)
        if self.capacity["disk"]:
            near = times.near_disk if to_device else "host"
            lanes["disk_read"] = disk * (times.byte_s("disk", near) + self.disk_hop_s(to_device))
        return lanes

    def store(self, host: Affine, disk: Affine) -> dict[str, Affine]:
        """Lanes that take these bytes from the device to host and disk."""
        times, lanes = self.times, {}
        through_host = times.near_disk == "host"
        if self.capacity["host"] or through_host:
            down = times.byte_s("device", "host")
            lanes["device_to_host"] = down * host + (down * disk if through_host else 0 * ONE)
        if self.capacity["disk"]:
            lanes["disk_write"] = disk * times.byte_s(times.near_disk, "disk")
        return lanes

    def products_s(self, shapes: list[tuple[int, int]], rows: float) -> float:
        """Seconds of products of `rows` rows with weights of these rows and columns, in the format that they read."""
        read = self.model.itemsize * (1.0 if self.product_format == self.model.dtype else self.weight_ratio())
        return sum(self.times.product_s(self.product_format, rows, n, k, nbytes=n * k * read) for n, k in shapes)

    def _work_lanes(self, kind: LayerShape, stage: str, phase: Phase, tokens: int, context: float) -> dict[str, Affine]:
        """One micro-batch through one stage: activations both ways, products, and in the attention stage the cache."""
        batch, itemsize = self.block.micro_batch, self.model.itemsize
        moved = batch * tokens * kind.hidden * itemsize
        lanes = self.move_activations(moved * var("activation", "host"), moved * var("activation", "disk"))
        compute = self.products_s(kind.matrices(stage), batch * tokens * kind.active_share(stage))
        if self.block.weight_format != "native":
            compute += self.expand_s(kind.elements(stage) * itemsize)
        lanes = added(lanes, {"compute": compute * ONE})
        if stage == ATTENTION:
            attend = self._prefill_attention if phase == "prefill" else self._decode_attention
            lanes = added(lanes, attend(kind, context))
        return lanes

    def cache_nbytes(self, kind: LayerShape, tokens: float) -> tuple[float, float, float]:
        """Bytes of one micro-batch's cache of one layer: K and V unquantized, as stored, and checkpoints."""
        kept = self.block.micro_batch * (min(tokens, kind.window) if kind.window else tokens)
        native = kept * kind.kv_elements * self.model.itemsize
        return native, native * self.cache_ratio(), kept * kind.hidden * self.model.itemsize

    def _prefill_attention(self, kind: LayerShape, context: float) -> dict[str, Affine]:
        native, stored, checkpoint = self.cache_nbytes(kind, context + 1)
        flops = kind.attended_flops(self.block.micro_batch, kind.heads, context, context)
        compute = self.times.attention_s(self.model.dtype, native, flops) * ONE
        if self.block.cache_format != "native":
            compute = compute + self.expand_s(native) * var("kv")
        lanes = self.store(stored * var("kv", "host") + checkpoint * var("checkpoint", "host"),
                           stored * var("kv", "disk") + checkpoint * var("checkpoint", "disk"))
        return added(lanes, {"compute": compute})

    def _decode_attention(self, kind: LayerShape, context: float) -> dict[str, Affine]:
        """Attention over the cache where it lies (host attention) or on the device, which then must get it."""
        times, block, dtype = self.times, self.block, self.model.dtype
        native, stored, checkpoint = self.cache_nbytes(kind, context)
        delegated = block.host_attention and math.isfinite(times.host_attention_s(native))
        on_device = var("kv", "device") if delegated else var("kv")
        flops = kind.attended_flops(block.micro_batch, kind.heads, 1, context)
        compute = times.attention_s(dtype, native, flops) * (on_device + var("checkpoint"))
        if block.cache_format != "native":
            compute = compute + self.expand_s(native) * on_device
        kept = checkpoint / (kind.hidden * self.model.itemsize)  # tokens
        compute = compute + self.products_s([(kind.kv_elements, kind.hidden)], kept) * var("checkpoint")
        host = checkpoint * var("checkpoint", "host")
        disk = checkpoint * var("checkpoint", "disk")
        lanes: dict[str, Affine] = {}
        if delegated:
            compute = compute + times.host_attention_s(native) * var("kv", "host", "disk")
            lanes = self.load(0 * ONE, stored * var("kv", "disk"), to_device=False)
        else:
            host, disk = host + stored * var("kv", "host"), disk + stored * var("kv", "disk")
        _, new, new_checkpoint = self.cache_nbytes(kind, 1)
        return added(lanes, self.load_cache(host, disk),
                     self.store(new * var("kv", "host") + new_checkpoint * var("checkpoint", "host"),
                                new * var("kv", "disk") + new_checkpoint * var("checkpoint", "disk")),
                     {"compute": compute})

    def _head(self, phase: Phase, steps: int) -> Piece:
        """The output projection: one token per sequence and step."""
        model, hidden = self.model, self.model.layers[0].hidden
        read = model.head_elements * model.itemsize
        once = self.times.product_s(model.dtype, self.block.micro_batch, model.head_elements // hidden, hidden,
                                    nbytes=read)
        stored = read * self.weight_ratio()
        lanes = self.load(stored * var("outside", "host"), stored * var("outside", "disk"), self.host_weight_byte_s())
        return self.head_piece(phase, steps, added(lanes, {"compute": once * self.block.micro_batches * ONE}))

    # -- memory

    def memory(self) -> dict[str, Affine]:
        """Peak bytes per tier: homes of everything, and on the way device staging and working memory (A.3)."""
        model, block = self.model, self.block
        ratio, itemsize = self.weight_ratio(), model.itemsize
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
        per_layer = [(k.count, *self.cache_nbytes(k, tokens)) for k in self.model.layers]
        return (sum(n * stored * batches for n, _, stored, _ in per_layer),
                sum(n * checkpoint * batches for n, _, _, checkpoint in per_layer))

    def _device_work(self) -> Affine:
        model, block = self.model, self.block
        itemsize, longest = model.itemsize, self.prompt + self.new_tokens
        work = self.working_nbytes() * ONE
        for stage in (ATTENTION, MLP):  # the stage that runs and the one that arrives
            largest = max(k.elements(stage) for k in model.layers) * itemsize
            work = work + largest * self.weight_ratio() * var(stage, "host", "disk")
        inputs = block.micro_batch * self.prompt * model.layers[0].hidden * itemsize
        work = work + inputs * var("activation", "host", "disk")
        native, stored, checkpoint = (max(x) for x in zip(*(self.cache_nbytes(k, longest) for k in model.layers),
                                                          strict=True))
        if not block.host_attention:
            work = work + 2 * stored * var("kv", "host", "disk")
        return work + 2 * checkpoint * var("checkpoint", "host", "disk") + native * var("checkpoint")

    def _host_work(self) -> Affine:
        """Staging of what comes from disk, and of host attention over a cache on disk."""
        work = 0 * ONE
        for stage in (ATTENTION, MLP):
            largest = max(k.elements(stage) for k in self.model.layers) * self.model.itemsize * self.weight_ratio()
            work = work + largest * var(stage, "disk")
        stored = max(self.cache_nbytes(k, self.prompt + self.new_tokens)[1] for k in self.model.layers)
        return work + 2 * stored * var("kv", "disk")
