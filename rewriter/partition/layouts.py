"""Costs of a layer in each layout: matmuls, attention, collectives and memory of one chip."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import combinations
from typing import Literal

from forebay.rewriter.ir.program import dtype_itemsize
from forebay.rewriter.partition.collectives import INNER, INPUT, OUTPUT, ChipMesh, Collective, collective_s
from forebay.rewriter.predict.estimator import Estimator
from forebay.rewriter.predict.model_shapes import ATTENTION, DTYPES, MLP, LayerShape, ModelShape

Feedforward = Literal["1d", "2d", "x", "xy", "xyz"]
Attention = Literal["heads", "batch"]
NAMES: dict[Feedforward, str] = {"1d": "1D weight-stationary", "2d": "2D weight-stationary", "x": "X-weight-gathered",
                                 "xy": "XY-weight-gathered", "xyz": "XYZ-weight-gathered"}
WEIGHTS = "weights"  # what weight-gathered layouts exchange
CHUNKS = (1, 2, 4, 8)  # parts in which a product's sums may be exchanged, or its input gathered
INT8 = "int8"
STORED = (*DTYPES, INT8)  # what weights may be


@dataclass(frozen=True)
class ElementSizes:
    """The dtype of products, and bytes of an element of weights, and of activations, K and V."""

    dtype: str
    weight: float
    activation: float


@cache
def element_sizes(weights: str) -> ElementSizes:
    """By what weights are, one of `STORED`: activations, K and V are bfloat16 with weights of int8 too (section 3.6).
    """
    dtype = "bfloat16" if weights == INT8 else weights
    return ElementSizes(dtype, dtype_itemsize(weights), dtype_itemsize(dtype))


@dataclass(frozen=True)
class PhaseWork:
    """One forward pass: `batch` sequences of `tokens` new tokens each, that end with `context` tokens in the cache."""

    name: str
    batch: float
    tokens: float
    context: float

    @property
    def rows(self) -> float:
        return self.batch * self.tokens


@dataclass(frozen=True)
class ChipLayout:
    """How a layer lies on the mesh. `wide`: axes that split the hidden size of weights (none in 1D), the others split
    the feed-forward size; `gathered`: axes over which weights are gathered and sequences split; `copied`: chips that
    share a head of keys and values each compute it, as ranks do here, where the paper's gather it. `chunks`: parts of
    a product, of which one is exchanged beside the product of the next (section 3.5); `gather_chunks`: parts in which
    what is between two products is gathered, one beside the product of the one before, whose sums are exchanged at
    once."""

    feedforward: Feedforward
    wide: tuple[int, ...]
    gathered: tuple[int, ...]
    attention: Attention
    copied: bool = False
    chunks: int = 1
    gather_chunks: int = 1

    @property
    def output_chunks(self) -> int:
        """Parts of a layer's output: its products fall in one way."""
        return self.chunks if self.gather_chunks == 1 else 1


@dataclass(frozen=True)
class LayerCost:
    """The cost of one layer on one chip. `compute_s` and `memory_s` are what operations and bytes alone would take;
    `time_s` has the slower of the two of every product, and all collectives but those of weights, which run beside the
    products of the layer before: they need nothing of it. Of those of activations `hidden_s` run beside products too.
    `working_nbytes`: activations, and weights while they are gathered, of this layer and the next."""

    time_s: float
    compute_s: float
    memory_s: float
    communication_s: float
    collectives: tuple[Collective, ...]
    weights_nbytes: float
    cache_nbytes: float
    working_nbytes: float
    hidden_s: float = 0.0
    state_nbytes: float = 0.0


