"""Arenas: one block of memory per tier, and tensors as views of it."""

from __future__ import annotations

import ctypes
import mmap

import torch

from forebay.rewriter.ir.program import TensorRef

HUGE_PAGE = 2 << 20


def return_freed_memory() -> None:
    """Give what the C allocator holds free back to the system; it keeps blocks of up to 32 MiB otherwise (glibc)."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


class Arena:
    """`nbytes` of page-aligned anonymous memory, taken once; huge pages make direct reads into it cheaper."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self._map = mmap.mmap(-1, max(nbytes, 1) + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        start = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self._skip = -start % HUGE_PAGE
        self.address = start + self._skip
        whole = nbytes // HUGE_PAGE * HUGE_PAGE  # a huge page that ends behind the arena would be memory of no budget
        if hasattr(mmap, "MADV_HUGEPAGE") and whole:
            self._map.madvise(mmap.MADV_HUGEPAGE, self._skip, whole)
        with torch.inference_mode(False):  # threads write to it that are in no mode of the caller's
            self.bytes = torch.frombuffer(self._map, dtype=torch.uint8)[self._skip : self._skip + nbytes]

    def tensor(self, ref: TensorRef) -> torch.Tensor:
        """The tensor that `ref` describes, sharing the arena's memory."""
        return view(self.bytes, ref)


def view(memory: torch.Tensor, ref: TensorRef) -> torch.Tensor:
    """`ref` as a tensor over `memory`, a uint8 tensor that is a whole arena."""
    dtype = getattr(torch, ref.dtype)
    usable = (memory.numel() - ref.offset) // dtype.itemsize * dtype.itemsize
    with torch.inference_mode(False):  # a tensor of the caller's inference mode could not be written outside it
        typed = memory[ref.offset : ref.offset + usable].view(dtype)
        return typed.as_strided(ref.shape, ref.stride, typed.storage_offset())
