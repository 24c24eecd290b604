"""Rotary frequencies that follow the length of a whole call (rope types dynamic and longrope)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import GenerationMixin
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from forebay.rewriter.capture.errors import CaptureError

_length: ContextVar[torch.Tensor] = ContextVar("forebay_length")


@dataclass(frozen=True)
class Following:
    """Rotary tables that follow the length of a call: nothing, or tables of which `unlimited` ones reach to any
    position. A cache that was begun within `rope_switch_length` tokens is computed anew beyond them (0: never)."""

    length: bool = False
    unlimited: bool = False
    rope_switch_length: int = 0


@contextmanager
def calls_of(length: torch.Tensor | None) -> Iterator[None]:
    """Let rotary tables made inside be those of calls whose sequences count `length` [B] tokens in all, those of later
    chunks of the prompt included."""
    if length is None:
        yield
        return
    token = _length.set(length)
    try:
        yield
    finally:
        _length.reset(token)


def follow_length(model: nn.Module) -> Following:
    """Let frequencies that transformers sets by the longest position of a call follow each sequence's length instead,
    so that they are the same in every chunk of a prompt."""
    found, originals, dynamic = False, [0], False
    for module in model.modules():
        state = vars(module)
        kinds = state.get("rope_type") or ""
        named: dict[str, str] = kinds if isinstance(kinds, dict) else {"": kinds}
        following = {name: kind for name, kind in named.items() if "dynamic" in kind or kind == "longrope"}
        if not following:
            continue
        found = True
        for name, kind in following.items():
            dynamic |= "dynamic" in kind
            if kind == "longrope":
                originals.append(_parameters(module, name)["original_max_position_embeddings"])
        state["forward"] = _following(module, module.forward, following)
        fixed = named | dict.fromkeys(following, "default")  # then transformers leaves the frequencies as they are
        state["rope_type"] = fixed if isinstance(kinds, dict) else fixed[""]
    own: Any = type(model)
    # Phi3's gives up the cache where it changes over to long factors.
    restarts = own.prepare_inputs_for_generation is not GenerationMixin.prepare_inputs_for_generation
    return Following(found, dynamic, max(originals) if restarts else 0)


class _Frequencies:
    """Frequencies [B, 1, D / 2] in the place of a buffer [D / 2], in both forms in which rotary modules read it."""

    def __init__(self, values: torch.Tensor) -> None:
        self.values = values

    def __getattr__(self, name: str) -> Any:
        return getattr(self.values, name)  # `to`, and what is broadcast over positions [B, S, 1] then

    def __getitem__(self, index: Any) -> torch.Tensor:
        """`[None, :, None]` of the buffer, [B, D / 2, 1] for a product with positions [B, 1, S] (transformers 5.19)."""
        if index != (None, slice(None), None):
            raise CaptureError("it reads rotary frequencies, which follow the length of the call, in a form of its own")
        return self.values.transpose(1, 2)


def _following(module: nn.Module, plain: Callable[..., Any], kinds: dict[str, str]) -> Callable[..., Any]:
    """The module's `forward` with frequencies [B, 1, D / 2] in the place of its buffers [D / 2]."""
    state = vars(module)

    def forward(*args: Any, **kwargs: Any) -> Any:
        names = {name: f"{name}_" if name else "" for name in kinds}
        try:
            state.update({f"{prefix}inv_freq": _Frequencies(_frequencies(module, name, prefix, kinds[name]))
                          for name, prefix in names.items()})
            return plain(*args, **kwargs)
        finally:
            for prefix in names.values():
                state.pop(f"{prefix}inv_freq", None)

    return forward


def _frequencies(module: nn.Module, name: str, prefix: str, kind: str) -> torch.Tensor:
    """[B, 1, D / 2], by transformers' own formula for a length."""
    length = _length.get(None)
    if length is None:
        raise CaptureError("a layer makes rotary tables of its own, whose frequencies follow the length of the call")
    length = length[:, None, None]
    config, of_layer = vars(module)["config"], {"layer_type": name} if name else {}
    near = getattr(module, f"{prefix}original_inv_freq")
    if kind == "longrope":
        original = _parameters(module, name)["original_max_position_embeddings"]
        far, _ = ROPE_INIT_FUNCTIONS[kind](config, length.device, seq_len=original + 1, **of_layer)
    else:
        original = vars(module)["original_max_seq_len"]
        far, _ = ROPE_INIT_FUNCTIONS[kind](config, length.device, seq_len=length, **of_layer)
    return torch.where(length > original, far, near)


def _parameters(module: nn.Module, name: str) -> Any:
    given = vars(module)["config"].rope_parameters
    return given[name] if name else given
