"""Predicted beside measured decode steps, model by model: `python -m benchmarks.prediction [--model big] [--batch 8]`.

Each cell is one model and batch at several budgets. A machine profile is measured first, in the same process, as
`forebay machine` does it. Disks, and machines with neighbours, vary from second to second; so the budgets take turns,
and at every visit plain reads by the engine in use are timed before and after the steps, and products that the profile
holds. The visit's step is predicted with the median of these reads as the rate of the link, and with all times of
computation in the ratio (`pace`) in which those products now stand to the profile. Nothing else is taken from the run
that is predicted. The error is the median over the visits, each against the median of its own steps; that of the plan's
own prediction, which knows the profile alone, is printed too. Budgets are shares of the weights beside what the
smallest plan takes.

`--json FILE` appends each cell to a file; `--show FILE` prints the table of all its cells. `--sweep` runs forced slots,
slot sizes and leads beside the plan that the planner chooses, in turns, and says how far from the best that one is.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import itertools
import json
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

os.environ.setdefault("GOMP_SPINCOUNT", "0")

import torch

import forebay
from benchmarks.big_model import big_model
from forebay.kernels.products.linear.cpu import bind_linear
from forebay.language_model import LanguageModel
from forebay.rewriter.checkpoints.resolve import demo_checkpoint
from forebay.rewriter.ir.plan import PlanError
from forebay.rewriter.machine.profile import Machine, load_machine
from forebay.rewriter.predict.simulate import simulate
from forebay.runtime.disk.reader import open_reader
from forebay.runtime.measure.kernels import GEMM_SHAPES, QUICK_SHAPES, cold_weights
from forebay.runtime.measure.machine import landing_memory, measure_machine, read_time_s

MODELS = {"smollm2": demo_checkpoint, "big": big_model}
PROBE_NBYTES = 128 << 20
PROBE_S = 0.15
MIB = 1 << 20
SWEPT_SLOTS, SWEPT_MIB = (2, 4, 8), (1, 2, 4, 8)
FINALISTS = 3

Row = dict[str, Any]


@dataclass(frozen=True)
class PredictedCell:
    """One model and workload on one machine profile."""

    model: str
    folder: Path
    machine: Machine
    batch: int
    prompt: int
    new: int

    def wrap(self, budget: int, **options: Any) -> LanguageModel:
        return forebay.wrap(self.folder, {"device": budget}, batch=self.batch, prompt=self.prompt, new_tokens=self.new,
                            machine=self.machine, **options)


class Probe:
    """What the machine does just now: plain reads of the model's largest file by the engine that the profile chose,
    each from where the last ended, and the profile's products of so many rows, `by` that implementation or the fastest,
    for weights outside the caches."""

    def __init__(self, folder: Path, machine: Machine, dtype: str, batch: int, by: str = "") -> None:
        self.calls: list[tuple[float, Iterator[Any]]] = []  # seconds by the profile, and the product over other weights
        for n, k in GEMM_SHAPES[:QUICK_SHAPES]:
            impl = by or machine.best_gemm(dtype, batch, n, k)
            weights = cold_weights(n, k, getattr(torch, dtype))
            x, out = weights.new_ones(batch, k), weights.new_empty(batch, n)
            products = itertools.cycle([bind_linear(impl, x, w, None, out) for w in weights])
            self.calls.append((machine.gemm_time_s(impl, dtype, batch, n, k), products))
        self.path = str(max(folder.glob("*.safetensors"), key=os.path.getsize))
        self.size = os.path.getsize(self.path)
        link = machine.link("disk", "device")
        self.reader = open_reader(link.method, link.depth, link.chunk_nbytes)
        self.memory = landing_memory(64 * MIB)
        self.at = 0

    def bytes_per_s(self, least_s: float = 0.0) -> float:
        """The rate of one read, or of as many as take so many seconds: on a disk that others use too, single ones
        differ by half."""
        span, time_s, reads = min(PROBE_NBYTES, self.size // MIB * MIB), 0.0, 0
        while not reads or time_s < least_s:
            if self.at + span > self.size:
                self.at = 0
            time_s += read_time_s(self.reader, self.path, self.at, span, self.memory)
            self.at += span
            reads += 1
        return reads * span / time_s

    def pace(self) -> float:
        """How many times as long as in the profile its products take, one of each shape after the other."""
        alone = sum(time_s for time_s, _ in self.calls)
        found: list[float] = []
        end = time.perf_counter() + PROBE_S
        while (start := time.perf_counter()) < end:
            for _, products in self.calls:
                next(products)()
            found.append((time.perf_counter() - start) / alone)
        return median(found)


def step_times_s(lm: LanguageModel, cell: PredictedCell) -> list[float]:
    """Seconds of each decode step of one answer, from token to token."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(5, lm.captured.vocab_size, (cell.batch, cell.prompt), generator=generator)
    at: list[float] = []
    lm.generate(ids, max_new_tokens=cell.new, eos_token_id=None, on_token=lambda _: at.append(time.perf_counter()))
    return [b - a for a, b in itertools.pairwise(at)][1:]  # the first binds the program


