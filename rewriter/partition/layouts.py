"""What a layer takes in each layout: products, attention and collectives of one chip, and what it holds."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations
from typing import Literal

from forebay.rewriter.partition.collectives import ChipMesh, Collective, collective_s
from forebay.rewriter.predict.estimator import Estimator
from forebay.rewriter.predict.model_shapes import MLP, LayerShape, ModelError, ModelShape

Feedforward = Literal["1d", "2d", "x", "xy", "xyz"]
Attention = Literal["heads", "batch"]
NAMES: dict[Feedforward, str] = {"1d": "1D weight-stationary", "2d": "2D weight-stationary", "x": "X-weight-gathered",
                                 "xy": "XY-weight-gathered", "xyz": "XYZ-weight-gathered"}
WEIGHT_NBYTES = {"bf16": 2.0, "int8": 1.0}
WEIGHTS = "weights"  # what weight-gathered layouts exchange
ACTIVATION_NBYTES = 2  # activations, K and V are bfloat16, with weights of int8 too (section 3.6)


@dataclass(frozen=True)
class PhaseWork:
    """One forward pass: `batch` sequences of `tokens` new tokens each, that end with `context` tokens in the cache."""

    name: str
    batch: int
    tokens: int
    context: float

    @property
    def rows(self) -> int:
        return self.batch * self.tokens


@dataclass(frozen=True)
class ChipLayout:
    """How a layer lies on the mesh. `wide`: axes that split the hidden size of weights (none in 1D), the others split
    the feed-forward size; `gathered`: axes over which weights are gathered and sequences split."""

    feedforward: Feedforward
    wide: tuple[int, ...]
    gathered: tuple[int, ...]
    attention: Attention


@dataclass(frozen=True)
class LayerCost:
    """Of one layer on one chip. `compute_s` and `memory_s` are what operations and bytes alone would take; `time_s`
    has the slower of the two of every product, and all collectives but those of weights, which run beside the products
    of the layer before: they need nothing of it. Collectives of activations are hidden by nothing. `working_nbytes`:
    activations, and weights while they are gathered, of this layer and the next."""

    time_s: float
    compute_s: float
    memory_s: float
    communication_s: float
    collectives: tuple[Collective, ...]
    weights_nbytes: float
    cache_nbytes: float
    working_nbytes: float


@dataclass(frozen=True)
class BlockWidths:
    """Widths of a layer's products, in elements: into and out of attention and feed-forward; `inner` is the
    feed-forward size behind its gate."""

    hidden: int
    query: int
    key_value: int
    up: int
    inner: int
    extra: int  # weight elements that no product multiplies by

    @staticmethod
    def of(layer: LayerShape) -> BlockWidths:
        """ModelError for experts, and for layers whose products are not those of a plain or gated feed-forward."""
        products = layer.matrices(MLP)
        up = sum(n for n, k in products if k == layer.hidden)
        inner = sum(k for n, k in products if k != layer.hidden)
        if layer.active_share(MLP) < 1 or len(products) not in (2, 3) or up != (len(products) - 1) * inner:
            raise ModelError("this layer's feed-forward is neither two products nor three with a gate (experts, or "
                             "weights of equal sides); only those are partitioned")
        query, key_value = layer.heads * layer.head_dim, layer.kv_elements
        counted = layer.hidden * (2 * query + key_value + up + inner)
        return BlockWidths(layer.hidden, query, key_value, up, inner,
                     max(0, layer.elements("attention") + layer.elements(MLP) - counted))

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


def layer_cost(layer: LayerShape, layout: ChipLayout, mesh: ChipMesh, work: PhaseWork, times: Estimator,
               *, parallel: bool = False, weights: str = "bf16") -> LayerCost:
    """One layer of a phase. `parallel`: attention and feed-forward read the same input, so that their products are
    fused and their exchanges along the hidden size happen once (section 3.4)."""
    block, itemsize = BlockWidths.of(layer), WEIGHT_NBYTES[weights]
    into = [block.query + block.key_value + block.up] if parallel else [block.query + block.key_value, block.up]
    out = [block.query + block.inner] if parallel else [block.query, block.inner]
    share = math.ceil(work.batch / mesh.size(layout.gathered)) * work.tokens  # rows of a chip's products
    deep = tuple(i for i in mesh.axes if i not in layout.wide)
    rest = tuple(i for i in mesh.axes if i not in layout.gathered)
    stationary = not layout.gathered
    k_parts, n_parts = (mesh.size(layout.wide), mesh.size(deep)) if stationary else (1, mesh.size(rest))
    exchanged = list(_gathers(block, layout, mesh, itemsize))
    time_s = compute_s = memory_s = 0.0
    for widths, split in ((into, "in"), (out, "out")):
        for width in widths:
            n, k = (width, block.hidden) if split == "in" else (block.hidden, width)
            parts = (n_parts, k_parts) if split == "in" else (k_parts, n_parts)
            n_local, k_local = math.ceil(n / parts[0]), math.ceil(k / parts[1])
            nbytes = n_local * k_local * itemsize + share * (n_local + k_local) * ACTIVATION_NBYTES
            time_s += times.product_s("bfloat16", share, n_local, k_local, nbytes=nbytes)
            compute_s += times.work_s(2.0 * share * n_local * k_local, 0.0)
            memory_s += times.work_s(0.0, nbytes)
            exchanged += _activations(block.hidden, width, layout, deep if stationary else rest, mesh, share, split)
    attention = _attention(layer, block, layout, rest, mesh, work)
    exchanged += attention.collectives
    attended_s = times.attention_s("bfloat16", attention.nbytes, attention.flops)
    communication_s = sum(collective_s(item, mesh) for item in exchanged)
    fetched_s = sum(collective_s(item, mesh) for item in exchanged if item.what == WEIGHTS)
    gathered = 0.0 if stationary else 2 * block.elements * itemsize / mesh.size(rest)
    live = share * (block.hidden / k_parts + (block.query + block.key_value + block.up) / n_parts) * ACTIVATION_NBYTES
    done_s = max(time_s + attended_s, fetched_s) + communication_s - fetched_s
    compute_s += times.attention_s("bfloat16", 0.0, attention.flops)
    memory_s += times.attention_s("bfloat16", attention.nbytes, 0.0)
    return LayerCost(done_s, compute_s, memory_s, communication_s, tuple(exchanged),
                     block.elements * itemsize / mesh.chips, attention.nbytes, gathered + live)


def _gathers(block: BlockWidths, layout: ChipLayout, mesh: ChipMesh, itemsize: float) -> Iterator[Collective]:
    """Weights, as they are read by the products: gathered over some axes, split over the others."""
    if layout.gathered:
        nbytes = block.elements * itemsize * mesh.size(layout.gathered) / mesh.chips
        yield Collective("all-gather", layout.gathered, nbytes, WEIGHTS)


def _activations(hidden: int, width: int, layout: ChipLayout, deep: tuple[int, ...], mesh: ChipMesh, rows: int,
                 split: str) -> Iterator[Collective]:
    """Stationary: the hidden size is gathered over the axes that split the other one, and the other way round; partial
    sums of a product are scattered over the axes that split what it sums over."""
    wide = layout.wide if not layout.gathered else ()
    along = rows * hidden / mesh.size(wide) * ACTIVATION_NBYTES
    across = rows * width / mesh.size(deep) * ACTIVATION_NBYTES
    if split == "in":
        yield Collective("all-gather", deep, along, "input")
        yield Collective("reduce-scatter", wide, across, "inner partial sums")
    else:
        yield Collective("all-gather", wide, across, "inner")
        yield Collective("reduce-scatter", deep, along, "output partial sums")


@dataclass(frozen=True)
class _Attended:
    nbytes: float
    flops: float
    collectives: tuple[Collective, ...]


def _attention(layer: LayerShape, block: BlockWidths, layout: ChipLayout, rest: tuple[int, ...], mesh: ChipMesh,
               work: PhaseWork) -> _Attended:
    """A chip's K and V, operations, and what it exchanges to come by them (section 3.3)."""
    over, sequences = mesh.size(rest), math.ceil(work.batch / mesh.size(layout.gathered))
    rows, itemsize = sequences * work.tokens, ACTIVATION_NBYTES
    seen = work.context - (work.tokens - 1) / 2  # causal: the first of them sees fewer
    kept = min(work.context, layer.window) if layer.window else work.context
    seen = min(seen, layer.window) if layer.window else seen
    if layout.attention == "batch":
        own, heads, kv_heads = math.ceil(work.batch / mesh.chips), layer.heads, layer.kv_heads
        moved = (Collective("all-to-all", rest, rows * (block.query + block.key_value) / over * itemsize, "q, k, v"),
                 Collective("all-to-all", rest, rows * block.query / over * itemsize, "attended"))
    else:
        own, heads, kv_heads = sequences, math.ceil(layer.heads / over), math.ceil(layer.kv_heads / over)
        copied = kv_heads * over > layer.kv_heads  # some chips hold the same heads
        nbytes = rows * 2 * kv_heads * layer.head_dim * itemsize
        moved = (Collective("all-gather", rest, nbytes, "k, v"),) if copied and over > 1 else ()  # type: ignore[assignment]
    return _Attended(own * kept * 2 * kv_heads * layer.head_dim * itemsize,
                     4.0 * own * work.tokens * seen * heads * layer.head_dim, moved)


