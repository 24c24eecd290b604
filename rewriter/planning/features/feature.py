"""A feature of batch schedules: what it says of a plan, what it takes, and which schedules it would try."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from forebay.rewriter.capture.step_graphs import StepGraphs
from forebay.rewriter.ir.draft import Draft
from forebay.rewriter.ir.graph import Layout
from forebay.rewriter.ir.plan import Plan, Workload
from forebay.rewriter.ir.schedule.batch_schedule import BatchSchedule
from forebay.rewriter.machine.profile import Machine
from forebay.rewriter.planning.options import Options
from forebay.rewriter.predict.closed_form import CacheMoves

FeatureBuffer = tuple[str, str, str, int, int]  # name, kind, arena, nbytes, alignment: see `BufferPlacement`


@dataclass(frozen=True)
class ScheduleRequest:
    """A search for schedules of a workload.

    Attributes:
        workload: The sizes that are asked for.
        options: What is asked of the plan.
        graphs: The model's step graphs for the whole workload at once.
        machine: The machine that is to run it.
        staged: Whether caches leave the device.
    """

    workload: Workload
    options: Options
    graphs: StepGraphs
    machine: Machine
    staged: bool = False


@dataclass(frozen=True)
class Trial:
    """The tools with which a feature tries other schedules.

    Attributes:
        simulate: The plan of a schedule (and of other options, where they are given), whose Programs are simulated;
            None where there is none.
        options: What is asked of the plan.
        machine: The speeds that plans go by.
        bytes_per_s: The rate at which weights come.
        graphs: The model's step graphs for the whole workload at once.
    """

    simulate: Callable[..., Plan | None]
    options: Options
    machine: Machine
    bytes_per_s: float
    graphs: StepGraphs


@dataclass(frozen=True)
class ScheduleFeature:
    """A feature by its `name`; what is left out, it has none of.

    Attributes:
        check: What contradicts itself in a plan, as the field and why; "" for nothing.
        candidates: The schedules to compare in place of one that features before it have settled; PlanError for options
            that no schedule has.
        buffers: Memory that lives throughout, by the schedule, the layout of the largest prefill step (None: not known)
            and whether disk reads land in host memory first.
        moves: What a step moves, from what it moves without the feature, the step's layout, the schedule and layers.
        explain: A row of `explain`, its title of nine letters at most and its text; None where a plan has none.
        improve: The best plan of a batch after trying more schedules, from the best so far.
        finish: The same once the batch is chosen.
        step: Edits the draft of a step, of which the plan has the buffers. Those of the package's own features stand
            among the passes, whose order says more.
    """

    name: str
    check: Callable[[Plan], str] = field(default=lambda plan: "")
    candidates: Callable[[BatchSchedule, ScheduleRequest], Iterable[BatchSchedule]] = field(
        default=lambda batching, request: (batching,))
    buffers: Callable[[BatchSchedule, Layout | None, bool], Iterable[FeatureBuffer]] = field(
        default=lambda batching, layout, host_hop: ())
    moves: Callable[[CacheMoves, Layout | None, BatchSchedule, int], CacheMoves] = field(
        default=lambda moves, layout, batching, layers: moves)
    explain: Callable[[Plan], tuple[str, str] | None] = field(default=lambda plan: None)
    improve: Callable[[Plan, Trial], Plan] = field(default=lambda best, trial: best)
    finish: Callable[[Plan, Trial], Plan] = field(default=lambda best, trial: best)
    step: Callable[[Draft, Plan], None] = field(default=lambda draft, plan: None)
