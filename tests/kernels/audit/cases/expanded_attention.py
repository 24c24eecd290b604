"""Configurations of `attention/expanded_attention/gpu.py` and of what unpacks rows for it that are audited."""

from __future__ import annotations

import torch
import triton

from forebay.kernels.attention.expanded_attention.gpu import TILES, expand_kernel
from forebay.kernels.formats import row_sizes
from forebay.kernels.gpu_support.arguments import AMD_STAGES
from forebay.kernels.gpu_support.cache_rows import packed_view
from forebay.kernels.gpu_support.unpacked_rows import ROWS, unpack_rows_kernel
from tests.kernels.audit.audit_case import AuditCase

LENGTH, RANK, ROTATED, MADE, HEADS = 16384, 512, 64, 256, 16  # DeepSeek-V3, keys and values of 128 numbers


def _expand(dtype: str) -> AuditCase:
    """Keys and values of 16 heads, made of 16384 rows."""
    itemsize = 4 if dtype == "fp32" else 2
    tile = TILES[itemsize]
    names = ("rows_ptr", "up_ptr", "k_ptr", "v_ptr")
    signature = {"rows_ptr": f"*{dtype}", "start_ptr": "*i64"} | dict.fromkeys(names[1:], f"*{dtype}")
    sizes = ("rb", "rr", "heads", "length", "queries", "rank", "rotated", "plain", "value", "wide")
    signature |= dict.fromkeys(sizes, "i32")
    nbytes = itemsize * (LENGTH * (RANK + ROTATED) + HEADS * (MADE * RANK + LENGTH * (MADE + ROTATED)))
    return AuditCase(
        name=f"expanded_attention/expand/{LENGTH}x{RANK}-{dtype}",
        fn=expand_kernel,
        signature=signature,
        constants={"BM": tile.rows, "BN": tile.made, "BK": tile.columns,
                   "TAIL": max(16, triton.next_power_of_2(ROTATED))},
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        amd_stages=min(tile.num_stages, AMD_STAGES),
        divisible=(*names, "start_ptr", "rb", "rr", "rank", "plain", "value", "wide"),
        uses_dot=True,
        main_operands=2,
        bytes_moved=nbytes,
        minimum_bytes=nbytes,
        turn_nbytes=itemsize * tile.columns * (tile.rows + tile.made),
        archs=("sm_80", "sm_90", "gfx942")[: 2 if dtype == "fp32" else 3],
    )  # fmt: skip


def _unpack(bits: int) -> AuditCase:
    """16384 rows of latents."""
    dim = RANK + ROTATED
    group, row_nbytes = row_sizes.cache_group_size(dim, bits), row_sizes.cache_row_nbytes(dim, bits)
    rows = torch.empty(1, 1, 2, row_nbytes, dtype=torch.uint8)
    view = packed_view(rows, rows, dim, bits, group)
    signature = {"cache_ptr": "*u8", "start_ptr": "*i64", "out_ptr": "*bf16"}
    signature |= dict.fromkeys(("cb", "ch", "cr", "heads", "length", "queries"), "i32")
    nbytes = LENGTH * (row_nbytes + 2 * dim)
    return AuditCase(
        name=f"expanded_attention/unpack-kv{bits}/{LENGTH}x{dim}-bf16",
        fn=unpack_rows_kernel,
        signature=signature,
        constants={"UNIT": view.unit, "POWER": view.power, "ROWS": ROWS, **view.constants},
        num_warps=4,
        divisible=tuple(name for name in signature if name.endswith("_ptr")),
        load_nbytes=4,
        bytes_moved=nbytes,
        minimum_bytes=nbytes,
        turn_nbytes=ROWS * (row_nbytes + 2 * dim),
    )


def audit_cases() -> list[AuditCase]:
    """DeepSeek-V3's latents."""
    return [_expand("bf16"), _expand("fp32"), _unpack(8), _unpack(4)]
