"""Options of torch.compile's backend `forebay`, validated."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from forebay.rewriter.ir.byte_sizes import parse_budget
from forebay.rewriter.ir.plan import Budget
from forebay.rewriter.planning.options import Options, make_options, nearest

KNOWN = ("budget", "strict", "slots", "slot_nbytes", "lead", "machine")  # a call of a module has no more to plan


@dataclass(frozen=True)
class CompileOptions:
    """`options` of torch.compile. `strict`: raise where a graph would fall back to eager; `planned`: those of the table
    of options that a module has."""

    budget: Budget
    strict: bool
    planned: Options


def parse_options(options: Mapping[str, Any] | None) -> CompileOptions:
    """Validate; ValueError names an unknown or missing option and those there are, PlanError a value that is wrong."""
    if options is not None and not isinstance(options, Mapping):
        raise ValueError(f'options: expected a mapping such as {{"budget": "500MB"}}, not {options!r}')
    given = dict(options or {})
    for name in given:
        if name not in KNOWN:
            meant = nearest(name, KNOWN) or f"; the options are {', '.join(KNOWN)}"
            raise ValueError(f"options: unknown option {name!r}{meant}")
    if "budget" not in given:
        raise ValueError('options: say how much memory may be used, as {"budget": "500MB"}')
    budget, strict = parse_budget(given.pop("budget")), given.pop("strict", False)
    if not isinstance(strict, bool):
        raise ValueError(f"options: strict is True or False, not {strict!r}")
    return CompileOptions(budget, strict, make_options(given))
