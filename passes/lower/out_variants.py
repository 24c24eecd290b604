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

CONVOLUTIONS = frozenset((
    aten.conv1d.default, aten.conv2d.default, aten.conv3d.default, aten.conv1d.padding, aten.conv2d.padding,
    aten.conv3d.padding, aten.convolution.default,
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
    """Return whether an operator's results may share memory with an argument by its schema."""
    return isinstance(op, torch._ops.OpOverload) and any(
        r.alias_info is not None and not r.alias_info.is_write for r in op._schema.returns)


def mutated_arguments(op: torch._ops.OpOverload) -> tuple[int, ...]:
    """Positions of the arguments that the operator writes."""
    return tuple(i for i, a in enumerate(op._schema.arguments) if a.alias_info is not None and a.alias_info.is_write)


def named_arguments(node: fx.Node, op: torch._ops.OpOverload) -> dict[str, object]:
    """A node's arguments by the names in the schema of its own operator."""
    names = [a.name for a in op._schema.arguments]
    return {**dict(zip(names, node.args, strict=False)), **node.kwargs}


def transient_nbytes(node: fx.Node) -> int:
    """Bytes that torch's own convolution and attention take on a CPU beside operands and result, an upper estimate.

    Measured on torch 2.13: a convolution makes its result twice and the weight once more, in oneDNN's layouts;
    attention turns a boolean mask into numbers, and each thread holds scores of 256 queries and 512 keys; where the
    fused kernel does not apply, all scores are held twice, and scaled and contiguous copies of the operands.
    """
    target = node.target
    if target in CONVOLUTIONS:
        weight, result = node.args[1].meta["val"], node.meta["val"]  # type: ignore[union-attr]
        return (result.numel() + weight.numel()) * result.element_size()
    if target is not aten.scaled_dot_product_attention.default:
        return 0
    given = named_arguments(node, target)  # type: ignore[arg-type]
    q, k, v = (given[name].meta["val"] for name in ("query", "key", "value"))  # type: ignore[attr-defined]
    mask = given.get("attn_mask")
    fused = q.dim() == 4 and q.shape[-1] == v.shape[-1] and not given.get("dropout_p")
    held = torch.get_num_threads() * 4 * min(256, q.shape[-2]) * (min(512, k.shape[-2]) + 2 * q.shape[-1])
    if not fused:
        scores = q.numel() // q.shape[-1] * k.shape[-2]
        held = (2 * scores + 3 * (q.numel() + k.numel() + v.numel())) * max(4, q.element_size())
    if isinstance(mask, fx.Node):
        held += mask.meta["val"].numel() * q.element_size()
    return held + q.numel() // q.shape[-1] * 4  # and the logarithm of each row's sum
