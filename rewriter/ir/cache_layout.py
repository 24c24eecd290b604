"""The geometry of the KV cache: sizes, strides and offsets of its rows and blocks, staged or on the device.

A slot holds one layer's cache of one micro-batch, token by token, K and V beside each other: [B, blocks, T, 2, Hkv, D],
then blocks of checkpoints. Of latents one row is both: [B, blocks, T, 1, 1, D]. Blocks move as rows of words. The
states of a layer that has no cache move whole; those of a layer with a cache stay on the device, as do copies that are
saved for drafts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import fx

from forebay.kernels.operators import of_target
from forebay.rewriter.ir.alignment import PAGE_NBYTES, aligned, whole_pages
from forebay.rewriter.ir.graph import META, values_of
from forebay.rewriter.ir.plan import BufferPlacement, Workload
from forebay.rewriter.ir.program import Span, TensorRef, dtype_itemsize
from forebay.rewriter.ir.schedule.batch_schedule import BatchSchedule
from forebay.rewriter.ir.state import (
    CHECKPOINT_TENSOR,
    KV_TENSORS,
    STATE_KINDS,
    CheckpointState,
    SavedState,
    StateInput,
    StateSpec,
    state_name,
)

OPERANDS = "operands"  # host memory for what a turn's launches there read and write; a buffer for each micro-batch
# inputs of a step with staged caches, each with one part for every micro-batch: rows of its table of blocks
# [B * blocks] that are loaded and stored, and [B] the row of each sequence's tail before and behind the step
LOADS, STORES, BEFORE, BEHIND = "cache_loads", "cache_stores", "cache_before", "cache_behind"
# the same rows of caches without tails: of their last blocks too
WHOLE_LOADS, WHOLE_STORES = "cache_whole_loads", "cache_whole_stores"
# inputs of a step graph with checkpoints: [B, 1, rows] the position that K and V of each row of a checkpoint go to, and
# [B, S] the row that each new token's checkpoint goes to; what is nobody's goes to the last position and row
RESTORED, CHECKPOINTED = "restored_positions", "checkpoint_rows"
# input [B] of steps that choose blocks: the row of the block that is not full yet, -1 where that is the tail
BEGUN = "cache_begun"
BATCH_SLOTS = "batch_slots"  # int64 [entering]: input of a prefill step
ENTERING = "admitted"  # what is staged of one layer
TAIL = "tail_"  # before a layer's number: its blocks that are not full yet
CACHE_STAGING = "cache"  # of staging slots; also the name of the spill file
CACHE_STORE_STAGING = "out"  # of slots that the host lends to what is stored to the disk of a machine with a GPU
STORE_STAGING_COUNT = 2  # one is filled from the device while the other is written
CACHE_HOME_ARENAS = {"device": "device", "host": "host", "disk": CACHE_STAGING}  # by the tier that a cache lives on
WORD = 8  # blocks move as int64
MOST_PADDED = 1.125  # times the bytes of K and V, for checkpoints of twice as many tokens in their room


class OperandSizes(NamedTuple):
    """Operands and results of a block's operators over caches, without the caches: bytes of both, the copies that take
    them between the tiers, and host bytes to hold them."""

    given_nbytes: int
    made_nbytes: int
    copies: int
    room_nbytes: int


NO_OPERANDS = OperandSizes(0, 0, 0, 0)


def operands_of(block: fx.GraphModule) -> OperandSizes:
    """The operands of a block's operators over caches."""
    found = {True: list[int](), False: list[int]()}
    for node in block.graph.nodes:
        operator = of_target(node.target)
        if operator is None or not operator.caches:
            continue
        caches = operator.given_caches(node.args)
        found[True] += [_extent(v) for n in node.all_input_nodes if n not in caches for v in values_of(n)]
        found[False] += map(_extent, values_of(node) if node.meta.get("alias_of") is None else ())
    both = [*found[True], *found[False]]
    return OperandSizes(sum(found[True]), sum(found[False]), len(both), sum(map(aligned, both)))


def _extent(value: torch.Tensor) -> int:
    """Bytes from the first element to behind the last."""
    return (1 + sum((n - 1) * s for n, s in zip(value.shape, value.stride(), strict=True))) * value.element_size()


@dataclass(frozen=True)
class CacheRows:
    """A cache buffer as rows of tokens: `rows` (sequences × heads) of `width` elements per token."""

    rows: int
    width: int
    dtype: str  # torch dtype without the prefix

    def nbytes(self, tokens: int) -> int:
        """Bytes of a buffer that holds so many tokens."""
        return self.rows * tokens * self.width * dtype_itemsize(self.dtype)


