"""Parameters as they are quantized whose parts a checkpoint has in several tensors: above all a layer's experts."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from forebay.kernels.formats.table import weight_format
from forebay.rewriter.capture.experts import experts_layout
from forebay.rewriter.checkpoints.expert_tables import WeightPiece
from forebay.rewriter.checkpoints.records import CheckpointError
from forebay.rewriter.checkpoints.source_tensor import ReadRows, SourceTensor
from forebay.rewriter.checkpoints.stored_tensors import spellings


@dataclass(frozen=True)
class StackedTensor:
    """Tensors that lie one after the other in a parameter, [experts, rows, columns] or [rows, ...], in that order."""

    name: str
    shape: tuple[int, ...]
    pieces: tuple[SourceTensor, ...]

    @property
    def dtype(self) -> torch.dtype:
        return self.pieces[0].dtype

    @property
    def scale_dtype(self) -> torch.dtype:
        found = {piece.scale_dtype for piece in self.pieces}
        return found.pop() if len(found) == 1 else torch.bfloat16

    def format(self) -> str:
        """The format of all pieces; "" where they differ."""
        found = {piece.format() for piece in self.pieces}
        return found.pop() if len(found) == 1 else ""

    def nearest(self) -> str:
        """The widest format of any piece."""
        found = {piece.format() or piece.nearest() for piece in self.pieces} - {""}
        return max(found, key=lambda name: (weight_format(name).bits, name), default="")

    def contents(self) -> Iterator[torch.Tensor]:
        return (part for piece in self.pieces for part in piece.contents())

    def rows(self, transposed: bool) -> ReadRows:
        return self._joined(lambda piece: piece.rows(transposed))

    def repacked(self, scale_dtype: torch.dtype | None = None) -> ReadRows:
        kept = scale_dtype or self.scale_dtype
        return self._joined(lambda piece: piece.repacked(kept))

    def _joined(self, open_piece: Callable[[SourceTensor], ReadRows]) -> ReadRows:
        """Rows of all pieces; one piece is open at a time."""
        ends: list[int] = []
        for piece in self.pieces:
            ends.append((ends[-1] if ends else 0) + piece.shape[0])
        opened: list[tuple[int, ReadRows]] = []

        def read(lower: int, upper: int) -> torch.Tensor:
            found = []
            while lower < upper:
                number = bisect.bisect_right(ends, lower)
                first = ends[number] - self.pieces[number].shape[0]
                if not opened or opened[0][0] != number:
                    opened[:] = [(number, open_piece(self.pieces[number]))]
                until = min(upper, ends[number])
                found.append(opened[0][1](lower - first, until - first))
                lower = until
            return found[0] if len(found) == 1 else torch.cat(found)

        return read


def join_pieces(
    model: Any, tensors: Sequence[SourceTensor], prefix: str, rename: Callable[[str], str], where: Any
) -> list[SourceTensor]:
    """The tensors of a checkpoint, those that hold parts of a parameter put together.

    Raises:
        CheckpointError: A tensor is missing, there twice or of another shape.
    """
    found: dict[str, dict[tuple[int, int], SourceTensor]] = {}
    rest: list[SourceTensor] = []
    for tensor in tensors:
        piece = WeightPiece.of(rename(tensor.name))
        if piece is None:
            rest.append(tensor)
            continue
        known = found.setdefault(piece.parameter, {})
        if (piece.expert, piece.number) in known:
            raise CheckpointError(f"{where}: {tensor.name} is stored twice; take the wrong one out of the checkpoint")
        known[piece.expert, piece.number] = tensor
    stacks = {f"{name}.{own}" for name, module in model.named_modules() if experts_layout(module)
              for own, _ in module.named_parameters(recurse=False)}
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    for parameter, pieces in found.items():
        name = next((n for n in spellings(parameter, prefix) if n in shapes), None)
        if name is None:
            rest += pieces.values()
        else:
            rest.append(_stacked(name, shapes[name], name in stacks, pieces, where))
    return rest


def _stacked(
    name: str, shape: tuple[int, ...], of_experts: bool, pieces: dict[tuple[int, int], SourceTensor], where: Any
) -> StackedTensor:
    count, rows, *columns = shape if of_experts else (1, *shape)
    ordered = tuple(pieces[at] for at in sorted(pieces))
    for expert in range(count):
        own = [tensor.shape for (of, _), tensor in pieces.items() if of == expert]
        if sum(each[0] for each in own) != rows or any([*each[1:]] != columns for each in own):
            raise CheckpointError(f"{where}: expert {expert} of {name} has {', '.join(map(str, own)) or 'no tensor'}, "
                                  f"where the model has {[rows, *columns]}")
    if max(pieces)[0] >= count:
        raise CheckpointError(f"{where}: {ordered[-1].name} is of expert {max(pieces)[0]}; the model has {count}")
    odd = next((tensor for tensor in ordered if tensor.dtype != ordered[0].dtype), None)
    if odd is not None:
        raise CheckpointError(f"{where}: {odd.name} is {odd.dtype}, other experts are {ordered[0].dtype}")
    return StackedTensor(name, shape, ordered)
