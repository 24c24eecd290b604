"""How decode attention is split over a sequence, and the memory that takes; without Triton, so that plans count it."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from forebay.kernels.formats import row_sizes
from forebay.kernels.products.linear.selection import AMD, HELD_COUNTERS_NBYTES, SM_COUNT


class DecodeTile(NamedTuple):
    """Positions of a tile, warps and pipeline stages."""

    positions: int
    num_warps: int
    num_stages: int


# By bytes of a row of K once dequantized: tiles of K and V in two stages of flight, two programs or more to a
# multiprocessor. Four warps at 256 bytes spill on sm_90 with Triton 3.9; dequantized rows do not, and need less room.
TILES = {"narrow": DecodeTile(64, 4, 3), "typical": DecodeTile(64, 8, 3), "wide": DecodeTile(32, 8, 3),
         "widest": DecodeTile(16, 4, 2)}
# Rows of more than 256 values of 16 bits: latents, which are keys and values, met by 64 rows of scores or fewer, and
# others. Products of 64 rows take their factors from shared memory on Hopper.
TYPICAL_LANES, MOST_DIM = 256, 640
LATENT = {"many": DecodeTile(32, 8, 3), "few": DecodeTile(64, 8, 2)}
AMD_LATENT = {16: DecodeTile(32, 4, 2), 32: DecodeTile(16, 4, 2)}  # by rows of scores; eight warps would spill 271
WIDE = DecodeTile(32, 8, 2)
CHUNK_LANES, CHUNK_POSITIONS = 64, 64  # of a chunk of a packed row (`gpu_wide`), and of shares of such rows
LEAST_POSITIONS = 128  # of a share of such rows: they take about as long as to write and read its results
DEQUANTISED = DecodeTile(64, 4, 3)
# Dequantized to fp32, by lanes: three products take the place of one, and their factors registers.
EXACT = {"typical": DecodeTile(32, 4, 3), "wide": DecodeTile(16, 8, 2)}
# Programs that are made where the sequences are long enough: eight for each multiprocessor even out the last wave.
PROGRAMS_PER_PROCESSOR = 8


class DecodeProduct(NamedTuple):
    """How a program multiplies: rows of the scores, query heads among them, codes as they are (`gpu_codes`), packed
    rows in chunks (`gpu_wide`)."""

    rows: int
    heads: int
    folded: bool
    wide: bool = False


def product(
    head_dim: int, group: int, bits: int, itemsize: int, group_heads: int, amd: bool = AMD, hopper: bool = True
) -> DecodeProduct:
    """The product for queries of itemsize bytes, `group_heads` to a KV head, over rows whose strides are words."""
    heads = _power_of_two(group_heads)
    lanes = lane_count(head_dim, group)
    groups = lanes // lane_width(head_dim, group)
    rows = max(16, groups * heads)
    # Codes that are taken as they are need fewer instructions for 32 rows of scores or less; 64 would spill 589 values.
    chunks = head_dim > 128 and _chunk_lanes(head_dim, group) < lanes <= TYPICAL_LANES
    if chunks and itemsize == 2 and not amd and (bits == 8 or (bits == 4 and rows > 32)):
        # Products of 16 rows take values from registers: kv8 would spill on Hopper.
        rows = 64 if hopper and bits == 8 else 16
        return DecodeProduct(rows, rows, False, True)
    # Rows of codes that are whole words by group, words for both products, registers for 256 lanes of 4 bits.
    # On AMD, without the byte permutations, it would spill up to 124 values of 512 registers.
    if bits and itemsize == 2 and not amd and group * bits % 32 == 0 and 256 <= lanes * bits <= 1024 and rows <= 64:
        return DecodeProduct(rows, max(8, heads) if groups == 1 else rows // groups, True)
    if bits and head_dim > TYPICAL_LANES:  # more rows of scores would spill
        many = hopper and not amd and head_dim <= 576
        rows = 64 if many else 16 if heads <= 16 or amd else 32
        return DecodeProduct(rows, rows, False, True)
    # Before Hopper a product's factor is in registers: 64 rows of more than 256 values would spill.
    rows = min(64 if (hopper and not amd) or head_dim <= TYPICAL_LANES else 32, max(16, heads))
    return DecodeProduct(rows, rows, False)


def tile(lanes: int, itemsize: int, bits: int, folded: bool) -> DecodeTile:
    """The tile for rows of K that take so many lanes of itemsize bytes once dequantized from bits (0: as they are).

    Where folded, each of four warps takes 16 positions.
    """
    row_nbytes = lanes * itemsize
    if not bits and lanes > TYPICAL_LANES:
        return WIDE
    if bits and itemsize == 4:
        return EXACT["wide" if lanes > 64 else "typical"]
    if bits and (folded or row_nbytes <= 256):
        return DEQUANTISED
    sizes = ((128, "narrow"), (256, "typical"), (512, "wide"))
    return TILES[next((name for most, name in sizes if row_nbytes <= most), "widest")]


def most_dim(itemsize: int) -> int:
    """Values of the widest rows that the kernels attend to for queries of itemsize bytes: what their registers hold."""
    return TYPICAL_LANES if itemsize == 4 else MOST_DIM


def lane_count(head_dim: int, group: int) -> int:
    """Lanes over which a row in groups of `group` is spread, each group from a power of two on; 16 at least."""
    return max(16, _power_of_two(group) * _power_of_two(row_sizes.group_count(head_dim, group)))


def lane_width(head_dim: int, group: int) -> int:
    """Lanes from one group to the next; all of them where there is one group."""
    wide = _power_of_two(group)
    return lane_count(head_dim, group) if wide >= head_dim else wide


def _chunk_lanes(head_dim: int, group: int) -> int:
    """Lanes of all chunks of a row, each of CHUNK_LANES or of one wider group."""
    width = _power_of_two(group)
    lanes = max(CHUNK_LANES, width)
    return row_sizes.group_count(head_dim, group * (lanes // width)) * lanes


def _power_of_two(least: int) -> int:
    return 1 << (least - 1).bit_length()


def part_nbytes(group_heads: int, dim: int) -> int:
    """Bytes of one share's partial results."""
    return 4 * group_heads * (dim + 2)


