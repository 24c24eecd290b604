"""Which implementation computes a matrix product on the CPU."""

from __future__ import annotations

from forebay.kernels import operators
from forebay.kernels.operator import ROUNDED, Implementations, Product
from forebay.rewriter.machine.profile import Machine
from forebay.rewriter.planning.launch_memory import product_launch

MANY_ROWS = 1 << 10


def known_names(weight: str) -> tuple[str, ...]:
    """All implementations here for weights of a dtype or format, those that round activations too."""
    return (*_choice(weight).candidates(weight), *(n for wish in ROUNDED for n in rounding_names(weight, wish)))


def rounding_names(weight: str, activations: str) -> tuple[str, ...]:
    """Return the implementations that round to `activations` for many rows."""
    return _choice(weight).rounding(Product(weight, MANY_ROWS, 1, 1), activations)


def _choice(weight: str) -> Implementations:
    choice = operators.product_with(weight).implementations
    assert choice is not None
    return choice


def best_product(product: Product, machine: Machine, activations: str, most: int | None) -> str:
    """The fastest implementation measured on the machine, with rounded `activations` among those too that round so;
    where not all were measured the kernels' own choice, or one that rounds. One that takes at most `most` bytes of
    workspace, if any does: a tile may want more than the whole."""
    choice = _choice(product.weight)
    rounding = choice.rounding(product, activations)
    measured, known = set(machine.gemm_impls(product.weight)), {*choice.candidates(product.weight), *rounding}
    within = known if most is None else {
        n for n in known if product_launch(product, n, machine.kind).workspace_nbytes <= most} or known
    if known and measured >= known:  # a profile made where there was a compiler names kernels that need one
        return machine.best_gemm(*product, within)
    own = next(iter(rounding), "") or choice.default[machine.kind.kernels](product, machine.device_kind, "")
    return own if own in within or own not in known else min(within)
