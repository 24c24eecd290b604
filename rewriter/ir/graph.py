"""The results of capture: fx graphs with named inputs, and the few typed objects on their nodes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch
from torch import fx
from torch.fx.node import map_aggregate

from forebay.kernels.formats.packing import Packing
from forebay.rewriter.ir.expert_table import ExpertTable
from forebay.rewriter.ir.plan import BufferPlacement
from forebay.rewriter.ir.state import StateSpec, rewindable

STREAMED = "_streamed"  # ends the name of a node that takes over from one that read a weight in device memory
PRODUCT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # of the matrices our products take
Gives = Literal["last", "all", "scores"]  # of a step: logits of the token `last`, of every token, or scores of targets
META = "forebay"  # the one key of ours in node.meta, and in the meta of a whole graph


@dataclass(frozen=True)
class WeightInput:
    """On a placeholder: this input is the weight `name` (in a block graph: the name relative to its layer), stored in
    `format`. `among`: all that routers pick from, of a table that has only some of these: other ranks have the rest, or
    the rest has no weights."""

    name: str
    format: str = "native"
    among: int = 0


@dataclass(frozen=True)
class Transfer:
    """On a `fetch` node: it is copy number `index` of the step, of rows [lower, upper) of `weight`, into `slot`."""

    index: int
    weight: str
    lower: int
    upper: int
    slot: int


@dataclass(frozen=True)
class Gemm:
    """On a matrix product: the implementation that the plan chose."""

    impl: str


@dataclass
class Layout:
    """On a whole graph: where its activations lie. Nodes go by the names they have in the flat graph.

    `home` maps a storage (node name, element of its result) to a buffer name; `ends` lists the buffers whose contents
    die with a node. `height` and `lower_bound` are bytes: what the allocation takes, and the peak of live bytes. Where
    the flat graph left layers out, `representatives` tells for every layer whose names (and so, addresses) it shares.
    """

    buffers: dict[str, BufferPlacement]
    home: dict[tuple[str, int], str]
    ends: dict[str, list[str]]
    height: int
    lower_bound: int
    method: str
    representatives: dict[int, int] = field(default_factory=dict)

    def within(self, other: Layout) -> bool:
        """Return whether these are the buffers of `other`, of the same lifetimes and none larger, so that they can lie
        where those lie."""
        return (self.home, self.ends, self.representatives) == (other.home, other.ends, other.representatives) and all(
            b.nbytes <= other.buffers[name].nbytes for name, b in self.buffers.items())


@dataclass(frozen=True)
class RowFormat:
    """How a quantized weight is stored: packed rows uint8 [out_features, row_nbytes], groups along in_features.

    `dtype` is the model's. `transposed`: the model holds the weight as [in_features, out_features]. Rows of a table of
    experts are entries: `down` is how matrices of that name are stored, all else but sizes is of those of `up`.
    """

    name: str  # as the Plan has it: w4g64
    bits: int
    group_size: int
    scale_dtype: torch.dtype
    in_features: int
    out_features: int
    row_nbytes: int
    dtype: torch.dtype
    transposed: bool = False
    symmetric: bool = False  # rows without lows
    codebook: str = ""
    down: RowFormat | None = None

    def packing(self, in_features: int | None = None) -> Packing:
        """The format of the rows, or of rows over so many input features."""
        return Packing(self.bits, self.in_features if in_features is None else in_features, self.group_size,
                       self.scale_dtype, self.symmetric, self.codebook)


@dataclass(frozen=True)
class WeightSpec:
    """A weight's shape and dtype as the graph reads it; `ties` are other names of the same storage; `stored` if its
    bytes are packed rows; `table` if it holds experts."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    ties: tuple[str, ...] = ()
    stored: RowFormat | None = None
    table: ExpertTable | None = None

    @property
    def nbytes(self) -> int:
        if self.stored is not None:
            return self.stored.out_features * self.stored.row_nbytes
        n = self.dtype.itemsize
        for size in self.shape:
            n *= size
        return n


class Choices(Protocol):
    """The graphs of a model as the block of a plan may ask for them."""

    def checkpointed(self, kept: str) -> CapturedModel:
        """With checkpoints in the format `kept` beside K and V."""

    def choosing(self, share: float, block_tokens: int) -> CapturedModel:
        """For steps that read such a share of the cache's blocks, of so many tokens; with 1 for those over prompts."""

    def expanded(self) -> CapturedModel | None:
        """For steps that make keys and values of latents; None where no attention reads latents as it must."""

    def seeing_all(self) -> CapturedModel:
        """For contexts with no more tokens than an indexer chooses."""


