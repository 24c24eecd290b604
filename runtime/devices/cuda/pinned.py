"""Host memory that a GPU copies from and to by itself."""

from __future__ import annotations

import ctypes
from concurrent.futures import ThreadPoolExecutor

import torch

from forebay.rewriter.ir.alignment import PAGE_NBYTES
from forebay.runtime.devices.device import RuntimeFault
from forebay.runtime.run.arena import Arena

TOUCH_THREADS = 8


def _touch(address: int, nbytes: int) -> None:
    """Write zeros to pages by several threads: each page is found and cleared by the thread that touches it first."""
    share = -(-nbytes // TOUCH_THREADS // PAGE_NBYTES) * PAGE_NBYTES or PAGE_NBYTES
    with ThreadPoolExecutor(TOUCH_THREADS) as pool:
        for done in [pool.submit(ctypes.memset, address + at, 0, min(share, nbytes - at))
                     for at in range(0, nbytes, share)]:
            done.result()


def pinned_arena(nbytes: int) -> Arena:
    """Host memory of so many bytes that a GPU copies from and to by itself. RuntimeFault where it cannot be pinned."""
    arena = Arena(nbytes)
    _touch(arena.address, nbytes)  # pinning untouched memory is slow
    code = torch.cuda.cudart().cudaHostRegister(arena.address, nbytes, 0)
    if int(code) != 0:
        raise RuntimeFault(f"pinning {nbytes} bytes of host memory failed (CUDA error {int(code)}); a smaller host "
                           "budget or a higher `ulimit -l` may help")
    return arena
