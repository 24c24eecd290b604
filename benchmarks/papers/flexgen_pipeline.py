"""FlexGen's Table 3: four T4s, each with a quarter of the layers, by the block model of one with that many layers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from benchmarks.papers.flexgen import ALL_DEVICE, ALL_HOST, FLEXGEN, NEW_TOKENS, TABLE_2, PublishedRun
from benchmarks.papers.published_runtime import UNPINNED, running
from benchmarks.papers.tables import Row
from forebay.rewriter.policy.block_costs import BlockShape
from forebay.rewriter.policy.policy_search import Problem
from forebay.rewriter.policy.shares import shares

STAGES, BOUND = 4, 0.20


@dataclass(frozen=True)
class PipelineRun:
    """Tokens per second of Table 3, of prefill and decode together and of decode alone, on four machines and on one;
    `run` has the policy of the benchmark script beside the code (bench_…_4x1.sh)."""

    run: PublishedRun
    generated: float
    decoded: float
    decoded_by_one: float


def _run(model: str, micro_batch: int, micro_batches: int,
         percent: tuple[int, int, int, int, int, int]) -> PublishedRun:
    return PublishedRun("FlexGen", model, 512, 0.0, micro_batch, micro_batches, percent)


TABLE_3 = (
    PipelineRun(_run("opt-6.7b", 24, 1, ALL_DEVICE), 201.12, 764.65, 38.28),
    PipelineRun(_run("opt-30b", 64, 3, (20, 80, 0, 100, 0, 100)), 23.61, 48.94, 11.52),
    PipelineRun(_run("opt-175b", 40, 1, ALL_HOST), 2.33, 3.86, 0.83),
)


def phases_s(run: PublishedRun, problem: Problem) -> tuple[float, float]:
    """Seconds of a stage for the prompts of one block, and for one decode step of it."""
    wg, wc, cg, cc, hg, hc = (p / 100 for p in run.percent)
    costs = problem.costs(BlockShape(run.micro_batch, run.micro_batches, "zigzag", "native", "native", True))
    x = shares((wg, wc, 1 - wg - wc), (cg, cc, 1 - cg - cc), (hg, hc, 1 - hg - hc))
    return costs.time_s(x, "prefill"), costs.time_s(x, "decode") / (run.new_tokens - 1)


def stage_of(run: PublishedRun, stages: int = STAGES) -> Problem:
    """A stage's problem. Weights in memory that is not pinned come through pinned staging, beside the stage's work."""
    problem = run.problem()
    layers = tuple(replace(kind, count=kind.count // stages) for kind in problem.model.layers)
    runtime = replace(FLEXGEN, host_weights="staged") if run.model == "opt-175b" else FLEXGEN
    return replace(problem, model=replace(problem.model, layers=layers), runs=running(runtime, UNPINNED["t4"]))


def predicted(run: PublishedRun, stages: int = STAGES) -> tuple[float, float]:
    """Tokens per second in all, and of decode alone.

    As many blocks as stages are under way (the scripts' inner iterations). Prompts wait until the first block has come
    through: 2 stages - 1 stage times; a decode step of all blocks takes one stage time for each.
    """
    prefill, step = phases_s(run, stage_of(run, stages))
    size, steps = run.micro_batch * run.micro_batches, NEW_TOKENS - 1
    return stages * size * NEW_TOKENS / ((2 * stages - 1) * prefill + stages * steps * step), size / step


def table_3() -> Iterator[Row]:
    """What the runtime does with OPT-175B's weights was chosen on these rows: relayed as on one machine it is 32 % and
    48 % slower than printed."""
    for case in TABLE_3:
        note = "runtime chosen here" if case.run.model == "opt-175b" else ""
        for name, paper, found in zip(("generation", "decoding"), (case.generated, case.decoded),
                                      predicted(case.run), strict=True):
            yield Row("FlexGen, Table 3", f"FlexGen (4), {case.run.model}, {name}", "token/s", paper, found, BOUND,
                      note)


def scaling() -> dict[str, tuple[float, float]]:
    """By model, decode throughput of four machines to that of one: printed, predicted."""
    found = {}
    for case in TABLE_3:
        one = next(r for r in TABLE_2 if (r.system, r.model, r.prompt) == ("FlexGen", case.run.model, 512))
        rate = one.micro_batch * one.micro_batches / phases_s(one, one.problem())[1]
        found[case.run.model] = case.decoded / case.decoded_by_one, predicted(case.run)[1] / rate
    return found
