"""Times as sums of a constant and multiples of a few numbers: least squares with no negative term."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Fit:
    """time_s = intercept_s + sum of slopes_s * x, none of them negative, and how well that explains the measured times
    (R²: below 0 for worse than a constant)."""

    intercept_s: float
    slopes_s: tuple[float, ...]
    r2: float

    def time_s(self, *x: float) -> float:
        return self.intercept_s + sum(slope * value for slope, value in zip(self.slopes_s, x, strict=True))


def on_curve(curve: Sequence[tuple[float, float]], m: float) -> float:
    """The value at m of a curve through points of rising m: straight on a log-log scale, level below the first point,
    in proportion to m above the last."""
    if m <= curve[0][0]:
        return curve[0][1]
    for (m0, t0), (m1, t1) in itertools.pairwise(curve):
        if m <= m1:
            share = math.log(m / m0) / math.log(m1 / m0)
            return math.exp(math.log(t0) + share * math.log(t1 / t0))
    return curve[-1][1] * m / curve[-1][0]


ROUNDING = 1e-12  # of relative least squares: what is smaller is no measurement


def fit_times(points: Sequence[tuple[tuple[float, ...], float]]) -> Fit:
    """Times, above 0, as a sum of a constant and multiples of the variables, none negative.

    The least squares are those of relative errors, so that short times count as long ones do. Of the models that the
    points determine, all with the last variable, the one that errs least, and of equals the one with fewest terms.
    """
    import numpy as np

    times = np.array([time_s for _, time_s in points])
    columns = np.array([(1.0, *x) for x, _ in points])
    scale = columns.max(0)
    relative = columns / scale / times[:, None]
    last = columns.shape[1] - 1
    best, least = np.zeros(last + 1), math.inf
    for count in range(last + 1):
        for others in itertools.combinations(range(last), count):
            chosen = [*others, last]
            found, _, rank, _ = np.linalg.lstsq(relative[:, chosen], np.ones(len(times)), rcond=1e-6)
            found[np.abs(found) < ROUNDING] = 0.0  # a slope of nothing has either sign, as the processor rounds
            error = float(((relative[:, chosen] @ found - 1) ** 2).sum())
            if (rank == len(chosen) and found.min() >= 0 and error < least - 1e-12) or not count:
                least = error
                best = np.zeros(last + 1)
                best[chosen] = found
    best /= scale
    variance = float(((times - times.mean()) ** 2).sum())
    residual = float(((columns @ best - times) ** 2).sum())
    return Fit(float(best[0]), tuple(map(float, best[1:])), 1 - residual / variance if variance > 0 else 1.0)


def fit_link(points: Sequence[tuple[int, float]]) -> tuple[float, float, float]:
    """(bandwidth in bytes/s, latency in s, R²) of time = latency + nbytes / bandwidth, as `fit_times` fits it.

    `points` are (nbytes, time_s); raises ValueError with fewer than two sizes.
    """
    if len({nbytes for nbytes, _ in points}) < 2:
        raise ValueError("fit_link needs transfers of at least two sizes")
    fit = fit_times([((nbytes,), time_s) for nbytes, time_s in points])
    if not fit.slopes_s[0]:  # all took as long: the largest tells the least rate that this can be
        nbytes, time_s = max(points)
        return nbytes / time_s, 0.0, fit.r2
    return 1 / fit.slopes_s[0], fit.intercept_s, fit.r2
