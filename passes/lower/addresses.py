"""Addresses of a graph's values: symbols stand for the memory that differs from layer to layer, or from micro-batch to
micro-batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import fx

from forebay.rewriter.ir import ops
from forebay.rewriter.ir.gathers import GATHER_BUFFER, gathers_weight
from forebay.rewriter.ir.graph import META, STREAMED, Layout, WeightInput, storage_of, values_of
from forebay.rewriter.ir.program import Span, TensorRef
from forebay.rewriter.ir.schedule.batch_schedule import BatchSchedule
from forebay.rewriter.ir.state import StateInput

# A symbol stands in place of an arena where the address is known only when a layer is stamped: "?w3" is the memory that
# the graph's placeholder 3 stands for, "?t2" the tile that its fetch number 2 brings, "?ax" the planned buffer x of the
# micro-batch whose turn it is, "?g1" the weight that its gather number 1 brings ahead, "?p3" and "?r3" the pool of
# placeholder 3, a table of experts, and what is known of it, "?e" what experts gave, and "?h" memory of those that are
# read ahead; all layers share these two.
WEIGHT, TILE, ACTIVATION, GATHERED, POOL, ROUTING, RESULTS, AHEAD = "?w", "?t", "?a", "?g", "?p", "?r", "?e", "?h"
Address = tuple[str, int, str]  # arena, byte address, buffer name
Symbols = Mapping[str, Address]


class Addresses:
    """Resolves the values of one graph.

    `prefix` is what the layout's names have in front of this graph's (a layer of the graph it was made on); `inputs`
    the places of placeholders that are neither weights nor cache.
    """

    def __init__(self, gm: fx.GraphModule, layout: Layout, prefix: str, inputs: Mapping[fx.Node, Address]) -> None:
        self.layout, self.prefix, self.inputs = layout, prefix, inputs
        self.made: dict[tuple[fx.Node, int], Address] = {}  # by block calls
        nodes = list(gm.graph.nodes)
        self.symbols = {n: f"{WEIGHT}{i}" for i, n in enumerate(n for n in nodes if n.op == "placeholder")}
        self.tiles = {n: i for i, n in enumerate(n for n in nodes if n.target is ops.fetch)}
        self._fetched = {f"{TILE}{i}": values_of(n)[0].untyped_storage().nbytes() for n, i in self.tiles.items()}
        early = [n for n in nodes if gathers_weight(n)] if GATHER_BUFFER in layout.buffers else []
        self.ahead = {n: i for i, n in enumerate(early)}
        self._refs: dict[tuple[fx.Node, int], TensorRef] = {}

    def ref(self, node: fx.Node, result: int = 0) -> TensorRef:
        """Return the memory of a node's value; `result` picks one of several."""
        known = self._refs.get((node, result))
        if known is None:
            value = values_of(node)[result]
            base, element = storage_of(node)
            arena, address, buffer = self._place(base, result if base is node else element)
            before = int(value.storage_offset()) * value.element_size() if value.numel() else 0  # none may be there
            known = self._refs[node, result] = TensorRef(
                arena, address + before, str(value.dtype)[6:], tuple(value.shape), tuple(value.stride()), buffer)
        return known

    def _place(self, base: fx.Node, element: int) -> Address:
        if base.target is ops.fetch:
            symbol = f"{TILE}{self.tiles[base]}"
            return symbol, 0, symbol
        if base in self.ahead:
            symbol = f"{GATHERED}{self.ahead[base]}"
            return symbol, 0, symbol
        if base.op == "placeholder":
            if isinstance(base.meta.get(META), WeightInput | StateInput):
                return self.symbols[base], 0, self.symbols[base]
            if base in self.inputs:
                return self.inputs[base]
        if base.op == "call_module":
            return self.made[base, element]
        symbol = ACTIVATION + self.buffer(base, element)
        return symbol, 0, symbol

    def buffer(self, node: fx.Node, element: int) -> str:
        """Name of the planned buffer that holds (an element of) what `node` makes."""
        name = self.prefix + node.name
        home = self.layout.home
        found = home.get((name, element)) or home.get((name.removesuffix(STREAMED), element))
        if found is None:
            raise KeyError(f"lower: allocate_buffers planned no memory for {name}")
        return found

    def gathered(self, node: fx.Node) -> Span:
        """Return the memory of a weight that is gathered ahead."""
        symbol = f"{GATHERED}{self.ahead[node]}"
        return Span(symbol, 0, values_of(node)[0].untyped_storage().nbytes(), symbol)

    def whole_tile(self, span: Span) -> Span:
        """Return the whole fetch that a span is part of: its other bytes may have no reader. Others stay."""
        tile = self._fetched.get(span.arena)
        return span if tile is None else Span(span.arena, 0, max(tile, span.offset + span.nbytes), span.buffer)

    def ends(self, node: fx.Node) -> list[Span]:
        """The buffers whose contents die with `node`; those that die with a product computed in tiles die with its
        last tile."""
        ends = self.layout.ends
        name = self.prefix + node.name
        own = name.removesuffix(STREAMED) if node.target is ops.experts_from_pool else name
        dying = ends.get(own, ())
        if node.target in ops.TILES:
            out = node.args[0]
            assert isinstance(out, fx.Node)
            if node is [u for u in out.users if u.target in ops.TILES and u.args[0] is out][-1]:
                dying = (*dying, *ends.get(self.prefix + out.name.removesuffix(STREAMED), ()))
        return [Span(ACTIVATION + name, 0, self._nbytes(name), ACTIVATION + name) for name in dying]

    def _nbytes(self, name: str) -> int:
        buffers = self.layout.buffers
        return (buffers.get(name) or buffers[f"{name}@0"]).nbytes


def micro_batch_symbols(layout: Layout, number: int, batching: BatchSchedule) -> dict[str, Address]:
    """Return the values of the symbols of planned buffers during a turn of micro-batch `number` of `block`. Contents go
    by its name, so that nobody takes them for those of another that uses the same memory."""
    count, region = batching.micro_batches.count, batching.hidden_regions()[number]
    if count == 1:
        return {ACTIVATION + b.name: (b.arena, b.offset, b.name) for b in layout.buffers.values()}
    found = {}
    for name in dict.fromkeys(layout.home.values()):
        own, shared = f"{name}@{number}", layout.buffers.get(name)
        b = shared or layout.buffers[f"{name}@{region}"]
        whole = b.kind == "io"  # the caller's, of all micro-batches
        found[ACTIVATION + name] = (b.arena, b.offset + number * (b.nbytes // count) * whole, name if whole else own)
    return found


def settled(value: Any, symbols: Symbols) -> Any:
    """`value` (a reference, a span, or anything that holds them) with symbols replaced by addresses."""
    kind = type(value)
    if kind is TensorRef:
        place = symbols.get(value.arena)
        return value if place is None else TensorRef(
            place[0], place[1] + value.offset, value.dtype, value.shape, value.stride, place[2])
    if kind is Span:
        place = symbols.get(value.arena)
        return value if place is None else Span(place[0], place[1] + value.offset, value.nbytes, place[2])
    if kind is tuple or kind is list:
        return kind([settled(v, symbols) for v in value])
    return value


def has_symbols(value: object) -> bool:
    """Return whether any address in `value` is a symbol."""
    if isinstance(value, TensorRef | Span):
        return value.arena.startswith("?")
    if isinstance(value, tuple | list):
        return any(map(has_symbols, value))
    return isinstance(value, dict) and any(map(has_symbols, value.values()))
