"""The layout of a paged K/V cache: one description that attention, K/V from activations, and copies of blocks share.

A block holds `tokens` consecutive positions of one sequence, all KV heads, as one contiguous record of bytes; a pool is
uint8 [blocks, record]; a block table int32 [B, M] names the block of positions m * tokens .. (m + 1) * tokens - 1 of
each sequence, and slot = block * tokens + position within the block. A record is [K and V][KV head][part], a part being

    native          tokens rows of head_dim values of `dtype`
    block8, block4  tokens rows of packed codes (the last group of a row padded with codes 0), then [tokens, groups, 2]
                    pairs (scale, low) of `dtype`

Groups of `group_size` values along head_dim share a pair; codes and ranges are those of `forebay::quantize`. Codes and
pairs lie apart so that rows of codes keep addresses that 128-bit loads take, and a pair is read by one 32-bit load.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from forebay.kernels.formats import packing, row_sizes
from forebay.kernels.formats.table import BLOCK_FORMATS
from forebay.kernels.quantization.quantize import reference as quantize

BLOCK_TOKENS = (16, 32, 64)


@dataclass(frozen=True)
class BlockLayout:
    """Sizes of one block; `dtype` is that of native values and of scale and low, group_size 0 the format's usual."""

    tokens: int
    kv_heads: int
    head_dim: int
    format: str
    dtype: torch.dtype
    group_size: int = 0

    @property
    def bits(self) -> int:
        """Bits of a code; 0 for native values."""
        return BLOCK_FORMATS[self.format].bits

    @property
    def group(self) -> int:
        """Values of one row that share scale and low; head_dim for native values."""
        if not self.bits:
            return self.head_dim
        return self.group_size or BLOCK_FORMATS[self.format].group_of(self.head_dim)

    @property
    def groups(self) -> int:
        """Groups of one row."""
        return row_sizes.group_count(self.head_dim, self.group)

    @property
    def row_nbytes(self) -> int:
        """Bytes of one position of one head, of K or of V, without scale and low."""
        if not self.bits:
            return self.head_dim * self.dtype.itemsize
        return row_sizes.codes_nbytes(self.head_dim, self.bits, self.group)

    @property
    def codes_nbytes(self) -> int:
        """Bytes of a part before its pairs."""
        return self.tokens * self.row_nbytes

    @property
    def part_nbytes(self) -> int:
        """Bytes of one head's K, or V, in a block."""
        return self.codes_nbytes + (4 * self.tokens * self.groups if self.bits else 0)

    @property
    def position_nbytes(self) -> int:
        """Bytes of K and V of one position of one head."""
        return 2 * self.part_nbytes // self.tokens

    @property
    def record_nbytes(self) -> int:
        """Bytes of a block: a multiple of 16."""
        return 2 * self.kv_heads * self.part_nbytes


def check_layout(op: str, layout: BlockLayout) -> None:
    """ValueError, opened by op, that names the field which no kernel can serve."""
    if layout.tokens not in BLOCK_TOKENS:
        raise ValueError(f"{op}: block_tokens must be one of {BLOCK_TOKENS}, got {layout.tokens}")
    if layout.kv_heads < 1:
        raise ValueError(f"{op}: kv_heads must be positive, got {layout.kv_heads}")
    if not 1 <= layout.head_dim <= 256:
        raise ValueError(f"{op}: head_dim must be 1 .. 256, got {layout.head_dim}")
    if layout.format not in BLOCK_FORMATS:
        raise ValueError(f"{op}: format must be one of {tuple(BLOCK_FORMATS)}, got {layout.format!r}")
    if layout.dtype not in packing.SCALE_DTYPES:
        raise ValueError(f"{op}: dtype must be fp16 or bf16, got {layout.dtype}")
    if layout.bits and (layout.group < 2 or layout.group % 2):
        raise ValueError(f"{op}: group_size must be even and positive, or 0, got {layout.group_size}")
    if layout.record_nbytes % 16:
        raise ValueError(f"{op}: head_dim {layout.head_dim} makes records that are no multiple of 16 bytes")


def check_pool(op: str, pool: Tensor, layout: BlockLayout) -> None:
    """ValueError, opened by op, unless pool is uint8 [blocks, record] of this layout, aligned to 16 bytes."""
    check_layout(op, layout)
    if pool.dtype != torch.uint8 or pool.dim() != 2 or pool.shape[1] != layout.record_nbytes:
        raise ValueError(
            f"{op}: pool must be uint8 [blocks, {layout.record_nbytes}], got {pool.dtype} {tuple(pool.shape)}"
        )
    if pool.numel() and (pool.stride(1) != 1 or pool.stride(0) % 16 or pool.stride(0) < pool.shape[1]):
        raise ValueError(f"{op}: pool must have contiguous records at multiples of 16 bytes, got {pool.stride()}")


