"""One node of a flat graph as Launch items: which operator, on which memory, at what cost."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from forebay.kernels.formats.packing import Packing
from forebay.kernels.operator import Operator
from forebay.kernels.operators import EXPERTS, LINEAR, LINEAR_Q, of_target
from forebay.passes.lower.out_variants import (
    COPIES,
    is_view,
    mutated_arguments,
    named_arguments,
    out_variant,
    transient_nbytes,
)
from forebay.passes.lower.probe_out_variants import keeps_memory
from forebay.rewriter.ir import ops
from forebay.rewriter.ir.graph import META, Gemm, is_collective, values_of
from forebay.rewriter.ir.operator_names import called
from forebay.rewriter.ir.printable import PrintableError
from forebay.rewriter.ir.products import Linear, experts_among, is_product, linear_arguments
from forebay.rewriter.ir.program import COLLECT, COMPUTE, Launch, TensorRef, dtype_itemsize, row_major_strides, span_of

aten = torch.ops.aten


Workspace = Callable[[Launch], Launch]  # a launch with the memory that it takes outside the arenas
AFTER = ("multiplier", "residual", "activation")  # what may follow a product
MULTIPLIES = re.compile("mm$|conv|attention")  # names of torch's operators whose operations it counts


class LoweringError(PrintableError, RuntimeError):
    """A node that cannot be lowered; the message names it and its operator."""


class Launches:
    """Builds Launch items. `ref` tells where (an element of) a node's value lies; `workspace` adds what a launch takes
    beside its operands on the device at hand."""

    def __init__(self, ref: Callable[..., TensorRef], workspace: Workspace) -> None:
        self.ref, self.workspace = ref, workspace

    def of(self, node: fx.Node) -> list[Launch]:
        """The launches that compute `node` into its planned memory, in order."""
        target = node.target
        if target in (ops.new_output, ops.fetch, ops.release):
            return []
        if target is ops.linear_tile:
            return [self._linear_tile(node)]
        if target is ops.matmul_tile:
            return [self._matmul_tile(node)]
        if target is ops.experts_tile:
            return [self._experts_tile(node)]
        if not isinstance(target, torch._ops.OpOverload):
            if callable(target) and not values_of(node):
                return []  # arithmetic on sizes, already folded
            raise LoweringError(f"lower: {node.name} calls {target}, which is no operator")
        if is_product(node):
            linear = linear_arguments(node)
            if linear is not None:
                return [self._product(node, linear, "nk")]
            bias, x, weight = node.args
            return [self._product(node, Linear(x, weight, bias), "kn")]
        if linear_arguments(node) is not None:
            return self._aten(node, target)
        if is_collective(node):
            return [self._collective(node, target)]
        operator = of_target(target)
        if operator is not None and _has_kernel(operator, node):
            return [self._own(node, operator)]
        return self._aten(node, target)

    # -- matrix products

    def _impl(self, node: fx.Node) -> str:
        mark = node.meta.get(META)
        if not isinstance(mark, Gemm):
            raise LoweringError(f"lower: {node.name} is a matmul without an implementation; select_gemm gives it the "
                                "one of plan.gemm")
        return mark.impl

    def _product(self, node: fx.Node, linear: Linear, form: str) -> Launch:
        args = (self.ref(linear.x), self.ref(linear.weight), self.ref(linear.bias) if linear.bias is not None else None)
        after = {k: self._map(v) for k, v in linear._asdict().items() if k in AFTER and v}
        return self._gemm(node, args, self.ref(node), form, False, after, linear.packing)

    def _gemm(
        self, node: fx.Node, args: tuple, out: TensorRef, form: str, accumulate: bool, after: dict[str, Any],
        packing: tuple | None = None,
    ) -> Launch:
        reads = tuple(span_of(r) for r in _refs((*args, *after.values()))) + ((span_of(out),) if accumulate else ())
        operator, how = LINEAR, {"form": form, "accumulate": accumulate}
        if packing is not None:
            operator, how = LINEAR_Q, Packing(*packing)._asdict()
        return self.counted(operator, Launch(
            COMPUTE, operator.name, args, {**how, **after}, (out,), reads, (span_of(out),), node.name,
            node.meta.get("layer", -1), impl=self._impl(node)))

    def _linear_tile(self, node: fx.Node) -> Launch:
        out, x, tile, bias, lower, *rest = node.args
        target, weight = self.ref(out), self.ref(tile)  # type: ignore[arg-type]
        rows = weight.shape[0]
        part = _narrow(target, -1, lower, rows)  # type: ignore[arg-type]
        vector = None if bias is None else _narrow(self.ref(bias), 0, lower, rows)  # type: ignore[arg-type]
        after = {k: _narrow(self.ref(v), -1, lower, rows) if isinstance(v, fx.Node) else v  # type: ignore[arg-type]
                 for k, v in zip(AFTER, rest, strict=False) if v}
        packing = rest[3] if len(rest) > 3 else None
        return self._gemm(node, (self.ref(x), weight, vector), part, "nk", False, after, packing)  # type: ignore[arg-type]

    def _matmul_tile(self, node: fx.Node) -> Launch:
        out, x, tile, bias, lower = node.args
        weight = self.ref(tile)  # type: ignore[arg-type]
        part = _narrow(self.ref(x), -1, lower, weight.shape[0])  # type: ignore[arg-type]
        vector = self.ref(bias) if bias is not None and lower == 0 else None  # type: ignore[arg-type]
        return self._gemm(node, (part, weight, vector), self.ref(out), "kn", lower != 0, {})  # type: ignore[arg-type]

    def _experts_tile(self, node: fx.Node) -> Launch:
        out, x, index, weights, tile, lower, count, *form = node.args
        operands, target = tuple(map(self.ref, (x, index, weights, tile))), self.ref(out)
        how = {"first": lower, "count": count, "accumulate": lower != 0, **experts_among(tile.args[0])}  # type: ignore[union-attr]
        reads = (*map(span_of, operands), *((span_of(target),) if lower else ()))
        return self.counted(EXPERTS, Launch(
            COMPUTE, EXPERTS.name, (*operands, *form), how, (target,), reads, (span_of(target),), node.name,
            node.meta.get("layer", -1)))

    # -- everything else

    def counted(self, operator: Operator, launch: Launch) -> Launch:
        """A launch of one of our own operators, with its operations and its workspace."""
        return self.workspace(replace(launch, flops=operator.cost(launch).flops))

    def _own(self, node: fx.Node, operator: Operator) -> Launch:
        args = self._map(node.args)
        out = tuple(self._outputs(node))
        mutated = [operator.argument(args, name) for name in operator.writes]
        reads = tuple(dict.fromkeys(span_of(r) for r in _refs(args)))
        writes = tuple(span_of(r) for r in (*out, *_refs(mutated)))
        more = experts_among(operator.argument(node.args, "table")) if operator is EXPERTS else {}
        return self.counted(operator, Launch(
            COMPUTE, operator.name, args, {**self._map(node.kwargs), **more}, out, reads, writes, node.name,
            node.meta.get("layer", -1)))

    def _collective(self, node: fx.Node, target: torch._ops.OpOverload) -> Launch:
        """An exchange with other ranks. What a backend takes beside is kept: as much again as both ends."""
        operand, out = self.ref(node.args[0]), self.ref(node)
        read, written = span_of(operand), span_of(out)
        results = () if mutated_arguments(target) else (out,)
        taken = written.nbytes + (read.nbytes if results else 0)
        return Launch(COLLECT, str(target), (operand, *node.args[1:]), {}, results, (read,), (written,), node.name,
                      node.meta.get("layer", -1), held=(("collectives", taken),))

    def _aten(self, node: fx.Node, target: torch._ops.OpOverload) -> list[Launch]:
        mutated = mutated_arguments(target)
        arguments = named_arguments(node, target)
        layer, flops = node.meta.get("layer", -1), _flops(node, target)
        if mutated:
            if values_of(node) and (operator := of_target(target)):
                raise LoweringError(f"lower: {node.name} writes an argument and returns a result, so it is launched by "
                                    f"{operator.name}'s own kernel alone, whose operands must lie as its layouts say")
            args = self._map(node.args)
            writes = tuple(span_of(r) for i in mutated for r in _refs((args[i],)))
            reads = tuple(span_of(r) for r in _refs((args, *self._map(node.kwargs).values())))
            return [self.workspace(Launch(COMPUTE, called(target), args, self._map(node.kwargs), (), reads, writes,
                                          node.name, layer, flops))]
        out = tuple(self._outputs(node))
        if not out:
            return []
        if target in COPIES:
            source = self.ref(node.args[0])
            into = out[0] if source.shape == out[0].shape else _reshaped(out[0], source.shape, node)
            return [Launch(COMPUTE, "copy", (source,), {}, (into,), (span_of(source),), (span_of(into),), node.name,
                           layer)]
        if target in (aten.as_strided_copy.default, aten.as_strided_scatter.default):
            return self._as_strided(node, arguments)
        variant, results = out_variant(target), sum(v.untyped_storage().nbytes() for v in values_of(node))
        if variant is not None and keeps_memory(variant, target, node, arguments):
            names = {a.name for a in variant._schema.arguments if not a.is_out}
            kwargs = self._map({k: v for k, v in arguments.items() if k in names})
            op, workspace = str(variant), results if torch.Tag.generated in variant.tags else 0
        elif is_view(target):
            raise LoweringError(f"lower: {node.name} ({target}) returns a view that capture did not resolve")
        else:
            kwargs = self._map(arguments)
            op, workspace = called(target), results + transient_nbytes(node)
        reads = tuple(span_of(r) for r in _refs(tuple(kwargs.values())))
        return [self.workspace(Launch(COMPUTE, op, (), kwargs, out, reads, tuple(span_of(r) for r in out), node.name,
                                      layer, flops, workspace))]

    def _as_strided(self, node: fx.Node, arguments: Mapping[str, Any]) -> list[Launch]:
        """Copies: an explicit offset counts from the memory of the operand, which lies anywhere in an arena here."""
        operand, out = arguments["self"], self.ref(node)
        whole, at = self.ref(operand), arguments.get("storage_offset")
        value = operand.meta["val"]
        shift = (0 if at is None else at - value.storage_offset()) * value.element_size()
        seen = whole if node.target is aten.as_strided_copy.default else out
        layout = tuple(arguments["size"]), tuple(arguments["stride"])
        part = TensorRef(seen.arena, seen.offset + shift, seen.dtype, *layout, seen.buffer)
        moves = [(part, out)] if seen is whole else [(whole, out), (self.ref(arguments["src"]), part)]
        return [Launch(COMPUTE, "copy", (source,), {}, (into,), (span_of(source),), (span_of(into),), node.name,
                       node.meta.get("layer", -1)) for source, into in moves]

    def _outputs(self, node: fx.Node) -> list[TensorRef]:
        return [self.ref(node, i) for i in range(len(values_of(node)))]

    def _map(self, value: Any) -> Any:
        if isinstance(value, fx.Node):
            return self.ref(value) if values_of(value) else value.meta.get("val")
        if isinstance(value, tuple | list):
            return type(value)(self._map(v) for v in value) if type(value) in (tuple, list) else tuple(
                self._map(v) for v in value)
        if isinstance(value, dict):
            return {k: self._map(v) for k, v in value.items()}
        return value


def _has_kernel(operator: Operator, node: fx.Node) -> bool:
    """Return whether launches of one of our operators can compute a node: its operands lie as the record says."""
    return bool(operator.bind) and operator.accepts(tuple(
        value.meta.get("val") if isinstance(value, fx.Node) else value for value in node.args))


def _narrow(ref: TensorRef, dim: int, lower: int, length: int) -> TensorRef:
    dim %= len(ref.shape)
    shape = (*ref.shape[:dim], length, *ref.shape[dim + 1 :])
    before = 0 if 0 in ref.shape else lower * ref.stride[dim] * dtype_itemsize(ref.dtype)  # no memory, nothing to pass
    offset = ref.offset + before
    return TensorRef(ref.arena, offset, ref.dtype, shape, ref.stride, ref.buffer)


def _reshaped(ref: TensorRef, shape: tuple[int, ...], node: fx.Node) -> TensorRef:
    """Row-major memory seen in another shape."""
    if ref.stride != row_major_strides(ref.shape):
        raise LoweringError(f"lower: {node.name} reshapes into a permuted layout")
    return TensorRef(ref.arena, ref.offset, ref.dtype, shape, row_major_strides(shape), ref.buffer)


def _refs(value: Any) -> list[TensorRef]:
    if isinstance(value, TensorRef):
        return [value]
    if isinstance(value, tuple | list):
        return [r for v in value for r in _refs(v)]
    return []


def _flops(node: fx.Node, target: torch._ops.OpOverload) -> int:
    """Floating-point operations of one of torch's operators, where it counts them."""
    packet = target.overloadpacket
    if not MULTIPLIES.search(packet.__name__):
        return 0
    from torch.utils.flop_counter import flop_registry  # with Triton, which a start has no need of

    count = flop_registry.get(packet)
    if count is None:
        return 0
    try:
        return int(count(*(_shaped(a) for a in node.args), **{k: _shaped(v) for k, v in node.kwargs.items()},
                         out_val=node.meta["val"]))
    except (TypeError, AssertionError):
        return 0


def _shaped(value: Any) -> Any:
    if isinstance(value, fx.Node):
        return value.meta.get("val")
    return value
