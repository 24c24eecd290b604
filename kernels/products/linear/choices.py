"""Names and transient memory of GPU matmuls, for plans; needs neither Triton nor a GPU."""

from __future__ import annotations

import torch

from forebay.kernels.attention.decode_attention import decode_shares
from forebay.kernels.formats.table import packed_format
from forebay.kernels.operator import Product
from forebay.kernels.products.linear import raw_layout, selection

# Products that Triton's kernels take; torch multiplies the rest ("aten").
HALVES = ("float16", "bfloat16")
GROUP_SIZES = (16, 32, 64, 128)


def _kind(weight: str) -> tuple[str, int]:
    """(kind of selection, group size) of a weight's dtype, or of its packed rows ("w4g64")."""
    stored = packed_format(weight)
    if stored is None:
        return "linear", 0
    return selection.KIND_OF_BITS[stored.bits], stored.group_size


def coded(m: int, group_size: int, codebook: str) -> str:
    """The implementation of a product with codes of a codebook: over codes as they are, or torch's of numbers that are
    written and read once more in 16 bits. No table names it: those bytes are four times the codes' own."""
    few = selection.serves(selection.RAW, m) and m <= raw_layout.most_rows(group_size, codebook)
    return selection.RAW if few and raw_layout.serves(group_size, codebook) else selection.ATEN


def choose(product: Product, device_name: str, activations: str = "bfloat16") -> str:
    """The implementation of a product on a GPU of that name, in full, from its measured table, or where it has none the
    default one; `activations` is the dtype of what meets packed weights."""
    weight, m, n, k = product
    kind, group_size = _kind(weight)
    stored = packed_format(weight)
    own = group_size in (0, *GROUP_SIZES)
    if (weight if kind == "linear" else activations) not in HALVES:
        return selection.ATEN
    if stored is not None and stored.codebook:
        name = coded(m, stored.group_size, stored.codebook)
        return selection.explicit(kind, name, m, n, k, decode_shares.processors())
    if not own:
        return selection.ATEN
    name = selection.choose(kind, m, n, k, selection.table_of(device_name))
    if stored is not None and name.startswith(selection.RAW) and not raw_layout.serves(group_size):
        name = selection.choose(kind, m, n, k)  # tables hold for groups of 128
    return selection.explicit(kind, name, m, n, k, decode_shares.processors())


# What torch gives cuBLAS on an H100 or H200, where it cannot be asked; once per stream, and it keeps it.
CUBLAS_NBYTES = 32 << 20


def cublas_nbytes() -> int:
    """Bytes of the workspace that torch's products on a GPU take once and keep."""
    ask = getattr(torch.backends.cuda, "cublas_workspace_size", None)
    return ask() if ask is not None and torch.cuda.is_available() else CUBLAS_NBYTES


# Packed weights are dequantized for torch's product by row tiles of so many bytes at most: Llama-3-8B's in one or two.
DEQUANTISED_NBYTES = 128 << 20
HALF_NBYTES = 2  # of an element of x
ALIGNED_ROWS = 64  # of which tiles of many rows are multiples


def dequantized_rows(n: int, k: int, itemsize: int = HALF_NBYTES) -> int:
    """Rows of packed weights [n, k] that are dequantized at a time, to elements of `itemsize` bytes, for torch's
    product: multiples of ALIGNED_ROWS where they are many, as columns of a result that begin elsewhere take cuBLAS 2 to
    3 times as long."""
    most = max(1, min(n, DEQUANTISED_NBYTES // (itemsize * max(1, k))))
    return most if most == n or most < ALIGNED_ROWS else most // ALIGNED_ROWS * ALIGNED_ROWS


def transient_nbytes(impl: str, product: Product, itemsize: int = HALF_NBYTES) -> int:
    """Bytes that torch's product takes and gives back: it may make its result apart, and again with what follows it;
    cuBLAS's workspace is not among them. `itemsize` is that of what meets packed weights."""
    weight, m, n, k = product
    if impl != selection.ATEN:
        return 0
    if packed_format(weight) is not None:
        return 2 * m * dequantized_rows(n, k, itemsize) * itemsize
    return 2 * m * n * getattr(torch, weight).itemsize


def workspace_nbytes(
    impl: str, product: Product, itemsize: int = HALF_NBYTES, widths: tuple[int, ...] = ()
) -> int:
    """Bytes that a product takes beside its operands, and torch's beside cuBLAS's workspace. `itemsize` is that of what
    meets packed weights, `widths` are the rows of weights that share the launch."""
    weight, m, n, k = product
    kind, group_size = _kind(weight)
    if impl == selection.ATEN:
        packed = packed_format(weight) is not None
        scratch = dequantized_rows(n, k, itemsize) * k * itemsize if packed else 0
        return scratch + transient_nbytes(impl, product, itemsize)
    split = selection.workspace_nbytes(kind, impl, m, n, k, group_size, decode_shares.processors(), widths)
    return selection.HELD_COUNTERS_NBYTES + split
