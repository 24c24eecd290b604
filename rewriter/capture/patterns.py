"""Which positions a layer's attention sees, by the name that the model's config gives to the layer."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn

from forebay.rewriter.capture.layers import CaptureError

# The attribute of the config that says how many tokens the pattern takes; full attention takes none.
SIZES = {"full_attention": "", "sliding_attention": "sliding_window", "chunked_attention": "attention_chunk_size"}


class Pattern(NamedTuple):
    """The name in `config.layer_types`, and the tokens of a window or chunk, 0 for full attention."""

    name: str
    tokens: int


class Temperature(NamedTuple):
    """Queries are multiplied by 1 + slope · log(1 + ⌊(position + 1) / step⌋) (arXiv 2501.19399; Llama 4)."""

    step: float
    slope: float

    def scale(self, query: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        """Queries [B, H, S, D] at positions [B, S]."""
        factor = torch.log1p(torch.floor((position.float() + 1.0) / self.step)) * self.slope + 1.0
        return (query * factor[:, None, :, None]).to(query.dtype)


def mark_patterns(config: Any, layers: list[nn.Module]) -> None:
    """Note on every module of a layer what our attention has to know of that layer, so that layers which differ in it
    are different kinds. Raises CaptureError for a name that is not implemented."""
    config = config.get_text_config(decoder=True)
    names = getattr(config, "layer_types", None) or []
    if len(names) < len(layers):
        if names:
            raise CaptureError(f"its config names the types of {len(names)} layers, it has {len(layers)}")
        names = [None] * len(layers)
    for index, (name, layer) in enumerate(zip(names, layers, strict=False)):
        if name is not None and name not in SIZES:
            raise CaptureError(f"layer {index} is of type {name!r}; {', '.join(SIZES)} are implemented")
        pattern = Pattern(name, getattr(config, SIZES[name], None) or 0 if SIZES[name] else 0) if name else None
        for module in layer.modules():
            state = vars(module)
            if pattern is not None:
                state["attention_pattern"] = pattern
            # Llama 4 takes positions from the cache's length, which is not the same for all sequences here.
            if state.get("attn_temperature_tuning") and not state.get("use_rope"):
                state["attn_temperature_tuning"] = False
                state["query_temperature"] = Temperature(state["floor_scale"], state["attn_scale"])


def window_of(module: nn.Module, given: int | None) -> int:
    """What `forebay::attention` takes as window, for a module that asks for a sliding window `given`."""
    pattern: Pattern | None = vars(module).get("attention_pattern")
    if pattern is None:
        return int(given or 0)
    if pattern.name == "full_attention":
        if given:
            raise CaptureError(f"{type(module).__name__} has a window of {given} in a layer of full attention")
        return 0
    tokens = pattern.tokens or (given if pattern.name == "sliding_attention" else 0)
    if not tokens:
        raise CaptureError(f"its config has {pattern.name} but no {SIZES[pattern.name]}")
    return -tokens if pattern.name == "chunked_attention" else int(given or tokens)
