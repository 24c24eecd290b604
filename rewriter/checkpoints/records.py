"""Records of stored tensors: place in a file, and format of the bytes."""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch

from forebay.kernels.formats.packing import Packing
from forebay.kernels.formats.table import Format, weight_format
from forebay.rewriter.ir.printable import PrintableError
from forebay.rewriter.ir.program import Band, FileSlice

LOG = logging.getLogger("forebay")


class CheckpointError(PrintableError, ValueError):
    """A checkpoint that cannot be read or written; the message says why and what to do."""


@functools.lru_cache(maxsize=256)
def log_once(text: str) -> None:
    """Log a warning that nobody has seen."""
    LOG.warning("%s", text)


def parse_format(name: str) -> Format:
    """The weight format of that name. CheckpointError for a name that is none."""
    try:
        return weight_format(name)
    except ValueError as error:
        raise CheckpointError(str(error)) from error


@dataclass(frozen=True, slots=True)
class Packed:
    """The format of a quantized weight's rows: a matrix of `shape` and `dtype` in the model, groups along its inputs;
    or one for each expert of a layer, the first dimension, whose rows lie one after the other.

    `transposed`: the model holds it as [inputs, outputs] (GPT-2's Conv1D); rows are outputs always. Whether rows have
    lows or a codebook is in the format's name. Of a table of experts a row is an entry of `entry_nbytes`, `down` tells
    of the matrices of that name, and all else of those of `up`.
    """

    format: str
    bits: int
    group_size: int
    scale_dtype: torch.dtype
    shape: tuple[int, ...]
    dtype: torch.dtype
    transposed: bool = False
    entry_nbytes: int = 0
    down: Packed | None = None

    @property
    def in_features(self) -> int:
        return self.shape[-2 if self.transposed else -1]

    @property
    def out_features(self) -> int:
        return math.prod(self.shape) // max(1, self.in_features)

    @property
    def rows(self) -> Packing:
        """The format of the rows."""
        stored = parse_format(self.format)
        return Packing(self.bits, self.in_features, self.group_size, self.scale_dtype, stored.symmetric,
                       stored.codebook)

    @property
    def row_nbytes(self) -> int:
        return self.entry_nbytes or self.rows.row_nbytes


@dataclass(frozen=True, slots=True)
class TensorRecord:
    """The place of one tensor: `nbytes` bytes at the absolute byte `offset` of the file `path`.

    `dtype` and `shape` are those of the bytes; of a quantized weight, `packed` says what they mean. `opaque` names the
    dtype of a tensor that nothing here computes with; `dtype` and `shape` are then those of plain bytes. What is put
    together from other tensors says in `bands` where its bytes lie, and `made_of` which tensors those are.
    """

    name: str
    path: str
    offset: int
    nbytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    packed: Packed | None = None
    opaque: str = ""
    bands: tuple[Band, ...] = ()
    made_of: tuple[TensorRecord, ...] = ()

    def part(self, lower: int, nbytes: int, dtype: torch.dtype, shape: tuple[int, ...]) -> TensorRecord:
        """The tensor of this dtype and shape that `nbytes` of its bytes are, from number `lower` on."""
        held = FileSlice(self.path, self.offset, self.nbytes, self.bands).part(lower, nbytes)
        return replace(self, offset=held.offset, nbytes=nbytes, dtype=dtype, shape=shape, bands=held.bands)


@dataclass(frozen=True)
class AddedTensors:
    """Tensors that adapters add to a model.

    Attributes:
        tensors: By the captured model's names.
        columns: Of adapters that requests name: the first and the end of the columns of x A^T that are theirs. Without
            any, one adapter serves all requests.
    """

    tensors: Mapping[str, TensorRecord] = field(default_factory=dict)
    columns: Mapping[str, tuple[int, int]] = field(default_factory=dict)

    @property
    def width(self) -> int:
        """Columns of all adapters; 0 where one serves all requests."""
        return max((end for _, end in self.columns.values()), default=0)
