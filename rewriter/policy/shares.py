"""Linear functions of where things lie: one share per tensor and tier, and a constant."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

Affine = NDArray[np.float64]  # coefficients of the variables below, then the constant

TIERS = ("device", "host", "disk")
TENSORS = ("attention", "mlp", "outside", "kv", "checkpoint", "activation")
VARIABLES = tuple((tensor, tier) for tensor in TENSORS for tier in TIERS)
INDEX = {pair: i for i, pair in enumerate(VARIABLES)}
N = len(VARIABLES)
ONE = np.eye(N + 1)[N]


def var(tensor: str, *tiers: str) -> Affine:
    """The share of `tensor` on any of `tiers` (all: every tier)."""
    row = np.zeros(N + 1)
    for tier in tiers or TIERS:
        row[INDEX[tensor, tier]] = 1.0
    return row


def shares(weights: tuple[float, float, float], cache: tuple[float, float, float],
           activations: tuple[float, float, float], checkpoints: tuple[float, float, float] = (0, 0, 0)) -> Affine:
    """A placement by FlexGen's nine shares (device, host, disk); cache and checkpoint shares together add up to 1."""
    return np.array([*weights, *weights, *weights, *cache, *checkpoints, *activations, 1.0])


def added(*lanes: Mapping[str, Affine]) -> dict[str, Affine]:
    """Lanes that several things take, each lane summed."""
    found: dict[str, Affine] = {}
    for some in lanes:
        for lane, row in some.items():
            found[lane] = found[lane] + row if lane in found else row
    return found


def scaled(lanes: Mapping[str, Affine], factor: float) -> dict[str, Affine]:
    """Lanes of something that happens `factor` times."""
    return {lane: factor * row for lane, row in lanes.items()}