def resident_programs(dim: int, lanes: int, itemsize: int, bits: int, wide: bool = False) -> int:
    """Programs that a multiprocessor holds at once, as the audit counts them on sm_80 and sm_90."""
    if wide:
        return 4 if bits == 4 else 2
    row_nbytes = lanes * itemsize
    if bits and itemsize == 4:
        return 1 if lanes > 64 else 2
    if row_nbytes <= 128 or (bits == 4 and dim == 128):
        return 4 if row_nbytes <= 128 and bits == 4 else 3
    return 2 if row_nbytes <= 256 or bits == 4 else 1


def split_count(
    rows: int, capacity: int, positions: int, part_nbytes: int, position_nbytes: int, processors: int, resident: int = 1
) -> int:
    """Shares per sequence: programs enough for the chip, and partial results of at most 1 / 24 of the cache's bytes and
    shares of four tiles or more; 1 / 8 (they stay in the L2), and two tiles, as long as the programs are no more than
    run at once, `resident` on each multiprocessor; a tile where they are no more than the multiprocessors.

    More than run at once are whole waves of them, where the last wave would take longer than it is full. A share writes
    and reads part_nbytes; a position takes position_nbytes in the cache of one head.
    """
    rows = max(1, rows)
    least = 8 * 2 * part_nbytes // position_nbytes
    shortest, wave = max(4 * positions, 3 * least), resident * processors // rows
    each_once = min(processors // rows, capacity // max(positions, least))
    at_once = min(wave, capacity // max(2 * positions, least))
    most = min(-(-PROGRAMS_PER_PROCESSOR * processors // rows), max(capacity // shortest, each_once, at_once))
    tiles = -(-capacity // positions)

    def turns(splits: int) -> int:
        """Tiles that the longest row of programs reads one after the other; each program takes one more to start."""
        return -(-rows * splits // (resident * processors)) * (-(-tiles // splits) + 1)

    return max(1, min((most // wave * wave, most), key=turns) if 0 < wave < most else most)


class DecodeShape(NamedTuple):
    """Sizes that decide the shares of a launch: `rows` of sequences and KV heads, of `capacity` positions of
    position_nbytes each; query heads of a KV head; values of a row, and the lanes they take once dequantized to
    itemsize bytes from bits (0: as they are)."""

    rows: int
    capacity: int
    position_nbytes: int
    group_heads: int
    dim: int
    lanes: int
    itemsize: int
    bits: int


def share_count(shape: DecodeShape, product: DecodeProduct, processors: int) -> int:
    """Shares of a sequence; of rows of more than 256 values one for each multiprocessor, of 128 positions or more.

    Many heads share such rows, so multiprocessors wait for products rather than memory. More shares then pay, even
    where their results are larger than the rows: results stay in the L2, and all multiprocessors work.
    """
    rows, capacity, position_nbytes, group_heads, dim, lanes, itemsize, bits = shape
    if dim > TYPICAL_LANES:
        each_once = processors // max(1, rows * -(-group_heads // product.heads))
        return max(1, min(each_once, capacity // LEAST_POSITIONS))
    # Chunks have one number of positions here: plans count shares without knowing the GPU's generation.
    positions = CHUNK_POSITIONS if product.wide else tile(lanes, itemsize, bits, product.folded).positions
    resident = resident_programs(dim, lanes, itemsize, bits, product.wide)
    return split_count(
        rows, capacity, positions, part_nbytes(group_heads, dim), position_nbytes, processors, resident)


def counters_nbytes(batch: int, heads: int) -> int:
    """Bytes of the counters by which the last share of some heads to arrive is known."""
    return max(HELD_COUNTERS_NBYTES, 4 * batch * heads)


@functools.cache
def processor_count(device: torch.device) -> int:
    """Multiprocessors of a GPU; SM_COUNT for anything else."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else SM_COUNT


def workspace_nbytes(
    batch: int, heads: int, kv_heads: int, capacity: int, dim: int, itemsize: int, processors: int = SM_COUNT,
    bits: int = 0, group: int = 0,
) -> int:  # fmt: skip
    """Bytes that the shares of `attention` of one query and their counters take beside its arguments, or of
    `attention_q` with bits."""
    rows, group_heads, lanes = batch * kv_heads, heads // kv_heads, lane_count(dim, group or dim)
    row_nbytes = row_sizes.row_nbytes(dim, bits, group, row_sizes.CACHE_ALIGN) if bits else dim * itemsize
    shape = DecodeShape(rows, capacity, 2 * row_nbytes, group_heads, dim, lanes, itemsize, bits)
    splits = share_count(shape, product(dim, group or dim, bits, itemsize, group_heads), processors)
    return counters_nbytes(batch, heads) + rows * splits * part_nbytes(group_heads, dim)


def processors() -> int:
    """Multiprocessors of the GPU here, or of an H200 where there is none."""
    return processor_count(torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu"))