@dataclass(frozen=True)
class StagedLayer:
    """One layer's cache in a micro-batch of `sequences`: `blocks` blocks of `block_nbytes` for each; of a token's
    tensors, `names`, each stands `beside` bytes behind the one before. Attention sees a `window` of it (0: all); beside
    it, it has its `operands`. With `checkpoints` a slot has so many blocks of them for each sequence, behind K and V of
    all, and where the cache lives are `kept` blocks of either kind (else as many as in a slot). Of states that move
    whole, as one block of each sequence, `tensors` tells where each begins."""

    sequences: int
    blocks: int
    block_nbytes: int
    beside: int
    window: int = 0
    operands: OperandSizes = NO_OPERANDS
    checkpoints: int = 0
    kept: int = 0
    tensors: tuple[tuple[str, int], ...] = ()
    names: tuple[str, ...] = KV_TENSORS

    @property
    def rows(self) -> int:
        """Blocks of all sequences in a slot."""
        return self.sequences * (self.blocks + self.checkpoints)

    @property
    def nbytes(self) -> int:
        """Bytes of all sequences and blocks in a slot."""
        return self.rows * self.block_nbytes

    @property
    def home_nbytes(self) -> int:
        """Bytes of all sequences where the cache lives."""
        return self.sequences * (self.kept or self.blocks) * self.block_nbytes

    @property
    def tails(self) -> int:
        """Blocks of a micro-batch that are not full yet: one for each sequence, and one of checkpoints."""
        return 0 if self.tensors else self.sequences * (2 if self.checkpoints else 1)

    @property
    def tail_nbytes(self) -> int:
        return self.tails * self.block_nbytes

    @property
    def words(self) -> int:
        """Words of a block."""
        return self.block_nbytes // WORD

    def entering_nbytes(self, tier: str, in_place: bool = False) -> int:
        """Return the bytes of the buffer `admitted` for an admitted sequence: all of a cache on the device, or one that
        it reads `in_place`, of others the tails."""
        stays = tier == "device" or (tier == "host" and in_place)
        return (self.nbytes if stays else self.tail_nbytes) // self.sequences

    def as_blocks(self, place: Span | BufferPlacement, buffer: str, first: int, count: int) -> TensorRef:
        """A place, from block `first` on, as `count` rows of a block each."""
        return TensorRef(place.arena, place.offset + first * self.block_nbytes, "int64", (count, self.words),
                         (self.words, 1), buffer)

    def as_sequences(self, place: Span | BufferPlacement, buffer: str, count: int, tails: bool = False) -> TensorRef:
        """A place as rows of a sequence each: of its whole cache, or of its tails."""
        words = self.words * (self.tails // self.sequences if tails else self.blocks)
        return TensorRef(place.arena, place.offset, "int64", (count, words), (words, 1), buffer)

    def holds(self, mark: StateInput) -> bool:
        """Return whether a tensor of the layer's states comes in a slot."""
        return mark.tensor in self.staged_names

    @property
    def staged_names(self) -> tuple[str, ...]:
        """The tensors of the layer's states that come in a slot."""
        return tuple(dict(self.tensors)) or (*self.names, CHECKPOINT_TENSOR)

    def offset(self, mark: StateInput) -> int:
        """Return the offset of a layer's state tensor in a slot: K, then V within each token, checkpoints behind both.
        """
        if self.tensors:
            return dict(self.tensors)[mark.tensor]
        if mark.tensor in self.names:
            return self.names.index(mark.tensor) * self.beside
        return self.sequences * self.blocks * self.block_nbytes


def staged_layers(
    step: fx.GraphModule, batching: BatchSchedule, larger: Callable[[int], fx.GraphModule] | None = None
) -> dict[int, StagedLayer]:
    """Return how each layer's cache is staged, from the token-major layout that the step graph of a micro-batch gives
    it. With room for operands in the largest step in which the host attends, of those over so many tokens that `larger`
    gives.
    """
    if larger is not None and batching.cache.cpu_attention and batching.speculation.steps:
        most = staged_layers(larger(batching.speculation.steps[0]), batching)
        return {i: replace(layer, operands=layer.operands._replace(room_nbytes=most[i].operands.room_nbytes))
                for i, layer in staged_layers(step, batching).items()}
    found: dict[int, StagedLayer] = {}
    states: dict[int, dict[str, torch.Tensor]] = {}
    for node in step.graph.find_nodes(op="placeholder"):
        mark = node.meta.get(META)
        if not isinstance(mark, StateInput) or mark.kind in (CheckpointState.kind, SavedState.kind):
            continue
        if not STATE_KINDS[mark.kind].in_blocks:
            states.setdefault(mark.layer, {})[mark.tensor] = node.meta["val"]
        elif mark.layer in found:
            known = found[mark.layer]
            found[mark.layer] = replace(known, names=(*known.names, mark.tensor))
        else:
            value = node.meta["val"]
            batch, heads, tokens, width = value.shape
            itemsize = value.element_size()
            blocks = tokens // batching.cache.block_tokens
            context = blocks * batching.cache.block_tokens - 1  # the most that takes as many blocks
            found[mark.layer] = StagedLayer(batch, blocks, batching.cache.block_tokens * value.stride(2) * itemsize,
                                            heads * width * itemsize, mark.window, operands_of(_caller(step, node)),
                                            batching.checkpoint_blocks(context),
                                            batching.kept_blocks(context) if batching.recomputation.checkpoints else 0,
                                            names=(mark.tensor,))
    found |= {layer: whole_states(values) for layer, values in states.items() if layer not in found}
    return dict(sorted(found.items()))


def whole_states(values: Mapping[str, torch.Tensor]) -> StagedLayer:
    """States of a layer that move whole, one behind the other."""
    ends = list(accumulate((aligned(value.nbytes) for value in values.values()), initial=0))
    sequences = next(len(value) for value in values.values())
    return StagedLayer(sequences, 1, whole_pages(-(-ends[-1] // sequences)), 0,
                       tensors=tuple(zip(values, ends, strict=False)))


def _caller(step: fx.GraphModule, cache: fx.Node) -> fx.GraphModule:
    """The block graph that uses a cache of a step graph; the step graph where that has no calls."""
    call = next((user for user in cache.users if user.op == "call_module"), None)
    block = step if call is None else step.get_submodule(str(call.target))
    assert isinstance(block, fx.GraphModule)
    return block


def staged_tensors(
    states: Sequence[StateSpec], batch: int, context: int, batching: BatchSchedule
) -> dict[str, torch.Tensor]:
    """The tensors of a layer's states, some of them in a staging slot, by name: K and V (or latents) [B, Hkv, L, D] as
    views of [B, blocks, T, 2, Hkv, D], the bytes of a token padded so that T of them are whole pages; checkpoints
    [B, 1, rows, width], those of a block in as many bytes as K and V have there; others as they are."""
    rows, kept = [tensor for spec in states if spec.in_blocks for tensor in spec.tensors], _checkpoint(states)
    others = {tensor.name: torch.empty(tensor.sized(batch, context), dtype=tensor.dtype, device="meta")
              for spec in states if not spec.in_blocks and spec is not kept for tensor in spec.tensors}
    if not rows:
        return others
    block_tokens = batching.cache.block_tokens
    tokens, token_nbytes = batching.cache_blocks(context) * block_tokens, _token_nbytes(states, block_tokens)
    found = {}
    for tensor in rows:
        shape, stride = tensor.sized(batch, tokens), token_nbytes // tensor.dtype.itemsize
        found[tensor.name] = torch.empty_strided(shape, (tokens * stride, shape[-1], stride, 1), dtype=tensor.dtype,
                                                 device="meta")
    if kept is not None:
        made = batching.checkpoint_blocks(context) * batching.recomputation.block_tokens
        step = block_nbytes(states, block_tokens) // batching.recomputation.block_tokens // kept.dtype.itemsize
        found |= {tensor.name: torch.empty_strided(tensor.sized(batch, made), (made * step, made * step, step, 1),
                                                   dtype=kept.dtype, device="meta") for tensor in kept.tensors}
    return found | others


def _checkpoint(states: Sequence[StateSpec]) -> CheckpointState | None:
    return next((spec for spec in states if isinstance(spec, CheckpointState)), None)


def _token_nbytes(states: Sequence[StateSpec], tokens: int) -> int:
    """Bytes from K and V of one token to those of the next, so that a block of `tokens` is whole pages, and has room
    for checkpoints of twice as many tokens where hardly more bytes give it."""
    unit, kept = PAGE_NBYTES // math.gcd(PAGE_NBYTES, tokens), _checkpoint(states)
    plain = -(-sum(spec.token_nbytes for spec in states if spec.in_blocks) // unit) * unit
    if kept is None:
        return plain
    most = MOST_PADDED * plain / kept.token_nbytes  # checkpoints for each token of K and V
    return max(plain, -(-int(2.0 ** math.floor(math.log2(most)) * kept.token_nbytes) // unit) * unit)


def block_nbytes(states: Sequence[StateSpec], tokens: int) -> int:
    """Bytes of a block of a layer's K and V of so many tokens."""
    return tokens * _token_nbytes(states, tokens)


def checkpoint_tokens(layers: Iterable[Sequence[StateSpec]], cache_tokens: int) -> int:
    """Tokens whose checkpoints fill a block that holds K and V of `cache_tokens` tokens: `cache_tokens` times or over a
    power of two, so that stretches of tokens are of either. 0 where a block does not hold one, or layers differ."""
    found = {_checkpoint_tokens(states, cache_tokens) for states in layers}
    return found.pop() if len(found) == 1 else 0


def _checkpoint_tokens(states: Sequence[StateSpec], cache_tokens: int) -> int:
    nbytes, kept = block_nbytes(states, cache_tokens), _checkpoint(states)
    assert kept is not None

    def fits(tokens: int) -> bool:
        """Return whether rows of so many tokens have room, and begin where words do."""
        return tokens * kept.token_nbytes <= nbytes and nbytes % (tokens * max(kept.dtype.itemsize, 4)) == 0

    tokens = cache_tokens
    while tokens and not fits(tokens):
        tokens //= 2
    while tokens and fits(2 * tokens):
        tokens *= 2
    return tokens if tokens and max(tokens, cache_tokens) % min(tokens, cache_tokens) == 0 else 0


def cache_home_name(layer: int, tier: str) -> str:
    """The buffer of a layer's caches that live on a tier, one micro-batch after the other."""
    return f"cache_{layer}_{tier}"


def input_sizes(layers: Mapping[int, StagedLayer], batching: BatchSchedule) -> dict[str, int]:
    """Elements of a micro-batch's part of each input; none where all layers' states move whole."""
    blocks = [layer for layer in layers.values() if not layer.tensors]
    if not blocks:
        return {}
    first = blocks[0]
    rows = first.rows
    loads = dict.fromkeys((loads_name(layer.window) for layer in blocks), rows)
    whole = {WHOLE_LOADS: rows, WHOLE_STORES: rows} if batching.cache.cpu_attention else {}
    return {**loads, STORES: rows, BEFORE: first.tails, BEHIND: first.tails, **whole}


def moved_shares(layer: StagedLayer, batching: BatchSchedule, work: Workload, tokens: int) -> tuple[float, float]:
    """The shares of the blocks in its slot that a step over `tokens` tokens is taken to load and store: what stands
    before it on average. A block gets full every so many tokens. States that move whole are loaded and stored."""
    if layer.tensors:
        return 1.0, 1.0
    capacity = layer.blocks * batching.cache.block_tokens
    there = work.before(tokens, batching)
    seen = min(there, abs(layer.window) + batching.cache.block_tokens / 2) if layer.window else there
    loaded, stored = seen / capacity, min(1.0, tokens / capacity)
    if layer.checkpoints:  # as many bytes a block, of the checkpoints of as many more tokens
        made = batching.recomputation
        instead = made.checkpoints / made.period
        kept = (1 - instead + instead * batching.cache.block_tokens / made.block_tokens) * layer.blocks / (
            layer.blocks + layer.checkpoints)
        loaded, stored = kept * loaded, kept * stored
    return loaded, stored


def state_values(step: fx.GraphModule) -> dict[int, dict[str, torch.Tensor]]:
    """The tensors of states that a step graph is given, by layer and name."""
    found: dict[int, dict[str, torch.Tensor]] = {}
    for node in step.graph.find_nodes(op="placeholder"):
        mark = node.meta.get(META)
        if isinstance(mark, StateInput):
            found.setdefault(mark.layer, {})[mark.tensor] = node.meta["val"]
    return found


def _cache_inputs(step: fx.GraphModule) -> Iterator[tuple[str, torch.Tensor]]:
    """Iterate over the cache buffers of a step graph: the name and value of each."""
    for layer, values in state_values(step).items():
        for name, value in values.items():
            yield state_name(name, layer), value


def cache_rows(step: fx.GraphModule) -> dict[str, CacheRows]:
    """Every cache buffer of a step graph by name, as rows of tokens."""
    return {name: CacheRows(value.shape[0] * value.shape[1], value.shape[3], str(value.dtype)[6:])
            for name, value in _cache_inputs(step)}


def cache_buffers(step: fx.GraphModule) -> dict[str, int]:
    """Name and bytes of every cache buffer of a step graph."""
    return {name: value.numel() * value.element_size() for name, value in _cache_inputs(step)}


def block_rows_nbytes(step: fx.GraphModule) -> set[int]:
    """Bytes of a token's rows that move in blocks, in the layers of a step graph that have some."""
    found: dict[int, int] = {}
    for node in step.graph.find_nodes(op="placeholder"):
        mark = node.meta.get(META)
        if isinstance(mark, StateInput) and STATE_KINDS[mark.kind].in_blocks:
            _, heads, _, width = node.meta["val"].shape
            found[mark.layer] = found.get(mark.layer, 0) + heads * width * node.meta["val"].element_size()
    return {*found.values()}


def loads_name(window: int) -> str:
    """The input that says what is loaded for layers whose attention sees this window (0: all; below 0: chunks)."""
    return f"{LOADS}_{'chunk' if window < 0 else 'window'}_{abs(window)}" if window else LOADS


def window_of_loads(name: str) -> int:
    """The window that an input of `loads_name` is for."""
    _, _, size = name.rpartition("_")
    return 0 if name == LOADS else -int(size) if "chunk" in name else int(size)
