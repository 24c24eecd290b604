"""The debugging switches, read from the environment once per compilation. docs/debugging.md has the table."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Switches:
    """FOREBAY_* as values; the defaults are what an unset environment gives."""

    dump: str = ""  # folder for graphs before and after each pass, and plan.json
    verify: bool = True
    skip: tuple[str, ...] = ()
    stop_after: str = ""
    bisect: bool = False
    sync: bool = False
    poison: bool = False
    no_reuse: bool = False
    graphs: bool = True
    pdl: bool = False  # programmatic dependent launches
    verify_graphs: bool = False  # after every pass, beside the Programs
    whole_steps: bool = False  # streamed steps as one CUDA graph each, with their copies


class SwitchError(ValueError):
    """A FOREBAY_ variable that cannot be understood."""


def read_switches(environment: Mapping[str, str] = os.environ) -> Switches:
    """The switches that `environment` sets; SwitchError names a value that is neither on nor off."""

    def flag(name: str, default: bool) -> bool:
        value = environment.get(name, "").strip().lower()
        if value in ("", "1", "true", "on", "yes"):
            return default if value == "" else True
        if value in ("0", "false", "off", "no"):
            return False
        also = {"FOREBAY_VERIFY": ", or graphs", "FOREBAY_GRAPHS": ", or steps"}.get(name, "")
        raise SwitchError(f"{name}={environment[name]!r}: write 1 or 0{also}")

    graphs, whole = (environment.get(name, "").strip().lower() == word
                     for name, word in (("FOREBAY_VERIFY", "graphs"), ("FOREBAY_GRAPHS", "steps")))
    return Switches(
        dump=environment.get("FOREBAY_DUMP", ""),
        verify=graphs or flag("FOREBAY_VERIFY", True),
        skip=tuple(s.strip() for s in environment.get("FOREBAY_SKIP", "").split(",") if s.strip()),
        stop_after=environment.get("FOREBAY_STOP_AFTER", "").strip(),
        bisect=flag("FOREBAY_BISECT", False),
        sync=flag("FOREBAY_SYNC", False),
        poison=flag("FOREBAY_POISON", False),
        no_reuse=flag("FOREBAY_NO_REUSE", False),
        graphs=whole or flag("FOREBAY_GRAPHS", True),
        pdl=flag("FOREBAY_PDL", False),
        verify_graphs=graphs,
        whole_steps=whole,
    )
