"""The attention and the cache that capture registers with transformers; their bodies are this package's custom ops."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface
from transformers.cache_utils import Cache, CacheLayerMixin

from forebay.kernels.operators import ATTENTION, KV_APPEND
from forebay.rewriter.capture.errors import CaptureError
from forebay.rewriter.capture.latent import AllTokens, Latent
from forebay.rewriter.capture.layer_states import layer_state, starts
from forebay.rewriter.capture.patterns import Temperature, window_of
from forebay.rewriter.checkpoints.text_model import FULL, GROUPS, SLIDING
from forebay.rewriter.ir.state import KVState

NAME = "forebay"  # value of config._attn_implementation


def register_attention() -> None:
    """Make `attn_implementation="forebay"` known to transformers.

    No mask is registered on purpose: transformers then builds none, for any of its mask kinds.
    """
    AttentionInterface.register(NAME, _attention)


def _attention(
    module: nn.Module,
    query: torch.Tensor,  # [B, H, S, D]
    key: torch.Tensor,  # [B, Hkv, L, D]
    value: torch.Tensor,
    attention_mask: torch.Tensor | AllTokens | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    if isinstance(attention_mask, AllTokens):
        attention_mask = None
    until = attention_mask if attention_mask is not None and attention_mask.dtype == torch.int64 else None
    if until is not None and until.dim() == 4:
        until = until[:, 0, 0]
    if attention_mask is not None and until is None:
        raise CaptureError(f"{type(module).__name__} adds a mask of its own to the attention scores")
    if kwargs.get("is_causal") is False:
        raise CaptureError(f"{type(module).__name__} asks for attention that is not causal")
    for name in ("position_bias", "head_mask", "alibi", "indexer_scores"):
        if kwargs.get(name) is not None:
            raise CaptureError(f"{type(module).__name__} passes {name} to attention, which has no place for it")
    if getattr(module, "is_causal", True) is False:
        raise CaptureError(f"{type(module).__name__} has attention that is not causal")
    # Some families hand the window over only as an attribute of the module, some by the name of the layer alone.
    sliding = kwargs["sliding_window"] if "sliding_window" in kwargs else getattr(module, "sliding_window", None)
    window = window_of(module, sliding)
    temperature: Temperature | None = vars(module).get("query_temperature")
    if temperature is not None:
        query = temperature.scale(query, starts()[:, None] + torch.arange(query.shape[2], device=query.device))
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    latent: Latent | None = vars(module).get("latent")
    if latent is not None:
        if key is not value:
            raise CaptureError(f"{type(module).__name__} attends to latents that are no rows of its cache")
        query = latent.absorb_keys(query)
    extras = kwargs.get("s_aux", kwargs.get("sinks")), until, kwargs.get("indices")
    given = () if all(extra is None for extra in extras) else (0.0, 0.0, 0.0, *extras)
    query = _widened(query, key.shape[-1])
    out = ATTENTION.overload(query, key, value, starts(), float(scale), window, float(softcap or 0.0), *given)
    if latent is not None:
        return latent.values(out), None
    width = getattr(module, "v_head_dim", out.shape[-1])  # of values, which may be narrower than what is cached
    return out if width >= out.shape[-1] else out[..., :width], None


def masks_of_images(config: Any, until: torch.Tensor) -> Any:
    """Return `until` [B, S] by kind of layer, as masks, which attention takes for what they are by their dtype."""
    if not getattr(config, "layer_types", None):
        return until[:, None, None]  # as a mask that nobody changes
    return dict.fromkeys((FULL, SLIDING)) | dict.fromkeys(getattr(config, GROUPS), until)


def _widened(rows: torch.Tensor, width: int) -> torch.Tensor:
    return rows if rows.shape[-1] == width else nn.functional.pad(rows, (0, width - rows.shape[-1]))


class _CacheLayer(CacheLayerMixin):
    """Every layer's view of the cache; transformers asks it for sizes only."""

    is_compileable = True
    is_sliding = False

    def __init__(self, length: int | torch.SymInt) -> None:
        super().__init__()
        self.length = length
        self.is_initialized = True

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        pass

    def update(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        raise CaptureError("the model updates a cache layer without its cache")

    def get_mask_sizes(self, *args: Any) -> tuple[int, int]:
        return self.length, 0  # type: ignore[return-value]

    def get_seq_length(self, *args: Any) -> int:
        return 0  # positions always come from `position_ids`

    def get_max_length(self) -> int:
        return self.length  # type: ignore[return-value]

    def get_max_cache_shape(self) -> int:
        return self.length  # type: ignore[return-value]


class TracedCache(Cache):
    """A transformers cache whose layers, whatever their index, keep k and v [B, Hkv, S, D] as their state: what is new
    is appended at `starts`, and all `length` tokens are read."""

    def __init__(self, length: int | torch.SymInt = 1, in_layer: bool = False) -> None:
        super().__init__(layers=[_CacheLayer(length)])
        self.length = length
        self.in_layer = in_layer

    def update(  # type: ignore[override]
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: object, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        width = max(key_states.shape[-1], value_states.shape[-1])  # zeros behind the narrower ones change no result
        key_states, value_states = (_widened(each, width) for each in (key_states, value_states))
        if key_states.shape != value_states.shape or key_states.dtype != value_states.dtype:
            raise CaptureError(f"a layer has keys {tuple(key_states.shape)} and values {tuple(value_states.shape)} of "
                               "unequal shape")
        k, v = layer_state(KVState(key_states.shape[1], width, key_states.dtype))
        KV_APPEND.overload(k, v, key_states, value_states, starts())
        return k, v

    def get_conv_state(self, *args: Any, **kwargs: Any) -> None:
        """None: a mixer then takes the same path for steps of any size, and our operators have the state."""

    get_recurrent_state = update_recurrent_state = get_conv_state  # type: ignore[assignment]

    def update_conv_state(self, conv_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return conv_states

    def get_seq_length(self, layer_idx: object = 0, *args: Any) -> int:
        if self.in_layer:
            raise CaptureError("a layer computes with the number of cached tokens, which differs between sequences")
        return 0  # positions always come from `position_ids`

    def get_mask_sizes(self, query_length: Any, layer_idx: object = 0) -> tuple[int, int]:
        return self.length, 0  # type: ignore[return-value]
