"""What capture hands on: fx graphs with named inputs, and the few typed facts that ride on their nodes."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import fx

META = "forebay"  # the one key of ours in node.meta


@dataclass(frozen=True)
class WeightInput:
    """On a placeholder: this input is the weight `name` (in a block graph: the name relative to its layer)."""

    name: str


@dataclass(frozen=True)
class CacheInput:
    """On a placeholder of the step graph: the `side` ("k" or "v") cache of `layer`."""

    layer: int
    side: str


@dataclass(frozen=True)
class WeightSpec:
    """A weight's shape and dtype as the graph reads it; `ties` are other names of the same storage."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    ties: tuple[str, ...] = ()

    @property
    def nbytes(self) -> int:
        n = self.dtype.itemsize
        for size in self.shape:
            n *= size
        return n


@dataclass(frozen=True)
class CacheSpec:
    """One layer's KV cache: k and v are each [B, kv_heads, L, head_dim]."""

    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    window: int = 0  # sliding window in tokens, 0 for full attention


@dataclass
class CapturedModel:
    """A language model as graphs.

    `step` has the placeholders input_ids [B, S], start [B] (tokens already cached), last [B] (index within this
    chunk of the token whose logits are wanted), then cache_k_i / cache_v_i [B, Hkv, L, D] for each layer i, then
    weights; it returns logits [B, V]. Its `call_module` nodes call block graphs (its submodules), whose
    placeholders are matched by position. Equal layers share one block graph.
    """

    step: fx.GraphModule
    weights: dict[str, WeightSpec]
    constants: dict[str, torch.Tensor]  # non-persistent buffers and lifted constants, always in memory
    layers: tuple[str, ...]  # block graph name of every layer, in order
    layer_weights: tuple[dict[str, str], ...]  # per layer: name within the block -> name in `weights`
    cache: tuple[CacheSpec, ...]
    vocab_size: int
    max_positions: int  # 0: no limit known
    dtype: torch.dtype
    model_type: str
    extra: dict[str, object] = field(default_factory=dict)

    @property
    def weight_nbytes(self) -> int:
        return sum(spec.nbytes for spec in self.weights.values())

    def blocks(self) -> dict[str, fx.GraphModule]:
        """The distinct block graphs by name."""
        return {name: self.step.get_submodule(name) for name in dict.fromkeys(self.layers)}  # type: ignore[misc]


def weight_name(node: fx.Node) -> str | None:
    """The weight a placeholder stands for, or None."""
    mark = node.meta.get(META)
    return mark.name if isinstance(mark, WeightInput) else None