def feedforward_nbytes(layout: ChipLayout, mesh: ChipMesh, rows: int, hidden: int, inner: int) -> float:
    """Bytes of one chip's collectives for `rows` tokens through two products of `hidden` by `inner`, everything of two
    bytes: what Pope et al.'s Figure 3 counts."""
    deep = tuple(i for i in mesh.axes if i not in (layout.gathered or layout.wide))
    share = rows // mesh.size(layout.gathered)
    items = list(_gathers(BlockWidths(hidden, 0, 0, inner, inner, 0), layout, mesh, WEIGHT_NBYTES["bf16"]))
    for split in ("in", "out"):
        items += _activations(hidden, inner, layout, deep, mesh, share, split)
    return sum(item.nbytes for item in items if mesh.size(item.axes) > 1)


def outside_cost(model: ModelShape, mesh: ChipMesh, batch: int, times: Estimator,
                 weights: str = "bf16") -> LayerCost:
    """The head, once per new token of a sequence, its rows split over all chips; and what the table of tokens holds."""
    layer, itemsize = model.layers[0], WEIGHT_NBYTES[weights]
    vocabulary = math.ceil(model.head_elements / layer.hidden / mesh.chips)
    nbytes = vocabulary * layer.hidden * itemsize
    item = Collective("all-gather", mesh.axes, batch * layer.hidden * ACTIVATION_NBYTES, "last hidden state")
    communication_s = collective_s(item, mesh)
    product_s = times.product_s("bfloat16", batch, vocabulary, layer.hidden, nbytes=nbytes)
    return LayerCost(product_s + communication_s, times.work_s(2.0 * batch * vocabulary * layer.hidden, 0.0),
                     times.work_s(0.0, nbytes), communication_s, (item,),
                     sum(t.elements for t in model.outside) * itemsize / mesh.chips, 0.0,
                     batch * (layer.hidden + vocabulary) * ACTIVATION_NBYTES)
