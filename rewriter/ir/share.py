"""What one of several ranks that run a model together has of it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Literal

Ranges = tuple[tuple[int, int], ...]  # [first, behind the last) of an axis's indices, ascending, none adjacent
WeightCut = tuple[tuple[int, Ranges], ...]  # dimensions of a weight, and the indices of each that a rank has
FeedforwardSharding = Literal["1d", "2d", "x", "xy", "xyz"]
AttentionSharding = Literal["heads", "batch"]


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
    """Rank `rank` of a mesh of `shape`, and how layers lie on it (Pope et al., sections 3.2 and 3.3).

    Of the ranks of a stage the last axis of the mesh varies fastest. `stages` such meshes hold consecutive layers each
    and hand hidden states on; their ranks follow one another. `wide`: axes that split the hidden size of weights, the
    other axes split the feed-forward size.
    """

    shape: tuple[int, ...] = (1,)
    rank: int = 0
    stages: int = 1
    feedforward: FeedforwardSharding = "1d"
    attention: AttentionSharding = "heads"
    wide: tuple[int, ...] = ()

    @property
    def chips(self) -> int:
        """Ranks of a stage."""
        return math.prod(self.shape)

    @property
    def ranks(self) -> int:
        return self.chips * self.stages

    @property
    def stage(self) -> int:
        return self.rank // self.chips

    @property
    def deep(self) -> tuple[int, ...]:
        """The axes that split the feed-forward size."""
        return tuple(i for i, size in enumerate(self.shape) if size > 1 and i not in self.wide)

    @property
    def place(self) -> tuple[int, ...]:
        """The rank's index along each axis of its stage's mesh."""
        return tuple(self.rank % self.chips // math.prod(self.shape[i + 1 :]) % size
                     for i, size in enumerate(self.shape))

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
            found.append(self.stage * self.chips + at)
        return tuple(found)

    @property
    def name(self) -> str:
        """The share in words: what plans and answers of it are known by."""
        how = "" if self.chips == 1 else f" {self.feedforward}, attention over {self.attention}" + (
            f", wide {self.wide}" if self.wide else "")
        stage = f" in stage {self.stage} of {self.stages}" if self.stages > 1 else ""
        return f"rank {self.rank} of {'x'.join(map(str, self.shape))}{stage}{how}"


ALONE = RankShare()


def group_name(ranks: Sequence[int]) -> str:
    """How graphs and Programs name the ranks that take part in a collective."""
    return "ranks:" + ",".join(map(str, ranks))


def ranks_of(name: str) -> tuple[int, ...]:
    """The ranks that `group_name` named."""
    return tuple(map(int, name.removeprefix("ranks:").split(",")))
