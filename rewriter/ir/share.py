"""One rank's share of a model that several ranks run together."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Literal

Dimensions = Literal["1d", "2d"]  # weight-stationary layouts (docs/partitioning.md)
Attended = Literal["heads", "batch"]  # what ranks divide of attention
Ranges = tuple[tuple[int, int], ...]  # [first, behind the last) of an axis's indices, ascending, none adjacent
WeightCut = tuple[tuple[int, Ranges], ...]  # dimensions of a weight, and the indices of each that a rank has


def ranges(pieces: Iterable[tuple[int, int]]) -> Ranges:
    """Pieces of an axis in order, those that meet put together."""
    found: list[tuple[int, int]] = []
    for first, end in sorted(piece for piece in pieces if piece[0] < piece[1]):
        if found and first <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((first, end))
    return tuple(found)


def count(held: Ranges) -> int:
    """Indices in them."""
    return sum(end - first for first, end in held)


def even_part(size: int, parts: int, index: int, unit: int = 1) -> Ranges:
    """Part `index` of an axis of `size` in whole `unit`s: parts differ by a unit at most, the first ones are larger."""
    units = -(-size // unit)
    first, end = (unit * (i * (units // parts) + min(i, units % parts)) for i in (index, index + 1))
    return ranges([(first, min(size, end))])


@dataclass(frozen=True)
class RankShare:
    """Rank `rank` of `stages` meshes of `shape`, of whose axes the last varies fastest. Each stage computes some of
    the layers, one after the other. Its mesh divides the features between two products of a layer, and attention's
    heads, over all axes (Pope et al., section 3.2.1); in the layout 2d the last axis divides the hidden size too, and
    what is between two products is whole along it while they compute (section 3.2.2). With `attention` over the batch
    each rank attends with all heads for as many sequences of its own, whose cache it has (section 3.3). Along the
    `gathered` axes prefills gather weights in place of activations (section 3.2.3): their ranks compute other
    sequences, as `prefilling` says, along the axes that are not `beyond` it. `chunks`: in how many parts products are
    made whose sums ranks add up, in steps over several tokens and over one, so that one part is exchanged beside the
    product of the next (section 3.5); one divides the other, and both have the weights in as many `pieces` as the
    larger says. `gather_chunks`: in how many parts, likewise, what is between two products is gathered along the wide
    axis, so that one comes beside the product of the one before; sums of these products are then exchanged at once.
    `gather_buffers`: memory for weights that are gathered ahead, in times of those read at once; None: as it pays."""

    shape: tuple[int, ...]
    rank: int
    stages: int = 1
    layout: Dimensions = "1d"
    attention: Attended = "heads"
    gathered: tuple[int, ...] = ()
    beyond: tuple[int, ...] = ()
    chunks: tuple[int, int] = (1, 1)
    gather_chunks: tuple[int, int] = (1, 1)
    gather_buffers: int | None = None

    @property
    def pieces(self) -> int:
        """Pieces of each weight whose matmul is exchanged in parts."""
        return max(self.chunks)

    @property
    def gather_pieces(self) -> int:
        """Pieces of each weight whose matmul's input is gathered in parts."""
        return max(self.gather_chunks)

    @property
    def ranks(self) -> int:
        """The ranks of all stages."""
        return self.stages * self.beside

    @property
    def beside(self) -> int:
        """Ranks that share a stage."""
        return math.prod(self.shape)

    @property
    def stage(self) -> int:
        return self.rank // self.beside

    @property
    def axes(self) -> tuple[int, ...]:
        """The axes along which more than one rank that computes with this one."""
        return tuple(i for i, size in enumerate(self.shape) if size > 1 and i not in self.beyond)

    @property
    def wide(self) -> tuple[int, ...]:
        """The axis along which ranks divide the hidden size; none in one dimension."""
        return () if self.layout == "1d" else self.axes[-1:]

    @property
    def deep(self) -> tuple[int, ...]:
        """The axes along which ranks divide what is between two products while they compute."""
        return tuple(i for i in self.axes if i not in self.wide)

    @property
    def peers(self) -> tuple[RankShare, ...]:
        """The ranks along the wide axis, by their places, this one among them; this one alone where there is none."""
        return tuple(replace(self, rank=rank) for rank in self.group(self.wide))

    @property
    def all(self) -> tuple[RankShare, ...]:
        """The ranks of its stage, this one among them."""
        return tuple(replace(self, rank=rank) for rank in self.group(self.axes))

    @property
    def place(self) -> tuple[int, ...]:
        """The rank's index along each axis."""
        return tuple(self.rank // math.prod(self.shape[i + 1 :]) % size for i, size in enumerate(self.shape))

    def at_stage(self, stage: int) -> int:
        """The rank of another stage that has the same place in it."""
        return self.rank + (stage - self.stage) * self.beside

    def size(self, axes: Sequence[int]) -> int:
        """Ranks along these axes together."""
        return math.prod(self.shape[i] for i in axes)

    def index(self, axes: Sequence[int]) -> int:
        """The rank's place among those along these axes, of which the last varies fastest."""
        at = 0
        for i in axes:
            at = at * self.shape[i] + self.place[i]
        return at

    def group(self, axes: Sequence[int]) -> tuple[int, ...]:
        """The ranks along these axes that this one exchanges with, by their `index`."""
        found = []
        for steps in product(*(range(self.shape[i]) for i in axes)):
            place = list(self.place)
            for i, at in zip(axes, steps, strict=True):
                place[i] = at
            at = 0
            for i, size in enumerate(self.shape):
                at = at * size + place[i]
            found.append(self.stage * self.beside + at)
        return tuple(found)

    @property
    def sharers(self) -> int:
        """Ranks among which the sequences of a step are divided: in equal parts, by their numbers in the stage."""
        return self.size(self.axes) if self.attention == "batch" else 1

    @property
    def prefilling(self) -> RankShare:
        """The rank's role in the layers of a prefill whose weights are gathered."""
        return replace(self, layout="1d", gathered=(), beyond=self.gathered)

    @property
    def name(self) -> str:
        """The share in words: what plans and answers of it are known by."""
        return f"rank {self.rank} of {self.mesh}"

    @property
    def mesh(self) -> str:
        """The mesh and its layout as they are asked for."""
        tensor = "x".join(map(str, self.shape))
        layout = self.layout if not self.gathered else "xyz" if len(self.gathered) == len(self.axes) else (
            "x" if len(self.gathered) == 1 else "xy")
        chunks, gathers = ("/".join(map(str, dict.fromkeys(each))) for each in (self.chunks, self.gather_chunks))
        said = {"stages": self.stages, "tensor": tensor, "layout": layout, "attention": self.attention,
                "chunks": chunks, "gather_chunks": gathers, "gather_buffers": self.gather_buffers}
        typical = {"stages": 1, "layout": "1d", "attention": "heads", "chunks": "1", "gather_chunks": "1",
                 "gather_buffers": None}
        told = [f"{name}={value}" for name, value in said.items() if value != typical.get(name)]
        return tensor if len(told) == 1 else ",".join(told)


def group_name(ranks: Sequence[int]) -> str:
    """Return how graphs and Programs name the ranks that take part in a collective."""
    return "ranks:" + ",".join(map(str, ranks))


def ranks_of(name: str) -> tuple[int, ...]:
    """The ranks that `group_name` named."""
    return tuple(map(int, name.removeprefix("ranks:").split(",")))
