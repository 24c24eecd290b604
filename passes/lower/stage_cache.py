"""A cache on disk: the blocks that exist come into a staging slot for a layer's turn, and those that got full go out.

A slot holds one layer's cache of one micro-batch, token by token, K and V beside each other: [B, blocks, T, 2, Hkv, D].
The *tail*, the block of each sequence that is not full yet, stays on the device: it joins the others in the slot before
new tokens are appended there, and is taken out again behind attention. So attention reads one piece of memory, and what
was loaded is attended where it landed. Which blocks exist, int64 tensors tell that the caller writes before each step.
A prefill of some sequences alone stages those: its tables name blocks of all sequences, and the tails of its places
pass through the buffer `entering`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import fx

from forebay.passes.lower.addresses import Place
from forebay.passes.lower.draft import Arrive, Draft, Evict, Fetch, Free, Move, Outgoing, Store
from forebay.passes.lower.enter_places import ENTERING, name_places, put, take
from forebay.rewriter.ir.graph import META, CacheInput
from forebay.rewriter.ir.plan import Block, BufferPlacement, Plan
from forebay.rewriter.ir.program import COMPUTE, Release, Rows, Span, TensorRef, span_of

RING = "cache"  # of staging slots; also the name of the spill file
WORD = 8  # blocks move as int64
# inputs of a step, each with one part for every micro-batch: rows of its table of blocks [B * blocks] that are loaded
# and stored, and [B] the row of each sequence's tail before and behind the step
LOADS, STORES, BEFORE, BEHIND = "cache_loads", "cache_stores", "cache_before", "cache_behind"


@dataclass(frozen=True)
class StagedLayer:
    """One layer's cache in a micro-batch of `sequences`: `blocks` blocks of `block_nbytes` for each; V stands `beside`
    bytes behind K."""

    sequences: int
    blocks: int
    block_nbytes: int
    beside: int

    @property
    def nbytes(self) -> int:
        """Bytes of all sequences and blocks, in a slot as in the file."""
        return self.sequences * self.blocks * self.block_nbytes

    @property
    def tail_nbytes(self) -> int:
        return self.sequences * self.block_nbytes


def staged_layers(step: fx.GraphModule, block: Block) -> dict[int, StagedLayer]:
    """How each layer's cache is staged, from the token-major layout that the step graph of a micro-batch gives it."""
    found = {}
    for node in step.graph.find_nodes(op="placeholder"):
        mark = node.meta.get(META)
        if isinstance(mark, CacheInput) and mark.side == "k":
            value = node.meta["val"]
            batch, heads, tokens, width = value.shape
            itemsize = value.element_size()
            found[mark.layer] = StagedLayer(batch, tokens // block.cache_tokens,
                                            block.cache_tokens * value.stride(2) * itemsize, heads * width * itemsize)
    return found


def input_sizes(layer: StagedLayer) -> dict[str, int]:
    """Elements of a micro-batch's part of each input."""
    rows = layer.sequences * layer.blocks
    return {LOADS: rows, STORES: rows, BEFORE: layer.sequences, BEHIND: layer.sequences}


