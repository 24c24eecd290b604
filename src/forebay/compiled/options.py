"""What may be told to torch.compile's backend `forebay`, validated."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from forebay.rewriter.ir.byte_sizes import parse_budget, parse_nbytes
from forebay.rewriter.ir.plan import Budget
from forebay.rewriter.machine.profile import Machine, load_machine
from forebay.rewriter.planning.options import Options


@dataclass(frozen=True)
class CompileOptions:
    """`options` of torch.compile. `strict`: raise where a graph would fall back to eager; `slots`, `slot_nbytes` and
    `lead` force choices of the planner; `machine` is a profile or the path of one."""

    budget: Budget
    strict: bool = False
    slots: int | None = None
    slot_nbytes: int | None = None
    lead: int | None = None
    machine: Machine | None = None

    @property
    def planned(self) -> Options:
        return Options(slots=self.slots, slot_nbytes=self.slot_nbytes, lead=self.lead)


def parse_options(options: Mapping[str, Any] | None) -> CompileOptions:
    """Validate; ValueError names an unknown or missing option and those there are, PlanError a size that is wrong."""
    if options is not None and not isinstance(options, Mapping):
        raise ValueError(f'options: expected a mapping such as {{"budget": "500MB"}}, not {options!r}')
    known = [f.name for f in fields(CompileOptions)]
    given = dict(options or {})
    for name in given:
        if name not in known:
            raise ValueError(f"options: unknown option {name!r}; the options are {', '.join(known)}")
    if "budget" not in given:
        raise ValueError('options: say how much memory may be used, as {"budget": "500MB"}')
    given["budget"] = parse_budget(given["budget"])
    if not isinstance(given.get("strict", False), bool):
        raise ValueError(f"options: strict is True or False, not {given['strict']!r}")
    for name in ("slots", "lead"):
        value = given.get(name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise ValueError(f"options: {name} is a number of at least 1, not {value!r}")
    if given.get("slot_nbytes") is not None:
        given["slot_nbytes"] = parse_nbytes(given["slot_nbytes"], "options: slot_nbytes")
    machine = given.get("machine")
    if isinstance(machine, str | os.PathLike):
        given["machine"] = load_machine(machine)
    elif machine is not None and not isinstance(machine, Machine):
        raise ValueError(f"options: machine is a profile or the path of one, not {machine!r}")
    return CompileOptions(**given)
