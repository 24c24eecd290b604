"""What a plan would cost, from the machine's rates and a model's weights alone: so that many can be compared."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from forebay.rewriter.machine.profile import Machine

# Of the computing thread, to issue a copy and be woken by it: on two cores steps in tiles of 1 MiB took 0.15 to 0.3 ms
# more per additional copy than in tiles of 2 to 4 MiB.
COPY_S = 1e-4
# Of plans whose predictions are so close that they cannot be told apart, the one that reads less: a prefill of 32 x 64
# tokens, which computes for 28 s, was to read its weights once per token, 64 times over, for a gain of 1 %.
HIDDEN = 0.05


@dataclass(frozen=True)
class Product:
    """A weight of `n` rows and `k` columns that each step multiplies by; dtype or format as GEMMs are measured."""

    dtype: str
    n: int
    k: int


@dataclass(frozen=True)
class Rates:
    """What streaming and computing cost on a machine; the default is a cautious guess that computes in no time.

    bytes_per_s and latency_s are of the link that weights stream over; launch_s is what one copy more costs the thread
    that computes; slowed and slows are what computing and streaming do to each other (`machine.Contention`).
    compute_s gives the seconds of all products of a step over so many tokens per sequence.
    """

    bytes_per_s: float = 1.5e9
    latency_s: float = 2e-4
    launch_s: float = COPY_S
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


def side_by_side_s(compute: float, stream: float, slowed: float, slows: float) -> float:
    """Seconds until both are done, where each takes that many times as long while the other runs, and no more than one
    after the other."""
    if compute * slowed >= stream * slows:
        together = stream * slows + compute - stream * slows / slowed
    else:
        together = compute * slowed + stream - compute * slowed / slows
    return min(compute + stream, together)


def rates_of(machine: Machine, products: Sequence[Product], batch: int, tier: str) -> Rates:
    """The rates of `machine` for streaming from `tier` and for steps of `batch` sequences over `products`."""
    counts: dict[Product, int] = {}
    for product in products:
        counts[product] = counts.get(product, 0) + 1

    @functools.cache
    def compute_s(tokens: int) -> float:
        return sum(count * product_time_s(machine, p, batch * tokens) for p, count in counts.items())

    near = "device" if machine.device_kind == "cpu" or tier == "host" else "host"
    link = machine.link(tier, near)
    c = machine.contention
    return Rates(link.bandwidth_bytes_per_s, link.latency_s, COPY_S + machine.dispatch_s, c.slowed(0.5), c.slows(0.5),
                 compute_s)


def product_time_s(machine: Machine, product: Product, m: int) -> float:
    """Seconds by the fastest implementation measured; of what was not measured, those of its bytes in bf16."""
    try:
        impl = machine.best_gemm(product.dtype, m, product.n, product.k)
        return machine.gemm_time_s(impl, product.dtype, m, product.n, product.k)
    except KeyError:
        return product.n * product.k / machine.memory_bytes_per_s
