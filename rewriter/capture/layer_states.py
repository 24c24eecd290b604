"""The states of a layer while it is traced: its code asks for one by its spec, and is given its tensors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

from forebay.rewriter.capture.errors import CaptureError
from forebay.rewriter.ir.state import StateSpec

GiveState = Callable[[StateSpec], tuple[torch.Tensor, ...]]


def _none(spec: StateSpec) -> tuple[torch.Tensor, ...]:
    raise CaptureError(f"it keeps a state of kind {spec.kind} outside its repeated layers")


_start: ContextVar[torch.Tensor] = ContextVar("forebay_start")
_count: ContextVar[torch.Tensor] = ContextVar("forebay_count")
_give: ContextVar[GiveState] = ContextVar("forebay_give", default=_none)
_parts: ContextVar[Counter[str]] = ContextVar("forebay_parts")  # states that the layer was given, of each kind


@contextmanager
def layer_inputs(start: torch.Tensor, count: torch.Tensor, give: GiveState = _none) -> Iterator[None]:
    """Let the code of layers read `starts` and `counts`, and have `give` answer `layer_state`."""
    tokens = [(var, var.set(value)) for var, value in ((_start, start), (_count, count))]
    given, parts = _give.set(give), _parts.set(Counter())
    try:
        yield
    finally:
        _parts.reset(parts)
        _give.reset(given)
        for var, token in tokens:
            var.reset(token)


def layer_state(spec: StateSpec) -> tuple[torch.Tensor, ...]:
    """Return the tensors of a state that the layer keeps; it updates them in place, by an operator of its kind."""
    _parts.get()[spec.kind] += 1
    return _give.get()(spec)


def states_before(kind: str) -> int:
    """Return how many states of a kind the layer was given before."""
    return _parts.get()[kind]


def starts() -> torch.Tensor:
    """Return [B], the tokens of each sequence before this step."""
    return _start.get()


def counts() -> torch.Tensor:
    """Return [B], the tokens of this step that are real; only for states that are not rewindable."""
    return _count.get()
