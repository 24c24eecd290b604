"""Low-rank adapters: matrices of a model on the meta device are given what an adapter adds to them, before tracing.

So an adapter is a part of the graph: its matrices are weights like others, streamed or resident, and the base's stay as
they are stored, packed or not. What they compute is in `checkpoints/lora_tensors.py`. Those of several adapters lie
side by side, and each sequence multiplies the columns of x A^T by 1 where they are its adapter's, by 0 elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from forebay.rewriter.capture.errors import CaptureError
from forebay.rewriter.checkpoints.records import AddedTensors, TensorRecord
from forebay.rewriter.ir.graph import CapturedModel

LORA = ("lora_A", "lora_B", "lora_gain")  # names of what a module is given


_columns: ContextVar[torch.Tensor] = ContextVar("forebay_adapter_columns")


@contextmanager
def chosen_columns(columns: torch.Tensor | None) -> Iterator[None]:
    """Let adapted modules read columns [B, width], 1 where they are those of each sequence's adapter."""
    token = None if columns is None else _columns.set(columns)
    try:
        yield
    finally:
        if token is not None:
            _columns.reset(token)


def adopt_lora(model: nn.Module, added: AddedTensors) -> dict[str, tuple[str, ...]]:
    """Give modules what adapters add, of these shapes and dtypes, by the names of parameters.

    Returns:
        For weights that shared their storage with a parameter of which the adapter has its own: the names of those.
    """
    modules: dict[str, dict[str, TensorRecord]] = {}
    replaced = []
    for name, record in added.tensors.items():
        part = next((f".{each}" for each in LORA if f".{each}" in name), "")
        if not part:
            replaced.append(name)
            continue
        module = name[: name.rindex(part)]
        modules.setdefault(module, {})[name.removeprefix(f"{module}.")] = record
    for name, parts in modules.items():
        _adapt(model.get_submodule(name), parts, bool(added.columns))
    return _untie(model, replaced)


def with_adapters(
    captured: CapturedModel, added: AddedTensors, shared: Mapping[str, tuple[str, ...]]
) -> CapturedModel:
    """`captured`, whose graphs read all that adapters add. CaptureError where they do not."""
    unread = [name for name in added.tensors if name not in captured.weights]
    if unread:
        raise CaptureError(f"the adapter changes {unread[0].partition('.lora_')[0]}, which this model reads in a way "
                           "of its own; merge the adapter into its base")
    weights = {name: replace(spec, ties=(*spec.ties, *shared.get(name, ()))) for name, spec in captured.weights.items()}
    return replace(captured, weights=weights, adapters=dict(added.columns))


def _adapt(module: Any, parts: Mapping[str, TensorRecord], chosen: bool) -> None:
    first, second = parts["lora_A.weight"], parts["lora_B.weight"]
    with torch.device("meta"):
        if isinstance(module, nn.Embedding):
            module.lora_A = nn.Embedding(first.shape[0], first.shape[1], dtype=first.dtype)
        else:
            module.lora_A = nn.Linear(first.shape[1], first.shape[0], bias=False, dtype=first.dtype)
        module.lora_B = nn.Linear(second.shape[1], second.shape[0], bias="lora_B.bias" in parts, dtype=second.dtype)
        gain = parts.get("lora_gain")
        if gain is not None:
            module.lora_gain = nn.Parameter(torch.empty(gain.shape, dtype=gain.dtype), requires_grad=False)
    for each in (module.lora_A, module.lora_B):
        vars(each)["training"] = False
        for parameter in each.parameters():
            parameter.requires_grad_(False)
    vars(module)["forward"] = _forward(module, gain is not None, chosen)


def _forward(module: Any, gained: bool, chosen: bool) -> Callable[[torch.Tensor], torch.Tensor]:
    own, scale = module.forward, getattr(module, "embed_scale", None)  # Gemma's embeddings are scaled

    def forward(x: torch.Tensor) -> torch.Tensor:
        made, inner = own(x), module.lora_A(x)
        if chosen:
            if inner.dim() != 3:
                raise CaptureError("a module that several adapters change is not given sequences one by one; name one "
                                   "adapter for all requests")
            inner = inner * _columns.get()[:, None]
        added = module.lora_B(inner)
        if gained:
            made = made * module.lora_gain
        return made + (added if scale is None else added * module.embed_scale.to(added.dtype))

    return forward


def _untie(model: nn.Module, names: list[str]) -> dict[str, tuple[str, ...]]:
    """Give parameters storage of their own."""
    held = dict(model.named_parameters(remove_duplicate=False))
    shared: dict[str, tuple[str, ...]] = {}
    for name in names:
        owner, _, own = name.rpartition(".")
        parameter = nn.Parameter(torch.empty_like(held[name]), requires_grad=False)
        model.get_submodule(owner)._parameters[own] = parameter
        for other, each in held.items():
            if each is held[name] and other not in names:
                shared[other] = (*shared.get(other, ()), name)
    return shared
