"""The most load under which a service keeps its objectives, by bisection over simulations (Algorithms 8 and 9)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from forebay.rewriter.serving.served import Served, percentile_s
from forebay.rewriter.serving.strategies import ServiceWanted, Simulated, Strategy, simulated
from forebay.rewriter.serving.traffic import Traffic, TrafficError, arrivals

LOWEST_RATE = 0.1  # requests/s, Algorithm 8: who cannot serve this serves nothing
ABOVE = 1.2  # times 1 / T_min, Algorithm 8: the first upper bound, per instance here
RELAXED = 0.1  # Algorithm 9: objectives may be exceeded by this share, as runs differ
LASTS = 20  # times both objectives that arrivals go on: a queue that grows by 6 % of them has then passed one of them
GROWS = 0.02  # of the arrivals of a run's second half that stay: more, and its queue grows without bound
DEVIATIONS = 3  # of the number of arrivals, that the queue of a stable service is allowed too
DOUBLINGS = 12  # of the upper bound, at most
MOST_REQUESTS = 6000  # that a run is lengthened to: 3 runs of so many show a queue that grows by 3 % of them
TOLERANCE = 0.02  # of the rate
# Two-sided 95 % quantiles of Student's t by degrees of freedom, from 1 on.
STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)


@dataclass(frozen=True)
class ServiceLevel:
    """Seconds that a share (0..100) of requests may take to their first token, and on average to each one after it;
    `runs` simulations with other arrivals are averaged."""

    ttft_s: float
    tpot_s: float
    share: float = 90.0
    runs: int = 3

    def validate(self) -> None:
        for name, value in (("ttft", self.ttft_s), ("tpot", self.tpot_s)):
            if not 0 < value < math.inf:
                raise TrafficError(f"{name}: {1e3 * value:g} ms is no time above 0")
        if not 0 < self.share <= 100:
            raise TrafficError(f"percentile: {self.share} is not above 0 and at most 100")
        if not 1 <= self.runs <= 1 + len(STUDENT):
            raise TrafficError(f"runs: {self.runs} is not between 1 and {1 + len(STUDENT)}")

    def allows(self, ttft_s: float, tpot_s: float) -> bool:
        """Return whether means of runs are within the objectives, of Algorithm 9."""
        return ttft_s <= (1 + RELAXED) * self.ttft_s and tpot_s <= (1 + RELAXED) * self.tpot_s


@dataclass(frozen=True)
class Measured:
    """Means over runs at one rate, in seconds, with half the width of their 95 % intervals (0 of one run); `grows`
    where fewer requests are served than arrive, so that the times grow with the length of a run."""

    rate: float
    ttft_s: float
    tpot_s: float
    ttft_ci_s: float
    tpot_ci_s: float
    preempted: float = 0.0
    grows: bool = False

    def keeps(self, level: ServiceLevel) -> bool:
        """Algorithm 9; and never a rate at which the queue grows, which a run short for its objectives hides."""
        return not self.grows and level.allows(self.ttft_s, self.tpot_s)


@dataclass(frozen=True)
class Goodput:
    """The greatest rate found at which the objectives are kept, 0 if none; what was measured there (or at the lowest
    rate), and at the rate that was asked for."""

    strategy: Strategy
    rate: float
    at_goodput: Measured
    at_rate: Measured | None

    @property
    def per_device(self) -> float:
        """Section 4.1's normalized goodput."""
        return self.rate / self.strategy.devices


def measure(found: Simulated, traffic: Traffic, level: ServiceLevel, rate: float, whole: bool = True) -> Measured:
    """Simulate `level.runs` runs of `traffic` at `rate`; percentiles of each, and their mean.

    Runs have its number of requests, and more where they would end before a queue could show that it grows. Not
    `whole`, they end once those to come cannot bring the mean back to `level`, which is all that is known then.
    """
    ttft, tpot, preempted = [], [], 0
    traffic = traffic.at_rate(rate)
    goal_s = level.ttft_s + level.tpot_s * (traffic.output - 1)
    traffic = replace(traffic, count=max(traffic.count, min(MOST_REQUESTS, math.ceil(LASTS * goal_s * rate))))
    runs = []
    for seed in range(level.runs):
        run = found.simulate(arrivals(traffic, seed), seed)
        ttft.append(percentile_s(run.ttft_s, level.share))
        tpot.append(percentile_s(run.tpot_s, level.share))
        preempted += run.preempted
        runs.append(run)
        if not whole and not level.allows(sum(ttft) / level.runs, sum(tpot) / level.runs):
            break
    return Measured(rate, float(np.mean(ttft)), float(np.mean(tpot)), half_width(ttft), half_width(tpot),
                    preempted / len(runs), queue_grows(runs))


