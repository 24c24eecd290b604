"""States that a layer keeps for each sequence from step to step.

A *kind* of state is a class of specs, which `register_state` makes known. Capture, planner, staging, generation and
export ask a spec for its tensors and for what may be done with it; only the kind's own operators know what they hold.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

import torch

from forebay.kernels.formats.key_means import KEYS_OF_MEAN
from forebay.kernels.operators import (
    ATTENTION,
    CHOOSE_BLOCKS,
    CHOOSE_TOKENS,
    KV_APPEND,
    LINEAR_RECURRENCE,
    MEAN_KEYS,
    SELECTIVE_SCAN,
    SHORT_CONV,
    WKV,
)
from forebay.rewriter.ir.plan import PlanError

Capability = Literal["rewindable", "pageable", "reorderable"]


@dataclass(frozen=True)
class StateInput:
    """On a placeholder of the step graph: `tensor` of the state of this `kind` of `layer`, of which attention sees a
    `window` (as its operator says; 0: all)."""

    layer: int
    tensor: str
    kind: str = "kv"
    window: int = 0


@dataclass(frozen=True)
class StateTensor:
    """One tensor of a state.

    Attributes:
        name: No other tensor of the layer has it.
        shape: Sizes; "B" is the number of sequences, "L" that of the tokens that the state has room for.
        dtype: Of its elements.
    """

    name: str
    shape: tuple[int | str, ...]
    dtype: torch.dtype

    def sized(self, sequences: int, tokens: int) -> tuple[int, ...]:
        """Return the shape for so many sequences, with room for so many tokens of each."""
        return tuple({"B": sequences, "L": tokens}[n] if isinstance(n, str) else n for n in self.shape)

    @property
    def grows(self) -> bool:
        """Whether it has a row for each token."""
        return "L" in self.shape


@dataclass(frozen=True)
class StateSpec:
    """One state of one layer; a kind of state is a subclass.

    Attributes:
        kind: Its name.
        operators: Names of the operators that update and read it, each called once in a layer.
        rewindable: Whether a step may compute tokens again, or tokens that nobody wants: it writes the same values, or
            values that are overwritten before they are read. Steps over any other kind are given `count` [B], the
            tokens of each sequence that are real, and update the state by those alone; where `start` is 0 they take it
            as empty, whatever it holds. Steps that check drafts save it (`SavedState`).
        pageable: Whether it may lie on slower tiers: its rows in blocks, or, where it does not grow, all of it.
        reorderable: Whether the states of some sequences may be copied: beam search lets one take over that of another,
            and a prefill step of sequences that are admitted beside others computes copies of theirs.
        unpackable: Why its rows keep the model's dtype, in words that follow a cache format's name; "" for no reason.
        in_blocks: Whether its rows move between tiers in blocks of tokens, token by token with those of the layer's
            other such tensors, which are as wide. Other states move whole, or stay where a layer has such rows.
        parts: Among how many ranks a step's sequences are divided; each has the states of its own.
    """

    kind: ClassVar[str]
    operators: ClassVar[tuple[str, ...]] = ()
    rewindable: ClassVar[bool] = False
    pageable: ClassVar[bool] = False
    reorderable: ClassVar[bool] = False
    in_blocks: ClassVar[bool] = False
    unpackable: ClassVar[str] = ""

    parts: int = field(default=1, kw_only=True)

    @property
    def tensors(self) -> tuple[StateTensor, ...]:
        """Its tensors, in the order in which a layer is given them."""
        raise NotImplementedError

    @property
    def grows(self) -> bool:
        """Whether it has a row for each token."""
        return any(tensor.grows for tensor in self.tensors)

    @property
    def token_nbytes(self) -> int:
        """Bytes that each token adds to it."""
        return self._nbytes(True)

    @property
    def sequence_nbytes(self) -> int:
        """Bytes of a sequence that do not depend on its length."""
        return self._nbytes(False)

    def _nbytes(self, grows: bool) -> int:
        return sum(math.prod(t.sized(1, 1)) * t.dtype.itemsize for t in self.tensors if t.grows is grows)


LayerStates = Sequence[Sequence[StateSpec]]  # of each layer
STATE_KINDS: dict[str, type[StateSpec]] = {}


def register_state(kind: type[StateSpec]) -> type[StateSpec]:
    """Make a kind of state known; returns it. ValueError where its name is taken."""
    if kind.kind in STATE_KINDS:
        raise ValueError(f"register_state: {kind.kind} is a kind of state already")
    STATE_KINDS[kind.kind] = kind
    return kind


def state_name(tensor: str, layer: int | None = None) -> str:
    """The placeholder of a state's tensor in the step graph, and its buffer; without a layer, in a block graph."""
    return f"cache_{tensor}" if layer is None else f"cache_{tensor}_{layer}"


