"""Bytes of packed rows; their layout is in `packing`. Without torch, so that plans and costs count them anywhere."""

from __future__ import annotations

BITS = (4, 8)
# Bytes that rows are padded to: 16 keep every row of a weight at an address that 128-bit loads take.
WEIGHT_ALIGN = 16
CACHE_ALIGN = 4
# Elements of a group that products read packed: PAIRED_GROUP two at a time, else multiples of GROUP_STEP.
PAIRED_GROUP, GROUP_STEP, MOST_IN_GROUP = 16, 32, 512


def group_count(size: int, group_size: int) -> int:
    """Groups of group_size that size elements fill; the last may be partial."""
    return -(-size // group_size)


def codes_nbytes(size: int, bits: int, group_size: int) -> int:
    """Bytes of the codes of size elements, whole groups."""
    return group_count(size, group_size) * group_size * bits // 8


def row_nbytes(k: int, bits: int, group_size: int, align: int = WEIGHT_ALIGN, symmetric: bool = False) -> int:
    """R: bytes of one packed row of k elements, with a scale and, unless symmetric, a low for each group."""
    check_format("packing", bits, group_size)
    used = codes_nbytes(k, bits, group_size) + (2 if symmetric else 4) * group_count(k, group_size)
    return -(-used // align) * align


def product_refusal(in_features: int, group_size: int) -> str:
    """Return why no product with a weight reads its rows packed; "" where products do.

    `forebay quantize` writes no other rows, and plans leave other rows to be unpacked before they are multiplied.

    Args:
        in_features: Elements of a row.
        group_size: Elements that share a scale.
    """
    if group_size != PAIRED_GROUP and (group_size % GROUP_STEP or not GROUP_STEP <= group_size <= MOST_IN_GROUP):
        return (f"group_size must be {PAIRED_GROUP} or a multiple of {GROUP_STEP} up to {MOST_IN_GROUP}, "
                f"got {group_size}")
    if group_size == PAIRED_GROUP and in_features % (2 * PAIRED_GROUP):
        return f"in_features must be a multiple of {2 * PAIRED_GROUP} for groups of {PAIRED_GROUP}, got {in_features}"
    return ""


def equal_group_size(size: int, parts: int) -> int:
    """Elements per group where size elements fall into equal parts, rounded up to fours."""
    return 4 * group_count(max(1, size), 4 * max(1, parts))


def cache_group_size(head_dim: int, bits: int) -> int:
    """Elements per group of a quantized cache row: of 8 bits 64 at most, of 4 bits round(head_dim / 32) groups.

    At 4 bits a group of 32 loses 0.7 times what one of 64 does (see `kv_append_q`), for 2 bytes more in 16.
    """
    return equal_group_size(head_dim, group_count(head_dim, 64) if bits == 8 else (head_dim + 15) // 32)


def cache_row_nbytes(head_dim: int, bits: int) -> int:
    """Bytes of one position of one KV head in a quantized cache: kv4 at 64 takes 40, kv8 takes 68."""
    return row_nbytes(head_dim, bits, cache_group_size(head_dim, bits), CACHE_ALIGN)


def check_format(op: str, bits: int, group_size: int) -> None:
    """ValueError, opened by op, unless bits is 4 or 8 and group_size is even and positive."""
    if bits not in BITS:
        raise ValueError(f"{op}: bits must be 4 or 8, got {bits}")
    if group_size < 2 or group_size % 2:
        raise ValueError(f"{op}: group_size must be even and positive, got {group_size}")
