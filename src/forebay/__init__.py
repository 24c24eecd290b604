"""Forebay: run PyTorch language models larger than the fast memory you have."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from forebay.model import LanguageModel, wrap
    from forebay.rewriter.capture import CaptureError
    from forebay.rewriter.checkpoint import CheckpointError
    from forebay.rewriter.machine import Machine, load_machine, save_machine
    from forebay.rewriter.plan import Budget, Plan, PlanError, Workload, load_plan
    from forebay.rewriter.switches import SwitchError
    from forebay.runtime.measure import cached_machine, measure_machine

__all__ = [
    "Budget",
    "CaptureError",
    "CheckpointError",
    "LanguageModel",
    "Machine",
    "Plan",
    "PlanError",
    "SwitchError",
    "Workload",
    "cached_machine",
    "load_machine",
    "load_plan",
    "measure_machine",
    "save_machine",
    "wrap",
]

# Found when first asked for, so that `import forebay` loads neither torch nor transformers.
_HOMES = {
    "forebay.model": ("LanguageModel", "wrap"),
    "forebay.rewriter.capture": ("CaptureError",),
    "forebay.rewriter.checkpoint": ("CheckpointError",),
    "forebay.rewriter.machine": ("Machine", "load_machine", "save_machine"),
    "forebay.rewriter.plan": ("Budget", "Plan", "PlanError", "Workload", "load_plan"),
    "forebay.rewriter.switches": ("SwitchError",),
    "forebay.runtime.measure": ("cached_machine", "measure_machine"),
}


def __getattr__(name: str) -> Any:
    for module, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(module), name)
    raise AttributeError(f"module 'forebay' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
