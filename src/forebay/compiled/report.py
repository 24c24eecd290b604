"""Report of the weights that torch.compile's backend moved out of memory, with reasons for the others."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from forebay.compiled.parameter_store import map_of
from forebay.rewriter.ir.byte_sizes import format_nbytes

NEVER_SEEN = ("no graph that reads it has run: either the module was not called, or torch.compile left this part to "
              "Python (TORCH_LOGS=graph_breaks shows why)")

_reasons: WeakIdKeyDictionary = WeakIdKeyDictionary()  # tensor -> why its graph was not offloaded


@dataclass(frozen=True)
class OffloadReport:
    """Bytes of the parameters and buffers that were moved, and why each of the others was not."""

    moved: Mapping[str, int]
    kept: Mapping[str, str]

    def __str__(self) -> str:
        lines = [f"moved: {len(self.moved)} tensors, {format_nbytes(sum(self.moved.values()))}"]
        for reason in dict.fromkeys(self.kept.values()):
            names = [name for name, other in self.kept.items() if other == reason]
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            lines.append(f"not moved: {', '.join(names[:3])}{more}: {reason}")
        return "\n".join(lines)


def offload_report(module: nn.Module) -> OffloadReport:
    """Report which weights of a module compiled for this backend have moved out of memory so far."""
    moved, kept = {}, {}
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if map_of(tensor) is not None:
            moved[name] = tensor.numel() * tensor.element_size()
        else:
            kept[name] = _reasons.get(tensor, NEVER_SEEN)
    return OffloadReport(moved, kept)


def is_offloaded(module: nn.Module) -> bool:
    """Return whether every parameter of a module has moved; `offload_report` says which have not, and why."""
    return all(map_of(parameter) is not None for parameter in module.parameters())


def note_reason(tensors: Iterable[object], reason: str) -> None:
    """Remember why the graph that reads these was not offloaded."""
    for tensor in tensors:
        if isinstance(tensor, torch.Tensor):
            _reasons[tensor] = reason
