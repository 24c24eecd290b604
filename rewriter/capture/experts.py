"""Mixtures of experts: what transformers' code does there, done by our operator over one table of entries a layer.

The parameters of a layer's experts become one, in which those of an expert lie together (products/experts/entries.py),
so that an expert is read from a file, and kept in memory, as one piece. Routers and shared experts stay as they are.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import nn

from forebay.kernels.formats.entry_part import Part
from forebay.kernels.products.experts.entries import entry_parts, table_shape
from forebay.kernels.products.experts.operator import EXPERTS
from forebay.kernels.products.experts.reference import ACTIVATIONS, PLAIN, Form, activated
from forebay.rewriter.capture.errors import CaptureError
from forebay.rewriter.capture.family import Family, register_family
from forebay.rewriter.ir.expert_table import ExpertTable
from forebay.rewriter.ir.graph import META, CapturedModel, weight_name

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
    """`captured` knowing which of its weights are tables of experts, and among how many routers pick."""
    weights = dict(captured.weights)
    for name, table in tables.items():
        sources = tuple(f"{name.removesuffix(TABLE)}{source}" for source in table.sources)
        weights[name] = replace(weights[name], table=replace(table, sources=sources))
    named = {(block, own): name for block, names in zip(captured.layers, captured.layer_weights, strict=True)
             for own, name in names.items()}
    among = {name: table.among for name, table in tables.items() if table.among}
    for block, graph in {"": captured.step, **captured.blocks()}.items() if among else ():
        for node in graph.graph.find_nodes(op="placeholder"):
            own = weight_name(node)
            if choices := among.get(named.get((block, own), own or "")):  # type: ignore[arg-type]
                node.meta[META] = replace(node.meta[META], among=choices)
    return replace(captured, weights=weights)


class ExpertsLayout(NamedTuple):
    """How a module of experts keeps and applies its parameters, as transformers' experts interface has it.

    Attributes:
        gated: `gate_up_proj` gives gate and value; else `up_proj` gives what is activated.
        concatenated: All of the gate comes first; else gate and value alternate.
        transposed: Matrices are [in_features, out_features].
        biased: Both matrices have biases.
        scales_input: A pick's weight multiplies what its expert is given.
        down_transposed: The second matrix alone is [in_features, out_features].
        up: Parameters of the first matrix, whose rows come one after the other; () for the interface's own.
        down: The parameter of the second one.
        activation: The attribute that is the activation.
        called: The attribute that computes all experts' results.
    """

    gated: bool
    concatenated: bool
    transposed: bool
    biased: bool
    scales_input: bool = False
    down_transposed: bool = False
    up: tuple[str, ...] = ()
    down: str = "down_proj"
    activation: str = "act_fn"
    called: str = "forward"


# Modules that do not tell their layout, by the names of their classes.
LAYOUTS = {
    "Llama4TextExperts": ExpertsLayout(True, True, True, False, scales_input=True),
    "LongcatFlashExperts": ExpertsLayout(True, True, False, False),
    "DbrxExperts": ExpertsLayout(True, True, False, False, down_transposed=True, up=("mlp.w1", "mlp.v1"),
                                 down="mlp.w2", activation="mlp.activation_fn"),
    "JetMoeMoE": ExpertsLayout(True, True, False, False, up=("input_linear.weight",), down="output_linear.weight",
                               activation="activation", called="run_experts")}


def experts_layout(module: Any) -> ExpertsLayout | None:
    """The layout of a module of experts; None for other modules."""
    layout = LAYOUTS.get(type(module).__name__)
    if _parameter(module, layout.down if layout else "down_proj") is None:
        return None
    if layout is None and hasattr(module, "has_gate") and hasattr(module, "is_transposed"):
        gated, concatenated, transposed, biased = (bool(getattr(module, name)) for name in (
            "has_gate", "is_concatenated", "is_transposed", "has_bias"))
        return ExpertsLayout(gated, concatenated, transposed, biased)
    return layout


def _adopt(name: str, module: Any, layout: ExpertsLayout) -> ExpertTable:
    if getattr(module, "has_post_expert_norm", False):
        raise CaptureError(f"its experts ({name}) normalize the results of each of them")
    up, down = layout.up or ("gate_up_proj" if layout.gated else "up_proj",), layout.down
    form = Form("", layout.gated, not layout.concatenated, layout.transposed,
                layout.transposed or layout.down_transposed, layout.scales_input)
    matrix = _parameter(module, down)
    if matrix is None:
        raise CaptureError(f"its experts ({name}) have no {down}")
    count = matrix.shape[0] if matrix.dim() == 3 else module.num_experts  # else rows of all experts in two dimensions
    inner, hidden = matrix.shape[-2:] if form.down_transposed else reversed(matrix.shape[-2:])
    inner = inner if matrix.dim() == 3 else inner // count
    form = _matching(name, module, operator.attrgetter(layout.activation), form, inner)
    parts, sources = _sources(entry_parts(hidden, inner, form, PLAIN, layout.biased, matrix.dtype), up, down)
    for part, source in zip(parts, sources, strict=True):
        held = _parameter(module, source)
        wanted = (count, *part.shape)
        # of all experts' rows in two dimensions the rest; there may be more experts, which have no second matrix
        inside = part.shape[1:] if held is not None and held.dim() == len(part.shape) else part.shape
        if held is None or tuple(held.shape[1:]) != inside or held.numel() < math.prod(wanted):
            raise CaptureError(f"its experts ({name}) have {source} of {held if held is None else tuple(held.shape)}, "
                               f"not {wanted}")
    if not layout.up and set(module._parameters) != set(sources):
        raise CaptureError(f"its experts ({name}) have parameters other than {', '.join(sources)}")
    for source in sources:
        owner, _, own = source.rpartition(".")
        del module.get_submodule(owner)._parameters[own]
    table = nn.Parameter(torch.empty(table_shape(count, parts), dtype=matrix.dtype, device=matrix.device),
                         requires_grad=False)
    module.register_parameter(TABLE, table)
    vars(module)[layout.called] = _forward(module, inner, layout.biased, form)
    among = getattr(module, "total_experts", count)
    return ExpertTable(count, parts, sources, among if among > count else 0)


def _parameter(module: nn.Module, path: str) -> torch.Tensor | None:
    """A parameter by its path from a module; None where it has none."""
    try:
        return module.get_parameter(path)
    except AttributeError:
        return None


def _sources(parts: Sequence[Part], up: Sequence[str], down: str) -> tuple[tuple[Part, ...], tuple[str, ...]]:
    """The parts of an entry, each made of one parameter, and which parameter that is."""
    found: list[tuple[Part, str]] = []
    for part in parts:
        kind, _, bias = part.name.partition("_")
        names = up if kind == "up" else (down,)
        rows = part.shape[0] // len(names)
        piece = part._replace(shape=(rows, *part.shape[1:]))
        found += [(piece._replace(offset=part.offset + i * piece.nbytes), f"{own}_{bias}" if bias else own)
                  for i, own in enumerate(names)]
    of, sources = zip(*found, strict=True)
    return of, sources


def _forward(module: nn.Module, inner: int, biased: bool, form: Form) -> Callable[..., torch.Tensor]:
    def forward(hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
        picks = hidden_states.reshape(-1, hidden_states.shape[-1]).shape[0]
        index, weights = top_k_index.reshape(picks, -1), top_k_weights.reshape(picks, -1)
        found: torch.Tensor = EXPERTS.overload(hidden_states, index, weights, module._parameters[TABLE], inner, biased,
                                               *form)
        return found

    return forward


def _matching(name: str, module: Any, activation: Callable[[Any], Any], form: Form, inner: int) -> Form:
    """The form whose activation gives what the module's own does, on numbers that reach beyond any limit."""
    generator = torch.Generator().manual_seed(0)
    rows = -(-TRIED_NUMBERS // inner)  # not more where experts are wide: a model has many layers to try
    y = torch.randn(rows, 2 * inner if form.gated else inner, generator=generator, dtype=torch.float64) * 8
    try:
        if form.gated and hasattr(module, "_apply_gate"):
            wanted = module._apply_gate(y)
        else:
            gate, *value = y.chunk(2, -1) if form.gated else (y,)
            wanted = math.prod(value, start=activation(module)(gate))
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


def _longcat(module: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    """Experts behind the last one that has weights give what they are given; our operator leaves them out."""
    count = module.experts.num_routed_experts

    def forward(hidden_states: torch.Tensor) -> torch.Tensor:
        *_, weights, index = module.router(hidden_states)  # transformers 5.18 gives no logits before them
        passed = (weights * (index >= count)).sum(-1).view(*hidden_states.shape[:-1], 1)
        found: torch.Tensor = module.experts(hidden_states, index, weights)
        return found + (passed * hidden_states).to(found.dtype)

    return forward


def _aria(module: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    """Without a view of tokens in one dimension as sequences, whose strides export would fix."""
    def forward(hidden_states: torch.Tensor) -> torch.Tensor:
        _, weights, index = module.router(hidden_states.flatten(0, 1))
        found: torch.Tensor = module.experts(hidden_states, index, weights)
        return found + module.shared_experts(hidden_states)

    return forward


def pick_gates(router: Any, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """JetMoE's experts of each row, [rows, K], and their weights."""
    best, index = router.layer(rows).float().topk(router.top_k, dim=1)
    return index, best.softmax(1).type_as(rows)


def jetmoe_experts(module: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    """In the place of JetMoE's mixture."""
    def forward(layer_input: torch.Tensor) -> torch.Tensor:
        index, gates = pick_gates(module.router, layer_input.flatten(0, 1))
        found: torch.Tensor = module.run_experts(layer_input, index, gates)
        return found + module.bias

    return forward


register_family(Family("Llama4ForCausalLM", {"Llama4TextMoe": ("forward", _llama4)}))
register_family(Family("AriaTextForCausalLM", {"AriaTextMoELayer": ("forward", _aria)}))
register_family(Family("LongcatFlashForCausalLM", {"LongcatFlashMoE": ("forward", _longcat)}))
