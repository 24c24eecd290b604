"""The adapted roofline with dispatch time (BestServe, section 3.3): operators, modules, and how their times add up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from forebay.rewriter.machine.profile import Machine
from forebay.rewriter.predict.estimator import Estimator


@dataclass(frozen=True)
class RooflineOperator:
    """Operations and bytes of memory traffic of one operator."""

    name: str
    flops: float
    nbytes: float


@dataclass(frozen=True)
class Module:
    """Operators that are dispatched together: its operators, seconds the host takes to launch them, and bytes-per-link
    time of what it then exchanges with other devices."""

    name: str
    operators: tuple[RooflineOperator, ...]
    dispatch_s: float = 0.0
    communication_s: float = 0.0


def module_s(module: Module, times: Estimator) -> float:
    """Seconds of a module's operators one after another (equation 7), each the longer of its work and its traffic."""
    return sum(times.work_s(operator.flops, operator.nbytes) for operator in module.operators)


def attaining(machine: Machine, compute_efficiency: float, memory_efficiency: float) -> Machine:
    """`machine` attaining these shares of its peaks: P = min(e_c S_c, I e_m S_m), equation 3."""
    read = memory_efficiency * machine.peak_memory_bytes_per_s
    tiers = {**machine.tiers, "device": replace(machine.tiers["device"], bandwidth_bytes_per_s=read)}
    return replace(machine, product_flops=compute_efficiency * machine.peak_flops, tiers=tiers)


def asynchronous_time_s(modules: Sequence[Module], times: Estimator, layers: int) -> float:
    """Seconds from first launch to last result, over `layers` repetitions of `modules` (BestServe's Algorithm 1).

    The host launches without waiting and the device starts a module once it is launched and the one before is done:
    C = max(C, D) + compute + communication, where D adds up dispatch times. D and C run on through all layers; started
    anew in each layer, as the algorithm's listing reads, they do not give the totals of the paper's Table 3.
    """
    works = [module_s(module, times) + module.communication_s for module in modules]
    layer_launch, layer_work = sum(module.dispatch_s for module in modules), sum(works)
    launched, left, done = 0.0, layer_work, 0.0
    for module, work in zip(modules, works, strict=True):
        # What is done last waited for some launch and never again: C is the greatest of launch + all work from there
        # on, and in the layer that is linear, so the first or the last layer has it.
        launched += module.dispatch_s
        done = max(done, launched + left + max(0.0, (layers - 1) * layer_work, (layers - 1) * layer_launch))
        left -= work
    return done if layers else 0.0
