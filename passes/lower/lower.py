"""Turn a step graph with planned buffers into a draft of its `Program`: every launch at its addresses, in order.

A block graph is recorded once, with symbols for what differs between the layers that call it (weights, cache, staged
tiles) and between micro-batches (activations). The recording is settled for each micro-batch, and then stamped for
every layer: that is why compile time hardly grows with depth.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from torch import fx

from forebay.passes.lower.addresses import (
    AHEAD,
    GATHERED,
    POOL,
    RESULTS,
    ROUTING,
    TILE,
    WEIGHT,
    Address,
    Addresses,
    Symbols,
    micro_batch_symbols,
    settled,
)
from forebay.passes.lower.launches import LoweringError, Workspace
from forebay.passes.lower.place_copies import landing_of
from forebay.passes.lower.recording import (
    Ahead,
    Fetched,
    Gather,
    Recorded,
    Recorder,
    Recording,
    Staging,
    flatten,
    parts_of,
    place_of,
)
from forebay.passes.lower.stage_cache import CacheStaging
from forebay.passes.lower.take_turns import PieceTurn, turns
from forebay.rewriter.ir.alignment import aligned
from forebay.rewriter.ir.draft import Arrive, Draft, Exchanged, Fetch, Found, Free, Lookup, Move
from forebay.rewriter.ir.gathers import GATHER_BUFFER
from forebay.rewriter.ir.graph import META, Layout, WeightInput, is_pipeline_send, values_of
from forebay.rewriter.ir.plan import BufferPlacement, Plan
from forebay.rewriter.ir.program import FileSlice, Launch, Release, Rows, Span, TensorRef, span_of
from forebay.rewriter.ir.schedule import routed_fetch
from forebay.rewriter.ir.state import StateInput, state_name


@dataclass
class _Stamp:
    """One use of a graph: what its symbols stand for, and the step's numbers of its copies, and of its lookups by
    micro-batch. Every micro-batch has an equal part of the memory that a symbol of `cache` stands for."""

    layer: int
    symbols: dict[str, Address]
    names: dict[str, str]  # symbol -> weight
    cache: dict[str, tuple[Address, int]]  # where it begins, and the bytes of a part
    staged: dict[str, int]  # symbols of a cache that is staged, and where in the slot
    moves: dict[int, int] = field(default_factory=dict)
    lookups: dict[tuple[int, int], int] = field(default_factory=dict)

    def of_turn(self, micro_batch: int) -> dict[str, Address]:
        """Return the values of the symbols in a turn of this micro-batch."""
        parts = {symbol: (arena, offset + micro_batch * nbytes, buffer)
                 for symbol, ((arena, offset, buffer), nbytes) in self.cache.items()}
        return self.symbols | parts


def lower(
    gm: fx.GraphModule, plan: Plan, files: Mapping[str, FileSlice], workspace: Workspace, name: str = "step",
) -> Draft:
    """The draft of one step. `files` gives the bytes of every weight on the disk tier, `workspace` adds to a
    launch what it takes outside the arenas."""
    draft = Draft(name)
    lowering = _Lowering(draft, gm, plan, files, workspace)
    lowering.record()
    for turn in turns(len(lowering.pieces), plan.schedule.batching, lowering.last):
        lowering.stamp(turn)
    return draft


class _Lowering:
    """The graph of a step on its way into the draft: `record` cuts it into pieces, `stamp` adds one."""

    def __init__(
        self, draft: Draft, gm: fx.GraphModule, plan: Plan, files: Mapping[str, FileSlice], workspace: Workspace,
    ) -> None:
        layout = gm.meta[META]
        assert isinstance(layout, Layout), "allocate_buffers runs before lower"
        self.gm, self.plan, self.files, self.workspace, self.layout = gm, plan, files, workspace, layout
        self.count = plan.schedule.batching.micro_batches.count
        self.buffers: dict[str, BufferPlacement] = {b.name: b for b in plan.buffers}
        self.slots = [b for b in plan.buffers if b.kind == "slot" and b.arena == "device"]
        self.draft, self.lookups = draft, itertools.count()
        self.outer = Addresses(gm, layout, "", {})
        self.recorded: dict[object, tuple[list[Recording], list[tuple[int, str]]]] = {}
        self.pieces: list[list[tuple[Recording, _Stamp]]] = []
        self.last = 0  # pieces from the exchange on in which all stages meet
        self.staging: CacheStaging | None = None
        self.activations = [micro_batch_symbols(layout, k, plan.schedule.batching) for k in range(self.count)]
        self.fetched = 0
        self.gathered = self.ring_at = 0  # weights gathered ahead, and where in their memory the next one lies

    def record(self) -> None:
        draft = self.draft
        kept = ("weight", "constant", "cache", "pool", "routing")
        draft.resident |= {b.name: Span(b.arena, b.offset, b.nbytes, b.name)
                           for b in self.plan.buffers if b.kind in kept}
        placeholders = self.gm.graph.find_nodes(op="placeholder")
        batching = self.plan.schedule.batching
        self.cut = False
        if batching.cache.staged or batching.admitted:
            tokens = next(n for n in placeholders if n.target == "input_ids").meta["val"].shape[1]
            self.cut = batching.attends_on_host(tokens)
            if batching.cache.staged or batching.is_prefill(tokens):
                self.staging = CacheStaging(draft, self.plan, self.gm, tokens)
        outer = self.whole = self._instance(-1, ((self.outer.symbols[n], n) for n in placeholders))
        recorder = Recorder(self.outer, self.workspace)
        pending: list[fx.Node] = []  # nodes since the last block call
        for node in self.gm.graph.nodes:
            pending.append(node)
            if node.op == "placeholder" and node.meta.get(META) is None and values_of(node):
                ref = draft.inputs[str(node.target)] = self._boundary(node)
                b = self.layout.buffers[self.outer.buffer(node, 0)]
                draft.resident[ref.buffer] = Span(b.arena, b.offset, b.nbytes, ref.buffer)
            elif node.op == "call_module":
                *before, last = recorder.record(pending)
                pending = []
                self.pieces += [[(recording, outer)] for recording in before]
                first, *parts = self._call(node)
                self.pieces.append([(last, outer), first])  # waits for lookups stand in their readers' turn
                self.pieces += [[part] for part in parts]
            elif node.op == "output":
                recordings = recorder.record(pending)
                if pending[0].op == "call_function" and is_pipeline_send(pending[0]):
                    self.pieces[-1].append((recordings.pop(0), outer))
                self.pieces += [[(recording, outer)] for recording in recordings]
                self.last = 2 if any(map(is_pipeline_send, pending)) else 0
                for i, value in enumerate(flatten(node.args[0])):
                    if isinstance(value, fx.Node) and values_of(value):
                        draft.outputs[f"out{i}"] = settled(self._boundary(value), outer.symbols)

    def _boundary(self, node: fx.Node) -> TensorRef:
        """Return the memory of an input or output of all micro-batches together: one after the other along the first
        dimension."""
        ref: TensorRef = settled(self.outer.ref(node), self.activations[0])
        if self.count == 1:
            return ref
        value = values_of(node)[0]
        if not value.is_contiguous() or value.untyped_storage().nbytes() != value.numel() * value.element_size():
            raise LoweringError(f"lower: {node.name} is not contiguous, so micro-batches cannot share it")
        return TensorRef(ref.arena, ref.offset, ref.dtype, (self.count * ref.shape[0], *ref.shape[1:]), ref.stride,
                         ref.buffer)

    # -- one layer

    def _call(self, call: fx.Node) -> list[tuple[Recording, _Stamp]]:
        """A layer as pieces of the step: two, where the host attends between them."""
        layer = call.meta.get("layer", -1)
        like = self.layout.representatives.get(layer, layer)
        given = tuple(place_of(settled(self.outer.ref(arg), self.whole.symbols)) for arg in _activations(call))
        key = (call.target, like, given)
        known = self.recorded.get(key)
        if known is None:
            known = self.recorded[key] = self._record_block(call, like, given)
        recordings, own = known
        instance = self._instance(layer, ((symbol, call.args[i]) for i, symbol in own))  # type: ignore[misc]
        for element, (arena, address, buffer) in enumerate(recordings[-1].results):
            base = instance.symbols.get(arena)
            self.outer.made[call, element] = (
                (arena, address, buffer) if base is None else (base[0], base[1] + address, base[2]))
        return [(recording, instance) for recording in recordings]

    def _record_block(
        self, call: fx.Node, like: int, given: tuple[Address, ...]
    ) -> tuple[list[Recording], list[tuple[int, str]]]:
        """The recordings of a block, and which arguments of a call its symbols stand for."""
        block = self.gm.get_submodule(str(call.target))
        assert isinstance(block, fx.GraphModule)
        placeholders = block.graph.find_nodes(op="placeholder")
        inputs = [n for n in placeholders if n.meta.get(META) is None and values_of(n)]
        addresses = Addresses(block, self.layout, f"layer{like}_", dict(zip(inputs, given, strict=True)))
        recorder = Recorder(addresses, self.workspace, True, self.staging is not None, self.cut)
        recordings = recorder.record(list(block.graph.nodes))
        own = [(i, addresses.symbols[n]) for i, n in enumerate(placeholders) if n.meta.get(META) is not None]
        return recordings, own

    def _instance(self, layer: int, given: Iterable[tuple[str, fx.Node]]) -> _Stamp:
        """A use of a graph whose symbols stand for these placeholders of the step graph."""
        symbols, names, cache, staged = {}, {}, {}, {}
        for symbol, node in given:
            mark = node.meta.get(META)
            if isinstance(mark, WeightInput):
                names[symbol] = mark.name
                for kind, end in ((WEIGHT, ""), (POOL, routed_fetch.POOL), (ROUTING, routed_fetch.ROUTING)):
                    b = self.buffers.get(mark.name + end)
                    if b is not None:  # else it streams from disk
                        symbols[symbol.replace(WEIGHT, kind)] = b.arena, b.offset, b.name
            elif isinstance(mark, StateInput) and self.staging is not None and self.staging.holds(mark):
                staged[symbol] = self.staging.offset(mark)
            elif isinstance(mark, StateInput):
                b = self.buffers[state_name(mark.tensor, mark.layer)]
                cache[symbol] = (b.arena, b.offset, b.name), b.nbytes // self.count
        for symbol, name in ((RESULTS, routed_fetch.RESULTS), (AHEAD, routed_fetch.AHEAD)):
            if (b := self.buffers.get(name)) is not None:
                symbols[symbol] = b.arena, b.offset, b.name
        return _Stamp(layer, symbols, names, cache, staged)

    # -- stamping

    def stamp(self, turn: PieceTurn) -> None:
        """Append the piece of a turn."""
        for recording, instance in self.pieces[turn.piece]:
            self._stamp(recording, instance, turn)

    def _stamp(self, recording: Recording, instance: _Stamp, turn: PieceTurn) -> None:
        """Append a recording with its symbols settled; in layers, labels get the layer's name in front, and of several
        micro-batches their number behind. Weights are fetched in the turn that opens, and freed in the one that
        closes."""
        layer, k = instance.layer, turn.micro_batch
        symbols = instance.of_turn(k)
        for fetch, move in instance.moves.items():
            symbols[f"{TILE}{fetch}"] = self._landing(move)
        before = f"layer{layer}_" if layer >= 0 else ""
        after = f"@{k}" if self.count > 1 else ""
        add = self.draft.items.append
        place: Address = "", 0, ""
        for entry in recording.of_turn(k, self.activations[k]):
            if isinstance(entry, Recorded):
                launch = entry.launch
                args, kwargs, out, reads, writes = parts_of(entry, symbols)
                add(Launch(launch.stream, launch.op, args, kwargs, out, reads, writes, f"{before}{launch.label}{after}",
                           layer if layer >= 0 else launch.layer, launch.flops, launch.workspace_nbytes, launch.impl,
                           launch.held))
            elif isinstance(entry, Release):
                add(entry if entry.span.arena not in symbols else Release(entry.stream, settled(entry.span, symbols)))
            elif isinstance(entry, Ahead):
                symbols[f"{GATHERED}{entry.number}"] = self._ring_place(entry.nbytes)
            elif isinstance(entry, Fetched):
                if turn.opens:
                    self._fetch(entry, instance)
                    symbols[f"{TILE}{entry.number}"] = self._landing(instance.moves[entry.number])
            elif isinstance(entry, Staging):
                assert self.staging is not None
                if entry.ends:
                    self.staging.keep(layer, k, place)
                    continue
                chosen = None if entry.chosen is None else settled(entry.chosen, symbols)
                place = self.staging.bring(layer, k, chosen)
                symbols |= {symbol: (place[0], place[1] + at, place[2]) for symbol, at in instance.staged.items()}
            elif isinstance(entry, Arrive):
                if turn.opens:
                    add(Arrive(instance.moves[entry.index], entry.stream))
            elif isinstance(entry, Free):
                if turn.closes:
                    add(Free(instance.moves[entry.index], entry.stream))
            elif isinstance(entry, Found):
                add(Found(instance.lookups[k, entry.index]))
            elif isinstance(entry, Exchanged):
                add(Exchanged(f"{before}{entry.label}{after}"))
            else:
                self._gather(entry, instance, symbols, k)

    def _ring_place(self, nbytes: int) -> Address:
        """Return the memory of a weight that is gathered ahead: after the previous one, because all take turns."""
        ring = self.layout.buffers[GATHER_BUFFER]
        if self.ring_at + nbytes > ring.nbytes:
            self.ring_at = 0
        at, number = self.ring_at, self.gathered
        self.ring_at, self.gathered = aligned(at + nbytes), number + 1
        return ring.arena, ring.offset + at, f"{GATHER_BUFFER}:{number}"

    def _landing(self, move: int) -> Address:
        span = self.draft.moves[move].span
        return span.arena, span.offset, span.buffer

    def _fetch(self, entry: Fetched, instance: _Stamp) -> None:
        index = instance.moves[entry.number] = len(self.draft.moves)
        weight = instance.names[entry.source]
        placement = self.plan.weight(weight)
        row_nbytes = placement.nbytes // entry.rows
        lower, nbytes = entry.lower * row_nbytes, (entry.upper - entry.lower) * row_nbytes
        source = self._away(weight, lower, nbytes)
        in_file = isinstance(source, FileSlice) and not self.plan.schedule.host_hop
        direct = source if in_file else None  # where the bytes come from, if they are read into the slot itself
        number = self.fetched % self.plan.schedule.slots
        slot, buffer = self.slots[number], f"slot{number}:{self.fetched}"  # alike in all steps: they hand copies on
        self.fetched += 1
        span, room = landing_of(direct, slot, nbytes, buffer, entry.itemsize)
        whole = entry.lower == 0 and entry.upper == entry.rows
        label = f"fetch {weight}" if whole else f"fetch {weight}[{entry.lower}:{entry.upper}]"
        self.draft.moves.append(Move(label, source, number, span, room))
        self.draft.items.append(Fetch(index))

    def _away(self, weight: str, lower: int, nbytes: int) -> FileSlice | Span:
        """Return the place of a weight's bytes off the device."""
        if self.plan.weight(weight).tier == "disk":
            spec = self.files.get(weight)
            if spec is None:
                raise KeyError(f"lower: {weight} is on the disk tier, but no file holds it")
            return spec.part(lower, nbytes)
        b = self.buffers[weight]
        return Span(b.arena, b.offset + lower, nbytes, weight)

    def _gather(self, entry: Gather, instance: _Stamp, symbols: Symbols, micro_batch: int) -> None:
        number = instance.lookups[micro_batch, entry.number] = next(self.lookups)
        name = instance.names[entry.table]
        row_nbytes = self.plan.weight(name).nbytes // entry.rows
        index, out = settled(entry.index, symbols), settled(entry.out, symbols)
        table, pooled = self._away(name, 0, entry.rows * row_nbytes), entry.tokens > 0
        missed = self.plan.schedule.routed.missed(entry.rows, entry.picks, entry.tokens) if pooled else 0.0
        typical = min(1.0, missed / entry.rounds / index.shape[0]) if pooled and entry.rounds else 1.0
        source = Rows(table, row_nbytes, index, skips=pooled, typical=typical, keeps=pooled,
                      apart=routed_fetch.expert_room(row_nbytes) if pooled and not self.plan.schedule.host_hop else 0,
                      spares=settled(entry.spares, symbols))
        span = Span(out.arena, out.offset, source.room_nbytes, out.buffer) if pooled else span_of(out)
        self.draft.items.append(Lookup(number, f"{'fetch' if pooled else 'gather'} {name}", instance.layer, source,
                                       span))


def _activations(call: fx.Node) -> list[fx.Node]:
    """The arguments of a block call that are neither weights nor cache."""
    return [arg for arg in call.args if isinstance(arg, fx.Node) and values_of(arg)
            and not isinstance(arg.meta.get(META), WeightInput | StateInput)]
