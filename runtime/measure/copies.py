"""Time calls and copies between memories."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable

import torch

from forebay.rewriter.machine.profile import Link
from forebay.runtime.measure.kernels import MIB
from forebay.runtime.measure.steady import settled_s, steady_link

BUFFER_NBYTES = 64 * MIB
COPIES = 3  # in a turn


def time_s(call: Callable[[], object], repeats: int, wait: Callable[[], object] = lambda: None) -> float:
    """Seconds of a call (`settled_s`) after one warm-up.

    Args:
        call: What is timed.
        repeats: How often.
        wait: Returns when the device has done all that was issued.
    """
    call()
    times = []
    for _ in range(repeats):
        wait()
        start = time.perf_counter()
        call()
        wait()
        times.append(time.perf_counter() - start)
    return settled_s(times)


def copy_link(ends: tuple[str, str, str], source: torch.Tensor, target: torch.Tensor, quick: bool,
              wait: Callable[[], object] = lambda: None) -> Link:
    """Fit a link over copies of growing prefixes of two byte tensors.

    Args:
        ends: The tier that is read, the tier that is written, and the name of the method.
        source: Bytes that are read, BUFFER_NBYTES of them.
        target: As many bytes that are written.
        quick: Whether three rounds of up to 16 MiB are enough.
        wait: As for `time_s`.
    """

    def copy_s(nbytes: int, turn: int) -> float:
        return time_s(functools.partial(target[:nbytes].copy_, source[:nbytes], non_blocking=True), COPIES, wait)

    sizes = (MIB, 4 * MIB, 16 * MIB, *(() if quick else (BUFFER_NBYTES,)))
    bandwidth, latency, r2 = steady_link(sizes, 3 if quick else 9, copy_s, tries=1 if quick else None)
    return Link(*ends[:2], bandwidth, latency, ends[2], 1, 0, r2)
