"""Products of one x with several weights, [N, K] each, that a launch computes together: as many results, or a gate's.

Such a launch has tuples in the place of weight and bias. With a result for each weight they are products apart. With
one result, of two weights, it is act(x G^T + g) * (x U^T + u).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from forebay.kernels.operator import Call, Tensors, Use

MOST_WEIGHTS = 3  # of a launch
MOST_COLUMNS = 128  # of a tile


def weights_of(use: Use) -> tuple[Any, ...]:
    """The weights of a launch, or its only one."""
    weight = use.args[1]
    return weight if isinstance(weight, tuple) else (weight,)


def is_gated(use: Use) -> bool:
    """Return whether one weight's product is multiplied by the activated product of another."""
    return len(use.out) < len(weights_of(use))


def widths(use: Use) -> tuple[int, ...]:
    """Rows of weights that lie in tiles of their own: of a gate and what it multiplies those of both."""
    rows = tuple(weight.shape[0] for weight in weights_of(use))
    return (sum(rows),) if is_gated(use) else rows


def parts(use: Use) -> tuple[Tensors, ...]:
    """The launches with one weight each that compute the same, one after the other; of a gate in the result's place."""
    x, weights, biases = use.args
    given = [(x, weight, bias) for weight, bias in zip(weights, biases, strict=True)]
    if not is_gated(use):
        return tuple(Tensors(args, use.kwargs, (out,), use.impl) for args, out in zip(given, use.out, strict=True))
    (out,) = use.out
    multiplied = {**use.kwargs, "activation": "", "multiplier": out}
    return Tensors(given[0], use.kwargs, use.out, use.impl), Tensors(given[1], multiplied, use.out, use.impl)


def one_by_one(bind: Callable[[Tensors], Call], use: Use) -> Call:
    """The call of a launch's parts."""
    calls = [bind(part) for part in parts(use)]

    def run() -> None:
        for call in calls:
            call()

    return run
