"""Predicted beside measured steps of two ranks of one thread each: `python -m benchmarks.ranks [--json FILE]`.

SmolLM2 in float32 over gloo, in layouts that take turns. At every visit the profile's products, plain reads where the
layout streams, and exchanges of the layout's own kind and size are timed before and after. The visit's steps are then
predicted for all ranks together with computing, the link and exchanges in the ratio in which those now stand to the
profile. Nothing else is taken from the run. The error is the median over visits. Starts its ranks itself.
"""

from __future__ import annotations

import argparse
import functools
import gc
import itertools
import json
import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

os.environ.setdefault("GOMP_SPINCOUNT", "0")

import torch
import torch.distributed as dist

import forebay
from benchmarks.command import arguments, print_table, spread, write_json
from benchmarks.models import model_folder
from benchmarks.probes import Probe, at_pace
from forebay.language_model import LanguageModel
from forebay.rewriter.checkpoints.resolve import demo_checkpoint, packed_copy
from forebay.rewriter.ir.program import COLLECT, Launch, Program
from forebay.rewriter.ir.share import ranks_of
from forebay.rewriter.machine.profile import Machine, load_machine
from forebay.rewriter.predict.ranks import simulate_ranks
from forebay.rewriter.predict.simulate import STEPS
from forebay.runtime.comm.launched import has_launcher
from forebay.runtime.comm.ranks import from_all, join_ranks, leave_ranks
from forebay.runtime.devices.kinds import HOST
from forebay.runtime.devices.streams import Worker
from forebay.runtime.measure.machine import measure_machine
from forebay.runtime.measure.mesh import ExchangeTurns, measure_mesh

RANKS, BOUND = 2, 0.2
EXCHANGES = 3  # turns of exchanges before and after each visit
Row = dict[str, Any]


@dataclass(frozen=True)
class RanksCell:
    """A layout: its mesh, the share of its weights beside the smallest plan that fits (1: all), packed weights, and a
    model of `benchmarks.models`, with as many prompts and tokens as `prompt` says in place of `--prompt`."""

    mesh: str
    batch: int = 1
    share: float = 1.0
    packed: str = ""
    micro_batches: int | None = None
    model: str = "smollm2"
    prompt: int = 0

    @property
    def name(self) -> str:
        return " ".join(filter(None, (
            self.mesh, f"b{self.batch}", f"{self.share:.0%}" if self.share < 1 else "", self.packed,
            f"{self.micro_batches} micro-batches" if self.micro_batches else "",
            f"{self.model}, prompt {self.prompt}" if self.prompt else "")))


CELLS = (RanksCell("tensor=2"), RanksCell("stages=2"), RanksCell("tensor=2", 8), RanksCell("stages=2", 8),
         RanksCell("tensor=2", share=0.3), RanksCell("stages=2", share=0.3), RanksCell("tensor=2", packed="w4g64"),
         RanksCell("stages=2", 6, micro_batches=3), RanksCell("tensor=2,attention=batch", 8),
         RanksCell("tensor=2,layout=xyz", 8), RanksCell("tensor=2,chunks=2", 8), RanksCell("tensor=2,chunks=4/1", 8),
         RanksCell("tensor=2", packed="w8g64"), RanksCell("tensor=2", 16, model="multiquery", prompt=1024),
         RanksCell("tensor=2,attention=batch", 16, model="multiquery", prompt=1024),
         *(RanksCell("tensor=2", batch, model=model, prompt=32)
           for batch in (1, 8) for model in ("parallel", "serial")))


class RankSteps:
    """When each step of a model began and ended, by its tokens."""

    def __init__(self, lm: LanguageModel) -> None:
        self.seen: list[tuple[float, float]] = []
        run = lm.session._run

        def timed(bound: Any) -> None:
            start = time.perf_counter()
            run(bound)
            self.seen.append((start, time.perf_counter()))

        lm.session._run = timed  # type: ignore[method-assign]


