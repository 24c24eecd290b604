"""Operators by the names that launches bear: "aten.add.out" writes into given memory; "call:aten.zero_.default" is
called as it is, and what it gives is copied; "forebay.linear" is ours; "copy" is a move of the runtime's own."""

from __future__ import annotations

import torch

_CALLED = "call:"


def called(operator: torch._ops.OpOverload) -> str:
    """The name in a launch of an operator that is called as it is."""
    return f"{_CALLED}{operator}"


def is_called(name: str) -> bool:
    """Return whether a launch of that name calls its operator as it is."""
    return name.startswith(_CALLED)


def overload_of(name: str) -> torch._ops.OpOverload | None:
    """The operator that a launch names; None where torch does not know it, and for moves of the runtime's own."""
    namespace, _, rest = name.removeprefix(_CALLED).partition(".")
    packet, _, overload = rest.partition(".")
    found = getattr(getattr(torch.ops, namespace), packet, None) if packet else None
    return getattr(found, overload or "default", None)
