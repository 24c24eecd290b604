"""Turn a step graph with planned buffers into a draft of its `Program`: every launch at its addresses, in order.

A block graph is recorded once, with symbols for what differs between the layers that call it (weights, cache, staged
tiles), and stamped for every layer: that is why compile time hardly grows with depth.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import fx

from forebay.passes.lower.addresses import TILE, Addresses, Place, has_symbols, settled
from forebay.passes.lower.draft import Arrive, Draft, Fetch, Found, Free, Lookup, Move
from forebay.passes.lower.launches import Launches
from forebay.passes.lower.out_variants import mutated_arguments
from forebay.passes.lower.place_copies import landing_of
from forebay.rewriter.ir import ops
from forebay.rewriter.ir.graph import META, CacheInput, Layout, Transfer, WeightInput, storage_of, values_of
from forebay.rewriter.ir.plan import Plan
from forebay.rewriter.ir.program import COMPUTE, FileRows, FileSlice, Launch, Release, Span, TensorRef, span_of

Workspace = Callable[[fx.Node], int]


@dataclass(frozen=True, slots=True)
class _Recorded:
    """A launch to be stamped, and which of its parts name memory that differs from layer to layer: args, kwargs, out,
    reads, writes."""

    launch: Launch
    symbolic: tuple[bool, ...]


@dataclass(frozen=True, slots=True)
class _Gather:
    """A row lookup to be stamped: rows named by `index`, of the weight [rows, ...] of symbol `table`, to `out`."""

    number: int
    table: str  # a symbol
    rows: int
    index: TensorRef
    out: TensorRef


@dataclass(frozen=True, slots=True)
class _Fetched:
    """A copy to be stamped: rows [lower, upper) of the weight [rows, ...] that `source` stands for."""

    number: int
    source: str  # a symbol
    rows: int
    itemsize: int
    lower: int
    upper: int


Entry = _Recorded | _Gather | _Fetched | Release | Arrive | Free | Found  # numbers in marks count within the graph


@dataclass(frozen=True)
class _Recording:
    """What one graph, or a piece of one, does, and where its results lie."""

    entries: tuple[Entry, ...]
    results: tuple[Place, ...] = ()


@dataclass
class _Instance:
    """One use of a graph: what its symbols stand for, and the step's numbers of its copies and lookups."""

    layer: int
    symbols: dict[str, Place]
    names: dict[str, str]  # symbol -> weight
    moves: dict[int, int] = field(default_factory=dict)
    lookups: dict[int, int] = field(default_factory=dict)


def lower(
    gm: fx.GraphModule, plan: Plan, files: Mapping[str, FileSlice], workspace: Workspace, name: str = "step"
) -> Draft:
    """The draft of one step. `files` gives the bytes of every weight on the disk tier, `workspace` the transient bytes
    of one of our own operators."""
    return _Lowering(gm, plan, files, workspace, name).run()


