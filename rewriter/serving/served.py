"""Results of a simulation: arrival, first and last token of each request, and percentiles."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from forebay.rewriter.serving.traffic import Arrival

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Served:
    """Seconds at which requests arrived, had their first token and their last, [requests] each, in order of arrival;
    `outputs` are the tokens of their answers. `preempted` counts how often one lost its cache, and `most_cached` is
    the most tokens that an instance's cache held."""

    arrived: Floats
    first: Floats
    last: Floats
    outputs: Floats
    preempted: int = 0
    most_cached: int = 0

    @property
    def ttft_s(self) -> Floats:
        """Seconds from arrival to the first token, [requests]."""
        return self.first - self.arrived

    @property
    def tpot_s(self) -> Floats:
        """Mean seconds between tokens after the first, [requests with more than one]."""
        more = self.outputs > 1
        return (self.last - self.first)[more] / (self.outputs[more] - 1)

    def digest(self) -> str:
        """SHA-256 of all times: equal for equal runs."""
        return hashlib.sha256(b"".join(part.tobytes() for part in (self.arrived, self.first, self.last))).hexdigest()


def percentile_s(times: Floats, share: float) -> float:
    """The value that a share (0..100) of `times` does not exceed, between two by linear interpolation; 0 of none."""
    return float(np.percentile(times, share)) if len(times) else 0.0


def served(requests: Sequence[Arrival], first: Sequence[float], last: Sequence[float], preempted: int = 0,
           most_cached: int = 0) -> Served:
    """The record of `requests` with these times of their first and last tokens."""
    return Served(np.array([r.at_s for r in requests]), np.array(first), np.array(last),
                  np.array([float(r.output) for r in requests]), preempted, most_cached)
