"""Recording of a graph's launches, made once with symbols for the memory that differs from use to use."""

from __future__ import annotations

import operator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from forebay.kernels.operators import ASSIGN_SLOTS, CHOOSE_BLOCKS, EXPERTS, of_target
from forebay.passes.lower.addresses import Address, Addresses, Symbols, has_symbols, settled
from forebay.passes.lower.launches import Launches, Workspace
from forebay.passes.lower.out_variants import mutated_arguments
from forebay.passes.lower.pool_launches import PooledExperts
from forebay.passes.place.arrange_block import reads_matrix, touches_cache
from forebay.passes.place.insert_transfers import tile_readers
from forebay.rewriter.ir import ops
from forebay.rewriter.ir.draft import Arrive, Exchanged, Found, Free
from forebay.rewriter.ir.gathers import last_reader
from forebay.rewriter.ir.graph import META, Transfer, is_collective, is_pipeline_send, storage_of, values_of
from forebay.rewriter.ir.program import COLLECT, COMPUTE, Launch, Release, TensorRef


@dataclass(frozen=True, slots=True)
class Recorded:
    """A launch to be stamped, and which of its parts name memory that differs from layer to layer: args, kwargs, out,
    reads, writes."""

    launch: Launch
    symbolic: tuple[bool, ...]


@dataclass(frozen=True, slots=True)
class Gather:
    """A row lookup to be stamped: rows named by `index`, of the weight [rows, ...] of symbol `table`, to `out`. Of
    experts, of which `out` keeps those that are not named, so many tokens make so many `picks` each; so many `rounds`
    have such lookups (0: it reads as many as it may). `spares` as of `Rows`."""

    number: int
    table: str  # a symbol
    rows: int
    index: TensorRef
    out: TensorRef
    tokens: int = 0
    picks: float = 0.0
    rounds: int = 1
    spares: tuple[TensorRef, ...] = ()


@dataclass(frozen=True, slots=True)
class Fetched:
    """A copy to be stamped: rows [lower, upper) of the weight [rows, ...] that `source` stands for."""

    number: int
    source: str  # a symbol
    rows: int
    itemsize: int
    lower: int
    upper: int


@dataclass(frozen=True, slots=True)
class Staging:
    """Here a cache is brought to the device for its turn, or, where `ends`, kept. `chosen` are the numbers that a
    launch before gave (`choose_blocks`), by which some of its blocks are brought alone."""

    ends: bool
    chosen: TensorRef | None = None


@dataclass(frozen=True, slots=True)
class Ahead:
    """The next launch gathers a weight of so many bytes, which may come before it is read; symbol `number` of those."""

    number: int
    nbytes: int


# numbers and labels in marks are the graph's own
Entry = Recorded | Gather | Fetched | Staging | Ahead | Release | Arrive | Free | Found | Exchanged


@dataclass
class Recording:
    """The launches of one graph, or of a piece of one, and where its results lie; `settled` for each micro-batch."""

    entries: tuple[Entry, ...]
    results: tuple[Address, ...] = ()
    settled: dict[int, tuple[Entry, ...]] = field(default_factory=dict)

    def of_turn(self, micro_batch: int, symbols: Symbols) -> tuple[Entry, ...]:
        """The entries for a micro-batch whose activations these symbols stand for."""
        found = self.settled.get(micro_batch)
        if found is None:
            found = self.settled[micro_batch] = tuple([with_symbols(entry, symbols) for entry in self.entries])
        return found


def parts_of(entry: Recorded, symbols: Symbols) -> tuple[Any, ...]:
    """args, kwargs, out, reads and writes of a launch with symbols settled; layers share the parts that are the same
    for all."""
    k = entry.launch
    args, kwargs, out, reads, writes = k.args, k.kwargs, k.out, k.reads, k.writes
    if True in entry.symbolic:
        in_args, in_kwargs, in_out, in_reads, in_writes = entry.symbolic
        args = settled(args, symbols) if in_args else args
        kwargs = {name: settled(v, symbols) for name, v in kwargs.items()} if in_kwargs else kwargs
        out = settled(out, symbols) if in_out else out
        reads = settled(reads, symbols) if in_reads else reads
        writes = settled(writes, symbols) if in_writes else writes
    return args, kwargs, out, reads, writes