class _Lowering:
    def __init__(
        self, gm: fx.GraphModule, plan: Plan, files: Mapping[str, FileSlice], workspace: Workspace, name: str
    ) -> None:
        layout = gm.meta[META]
        assert isinstance(layout, Layout), "allocate_buffers runs before lower"
        self.gm, self.plan, self.files, self.workspace, self.layout = gm, plan, files, workspace, layout
        self.places: dict[str, Place] = {b.name: (b.arena, b.offset, b.name) for b in plan.buffers}
        self.slots = [b for b in plan.buffers if b.kind == "slot" and b.arena == "device"]
        self.draft = Draft(name)
        self.outer = Addresses(gm, layout, "", {})
        self.recorded: dict[object, tuple[_Recording, list[tuple[int, str]]]] = {}
        self.lookups = 0

    def run(self) -> Draft:
        draft = self.draft
        kept = ("weight", "constant", "cache")
        draft.resident = {b.name: Span(b.arena, b.offset, b.nbytes, b.name)
                          for b in self.plan.buffers if b.kind in kept}
        placeholders = self.gm.graph.find_nodes(op="placeholder")
        outer = _instance(-1, ((self.outer.symbols[n], n) for n in placeholders), self.places)
        recorder = _Recorder(self.outer, self.workspace)
        pending: list[fx.Node] = []  # nodes since the last block call
        for node in self.gm.graph.nodes:
            pending.append(node)
            if node.op == "placeholder" and node.meta.get(META) is None and values_of(node):
                draft.inputs[str(node.target)] = self.outer.ref(node)
                b = self.layout.buffers[self.outer.buffer(node, 0)]
                draft.resident[node.name] = Span(b.arena, b.offset, b.nbytes, b.name)
            elif node.op == "call_module":
                self._stamp(recorder.record(pending), outer)
                pending = []
                self._call(node, outer)
            elif node.op == "output":
                self._stamp(recorder.record(pending), outer)
                for i, value in enumerate(_flatten(node.args[0])):
                    if isinstance(value, fx.Node) and values_of(value):
                        draft.outputs[f"out{i}"] = settled(self.outer.ref(value), outer.symbols)
        return draft

    # -- one layer

    def _call(self, call: fx.Node, outer: _Instance) -> None:
        layer = call.meta.get("layer", -1)
        like = self.layout.likes.get(layer, layer)
        given = tuple(_place(settled(self.outer.ref(arg), outer.symbols)) for arg in _activations(call))
        key = (call.target, like, given)
        known = self.recorded.get(key)
        if known is None:
            known = self.recorded[key] = self._record_block(call, like, given)
        recording, own = known
        instance = _instance(layer, ((symbol, call.args[i]) for i, symbol in own), self.places)  # type: ignore[misc]
        self._stamp(recording, instance)
        for element, (arena, address, buffer) in enumerate(recording.results):
            base = instance.symbols.get(arena)
            self.outer.made[call, element] = (
                (arena, address, buffer) if base is None else (base[0], base[1] + address, base[2]))

    def _record_block(
        self, call: fx.Node, like: int, given: tuple[Place, ...]
    ) -> tuple[_Recording, list[tuple[int, str]]]:
        """The recording of a block, and which arguments of a call its symbols stand for."""
        block = self.gm.get_submodule(str(call.target))
        assert isinstance(block, fx.GraphModule)
        placeholders = block.graph.find_nodes(op="placeholder")
        inputs = [n for n in placeholders if n.meta.get(META) is None and values_of(n)]
        addresses = Addresses(block, self.layout, f"layer{like}_", dict(zip(inputs, given, strict=True)))
        recording = _Recorder(addresses, self.workspace).record(list(block.graph.nodes))
        own = [(i, addresses.symbols[n]) for i, n in enumerate(placeholders) if n.meta.get(META) is not None]
        return recording, own

    # -- stamping

    def _stamp(self, recording: _Recording, instance: _Instance) -> None:
        """Append a recording with its symbols settled; in layers, labels get the layer's name in front."""
        layer, symbols = instance.layer, instance.symbols
        prefix = f"layer{layer}_" if layer >= 0 else ""
        add = self.draft.items.append
        for entry in recording.entries:
            if isinstance(entry, _Recorded):
                k = entry.launch
                at = layer if layer >= 0 else k.layer
                args, kwargs, out, reads, writes = k.args, k.kwargs, k.out, k.reads, k.writes
                if True in entry.symbolic:  # layers share the parts that are the same for all
                    in_args, in_kwargs, in_out, in_reads, in_writes = entry.symbolic
                    args = settled(args, symbols) if in_args else args
                    kwargs = {name: settled(v, symbols) for name, v in kwargs.items()} if in_kwargs else kwargs
                    out = settled(out, symbols) if in_out else out
                    reads = settled(reads, symbols) if in_reads else reads
                    writes = settled(writes, symbols) if in_writes else writes
                add(Launch(k.stream, k.op, args, kwargs, out, reads, writes, prefix + k.label, at, k.flops,
                           k.workspace_nbytes, k.impl))
            elif isinstance(entry, Release):
                add(entry)
            elif isinstance(entry, _Fetched):
                self._fetch(entry, instance)
            elif isinstance(entry, Arrive):
                add(Arrive(instance.moves[entry.index]))
            elif isinstance(entry, Free):
                add(Free(instance.moves[entry.index]))
            elif isinstance(entry, Found):
                add(Found(instance.lookups[entry.index]))
            else:
                self._gather(entry, instance)

    def _fetch(self, entry: _Fetched, instance: _Instance) -> None:
        index = instance.moves[entry.number] = len(self.draft.moves)
        weight = instance.names[entry.source]
        placement = self.plan.weight(weight)
        row_nbytes = placement.nbytes // entry.rows
        lower, nbytes = entry.lower * row_nbytes, (entry.upper - entry.lower) * row_nbytes
        source: FileSlice | Span
        direct: FileSlice | None = None  # where the bytes come from, if they are read into the slot itself
        if placement.tier == "disk":
            spec = self.files.get(weight)
            if spec is None:
                raise KeyError(f"lower: {weight} is on the disk tier, but no file holds it")
            source = FileSlice(spec.path, spec.offset + lower, nbytes)
            direct = None if self.plan.schedule.host_hop else source
        else:
            arena, offset, _ = self.places[weight]
            source = Span(arena, offset + lower, nbytes, weight)
        number = index % self.plan.schedule.slots
        slot, buffer = self.slots[number], f"slot{number}:{index}"
        span, room = landing_of(direct, slot, nbytes, buffer, entry.itemsize)
        whole = entry.lower == 0 and entry.upper == entry.rows
        label = f"fetch {weight}" if whole else f"fetch {weight}[{entry.lower}:{entry.upper}]"
        self.draft.moves.append(Move(label, source, number, span, room))
        instance.symbols[f"{TILE}{entry.number}"] = (span.arena, span.offset, buffer)
        self.draft.items.append(Fetch(index))

    def _gather(self, entry: _Gather, instance: _Instance) -> None:
        number = instance.lookups[entry.number] = self.lookups
        self.lookups += 1
        name = instance.names[entry.table]
        spec, row_nbytes = self.files[name], self.plan.weight(name).nbytes // entry.rows
        index, out = settled(entry.index, instance.symbols), settled(entry.out, instance.symbols)
        source = FileRows(spec.path, spec.offset, row_nbytes, entry.rows, index)
        self.draft.items.append(Lookup(number, f"gather {name}", instance.layer, source, span_of(out)))