def at_pace(machine: Machine, bytes_per_s: float, pace: float) -> Machine:
    """The profile with another rate of reads from disk, and all computation `pace` times as long."""
    links = tuple(replace(x, bandwidth_bytes_per_s=bytes_per_s) if x.src == "disk" else x for x in machine.links)
    return replace(
        machine, links=links, gemm=tuple(replace(p, time_s=p.time_s * pace) for p in machine.gemm),
        attention=tuple(replace(p, time_s=p.time_s * pace) for p in machine.attention),
        memory_bytes_per_s=machine.memory_bytes_per_s / pace)


def visit(lm: LanguageModel, cell: PredictedCell, probe: Probe) -> Row:
    """One answer's steps, between plain reads and products."""
    paces, rates = [probe.pace()], [probe.bytes_per_s() for _ in range(2)]
    times = step_times_s(lm, cell)
    rates += [probe.bytes_per_s() for _ in range(2)]
    paces.append(probe.pace())
    return {"times_s": times, "bytes_per_s": median(rates), "pace": sum(paces) / 2}


def predict(lm: LanguageModel, cell: PredictedCell, visits: Sequence[Row]) -> Row:
    """What the plan is, and each visit's step predicted with the rates found at it."""
    program = lm._pipeline.program(lm.plan, 1)
    lines = [simulate(program, at_pace(cell.machine, v["bytes_per_s"], v["pace"])) for v in visits]
    s = lm.plan.schedule
    return {
        "visits": [v | {"predicted_s": line.time_s} for v, line in zip(visits, lines, strict=True)],
        "planned_s": lm.plan.prediction.decode_time_s, "bottleneck": lines[0].bottleneck,
        "streamed_nbytes": lm.plan.prediction.streamed_nbytes, "slots": s.slots, "slot_nbytes": s.slot_nbytes,
        "lead": s.lead, "prefill_chunk": s.prefill_chunk, "budget": lm.plan.budget.device}


def measure_cell(cell: PredictedCell, shares: Sequence[float], rounds: int) -> Iterator[Row]:
    """A row per budget; the budgets take turns, `rounds` times."""
    with cell.wrap(1 << 40) as lm:
        smallest = lm._pipeline.smallest_budget()
        weights = sum(w.nbytes for w in lm.plan.weights)
        dtype = max(lm.plan.gemm, key=lambda g: g.n * g.k).dtype
    probe = Probe(cell.folder, cell.machine, dtype, cell.batch)
    models = {share: cell.wrap(smallest + int(weights * share)) for share in shares}
    visits: dict[float, list[Row]] = {share: [] for share in shares}
    for _ in range(rounds):
        for share, lm in models.items():
            visits[share].append(visit(lm, cell, probe))
            lm.close()
            gc.collect()
    for share, lm in models.items():
        yield predict(lm, cell, visits[share]) | {
            "share": share, "model": cell.model, "batch": cell.batch, "prompt": cell.prompt, "new": cell.new,
            "weights": weights}