def check_table(op: str, table: Tensor, batch: int, device: torch.device) -> None:
    """ValueError, opened by op, unless table is int32 [batch, M] with contiguous rows on this device."""
    if table.dtype != torch.int32 or table.dim() != 2 or table.shape[0] != batch:
        raise ValueError(f"{op}: table must be int32 [{batch}, M], got {table.dtype} {tuple(table.shape)}")
    if table.shape[1] > 1 and table.stride(1) != 1:
        raise ValueError(f"{op}: table must have contiguous rows, got strides {table.stride()}")
    if table.device != device:
        raise ValueError(f"{op}: table must be on {device}, got {table.device}")


def check_used_blocks(op: str, pool: Tensor, table: Tensor, lengths: Tensor, layout: BlockLayout) -> None:
    """ValueError, opened by op, where a length exceeds its row of the table or a used entry names no block.

    Reads the values: for tensors on the CPU only.
    """
    most = table.shape[1] * layout.tokens
    if lengths.numel() and (int(lengths.min()) < 0 or int(lengths.max()) > most):
        raise ValueError(f"{op}: lengths must lie in 0 .. {most}, got {lengths.tolist()}")
    used = torch.arange(table.shape[1])[None, :] * layout.tokens < lengths[:, None]
    if bool((used & ((table < 0) | (table >= pool.shape[0]))).any()):
        raise ValueError(f"{op}: table must name blocks 0 .. {pool.shape[0] - 1} wherever positions are used")


def allocate(layout: BlockLayout, blocks: int, device: torch.device | str = "cpu") -> Tensor:
    """An uninitialised pool uint8 [blocks, record] of a checked layout."""
    check_layout("paged", layout)
    return torch.empty(blocks, layout.record_nbytes, dtype=torch.uint8, device=device)


def values(pool: Tensor, layout: BlockLayout) -> Tensor:
    """Native values [blocks, 2, Hkv, tokens, D] as a view of the pool."""
    return pool.view(layout.dtype).unflatten(1, (2, layout.kv_heads, layout.tokens, layout.head_dim))


def codes(pool: Tensor, layout: BlockLayout) -> Tensor:
    """Packed codes uint8 [blocks, 2, Hkv, tokens, row] as a view of the pool."""
    parts = pool.unflatten(1, (2, layout.kv_heads, layout.part_nbytes))
    return parts[..., : layout.codes_nbytes].unflatten(-1, (layout.tokens, layout.row_nbytes))


def pairs(pool: Tensor, layout: BlockLayout) -> tuple[Tensor, Tensor]:
    """(scale, low) [blocks, 2, Hkv, tokens, groups] as views of the pool."""
    parts = pool.unflatten(1, (2, layout.kv_heads, layout.part_nbytes))
    both = parts[..., layout.codes_nbytes :].view(layout.dtype).unflatten(-1, (layout.tokens, layout.groups, 2))
    return both[..., 0], both[..., 1]


def write(pool: Tensor, layout: BlockLayout, slots: Tensor, k: Tensor, v: Tensor) -> None:
    """Store k and v [T, Hkv, D] of layout.dtype at int64 slots [T], quantised by the layout; slots < 0 are left out."""
    kept = slots >= 0
    if not bool(kept.any()):
        return
    slots, both = slots[kept], torch.stack((k[kept], v[kept]), 1)  # [T, 2, Hkv, D]
    block, inside = slots // layout.tokens, slots % layout.tokens
    if not layout.bits:
        values(pool, layout)[block, :, :, inside] = both
        return
    packed, scale, low = quantize.reference(both, layout.bits, layout.group, -1, layout.dtype)
    codes(pool, layout)[block, :, :, inside] = packed
    for view, part in zip(pairs(pool, layout), (scale, low), strict=True):
        view[block, :, :, inside] = part


def read(pool: Tensor, layout: BlockLayout, table: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(k, v) [B, Hkv, M * tokens, D] of dtype from the blocks named by table [B, M], numbers beyond the pool clamped.

    Positions that were never written are whatever the pool holds.
    """
    index = table.long().clamp(0, max(0, pool.shape[0] - 1))
    if layout.bits:
        scale, low = (part[index] for part in pairs(pool, layout))
        packed, size = codes(pool, layout)[index], layout.head_dim
        found = quantize.dequantize_reference(packed, scale, low, layout.bits, layout.group, -1, size).to(dtype)
    else:
        found = values(pool, layout)[index].to(dtype)
    k, v = found.permute(2, 0, 3, 1, 4, 5).flatten(3, 4)  # [B, M, 2, Hkv, tokens, D] -> [2, B, Hkv, M * tokens, D]
    return k, v
