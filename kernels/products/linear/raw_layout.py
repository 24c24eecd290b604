"""Memory that products of raw packed codes lay x out in; without Triton, so that a plan counts it anywhere."""

from __future__ import annotations

from typing import NamedTuple

from forebay.kernels.formats.codebooks import CODEBOOKS

TURN = 128  # elements of K that a turn of the kernel's loop takes
GROUP_SIZES = (16, 32, 64, 128)
MOVED = ("e4m3", "e2m1")  # codebooks whose codes become numbers by moving bits; others are looked up
MOST_ROWS = 64  # of x in a tile, each group of a turn by itself


class RawLayout(NamedTuple):
    """x [M, K] in fp16 in the order of a word's parts, a row for each group of a turn, and three sums of each in fp32.

    Attributes:
        m: Rows of x in whole tiles.
        tile_rows: Rows of x in a tile.
        turns: Turns over K.
        each: Groups of a turn.
        is_whole: Whether the groups fill every turn.
    """

    m: int
    tile_rows: int
    turns: int
    each: int
    is_whole: bool

    @property
    def shape(self) -> tuple[int, int]:
        """Elements of a row; rows."""
        return self.turns * TURN, self.m * self.each

    @property
    def ordered_nbytes(self) -> int:
        """Bytes of x alone."""
        width, rows = self.shape
        return 2 * width * rows

    @property
    def nbytes(self) -> int:
        """Bytes of x and the sums."""
        return self.ordered_nbytes + 4 * 3 * self.turns * self.shape[1]


def serves(group_size: int, codebook: str = "") -> bool:
    """Return whether groups fill a turn, and are not too many, of codes that are whole numbers or in a codebook."""
    return group_size in GROUP_SIZES and codebook in CODEBOOKS and (group_size > GROUP_SIZES[0] or codebook != "")


def most_rows(group_size: int, codebook: str) -> int:
    """Rows of x up to which codes of a codebook are multiplied as they are: each tile makes numbers of them anew."""
    tiles = 4 if codebook in MOVED else 2
    return tiles * MOST_ROWS * group_size // TURN


def tile_rows(m: int, group_size: int) -> int:
    """Rows of x in a tile."""
    most = MOST_ROWS * group_size // TURN
    return next((rows for rows in (8, 16, 32) if m <= rows < most), most)


def of(m: int, k: int, group_size: int) -> RawLayout:
    """The layout of x [m, k] for packed rows of so many elements in a group."""
    rows, groups, each = tile_rows(m, group_size), -(-k // group_size), TURN // group_size
    return RawLayout(-(-m // rows) * rows, rows, -(-groups // each), each, groups % each == 0)
