"""Running the passes of one phase: left out, dumped, checked, compared and stopped at as the switches say."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

from torch import fx

from forebay.rewriter.ir.draft import Draft
from forebay.rewriter.ir.graph import block_graphs
from forebay.rewriter.report.dump import Dump
from forebay.rewriter.switches import SwitchError, Switches
from forebay.rewriter.verify.bisect import Bisection, RunStep
from forebay.rewriter.verify.graph import check_captured, check_concrete

ALWAYS_CHECK = False  # graphs are checked after every pass whatever the switches say: the test suite sets it


@dataclass(frozen=True)
class Pass:
    """A pass and where it stands.

    Phases: "captured" graphs have symbolic sizes and know no plan; "planned" ones have fixed sizes; from "lowered" on
    the step is a list. Scope: a pass is run on the step graph alone, or on it and on each block that it calls, or on
    the draft. `optional`: without it the result is slower, not wrong. `rounds`: it changes values to those of a format.
    `asked`: it runs where somebody asks for what it makes.
    """

    run: Callable[..., Any]
    phase: Literal["captured", "planned", "lowered"]
    scope: Literal["whole step", "each graph", "draft"]
    why: str
    optional: bool = False
    rounds: bool = False
    asked: bool = False

    @property
    def name(self) -> str:
        return self.run.__name__


class StoppedAfter(RuntimeError):
    """FOREBAY_STOP_AFTER stopped the pipeline on purpose."""


def check_switches(passes: Iterable[Pass], switches: Switches) -> None:
    """SwitchError for a pass that is not there, or that cannot be left out."""
    optional = [each.name for each in passes if each.optional]
    for name in switches.skip:
        if name not in optional:
            raise SwitchError(f"FOREBAY_SKIP: {name!r} cannot be skipped; those that can: {', '.join(optional)}")
    known = [each.name for each in passes]
    if switches.stop_after and switches.stop_after not in known:
        raise SwitchError(f"FOREBAY_STOP_AFTER: no pass {switches.stop_after!r}; they are {', '.join(known)}")


class Stage:
    """A step graph on its way through the passes of a phase; its dumps go to `folder`. A captured one is looked at in
    small sizes, and `formats` tells which of its weights become packed rows. `runs` gives what runs a lowered step, as
    it is after any pass of the last phase, where it can be run here and compared with its graph."""

    def __init__(self, gm: fx.GraphModule, switches: Switches, folder: str, formats: Any = None,
                 runs: Callable[[Any], RunStep] | None = None) -> None:
        self.gm, self.switches, self.captured, self.runs = gm, switches, formats is not None, runs
        self.dump = Dump(switches.dump, folder)
        self.sound: dict[fx.Node, tuple] = {}  # nodes as they were when they were found sound
        self.checked = switches.verify_graphs or switches.bisect or ALWAYS_CHECK
        self.seen = self._check("capture") if self.captured else gm
        self.bisection = Bisection(self.seen, formats or {}) if switches.bisect else None

    def run(self, each: Pass, given: Callable[[str], tuple]) -> None:
        """Run a pass on the graphs of its scope, each with the values `given` for it by name ("": the step graph)."""
        if each.name not in self.switches.skip:
            self.dump.before(self.gm, each.name)
            graphs = {"": self.gm}
            before = _contents(self.gm) if self.checked else []
            if each.scope == "each graph":
                graphs |= block_graphs(self.gm)
            for name, graph in graphs.items():
                each.run(graph, *given(name))
            self.dump.after(self.gm, each.name)
            if not self.checked or not _same(before, _contents(self.gm)):  # else the check before holds still
                self.seen = self._check(each.name)
            if self.bisection is not None:
                self.bisection.compare(self.seen, each.name, each.rounds)
        self.stop(each)

    def lowered(self, each: Pass, step: Any, *given: object) -> Any:
        """The step as a pass of the last phase leaves it: edited in place, or made anew."""
        if each.name not in self.switches.skip:
            made = each.run(step, *given)
            step = step if made is None else made
            if isinstance(step, Draft):
                self.dump.draft(step, each.name)
            else:
                self.dump.program(step)
            if self.bisection is not None and self.runs is not None:
                self.bisection.compare_step(self.runs(step), each.name)
        self.stop(each)
        return step

    def _check(self, passed: str) -> fx.GraphModule:
        """The graph at sizes at which it can be run, once it is found sound."""
        if self.checked and self.captured:
            return check_captured(self.gm, passed)
        if self.checked:
            check_concrete(self.gm, passed, self.sound)
        return self.gm

    def stop(self, each: Pass) -> None:
        """StoppedAfter where this is the pass after which to stop, run or not."""
        if each.name == self.switches.stop_after:
            raise StoppedAfter(f"FOREBAY_STOP_AFTER={each.name}: stopped there as asked, no Program was made")


def _contents(gm: fx.GraphModule) -> list[tuple[Any, ...]]:
    """Return the parts of a step graph and its blocks that passes may change, as the very objects: fx puts new ones in
    the place of those that change."""
    return [part for graph in (gm, *block_graphs(gm).values()) for node in graph.graph.nodes
            for part in ((graph, node, node.target, node.args, node.kwargs), (*node.meta, *node.meta.values()))]


def _same(before: list[tuple[Any, ...]], after: list[tuple[Any, ...]]) -> bool:
    """Return whether both hold the same objects in the same order."""
    return len(before) == len(after) and all(
        len(a) == len(b) and all(map(operator.is_, a, b)) for a, b in zip(before, after, strict=True))
