"""A cache off the device: the blocks that exist come into a staging slot for a layer's turn, and those that got full go
out again, to host memory or to a spill file. Of the caches those that live on the device are attended where they lie.
States of layers without a cache come and go whole.

How a slot is laid out, `cache_layout` says. The *tail*, the block of each sequence that is not full yet, stays on the
device: it joins the others in the slot before new tokens are appended there, and is taken out again behind attention.
So attention reads one piece of memory, and what was loaded is attended where it landed. Which blocks exist, int64
tensors tell that the caller writes before each step.
A prefill of some sequences alone, whose slots the input `batch_slots` names, stages those, so that the others keep
theirs: its tables name blocks of all sequences, and the tails of its slots pass through the buffer `admitted`. So do
their whole caches in layers whose caches live on the device: they are taken before new tokens are appended, and put
back behind attention. Rows of equal place must be of equal contents.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import fx

from forebay.passes.lower.addresses import Address
from forebay.rewriter.ir.alignment import aligned
from forebay.rewriter.ir.cache_layout import (
    BATCH_SLOTS,
    BEFORE,
    BEHIND,
    CACHE_STAGING,
    CACHE_STORE_STAGING,
    ENTERING,
    STORE_STAGING_COUNT,
    STORES,
    TAIL,
    WHOLE_LOADS,
    WHOLE_STORES,
    WORD,
    cache_home_name,
    input_sizes,
    loads_name,
    moved_shares,
    staged_layers,
    state_values,
)
from forebay.rewriter.ir.draft import Arrive, Draft, Evict, Fetch, Free, Move, Outgoing, Store
from forebay.rewriter.ir.operator_names import called
from forebay.rewriter.ir.plan import BufferPlacement, Plan
from forebay.rewriter.ir.program import COMPUTE, Launch, Release, Rows, Span, TensorRef, span_of
from forebay.rewriter.ir.state import StateInput, state_name


def take(source: TensorRef, index: TensorRef, target: TensorRef, reads: Span, label: str, layer: int) -> Launch:
    """A launch that fills `target` with the named rows of `source`, whose memory is `reads`."""
    return Launch(COMPUTE, str(torch.ops.aten.index_select.out), (), {"self": source, "dim": 0, "index": index},
                  (target,), (reads, span_of(index)), (span_of(target),), label, layer)


def put(source: TensorRef, index: TensorRef, target: TensorRef, writes: Span, label: str, layer: int) -> Launch:
    """A launch that writes `source` over the named rows of `target`, whose memory is `writes`."""
    return Launch(COMPUTE, called(torch.ops.aten.index_copy_.default), (target, 0, index, source), {}, (),
                  (writes, span_of(index), span_of(source)), (writes,), label, layer)


def name_batch_slots(draft: Draft, plan: Plan) -> TensorRef:
    """The input that names slots, which is declared in `draft`."""
    b = next(b for b in plan.buffers if b.name == BATCH_SLOTS)
    ref = draft.inputs[BATCH_SLOTS] = TensorRef(
        b.arena, b.offset, "int64", (plan.schedule.batching.admitted,), (1,), BATCH_SLOTS)
    draft.resident[BATCH_SLOTS] = span_of(ref)
    return ref


class CacheStaging:
    """Puts the copies and launches that stage the cache into the draft of a step over `tokens` tokens."""

    def __init__(self, draft: Draft, plan: Plan, step: fx.GraphModule, tokens: int) -> None:
        self.draft, self.plan, self.batching, self.tokens = draft, plan, plan.schedule.batching, tokens
        self.layers = staged_layers(step, self.batching) if self.batching.cache.staged else {}
        self.rows = {} if self.layers else state_values(step)  # of a cache on the device, by layer and tensor
        self.buffers: dict[str, BufferPlacement] = {b.name: b for b in plan.buffers}
        every = [*(self.layers or self.rows)]
        self.homes = dict(zip(every, self.batching.cache_homes(len(every)), strict=True))
        self.fetched = 0
        alone = self.batching.admitted and self.batching.is_prefill(tokens)
        self.batch_slots = name_batch_slots(draft, plan) if alone else None
        # whether a slot has the rows of its table, in order
        self.alike = self.batch_slots is None and not self.batching.recomputation.checkpoints
        self.sizes = input_sizes(self.layers, self.batching) if self.layers else {}
        self.typical = {
            i: moved_shares(layer, self.batching, plan.workload, tokens) for i, layer in self.layers.items()}
        draft.files = {CACHE_STAGING: max(b.offset + b.nbytes for b in plan.buffers if b.arena == CACHE_STAGING)
                       } if any(b.arena == CACHE_STAGING for b in plan.buffers) else {}
        for name, size in self.sizes.items():
            b = self.buffers[name]
            draft.inputs[name] = TensorRef(
                b.arena, b.offset, "int64", (self.batching.micro_batches.count * size,), (1,), name)
            draft.resident[name] = span_of(draft.inputs[name])

    def holds(self, mark: StateInput) -> bool:
        """Return whether a tensor of a layer's states is staged."""
        return not self.layers or self.layers[mark.layer].holds(mark)

    def offset(self, mark: StateInput) -> int:
        """Return the offset of a layer's state tensor in the staged memory."""
        if self.layers:
            return self.layers[mark.layer].offset(mark)
        values = self.rows[mark.layer]
        before = itertools.takewhile(lambda name: name != mark.tensor, values)
        return sum(aligned(values[name].nbytes) for name in before)

    def bring(self, layer: int, micro_batch: int, chosen: TensorRef | None = None) -> Address:
        """Load the blocks that exist, or those that are `chosen` (as `choose_blocks` gives them), and put the tails
        beside them; where they lie then. A cache that is attended where it lives stays there."""
        tier = self.homes[layer][micro_batch]
        if self._stays(tier):
            return self._bring_places(layer, micro_batch)
        home, staged = self._home(layer, micro_batch), self.layers[layer]
        slot = self.fetched % self.batching.cache.slots
        self.fetched += 1
        b, index = self.buffers[f"{CACHE_STAGING}{slot}"], len(self.draft.moves)
        span = Span(b.arena, b.offset, staged.nbytes, f"{b.name}:{index}")
        tailed = not staged.tensors and self.batching.cache.has_tails(tier)
        source: Rows | Span = home
        if not staged.tensors:
            loads = self._told(loads_name(staged.window) if tailed else WHOLE_LOADS, micro_batch)
            if chosen is not None:
                loads = replace(chosen, offset=chosen.offset + staged.sequences * WORD, shape=loads.shape)
            source = Rows(home, staged.block_nbytes, loads, skips=True, typical=self.typical[layer][0])
        self.draft.moves.append(Move(f"load cache of layer {layer}@{micro_batch}", source, slot, span, (0, 0),
                                     CACHE_STAGING, layer, alike=self.alike and not staged.tensors and chosen is None,
                                     computed=chosen is not None))
        self.draft.items += [Fetch(index), Arrive(index)]
        if not tailed:
            return span.arena, span.offset, span.buffer
        index_ref = self._told(BEFORE, micro_batch)
        table, tail = self._tables(span, layer, micro_batch)
        if self.batch_slots is not None:
            tails = self._tails(layer)
            self.draft.items.append(take(tails, self.batch_slots, self._entering_tails(layer), span_of(tails),
                                         f"layer{layer}_tails_of_places", layer))
        self.draft.items.append(put(tail, index_ref, table, span, f"layer{layer}_tail_in@{micro_batch}", layer))
        return span.arena, span.offset, span.buffer

    def keep(self, layer: int, micro_batch: int, place: Address) -> None:
        """Take the tails out of the slot at `place`, store the blocks that got full, and give the slot back."""
        tier = self.homes[layer][micro_batch]
        if self._stays(tier):
            self._keep_places(layer, micro_batch)
            return
        staged, index = self.layers[layer], int(place[2].rpartition(":")[2])
        span = Span(place[0], place[1], staged.nbytes, place[2])
        tails = not staged.tensors and self.batching.cache.has_tails(tier)
        target: Rows | Span = self._home(layer, micro_batch)
        if not staged.tensors:
            target = Rows(self._home(layer, micro_batch), staged.block_nbytes,
                          self._told(STORES if tails else WHOLE_STORES, micro_batch), skips=True,
                          typical=self.typical[layer][1])
        number = len(self.draft.stores)
        self.draft.stores.append(Outgoing(f"store cache of layer {layer}@{micro_batch}", span, target, keeps=True,
                                          slot=number % STORE_STAGING_COUNT, ring=CACHE_STORE_STAGING, layer=layer,
                                          cache=not self.draft.moves[index].computed,
                                          alike=self.alike and not staged.tensors))
        if tails:
            self._take_tails(layer, micro_batch, span)
        self.draft.items += [Store(number), Evict(number), Free(index)]

    def _take_tails(self, layer: int, micro_batch: int, span: Span) -> None:
        """Take the tails out of the slot."""
        table, tail = self._tables(span, layer, micro_batch)
        index_ref = self._told(BEHIND, micro_batch)
        self.draft.items.append(take(table, index_ref, tail, span, f"layer{layer}_tail_out@{micro_batch}", layer))
        if self.batch_slots is not None:
            tails = self._tails(layer)
            self.draft.items += [put(self._entering_tails(layer), self.batch_slots, tails, span_of(tails),
                                      f"layer{layer}_tails_to_slots", layer),
                                 Release(COMPUTE, span_of(tail))]

    def _bring_places(self, layer: int, micro_batch: int) -> Address:
        """Take the caches of the slots, if there are such, out of those of all sequences, which live on the device;
        where they lie then."""
        if self.batch_slots is None:
            home = self._home(layer, micro_batch)
            return home.arena, home.offset, home.buffer
        for name, caches, memory, admitted in self._sequences(layer, micro_batch):
            self.draft.items.append(take(caches, self.batch_slots, admitted, memory, f"layer{layer}_take{name}", layer))
        b = self.buffers[ENTERING]
        return b.arena, b.offset, f"{ENTERING}:{layer}"

    def _keep_places(self, layer: int, micro_batch: int) -> None:
        """Put the caches back to their slots."""
        if self.batch_slots is None:
            return
        for name, caches, memory, admitted in self._sequences(layer, micro_batch):
            self.draft.items += [put(admitted, self.batch_slots, caches, memory, f"layer{layer}_put{name}", layer),
                                 Release(COMPUTE, span_of(admitted))]

    def _sequences(self, layer: int, micro_batch: int) -> Iterator[tuple[str, TensorRef, Span, TensorRef]]:
        """A layer's caches that live on the device as rows of a sequence each, their memory, and those that enter: of
        token-major blocks all at once, else by tensor [entering, Hkv, prompt, D], of which the prompts' part moves, or
        all where it does not grow."""
        b = self.buffers[ENTERING]
        if self.layers:
            staged, home = self.layers[layer], self._home(layer, micro_batch)
            every = home.nbytes // (staged.blocks * staged.block_nbytes)
            yield ("", staged.as_sequences(home, home.buffer, every), home,
                   staged.as_sequences(b, f"{ENTERING}:{layer}", staged.sequences))
        for name, value in self.rows.get(layer, {}).items():
            whole, batch = self.buffers[state_name(name, layer)], self.plan.workload.batch
            dtype, rows, (*inner, tokens, width) = str(value.dtype)[6:], len(value), (1, *value.shape[1:])
            heads = math.prod(inner)  # of a state that does not grow, any that hold it
            length = whole.nbytes // (batch * heads * width * value.element_size())
            caches = TensorRef(whole.arena, whole.offset, dtype, (batch, heads, tokens, width),
                               (heads * length * width, length * width, width, 1), whole.name)
            yield f"_{name}", caches, Span(whole.arena, whole.offset, whole.nbytes, whole.name), TensorRef(
                b.arena, b.offset + self.offset(StateInput(layer, name)), dtype, (rows, heads, tokens, width),
                (heads * tokens * width, tokens * width, width, 1), f"{ENTERING}:{layer}")

    def _stays(self, tier: str) -> bool:
        """Return whether caches of a tier are attended there."""
        cache = self.batching.cache
        return tier == "device" or (tier == "host" and (cache.in_place or self.batching.attends_on_host(self.tokens)))

    def _home(self, layer: int, micro_batch: int) -> Span:
        """The bytes that a micro-batch's blocks are among where its cache lives."""
        homes = self.homes[layer]
        tier, nbytes = homes[micro_batch], self.layers[layer].home_nbytes
        b = self.buffers[cache_home_name(layer, tier)]
        if self.batch_slots is not None:
            return Span(b.arena, b.offset, b.nbytes, b.name)
        return Span(b.arena, b.offset + homes[:micro_batch].count(tier) * nbytes, nbytes, b.name)

    def _tables(self, span: Span, layer: int, micro_batch: int) -> tuple[TensorRef, TensorRef]:
        """The slot, and the tails of those whose turn it is, as rows of blocks."""
        staged = self.layers[layer]
        table = staged.as_blocks(span, span.buffer, 0, staged.rows)
        if self.batch_slots is not None:
            return table, staged.as_blocks(self.buffers[ENTERING], f"{ENTERING}:{layer}", 0, staged.tails)
        # among those that have tails
        number = sum(map(self.batching.cache.has_tails, self.homes[layer][:micro_batch]))
        b = self.buffers[f"{TAIL}{layer}"]
        return table, staged.as_blocks(b, b.name, number * staged.tails, staged.tails)

    def _tails(self, layer: int) -> TensorRef:
        """The tails of all sequences, those of a sequence in a row."""
        b, staged = self.buffers[f"{TAIL}{layer}"], self.layers[layer]
        return staged.as_sequences(b, b.name, b.nbytes * staged.sequences // staged.tail_nbytes, tails=True)

    def _entering_tails(self, layer: int) -> TensorRef:
        """The tails of the sequences that enter, those of a sequence in a row."""
        staged = self.layers[layer]
        return staged.as_sequences(self.buffers[ENTERING], f"{ENTERING}:{layer}", staged.sequences, tails=True)

    def _told(self, name: str, micro_batch: int) -> TensorRef:
        """A micro-batch's part of an input."""
        size, whole = self.sizes[name], self.draft.inputs[name]
        return TensorRef(whole.arena, whole.offset + micro_batch * size * WORD, "int64", (size,), (1,), name)