@dataclass(frozen=True)
class BlockWidths:
    """Widths of a layer's products, in elements: into and out of attention and feed-forward; `inner` is the
    feed-forward size behind its gate. Those of experts are added up, of which a token takes part in a share `active`.
    """

    hidden: int
    query: int
    key_value: int
    up: int
    inner: int
    extra: int  # weight elements that no product multiplies by
    active: float = 1.0

    @staticmethod
    def of(layer: LayerShape) -> BlockWidths:
        products = layer.matrices(MLP)
        out = [(n, k) for n, k in products if k != layer.hidden] or products[-1:]  # the last, of equal sides
        inner = sum(n * k for n, k in out) // layer.hidden
        up = sum(n * k for n, k in products) // layer.hidden - inner
        query, key_value = layer.heads * layer.head_dim, layer.kv_elements
        if layer.latent or layer.state_nbytes:  # wider or narrower ones: as many elements as its products have
            query = (sum(n * k for n, k in layer.matrices(ATTENTION)) // layer.hidden - key_value) // 2
        counted = layer.hidden * (2 * query + key_value + up + inner)
        return BlockWidths(layer.hidden, query, key_value, up, inner,
                           max(0, layer.elements(ATTENTION) + layer.elements(MLP) - counted), layer.active_share(MLP))

    @property
    def mixture(self) -> bool:
        """Whether the feed-forward is one of experts, which ranks divide among them in 1D layouts alone."""
        return self.active < 1

    @property
    def dense(self) -> bool:
        """Whether the feed-forward is plain or has a gate, without experts."""
        return self.active == 1 and self.inner > 0 and self.up in (self.inner, 2 * self.inner)

    @property
    def elements(self) -> int:
        return self.hidden * (2 * self.query + self.key_value + self.up + self.inner) + self.extra


def layouts(mesh: ChipMesh, work: PhaseWork) -> Iterator[ChipLayout]:
    """Every layout of the mesh. Weight-gathered ones split sequences, so each share needs one at least."""
    ways: list[tuple[Feedforward, tuple[int, ...], tuple[int, ...]]] = [("1d", (), ())]
    for count in range(1, len(mesh.axes)):
        for wide in combinations(mesh.axes, count):
            rest = tuple(i for i in mesh.axes if i not in wide)
            ways.append(("2d", wide, ()))
            for more in range(len(rest) + 1):
                for other in combinations(rest, more):
                    gathered = (*wide, *other)
                    ways.append(("xyz" if more == len(rest) else "x" if len(gathered) == 1 else "xy", wide, gathered))
    for feedforward, wide, gathered in ways:
        if work.batch >= mesh.size(gathered):
            yield ChipLayout(feedforward, wide, gathered, "heads")
            if mesh.chips > 1:
                yield ChipLayout(feedforward, wide, gathered, "batch")


@dataclass(frozen=True)
class ProductCost:
    """The cost of a layer's matmuls on one chip, for so many rows: `fetched_s` of `communication_s` is that of weights,
    and `hidden_s` of it runs beside products."""

    time_s: float
    compute_s: float
    memory_s: float
    communication_s: float
    fetched_s: float
    collectives: tuple[Collective, ...]
    weights_nbytes: float
    working_nbytes: float
    hidden_s: float


@dataclass(frozen=True)
class AttentionCost:
    """The cost of a layer's attention on one chip, over `cache_nbytes` of K and V, and of its recurrences, which read
    and write `state_nbytes`."""

    time_s: float
    compute_s: float
    memory_s: float
    communication_s: float
    collectives: tuple[Collective, ...]
    cache_nbytes: float
    state_nbytes: float


def layer_cost(layer: LayerShape, layout: ChipLayout, mesh: ChipMesh, work: PhaseWork, times: Estimator,
               *, parallel: bool = False, weights: str = "bfloat16") -> LayerCost:
    """One layer of a phase. `parallel`: attention and feed-forward read the same input, so that their products are
    fused and their exchanges along the hidden size happen once (section 3.4)."""
    rows = math.ceil(work.batch / mesh.size(layout.gathered)) * work.tokens
    products = product_cost(layer, layout, mesh, rows, times, parallel=parallel, weights=weights)
    attended = attention_cost(layer, layout, mesh, work, times, weights)
    communication_s = products.communication_s + attended.communication_s
    done_s = max(products.time_s + attended.time_s - products.hidden_s, products.fetched_s) + (
        communication_s - products.fetched_s)
    return LayerCost(done_s, products.compute_s + attended.compute_s, products.memory_s + attended.memory_s,
                     communication_s, (*products.collectives, *attended.collectives), products.weights_nbytes,
                     attended.cache_nbytes, products.working_nbytes, products.hidden_s, attended.state_nbytes)


def product_cost(layer: LayerShape, layout: ChipLayout, mesh: ChipMesh, rows: float, times: Estimator,
                 *, parallel: bool = False, weights: str = "bfloat16") -> ProductCost:
    """The products of one layer over `rows` tokens that a chip computes, of whatever sequences and phases."""
    block, sizes = _with_shared_heads(layer, layout, mesh), element_sizes(weights)
    read_share = (layer.read_elements(rows) - layer.elements(ATTENTION)) / max(1, layer.elements(MLP))
    into = [(block.query + block.key_value, 1.0), (block.up, block.active)]
    out = [(block.query, 1.0), (block.inner, block.active)]
    if parallel:
        into, out = ([(sum(width for width, _ in way), block.active)] for way in (into, out))
    deep = tuple(i for i in mesh.axes if i not in layout.wide)
    rest = tuple(i for i in mesh.axes if i not in layout.gathered)
    stationary = not layout.gathered
    k_parts, n_parts = (mesh.size(layout.wide), mesh.size(deep)) if stationary else (1, mesh.size(rest))
    exchanged = list(_gathers(block, layout, mesh, sizes))
    time_s = compute_s = memory_s = hidden_s = 0.0
    for ways, split in ((into, "in"), (out, "out")):
        for width, share in ways:
            n, k = (width, block.hidden) if split == "in" else (block.hidden, width)
            parts = (n_parts, k_parts) if split == "in" else (k_parts, n_parts)
            moved = list(_activations(block.hidden, width, layout, deep if stationary else rest, mesh,
                                      rows * sizes.activation, split))
            looped = split == "out" and layout.gather_chunks > 1
            beside_s = sum(collective_s(item, mesh) for item in (moved[:1] if looped else _added_up(moved)))
            chunks = (layout.gather_chunks if looped else layout.chunks) if beside_s else 1
            n_local, k_local, many = math.ceil(n / parts[0]), math.ceil(k / parts[1]), share * rows
            read = read_share if share < 1 else 1.0
            again = n_local * (chunks - 1) / chunks if looped else 0  # what pieces before it have added up
            n_local, k_local = ((n_local, math.ceil(k_local / chunks)) if looped else
                                (math.ceil(n_local / chunks), k_local))
            nbytes = read * n_local * k_local * sizes.weight + many * (n_local + k_local + again) * sizes.activation
            product_s = times.product_s(sizes.dtype, many, n_local, k_local, nbytes=nbytes)
            time_s += chunks * product_s
            hidden_s += (chunks - 1) * (1 - mesh.overlap_penalty) * min(product_s, beside_s)
            compute_s += times.work_s(2.0 * many * chunks * n_local * k_local, 0.0)
            memory_s += times.work_s(0.0, chunks * nbytes)
            exchanged += moved
    own = BlockWidths.of(layer).elements * sizes.weight / mesh.chips
    gathered = 0.0 if stationary else 2 * block.elements * sizes.weight / mesh.size(rest)
    widths = block.hidden / k_parts + (block.query + block.key_value + block.active * block.up) / n_parts
    return ProductCost(time_s, compute_s, memory_s, sum(collective_s(item, mesh) for item in exchanged),
                       sum(collective_s(item, mesh) for item in exchanged if item.what == WEIGHTS), tuple(exchanged),
                       own, gathered + rows * widths * sizes.activation, hidden_s)


def _with_shared_heads(layer: LayerShape, layout: ChipLayout, mesh: ChipMesh) -> BlockWidths:
    """A layer's widths, keys' and values' as often as chips compute them. The bytes of these further weights are not
    counted as held."""
    block, over = BlockWidths.of(layer), mesh.chips // mesh.size(layout.gathered)
    if not layout.copied or layout.attention == "batch" or not 0 < layer.kv_heads < over:
        return block
    return replace(block, key_value=block.key_value * over // layer.kv_heads)


def _gathers(block: BlockWidths, layout: ChipLayout, mesh: ChipMesh, sizes: ElementSizes) -> Iterator[Collective]:
    """Weights, as they are read by the products: gathered over some axes, split over the others."""
    if layout.gathered:
        nbytes = block.elements * sizes.weight * mesh.size(layout.gathered) / mesh.chips
        yield Collective("all-gather", layout.gathered, nbytes, WEIGHTS)


def _activations(hidden: int, width: int, layout: ChipLayout, deep: tuple[int, ...], mesh: ChipMesh, column: float,
                 split: str) -> Iterator[Collective]:
    """Stationary: the hidden size is gathered over the axes that split the other one, and the other way round; partial
    sums of a product are scattered over the axes that split what it sums over. `column`: bytes of one element of all
    rows. What leaves a product leaves it in `chunks`, and is gathered for the next in as many; what is between two in
    `gather_chunks`."""
    wide = layout.wide if not layout.gathered else ()
    along = column * hidden / mesh.size(wide)
    across = column * width / mesh.size(deep)
    if split == "in":
        yield from _in_chunks(Collective("all-gather", deep, along, INPUT), layout.output_chunks)
        yield from _in_chunks(Collective("reduce-scatter", wide, across, "inner partial sums"), layout.chunks)
    else:
        yield from _in_chunks(Collective("all-gather", wide, across, INNER), layout.gather_chunks)
        yield from _in_chunks(Collective("reduce-scatter", deep, along, OUTPUT), layout.output_chunks)


def _in_chunks(item: Collective, chunks: int) -> list[Collective]:
    return [replace(item, nbytes=item.nbytes / chunks)] * chunks


def _added_up(moved: Sequence[Collective]) -> Iterator[Collective]:
    """Return the collectives that exchange a chunk of a matmul's sums: the scatter, and the gather of the next matmul's
    input, which needs nothing else."""
    for item in moved:
        if item.kind == "reduce-scatter":
            yield item
            if item.what == OUTPUT:
                yield replace(item, kind="all-gather", what=INPUT)
            return


def attention_cost(layer: LayerShape, layout: ChipLayout, mesh: ChipMesh, work: PhaseWork, times: Estimator,
                   weights: str = "bfloat16") -> AttentionCost:
    """A chip's K and V, operations, and what it exchanges to come by them (section 3.3)."""
    rest, sizes = tuple(i for i in mesh.axes if i not in layout.gathered), element_sizes(weights)
    over, sequences = mesh.size(rest), math.ceil(work.batch / mesh.size(layout.gathered))
    column = sequences * work.tokens * sizes.activation  # bytes of an element of all rows
    kept = min(work.context, layer.window) if layer.window else work.context
    of_head = layer.kv_elements // max(1, layer.kv_heads)
    moved: tuple[Collective, ...] = ()
    if layout.attention == "batch":
        own, heads, kv_heads, parts = math.ceil(work.batch / mesh.chips), layer.heads, layer.kv_heads, 1
        query = layer.heads * layer.head_dim
        moved = (Collective("all-to-all", rest, column * (query + layer.kv_elements) / over, "q, k, v"),
                 Collective("all-to-all", rest, column * query / over, "attended"))
    else:
        own, heads, kv_heads, parts = sequences, math.ceil(layer.heads / over), math.ceil(layer.kv_heads / over), over
        if kv_heads * over > layer.kv_heads and over > 1 and not layout.copied:  # some chips hold the same heads
            moved = (Collective("all-gather", rest, column * kv_heads * of_head, "k, v"),)
    nbytes = own * kept * kv_heads * of_head * sizes.activation
    flops = layer.attended_flops(own, heads, work.tokens, work.context)
    states = own * layer.state_nbytes / parts
    updated_s, recurring_s = times.touch_s(2 * states), times.work_s(own * work.tokens * layer.state_flops / parts, 0.0)
    return AttentionCost(times.attention_s(sizes.dtype, nbytes, flops) + max(updated_s, recurring_s),
                         times.attention_s(sizes.dtype, 0.0, flops) + recurring_s,
                         times.attention_s(sizes.dtype, nbytes, 0.0) + updated_s,
                         sum(collective_s(item, mesh) for item in moved), moved, nbytes, states)


def feedforward_nbytes(layout: ChipLayout, mesh: ChipMesh, rows: int, hidden: int, inner: int) -> float:
    """Bytes of one chip's collectives for `rows` tokens through two products of `hidden` by `inner`, everything of two
    bytes: what Pope et al.'s Figure 3 counts."""
    deep = tuple(i for i in mesh.axes if i not in (layout.gathered or layout.wide))
    share, sizes = rows // mesh.size(layout.gathered), element_sizes("bfloat16")
    items = list(_gathers(BlockWidths(hidden, 0, 0, inner, inner, 0), layout, mesh, sizes))
    for split in ("in", "out"):
        items += _activations(hidden, inner, layout, deep, mesh, share * sizes.activation, split)
    return sum(item.nbytes for item in items if mesh.size(item.axes) > 1)


def outside_cost(model: ModelShape, mesh: ChipMesh, batch: float, times: Estimator,
                 weights: str = "bfloat16") -> LayerCost:
    """The head, once per new token of a sequence, its rows split over all chips; and what the table of tokens holds."""
    layer, sizes = model.layers[0], element_sizes(weights)
    vocabulary = math.ceil(model.head_elements / layer.hidden / mesh.chips)
    nbytes = vocabulary * layer.hidden * sizes.weight
    item = Collective("all-gather", mesh.axes, batch * layer.hidden * sizes.activation, "last hidden state")
    communication_s = collective_s(item, mesh)
    product_s = times.product_s(sizes.dtype, batch, vocabulary, layer.hidden, nbytes=nbytes)
    return LayerCost(product_s + communication_s, times.work_s(2.0 * batch * vocabulary * layer.hidden, 0.0),
                     times.work_s(0.0, nbytes), communication_s, (item,),
                     sum(t.elements for t in model.outside) * sizes.weight / mesh.chips, 0.0,
                     batch * (layer.hidden + vocabulary) * sizes.activation)