KV_TENSORS, CHECKPOINT_TENSOR, KEY_MEANS_TENSOR = ("k", "v"), "x", "means"


@register_state
@dataclass(frozen=True)
class KVState(StateSpec):
    """Keys and values, each [B, kv_heads, L, head_dim], or of packed rows, whose bytes are then counted as elements of
    dtype uint8. `exact` rows hold positions too, and are never packed."""

    kind = "kv"
    operators = (ATTENTION.name, KV_APPEND.name)
    rewindable = pageable = reorderable = in_blocks = True

    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    window: int = 0  # sliding window in tokens, below 0 chunks of tokens, 0 for full attention
    format: str = "native"
    exact: bool = False

    @property
    def tensors(self) -> tuple[StateTensor, ...]:
        return tuple(StateTensor(name, ("B", self.kv_heads, "L", self.head_dim), self.dtype) for name in KV_TENSORS)


@register_state
@dataclass(frozen=True)
class LentKVState(KVState):
    """Keys and values that other layers read, too: as those are no layer's alone, they stay on the device."""

    kind = "kv of several layers"
    pageable = False
    unpackable = "is packed by the one layer that reads it, and here several layers read the keys and values of one"


@register_state
@dataclass(frozen=True)
class BorrowedKVState(StateSpec):
    """Keys and values of the layer `source`, which this layer attends over and adds nothing to. A captured model has
    them once, among the states of that layer."""

    kind = "kv of another layer"
    operators = (ATTENTION.name,)
    rewindable = reorderable = True

    source: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def tensors(self) -> tuple[StateTensor, ...]:
        return tuple(StateTensor(name, ("B", self.kv_heads, "L", self.head_dim), self.dtype) for name in KV_TENSORS)


@register_state
@dataclass(frozen=True)
class LatentState(StateSpec):
    """One row of `width` elements for each token, [B, 1, L, width], which latent attention takes for the key and the
    value of every head, or a packed row, whose bytes are then counted as elements of dtype uint8; `part` tells one of
    a layer from others."""

    kind = "latent"
    operators = (ATTENTION.name, KV_APPEND.name)
    rewindable = pageable = reorderable = in_blocks = True

    width: int
    dtype: torch.dtype
    part: int = 0
    format: str = "native"

    @property
    def tensors(self) -> tuple[StateTensor, ...]:
        return (StateTensor(f"latent{self.part or ''}", ("B", 1, "L", self.width), self.dtype),)


@register_state
@dataclass(frozen=True)
class IndexState(StateSpec):
    """The keys of an indexer, one of `width` elements for each token, by which it chooses the tokens that attention
    sees. They stay on the device."""

    kind = "index keys"
    operators = (CHOOSE_TOKENS.name,)
    rewindable = pageable = reorderable = True

    width: int
    dtype: torch.dtype

    @property
    def tensors(self) -> tuple[StateTensor, ...]:
        return (StateTensor("index_keys", ("B", 1, "L", self.width), self.dtype),)


@register_state
@dataclass(frozen=True)
class CheckpointState(StateSpec):
    """Activation checkpoints that some tokens keep in place of K and V: `width` elements of a dtype, or of packed rows,
    whose bytes are then counted as elements of dtype uint8."""

    kind = "checkpoint"
    rewindable = pageable = True

    width: int
    dtype: torch.dtype

    @property
    def tensors(self) -> tuple[StateTensor, ...]:
        return (StateTensor(CHECKPOINT_TENSOR, ("B", 1, "L", self.width), self.dtype),)


