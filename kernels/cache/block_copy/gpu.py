"""`forebay::block_copy` in Triton: many small blocks moved by one launch, between memories that the GPU reaches."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from forebay.kernels.gpu_support.arguments import check_device, fail
from forebay.kernels.gpu_support.audit_case import AuditCase

# Words of one program: 8 KiB of 32-bit words, four 16-byte accesses of each of 128 threads.
WORDS = 2048


@triton.jit
def block_copy_kernel(
    source_ptr, from_ptr, destination_ptr, to_ptr, source_blocks, destination_blocks, words, ss, ds,
    WORDS: tl.constexpr,
):  # fmt: skip
    """Program (pair of blocks, piece of the block); a pair with an index that is no block's is left out."""
    pair = tl.program_id(0)
    source = tl.load(from_ptr + pair).to(tl.int64)
    destination = tl.load(to_ptr + pair).to(tl.int64)
    fits = (source >= 0) & (source < source_blocks) & (destination >= 0) & (destination < destination_blocks)
    at = tl.program_id(1) * WORDS + tl.arange(0, WORDS)
    used = at < tl.where(fits, words, 0)
    piece = tl.load(source_ptr + source * ss + at, mask=used)
    tl.store(destination_ptr + destination * ds + at, piece, mask=used)


def as_words(source: Tensor, destination: Tensor) -> tuple[Tensor, Tensor]:
    """Both as matrices [blocks, words] over the same memory, of the widest word that sizes and addresses allow."""
    flat = [t.flatten(1) if t.dim() > 1 else t[:, None] for t in (source, destination)]
    nbytes = flat[0].shape[1] * source.element_size()
    steps = [t.stride(0) * t.element_size() for t in flat] + [t.data_ptr() for t in flat]
    word = torch.int32 if all(step % 4 == 0 for step in (*steps, nbytes)) else torch.uint8
    return flat[0].view(word), flat[1].view(word)


def check(source: Tensor, from_blocks: Tensor, destination: Tensor, to_blocks: Tensor) -> None:
    """ValueError names the argument whose dtype, device, shape or stride is wrong; indices are not looked at."""
    op = "block_copy"
    device = from_blocks.device
    check_device(op, "from_blocks", from_blocks)
    check_device(op, "to_blocks", to_blocks, device)
    for tensor, name in ((source, "source"), (destination, "destination")):
        if tensor.device != device and not tensor.is_pinned():
            fail(op, name, f"must be on {device} or in pinned host memory, got {tensor.device}")
        if tensor.dim() == 0 or (tensor.shape[0] and not tensor[0].is_contiguous()):
            fail(op, name, f"must be [blocks, ...] with contiguous blocks, got strides {tensor.stride()}")
    if destination.dtype != source.dtype or destination.shape[1:] != source.shape[1:]:
        fail(op, "destination", f"must have blocks {tuple(source.shape[1:])} of {source.dtype} as source has, got "
             f"{tuple(destination.shape[1:])} of {destination.dtype}")  # fmt: skip
    for table, name in ((from_blocks, "from_blocks"), (to_blocks, "to_blocks")):
        if table.dtype not in (torch.int32, torch.int64):
            fail(op, name, f"must be int32 or int64, got {table.dtype}")
        if table.dim() != 1 or table.shape != from_blocks.shape or not table.is_contiguous():
            fail(op, name, f"must be contiguous of shape {tuple(from_blocks.shape)[:1]}, got {tuple(table.shape)}")


def block_copy(source: Tensor, from_blocks: Tensor, destination: Tensor, to_blocks: Tensor) -> None:
    """destination[to_blocks[i]] = source[from_blocks[i]] for every i, by one launch and without a host synchronisation.

    source and destination [blocks, ...] of one dtype and block shape, on the GPU or in pinned host memory; the tables
    int32 or int64 [n] on the GPU. A pair in which either index is out of range, say -1, is left out. No destination
    block may appear twice, or be a source block. ValueError names the argument that is wrong, before the launch.
    """
    check(source, from_blocks, destination, to_blocks)
    if from_blocks.numel() == 0 or source.numel() == 0 or destination.numel() == 0:
        return
    blocks, places = as_words(source, destination)
    words = blocks.shape[1]
    block_copy_kernel[(from_blocks.numel(), triton.cdiv(words, WORDS))](
        blocks, from_blocks, places, to_blocks, len(blocks), len(places), words, blocks.stride(0), places.stride(0),
        WORDS=WORDS, num_warps=4,
    )  # fmt: skip


def audit_cases() -> list[AuditCase]:
    """1024 cache blocks of 16 positions of one head of D = 128 in bf16: 4 KiB each."""
    numbers = ("source_blocks", "destination_blocks", "words", "ss", "ds")
    nbytes = 1024 * (2 * 4096 + 16)
    return [
        AuditCase(
            name="block_copy/4KiB",
            fn=block_copy_kernel,
            signature={"source_ptr": "*i32", "from_ptr": "*i64", "destination_ptr": "*i32", "to_ptr": "*i64"}
            | {n: "i32" for n in numbers},
            constants={"WORDS": WORDS},
            num_warps=4,
            divisible=("source_ptr", "from_ptr", "destination_ptr", "to_ptr", "words", "ss", "ds"),
            bytes_moved=nbytes,
            minimum_bytes=nbytes,
            aim=0.75,
            turn_nbytes=2 * 4 * WORDS,
        )
    ]