def sweep(cell: PredictedCell, share: float, rounds: int) -> None:
    """Print forced schedules beside the planner's own: the decode step predicted as planned, and measured.

    All take turns; then the planner's and the best few alone, three times as often and from nothing, because the best
    of many noisy medians is too good to be true. A schedule stands to the planner's as the median over the rounds of
    their ratio within a round.
    """
    with cell.wrap(1 << 40) as lm:
        budget = lm._pipeline.smallest_budget() + int(sum(w.nbytes for w in lm.plan.weights) * share)
    models = {"planner": cell.wrap(budget)}
    chunk = models["planner"].plan.schedule.prefill_chunk
    for slots, mib in itertools.product(SWEPT_SLOTS, SWEPT_MIB):
        for lead in sorted({slots, slots // 2}):
            name = f"{slots} x {mib} MiB, lead {lead}"
            with contextlib.suppress(PlanError):  # does not fit the budget
                models[name] = cell.wrap(budget, slots=slots, slot_nbytes=mib * MIB, lead=lead, prefill_chunk=chunk)
    s = models["planner"].plan.schedule
    print(f"{cell.model}, batch {cell.batch}, {100 * share:.0f} % ({budget / 1e6:.0f} MB); the planner takes {s.slots} "
          f"x {s.slot_nbytes / MIB:.2f} MiB, lead {s.lead}", flush=True)
    predicted = {name: lm.plan.prediction.decode_time_s for name, lm in models.items()}
    times = in_turns(models, cell, rounds)
    for name in sorted(models, key=lambda name: to_planner(times, name)):
        print(f"  {name:24} streams {models[name].plan.prediction.streamed_nbytes / 1e6:6.0f} MB  predicted "
              f"{1e3 * predicted[name]:7.1f} ms  measured {spread(times[name])}  {to_planner(times, name):.3f} x",
              flush=True)
    best = sorted(models, key=lambda name: to_planner(times, name))[:FINALISTS]
    times = in_turns({name: models[name] for name in {"planner": 0} | dict.fromkeys(best)}, cell, 3 * rounds)
    print("  again, from nothing:")
    for name in sorted(times, key=lambda name: to_planner(times, name)):
        print(f"  {name:24} measured {spread(times[name])}  {to_planner(times, name):.3f} x")
    print(f"the planner's is {100 * (predicted['planner'] / min(predicted.values()) - 1):.1f} % above the best "
          f"predicted, {100 * (1 / min(to_planner(times, name) for name in times) - 1):.1f} % above the best measured",
          flush=True)


def in_turns(models: Mapping[str, LanguageModel], cell: PredictedCell, rounds: int) -> dict[str, list[float]]:
    """Seconds of each model's decode step in each round, the median of its steps there."""
    times: dict[str, list[float]] = {name: [] for name in models}
    for _ in range(rounds):
        for name, lm in models.items():
            times[name].append(median(step_times_s(lm, cell)))
            lm.close()
            gc.collect()
    return times


def to_planner(times: Mapping[str, Sequence[float]], name: str) -> float:
    return median(a / b for a, b in zip(times[name], times["planner"], strict=True))


def spread(times: Sequence[float]) -> str:
    return f"{1e3 * median(times):7.1f} ms ({1e3 * min(times):.1f}..{1e3 * max(times):.1f})"


def show(rows: Sequence[Row]) -> None:
    """Print the table: a line per model, batch and budget."""
    print(f"{'model':8} {'batch':>5} {'budget':>6} {'streams':>8} {'link GB/s':>9} {'pace':>5} {'predicted ms':>12} "
          f"{'measured ms (spread)':>24} {'error (visits)':>22}  {'as planned':>10}  {'link busy':>9}  bound by")
    errors = []
    for r in rows:
        visits = r["visits"]
        times = [median(v["times_s"]) for v in visits]
        found = [v["predicted_s"] / time_s - 1 for v, time_s in zip(visits, times, strict=True)]
        errors.append(abs(median(found)))
        measured, rate = median(times), median(v["bytes_per_s"] for v in visits)
        print(f"{r['model']:8} {r['batch']:5} {100 * r['share']:4.0f} % {r['streamed_nbytes'] / 1e6:5.0f} MB "
              f"{rate / 1e9:9.2f} {median(v['pace'] for v in visits):5.2f} "
              f"{1e3 * median(v['predicted_s'] for v in visits):12.1f} "
              f"{1e3 * measured:10.1f} ({1e3 * min(times):.1f}..{1e3 * max(times):.1f})".ljust(86) +
              f"{100 * median(found):+6.1f} % ({100 * min(found):+.0f}..{100 * max(found):+.0f})".rjust(22) +
              f"  {100 * (r['planned_s'] / measured - 1):+8.1f} %  {r['streamed_nbytes'] / measured / rate:9.2f}  "
              f"{r['bottleneck']}")
    within = sum(e <= 0.15 for e in errors)
    print(f"within 15 %: {within} of {len(errors)}; median error {100 * median(errors):.1f} %, "
          f"largest {100 * max(errors):.1f} %")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, help="default: both")
    parser.add_argument("--batch", default="1,8,32", help="comma-separated")
    parser.add_argument("--budgets", default="100,75,50,30,15", help="percent of the weights, comma-separated")
    parser.add_argument("--prompt", type=int, default=16, help="tokens")
    parser.add_argument("--new", type=int, default=8, help="tokens; two steps fewer are measured per round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--machine", type=Path, help="a saved profile; measured at the start if not given")
    parser.add_argument("--json", type=Path, help="append the rows to this file")
    parser.add_argument("--sweep", action="store_true", help="forced schedules at each of --budgets instead")
    parser.add_argument("--show", type=Path, help="print the rows of such a file and measure nothing")
    args = parser.parse_args()
    if args.show:
        show(json.loads(args.show.read_text()))
        return
    torch.set_num_threads(args.threads)
    rows: list[Row] = []
    for name in [args.model] if args.model else list(MODELS):
        folder = Path(MODELS[name]())
        for batch in map(int, args.batch.split(",")):
            machine = load_machine(args.machine) if args.machine else measure_machine(folder, quick=True)
            if machine.guessed:  # the pace of measured products then says nothing of those that a guess stands for
                print(f"a cautious guess stands for {'; '.join(machine.guessed)}: what follows is no measure of the "
                      "predictions; run this on a quieter machine", file=sys.stderr)
            cell = PredictedCell(name, folder, machine, batch, args.prompt, args.new)
            shares = [float(s) / 100 for s in args.budgets.split(",")]
            if not args.sweep:
                rows += measure_cell(cell, shares, args.rounds)
            for share in shares if args.sweep else ():
                sweep(cell, share, args.rounds)
    if args.sweep:
        return
    if args.json:
        known = json.loads(args.json.read_text()) if args.json.exists() else []
        args.json.write_text(json.dumps(known + rows, indent=1) + "\n")
    show(rows)


if __name__ == "__main__":
    main()
