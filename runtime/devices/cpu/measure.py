"""Time what steps are made of on the CPU."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch

from forebay.kernels.build.process_limits import available_nbytes
from forebay.kernels.operator import HOST_KERNELS, Tensors
from forebay.kernels.operators import RMS_NORM
from forebay.rewriter.machine.profile import Link, Tier
from forebay.runtime.measure.copies import BUFFER_NBYTES, copy_link, time_s
from forebay.runtime.measure.kernels import (
    GEMM_SHAPES,
    MIB,
    call_s,
    cold_memory,
    cold_parts,
    cold_products,
    gemm_points,
)
from forebay.runtime.measure.steady import settled_s

__all__ = ["attention_bytes_per_s", "copy_bytes_per_s", "device_tier", "dispatch_s", "gemm_points", "links"]
DISPATCHES = 20  # in a round
PIECE_NBYTES = 8 * MIB


def links(read: Link, write: Link, quick: bool) -> list[Link]:
    """The links other than disk to device: `host` and `device` are the same RAM, so both have the same disk links."""
    source, target = cold_memory().bytes[:BUFFER_NBYTES], torch.empty(BUFFER_NBYTES, dtype=torch.uint8)
    copied = copy_link(("host", "device", "memcpy"), source, target, quick)
    return [replace(read, dst="host"), replace(write, src="host"), copied, replace(copied, src="device", dst="host")]


def copy_bytes_per_s(rounds: int) -> float:
    """Bytes copied per second within RAM."""
    source = cold_memory().bytes[:BUFFER_NBYTES].view(-1, PIECE_NBYTES)
    target = torch.empty_like(source)
    calls = [partial(into.copy_, part) for into, part in zip(target, source, strict=True)]
    return PIECE_NBYTES / _piece_s(calls, rounds)


def read_bytes_per_s(rounds: int) -> float:
    """Return how fast computation reads RAM: sums over `cold_memory`, in pieces that fit in it."""
    pieces = cold_parts(torch.float32, PIECE_NBYTES // 4)
    return PIECE_NBYTES / _piece_s([piece.sum for piece in pieces], rounds)


def _piece_s(calls: Sequence[Callable[[], object]], rounds: int) -> float:
    """Seconds of one of `calls`, each on memory of its own, in so many rounds after a first: others interrupt few calls
    that are this short."""
    turn = itertools.cycle(calls)
    call_s(turn, len(calls))
    return call_s(turn, rounds * len(calls))


def device_tier(rounds: int) -> Tier:
    """RAM that is free now, and how fast it is read."""
    return Tier(available_nbytes(), read_bytes_per_s(rounds))


def dispatch_s(rounds: int) -> float:
    """Seconds of a launch of a tiny kernel after a matmul, which leaves nothing of it in the caches."""
    x = torch.ones(1, 8)
    return _after_products_s(RMS_NORM.bind[HOST_KERNELS](Tensors((x, x[0], 1e-5), {}, (torch.empty_like(x),))), rounds)


def torch_dispatch_s(rounds: int) -> float:
    """Seconds of a launch of a tiny operator of torch's: one of two after a matmul, as in a router."""
    x, out = torch.ones(1, 8), torch.empty(1, 8)

    def launch() -> None:
        torch.ops.aten.softmax.int_out(x, -1, out=out)
        torch.ops.aten.div.out(out, x, out=out)

    return _after_products_s(launch, rounds) / 2


def _after_products_s(launch: Callable[[], object], rounds: int) -> float:
    """Seconds of a launch after a matmul, as in a step."""
    n, k = GEMM_SHAPES[0]
    products, found = cold_products(1, n, k, torch.bfloat16), []
    for _ in range(DISPATCHES * rounds):
        next(products)()
        start = time.perf_counter()
        launch()
        found.append(time.perf_counter() - start)
    return settled_s(found)


def attention_bytes_per_s(rounds: int) -> float:
    """Bytes of K and V per second of decode attention: one query of 16 heads over 8 KV heads of 64, 8192 tokens."""
    q = torch.ones(1, 16, 1, 64)  # [B, H, S, D]
    k, v = torch.ones(1, 8, 8192, 64), torch.ones(1, 8, 8192, 64)  # [B, Hkv, L, D]
    attend = torch.nn.functional.scaled_dot_product_attention
    return (k.nbytes + v.nbytes) / time_s(lambda: attend(q, k, v, enable_gqa=True), 4 * rounds)
