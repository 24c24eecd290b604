"""Which implementation computes a matrix product on the CPU."""

from __future__ import annotations

from forebay.kernels import operators
from forebay.kernels.operator import Implementations, Product
from forebay.rewriter.machine.profile import Machine
from forebay.rewriter.planning.launch_memory import product_launch


def known_names(weight: str) -> tuple[str, ...]:
    """All implementations here for weights of a dtype or format, those that round activations too."""
    choice = _choice(weight)
    return (*choice.candidates(weight), *choice.rounding(weight))


def rounding_names(weight: str) -> tuple[str, ...]:
    """Those that round activations to 8 bits."""
    return _choice(weight).rounding(weight)


def _choice(weight: str) -> Implementations:
    choice = operators.product_with(weight).implementations
    assert choice is not None
    return choice


def best_product(product: Product, machine: Machine, activations: str, most: int | None) -> str:
    """The fastest implementation measured on the machine, with `activations` int8 among those too that round them;
    where not all were measured the kernels' own choice, or one that rounds. One that takes at most `most` bytes of
    workspace, if any does: a tile may want more than the whole."""
    choice = _choice(product.weight)
    rounding = choice.rounding(product.weight) if activations == "int8" else ()
    measured, known = set(machine.gemm_impls(product.weight)), {*choice.candidates(product.weight), *rounding}
    within = known if most is None else {
        n for n in known if product_launch(product, n, "cpu").workspace_nbytes <= most} or known
    if known and measured >= known:  # a profile made where there was a compiler names kernels that need one
        return machine.best_gemm(*product, within)
    own = next(iter(rounding), "") or choice.default["cpu"](product, machine.device_kind)
    return own if own in within or own not in known else min(within)
