"""How much a model's loss depends on each value of its matrices, measured on a text.

Let D be the change of a matrix's values. Around a trained model the loss grows by about sum(F * D^2) / 2, F being the
diagonal of the Fisher information: for each value the squared derivative of the loss, summed over tokens.

Layers run one at a time. The backward pass visits them in reverse order and runs each again (activation checkpoints).
Memory holds the float32 values of one layer, those of embedding and head, and one F.

Sources: LeCun et al., Optimal Brain Damage, section 2; Kim et al., SqueezeLLM, section 4.1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from forebay.rewriter.capture.language_model import fill_constants
from forebay.rewriter.capture.layers import find_layers
from forebay.rewriter.checkpoints.matrices import Matrix
from forebay.rewriter.checkpoints.quantize_source import QuantizeSource
from forebay.rewriter.checkpoints.records import CheckpointError

# Given the name of a matrix, rows of its values (outputs first) and F of each value; several times for one matrix.
Note = Callable[[str, torch.Tensor, torch.Tensor], None]


def measure_sensitivity(source: QuantizeSource, matrices: Mapping[str, Matrix], ids: torch.Tensor, note: Note) -> None:
    """Run a model over a text, forward and backward, and tell F of matrices.

    Args:
        source: The model, whose weights are read twice.
        matrices: Those that are asked for, by the model's first name for each.
        ids: Windows of token ids [W, T], T > 1.
        note: Called with F, or with a part of it, which it adds up.

    Raises:
        CheckpointError: The model's own code fails on the text.
    """
    model = source.model
    model.eval()
    fill_constants(model)
    model.config._experts_implementation = "eager"
    weights = LoadedWeights(source, {name for name, matrix in matrices.items() if matrix.role == "experts"})
    found = find_layers(model)
    layers = {f"{found[0]}.{name}": layer for name, layer in found[1].named_children()} if found else {}
    try:
        with (weights.outside(layers), _hooks(model, matrices, note), _one_at_a_time(layers, weights),
              torch.enable_grad()):
            logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
            nn.functional.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten(), reduction="sum").backward()
    except (RuntimeError, ValueError, TypeError, AttributeError, NotImplementedError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"sensitivity cannot be measured, because {type(model).__name__} fails on the text: "
                              f"{' '.join(str(error).split())[:200]}; name a format with --weights") from error


class LoadedWeights:
    """The weights of a model on the meta device, of which some are in memory at a time."""

    def __init__(self, source: QuantizeSource, differentiated: Iterable[str]) -> None:
        self.model, self.differentiated = source.model, frozenset(differentiated)
        self.tensors: dict[str, Any] = {}
        for tensor in source.tensors:
            self.tensors.setdefault(source.names.get(tensor.name, tensor.name), tensor)
        first: dict[int, str] = {}
        self.places: dict[str, list[tuple[dict[str, Any], str]]] = {}  # where each stands, under its first name
        for path, module in self.model.named_modules(remove_duplicate=False):
            for held in (module._parameters, module._buffers):
                for own, tensor in held.items():
                    if tensor is not None and tensor.is_meta:
                        name = first.setdefault(id(tensor), f"{path}.{own}" if path else own)
                        self.places.setdefault(name, []).append((held, own))

    @contextmanager
    def inside(self, names: Iterable[str]) -> Iterator[None]:
        """Have these weights in memory."""
        names = list(names)
        before = {name: self.places[name][0][0][self.places[name][0][1]] for name in names}
        try:
            for name in names:
                self._put(name, self._values(name, before[name]))
            yield
        finally:
            for name in names:
                self._put(name, before[name])

    def outside(self, layers: Mapping[str, nn.Module]) -> Any:
        """`inside` of all weights that belong to none of the layers."""
        return self.inside([name for name in self.places if not name.startswith(tuple(f"{path}." for path in layers))])

    def of_layer(self, path: str) -> Any:
        """`inside` of the weights of a layer that belong to nothing before it."""
        return self.inside([name for name in self.places if name.startswith(f"{path}.")])

    def _put(self, name: str, value: torch.Tensor) -> None:
        for held, own in self.places[name]:
            held[own] = value

    def _values(self, name: str, like: torch.Tensor) -> torch.Tensor:
        tensor = self.tensors.get(name)
        if tensor is None:
            raise CheckpointError(f"{name} has no values, so sensitivity cannot be measured; name a format with "
                                  "--weights")
        pieces = [piece.reshape(-1) for piece in tensor.contents()]
        values = torch.cat(pieces).reshape(like.shape)
        if values.is_floating_point():
            values = values.float()
        if isinstance(like, nn.Parameter):
            return nn.Parameter(values, requires_grad=name in self.differentiated)
        return values


@contextmanager
def _one_at_a_time(layers: Mapping[str, nn.Module], weights: LoadedWeights) -> Iterator[None]:
    """Layers whose weights are in memory while they run, and which run again in the backward pass."""
    for path, layer in layers.items():
        vars(layer)["forward"] = _rerun(layer.forward, path, weights)
    try:
        yield
    finally:
        for layer in layers.values():
            del vars(layer)["forward"]


def _rerun(forward: Callable[..., Any], path: str, weights: LoadedWeights) -> Callable[..., Any]:
    def run(spec: Any, *leaves: Any) -> Any:
        args, kwargs = pytree.tree_unflatten(leaves, spec)
        with weights.of_layer(path):
            return forward(*args, **kwargs)

    def rerun(*args: Any, **kwargs: Any) -> Any:
        leaves, spec = pytree.tree_flatten((args, kwargs))
        return checkpoint(run, spec, *leaves, use_reentrant=True)

    return rerun


@contextmanager
def _hooks(model: nn.Module, matrices: Mapping[str, Matrix], note: Note) -> Iterator[None]:
    """Tell F of matrices as gradients come."""
    by_name = {name: (key, matrix) for key, matrix in matrices.items() for name in matrix.names}
    handles = [model.get_input_embeddings().register_forward_hook(_differentiable)]  # type: ignore[operator]
    for path, module in model.named_modules():
        for own in module._parameters:
            key, matrix = by_name.get(f"{path}.{own}", ("", None))
            if matrix is None:
                continue
            if matrix.role == "experts":
                handles.append(module.register_forward_pre_hook(_noted_experts(own, key, matrix, note)))
            elif isinstance(module, nn.Embedding):
                handles.append(module.register_forward_hook(_noted_rows(key, note)))
            else:
                handles.append(module.register_forward_hook(_noted_products(key, matrix, note)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _differentiable(module: nn.Module, given: Any, out: torch.Tensor) -> torch.Tensor:
    return out.requires_grad_().clone()  # weights are no variables, so gradients begin here


def _noted_products(name: str, matrix: Matrix, note: Note) -> Callable[..., None]:
    def hook(module: Any, given: tuple[torch.Tensor, ...], out: torch.Tensor) -> None:
        x, weight = given[0].detach(), module.weight.detach()

        def arrived(gradient: torch.Tensor) -> None:
            squares = gradient.flatten(0, -2).square().T @ x.flatten(0, -2).square()
            note(name, weight.T if matrix.transposed else weight, squares)

        if out.requires_grad:
            out.register_hook(arrived)

    return hook


def _noted_rows(name: str, note: Note) -> Callable[..., None]:
    def hook(module: Any, given: tuple[torch.Tensor, ...], out: torch.Tensor) -> None:
        rows, places = given[0].flatten().unique(return_inverse=True)
        values = module.weight.detach()[rows]

        def arrived(gradient: torch.Tensor) -> None:
            note(name, values, torch.zeros_like(values).index_add_(0, places, gradient.flatten(0, -2).square()))

        if out.requires_grad:
            out.register_hook(arrived)

    return hook


def _noted_experts(own: str, name: str, matrix: Matrix, note: Note) -> Callable[..., None]:
    """Note gradients of experts. Their module multiplies by itself, so the gradient of all tokens together is
    squared."""
    def hook(module: Any, given: Any) -> None:
        def arrived(weight: torch.Tensor) -> None:
            if weight.grad is None:
                return  # told already: the module was called several times, as for each expert
            note(name, matrix.rows(weight.detach()), matrix.rows(weight.grad).square())
            weight.grad = None

        if torch.is_grad_enabled():
            module._parameters[own].register_post_accumulate_grad_hook(arrived)

    return hook
