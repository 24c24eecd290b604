"""Which operator computes a node's result straight into given memory."""

from __future__ import annotations

from functools import cache

import torch
from torch import fx

aten = torch.ops.aten
FACTORY_ARGUMENTS = frozenset(("dtype", "layout", "device", "pin_memory", "memory_format"))

# a result that is the operand's elements in another dtype or layout: out.copy_(operand) does it
COPIES = frozenset((
    aten.clone.default, aten.contiguous.default, aten._to_copy.default, aten.to.dtype, aten.to.device,
    aten.to.dtype_layout, aten.to.other, aten.type_as.default, aten.reshape.default, aten.flatten.using_ints,
    aten.lift_fresh_copy.default, aten.expand_copy.default,
))


@cache
def out_variant(op: torch._ops.OpOverload) -> torch._ops.OpOverload | None:
    """The overload of the same operator that takes the same arguments and writes into `out`, or None."""
    given = [(a.name, str(a.type)) for a in op._schema.arguments]
    for name in op.overloadpacket.overloads():
        candidate = getattr(op.overloadpacket, name)
        arguments = candidate._schema.arguments
        outs = [a for a in arguments if a.is_out]
        if len(outs) != len(op._schema.returns) or not outs:
            continue
        taken = [(a.name, str(a.type)) for a in arguments if not a.is_out]
        left = [g for g in given if g not in taken]
        if all(t in given for t in taken) and all(n in FACTORY_ARGUMENTS for n, _ in left):
            return candidate
    return None


def is_view(op: object) -> bool:
    """Whether an operator's results may share memory with an argument by its schema."""
    return isinstance(op, torch._ops.OpOverload) and any(
        r.alias_info is not None and not r.alias_info.is_write for r in op._schema.returns)


def mutated_arguments(op: torch._ops.OpOverload) -> tuple[int, ...]:
    """Positions of the arguments that the operator writes."""
    return tuple(i for i, a in enumerate(op._schema.arguments) if a.alias_info is not None and a.alias_info.is_write)


def named_arguments(node: fx.Node, op: torch._ops.OpOverload) -> dict[str, object]:
    """A node's arguments by the names in the schema of its own operator."""
    names = [a.name for a in op._schema.arguments]
    return {**dict(zip(names, node.args, strict=False)), **node.kwargs}
