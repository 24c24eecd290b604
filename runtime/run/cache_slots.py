"""Copy a sequence's cache out of its batch slot and back into any slot.

A cache on the device has rows of tokens; one on slower tiers has blocks of tokens, which move as they lie. States that
have no row for each token move whole, on any tier.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from forebay.rewriter.ir.alignment import PAGE_NBYTES, whole_pages
from forebay.rewriter.ir.cache_layout import (
    CACHE_HOME_ARENAS,
    CACHE_STAGING,
    cache_home_name,
    staged_tensors,
    whole_states,
)
from forebay.rewriter.ir.plan import BufferPlacement, Plan
from forebay.rewriter.ir.program import TensorRef, row_major_strides
from forebay.rewriter.ir.state import LayerStates, StateSpec, state_name
from forebay.runtime.devices.device import Device
from forebay.runtime.disk.spill_file import SpillFile
from forebay.runtime.run.arena import Arena
from forebay.runtime.run.cache_blocks import CacheBlocks


@dataclass(frozen=True)
class _SpilledBytes:
    """Bytes of a spill file."""

    file: SpillFile
    offset: int
    nbytes: int


@dataclass(frozen=True)
class _StatesHome:
    """Where the states of one layer live that a step stages: the buffer of each micro-batch, where its part begins
    there, and the bytes of the part. Of states that move whole, `tensors` has the place of each in the part, and its
    bytes of a sequence; others are blocks."""

    parts: tuple[tuple[BufferPlacement, int, int], ...]
    tensors: tuple[tuple[int, int], ...]


class CacheSlots:
    """Copies what the cache of a plan on a device holds of some tokens to host memory and back.

    Args:
        blocks: Knows where the sequences of a staged cache stand; None of a cache on the device.
        states: Those of each layer.

    Attributes:
        unit: Tokens are copied in multiples of so many, from a multiple on.
        stay: Whether what steps wrote to a slot lies where `write` would put it.
        snapshots: Whether some states have no row for each token, so that they are those after the last one.
    """

    def __init__(self, plan: Plan, device: Device, blocks: CacheBlocks | None, states: LayerStates) -> None:
        self.plan, self.device, self.blocks = plan, device, blocks
        self.unit = 1 if blocks is None else math.lcm(blocks.tokens, plan.schedule.batching.stretch)
        self.stay = not plan.prefill_overlays_kv_cache
        self.snapshots = any(not tensor.grows for layer in states for spec in layer for tensor in spec.tensors)
        self._rows = list(self._views(states))
        self._homes = [] if blocks is None else list(self._staged_homes(states))
        self._memory: dict[str, torch.Tensor] = {}  # bytes of homes
        self._bounce: Arena | None = None

    @property
    def layout(self) -> list[tuple[int, int, bool]]:
        """Rows and bytes of each cache on the device, and whether it has a row for each token: `read` gives `write` of
        other slots what it takes where these are equal."""
        return [(view.shape[1], view.shape[3], growing) for view, growing in self._rows]

    def read(self, slot: int, first: int, end: int) -> torch.Tensor:
        """The bytes of tokens [first, end) of a slot's sequence, and of its states as they are now."""
        if self.blocks is not None:
            self.device.finish()  # blocks may still be on their way out
        return torch.cat([self._read(piece) if isinstance(piece, _SpilledBytes) else piece.reshape(-1).cpu()
                          for piece in self._pieces(slot, first, end)])

    def write(self, slot: int, first: int, end: int, data: torch.Tensor) -> None:
        """Give a slot's sequence tokens [first, end), and the states after them, as `read` found them."""
        if self.blocks is not None:
            self.device.finish()  # blocks of who had the slot before may be, too
        at = 0
        for piece in self._pieces(slot, first, end):
            nbytes = piece.nbytes
            part = data[at : at + nbytes]
            if isinstance(piece, _SpilledBytes):
                self._write(piece, part)
            else:
                piece.copy_(part.view(piece.shape))
            at += nbytes

    def stand_at(self, slot: int, tokens: int) -> None:
        """Let a slot's sequence go on after so many tokens, which it was given."""
        if self.blocks is not None:
            self.blocks.stand_at(tokens, slot)

    def _pieces(self, slot: int, first: int, end: int) -> Iterator[torch.Tensor | _SpilledBytes]:
        for view, growing in self._rows:
            yield view[slot, :, first:end] if growing else view[slot]
        if self.blocks is not None:
            yield from self._staged(self.blocks, slot, first, end)

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

    # -- on slower tiers

    def _staged_homes(self, states: LayerStates) -> Iterator[_StatesHome]:
        batching, buffers = self.plan.schedule.batching, {b.name: b for b in self.plan.buffers if b.kind == "cache"}
        layers = [i for i in range(len(states)) if any(
            cache_home_name(i, tier) in buffers for tier in CACHE_HOME_ARENAS)]
        for layer, tiers in zip(layers, batching.cache_homes(len(layers)), strict=True):
            parts = []
            for part, tier in enumerate(tiers):
                b = buffers[cache_home_name(layer, tier)]
                nbytes = b.nbytes // tiers.count(tier)
                parts.append((b, tiers[:part].count(tier) * nbytes, nbytes))
            yield _StatesHome(tuple(parts), () if any(
                spec.in_blocks for spec in states[layer]) else self._whole(states[layer], len(tiers)))

    def _whole(self, states: Sequence[StateSpec], parts: int) -> tuple[tuple[int, int], ...]:
        each, context = self.plan.workload.batch // parts, self.plan.workload.context
        values = staged_tensors(states, each, context, self.plan.schedule.batching)
        return tuple((offset, values[name].nbytes // each) for name, offset in whole_states(values).tensors)

    def _staged(
        self, blocks: CacheBlocks, slot: int, first: int, end: int
    ) -> Iterator[torch.Tensor | _SpilledBytes]:
        """The blocks of each layer that hold tokens [first, end) of a slot, or its states."""
        part, number = divmod(slot, blocks.each)
        rows = blocks.rows(first, end)
        for home in self._homes:
            b, at, nbytes = home.parts[part]
            for offset, of_one in home.tensors:
                yield self._bytes(b, at + offset + number * of_one, of_one)
            of_one = nbytes // (blocks.each * blocks.kept)
            for row in () if home.tensors else rows:
                yield self._bytes(b, at + (number * blocks.kept + row) * of_one, of_one)

    def _bytes(self, b: BufferPlacement, at: int, nbytes: int) -> torch.Tensor | _SpilledBytes:
        if b.arena == CACHE_STAGING:
            return _SpilledBytes(self.device.spill_file(b.arena), b.offset + at, nbytes)
        if b.name not in self._memory:
            self._memory[b.name] = self.device.tensor(TensorRef(b.arena, b.offset, "uint8", (b.nbytes,), (1,), b.name))
        return self._memory[b.name][at : at + nbytes]

    def _read(self, piece: _SpilledBytes) -> torch.Tensor:
        page, at = self._pages(piece)
        if os.preadv(piece.file.fd, [page.numpy().data], at) != page.nbytes:
            raise piece.file.truncated(at, page.nbytes)
        return page[piece.offset - at :][: piece.nbytes].clone()

    def _write(self, piece: _SpilledBytes, data: torch.Tensor) -> None:
        page, at = self._pages(piece)
        if page.nbytes > piece.nbytes:  # with bytes of others
            self._read(piece)
        page[piece.offset - at :][: piece.nbytes].copy_(data)
        done = os.pwritev(piece.file.fd, [page.numpy().data], at)
        if done != page.nbytes:
            raise OSError(f"the disk took {done} of {page.nbytes} bytes at offset {at} of the spill file "
                          f"{piece.file.name}")
        piece.file.settle(at, page.nbytes)

    def _pages(self, piece: _SpilledBytes) -> tuple[torch.Tensor, int]:
        """Memory for the pages of a file that hold a piece, which direct reads and writes take; where they begin."""
        at = piece.offset // PAGE_NBYTES * PAGE_NBYTES
        nbytes = whole_pages(piece.offset + piece.nbytes - at)
        if self._bounce is None or self._bounce.nbytes < nbytes:
            self._bounce = Arena(nbytes)
        return self._bounce.bytes[:nbytes], at
