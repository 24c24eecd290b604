"""The budget where none is named: half of the memory that is free."""

from __future__ import annotations

from typing import Any

from forebay.kernels.build.process_limits import available_nbytes
from forebay.rewriter.ir.byte_sizes import eighth, parse_budget
from forebay.rewriter.ir.plan import Budget
from forebay.rewriter.machine.profile import Machine
from forebay.runtime.comm.launched import ranks_here
from forebay.runtime.devices.kinds import device_here, kind_of


def default_budget(machine: Machine | None = None) -> Budget:
    """Return half of the free memory, within the limits of a container; or of what a named machine has.

    Free memory is never the same twice. It is rounded down, to one of eight sizes between a power of two and the next:
    a second start then finds the plan that the first start kept.

    Returns:
        Half of the RAM as the device's on a machine without a GPU; else half of the GPU's memory, and half of the RAM
        as the host's; where both are one memory, half of that for both. Processes that torchrun started on this
        machine share its RAM evenly.
    """
    if machine is not None:
        return Budget(machine.tiers["device"].capacity_nbytes // 2, 0 if machine.kind.on_host_cores else (
            machine.tiers["host"].capacity_nbytes // 2 if "host" in machine.tiers else 0))
    kind, half = kind_of(device_here()), _rounded(available_nbytes() // (2 * ranks_here(1)))
    own = kind.free_nbytes()
    if own is not None and kind.one_memory():
        whole = min(half, _rounded(own // 2))
        return Budget(whole - whole // 8, whole // 8)
    return Budget(half) if own is None else Budget(_rounded(own // 2), half)


def _rounded(nbytes: int) -> int:
    """`nbytes` down to eighths of the power of two within it."""
    return nbytes // eighth(nbytes) * eighth(nbytes)


def budget_or_default(budget: Budget | int | str | dict[str, Any] | None) -> Budget:
    """Return the budget that is named, or the default for None.

    Raises:
        PlanError: The budget is not one.
    """
    return default_budget() if budget is None else parse_budget(budget)
