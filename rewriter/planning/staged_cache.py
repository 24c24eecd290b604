"""What a cache that is staged, from disk or for a prefill of some sequences alone, takes of each tier."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import fx

from forebay.passes.lower.enter_places import ENTERING, PLACES
from forebay.passes.lower.stage_cache import RING, WORD, input_sizes, staged_layers
from forebay.rewriter.ir.alignment import ALIGNMENT, PAGE_NBYTES, aligned
from forebay.rewriter.ir.graph import META, CacheInput
from forebay.rewriter.ir.plan import Block


@dataclass(frozen=True)
class StagedCache:
    """Bytes, by buffer name, of each layer's piece of the spill file, of the tails that stay on the device, of the
    staging slots and of the inputs that tell which blocks and places."""

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


def staged_cache(step: fx.GraphModule, block: Block, prompt: int) -> StagedCache | None:
    """What the cache of all micro-batches of `block` takes, from the decode step graph of one; prompts are of at most
    `prompt` tokens. None where nothing is staged."""
    if block.cache == "device":
        return StagedCache({}, {}, {ENTERING: _staged_nbytes(step, block.entering, prompt)},
                           {PLACES: block.entering * WORD}) if block.entering else None
    layers, count = staged_layers(step, block), block.micro_batches
    largest = max(layer.nbytes // layer.sequences * max(layer.sequences, block.entering) for layer in layers.values())
    sizes = input_sizes(next(iter(layers.values())))
    tails = {ENTERING: block.entering * max(layer.block_nbytes for layer in layers.values())} if block.entering else {}
    places = {PLACES: block.entering * WORD} if block.entering else {}
    return StagedCache(
        {f"cache_{i}": count * layer.nbytes for i, layer in layers.items()},
        {f"tail_{i}": count * layer.tail_nbytes for i, layer in layers.items()},
        {f"{RING}{i}": largest for i in range(block.cache_slots)} | tails,
        {name: count * size * WORD for name, size in sizes.items()} | places)


def _staged_nbytes(step: fx.GraphModule, sequences: int, prompt: int) -> int:
    """Bytes of the prompts' K and V of so many sequences, in the layer that has most."""
    layers: dict[int, int] = {}
    for node in step.graph.find_nodes(op="placeholder"):
        mark = node.meta.get(META)
        if isinstance(mark, CacheInput):
            _, heads, _, width = node.meta["val"].shape
            nbytes = sequences * heads * prompt * width * node.meta["val"].element_size()
            layers[mark.layer] = layers.get(mark.layer, 0) + aligned(nbytes)
    return max(layers.values())
