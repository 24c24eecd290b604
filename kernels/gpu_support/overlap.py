"""Launches that start while the launch before them ends (programmatic dependent launches; Hopper and later).

The programs of a kernel so launched are placed as soon as all of the launch before are, and wait at once until all of
its writes are seen. So no value can be read or written early: what is saved is the time between two kernels.
"""

from __future__ import annotations

import ast
import functools
from typing import Any

import torch

WAIT = ("tl.extra.cuda.gdc_wait()", "tl.extra.cuda.gdc_launch_dependents()")
_asked = False


def overlap_launches(asked: bool) -> None:
    """Set whether launches that are bound from now on overlap, on a device that can."""
    global _asked
    _asked = asked and torch.version.hip is None and torch.cuda.get_device_capability()[0] >= 9


def overlapping() -> bool:
    """Return whether launches overlap."""
    return _asked


@functools.cache
def waiting(kernel: Any) -> Any:
    """Return a copy of a Triton kernel that first waits for the launch before, then lets the next be placed.

    The next waits for this one to end, and so for all before: a launch that lets the next be placed has waited.
    """
    lines = kernel.src.split("\n")
    body = ast.parse(kernel.src).body[0].body  # type: ignore[attr-defined]
    first = body[1] if isinstance(body[0], ast.Expr) and len(body) > 1 else body[0]  # after the docstring
    lines[first.lineno - 1 : first.lineno - 1] = [" " * first.col_offset + line for line in WAIT]
    copy = type(kernel)(kernel.fn)
    copy._unsafe_update_src("\n".join(lines))
    return copy
