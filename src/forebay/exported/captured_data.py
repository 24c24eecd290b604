"""A captured model, its graphs rewritten, as plain data, JSON both ways; `graph_data` has the graphs themselves."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from forebay.exported.errors import ExportError
from forebay.exported.graph_data import dtype_name, dtype_named, graph_from_data, graph_to_data
from forebay.kernels.formats.entry_part import Part
from forebay.rewriter.capture.concretise import concretise
from forebay.rewriter.capture.step_graphs import step_inputs
from forebay.rewriter.capture.stored_sizes import STORED
from forebay.rewriter.ir.expert_table import ExpertTable
from forebay.rewriter.ir.from_json import from_json
from forebay.rewriter.ir.graph import (
    META,
    CapturedModel,
    Gives,
    RowFormat,
    WeightInput,
    WeightSpec,
)
from forebay.rewriter.ir.plan import Workload
from forebay.rewriter.ir.state import (
    STATE_KINDS,
    KVState,
    LentKVState,
    StateInput,
    StateSpec,
    format_of_rows,
    state_name,
)

MOST_ELEMENTS = 1 << 40  # of a weight, of a cache per token: beyond any model, and bytes of tensors still fit 64 bits
SMALL = Workload(batch=2, prompt=3, new_tokens=9)  # sizes at which a graph that was read is looked at


@dataclass(frozen=True)
class StoredRows:
    """`RowFormat`, dtypes by name."""

    name: str
    bits: int
    group_size: int
    scale_dtype: str
    in_features: int
    out_features: int
    row_nbytes: int
    dtype: str
    transposed: bool
    symmetric: bool = False
    codebook: str = ""
    down: StoredRows | None = None


@dataclass(frozen=True)
class StoredPart:
    """`Part` of a table's entry, its dtype by name."""

    name: str
    offset: int
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class StoredTable:
    """`ExpertTable`."""

    count: int
    parts: tuple[StoredPart, ...]
    sources: tuple[str, ...]
    among: int = 0


@dataclass(frozen=True)
class StoredWeight:
    """`WeightSpec`."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    ties: tuple[str, ...]
    stored: StoredRows | None
    table: StoredTable | None = None


@dataclass(frozen=True)
class StoredModel:
    """`CapturedModel`; a constant goes by the name of its tensor in the bundle's file of constants."""

    gives: Gives
    vocab_size: int
    max_positions: int
    rope_switch_length: int
    dtype: str
    model_type: str
    token_types: bool
    weights: tuple[StoredWeight, ...]
    constants: dict[str, str]
    layers: tuple[str, ...]
    layer_weights: tuple[dict[str, str], ...]
    states: tuple[tuple[dict[str, object], ...], ...]  # `StateSpec`s: the kind, and the fields
    step: object
    blocks: dict[str, object]
    adapters: dict[str, tuple[int, int]] = field(default_factory=dict)


def captured_to_data(captured: CapturedModel, constants: Mapping[str, str]) -> dict[str, Any]:
    """`captured` (rewritten, its cache native) as JSON values; `constants` names the tensor that each one is.
    ExportError names what the schema cannot hold, with its layer."""
    if not captured.rewritten or format_of_rows(captured.states) != "native":
        raise ExportError("a bundle holds rewritten graphs over a native cache")
    blocks: dict[str, object] = {
        name: graph_to_data(gm, f"layer {captured.layers.index(name)}") for name, gm in captured.blocks().items()}
    return asdict(StoredModel(
        captured.gives, captured.vocab_size, captured.max_positions, captured.rope_switch_length,
        dtype_name(captured.dtype),
        captured.model_type, captured.token_types, tuple(_weight(spec) for spec in captured.weights.values()),
        dict(constants), captured.layers, captured.layer_weights,
        tuple(tuple(_state(spec) for spec in states) for states in captured.states),
        graph_to_data(captured.step, "the model outside its layers"), blocks, dict(captured.adapters)))


