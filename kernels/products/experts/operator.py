"""`forebay::experts`: of each token the products with the few experts that its router chose, weighted and added.

out[t] = sum over k of weights[t, k] * down_e(act(up_e(x[t]))), e being index[t, k]; `Form` says how an expert computes,
`Storage` how its matrices are stored. An expert's rows of x are gathered, and meet its matrices in the C++ kernels of
`linear` or `linear_q`. Intermediate results are rounded to x's dtype as operators apart would leave them; what `down`
gives stays fp32, is added up in ascending order of experts, and is rounded once.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from forebay.kernels.formats.entry_part import Part
from forebay.kernels.operator import Call, Cost, Operator, Tensors, Use, dtype_of, nbytes_of
from forebay.kernels.products.experts.cpu import Sizes, bind_experts, scratch_nbytes
from forebay.kernels.products.experts.entries import entry_parts, experts_of
from forebay.kernels.products.experts.gpu_scratch import scratch_offsets
from forebay.kernels.products.experts.reference import Form, Storage, Stored, reference


@torch.library.custom_op("forebay::experts", mutates_args=(), device_types="cpu")
def experts(
    x: Tensor, index: Tensor, weights: Tensor, table: Tensor, inner: int, biased: bool, activation: str, gated: bool,
    interleaved: bool, transposed: bool, down_transposed: bool, scales_input: bool, alpha: float, limit: float,
    bits: int = 0, group_size: int = 0, scale_dtype: torch.dtype = torch.float16, symmetric: bool = False,
    codebook: str = "", down_bits: int = 0, down_group_size: int = 0, down_scale_dtype: torch.dtype = torch.float16,
    down_symmetric: bool = False, down_codebook: str = "",
) -> Tensor:  # fmt: skip
    """x [..., H], index int64 [..., K], weights [..., K], table [E, N] (`entries`) -> contiguous [..., H] of x's dtype.

    ValueError names what is wrong.
    """
    form = Form(activation, gated, interleaved, transposed, down_transposed, scales_input, alpha, limit)
    stored = Storage(Stored(bits, group_size, scale_dtype, symmetric, codebook),
                     Stored(down_bits, down_group_size, down_scale_dtype, down_symmetric, down_codebook))
    parts = entry_parts(x.shape[-1], inner, form, stored, biased, x.dtype)
    out = x.new_empty(x.shape)
    given = (x.contiguous(), index.contiguous(), weights.contiguous(), experts_of(table.contiguous(), parts))
    bind_experts(*given, form, stored, out)()
    return out


@experts.register_kernel("cuda")
def _(x: Tensor, index: Tensor, weights: Tensor, table: Tensor, *how: Any) -> Tensor:
    out = x.new_empty(x.shape)
    given = (x.contiguous(), index.contiguous(), weights.contiguous(), table.contiguous(), *how)
    _bind_cuda(Tensors(given, {}, (out,)))()
    return out


@experts.register_fake
def _(
    x: Tensor, index: Tensor, weights: Tensor, table: Tensor, inner: int, biased: bool, activation: str, gated: bool,
    interleaved: bool, transposed: bool, down_transposed: bool, scales_input: bool, alpha: float, limit: float,
    bits: int = 0, group_size: int = 0, scale_dtype: torch.dtype = torch.float16, symmetric: bool = False,
    codebook: str = "", down_bits: int = 0, down_group_size: int = 0, down_scale_dtype: torch.dtype = torch.float16,
    down_symmetric: bool = False, down_codebook: str = "",
) -> Tensor:  # fmt: skip
    return x.new_empty(x.shape)


class Arguments(NamedTuple):
    """A use's arguments. A launch over a part of the experts names by keyword the `first` of them, or gives their
    `entries`, which are expected to be a `share` of those picked; how many there are, `count`, and `among` how many
    picks are where other ranks have other experts; and whether results are added to what its output holds,
    `accumulate`, or what each pick gives is kept in `results`, which the launch that has the `last` of them adds up."""

    x: Any
    index: Any
    weights: Any
    table: Any
    inner: int
    biased: bool
    form: Form
    stored: Storage

    def parts(self) -> tuple[Part, ...]:
        """The parts of a table's entry."""
        return entry_parts(self.x.shape[-1], self.inner, self.form, self.stored, self.biased, dtype_of(self.x))


def arguments_of(args: tuple[Any, ...]) -> Arguments:
    """Positional arguments, sorted."""
    x, index, weights, table, inner, biased, *rest = args
    return Arguments(x, index, weights, table, inner, biased, Form(*rest[:8]),
                     Storage(Stored(*rest[8:13]), Stored(*rest[13:])))


def _count(use: Use) -> int:
    """Experts that a use may be asked for."""
    return use.kwargs.get("count", use.args[3].shape[0])  # type: ignore[no-any-return]


def _bound(use: Use) -> tuple[Any, ...]:
    """Arguments of `bind_experts`."""
    given = arguments_of(use.args)
    held = experts_of(given.table, given.parts(), use.kwargs.get("first", 0), use.kwargs.get("entries"))
    out, results = use.out[0], use.kwargs.get("results")
    if results is not None:
        return (given.x, given.index, given.weights, held, given.form, given.stored,
                out if use.kwargs["last"] else None, False, results)
    return (given.x, given.index, given.weights, held, given.form, given.stored, out,
            use.kwargs.get("accumulate", False))


def _bind_cuda(use: Use) -> Call:
    from forebay.kernels.products.experts.gpu import bind_experts as bind

    return bind(*_bound(use))


def _cpu_workspace(use: Use) -> int:
    given = arguments_of(use.args)
    units = 2 * given.inner if given.form.gated else given.inner
    sizes = Sizes(math.prod(given.x.shape[:-1]), given.index.shape[-1], _count(use), given.x.shape[-1], units,
                  given.inner)
    return scratch_nbytes(dtype_of(given.x), dtype_of(use.out[0]), sizes, given.form, given.stored)


def _gpu_workspace(use: Use) -> int:
    given = arguments_of(use.args)
    entries = max(given.table.shape[0], _count(use))  # whatever holds them: what a plan counts does not know
    return scratch_offsets(math.prod(given.index.shape), entries, given.x.shape[-1], given.inner,
                           dtype_of(given.x).itemsize).end


def _cost(use: Use) -> Cost:
    """Return the cost of a part of the experts: its share of picks, and the experts read under uniform routing."""
    given = arguments_of(use.args)
    units, entries = 2 * given.inner if given.form.gated else given.inner, given.table.shape[0]
    picks, count = math.prod(given.index.shape), max(1, _count(use))
    among, each = use.kwargs.get("among", count), given.index.shape[-1]
    share = entries / count  # of the experts that are there
    if "entries" in use.kwargs:  # the table is of places at which experts may begin
        share = use.kwargs.get("share", 1.0)
    picked = share * picks * count / among
    named = share * count * (1 - (1 - min(1.0, each / among)) ** (picks // max(1, each)))
    read = nbytes_of(given.table) // max(1, entries) * named
    return Cost(round(2 * picked * (units + given.inner) * given.x.shape[-1]),
                round(read) + nbytes_of(given.x, given.index, given.weights), nbytes_of(*use.out))


EXPERTS = Operator(
    torch.ops.forebay.experts.default,
    reference,
    _cost,
    bind={"cpu": lambda use: bind_experts(*_bound(use)), "cuda": _bind_cuda},
    workspace={"cpu": _cpu_workspace, "cuda": _gpu_workspace},
    layouts={"x": "rows", "index": "dense", "weights": "dense", "table": "dense"},
)
