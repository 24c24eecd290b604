"""Mixtures of experts: what transformers' code does there, done by our operator over one table of entries a layer.

The parameters of a layer's experts become one, in which those of an expert lie together (products/experts/entries.py),
so that an expert is read from a file, and kept in memory, as one piece. Routers and shared experts stay as they are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import nn

from forebay.kernels.products.experts.entries import entry_parts, table_shape
from forebay.kernels.products.experts.operator import EXPERTS
from forebay.kernels.products.experts.reference import ACTIVATIONS, PLAIN, Form, activated
from forebay.rewriter.capture.family import Family, register_family
from forebay.rewriter.capture.layers import CaptureError
from forebay.rewriter.ir.expert_table import ExpertTable
from forebay.rewriter.ir.graph import CapturedModel

TABLE = "table"  # the name of the parameter, within the module of experts
WAYS = (*((name, 0.0) for name in ACTIVATIONS[:-1]), ("alpha_swiglu", 1.702))
TRIED_NUMBERS = 1024  # gates at least, by which an activation is recognized


def adopt_experts(model: nn.Module) -> dict[str, ExpertTable]:
    """Let modules of experts call our operator.

    Returns:
        What their tables hold, by the parameters' names.

    Raises:
        CaptureError: A module of experts computes something that the operator does not.
    """
    found = {}
    for name, module in model.named_modules():
        layout = experts_layout(module)
        if layout is not None:
            found[f"{name}.{TABLE}"] = _adopt(name, module, layout)
    return found


def with_tables(captured: CapturedModel, tables: Mapping[str, ExpertTable]) -> CapturedModel:
    """`captured` knowing which of its weights are tables of experts."""
    weights = dict(captured.weights)
    for name, table in tables.items():
        sources = tuple(f"{name.removesuffix(TABLE)}{source}" for source in table.sources)
        weights[name] = replace(weights[name], table=replace(table, sources=sources))
    return replace(captured, weights=weights)


class ExpertsLayout(NamedTuple):
    """How a module of experts keeps and applies its parameters, as transformers' experts interface has it.

    Attributes:
        gated: `gate_up_proj` gives gate and value; else `up_proj` gives what is activated.
        concatenated: All of the gate comes first; else gate and value alternate.
        transposed: Matrices are [in_features, out_features].
        biased: Both matrices have biases.
        scales_input: A pick's weight multiplies what its expert is given.
    """

    gated: bool
    concatenated: bool
    transposed: bool
    biased: bool
    scales_input: bool = False


# Modules that do not tell their layout, by the names of their classes.
LAYOUTS = {"Llama4TextExperts": ExpertsLayout(True, True, True, False, scales_input=True)}


def experts_layout(module: Any) -> ExpertsLayout | None:
    """The layout of a module of experts; None for other modules."""
    if "down_proj" not in module._parameters:
        return None
    if hasattr(module, "has_gate") and hasattr(module, "is_transposed"):
        return ExpertsLayout(*(bool(getattr(module, name)) for name in (
            "has_gate", "is_concatenated", "is_transposed", "has_bias")))
    return LAYOUTS.get(type(module).__name__)


def _adopt(name: str, module: Any, layout: ExpertsLayout) -> ExpertTable:
    if getattr(module, "has_post_expert_norm", False):
        raise CaptureError(f"its experts ({name}) normalize the results of each of them")
    up, down = ("gate_up_proj" if layout.gated else "up_proj"), "down_proj"
    form = Form("", layout.gated, not layout.concatenated, layout.transposed, layout.scales_input)
    count, *shape = module._parameters[down].shape
    inner, hidden = shape if form.transposed else reversed(shape)
    biased, dtype = layout.biased, module._parameters[down].dtype
    form = _matching(name, module, form, inner)
    parts = entry_parts(hidden, inner, form, PLAIN, biased, dtype)
    sources = tuple(f"{up if part.name.startswith('up') else down}{part.name.removeprefix('up').removeprefix('down')}"
                    for part in parts)
    for part, source in zip(parts, sources, strict=True):
        held = module._parameters.get(source)
        if held is None or tuple(held.shape) != (count, *part.shape):
            raise CaptureError(f"its experts ({name}) have {source} of {held if held is None else tuple(held.shape)}, "
                               f"not {(count, *part.shape)}")
    if set(module._parameters) != set(sources):
        raise CaptureError(f"its experts ({name}) have parameters other than {', '.join(sources)}")
    device = module._parameters[down].device
    for source in sources:
        del module._parameters[source]
    table = nn.Parameter(torch.empty(table_shape(count, parts), dtype=dtype, device=device), requires_grad=False)
    module.register_parameter(TABLE, table)
    vars(module)["forward"] = _forward(module, inner, biased, form)
    return ExpertTable(count, parts, sources)


def _forward(module: nn.Module, inner: int, biased: bool, form: Form) -> Callable[..., torch.Tensor]:
    def forward(hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
        picks = hidden_states.reshape(-1, hidden_states.shape[-1]).shape[0]
        index, weights = top_k_index.reshape(picks, -1), top_k_weights.reshape(picks, -1)
        found: torch.Tensor = EXPERTS.overload(hidden_states, index, weights, module._parameters[TABLE], inner, biased,
                                               *form)
        return found

    return forward


def _matching(name: str, module: Any, form: Form, inner: int) -> Form:
    """The form whose activation gives what the module's own does, on numbers that reach beyond any limit."""
    generator = torch.Generator().manual_seed(0)
    rows = -(-TRIED_NUMBERS // inner)  # not more where experts are wide: a model has many layers to try
    y = torch.randn(rows, 2 * inner if form.gated else inner, generator=generator, dtype=torch.float64) * 8
    try:
        if form.gated and hasattr(module, "_apply_gate"):
            wanted = module._apply_gate(y)
        else:
            gate, *value = y.chunk(2, -1) if form.gated else (y,)
            wanted = math.prod(value, start=module.act_fn(gate))
    except Exception as error:
        raise CaptureError(f"its experts' activation ({name}) cannot be tried: {error}") from error
    for each in _forms(module, form):
        found = activated(y, each)
        if found.shape == wanted.shape and torch.allclose(found, wanted, rtol=1e-6, atol=1e-6):
            return each
    raise CaptureError(f"its experts ({name}) have an activation that none of ours gives "
                       f"({type(getattr(module, 'act_fn', module)).__name__})")


def _forms(module: Any, form: Form) -> Iterator[Form]:
    said = (getattr(module, name, None) for name in ("limit", "swiglu_limit"))
    limits = {float(value) for value in said if isinstance(value, int | float)}
    for activation, alpha in WAYS:
        for limit in (0.0, *limits):
            yield form._replace(activation=activation, limit=limit,
                                alpha=float(getattr(module, "alpha", alpha)) if activation == "alpha_swiglu" else 0.0)


def _llama4(module: Any) -> Callable[..., Any]:
    """In the place of a layer's mixture, which computes all experts, of inputs that are zeros where none was chosen."""
    def forward(hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rows = hidden_states.reshape(-1, module.hidden_dim)
        logits = nn.functional.linear(rows, module.router.weight)
        best, index = logits.topk(module.top_k, dim=1)
        weights = best.float().sigmoid().to(logits.dtype)
        return module.shared_expert(rows) + module.experts(rows, index, weights), logits

    return forward


register_family(Family("Llama4ForCausalLM", {"Llama4TextMoe": ("forward", _llama4)}))