def _weight(spec: WeightSpec) -> StoredWeight:
    table = None if spec.table is None else StoredTable(spec.table.count, tuple(
        StoredPart(part.name, part.offset, tuple(part.shape), dtype_name(part.dtype)) for part in spec.table.parts),
        spec.table.sources, spec.table.among)
    return StoredWeight(spec.name, tuple(spec.shape), dtype_name(spec.dtype), spec.ties, _rows(spec.stored), table)


def _rows(stored: RowFormat | None) -> StoredRows | None:
    if stored is None:
        return None
    values: dict[str, Any] = {
        name: dtype_name(v) if isinstance(v, torch.dtype) else v for name, v in vars(stored).items()}
    return StoredRows(**values | {"down": _rows(stored.down)})


def captured_from_data(data: object, tensors: Mapping[str, torch.Tensor]) -> CapturedModel:
    """The model that `captured_to_data` wrote, with its constants among `tensors`, once its graphs are found to hold
    together at small sizes, which runs them without data. ValueError names what is wrong."""
    try:
        read = from_json(StoredModel, data, "graphs")
        blocks = {name: graph_from_data(nodes, f"graphs.blocks.{name}") for name, nodes in read.blocks.items()}
        captured = CapturedModel(
            step=graph_from_data(read.step, "graphs.step", blocks),
            weights={w.name: _spec(w) for w in read.weights},
            constants={name: tensors[key] for name, key in read.constants.items()},
            layers=read.layers, layer_weights=read.layer_weights,
            states=tuple(tuple(_state_from_data(s, f"graphs.states: layer {i}") for s in states)
                         for i, states in enumerate(read.states)),
            vocab_size=read.vocab_size, max_positions=read.max_positions, rope_switch_length=read.rope_switch_length,
            dtype=dtype_named(read.dtype), model_type=read.model_type, gives=read.gives, token_types=read.token_types,
            rewritten=True, adapters=read.adapters)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"graphs: {type(error).__name__}: {error}") from error
    _check_names(captured)
    _check_small(captured)
    return captured


def _spec(weight: StoredWeight) -> WeightSpec:
    _check_sizes(f"graphs.weights: {weight.name}", weight.shape)
    table = None if weight.table is None else ExpertTable(weight.table.count, tuple(
        Part(part.name, part.offset, part.shape, dtype_named(part.dtype)) for part in weight.table.parts),
        weight.table.sources, weight.table.among)
    return WeightSpec(weight.name, weight.shape, dtype_named(weight.dtype), weight.ties,
                      _row_format(weight.name, weight.stored), table)


def _row_format(name: str, rows: StoredRows | None) -> RowFormat | None:
    if rows is None:
        return None
    _check_sizes(f"graphs.weights: {name}, stored,", (rows.out_features, rows.row_nbytes))
    return RowFormat(rows.name, rows.bits, rows.group_size, dtype_named(rows.scale_dtype), rows.in_features,
                     rows.out_features, rows.row_nbytes, dtype_named(rows.dtype), rows.transposed, rows.symmetric,
                     rows.codebook, _row_format(name, rows.down))


def _state(spec: StateSpec) -> dict[str, object]:
    return {"kind": spec.kind, **{name: dtype_name(v) if isinstance(v, torch.dtype) else v
                                  for name, v in vars(spec).items()}}


def _state_from_data(data: Mapping[str, object], path: str) -> StateSpec:
    kind = STATE_KINDS.get(str(data.get("kind")))
    if kind is None:
        raise ValueError(f"{path}.kind: expected one of {', '.join(STATE_KINDS)}")
    values = {name: dtype_named(str(v)) if name == "dtype" else v for name, v in data.items() if name != "kind"}
    spec: StateSpec = from_json(kind, values, path)
    for tensor in spec.tensors:
        _check_sizes(path, tuple(n for n in tensor.shape if isinstance(n, int)))
    return spec