class MeshProbe:
    """What the machine does just now: the ratios to the profile of products, of as many rows as a decode and a prefill
    step have, and of exchanges, and the link's rate. Products and reads are timed rank by rank: what ranks do to each
    other is the profile's to say."""

    def __init__(
        self, cell: RanksCell, lm: LanguageModel, program: Program, probe_of: Callable[[str, int], Probe]
    ) -> None:
        machine, rows = lm.machine, cell.batch // (cell.micro_batches or 1)
        dtype = max(lm.plan.gemm, key=lambda g: g.n * g.k).dtype
        dtype = dtype if hasattr(torch, dtype) else "float32"
        self.probes = [probe_of(dtype, m) for m in (rows, rows * lm.plan.schedule.prefill_chunk)]
        self.streams = lm.plan.prediction.streamed_nbytes > 0
        exchange = next(i for i in program.step if isinstance(i, Launch) and i.stream == COLLECT)
        self.kind, group = exchange.op.split(".")[1], ranks_of(exchange.args[-1])
        self.nbytes = sum(s.nbytes for s in exchange.writes)
        self.known_s = machine.mesh.exchange_s(self.kind, len(group), self.nbytes)
        self.worker = Worker(COLLECT)
        self.turns = ExchangeTurns(self.kind, group, self.worker, HOST)

    def now(self) -> tuple[float, ...]:
        """Paces of products in decode and in prefill, bytes per second of plain reads, and the pace of exchanges; the
        same on all ranks."""
        own: list[float] = []
        for rank in range(RANKS):
            from_all(None)
            if rank == dist.get_rank():
                own = [*(probe.pace() for probe in self.probes),
                       median(self.probes[0].bytes_per_s() for _ in range(3)) if self.streams else 0.0]
        from_all(None)  # who gives first waits for who takes
        exchanges = [self.turns.time_s(self.nbytes, turn) for turn in range(EXCHANGES)]
        return *map(fmean, zip(*from_all(own), strict=True)), fmean(exchanges) / self.known_s


def wrapped(cell: RanksCell, folder: Path, machine: Machine, prompt: int, new: int) -> LanguageModel:
    def wrap(budget: int) -> LanguageModel:
        return forebay.wrap(folder, {"device": budget}, batch=cell.batch, prompt=prompt, new_tokens=new,
                            machine=machine, mesh=cell.mesh, micro_batches=cell.micro_batches)

    lm = wrap(1 << 40)
    if cell.share == 1:
        return lm
    budget = lm.steps.pipeline.smallest_budget() + int(cell.share * sum(w.nbytes for w in lm.plan.weights))
    lm.close()
    return wrap(max(from_all(budget)))


def visit(lm: LanguageModel, cell: RanksCell, probe: MeshProbe, prompt: int, new: int, prefills: int) -> Row:
    """One answer's steps, between probes."""
    before, generator = probe.now(), torch.Generator().manual_seed(1)
    ids = torch.randint(5, lm.captured.vocab_size, (cell.batch, prompt), generator=generator)
    lm.generate(ids, max_new_tokens=2, eos_token_id=None)  # binds the Programs, and touches what they write
    clock = RankSteps(lm)
    lm.generate(ids, max_new_tokens=new, eos_token_id=None)
    after = probe.now()
    begins = [start for start, _ in clock.seen]
    decode = [b - a for a, b in itertools.pairwise(begins)][-(new - 3):]  # behind what grows the cache
    pace, prefill, rate, exchange = (fmean(pair) for pair in zip(before, after, strict=True))
    return {"prefill_s": clock.seen[prefills - 1][1] - begins[0], "decode_s": decode, "decode_pace": pace,
            "prefill_pace": prefill, "bytes_per_s": rate, "exchange_pace": exchange}


def at_present(machine: Machine, seen: Row, phase: str) -> Machine:
    """The profile at a visit's paces."""
    rate = seen["bytes_per_s"] or machine.link("disk", "device").bandwidth_bytes_per_s
    now, pace = at_pace(machine, rate, seen[f"{phase}_pace"]), seen["exchange_pace"]
    links = tuple(replace(x, latency_s=x.latency_s * pace, bandwidth_bytes_per_s=x.bandwidth_bytes_per_s / pace)
                  for x in machine.mesh.exchanges)
    return replace(now, mesh=replace(machine.mesh, exchanges=links))


def predicted(known: Machine, programs: dict[str, list[Program]], passes: tuple[int, int], seen: Row) -> Row:
    """A visit's steps for all ranks together, and with exchanges that take nothing. `known` is the whole machine, not
    what one of its ranks is planned for (`beside_readers`), since all read at once here."""
    found: Row = {}
    for phase, all_ranks in programs.items():
        machine = at_present(known, seen, phase)
        free = replace(machine, mesh=replace(machine.mesh, exchanges=tuple(
            replace(x, latency_s=0.0, bandwidth_bytes_per_s=1e18) for x in machine.mesh.exchanges)))
        steps, times = (STEPS, 1) if phase == "decode" else (min(STEPS, passes[0]), math.prod(passes))
        for name, on in (("", machine), ("_free", free)):
            lines = simulate_ranks(all_ranks, on, steps=steps)
            found[f"{phase}{name}_predicted_s"] = times * max(line.time_s for line in lines)
    return found


