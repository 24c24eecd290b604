"""The weight matrices of a model: which names they go by, and what they are to it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from forebay.rewriter.capture.experts import NAMED_LAYOUTS, experts_layout
from forebay.rewriter.checkpoints.records import log_once
from forebay.rewriter.one_thread import one_thread


@dataclass(frozen=True)
class Matrix:
    """A weight matrix of the model: its names, its role, and whether it lies as [inputs, outputs].

    Roles: `linear`; `experts`, of all experts of a layer; `head`, the output head; `embedding`, of tokens; `tied`, both
    of these; `table`, looked up by something else than tokens.
    """

    names: tuple[str, ...]
    role: str
    transposed: bool = False


@one_thread
def find_matrices(model: nn.Module) -> dict[str, Matrix]:
    """The weight matrices of linear layers, experts and embeddings, by the first name of each; a tied one is one.
    Routers are none."""
    from transformers.pytorch_utils import Conv1D

    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()  # type: ignore[operator]
    found, of_experts = _expert_matrices(model, names)
    for module in model.modules():
        weight = getattr(module, "weight", None)
        if not isinstance(module, nn.Linear | nn.Embedding | Conv1D) or not isinstance(weight, nn.Parameter):
            continue
        if isinstance(module, nn.Linear) and weight.shape[0] in of_experts:
            continue  # a router
        looked_up, is_head = weight is embedding.weight, head is not None and weight is head.weight
        role = "tied" if looked_up and is_head else "embedding" if looked_up else "head" if is_head else (
            "table" if isinstance(module, nn.Embedding) else "linear")
        known = tuple(names[id(weight)])
        found[known[0]] = Matrix(known, role, isinstance(module, Conv1D))
    return found


def warn_of_native_experts(model: nn.Module) -> None:
    """Log which experts are no matrices here, so that they keep their dtype (DBRX, JetMoE)."""
    for kind in sorted({type(module).__name__ for module in model.modules()} & NAMED_LAYOUTS.keys()):
        log_once(f"the weights of {kind} keep their dtype: experts that lie in matrices of two dimensions are not "
                 "quantized")


def _expert_matrices(model: nn.Module, names: Mapping[int, Sequence[str]]) -> tuple[dict[str, Matrix], set[int]]:
    """The matrices of experts by their names, and the outputs that a router may have: a number an expert, or one."""
    found, outputs = {}, set[int]()
    for module in model.modules():
        layout = experts_layout(module)
        if layout is None:
            continue
        for parameter in (p for p in module.parameters(recurse=False) if p.dim() == 3):
            (name,) = names[id(parameter)]
            found[name] = Matrix((name, f"{name}.weight"), "experts", layout.transposed)
            outputs |= {1, parameter.shape[0]}
    return found, outputs
