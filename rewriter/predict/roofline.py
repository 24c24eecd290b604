"""The adapted roofline with dispatch time (BestServe, section 3.3): operators, modules, and how their times add up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from forebay.rewriter.machine.presets import MachineRates


@dataclass(frozen=True)
class Operator:
    """Operations and bytes of memory traffic of one operator."""

    name: str
    flops: float
    nbytes: float


@dataclass(frozen=True)
class Module:
    """What is dispatched together: its operators, seconds the host takes to launch them, and bytes-per-link time of
    what it then exchanges with other devices."""

    name: str
    operators: tuple[Operator, ...]
    dispatch_s: float = 0.0
    communication_s: float = 0.0


@dataclass(frozen=True)
class Roofline:
    """Peak rates and the shares of them that are attained: P = min(e_c S_c, I e_m S_m), equation 3."""

    flops: float
    bytes_per_s: float
    compute_efficiency: float = 1.0
    memory_efficiency: float = 1.0

    def time_s(self, operator: Operator) -> float:
        """Seconds of an operator: W / P, which is the longer of its operations and its traffic."""
        return max(operator.flops / (self.compute_efficiency * self.flops),
                   operator.nbytes / (self.memory_efficiency * self.bytes_per_s))

    def module_s(self, module: Module) -> float:
        """Seconds of a module's operators one after another (equation 7)."""
        return sum(self.time_s(operator) for operator in module.operators)


def roofline_of(rates: MachineRates, compute_efficiency: float, memory_efficiency: float) -> Roofline:
    """A machine's roofline with efficiencies given."""
    return Roofline(rates.peak_flops, rates.peak_memory_bytes_per_s, compute_efficiency, memory_efficiency)


def asynchronous_time_s(modules: Sequence[Module], roofline: Roofline, layers: int) -> float:
    """Seconds from first launch to last result, over `layers` repetitions of `modules` (BestServe's Algorithm 1).

    The host launches without waiting and the device starts a module once it is launched and the one before is done:
    C = max(C, D) + compute + communication, where D adds up dispatch times. D and C run on through all layers; started
    anew in each layer, as the algorithm's listing reads, they do not give the totals of the paper's Table 3.
    """
    launched = done = 0.0
    for _ in range(layers):
        for module in modules:
            launched += module.dispatch_s
            done = max(done, launched) + roofline.module_s(module) + module.communication_s
    return done
