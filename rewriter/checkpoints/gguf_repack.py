"""GGUF tensors in the model's order: block by block as rows where `gguf_blocks` knows their type, else as values."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from forebay.rewriter.checkpoints.expert_sources import StackedTensor
from forebay.rewriter.checkpoints.gguf_blocks import BLOCK_KINDS, repack, representable
from forebay.rewriter.checkpoints.gguf_config import gguf_model
from forebay.rewriter.checkpoints.gguf_files import write_model_files
from forebay.rewriter.checkpoints.gguf_header import GgufHeader, GgufTensor, gguf_parts, read_gguf
from forebay.rewriter.checkpoints.gguf_tensors import PlacedParameter, PlacedParts, PlacedTensor, place_tensors
from forebay.rewriter.checkpoints.identity import FileState, file_states, read_whole
from forebay.rewriter.checkpoints.records import CheckpointError
from forebay.rewriter.checkpoints.source_tensor import ReadRows, SourceTensor
from forebay.rewriter.ir.files import naming, open_input
from forebay.rewriter.one_thread import one_thread

PIECE_NBYTES = 4 << 20
PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}  # types that hold values as they are
# For what is quantized in a way that no rows hold exactly (values from tables of several at a time, factors beyond
# fp16): rounded anew, by half of 1/255 of a group's range at most.
NEAREST = "w8g32"


@dataclass(frozen=True)
class GgufSource:
    """A GGUF model to be quantized.

    Attributes:
        header: metadata and tensors as the files have them.
        model: the transformers model, on the meta device.
        tensors: in the order in which the files hold them.
        fingerprint: tells the files from others, and from what they are after a change.
        dtype: the dtype that the model computes in.
        states: the state of each file before it was read.
    """

    header: GgufHeader
    model: Any
    tensors: list[SourceTensor]
    fingerprint: str
    dtype: torch.dtype
    states: Mapping[str, FileState]

    def write_files(self, folder: Path) -> None:
        """Write config.json, generation settings and tokenizer."""
        write_model_files(self.header, self.model, folder, self.dtype)


@one_thread
def open_gguf(path: Path) -> GgufSource:
    """The tensors of a GGUF model that the transformers model of its architecture has; no weight is read."""
    states = file_states(map(str, gguf_parts(path))) if path.is_file() else {}
    header = read_gguf(path)
    model = gguf_model(header)
    dtype = _compute_dtype(header)
    # files in order: their names count up
    placed = sorted(place_tensors(header, model).values(), key=lambda p: (p.tensor.path.name, p.tensor.offset))
    identity = " ".join(f"{Path(file).name} {list(state[:3])}" for file, state in states.items())
    return GgufSource(header, model, [_weight(each, dtype) for each in placed], identity, dtype, states)


def _weight(placed: PlacedParameter, dtype: torch.dtype) -> SourceTensor:
    if isinstance(placed, PlacedTensor):
        return GgufWeight(placed, dtype)
    if not (placed.transposed or placed.woven):
        return StackedTensor(placed.name, placed.shape, tuple(GgufWeight(piece, dtype) for piece in placed.pieces))
    return TurnedExperts(placed.name, placed.shape, tuple(GgufWeight(piece, dtype) for piece in placed.pieces), placed)


def _compute_dtype(header: GgufHeader) -> torch.dtype:
    """Return the dtype in which a model computes: the type that its matrices have, if all have one of 16 bits, else
    `other_dtype`."""
    kinds = {tensor.kind.name for tensor in header.tensors if len(tensor.shape) > 1}
    return PLAIN.get(next(iter(kinds)), other_dtype()) if len(kinds) == 1 else other_dtype()


def other_dtype() -> torch.dtype:
    """Return the dtype in which a model of quantized tensors computes on this machine: float32, or beside a GPU, whose
    products of packed rows take inputs of 16 bits, bfloat16."""
    return torch.bfloat16 if torch.cuda.is_available() else torch.float32


@dataclass(frozen=True)
class GgufWeight:
    """A tensor of the file as a parameter of the model, which computes in `dtype`."""

    placed: PlacedTensor
    dtype: torch.dtype = torch.float32

    @property
    def name(self) -> str:
        return self.placed.name

    @property
    def shape(self) -> tuple[int, ...]:
        return self.placed.shape

    @property
    def tensor(self) -> GgufTensor:
        return self.placed.tensor

    def format(self) -> str:
        kind = BLOCK_KINDS.get(self.tensor.kind.name)
        if kind is None or self._order is None:
            return ""
        return kind.format if self._representable else ""

    @property
    def scale_dtype(self) -> torch.dtype:
        return BLOCK_KINDS[self.tensor.kind.name].scale_dtype

    def nearest(self) -> str:
        return "" if self.tensor.kind.name in PLAIN else NEAREST

    def contents(self) -> Iterator[torch.Tensor]:
        order = self._order
        if order is None or order[1]:
            yield self.placed.values().to(self.dtype)
            return
        rows = self.rows(False)
        step = max(1, PIECE_NBYTES // (4 * self.shape[1]))
        for n in range(0, self.shape[0], step):
            yield rows(n, n + step).to(self.dtype)

    def rows(self, transposed: bool) -> Any:
        order = self._order
        if order is None or order[1] != transposed:
            whole = self.placed.values()
            matrix = whole.t() if transposed else whole
            return lambda lower, upper: matrix[lower:upper].contiguous()
        from gguf import dequantize

        return lambda lower, upper: torch.from_numpy(
            dequantize(self._blocks(order[0][lower:upper]), self.tensor.kind))

    def repacked(self, scale_dtype: torch.dtype | None = None) -> Any:
        order = self._order
        assert order is not None
        kind = BLOCK_KINDS[self.tensor.kind.name]
        return lambda lower, upper: repack(self._blocks(order[0][lower:upper]), kind)

    def _blocks(self, order: np.ndarray) -> np.ndarray:
        """The bytes of those rows of the file [rows, bytes of a row], none of whose pages stay in the page cache."""
        width = self.tensor.nbytes // self.tensor.shape[0]
        out = np.empty((len(order), width), np.uint8)
        ends = np.flatnonzero(np.diff(np.append(order, -1)) != 1) + 1  # of runs that lie in a row
        with naming(self.tensor.path), open_input(self.tensor.path, buffering=0) as file:
            for begin, end in zip((0, *ends), ends, strict=False):
                at, nbytes = self.tensor.offset + int(order[begin]) * width, int(end - begin) * width
                found = read_whole(file.fileno(), nbytes, at)
                if len(found) < nbytes:
                    raise CheckpointError(f"{self.tensor.path} is truncated: it ends inside {self.tensor.name}")
                out[begin:end] = np.frombuffer(found, np.uint8).reshape(-1, width)
            os.posix_fadvise(file.fileno(), self.tensor.offset, self.tensor.nbytes, os.POSIX_FADV_DONTNEED)
        return out

    @cached_property
    def _order(self) -> tuple[np.ndarray, bool] | None:
        """Which row of the file each row of outputs is, and whether the model has the matrix transposed; None where
        the file's rows are not the model's in some order. Found by ordering a numbered matrix."""
        if len(self.tensor.shape) != 2 or len(self.shape) != 2:
            return None
        count = self.tensor.shape[0]
        numbered = np.arange(count, dtype=np.int64)[:, None] * 2 + np.arange(2)
        try:
            with np.errstate(invalid="ignore", divide="ignore"):
                made = self.placed.changed(numbered)
        except ValueError:  # it counts on the real number of columns
            return None
        if made.dtype != numbered.dtype:
            return None
        for transposed, found in ((False, made), (True, made.T)):
            if found.shape != numbered.shape or (count == 2 and transposed):
                continue
            order = found[:, 0] // 2
            if np.array_equal(numbered[order], found):
                return order, transposed
        return None

    @cached_property
    def _representable(self) -> bool:
        """Whether scales and lows, products of the file's, are finite in the rows' dtype: reads the tensor."""
        kind, count = BLOCK_KINDS[self.tensor.kind.name], self.tensor.shape[0]
        step = max(1, PIECE_NBYTES // (4 * self.tensor.shape[1]))
        return all(representable(self._blocks(np.arange(n, min(n + step, count))), kind)
                   for n in range(0, count, step))


@dataclass(frozen=True)
class TurnedExperts(StackedTensor):
    """Matrices of experts that the model has transposed, or in which rows of gates and of values alternate."""

    placed: PlacedParts

    def contents(self) -> Iterator[torch.Tensor]:
        return (self.placed.matrix(pieces).to(self.dtype) for pieces in self.placed.matrices)

    def rows(self, transposed: bool) -> ReadRows:
        if not transposed:
            raise CheckpointError(f"{self.name} is a matrix that the model does not have transposed, which is not read")
        return super().rows(False)

    def _joined(self, open_piece: Callable[[SourceTensor], ReadRows]) -> ReadRows:
        """Rows of outputs, those of one expert after the other."""
        outputs = self.shape[2]
        count = len(self.pieces) // self.shape[0]

        def read(lower: int, upper: int) -> torch.Tensor:
            found = []
            while lower < upper:
                expert, first = divmod(lower, outputs)
                last = min(first + upper - lower, outputs)
                found.append(some([open_piece(each) for each in self.pieces[expert * count : (expert + 1) * count]],
                                  first, last))
                lower += last - first
            return torch.cat(found)

        def some(pieces: list[ReadRows], first: int, last: int) -> torch.Tensor:
            if self.placed.woven:
                lower, upper = first // count, -(-last // count)
                rows = torch.stack([piece(lower, upper) for piece in pieces], 1).flatten(0, 1)
                return rows[first - lower * count : last - lower * count]
            each = outputs // count
            parts = [piece(max(0, first - n * each), min(each, last - n * each)) for n, piece in enumerate(pieces)
                     if first < (n + 1) * each and last > n * each]
            return torch.cat(parts)

        return read
