"""What a cache on disk takes of each tier."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import fx

from forebay.passes.lower.stage_cache import RING, WORD, input_sizes, staged_layers
from forebay.rewriter.ir.alignment import ALIGNMENT, PAGE_NBYTES
from forebay.rewriter.ir.plan import Block


@dataclass(frozen=True)
class StagedCache:
    """Bytes, by buffer name, of each layer's piece of the spill file, of the tails that stay on the device, of the
    staging slots and of the inputs that tell which blocks move."""

    files: Mapping[str, int]
    tails: Mapping[str, int]
    slots: Mapping[str, int]
    inputs: Mapping[str, int]

    @property
    def device_nbytes(self) -> int:
        """Bytes of the device arena beside the tails, at most."""
        return sum(n + PAGE_NBYTES for n in self.slots.values()) + sum(n + ALIGNMENT for n in self.inputs.values())

    def buffers(self) -> Iterator[tuple[str, str, str, int, int]]:
        """All but the tails, as (name, kind, arena, nbytes, alignment)."""
        for name, nbytes in self.inputs.items():
            yield name, "io", "device", nbytes, ALIGNMENT
        for name, nbytes in self.slots.items():
            yield name, "slot", "device", nbytes, PAGE_NBYTES
        for name, nbytes in self.files.items():
            yield name, "cache", RING, nbytes, PAGE_NBYTES


def staged_cache(step: fx.GraphModule, block: Block) -> StagedCache:
    """What the cache of all micro-batches of `block` takes, from the step graph of one."""
    layers, count = staged_layers(step, block), block.micro_batches
    largest = max(layer.nbytes for layer in layers.values())
    sizes = input_sizes(next(iter(layers.values())))
    return StagedCache(
        {f"cache_{i}": count * layer.nbytes for i, layer in layers.items()},
        {f"tail_{i}": count * layer.tail_nbytes for i, layer in layers.items()},
        {f"{RING}{i}": largest for i in range(block.cache_slots)},
        {name: count * size * WORD for name, size in sizes.items()})
