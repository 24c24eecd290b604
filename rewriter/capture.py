"""Capture a Hugging Face causal language model as one step graph and one block graph per kind of layer."""

from __future__ import annotations

import copy
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from forebay.rewriter.capture_layers import CaptureError
from forebay.rewriter.graph import CapturedModel

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

__all__ = ["CaptureError", "capture_model"]


def capture_model(
    config_or_model: PreTrainedConfig | nn.Module, *, dtype: torch.dtype | None = None, all_positions: bool = False
) -> CapturedModel:
    """Capture a causal language model from its transformers config, or from a model in memory.

    No weight is allocated or copied: a model in memory is read for its config and its parameters' names and shapes.
    `dtype` overrides the config's (or the model's). The step graph returns logits [B, V] at the token `last`, or
    [B, S, V] with `all_positions`. Sizes B, S and L stay symbolic and may be 1. Raises `CaptureError` for a model
    whose attention cannot be replaced, or whose layers are not a plain chain.
    """
    from forebay.rewriter.capture_trace import trace_model

    with _no_collection(), torch.no_grad():
        model = _build(config_or_model, dtype)
        try:
            return trace_model(model, all_positions)
        except CaptureError as error:
            raise CaptureError(f"{_title(type(model), model.config)} cannot be captured: {error}") from error


@contextmanager
def _no_collection() -> Iterator[None]:
    """Tracing makes many small objects; the collector's passes over them were 15 % of the time at 96 layers."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def _title(cls: type, config: PreTrainedConfig) -> str:
    return f"{cls.__name__} (model type {config.model_type!r})"


def _model_class(config_or_model: Any) -> tuple[type[PreTrainedModel], PreTrainedConfig]:
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedConfig, PreTrainedModel

    if isinstance(config_or_model, PreTrainedConfig):
        if type(config_or_model) not in MODEL_FOR_CAUSAL_LM_MAPPING:
            raise CaptureError(f"{config_or_model.model_type!r} is not a causal language model that transformers knows")
        return MODEL_FOR_CAUSAL_LM_MAPPING[type(config_or_model)], config_or_model
    if isinstance(config_or_model, PreTrainedModel):
        return type(config_or_model), config_or_model.config
    raise CaptureError(
        f"{type(config_or_model).__name__} is neither a transformers config nor a transformers model; "
        'use torch.compile(model, backend="forebay") for other modules'
    )


def _build(config_or_model: Any, dtype: torch.dtype | None) -> PreTrainedModel:
    """The model on the meta device with our attention; only its non-persistent buffers hold values."""
    from transformers import initialization

    from forebay.rewriter.capture_attention import NAME, register_attention

    cls, config = _model_class(config_or_model)
    if not cls._supports_attention_backend:
        raise CaptureError(
            f"{_title(cls, config)} cannot be captured: its attention does not go through transformers' attention "
            "interface, so it cannot be replaced by one that reads a streamed KV cache"
        )
    if dtype is None:
        given = config_or_model.dtype if isinstance(config_or_model, nn.Module) else config.dtype
        dtype = given if isinstance(given, torch.dtype) else torch.float32
    register_attention()
    with torch.device("meta"), initialization.no_init_weights():
        model = cls._from_config(copy.deepcopy(config), dtype=dtype, attn_implementation=NAME)
        model.tie_weights()
    model.eval()
    if isinstance(config_or_model, nn.Module):
        _check_same_parameters(config_or_model, model)
    _fill_constants(model)
    return model


def _check_same_parameters(given: nn.Module, built: PreTrainedModel) -> None:
    want = {name: tuple(p.shape) for name, p in given.named_parameters()}
    have = {name: tuple(p.shape) for name, p in built.named_parameters()}
    if want != have:
        odd = sorted(name for name in want.keys() | have.keys() if want.get(name) != have.get(name))
        raise CaptureError(
            f"{_title(type(built), built.config)} cannot be captured: its parameters are not those its config "
            f"describes, first difference at {odd[0]!r}"
        )


def _fill_constants(model: PreTrainedModel) -> None:
    """Give every non-persistent buffer its real value, by the same call that transformers' own loading uses.

    Filling twice over different contents shows whether every element was written.
    """
    for name, module in model.named_modules():
        buffers = {k: b for k, b in module._buffers.items() if b is not None and k in module._non_persistent_buffers_set}
        if not buffers:
            continue
        filled: list[dict[str, torch.Tensor]] = []
        for content in (0, 1):
            module._buffers.update({k: torch.full_like(b, content, device="cpu") for k, b in buffers.items()})
            model._init_weights(module)
            filled.append({k: module._buffers[k] for k in buffers})  # type: ignore[misc]
        for k in buffers:
            if not torch.equal(filled[0][k], filled[1][k]):
                raise CaptureError(f"{_title(type(model), model.config)} cannot be captured: {name}.{k} has no value")
