"""The formats of a model's matrices that lose least within a number of bits for each value."""

from __future__ import annotations

import hashlib
import math
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from forebay.kernels.formats.row_sizes import product_refusal
from forebay.kernels.formats.table import Format
from forebay.rewriter.checkpoints.matrices import Matrix
from forebay.rewriter.checkpoints.quantize_source import QuantizeSource
from forebay.rewriter.checkpoints.records import CheckpointError, parse_format
from forebay.rewriter.checkpoints.rounding import fitting_scale_dtype, round_rows
from forebay.rewriter.checkpoints.sensitivity import measure_sensitivity
from forebay.rewriter.checkpoints.source_tensor import SourceTensor

# Matmuls of each read integers. Groups of other sizes lose the speed of powers of two.
CANDIDATES = (*(f"w4g{size}{end}" for size in (32, 64, 128, 256) for end in ("", "s")), "w8g64", "w8")
WINDOW, WINDOWS = 256, 4  # tokens on which sensitivity is measured
GAP = 1e-4  # the solver may stop this close to the least loss


@dataclass(frozen=True)
class Mixture:
    """Formats that are chosen matrix by matrix.

    Attributes:
        bits: For each value of the matrices, with scales, lows and padding.
        text: The text on which sensitivity is measured.
        tokenize: Gives the token ids [T] of a text by the tokenizer in a folder.
    """

    bits: float
    text: str
    tokenize: Callable[[Path, str], torch.Tensor]

    @property
    def settings(self) -> dict[str, Any]:
        """Settings on which the chosen formats depend, as JSON."""
        return {"bits": self.bits, "text": hashlib.sha256(self.text.encode()).hexdigest()}


class FormatCost(NamedTuple):
    """One format of a matrix: bytes of all its rows, and the loss that it adds."""

    format: str
    nbytes: int
    loss: float


def choose_mixture(
    source: QuantizeSource, matrices: Mapping[str, Matrix], names: Sequence[str], mixture: Mixture, rounding: str
) -> dict[str, str]:
    """The formats of the tensors of these names that add the least loss within `mixture.bits`.

    Raises:
        CheckpointError: The text is too short, the bits are too few, or the model cannot be run.
    """
    if not 0 < mixture.bits < math.inf:
        raise CheckpointError(f"{mixture.bits:g} bits for each value are no number of bits; name one such as 4.5")
    tensors = {source.names[t.name]: t for t in source.tensors if t.name in names}
    wanted = {name: matrices[name] for name in tensors}
    alike = {matrix.joined or (name,): [tensors[each] for each in matrix.joined or (name,)]
             for name, matrix in wanted.items()}  # of one product
    found = {names: _Losses(own, wanted[names[0]], rounding) for names, own in alike.items()}
    losses = {name: each for names, each in found.items() for name in names}
    measure_sensitivity(source, wanted, _windows(source, mixture), lambda name, *each: losses[name].add(*each))
    candidates = [each.candidates() for each in found.values()]
    values = sum(math.prod(tensor.shape) for tensor in tensors.values())
    least = sum(min(each.nbytes for each in own) for own in candidates)
    if least * 8 > mixture.bits * values:
        raise CheckpointError(f"{mixture.bits:g} bits for each value are too few: the smallest formats take "
                              f"{math.ceil(least * 8000 / values) / 1000:g}, with scales and padding")
    chosen = solve_mixture(candidates, int(mixture.bits * values / 8))
    return {tensor.name: candidate.format for own, candidate in zip(alike.values(), chosen, strict=True)
            for tensor in own}


def solve_mixture(candidates: Sequence[Sequence[FormatCost]], nbytes: int) -> list[FormatCost]:
    """One candidate of each matrix, within `nbytes`, whose losses add up to the least: a mixed-integer program (HiGHS).
    """
    from scipy.optimize import Bounds, LinearConstraint, milp  # half a second, of which no start has need
    from scipy.sparse import csr_array

    every = [each for own in candidates for each in own]
    owner = np.repeat(np.arange(len(candidates)), [len(own) for own in candidates])
    one_each = csr_array((np.ones(len(every)), (owner, np.arange(len(every)))))
    losses = np.array([each.loss for each in every])
    sizes = np.array([each.nbytes for each in every], dtype=float)
    found = milp(losses / max(losses.max(), 1e-300), integrality=np.ones(len(every)), bounds=Bounds(0, 1),
                 constraints=[LinearConstraint(one_each, 1, 1), LinearConstraint(sizes[None] / nbytes, -np.inf, 1.0)],
                 options={"mip_rel_gap": GAP})
    if found.x is None:
        raise CheckpointError(f"no formats of {len(candidates)} matrices fit {nbytes} bytes: {found.message}")
    return [each for each, taken in zip(every, found.x, strict=True) if taken > 0.5]


def _windows(source: QuantizeSource, mixture: Mixture) -> torch.Tensor:
    """Token ids [W, T] of the text, by the model's own tokenizer."""
    with tempfile.TemporaryDirectory() as folder:
        source.prepare(Path(folder))
        ids = mixture.tokenize(Path(folder), mixture.text)[: WINDOW * WINDOWS]
    if ids.numel() < 2:
        raise CheckpointError(f"the text that sensitivity is measured on has {ids.numel()} token(s); it needs "
                              f"{WINDOW * WINDOWS} for a good measure")
    return ids.view(-1, WINDOW) if ids.numel() == WINDOW * WINDOWS else ids[None]


class _Losses:
    """The loss that each format of a matrix adds."""

    def __init__(self, tensors: Sequence[SourceTensor], matrix: Matrix, rounding: str) -> None:
        self.inputs = matrix.inputs(tensors[0].shape)
        self.outputs = sum(math.prod(each.shape) for each in tensors) // max(1, self.inputs)
        exact = {each.format() for each in tensors}
        self.rounding, self.exact = rounding, exact.pop() if len(exact) == 1 else ""
        wanted = [parse_format(name) for name in dict.fromkeys((*CANDIDATES, *filter(None, [self.exact])))]
        self.formats = [f for f in wanted if not product_refusal(self.inputs, f.group_size)
                        and (rounding != "symmetric" or f.symmetric or f.name == self.exact)]
        self.losses = dict.fromkeys((f.name for f in self.formats), 0.0)

    def add(self, values: torch.Tensor, weights: torch.Tensor) -> None:
        """Count what formats make of some rows; `weights` are F of their values."""
        scale_dtype = fitting_scale_dtype(float(values.abs().max()))
        for stored in self.formats:
            if stored.name != self.exact:
                change = round_rows(values, stored, self.rounding, scale_dtype) - values
                self.losses[stored.name] += float((change.square_() * weights).sum(dtype=torch.float64)) / 2

    def candidates(self) -> list[FormatCost]:
        """Return the formats to which no other is both better and smaller."""
        found: list[FormatCost] = []
        for each in sorted((self._candidate(f) for f in self.formats), key=lambda c: (c.nbytes, c.loss)):
            if not found or each.loss < found[-1].loss:
                found.append(each)
        return found

    def _candidate(self, stored: Format) -> FormatCost:
        return FormatCost(stored.name, self.outputs * stored.row_nbytes(self.inputs, 1), self.losses[stored.name])
