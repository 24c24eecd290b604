"""Copy a sequence's cache out of its batch slot and back into any slot.

A cache on the device has rows of tokens; one on slower tiers has blocks of tokens, which move as they lie. States that
have no row for each token move whole.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from forebay.rewriter.ir.cache_layout import CACHE_HOME_ARENAS, CACHE_STAGING, cache_home_name
from forebay.rewriter.ir.plan import BufferPlacement, Plan
from forebay.rewriter.ir.program import TensorRef, row_major_strides
from forebay.rewriter.ir.state import LayerStates, state_name
from forebay.runtime.devices.device import Device
from forebay.runtime.disk.spill_file import SpillFile
from forebay.runtime.run.arena import Arena
from forebay.runtime.run.cache_blocks import CacheBlocks


@dataclass(frozen=True)
class _Blocks:
    """The places of a sequence's blocks in one layer: in memory, [blocks, nbytes], or from `offset` on in a file."""

    nbytes: int
    offset: int
    memory: torch.Tensor | None = None
    file: SpillFile | None = None


class CacheSlots:
    """Copies what the cache of a plan on a device holds of some tokens to host memory and back.

    Args:
        blocks: Knows where the sequences of a staged cache stand; None of a cache on the device.
        states: Those of each layer.

    Attributes:
        unit: Tokens are copied in multiples of so many, from a multiple on.
    """

    def __init__(self, plan: Plan, device: Device, blocks: CacheBlocks | None, states: LayerStates) -> None:
        self.plan, self.device, self.blocks = plan, device, blocks
        self.unit = 1 if blocks is None else math.lcm(blocks.tokens, plan.schedule.batching.stretch)
        self._rows = list(self._views(states)) if blocks is None else []
        self._bounce: Arena | None = None

    def read(self, slot: int, first: int, end: int) -> torch.Tensor:
        """The bytes of tokens [first, end) of a slot's sequence, and of its states as they are now."""
        if self.blocks is None:
            return torch.cat([piece.reshape(-1).cpu() for piece in self._pieces(slot, first, end)])
        self.device.finish()  # blocks may still be on their way out
        return torch.cat([self._read_block(place, row) for place, row in self._places(self.blocks, slot, first, end)])

    def write(self, slot: int, first: int, end: int, data: torch.Tensor) -> None:
        """Give a slot's sequence tokens [first, end), and the states after them, as `read` found them."""
        at = 0
        if self.blocks is None:
            for piece in self._pieces(slot, first, end):
                piece.copy_(data[at : at + piece.numel()].view(piece.shape))
                at += piece.numel()
            return
        self.device.finish()  # blocks of who had the slot before may be, too
        for place, row in self._places(self.blocks, slot, first, end):
            self._write_block(place, row, data[at : at + place.nbytes])
            at += place.nbytes
        self.blocks.stand_at(end, slot)

    # -- on the device

    def _views(self, states: LayerStates) -> Iterator[tuple[torch.Tensor, bool]]:
        """Each cache as bytes [B, rows, L, width], and whether it has a row for each token; others are one row."""
        plan, work = self.plan, self.plan.workload
        grows = {state_name(tensor.name, i): (tensor.grows, tensor.shape) for i, layer in enumerate(states)
                 for spec in layer for tensor in spec.tensors}
        tokens = work.prompt if plan.prefill_overlays_kv_cache else work.context
        for b in plan.buffers_of("prefill"):
            if b.kind != "cache" or not b.nbytes or b.name not in grows:  # copies that drafts may fall back to
                continue
            growing, sizes = grows[b.name]
            rows, length = (int(sizes[1]), tokens) if growing else (1, 1)
            shape = (work.batch, rows, length, b.nbytes // (work.batch * rows * length))
            ref = TensorRef(b.arena, b.offset, "uint8", shape, row_major_strides(shape), b.name)
            yield self.device.tensor(ref), growing

    def _pieces(self, slot: int, first: int, end: int) -> Iterator[torch.Tensor]:
        for view, growing in self._rows:
            yield view[slot, :, first:end] if growing else view[slot]

    # -- on slower tiers

    def _places(self, blocks: CacheBlocks, slot: int, first: int, end: int) -> Iterator[tuple[_Blocks, int]]:
        """The blocks that hold tokens [first, end) of a slot: a layer's, and the row among them."""
        batching, buffers = self.plan.schedule.batching, {b.name: b for b in self.plan.buffers if b.kind == "cache"}
        layers = [i for i in range(len(buffers)) if any(
            cache_home_name(i, tier) in buffers for tier in CACHE_HOME_ARENAS)]
        part, number = divmod(slot, blocks.each)
        for layer, tiers in zip(layers, batching.cache_homes(len(layers)), strict=True):
            tier = tiers[part]
            place = self._place(buffers[cache_home_name(layer, tier)], tiers.count(tier) * blocks.each * blocks.kept)
            before = (tiers[:part].count(tier) * blocks.each + number) * blocks.kept
            for row in blocks.rows(first, end):
                yield place, before + row

    def _place(self, b: BufferPlacement, count: int) -> _Blocks:
        nbytes = b.nbytes // count
        if b.arena == CACHE_STAGING:
            return _Blocks(nbytes, b.offset, file=self.device.spill_file(b.arena))
        ref = TensorRef(b.arena, b.offset, "uint8", (count, nbytes), (nbytes, 1), b.name)
        return _Blocks(nbytes, b.offset, memory=self.device.tensor(ref))

    def _read_block(self, place: _Blocks, row: int) -> torch.Tensor:
        if place.memory is not None:
            return place.memory[row].cpu()
        file, page, at = place.file, self._aligned(place.nbytes), place.offset + row * place.nbytes
        assert file is not None
        if os.preadv(file.fd, [page.numpy().data], at) != place.nbytes:
            raise file.truncated(at, place.nbytes)
        return page.clone()

    def _write_block(self, place: _Blocks, row: int, data: torch.Tensor) -> None:
        if place.memory is not None:
            place.memory[row].copy_(data)
            return
        file, page, at = place.file, self._aligned(place.nbytes), place.offset + row * place.nbytes
        assert file is not None
        page.copy_(data)
        done = os.pwritev(file.fd, [page.numpy().data], at)
        if done != place.nbytes:
            raise OSError(f"the disk took {done} of {place.nbytes} bytes at offset {at} of the spill file {file.name}")
        file.settle(at, place.nbytes)

    def _aligned(self, nbytes: int) -> torch.Tensor:
        """Memory that direct reads and writes take."""
        if self._bounce is None or self._bounce.nbytes < nbytes:
            self._bounce = Arena(nbytes)
        return self._bounce.bytes[:nbytes]
