"""Which positions a layer's attention sees, by the name that the model's config gives to the layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import torch
from torch import nn

from forebay.rewriter.capture.errors import CaptureError


class LayerType(NamedTuple):
    """Tokens that a layer sees: all tokens, a window before each, or its chunk; and the attribute of the config that
    says of how many tokens."""

    sees: Literal["all", "window", "chunk"]
    size: str = ""


# by the name in `config.layer_types`
LAYER_TYPES = {
    "full_attention": LayerType("all"), "sliding_attention": LayerType("window", "sliding_window"),
    "hybrid_sliding": LayerType("window", "sliding_window"),
    "chunked_attention": LayerType("chunk", "attention_chunk_size"),
    **dict.fromkeys(("linear_attention", "conv", "hybrid", "mlp", "moe", "indexed_attention",
                    "deepseek_sparse_attention", "minimax_m3_sparse"), LayerType("all"))}


class Pattern(NamedTuple):
    """The name in `config.layer_types`, what its `LayerType` says, and the tokens of a window or chunk."""

    name: str
    sees: str
    size: str
    tokens: int


class Temperature(NamedTuple):
    """Queries are multiplied by 1 + slope · log(1 + ⌊(position + 1) / step⌋) (arXiv 2501.19399; Llama 4)."""

    step: float
    slope: float

    def scale(self, query: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        """Queries [B, H, S, D] at positions [B, S]."""
        factor = torch.log1p(torch.floor((position.float() + 1.0) / self.step)) * self.slope + 1.0
        return (query * factor[:, None, :, None]).to(query.dtype)


def mark_patterns(config: Any, layers: list[nn.Module], more: Mapping[str, LayerType]) -> None:
    """Note on every module of a layer what our attention has to know of that layer, so that layers which differ in it
    are different kinds; `more` names types of layers beside `LAYER_TYPES`. Raises CaptureError for a name that is not
    implemented."""
    types = {**LAYER_TYPES, **more}
    config = config.get_text_config(decoder=True)
    names = getattr(config, "layer_types", None) or []
    if len(names) < len(layers):
        if names:
            raise CaptureError(f"its config names the types of {len(names)} layers, it has {len(layers)}")
        names = [None] * len(layers)
    for index, (name, layer) in enumerate(zip(names, layers, strict=False)):
        if name is not None and name not in types:
            raise CaptureError(f"layer {index} is of type {name!r}; {', '.join(types)} are implemented")
        size = types[name].size if name else ""
        pattern = Pattern(name, *types[name], getattr(config, size, None) or 0 if size else 0) if name else None
        for module in layer.modules():
            state = vars(module)
            if pattern is not None:
                state["attention_pattern"] = pattern
            # Llama 4 takes positions from the cache's length, which is not the same for all sequences here.
            if state.get("attn_temperature_tuning") and not state.get("use_rope"):
                state["attn_temperature_tuning"] = False
                state["query_temperature"] = Temperature(state["floor_scale"], state["attn_scale"])


def window_of(module: nn.Module, given: int | None) -> int:
    """Return the window for `forebay::attention`, for a module that asks for a sliding window `given`."""
    pattern: Pattern | None = vars(module).get("attention_pattern")
    if pattern is None:
        return int(given or 0)
    if pattern.sees == "all":
        if given:
            raise CaptureError(f"{type(module).__name__} has a window of {given} in a layer of full attention")
        return 0
    tokens = pattern.tokens or (given if pattern.sees == "window" else 0)
    if not tokens:
        raise CaptureError(f"its config has {pattern.name} but no {pattern.size}")
    return -tokens if pattern.sees == "chunk" else int(given or tokens)