@dataclass
class CapturedModel:
    """A language model as graphs.

    `step` has the placeholders input_ids [B, S], start [B] (tokens already cached), last [B] (index within this chunk
    of the token whose logits are wanted), where rotary frequencies follow it length [B] (tokens of the whole call, in
    every chunk of a prompt), where it `embeds` inputs_embeds [B, S, H] (read where an id is -1) and what else it reads
    of images (positions, deepstack and until of `StepInputs`), where a state is not rewindable count [B] (tokens of
    this chunk that are real), where requests name adapters, adapters [B, width] (1 in columns of a sequence's), then
    the tensors of each layer's states (`state_name`), then weights; it returns what `gives` says: logits [B, V] of the
    token `last`, or something for all tokens (`capture_model`). Its `call_module` nodes call block graphs (its
    submodules), whose placeholders are matched by position. Equal layers share one block graph.
    """

    step: fx.GraphModule
    weights: dict[str, WeightSpec]
    constants: dict[str, torch.Tensor]  # non-persistent buffers and lifted constants, always in memory
    layers: tuple[str, ...]  # block graph name of every layer, in order
    layer_weights: tuple[dict[str, str], ...]  # per layer: name within the block -> name in `weights`
    states: tuple[tuple[StateSpec, ...], ...]  # of each layer
    vocab_size: int
    max_positions: int  # 0: no limit known
    dtype: torch.dtype
    model_type: str
    gives: Gives = "last"
    token_types: bool = False  # the model has a meaning for token_type_ids, which a step does not read
    rewritten: bool = False  # the passes on captured graphs have run
    embeds: int = 0  # width of the embeddings that a step takes too; 0: it takes ids alone
    position_rows: int = 0  # dimensions of the rotary positions that it takes with embeddings; 0: it counts tokens
    image_groups: bool = False  # whether tokens of an image see each other, as `until` of `StepInputs` says
    deepstack: int = 0  # features of an image's token, each as wide as embeddings, added after as many first layers
    adapters: Mapping[str, tuple[int, int]] = field(default_factory=dict)  # columns of `adapters` by name
    rope_switch_length: int = 0  # a cache begun within so many tokens is computed anew beyond them; 0: never
    choices: Choices | None = None  # of graphs that are rewritten
    prefill: CapturedModel | None = None  # whose steps over several tokens take the place of this one's
    activations: str = "native"  # that packed weights meet: as they are, or rounded to bf16 or int8
    kept_as: str = ""  # the name of its graphs in the cache folder; "": they are not kept
    moves_back: bool = True  # whether states of other stages are rewindable too, so that all may take tokens again

    @property
    def rewindable(self) -> bool:
        """Whether steps may take tokens again: all states of layers are rewindable, those of other stages too."""
        return self.moves_back and rewindable(self.states)

    @property
    def rounded_to(self) -> str:
        """Return the dtype to which matmuls of packed weights may round activations: a model of bf16 does so with all
        that it computes."""
        return "bf16" if self.activations == "native" and self.dtype == torch.bfloat16 else self.activations

    @property
    def weight_nbytes(self) -> int:
        return sum(spec.nbytes for spec in self.weights.values())

    @property
    def cache_parts(self) -> int:
        """Among how many ranks the sequences of a step are divided."""
        return max((spec.parts for layer in self.states for spec in layer), default=1)

    def blocks(self) -> dict[str, fx.GraphModule]:
        """The distinct block graphs by name."""
        return {name: self.step.get_submodule(name) for name in dict.fromkeys(self.layers)}  # type: ignore[misc]


def weight_name(node: fx.Node) -> str | None:
    """The weight a placeholder stands for, or None."""
    mark = node.meta.get(META)
    return mark.name if isinstance(mark, WeightInput) else None


def is_collective(node: fx.Node) -> bool:
    """Return whether a node exchanges its operand with other ranks: by one of torch's functional collectives."""
    return isinstance(node.target, torch._ops.OpOverload) and node.target.namespace == "_c10d_functional"


def is_pipeline_send(node: fx.Node) -> bool:
    """Return whether a node is an exchange between stages, of which one gives what the others have from then on."""
    return node.target is torch.ops._c10d_functional.broadcast_.default


def storage_of(node: fx.Node) -> tuple[fx.Node, int]:
    """The node (and element of its result) whose memory `node` shows: itself, or what it is a view of."""
    base = node.meta.get("alias_of")
    if base is None or isinstance(base.meta.get("val"), torch.Tensor):
        return base or node, 0
    made = values_of(base)
    if len(made) > 1:
        shown = values_of(node)[0].untyped_storage()._cdata
        return base, next(i for i, value in enumerate(made) if value.untyped_storage()._cdata == shown)
    return base, 0


def values_of(node: fx.Node) -> tuple[torch.Tensor, ...]:
    """The tensors a node gives, one for most, several for operators with several results, none for the rest."""
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor):
        return (value,)
    if isinstance(value, tuple | list) and any(isinstance(v, torch.Tensor) for v in value):
        return tuple(value)
    return ()


def copy_node(graph: fx.Graph, node: fx.Node, env: Mapping[fx.Node, Any], name: str = "") -> fx.Node:
    """`node` at the end of `graph`, named as it is unless told, reading what `env` gives for each node that it reads.

    A third of the time of `graph.node_copy`, which searches the arguments and moves the node in the graph's index.
    """
    new = graph.create_node(node.op, node.target, name=name or node.name, type_expr=node.type)
    if node.args:
        new.args = map_aggregate(node.args, lambda arg: env[arg] if isinstance(arg, fx.Node) else arg)  # type: ignore[assignment]
    if node.kwargs:
        new.kwargs = map_aggregate(node.kwargs, lambda arg: env[arg] if isinstance(arg, fx.Node) else arg)  # type: ignore[assignment]
    new.meta.update(node.meta)
    return new


def block_graphs(gm: fx.GraphModule) -> dict[str, fx.GraphModule]:
    """A step graph's distinct blocks by name, in order of their first call."""
    names = dict.fromkeys(str(call.target) for call in gm.graph.find_nodes(op="call_module"))
    return {name: gm.get_submodule(name) for name in names}  # type: ignore[misc]
