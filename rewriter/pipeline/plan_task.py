"""A planning task: a model's graphs, the budget, the workload, the options, and the machine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Self

from forebay.rewriter.capture.step_graphs import StepGraphs, step_graphs
from forebay.rewriter.ir.graph import CapturedModel
from forebay.rewriter.ir.plan import Budget, Plan, Workload
from forebay.rewriter.ir.program import FileSlice
from forebay.rewriter.ir.schedule.batch_schedule import ALONE, BatchSchedule
from forebay.rewriter.machine.profile import Machine
from forebay.rewriter.pipeline.rewrite_captured import rewrite_captured
from forebay.rewriter.pipeline.step_pipeline import Pipeline
from forebay.rewriter.planning.features.feature import ScheduleRequest
from forebay.rewriter.planning.features.table import candidates
from forebay.rewriter.planning.options import Options
from forebay.rewriter.switches import Switches

GraphsOf = Callable[[Workload, BatchSchedule], StepGraphs]
Planned = tuple[Pipeline, Plan]


@dataclass(frozen=True)
class ModelGraphs:
    """The step graphs of a model after the block passes, by workload and schedule."""

    fused: CapturedModel
    files: Mapping[str, FileSlice]
    fingerprint: str
    host_hop: bool

    @classmethod
    def of(cls, captured: CapturedModel, files: Mapping[str, FileSlice], fingerprint: str, machine: Machine,
           switches: Switches, options: Options) -> Self:
        """Rewrite a captured model for the formats that `options` name."""
        return cls(rewrite_captured(captured, switches, options.cache, options.activations), files, fingerprint,
                   machine.host_hop)

    def __call__(self, workload: Workload, batching: BatchSchedule) -> StepGraphs:
        graphs = step_graphs(self.fused, self.files, workload, self.fingerprint, host_hop=self.host_hop,
                             batching=batching)
        if self.fused.gives == "all":
            graphs = replace(graphs, prefill=None)  # chunks may follow decode steps, so the cache has its full length
        return graphs


@dataclass(frozen=True)
class PlanTask:
    """A model to plan for (at least) a workload, within a budget."""

    graphs_of: GraphsOf
    budget: Budget
    workload: Workload
    options: Options
    machine: Machine
    switches: Switches

    def pipeline(self, batching: BatchSchedule) -> Pipeline:
        """Make the pipeline of a schedule, for a workload of whole micro-batches."""
        whole = self.workload.whole(batching)
        return Pipeline(self.graphs_of(whole, batching), whole, self.machine, self.switches)

    def schedules(self, staged: bool = False) -> list[BatchSchedule]:
        """List the schedules to compare with caches on the device, or where they leave it."""
        graphs = self.graphs_of(self.workload, ALONE)
        return candidates(ScheduleRequest(self.workload, self.options, graphs, self.machine, staged))

    def for_batch(self, batch: int, **options: object) -> PlanTask:
        """The same for so many sequences, with other `options`."""
        return replace(self, workload=replace(self.workload, batch=batch),
                       options=replace(self.options, **options))  # type: ignore[arg-type]


PlanChoice = Callable[[PlanTask], Planned]