def with_symbols(entry: Entry, symbols: Symbols) -> Entry:
    """An entry with some of its symbols settled."""
    if isinstance(entry, Recorded):
        args, kwargs, out, reads, writes = parts = parts_of(entry, symbols)
        k = entry.launch
        return Recorded(Launch(k.stream, k.op, args, kwargs, out, reads, writes, k.label, k.layer, k.flops,
                               k.workspace_nbytes, k.impl, k.held), tuple(map(has_symbols, parts)))
    if isinstance(entry, Release):
        return Release(entry.stream, settled(entry.span, symbols))
    if isinstance(entry, Gather):
        return replace(entry, index=settled(entry.index, symbols), out=settled(entry.out, symbols),
                       spares=settled(entry.spares, symbols))
    if isinstance(entry, Staging) and entry.chosen is not None:
        return Staging(entry.ends, settled(entry.chosen, symbols))
    return entry


class Recorder:
    """Records nodes of one graph: launches with symbols, and marks with numbers of the graph's own.

    Unless it is recorded as a `whole`, the graph is cut into pieces where all micro-batches may take their turns:
    behind each tile of a matrix, so that the tile need not stay longer, and behind lookups, so that all are under way;
    and around what stages hand on, which all have in one order. What nobody reads of that is waited for at the end.
    With `staged`, marks stand before the first and behind the last operator that touches the cache, behind which a
    graph that is `cut` ends a piece.
    """

    def __init__(
        self, addresses: Addresses, workspace: Workspace, whole: bool = False, staged: bool = False, cut: bool = False
    ) -> None:
        self.addresses, self.whole, self.staged, self.cut = addresses, whole, staged, cut
        self.launches = Launches(addresses.ref, workspace)
        self.entries: list[Entry] = []
        self.landing: dict[fx.Node, Arrive | Found | Exchanged] = {}  # storage node -> the mark before its first reader
        self.found = 0
        self.ends: dict[fx.Node, list[fx.Node]] = {}  # weights gathered ahead that nobody reads behind a node
        for node in addresses.ahead:
            self.ends.setdefault(last_reader(node), []).append(node)

    def record(self, nodes: list[fx.Node]) -> list[Recording]:
        """Record these nodes, which follow the recorded ones, in one piece or several."""
        pieces: list[Recording] = []
        self.entries = []
        results: tuple[Address, ...] = ()
        touching = [n for n in nodes if touches_cache(n)] if self.staged else []
        chooses = bool(touching) and of_target(touching[0].target) is CHOOSE_BLOCKS
        for node in nodes:
            if touching and node is touching[0] and not chooses:
                self.entries.append(Staging(False))
            if node.op == "output":
                self._arrive(*node.all_input_nodes)
                self.entries += [mark for mark in self.landing.values() if isinstance(mark, Exchanged)]
                results = tuple(place_of(self.addresses.ref(v)) for v in flatten(node.args[0])
                                if isinstance(v, fx.Node) and values_of(v))
            elif node.op == "call_module":
                self._arrive(*node.all_input_nodes)
            elif node.target is ops.fetch:
                self._fetch(node)
            elif node.target is ops.release:
                tile = node.args[0]
                self.entries.append(Free(self.addresses.tiles[tile], _reader(tile)))  # type: ignore[index, arg-type]
            elif node.target is ops.gather_rows:
                self._gather(node)
            elif node.target is ops.experts_from_pool:
                self._experts_from_pool(node)
            elif node.op == "call_function" and node.target is not operator.getitem and (
                    node.meta.get("alias_of") is None or _writes_argument(node)):
                self._launch(node)
            if chooses and node is touching[0]:
                self.entries.append(Staging(False, self.addresses.ref(node)))
            if touching and node is touching[-1]:
                self.entries.append(Staging(True))
            self.entries += [Release(COMPUTE, span) for span in self.addresses.ends(node)]
            self.entries += [Release(COMPUTE, self.addresses.gathered(n)) for n in self.ends.get(node, ())]
            if (self.cut and touching and node is touching[-1]) or (not self.whole and _ends_turn(node)):
                pieces.append(Recording(tuple(self.entries)))
                self.entries = []
        return [*pieces, Recording(tuple(self.entries), results)]

    def _fetch(self, node: fx.Node) -> None:
        source, transfer, number = node.args[0], node.meta[META], self.addresses.tiles[node]
        assert isinstance(source, fx.Node) and isinstance(transfer, Transfer)
        value = source.meta["val"]
        self.landing[node] = Arrive(number, _reader(node))
        self.entries.append(Fetched(number, self.addresses.symbols[source], _rows(value), value.element_size(),
                                     transfer.lower, transfer.upper))

    def _gather(self, node: fx.Node) -> None:
        table, index = node.args
        assert isinstance(table, fx.Node) and isinstance(index, fx.Node)
        self._arrive(index)
        self.landing[node] = Found(self.found)
        self.entries.append(Gather(self.found, self.addresses.symbols[table], _rows(table.meta["val"]),
                                    self.addresses.ref(index), self.addresses.ref(node)))
        self.found += 1

    def _experts_from_pool(self, node: fx.Node) -> None:
        self._arrive(*node.all_input_nodes)
        pooled = PooledExperts(node, self.addresses)
        rounds, pool, listed = list(pooled.rounds()), pooled.pool(), pooled.listed()
        if listed is not None:
            self.entries.append(Gather(self.found, pooled.source, pooled.experts, listed, pooled.memory_ahead(),
                                        pooled.tokens, rounds=0))
        self._add(self.launches.counted(ASSIGN_SLOTS, pooled.assign()))
        for behind in range(-1, len(rounds)):
            if behind >= 0:
                if rounds[behind].want is not None:
                    self.entries.append(Found(self.found + behind))
                self._add(self.launches.counted(EXPERTS, rounds[behind].launch))
            self.entries += [
                Gather(self.found + i, pooled.source, pooled.experts, each.want, pool, pooled.tokens, pooled.own_picks,
                       len(rounds) - 1, each.spares)
                for i, each in enumerate(rounds) if each.want is not None and max(-1, each.after) == behind]
            if listed is not None and behind == min(1, len(rounds) - 2):  # launches that free slots come first
                self.entries += [Found(self.found)] if not behind else []  # round 1 waits for all issued before it
                self._add(self.launches.counted(EXPERTS, pooled.come_ahead()))
                self._add(pooled.list_next())
        self.found += len(rounds)

    def _arrive(self, *nodes: fx.Node) -> None:
        marks = [mark for node in nodes if (mark := self.landing.pop(storage_of(node)[0], None)) is not None]
        self.entries += marks

    def _launch(self, node: fx.Node) -> None:
        self._arrive(*node.all_input_nodes)
        if node in self.addresses.ahead:
            self.entries.append(Ahead(self.addresses.ahead[node], self.addresses.gathered(node).nbytes))
        for launch in self.launches.of(node):
            self._add(replace(launch, reads=tuple(self.addresses.whole_tile(span) for span in launch.reads)))
            if launch.stream == COLLECT:
                self.landing[storage_of(node)[0]] = Exchanged(launch.label)

    def _add(self, launch: Launch) -> None:
        parts = (launch.args, launch.kwargs, launch.out, launch.reads, launch.writes)
        self.entries.append(Recorded(launch, tuple(map(has_symbols, parts))))


def _reader(tile: fx.Node) -> str:
    """The stream that reads a tile."""
    return COLLECT if all(map(is_collective, tile_readers(tile))) else COMPUTE


def _ends_turn(node: fx.Node) -> bool:
    """Return whether micro-batches may take turns after this node: values that live then have memory in each
    (`outlive_turns`)."""
    sends = is_pipeline_send(node) or (node.op == "call_function" and is_pipeline_send(node.next))
    if node.target is ops.gather_rows or sends:
        return True
    tile = node.args[0] if node.target is ops.release else None
    return isinstance(tile, fx.Node) and reads_matrix(tile.args[0])  # type: ignore[arg-type]


def _rows(value: torch.Tensor) -> int:
    return max(1, value.shape[0] if value.dim() else 1)


def place_of(ref: TensorRef) -> Address:
    return ref.arena, ref.offset, ref.buffer


def _writes_argument(node: fx.Node) -> bool:
    """Return whether an operator works in place (and may return, as an alias, what it wrote)."""
    return isinstance(node.target, torch._ops.OpOverload) and bool(mutated_arguments(node.target))


def flatten(value: object) -> list[object]:
    return [v for item in value for v in flatten(item)] if isinstance(value, tuple | list) else [value]