class _Recorder:
    """Records nodes of one graph: launches with symbols, and marks with numbers of the graph's own."""

    def __init__(self, addresses: Addresses, workspace: Workspace) -> None:
        self.addresses = addresses
        self.launches = Launches(addresses.ref, workspace)
        self.entries: list[Entry] = []
        self.landing: dict[fx.Node, Arrive | Found] = {}  # storage node -> the mark before its first reader
        self.found = 0

    def record(self, nodes: list[fx.Node]) -> _Recording:
        """What these nodes do, which follow those recorded before."""
        self.entries = []
        results: tuple[Place, ...] = ()
        for node in nodes:
            if node.op == "output":
                results = tuple(_place(self.addresses.ref(v)) for v in _flatten(node.args[0])
                                if isinstance(v, fx.Node) and values_of(v))
            elif node.op == "call_module":
                self._arrive(*node.all_input_nodes)
            elif node.target is ops.fetch:
                self._fetch(node)
            elif node.target is ops.release:
                self.entries.append(Free(self.addresses.tiles[node.args[0]]))  # type: ignore[index]
            elif node.target is ops.gather_rows:
                self._gather(node)
            elif node.op == "call_function" and node.target is not operator.getitem and (
                    node.meta.get("alias_of") is None or _writes_argument(node)):
                self._launch(node)
            for b in self.addresses.ends(node):
                self.entries.append(Release(COMPUTE, Span(b.arena, b.offset, b.nbytes, b.name)))
        return _Recording(tuple(self.entries), results)

    def _fetch(self, node: fx.Node) -> None:
        source, transfer, number = node.args[0], node.meta[META], self.addresses.tiles[node]
        assert isinstance(source, fx.Node) and isinstance(transfer, Transfer)
        value = source.meta["val"]
        self.landing[node] = Arrive(number)
        self.entries.append(_Fetched(number, self.addresses.symbols[source], _rows(value), value.element_size(),
                                     transfer.lower, transfer.upper))

    def _gather(self, node: fx.Node) -> None:
        table, index = node.args
        assert isinstance(table, fx.Node) and isinstance(index, fx.Node)
        self._arrive(index)
        self.landing[node] = Found(self.found)
        self.entries.append(_Gather(self.found, self.addresses.symbols[table], _rows(table.meta["val"]),
                                    self.addresses.ref(index), self.addresses.ref(node)))
        self.found += 1

    def _arrive(self, *nodes: fx.Node) -> None:
        for node in nodes:
            mark = self.landing.pop(storage_of(node)[0], None)
            if mark is not None:
                self.entries.append(mark)

    def _launch(self, node: fx.Node) -> None:
        self._arrive(*node.all_input_nodes)
        for launch in self.launches.of(node):
            parts = (launch.args, launch.kwargs, launch.out, launch.reads, launch.writes)
            self.entries.append(_Recorded(launch, tuple(map(has_symbols, parts))))


def _instance(layer: int, given: Iterable[tuple[str, fx.Node]], places: Mapping[str, Place]) -> _Instance:
    """A use of a graph whose symbols stand for these placeholders of the step graph."""
    symbols, names = {}, {}
    for symbol, node in given:
        mark = node.meta.get(META)
        if isinstance(mark, WeightInput):
            names[symbol] = name = mark.name
        elif isinstance(mark, CacheInput):
            name = f"cache_{mark.side}_{mark.layer}"
        else:
            continue
        place = places.get(name)
        if place is not None:  # else it streams from disk
            symbols[symbol] = place
    return _Instance(layer, symbols, names)


def _rows(value: torch.Tensor) -> int:
    return max(1, value.shape[0] if value.dim() else 1)


def _activations(call: fx.Node) -> list[fx.Node]:
    """The arguments of a block call that are neither weights nor cache."""
    return [arg for arg in call.args if isinstance(arg, fx.Node) and arg.meta.get(META) is None and values_of(arg)]


def _place(ref: TensorRef) -> Place:
    return ref.arena, ref.offset, ref.buffer


def _writes_argument(node: fx.Node) -> bool:
    """Whether an operator works in place (and may return, as an alias, what it wrote)."""
    return isinstance(node.target, torch._ops.OpOverload) and bool(mutated_arguments(node.target))


def _flatten(value: object) -> list[object]:
    return [v for item in value for v in _flatten(item)] if isinstance(value, tuple | list) else [value]

