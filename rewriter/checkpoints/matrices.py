"""The weight matrices of a model: which names they go by, and what they are to it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from forebay.rewriter.capture.experts import experts_layout
from forebay.rewriter.one_thread import one_thread

STACKS = ("JetMoeParallelExperts",)  # modules whose weight has a matrix of each expert, also outside of mixtures


@dataclass(frozen=True)
class Matrix:
    """A weight matrix of the model: its names, its role, and whether it lies as [inputs, outputs].

    Roles: `linear`; `experts`, of all experts of a layer; `head`, the output head; `embedding`, of tokens; `tied`, both
    of these; `table`, looked up by something else than tokens.

    Attributes:
        module: That of the experts.
        joined: The names of all matrices of experts whose outputs are those of one product.
        count: Experts whose rows lie one after the other in two dimensions; 0 where they have a dimension.
    """

    names: tuple[str, ...]
    role: str
    transposed: bool = False
    module: str = ""
    joined: tuple[str, ...] = ()
    count: int = 0

    def shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of the matrix with a dimension of experts, if it is of experts."""
        return (self.count, shape[0] // self.count, *shape[1:]) if self.count and len(shape) == 2 else tuple(shape)

    def inputs(self, shape: Sequence[int]) -> int:
        """The number of values that each output sums over, in a tensor of this shape."""
        return self.shape(shape)[-2 if self.transposed else -1]

    def rows(self, tensor: torch.Tensor) -> torch.Tensor:
        """Its rows of outputs, those of one expert after the other."""
        tensor = tensor.view(self.shape(tensor.shape))
        return (tensor.mT if self.transposed else tensor).flatten(0, -2)


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


def _expert_matrices(model: nn.Module, names: Mapping[int, Sequence[str]]) -> tuple[dict[str, Matrix], set[int]]:
    """The matrices of experts by their names, and the outputs that a router may have: a number an expert, or one."""
    found, outputs = {}, set[int]()
    for path, module in model.named_modules():
        layout = experts_layout(module)
        if layout is None:
            continue
        own = [name for name, each in module.named_parameters(recurse=False) if each.dim() == 3]
        for joined in (layout.up, (layout.down,)) if layout.up else ((name,) for name in own):
            known = tuple(names[id(module.get_parameter(name))][0] for name in joined)
            for name, parameter in zip(known, map(module.get_parameter, joined), strict=True):
                turned = layout.transposed or (layout.down_transposed and joined == (layout.down,))
                count = 0 if parameter.dim() == 3 else int(module.num_experts)  # type: ignore[arg-type]
                found[name] = Matrix((name, f"{name}.weight"), "experts", turned, path, known, count)
                outputs |= {1, count or parameter.shape[0]}
    for path, module in model.named_modules():
        if type(module).__name__ in STACKS and f"{path}.weight" not in found:
            found[f"{path}.weight"] = Matrix((f"{path}.weight",), "experts", module=path)
    return found, outputs