@register_state
@dataclass(frozen=True)
class KeyMeansState(StateSpec):
    """Means of the keys of a staged cache, by which decode steps choose its blocks: an eighth of a mean of eight keys
    for each token. They stay on the device."""

    kind = "key means"
    operators = (CHOOSE_BLOCKS.name, MEAN_KEYS.name)
    rewindable = pageable = True

    kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def tensors(self) -> tuple[StateTensor, ...]:
        shape = ("B", self.kv_heads, "L", self.head_dim // KEYS_OF_MEAN)
        return (StateTensor(KEY_MEANS_TENSOR, shape, self.dtype),)


@register_state
@dataclass(frozen=True)
class ConvolutionState(StateSpec):
    """The last `rows` inputs of a short convolution; `part` tells one of a layer from others."""

    kind = "convolution"
    operators = (SHORT_CONV.name,)
    pageable = reorderable = True

    channels: int
    rows: int
    dtype: torch.dtype
    part: int = 0

    @property
    def tensors(self) -> tuple[StateTensor, ...]:
        return (StateTensor(f"convolution{self.part or ''}", ("B", self.rows, self.channels), self.dtype),)


@register_state
@dataclass(frozen=True)
class RecurrentState(StateSpec):
    """The state of a recurrence, of one size for any length: `sizes` numbers of fp32; `part` tells one of a layer from
    others."""

    kind = "recurrent"
    operators = (LINEAR_RECURRENCE.name,)
    pageable = reorderable = True

    sizes: tuple[int, ...]
    part: int = 0

    @property
    def tensors(self) -> tuple[StateTensor, ...]:
        return (StateTensor(f"recurrent{self.part or ''}", ("B", *self.sizes), torch.float32),)


@register_state
@dataclass(frozen=True)
class ScanState(RecurrentState):
    """The same of a selective scan (Mamba)."""

    kind = "selective scan"
    operators = (SELECTIVE_SCAN.name,)


@register_state
@dataclass(frozen=True)
class WkvState(StateSpec):
    """The state of `wkv`. Each channel has a weighted sum of values, the sum of the weights, and the exponent by which
    both are scaled."""

    kind = "wkv"
    operators = (WKV.name,)
    pageable = reorderable = True

    channels: int

    @property
    def tensors(self) -> tuple[StateTensor, ...]:
        return (StateTensor("wkv", ("B", 3, self.channels), torch.float32),)


@register_state
@dataclass(frozen=True)
class SavedState(StateSpec):
    """A copy of the state `of`, made before a step that checks drafted tokens."""

    kind = "saved"
    PREFIX: ClassVar[str] = "saved_"

    of: StateSpec

    @property
    def tensors(self) -> tuple[StateTensor, ...]:
        return tuple(replace(tensor, name=f"{self.PREFIX}{tensor.name}") for tensor in self.of.tensors)


def rewindable(states: LayerStates) -> bool:
    """Return whether every state of every layer is rewindable."""
    return all(spec.rewindable for layer in states for spec in layer)


def require_states(states: LayerStates, capability: Capability, feature: str) -> None:
    """PlanError, naming the kind and the `feature` that needs the capability, for a layer with a state that lacks it.
    """
    for i, layer in enumerate(states):
        for spec in layer:
            if not getattr(spec, capability):
                raise PlanError(f"{feature}: layer {i} keeps a state of kind {spec.kind}, which is not {capability}; "
                                f"leave it out")


def kv_state(states: Iterable[StateSpec]) -> KVState | None:
    """Keys and values among a layer's states; None where it keeps none."""
    return next((spec for spec in states if isinstance(spec, KVState)), None)


def format_of_rows(states: LayerStates) -> str:
    """Return the format of the layers' cache rows; "native" where they keep none."""
    return next((spec.format for each in states for spec in each if isinstance(spec, KVState | LatentState)), "native")


def unpackable(states: LayerStates) -> str:
    """Return the first `unpackable` reason of some layers' states; "" where all rows may be packed."""
    each = (spec for layer in states for spec in layer)
    found = ("would round positions, which its keys hold" if isinstance(spec, KVState) and spec.exact
             else spec.unpackable for spec in each)
    return next(filter(None, found), "")


def kv_states(states: LayerStates, feature: str) -> tuple[KVState, ...]:
    """Keys and values of every layer. PlanError, naming the kind and the `feature`, where a layer keeps anything else.
    """
    found = []
    for i, layer in enumerate(states):
        kv = kv_state(layer)
        others = [spec.kind for spec in layer if spec is not kv and not isinstance(spec, CheckpointState)]
        if kv is None or others:
            kept = f"a state of kind {others[0]}" if others else "no state"
            raise PlanError(f"{feature}: layer {i} keeps {kept}, where K and V are all that is implemented")
        found.append(kv)
    return tuple(found)
