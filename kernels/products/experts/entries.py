"""How an expert's weights lie together: one row of a table, so that it is read from a file, and kept, as one piece.

An entry holds `up`, its bias, `down`, its bias, one after the other, each row-major; of packed rows all as bytes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from forebay.kernels.formats.entry_part import Part
from forebay.kernels.products.experts.reference import Experts, Form, Storage


def entry_parts(
    hidden: int, inner: int, form: Form, stored: Storage, biased: bool, dtype: torch.dtype
) -> tuple[Part, ...]:
    """The parts of an entry, in their order. `dtype` is that of biases, and of matrices that are not packed."""
    units = 2 * inner if form.gated else inner
    found: list[Part] = []
    at = 0
    for name, n, k, how, transposed in (("up", units, hidden, stored.up, form.transposed),
                                        ("down", hidden, inner, stored.down, form.down_transposed)):
        row, kind = (how.packing(k).row_nbytes, torch.uint8) if how.bits else (k, dtype)
        shape = (row, n) if transposed else (n, row)
        for each in (Part(name, at, shape, kind), *((Part(f"{name}_bias", 0, (n,), dtype),) if biased else ())):
            found.append(each._replace(offset=at))
            at += each.nbytes
    return tuple(found)


def entry_nbytes(parts: tuple[Part, ...]) -> int:
    """Bytes of an entry."""
    return parts[-1].offset + parts[-1].nbytes


def table_shape(count: int, parts: tuple[Part, ...]) -> tuple[int, int]:
    """The shape of a table of so many entries, in elements of the dtype of `up`."""
    return count, entry_nbytes(parts) // parts[0].dtype.itemsize


def experts_of(table: Any, parts: tuple[Part, ...], first: int = 0, entries: Any = None) -> Experts:
    """Return the experts of a table [n, N], as views of it."""
    held: dict[str, Tensor | None] = dict.fromkeys(("up", "up_bias", "down", "down_bias"))
    for part in parts:
        size = table.element_size()
        piece = table[:, part.offset // size : (part.offset + part.nbytes) // size]
        held[part.name] = (piece if piece.dtype == part.dtype else piece.view(part.dtype)).unflatten(1, part.shape)
    return Experts(**held, first=first, entries=entries)  # type: ignore[arg-type]
