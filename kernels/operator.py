"""One record per operator: what capture, passes, planner, prediction and runtime ask about it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, NamedTuple, Protocol

import torch

from forebay.kernels.formats.table import packed_caches
from forebay.kernels.onnx_meaning import Meaning


class Use(Protocol):
    """One use of an operator, as a `Launch` has it: arguments by position and by name, what is filled, and by which
    implementation ("" for an operator that has but one; others are not bound without). To count bytes and operations,
    tensors are anything with a `shape` and a `dtype` (torch's, or its name, "float32"); to bind, they are torch's."""

    @property
    def args(self) -> tuple[Any, ...]: ...
    @property
    def kwargs(self) -> Mapping[str, Any]: ...
    @property
    def out(self) -> tuple[Any, ...]: ...
    @property
    def impl(self) -> str: ...


class Tensors(NamedTuple):
    """A use on torch's tensors."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    out: tuple[Any, ...]
    impl: str = ""


class Cost(NamedTuple):
    """Floating-point operations, and bytes that the operator must read and write at least. Attention may make keys and
    values by matmuls; `matmul_flops` are the operations of these, which are in `flops` too."""

    flops: int
    read_nbytes: int
    written_nbytes: int
    matmul_flops: int = 0


class Product(NamedTuple):
    """The shape by which a product's implementations are measured and chosen: x [m, k] times a weight [n, k] of a dtype
    ("float32") or a format of packed rows ("w4g64")."""

    weight: str
    m: int
    n: int
    k: int


HOST_KERNELS = "cpu"  # the key of the bindings that run on host cores
HOST_MEMORY = torch.device(HOST_KERNELS)  # where tensors of the caller lie
ROUNDED = ("bf16", "int8")  # what activations, and the weights that meet them, may be rounded to


@dataclass(frozen=True)
class Implementations:
    """How a product can be computed. `candidates(weight)` are the implementations on the CPU here from which the
    measurements of a machine choose; `default[device](shape, device name, dtype of x)` names one where nothing was
    measured. `rounding(shape, activations)` are further ones, which round to what is wished, one of `ROUNDED`.
    `joins(name)` tells whether one takes several weights in a launch (`join_launches`)."""

    shape: Callable[[Use], Product]
    candidates: Callable[[str], tuple[str, ...]]
    default: Mapping[str, Callable[[Product, str, str], str]]
    rounding: Callable[[Product, str], tuple[str, ...]] = lambda shape, activations: ()
    joins: Callable[[str], bool] = lambda impl: False


Call = Callable[[], object]

# How kernels want a tensor to lie: "dense", row-major without gaps; "columns", the last dimension without gaps; "rows",
# the same, and all other dimensions of one stride, so that it is read as a matrix without a copy.
OperandLayout = Literal["dense", "columns", "rows"]


@dataclass(frozen=True)
class Operator:
    """An operator of ours.

    `bind` makes a use on torch's tensors a call without arguments, by device ("cpu", "cuda"; this imports Triton);
    without an entry the operator does not run there as a launch. `workspace` gives transient bytes beside operands and
    results, by device, `refusal` why its kernels there do not take a use ("": they do), and
    `allocator_transient_nbytes` how many of those torch's own operators take and give back on a GPU. `overwrites` names
    arguments whose every element is read just before the element of the result that may take its place. `caches`
    names the arguments that are K and V. `score_ranges`: its
    arguments phi, low and high, in a row, say that partial softmaxes share the maximum phi where the largest score x
    has phi + low < x < phi + high; by dtype of its first argument the least low and the most high. `takes` tells
    whether its kernels take such tensors, of those that a pass asks about. `layouts` names, by argument, how a tensor
    must lie for its launches; lowering asks (`accepts`) and otherwise calls the operator through torch, which takes any
    strides. An argument without an entry may have any strides. `timed_as` says which of a machine's
    measurements tell its time. `takes_rotary` tells of an append whether its launches may turn keys on their way: q and
    tables are then named q, cos and sin, and its result is q turned (`join_launches`). `onnx` is what it is in ONNX, as
    a function of its arguments that puts operators into a graph (`onnx_meaning`); without it the operator has no place
    there.
    """

    overload: torch._ops.OpOverload
    reference: Callable[..., Any]
    cost: Callable[[Use], Cost]
    bind: Mapping[str, Callable[[Use], Call]] = field(default_factory=dict)
    workspace: Mapping[str, Callable[[Use], int]] = field(default_factory=dict)
    refusal: Mapping[str, Callable[[Use], str]] = field(default_factory=dict)
    allocator_transient_nbytes: Callable[[Use], int] = lambda _: 0
    takes: Callable[..., bool] = lambda *_: True
    takes_rotary: Callable[[Use], bool] = lambda _: False
    layouts: Mapping[str, OperandLayout] = field(default_factory=dict)
    overwrites: tuple[str, ...] = ()
    caches: tuple[str, ...] = ()
    score_ranges: Mapping[torch.dtype, tuple[float, float]] = field(default_factory=dict)
    implementations: Implementations | None = None
    timed_as: Literal["product", "attention", "memory"] = "memory"
    onnx: Meaning | None = None

    @cached_property
    def name(self) -> str:
        """The operator's name in a Launch: "forebay.linear"."""
        return str(self.overload).removesuffix(".default")

    @cached_property
    def arguments(self) -> tuple[str, ...]:
        """Names of the arguments, in the order of the schema."""
        return tuple(a.name for a in self.overload._schema.arguments)

    @cached_property
    def writes(self) -> tuple[str, ...]:
        """Names of the arguments that it writes."""
        written = (a for a in self.overload._schema.arguments if a.alias_info is not None and a.alias_info.is_write)
        return tuple(a.name for a in written)

    @property
    def appends(self) -> bool:
        """Whether it writes K and V of new tokens into a cache."""
        return bool(self.caches and self.writes)

    def argument(self, args: tuple[Any, ...], name: str) -> Any:
        """Return the value of `name` among positional arguments; the schema's default where they end before it."""
        place = self.arguments.index(name)
        return args[place] if place < len(args) else self.overload._schema.arguments[place].default_value

    def accepts(self, args: tuple[Any, ...]) -> bool:
        """Tell whether the tensors among positional arguments have the layouts that `layouts` asks for."""
        return all(_lies(value, layout) for name, layout in self.layouts.items()
                   if isinstance(value := self.argument(args, name), torch.Tensor))

    def given_caches(self, args: tuple[Any, ...]) -> list[Any]:
        """Return K and V among positional arguments; nothing for an operator that touches no cache."""
        return [self.argument(args, name) for name in self.caches]

    def cache_format(self, args: tuple[Any, ...]) -> str:
        """The format of the rows of a cache that it touches ("kv4"); "" where they are values as they are."""
        if not self.caches:
            return ""
        given = dict(zip(self.arguments, args, strict=False))
        head_dim = next((value.shape[-1] for name, value in given.items()
                         if name not in self.caches and len(getattr(value, "shape", ())) == 4), 0)
        return next((name for name, packed in packed_caches().items() if self.name in packed.operators
                     and packed.arguments(head_dim).items() <= given.items()), "")

    def workspace_nbytes(self, use: Use, device: str) -> int:
        """Transient bytes that a use takes on a device; 0 for an operator that takes none."""
        count = self.workspace.get(device)
        return 0 if count is None else count(use)


def _lies(tensor: torch.Tensor, layout: OperandLayout) -> bool:
    if layout == "dense":
        return tensor.is_contiguous()
    if tensor.dim() < 1 or (tensor.shape[-1] > 1 and tensor.stride(-1) != 1):
        return False
    if layout == "columns":
        return True
    outer = [(n, s) for n, s in zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True) if n != 1]
    return all(stride == n * s for (_, stride), (n, s) in itertools.pairwise(outer))


def laid(tensor: torch.Tensor, layout: OperandLayout) -> torch.Tensor:
    """A tensor, or a copy of it where it does not lie so."""
    return tensor if _lies(tensor, layout) else tensor.contiguous()


def in_columns(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor, or a copy of it where its last dimension has gaps."""
    return laid(tensor, "columns")


def dtype_of(tensor: Any) -> torch.dtype:
    """The dtype of a tensor, or of what only describes one."""
    return tensor.dtype if isinstance(tensor.dtype, torch.dtype) else getattr(torch, tensor.dtype)


def nbytes_of(*values: Any) -> int:
    """Bytes of all tensors among values and in tuples of them. Values without a shape count nothing."""
    return sum(math.prod(v.shape) * dtype_of(v).itemsize if hasattr(v, "shape") else
               nbytes_of(*v) if isinstance(v, tuple) else 0 for v in values)


def each_once(use: Use) -> Cost:
    """No operations, each operand read once and each result written once: what pointwise work and norms cost."""
    return Cost(0, nbytes_of(*use.args, *use.kwargs.values()), nbytes_of(*use.out))
