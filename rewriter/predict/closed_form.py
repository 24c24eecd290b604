"""What a plan would cost, from an estimator and a model's weights alone: so that many can be compared."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from forebay.rewriter.machine.profile import CPU_COPY_ISSUE_S
from forebay.rewriter.predict.estimator import Estimator, side_by_side_s

# Of plans whose predictions are so close that they cannot be told apart, the one that reads less: a prefill of 32 x 64
# tokens, which computes for 28 s, was to read its weights once per token, 64 times over, for a gain of 1 %.
HIDDEN = 0.05


@dataclass(frozen=True)
class Product:
    """A weight of `n` rows and `k` columns in `nbytes` that each step multiplies by; dtype or format as GEMMs are
    measured."""

    dtype: str
    n: int
    k: int
    nbytes: int


@dataclass(frozen=True)
class Rates:
    """What streaming and computing cost on a machine; the default is a cautious guess that computes in no time.

    bytes_per_s and latency_s are of the link that weights stream over; launch_s is what one copy more costs the thread
    that computes; slowed and slows are what computing and streaming do to each other.
    compute_s gives the seconds of all products of a step over so many tokens per sequence.
    """

    bytes_per_s: float = 1.5e9
    latency_s: float = 2e-4
    launch_s: float = CPU_COPY_ISSUE_S
    slowed: float = 1.0
    slows: float = 1.0
    compute_s: Callable[[int], float] = lambda tokens: 0.0

    def step_time_s(self, tokens: int, nbytes: float, copies: float, slots: int) -> float:
        """Seconds of a step over `tokens` tokens per sequence that streams `nbytes` in `copies` through `slots` slots.

        With one slot nothing overlaps. With more, computation and copies run side by side, each slowed by the other,
        until one of them is done; the latency of a copy is shared with those in flight in the other slots. Where both
        take equally long a share 1 / slots² is left exposed, because copies wait for slots and products for copies;
        where one is much shorter, next to nothing. A share `HIDDEN` of streaming counts wherever it hides. Never falls
        when bytes and copies rise.
        """
        compute = self.compute_s(tokens) + copies * self.launch_s
        if not nbytes:
            return compute
        stream = nbytes / self.bytes_per_s + copies * self.latency_s / slots
        if slots == 1:
            return compute + stream
        short, long = sorted((compute, stream))
        together = side_by_side_s(compute, stream, self.slowed, self.slows)
        return together + short**2 / long / slots**2 + HIDDEN * stream


def rates_of(
    times: Estimator, products: Sequence[Product], batch: int, tier: str, micro_batches: int = 1
) -> Rates:
    """The rates for streaming from `tier` and for steps of `batch` sequences over `products`, in so many parts."""
    counts = Counter(products)

    @functools.cache
    def compute_s(tokens: int) -> float:
        m = batch // micro_batches * tokens
        return micro_batches * sum(
            count * times.product_s(p.dtype, m, p.n, p.k, nbytes=p.nbytes) for p, count in counts.items())

    link = (tier, "device" if tier == "host" else times.near_disk)
    return Rates(1 / times.byte_s(*link), times.latency_s(*link), times.copy_issue_s + times.dispatch_s,
                 times.slowed(0.5), times.slows(0.5), compute_s)