class CacheStaging:
    """Puts the copies and launches that stage the cache into the draft of a step over `tokens` tokens."""

    def __init__(self, draft: Draft, plan: Plan, layers: Mapping[int, StagedLayer], tokens: int) -> None:
        self.draft, self.plan, self.layers = draft, plan, layers
        self.buffers: dict[str, BufferPlacement] = {b.name: b for b in plan.buffers}
        self.count = plan.schedule.block.micro_batches
        self.fetched = 0
        self.places = name_places(draft, plan) if plan.schedule.block.entering and tokens > 1 else None
        first, w = next(iter(layers.values())), plan.workload
        capacity = first.blocks * plan.schedule.block.cache_tokens
        # halfway through the answer, or through the prompt; a block gets full every so many tokens
        self.loaded = (w.prompt + w.new_tokens / 2 if tokens == 1 else w.prompt / 2) / capacity
        self.stored = min(1.0, tokens / capacity)
        draft.files = {RING: max((b.offset + b.nbytes for b in plan.buffers if b.arena == RING), default=0)}
        for name, size in input_sizes(first).items():
            b = self.buffers[name]
            draft.inputs[name] = TensorRef(b.arena, b.offset, "int64", (self.count * size,), (1,), name)
            draft.resident[name] = span_of(draft.inputs[name])

    def offset(self, mark: CacheInput) -> int:
        """Where K or V of a layer begins in what is staged."""
        return self.layers[mark.layer].beside if mark.side == "v" else 0

    def bring(self, layer: int, micro_batch: int) -> Place:
        """Load the blocks that exist, and put the tails beside them; where they lie then."""
        staged, slot = self.layers[layer], self.fetched % self.plan.schedule.block.cache_slots
        self.fetched += 1
        b, index = self.buffers[f"{RING}{slot}"], len(self.draft.moves)
        span = Span(b.arena, b.offset, staged.nbytes, f"{b.name}:{index}")
        source = Rows(self._home(layer, micro_batch), staged.block_nbytes, self._told(LOADS, layer, micro_batch),
                      skips=True, usual=self.loaded)
        self.draft.moves.append(Move(f"load cache of layer {layer}@{micro_batch}", source, slot, span, (0, 0), RING,
                                     layer))
        table, tail = self._tables(span, layer, micro_batch)
        index_ref = self._told(BEFORE, layer, micro_batch)
        self.draft.items += [Fetch(index), Arrive(index)]
        if self.places is not None:
            tails = self._tails(layer)
            self.draft.items.append(
                take(tails, self.places, tail, span_of(tails), f"layer{layer}_tails_of_places", layer))
        self.draft.items.append(put(tail, index_ref, table, span, f"layer{layer}_tail_in@{micro_batch}", layer))
        return span.arena, span.offset, span.buffer

    def keep(self, layer: int, micro_batch: int, place: Place) -> None:
        """Take the tails out of the slot at `place`, store the blocks that got full, and give the slot back."""
        staged, index = self.layers[layer], int(place[2].rpartition(":")[2])
        span = Span(place[0], place[1], staged.nbytes, place[2])
        table, tail = self._tables(span, layer, micro_batch)
        index_ref = self._told(BEHIND, layer, micro_batch)
        target = Rows(self._home(layer, micro_batch), staged.block_nbytes, self._told(STORES, layer, micro_batch),
                      skips=True, usual=self.stored)
        number = len(self.draft.stores)
        self.draft.stores.append(Outgoing(f"store cache of layer {layer}@{micro_batch}", span, target, keeps=True,
                                          layer=layer))
        self.draft.items.append(take(table, index_ref, tail, span, f"layer{layer}_tail_out@{micro_batch}", layer))
        if self.places is not None:
            tails = self._tails(layer)
            self.draft.items += [put(tail, self.places, tails, span_of(tails), f"layer{layer}_tails_to_places", layer),
                                 Release(COMPUTE, span_of(tail))]
        self.draft.items += [Store(number), Evict(number), Free(index)]

    def _home(self, layer: int, micro_batch: int) -> Span:
        """The bytes of the spill file that a micro-batch's blocks are among."""
        b, nbytes = self.buffers[f"cache_{layer}"], self.layers[layer].nbytes
        if self.places is not None:
            return Span(b.arena, b.offset, b.nbytes, b.name)
        return Span(b.arena, b.offset + micro_batch * nbytes, nbytes, b.name)

    def _tables(self, span: Span, layer: int, micro_batch: int) -> tuple[TensorRef, TensorRef]:
        """The slot, and the tails of those whose turn it is, as rows of blocks."""
        staged = self.layers[layer]
        words = staged.block_nbytes // WORD
        table = TensorRef(span.arena, span.offset, "int64", (staged.sequences * staged.blocks, words), (words, 1),
                          span.buffer)
        if self.places is not None:
            b = self.buffers[ENTERING]
            return table, TensorRef(b.arena, b.offset, "int64", (staged.sequences, words), (words, 1),
                                    f"{ENTERING}:{layer}")
        tails = self._tails(layer)
        return table, TensorRef(tails.arena, tails.offset + micro_batch * staged.tail_nbytes, "int64",
                                (staged.sequences, words), (words, 1), tails.buffer)

    def _tails(self, layer: int) -> TensorRef:
        """The tails of all sequences as rows of blocks."""
        b, block_nbytes = self.buffers[f"tail_{layer}"], self.layers[layer].block_nbytes
        return TensorRef(b.arena, b.offset, "int64", (b.nbytes // block_nbytes, block_nbytes // WORD),
                         (block_nbytes // WORD, 1), b.name)

    def _told(self, name: str, layer: int, micro_batch: int) -> TensorRef:
        """A micro-batch's part of an input."""
        size, whole = input_sizes(self.layers[layer])[name], self.draft.inputs[name]
        return TensorRef(whole.arena, whole.offset + micro_batch * size * WORD, "int64", (size,), (1,), name)
