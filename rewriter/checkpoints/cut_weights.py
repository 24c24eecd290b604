"""A rank's part of a weight: what shape it has, and which bytes of the stored one it is."""

from __future__ import annotations

import math
from dataclasses import replace

from forebay.kernels.formats import row_sizes
from forebay.rewriter.ir.graph import RowFormat, WeightSpec
from forebay.rewriter.ir.program import Band, FileSlice
from forebay.rewriter.ir.share import Ranges, WeightCut, count


def cut_spec(spec: WeightSpec, cut: WeightCut, name: str) -> WeightSpec:
    """Return the spec of this rank's part of a weight, under `name`."""
    shape = list(spec.shape)
    for dim, held in cut:
        shape[dim] = count(held)
    return replace(spec, name=name, shape=tuple(shape), ties=spec.ties if name == spec.name else (),
                   stored=None if spec.stored is None else _stored(spec, cut))


def _stored(spec: WeightSpec, cut: WeightCut) -> RowFormat:
    known = spec.stored
    assert known is not None
    out, into = _sides(spec, cut)
    rows, columns = (known.out_features if out is None else count(out), known.in_features if into is None else
                     count(into))
    row = known.row_nbytes if into is None else known.packing(columns).row_nbytes
    return replace(known, out_features=rows, in_features=columns, row_nbytes=row)


def _sides(spec: WeightSpec, cut: WeightCut) -> tuple[Ranges | None, Ranges | None]:
    """Return the output and input features of a stored matrix that a rank has; None for all."""
    found = dict(cut)
    turned = spec.stored is not None and spec.stored.transposed
    return (found.get(1), found.get(0)) if turned else (found.get(0), found.get(1))


def cut_file(spec: WeightSpec, cut: WeightCut, file: FileSlice) -> FileSlice:
    """The bytes of a rank's part, in the order in which it holds them. ValueError where a group of packed values would
    be cut."""
    out, into = _sides(spec, cut)
    stored = spec.stored
    if stored is None:
        inner = math.prod(spec.shape[2:]) * spec.dtype.itemsize
        width = spec.shape[1] if len(spec.shape) > 1 else 1
        row, pieces = width * inner, tuple((a * inner, (b - a) * inner) for a, b in into or ((0, width),))
        rows = spec.shape[0]
    else:
        row, rows = stored.row_nbytes, stored.out_features
        pieces = ((0, row),) if into is None else _packed_pieces(stored, into, spec.name)
    held = out or ((0, rows),)
    own = sum(nbytes for _, nbytes in pieces)
    if pieces == ((0, row),) and (file.bands or len(held) == 1):
        found = [file.part(first * row, (end - first) * row) for first, end in held]
        return replace(found[0], nbytes=count(held) * row, bands=tuple(band for each in found for band in each.bands))
    if file.bands:
        raise ValueError(f"{spec.name} is stored in several tensors, of which a rank would have columns; take another "
                         "number of ranks")
    bands = tuple(Band(first * row, end - first, row, pieces) for first, end in held)
    return FileSlice(file.path, file.offset, count(held) * own, bands)


def _packed_pieces(stored: RowFormat, into: Ranges, name: str) -> tuple[tuple[int, int], ...]:
    """Return the pieces of a packed row for whole groups: codes, scales and lows, and the padding of rows after
    them."""
    size, bits = stored.group_size, stored.bits
    if any(edge % size and edge != stored.in_features for piece in into for edge in piece):
        raise ValueError(f"{name}: a rank would have {into} of {stored.in_features} input features, which cut a group "
                         f"of {size} that share a scale; take another number of ranks, or weights in smaller groups")
    refusal = row_sizes.product_refusal
    if refusal(count(into), size) and not refusal(stored.in_features, size):  # as of three heads of 16
        raise ValueError(f"{name}: a rank would have {count(into)} of {stored.in_features} columns, and matmuls take "
                         f"groups of {size} in pairs; take another number of ranks")
    groups = [(a // size, row_sizes.group_count(b, size)) for a, b in into]
    codes = row_sizes.codes_nbytes(stored.in_features, bits, size)
    scales = 2 * row_sizes.group_count(stored.in_features, size)
    each = size * bits // 8
    pieces = [(a * each, (b - a) * each) for a, b in groups]
    for begin in (codes,) if stored.symmetric else (codes, codes + scales):
        pieces += [(begin + 2 * a, 2 * (b - a)) for a, b in groups]
    rest = stored.packing(count(into)).row_nbytes - sum(nbytes for _, nbytes in pieces)
    return (*pieces, (0, rest)) if rest else tuple(pieces)
