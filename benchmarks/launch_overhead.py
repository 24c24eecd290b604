"""Python's time in a launch of each bound operator, without a GPU: `python -m benchmarks.launch_overhead [--json]`.

Everything up to the driver is real: binding, specialisation, compilation for sm_90, the packing of arguments. The
driver is not: it loads no binary and its launches are empty, so that what is left is what the host spends.

`us` is the least of many means over 200 calls, `first_us` what Triton itself takes for a launch, `frames` the Python
functions that a launch enters, `kernels` what was compiled and `launches` what one call launches.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

STREAM = 7
CALLS = 200


class Utils:
    """What Triton asks of the driver's library; the numbers of an H200."""

    def load_binary(self, name: str, binary: bytes, shared: int, device: int) -> tuple[int, int, int, int, int]:
        return 1, len(binary), 32, 0, 1024

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": 227 << 10, "multiprocessor_count": 132, "warpSize": 32}


class Launcher:
    """Triton's launcher of a kernel, but for the launch: it keeps what it would have sent, if asked to."""

    sent: list[tuple[Any, ...]] | None = None
    made = 0

    def __init__(self, source: Any, metadata: Any) -> None:
        Launcher.made += 1

    def __call__(self, *args: Any) -> None:
        if Launcher.sent is not None:
            Launcher.sent.append(args)


class Driver:
    """A GPU of compute capability 9.0 that runs nothing."""

    launcher_cls = Launcher

    def __init__(self) -> None:
        self.utils = Utils()
        self.get_current_device = int  # 0, and as torch's no Python function
        self.get_current_stream = {0: STREAM}.__getitem__

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)


def cases() -> Iterator[tuple[str, Callable[[], Callable[[], None]]]]:
    """(name, what binds it) of the launches of a decode step of Llama-3-8B, two sequences."""
    from forebay.kernels.attention.decode_attention.gpu import bind_decode_attention_contiguous
    from forebay.kernels.attention.scoring import Scoring
    from forebay.kernels.cache.kv_append.gpu import bind_kv_append
    from forebay.kernels.cache.kv_append_q.gpu import bind_kv_append_q
    from forebay.kernels.formats.row_sizes import CACHE_ALIGN, row_nbytes
    from forebay.kernels.norms.layer_norm.gpu import bind_layer_norm
    from forebay.kernels.norms.rms_norm.gpu import bind_rms_norm
    from forebay.kernels.positions.rotary.gpu import bind_rotary
    from forebay.kernels.products.linear.gpu import bind_linear
    from forebay.kernels.products.linear.reference import PLAIN
    from forebay.kernels.quantization.dequantize_rows.gpu import bind_dequantize_rows

    def half(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.float16)

    start = torch.zeros(2, dtype=torch.int64)
    hidden, narrow, wide, q, kv = half(2, 1, 4096), half(2, 1, 1024), half(2, 1, 14336), half(2, 32, 1, 128), \
        half(2, 8, 1, 128)
    cache = half(2, 8, 64, 128)
    rows = torch.zeros(2, 8, 64, row_nbytes(128, 4, 64, CACHE_ALIGN), dtype=torch.uint8)
    down, key = half(4096, 14336), half(1024, 4096)
    out = half(2, 32, 128)
    yield "rms_norm", lambda: bind_rms_norm(hidden, half(4096), 1e-5, half(2, 1, 4096))
    yield "layer_norm", lambda: bind_layer_norm(hidden, half(4096), half(4096), 1e-5, half(2, 1, 4096))
    packed = torch.zeros(100, row_nbytes(4096, 4, 64), dtype=torch.uint8)
    yield "dequantize_rows", lambda: bind_dequantize_rows(
        packed, 4096, 4, 64, torch.float16, torch.float16, False, out=half(100, 4096))
    yield "rotary", lambda: bind_rotary(q, half(2, 1, 128), half(2, 1, 128), half(2, 32, 1, 128))
    yield "kv_append", lambda: bind_kv_append(cache, half(2, 8, 64, 128), kv, half(2, 8, 1, 128), start)
    yield "kv_append_q", lambda: bind_kv_append_q(rows, rows.clone(), kv, half(2, 8, 1, 128), start, 4, 64)
    yield "decode_attention", lambda: bind_decode_attention_contiguous(
        out, cache, half(2, 8, 64, 128), start, Scoring(0.09), half(2, 32, 128))
    yield "linear", lambda: bind_linear(hidden, key, None, PLAIN, narrow, "gemv")
    yield "linear_split", lambda: bind_linear(wide, down, None, PLAIN, hidden, "flat_64x64_s2")


def frames(call: Callable[[], None]) -> int:
    """Python functions that a call enters, itself included."""
    seen = 0

    def note(frame: Any, event: str, argument: Any) -> None:
        nonlocal seen
        seen += event == "call"

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return seen


def mean_us(call: Callable[[], None], rounds: int = 20) -> float:
    """The least mean time of CALLS calls."""
    best = float("inf")
    for _ in range(rounds):
        begin = time.perf_counter()
        for _ in range(CALLS):
            call()
        best = min(best, time.perf_counter() - begin)
    return best / CALLS * 1e6


def flat(args: tuple[Any, ...]) -> list[Any]:
    """What is sent, with addresses for tensors, but for the metadata that only hooks are given."""
    values = [a.data_ptr() if isinstance(a, torch.Tensor) else a for a in args]
    return values[:6] + values[9:]


def measure(name: str, bind: Callable[[], Callable[[], None]]) -> dict[str, Any]:
    """The figures of one operator. AssertionError where later calls send something else than the first, which is
    Triton's own launch."""
    import triton

    with triton.knobs.runtime.scope():
        triton.knobs.runtime.interpret = True  # for the checks of the launchers: tensors need not be on a GPU
        call = bind()
    before, Launcher.sent = Launcher.made, []
    call()
    launches = len(Launcher.sent)
    triton_sent = [flat(sent) for sent in Launcher.sent]
    for _ in range(2):
        Launcher.sent = []
        call()
        assert [flat(sent) for sent in Launcher.sent] == triton_sent, f"{name}: a later call sends something else"
    assert all(sent[3] == STREAM for sent in triton_sent), f"{name}: another stream than the current"
    Launcher.sent = None
    hook = triton.knobs.runtime.launch_enter_hook
    us = mean_us(call)
    entered = frames(call)
    hook.add(_ignored)  # with a hook, launches are Triton's own
    try:
        first_us = mean_us(call, 3)
    finally:
        hook.remove(_ignored)
    return {"name": name, "launches": launches, "kernels": Launcher.made - before, "frames": entered,
            "us": round(us / launches, 2), "first_us": round(first_us / launches, 2)}  # fmt: skip


def _ignored(metadata: Any) -> None:
    """A hook, as a profiler would put it there."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if os.environ.get("TRITON_INTERPRET") == "1":
        parser.error("TRITON_INTERPRET=1 replaces the compiler; unset it")
    import triton

    triton.runtime.driver.set_active(Driver())
    found = [measure(*case) for case in cases()]
    if options.json:
        print(json.dumps(found))
        return
    print(f"{'operator':18} {'launches':>8} {'kernels':>8} {'frames':>7} {'us/launch':>10} {'by Triton':>10}")
    for name, launches, kernels, entered, us, first_us in (row.values() for row in found):
        print(f"{name:18} {launches:8} {kernels:8} {entered:7} {us:10.2f} {first_us:10.2f}")


if __name__ == "__main__":
    main()