def measure_cells(cells: Sequence[RanksCell], folder: Path, machine: Machine, args: argparse.Namespace) -> list[Row]:
    """A row per layout; layouts take turns, `--rounds` times."""
    probe_of = functools.cache(lambda dtype, rows: Probe(folder, machine, dtype, rows))
    made: list[tuple[RanksCell, LanguageModel, dict[str, list[Program]], tuple[int, int], MeshProbe]] = []
    for cell in cells:
        prompt = cell.prompt or args.prompt
        lm = wrapped(cell, _folder(cell), machine, prompt, args.new)
        chunk = lm.plan.schedule.prefill_chunk
        programs = {"prefill": lm.steps.program(chunk), "decode": lm.steps.program(1)}
        passes = -(-prompt // chunk), lm.plan.schedule.batching.admission.prefills(cell.batch)
        assert lm.session is not None  # makes the groups in which ranks exchange
        lm.close()
        both = {phase: from_all(program) for phase, program in programs.items()}
        made.append((cell, lm, both, passes, MeshProbe(cell, lm, programs["decode"], probe_of)))
    visits: list[list[Row]] = [[] for _ in cells]
    for _ in range(args.rounds):
        for seen, (cell, lm, _programs, passes, probe) in zip(visits, made, strict=True):
            seen.append(visit(lm, cell, probe, cell.prompt or args.prompt, args.new, math.prod(passes)))
            lm.close()
            gc.collect()
    rows = []
    for seen, (cell, lm, both, passes, _) in zip(visits, made, strict=True):
        program = both["decode"][dist.get_rank()]
        exchanges = [i for i in program.step if isinstance(i, Launch) and i.stream == COLLECT]
        rows.append({
            "cell": cell.name, "chunk": lm.plan.schedule.prefill_chunk, "prompt": cell.prompt or args.prompt,
            "new": args.new, "cache_nbytes": sum(b.nbytes for b in lm.plan.buffers_of("decode") if b.kind == "cache"),
            "planned_decode_s": lm.plan.prediction.decode_time_s, "budget": lm.plan.budget.device,
            "exchanges": len(exchanges), "exchanged_nbytes": sum(s.nbytes for i in exchanges for s in i.writes),
            "streamed_nbytes": lm.plan.prediction.streamed_nbytes,
            "visits": [v | predicted(machine, both, passes, v) for v in seen]})
    return rows


def _folder(cell: RanksCell) -> Path:
    """A layout's model, or a copy of it in fewer bits, which rank 0 makes once."""
    for rank in range(RANKS):
        if rank == dist.get_rank():
            folder = model_folder(cell.model)
            folder = packed_copy(folder, cell.packed) if cell.packed else folder
        from_all(None)
    return folder


def show(rows: Sequence[Row]) -> None:
    """Print two lines per layout."""
    errors, lines = [], []
    for row, phase in itertools.product(rows, ("prefill", "decode")):
        visits = row["visits"]
        times = [v["prefill_s"] if phase == "prefill" else median(v["decode_s"]) for v in visits]
        found = [v[f"{phase}_predicted_s"] / time_s - 1 for v, time_s in zip(visits, times, strict=True)]
        errors.append(abs(median(found)))
        free, said, *paces = (median(v[name] for v in visits) for name in (
            f"{phase}_free_predicted_s", f"{phase}_predicted_s", f"{phase}_pace", "exchange_pace"))
        moved = {title: f"{row.get(f'{title}_nbytes', 0) / 1e6:.2f} MB" for title in ("exchanged", "streamed", "cache")}
        lines.append({"layout": row["cell"], "step": phase, "predicted, ms": 1e3 * said,
                      "measured, ms (visits)": spread([1e3 * time_s for time_s in times], ".1f"),
                      "error (visits)": spread(found, "+.1%"), "exchanges free, ms": 1e3 * free,
                      **(moved if phase == "decode" else {}), "paces": "/".join(f"{pace:.2f}" for pace in paces)})
    print_table(lines)
    print(f"within {BOUND:.0%}: {sum(e <= BOUND for e in errors)} of {len(errors)}; median error "
          f"{median(errors):.1%}, largest {max(errors):.1%}")


def main() -> None:
    args = arguments(__doc__, cells=([*range(len(CELLS))], "numbers of layouts"), prompt=(32, "tokens"),
                     new=(10, "tokens"), rounds=(5, "visits of each layout"),
                     machine=(Path, "a saved profile; what it lacks is measured at the start"))
    if not has_launcher():
        os.environ["OMP_NUM_THREADS"] = "1"
        os.execv(sys.executable, [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={RANKS}", "-m",
                                  "benchmarks.ranks", *sys.argv[1:]])
    torch.set_num_threads(1)
    rank, _ = join_ranks(HOST.name)
    folder = Path(demo_checkpoint())
    machine = load_machine(args.machine) if args.machine else from_all(
        measure_machine(folder, quick=True) if rank == 0 else None)[0]
    if not machine.mesh.exchanges:
        machine = replace(machine, mesh=measure_mesh(machine, folder))
    rows = measure_cells([CELLS[i] for i in args.cells], folder, machine, args)
    if rank == 0:
        if machine.guessed:
            print(f"a cautious guess stands for {'; '.join(machine.guessed)}", file=sys.stderr)
        write_json(args, {"machine": json.loads(machine.to_json())["mesh"], "rows": rows})
        show(rows)
        sys.stdout.flush()
    leave_ranks()


if __name__ == "__main__":
    main()
