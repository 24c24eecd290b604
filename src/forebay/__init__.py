"""Forebay: run PyTorch language models larger than the fast memory you have."""

from __future__ import annotations

import importlib
import logging
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    __version__: str
    from forebay.api import wrap
    from forebay.compiled.report import OffloadReport, is_offloaded, offload_report
    from forebay.embedding.embedder import Embedder
    from forebay.embedding.reranker import Reranker
    from forebay.exported.errors import ExportError
    from forebay.exported.export import export
    from forebay.exported.start import open_bundle
    from forebay.language_model import LanguageModel
    from forebay.modules.encoder_decoder import EncoderDecoder
    from forebay.rewriter.capture.language_model import CaptureError
    from forebay.rewriter.checkpoints.records import CheckpointError
    from forebay.rewriter.ir.plan import Budget, Plan, PlanError, Workload, load_plan
    from forebay.rewriter.machine.profile import Machine, load_machine, save_machine
    from forebay.rewriter.planning.options import Options
    from forebay.rewriter.switches import SwitchError
    from forebay.runtime.measure.kept import cached_machine
    from forebay.runtime.measure.machine import measure_machine

__all__ = [
    "Budget",
    "CaptureError",
    "CheckpointError",
    "Embedder",
    "EncoderDecoder",
    "ExportError",
    "LanguageModel",
    "Machine",
    "OffloadReport",
    "Options",
    "Plan",
    "PlanError",
    "Reranker",
    "SwitchError",
    "Workload",
    "__version__",
    "cached_machine",
    "export",
    "is_offloaded",
    "load_machine",
    "load_plan",
    "measure_machine",
    "offload_report",
    "open_bundle",
    "save_machine",
    "wrap",
]

# Found when first asked for, so that `import forebay` loads neither torch nor transformers.
_HOMES = {
    "forebay.api": ("wrap",),
    "forebay.compiled.report": ("OffloadReport", "is_offloaded", "offload_report"),
    "forebay.embedding.embedder": ("Embedder",),
    "forebay.embedding.reranker": ("Reranker",),
    "forebay.exported.errors": ("ExportError",),
    "forebay.exported.export": ("export",),
    "forebay.exported.start": ("open_bundle",),
    "forebay.language_model": ("LanguageModel",),
    "forebay.modules.encoder_decoder": ("EncoderDecoder",),
    "forebay.rewriter.capture.language_model": ("CaptureError",),
    "forebay.rewriter.checkpoints.checkpoint": ("CheckpointError",),
    "forebay.rewriter.machine.profile": ("Machine", "load_machine", "save_machine"),
    "forebay.rewriter.ir.plan": ("Budget", "Plan", "PlanError", "Workload", "load_plan"),
    "forebay.rewriter.planning.options": ("Options",),
    "forebay.rewriter.switches": ("SwitchError",),
    "forebay.runtime.measure.kept": ("cached_machine",),
    "forebay.runtime.measure.machine": ("measure_machine",),
}


def _printable(record: logging.LogRecord) -> bool:
    """Make a message of ours `printable`: it may hold names from files."""
    from forebay.rewriter.ir.printable import printable

    record.msg, record.args = printable(record.getMessage()), None
    return True


logging.getLogger("forebay").addFilter(_printable)


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return importlib.import_module("forebay.version").package_version()
    for module, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(module), name)
    raise AttributeError(f"module 'forebay' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
