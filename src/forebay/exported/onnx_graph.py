"""An ONNX graph under construction, and the file of tensors beside it: what meanings of operators are written with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, chain, takewhile
from typing import Any, NamedTuple

import onnx
import torch
from onnx import TensorProto, helper

from forebay.exported.onnx_views import VIEWS, viewed
from forebay.kernels.onnx_meaning import MICROSOFT, TO_THE_END, Dialect, OnnxForm, OnnxValue
from forebay.rewriter.ir.alignment import whole_pages

OPSETS: dict[OnnxForm, int] = {"microsoft": 22, "standard": 23, "static": 24}
IR_VERSIONS: dict[OnnxForm, int] = {"microsoft": 10, "standard": 11, "static": 12}
TYPES: dict[torch.dtype, int] = {
    torch.float32: TensorProto.FLOAT, torch.float16: TensorProto.FLOAT16, torch.bfloat16: TensorProto.BFLOAT16,
    torch.float64: TensorProto.DOUBLE, torch.int64: TensorProto.INT64, torch.int32: TensorProto.INT32,
    torch.uint8: TensorProto.UINT8, torch.bool: TensorProto.BOOL}
WeightPieces = Callable[[], Any]  # gives a tensor's contents in order, in pieces


class ExternalTensor(NamedTuple):
    """A tensor in the file beside: where, and what gives its contents; `columns` [N, K] of the matrix that is stored
    as [K, N], None where it is stored as it is."""

    offset: int
    read: WeightPieces
    columns: tuple[int, int] | None


class Graph:
    """Nodes and tensors as they are added; `OnnxGraph` says what each method does. Names of nodes begin with `prefix`.
    """

    def __init__(self, form: OnnxForm, int8_activations: bool = False) -> None:
        self.form: OnnxForm = form
        self.dialect: Dialect = "microsoft" if form == "microsoft" else "standard"
        self.in_place = form == "static"
        self.int8_activations = int8_activations
        self.prefix = ""
        self.nodes: list[onnx.NodeProto] = []
        self.initializers: list[onnx.TensorProto] = []
        self.data: list[ExternalTensor] = []
        self.data_nbytes = 0
        self.file = ""
        self._known: dict[object, str] = {}
        self._caches: dict[str, tuple[str, str]] = {}  # past -> new
        self._stored: dict[str, tuple[OnnxValue, Callable[[bool], None]]] = {}
        self._reads: dict[str, WeightPieces] = {}
        self._names = 0
        self._makers: dict[str, onnx.NodeProto] = {}
        self._numbers: dict[str, Any] = {}  # constants' values
        self._ranks: dict[str, int] = {}
        self._sums: dict[str, tuple[str, str]] = {}
        self._turns: dict[str, tuple[OnnxValue, OnnxValue, OnnxValue]] = {}
        self._tables: dict[str, OnnxValue | None] = {}
        self.table_of: Callable[[str], torch.Tensor | None] = lambda value: None  # a row for each position, or None

    # -- operators

    def op(
        self, kind: str, *inputs: str, outputs: int = 1, domain: str = "", named: Sequence[str] = (), **attributes: Any
    ) -> Any:
        for given in inputs:
            if isinstance(given, OnnxValue) and given.shape:
                self._ranks[str(given)] = len(given.shape)
        seen = viewed(self, kind, inputs, attributes) if kind in VIEWS else None
        if seen is not None:
            return seen
        self._names += 1
        name = f"{self.prefix}{kind}_{self._names}"
        for given in inputs:
            self.used(given)
        names = [name] if outputs == 1 else [f"{name}_{i}" for i in range(outputs)]
        given_names = [str(i) for i in (*names, *named)]
        node = helper.make_node(kind, [str(i) for i in inputs], given_names, name, domain=domain, **attributes)
        summed = next((n for n in given_names if n in self._sums), None)
        if summed is None:
            self.nodes.append(node)
        else:  # it stands where the sum stood, before all that reads it
            del self._sums[summed]
            self.nodes[-1 - len(self._behind(summed))] = node
        self._makers.update(dict.fromkeys(filter(None, given_names), node))
        return names[0] if outputs == 1 else tuple(names)

    def sum(self, a: str, b: str) -> str:
        made = self.op("Add", a, b)
        self._sums[made] = a, b
        return str(made)

    def summands(self, value: str, *others: str) -> tuple[str, str] | None:
        terms = self._sums.get(str(value))
        if terms is None or any(other in node.output for node in self._behind(value) for other in others):
            return None
        return terms

    def _behind(self, value: str) -> list[onnx.NodeProto]:
        """The nodes behind the one that gives `value`, the last first."""
        return self._behind_node(self._makers[str(value)])

    def _behind_node(self, maker: onnx.NodeProto) -> list[onnx.NodeProto]:
        return list(takewhile(lambda node: node is not maker, reversed(self.nodes)))

    def used(self, value: str) -> str:
        """`value`, in the file if it is a tensor of it."""
        if value in self._stored:
            self.place(self._stored[value][0])
        return value

    def constant(self, value: Any, dtype: torch.dtype = torch.int64) -> str:
        key = ("constant", str(value), dtype)
        if key not in self._known:
            name = self._known[key] = f"constant_{len(self._known)}"
            self._numbers[name] = value
            values = torch.tensor(value, dtype=dtype)
            self.initializers.append(_inline(name, values))
        return self._known[key]

    def source(self, value: str, kind: str) -> tuple[list[str], dict[str, Any]] | None:
        node = self._makers.get(str(value))
        if node is None or node.op_type != kind:
            return None
        return list(node.input), {a.name: helper.get_attribute_value(a) for a in node.attribute}

    def numbers(self, value: str) -> list[int] | None:
        found = self._numbers.get(str(value))
        return found if isinstance(found, list) else None

    def turn(self, value: str, x: OnnxValue, cos: OnnxValue, sin: OnnxValue) -> None:
        self._turns[str(value)] = x, cos, sin

    def turned(self, value: str) -> tuple[OnnxValue, OnnxValue, OnnxValue] | None:
        x, *angles = self._turns.get(str(value), (None,))
        cos, sin = (self._half_table(angle) for angle in angles) if angles else (None, None)
        return None if x is None or cos is None or sin is None else (x, cos, sin)

    def _half_table(self, angle: OnnxValue) -> OnnxValue | None:
        """The first halves [positions, D / 2] of cosines or sines [B, S, D], as a tensor of the file."""
        if str(angle) not in self._tables:
            rows = self.table_of(angle)
            half = None if rows is None else rows[:, : rows.shape[1] // 2].contiguous()
            self._tables[str(angle)] = None if half is None else self.weight(
                f"{angle}.by_position", half.dtype, half.shape, lambda: iter([half]))
        return self._tables[str(angle)]

    def cut_from(self, parts: Sequence[str], widths: Sequence[int]) -> str | None:
        makers = [node for part in parts if (node := self._makers.get(str(part))) is not None]
        whole, kinds = {node.input[0] for node in makers}, {node.op_type for node in makers}
        if len(makers) < len(parts) or len(whole) != 1:
            return None
        if kinds == {"Slice"}:
            ends = list(accumulate(widths))
            bounds = [[self.numbers(name) for name in node.input[1:]] for node in makers]
            found = any(bounds == [[[start], [end], [axis], [1]] for start, end in zip(
                [0, *ends], [*ends[:-1], TO_THE_END], strict=False)] for axis in (-1, 2))
        else:
            axis = [a.i for a in makers[0].attribute if a.name == "axis"]
            found = kinds == {"Split"} and axis in ([-1], [2]) and self.numbers(makers[0].input[1]) == list(widths) \
                and list(makers[0].output) == [str(part) for part in parts]
        return whole.pop() if found else None

    def rank(self, value: str) -> int | None:
        """The dimensions of a value, where they are known."""
        return self._ranks.get(str(value))

    def once(self, key: object, make: Callable[[], str]) -> str:
        if key not in self._known:
            self._known[key] = make()
        return self._known[key]

    def cast(self, value: str, dtype: torch.dtype) -> str:
        return self.op("Cast", value, to=TYPES[dtype])

    def sizes(self, sizes: Sequence[Any]) -> str:
        """A shape of numbers and of sizes that vary, as int64 [n]."""
        if all(isinstance(size, int) for size in sizes):
            return self.constant(list(sizes))
        parts = [self.constant([size]) if isinstance(size, int) else self.op("Reshape", size, self.constant([1]))
                 for size in sizes]
        return self.op("Concat", *parts, axis=0)

    # -- caches

    def append(self, cache: OnnxValue, new: str) -> None:
        self._caches[cache] = (cache, new)

    def appended(self, cache: OnnxValue) -> tuple[str, str]:
        return self._caches[cache]

    def present(self, cache: OnnxValue, value: str) -> None:
        """The operator gives the model's output itself: what a caller has bound to that, a runtime writes into."""
        name, maker = cache.replace("past_key_values", "present"), self._makers.pop(str(value))
        for node in (maker, *self._behind_node(maker)):
            for names in (node.input, node.output):
                names[:] = [name if each == value else each for each in names]
        self._makers[name] = maker

    # -- tensors

    def weight(self, name: str, dtype: torch.dtype, shape: Sequence[int], read: WeightPieces) -> OnnxValue:
        """A tensor of the file beside, placed when it is first used."""
        value = OnnxValue(name, dtype, shape)
        self._stored[name] = value, lambda turned: self._place(name, dtype, shape, read, turned)
        self._reads[name] = read
        return value

    def joined(self, tensors: Sequence[OnnxValue]) -> OnnxValue | None:
        """Tensors of the file one behind the other along the first dimension, as one; None for others."""
        reads = [self._reads.get(t) for t in tensors]
        if None in reads or len({(t.dtype, t.shape[1:]) for t in tensors}) > 1:
            return None
        shape = [sum(t.shape[0] or 0 for t in tensors), *(n or 0 for n in tensors[0].shape[1:])]
        return self.weight("+".join(tensors), tensors[0].dtype, shape,
                           lambda: chain.from_iterable(read() for read in reads if read is not None))

    def place(self, value: OnnxValue) -> OnnxValue:
        """`value`, a tensor, in the file."""
        if ("placed", str(value)) not in self._known:
            self._known["placed", str(value)] = value
            self._stored[value][1](False)
        return value

    def transposed(self, weight: OnnxValue) -> str:
        if weight not in self._stored:
            return self.op("Transpose", weight, perm=[1, 0])
        if ("placed", str(weight)) in self._known or weight.dtype == torch.uint8:
            return self.once(("turned", str(weight)), lambda: self.op("Transpose", self.place(weight), perm=[1, 0]))
        return self.once(("turned", str(weight)), lambda: self._turned(weight))

    def _turned(self, weight: OnnxValue) -> str:
        self._stored[weight][1](True)
        return f"{weight}.T"

    def _place(self, name: str, dtype: torch.dtype, shape: Sequence[int], read: WeightPieces, turned: bool) -> None:
        tensor = TensorProto(name=f"{name}.T" if turned else name, data_type=TYPES[dtype],
                             dims=[*shape][::-1] if turned else [*shape], data_location=TensorProto.EXTERNAL)
        nbytes = dtype.itemsize
        for size in shape:
            nbytes *= size
        for key, value in (("location", self.file), ("offset", self.data_nbytes), ("length", nbytes)):
            tensor.external_data.add(key=key, value=str(value))
        self.initializers.append(tensor)
        self.data.append(ExternalTensor(self.data_nbytes, read, (shape[0], shape[1]) if turned else None))
        self.data_nbytes = whole_pages(self.data_nbytes + nbytes)

    # -- the whole

    def model(self, inputs: list[Any], outputs: list[Any], producer: tuple[str, str]) -> onnx.ModelProto:
        nodes, read = self._needed({value.name for value in outputs})
        graph = helper.make_graph(nodes, "forebay", inputs, outputs, [t for t in self.initializers if t.name in read])
        opsets = [helper.make_opsetid("", OPSETS[self.form])]
        if self.dialect == "microsoft":
            opsets.append(helper.make_opsetid(MICROSOFT, 1))
        return helper.make_model(graph, opset_imports=opsets, ir_version=IR_VERSIONS[self.form],
                                 producer_name=producer[0], producer_version=producer[1])


    def _needed(self, outputs: set[str]) -> tuple[list[onnx.NodeProto], set[str]]:
        """The nodes that something needs for the outputs, in their order, and all that they read."""
        wanted, kept = set(outputs), []
        for node in reversed(self.nodes):
            if wanted & set(node.output):
                wanted |= set(node.input)
                kept.append(node)
        return kept[::-1], wanted


def _inline(name: str, value: torch.Tensor) -> onnx.TensorProto:
    raw = value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return TensorProto(name=name, data_type=TYPES[value.dtype], dims=list(value.shape), raw_data=raw)


def value_info(name: str, dtype: torch.dtype, shape: Sequence[int | str]) -> onnx.ValueInfoProto:
    """An input or output of a graph."""
    return helper.make_tensor_value_info(name, TYPES[dtype], list(shape))