def queue_grows(runs: Sequence[Served]) -> bool:
    """Return whether more requests stay of those that arrive in the second half of these runs than arrivals vary by.

    A stable service holds as many at a run's end as in its middle, but for chance: of n arrivals with a coefficient of
    variation c of their gaps the number in a given time has a standard deviation of c sqrt(n); c counts as 1 at least,
    as services take what comes evenly in batches.
    """
    stayed, arrived, variance = 0, 0, 0.0
    for run in runs:
        middle = len(run.arrived) // 2
        if not middle:
            continue
        last = np.sort(run.last)
        ended = [int(np.searchsorted(last, run.arrived[i], side="right")) for i in (middle, -1)]
        came = len(run.arrived) - 1 - middle
        gaps = np.diff(run.arrived)
        stayed += came - (ended[1] - ended[0])
        arrived += came
        variance += came * max(1.0, (float(np.std(gaps)) / max(float(np.mean(gaps)), 1e-300)) ** 2)
    return stayed > max(GROWS * arrived, DEVIATIONS * variance**0.5)


def half_width(values: Sequence[float]) -> float:
    """Half of the 95 % interval of the mean of these, by Student's t; 0 of one."""
    n = len(values)
    return 0.0 if n < 2 else STUDENT[n - 2] * float(np.std(values, ddof=1)) / n**0.5


def find_goodput(strategy: Strategy, service: ServiceWanted, level: ServiceLevel, rate: float | None = None) -> Goodput:
    """`greatest_rate` of a strategy, and what is measured at `rate`.

    Raises ModelError or TrafficError where the strategy cannot serve at all.
    """
    level.validate()
    found = simulated(strategy, service)
    at_rate = measure(found, service.traffic, level, rate) if rate else None
    kept, most = greatest_rate(found, service.traffic, level, max(1, strategy.both, strategy.prefill + strategy.decode))
    return Goodput(strategy, most, kept, at_rate)


def greatest_rate(
    found: Simulated, traffic: Traffic, level: ServiceLevel, instances: int = 1
) -> tuple[Measured, float]:
    """Find the greatest rate that keeps `level`, with its measurements; rate 0 and those of the lowest rate if none
    does.

    By bisection between a rate that is served and one that is not (Algorithm 8). The loop printed there runs while the
    bounds are *nearer* than the tolerance, that is never; here it runs until they are. Its upper bound, 1.2 over the
    time of a request alone, lies below what instances that batch can serve: it is taken per instance, and doubled as
    long as it is served. A service slower than the lowest rate begins lower.
    """
    low = measure(found, traffic, level, min(LOWEST_RATE, 0.1 / found.alone_s))
    if not low.keeps(level):
        return low, 0.0
    high = ABOVE / found.alone_s * instances
    for _ in range(DOUBLINGS):
        reached = measure(found, traffic, level, high, whole=False)
        if not reached.keeps(level):
            break
        low, high = reached, 2 * high
    while high - low.rate > TOLERANCE * high:
        middle = measure(found, traffic, level, (low.rate + high) / 2, whole=False)
        if middle.keeps(level):
            low = middle
        else:
            high = middle.rate
    return low, low.rate


@dataclass(frozen=True)
class Prices:
    """Prices per hour of a device, and of the offloading device, in any currency."""

    device: float = 1.0
    offloading: float = 1.0

    def per_hour(self, strategy: Strategy) -> float:
        return self.offloading if strategy.offloaded else strategy.devices * self.device

    def per_million(self, one: Goodput, output: int) -> float:
        """Return the cost of a million answer tokens, `output` per request, at the goodput; inf where nothing is
        served."""
        tokens_per_s = one.rate * output
        return self.per_hour(one.strategy) / 3600 / tokens_per_s * 1e6 if tokens_per_s else float("inf")


UNPRICED = Prices()


def ranked(found: Sequence[Goodput], rate: float | None = None, prices: Prices = UNPRICED) -> list[Goodput]:
    """By what a token costs at the goodput (with the prices unnamed: by goodput per device); with a rate, those that
    serve it first, the cheapest an hour (the fewest devices) before others."""
    def order(one: Goodput) -> tuple[bool, float, float, str]:
        serves = rate is not None and one.rate >= rate
        return not serves, prices.per_hour(one.strategy) if serves else 0, prices.per_million(one, 1), one.strategy.name

    return sorted(found, key=order)