def _check_sizes(what: str, shape: tuple[int, ...]) -> None:
    """ValueError for a negative size, and for more elements than any model's tensor has."""
    if any(n < 0 for n in shape) or math.prod(max(n, 1) for n in shape) > MOST_ELEMENTS:
        raise ValueError(f"{what} has shape {shape}")


def _check_names(captured: CapturedModel) -> None:
    """Layers, caches and weights are those that the step graph names."""
    step, known = captured.step.graph, captured.weights.keys() | captured.constants.keys()
    calls = step.find_nodes(op="call_module")
    if tuple(str(call.target) for call in calls) != captured.layers or \
            [call.meta["layer"] for call in calls] != list(range(len(captured.layers))):
        raise ValueError("graphs.layers: not the layers that graphs.step calls, in order")
    if not len(captured.layers) == len(captured.layer_weights) == len(captured.states):
        raise ValueError("graphs.layer_weights, graphs.states: not one for each layer")
    marks = [(node.name, node.meta.get(META)) for node in step.find_nodes(op="placeholder")]
    kept = sorted((m.layer, m.kind, m.tensor, name) for name, m in marks if isinstance(m, StateInput))
    if kept != sorted((i, KVState.kind if isinstance(spec, LentKVState) else spec.kind, tensor.name,
                       state_name(tensor.name, i)) for i, states in enumerate(captured.states)
                      for spec in states for tensor in spec.tensors):
        raise ValueError("graphs.step: its inputs for states are not those of graphs.states")
    named = {m.name for _, m in marks if isinstance(m, WeightInput)}
    odd = sorted((named - known) | (set(captured.weights) - named) | {
        name for weights in captured.layer_weights for name in weights.values() if name not in captured.weights})
    if odd:
        raise ValueError(f"graphs.weights: {odd[0]!r} is not a weight that graphs.step reads and graphs.weights has")
    free = {name for name, m in marks if m is None}
    if not free <= {"input_ids", "start", "last", "length", "count", *(["adapters"] if captured.adapters else [])}:
        raise ValueError(f"graphs.step: unknown input {sorted(free)[0]!r}")


def _check_small(captured: CapturedModel) -> None:
    """The step runs on layouts of small sizes and gives what it should; its inputs are stored with the sizes they have.
    """
    tokens, given = SMALL.prompt, step_inputs(captured, SMALL, SMALL.prompt)
    sizes = {"B": SMALL.batch, "S": tokens, "L": SMALL.context}
    names = {node.name for node in captured.step.graph.find_nodes(op="placeholder")}
    for node in captured.step.graph.find_nodes(op="placeholder"):
        dtype, shape = node.meta[STORED]
        value = given[node.name]
        if (dtype, tuple(sizes.get(n, n) for n in shape)) != (value.dtype, tuple(value.shape)):
            raise ValueError(f"graphs.step: the input {node.name} is stored as {list(shape)}, not as it is elsewhere")
    for name, spec in captured.weights.items():
        if spec.stored is not None and spec.nbytes < 0:
            raise ValueError(f"graphs.weights: {name} has a negative size")
    try:
        small = concretise(captured.step, {name: value for name, value in given.items() if name in names})
        (found,) = small.graph.output_node().all_input_nodes
        value = found.meta["val"]
        wanted = {"last": (SMALL.batch, captured.vocab_size), "all": (SMALL.batch, tokens, captured.vocab_size),
                  "scores": (SMALL.batch, tokens, 2)}[captured.gives]
        if tuple(value.shape) != wanted or not value.dtype.is_floating_point:
            raise ValueError(f"it gives {list(value.shape)} {value.dtype}, not {list(wanted)}")
    except Exception as error:  # an operation's own, on operands that are not its kind
        said = " ".join(str(error).split())[:300]
        raise ValueError(f"graphs.step does not run: {type(error).__name__}: {said}") from error
