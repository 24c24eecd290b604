"""Models larger than their budget beside peers and ceilings, in turns: `python -m benchmarks.offload CASE`.

A case is declared below: models, cells (sequences x prompt + new tokens), a budget, contestants. Each contestant lives
in a process of its own with equal threads and GOMP_SPINCOUNT=0, and they take turns, so that all meet the same state of
the machine. Around every turn plain reads and writes and products are timed: the bytes of the plan at these rates are
the link bound, and with these rates (and nothing else of the run) the turn's steps are predicted. Peers hold the same
budget (`max_memory`); each maps a copy of the checkpoint of its own, as mapped pages cannot be dropped from the page
cache, which happens before each of their steps, outside its time.

disk         whole answers of a Llama of 1.77 GB beside transformers' and Accelerate's disk offload, and wholly in RAM
blocks       many sequences, whose weights and cache exceed the budget, by sampled steps (`offload_contestants`): the
             block in each order, weights and cache as they are, in 4 bits (w4) and in both (w4+kv4); the same wholly in
             memory, which is what the processor allows; peers with the largest batch whose cache fits the budget
blocks-small whole answers of small models: minutes
checkpoints  blocks that keep checkpoints for shares of the tokens, none and all
prediction   predicted beside measured steps at five budgets: percent of the weights beside what the smallest plan takes
sweep-blocks forced blocks beside the planner's, each beside its prediction
sweep-slots  the same of staging slots, their size and the lead of reads, at one budget of `prediction`

Peak memory is anonymous memory above what the process had when it had planned; beside it stands what planning left
there (for peers both are above their imports). A contestant that exceeds memory is told by these columns.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields, replace
from pathlib import Path
from statistics import median
from typing import Any

os.environ.setdefault("GOMP_SPINCOUNT", "0")  # before torch loads OpenMP

from benchmarks.forked import Forked, forked
from benchmarks.models import MODELS, model_folder, packed
from benchmarks.offload_contestants import (
    BLOCKS,
    CHECKPOINTS,
    FOREBAY,
    IN_RAM,
    OFFLOADED,
    PEERS,
    RATES,
    SHARES,
    around,
    import_libraries,
    settings,
    worker,
)
from benchmarks.offload_figures import figures, report, summary
from benchmarks.offload_sweep import SWEEPING, forced_blocks, forced_slots, sweep
from benchmarks.probes import processor
from forebay.kernels.build.cache_folder import make_cache_folder
from forebay.rewriter.ir.byte_sizes import parse_nbytes

ASIDE = ("link", "fits")  # processes that take no turns: one measures the machine, one asks the planner
MOST = 4096  # sequences that are looked for when asking what fits
RAM_BATCH = 64  # sequences of the runs in memory, at most
SWEEPS = {"sweep-blocks": forced_blocks, "sweep-slots": forced_slots}

Row = dict[str, Any]


@dataclass(frozen=True)
class Cell:
    """Prompts of one length at once, and the tokens that follow them."""

    batch: int
    prompt: int
    new: int

    @property
    def name(self) -> str:
        return f"{self.batch} x {self.prompt} + {self.new}"


@dataclass(frozen=True)
class OffloadCase:
    """What is measured; each field is an option of the command line, too. Lists have commas between them."""

    models: str
    cells: str
    contestants: str
    budget: str = "400MB"
    rounds: int = 2
    whole: bool = False  # answers, instead of sampled steps
    fits: bool = False  # look for the batch that fits with its cache on the device, which is what peers get
    steps: int = 3  # of a sampled answer
    prefill: bool = False  # sample the prefill too


CASES = {
    "disk": OffloadCase("llama", "1x64+16,8x64+16,32x64+16", ",".join(
        ("forebay bf16 zigzag", "forebay w4 zigzag", *PEERS)), "500MB", 3, whole=True),
    "blocks": OffloadCase("llama,opt", "1x128+32,32x128+32,128x512+32", ",".join((*BLOCKS, *OFFLOADED)), fits=True),
    "blocks-small": OffloadCase("llama-small,opt-small", "24x96+8", ",".join((*BLOCKS, *OFFLOADED)), "24MB",
                                whole=True, fits=True),
    "checkpoints": OffloadCase("llama,opt", "16x128+32", ",".join(CHECKPOINTS)),
    "prediction": OffloadCase("smollm2,llama", "1x16+8,8x16+8,32x16+8", ",".join(SHARES), rounds=5, whole=True),
    "sweep-blocks": OffloadCase("llama-medium,opt-medium", "48x256+32", "forebay bf16 zigzag", "60MB", prefill=True),
    "sweep-slots": OffloadCase("smollm2,llama", "1x16+8", "forebay within 50 %", prefill=True),
}


def main() -> None:
    args, case = arguments()
    result: Row = {"processor": processor(), "case": args.case, "arguments": {k: str(v) for k, v in vars(args).items()},
                   "models": []}
    names = SWEEPING if args.case in SWEEPS else (*ASIDE, *case.contestants.split(","))
    import_libraries(names)
    processes = forked(names, args.threads, worker)
    try:
        with tempfile.TemporaryDirectory(prefix="offload-", dir=make_cache_folder()) as scratch:
            for model in case.models.split(","):
                run = swept if args.case in SWEEPS else measure
                result["models"].append(run(args, case, model, Path(scratch), processes))
    finally:
        for process in processes.values():
            process.close()
    if args.case not in SWEEPS:
        result["rows"] = [row for model in result["models"] for row in figures(model)]
        result["summary"] = summary(result["rows"])
        report(result)
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")


def arguments() -> tuple[argparse.Namespace, OffloadCase]:
    """The command line, and its case with what it says otherwise."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("case", choices=CASES)
    for field in fields(OffloadCase):
        kind = {"str": str, "int": int}.get(str(field.type))
        options: Row = {"type": kind} if kind else {"action": argparse.BooleanOptionalAction}
        parser.add_argument(f"--{field.name}", default=None, help="default: the case's", **options)
    parser.add_argument("--limit", type=float, default=float("inf"), help="seconds after which no turn begins")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--machine", type=Path, help="a saved profile; measured at the start if not given")
    parser.add_argument("--json", type=Path, help="write everything measured to this file")
    args = parser.parse_args()
    given = {f.name: getattr(args, f.name) for f in fields(OffloadCase) if getattr(args, f.name) is not None}
    case = replace(CASES[args.case], **given)
    for what, known in (("models", {*MODELS, "smollm2"}), ("contestants", {*FOREBAY, *PEERS})):
        if unknown := set(getattr(case, what).split(",")) - known:
            parser.error(f"--{what}: {', '.join(sorted(unknown))}; there are {', '.join(sorted(known))}")
    return args, case


def cells(text: str) -> list[Cell]:
    return [Cell(*map(int, re.split("[x+]", cell))) for cell in text.split(",")]


def order_of(args: argparse.Namespace, case: OffloadCase, model: str, scratch: Path) -> Row:
    """What every process is told."""
    return {"model": str(model_folder(model)), "scratch": str(scratch), "vocab": vocabulary(model_folder(model)),
            "dtype": "float32" if model == "smollm2" else "bfloat16", "budget": parse_nbytes(case.budget),
            "machine": str(args.machine or scratch / "machine.json"), "whole": case.whole, "once": case.whole,
            "steps": case.steps, "prefill": case.prefill, "most": MOST}


def vocabulary(folder: Path) -> int:
    return json.loads((folder / "config.json").read_text())["vocab_size"]


def swept(args: argparse.Namespace, case: OffloadCase, model: str, scratch: Path, processes: Mapping[str, Forked]
          ) -> Row:
    """Forced schedules of one model beside the planner's."""
    cell = cells(case.cells)[0]
    order = order_of(args, case, model, scratch) | settings(case.contestants) | {
        "once": True, "batch": cell.batch, "prompt": cell.prompt, "new": cell.new, "rows": min(cell.batch, 64)}
    return sweep(f"{model}, {cell.name}", order, SWEEPS[args.case](cell.batch), processes, case.rounds)


def measure(args: argparse.Namespace, case: OffloadCase, model: str, scratch: Path, processes: Mapping[str, Forked]
            ) -> Row:
    """All cells of one model: what is planned, and every turn, by processes that may have had another model before."""
    names, order = case.contestants.split(","), order_of(args, case, model, scratch)
    folders = {name: folder_of(name, Path(order["model"]), scratch) for name in names}
    for name in ASIDE:
        processes[name].ask("load", **order)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        loaded = pool.map(lambda name: processes[name].ask("load", **order | {"model": str(folders[name])}), names)
        baselines = {name: answer["baseline"] for name, answer in zip(names, loaded, strict=True)}
    if not Path(order["machine"]).exists():
        note("measuring the machine")
        processes["link"].ask("machine", **order)
    fits: Row = {}
    planned = [(cell, plan_cell(case, model, cell, order, processes, fits)) for cell in cells(case.cells)]
    until, plans, turns = time.monotonic() + args.limit, list[Row](), list[Row]()
    for cell, options in planned:
        turns += run_cell(case, f"{model}, {cell.name}", cell, options, processes, order["model"], until)
        plans += [{k: v for k, v in plan.items() if k != "order_given"} for plan in options]
    return {"model": model, "budget": order["budget"], "baselines": baselines, "fits": fits, "plans": plans,
            "turns": turns, "machine": json.loads(Path(order["machine"]).read_text())}


def folder_of(name: str, model: Path, scratch: Path) -> Path:
    """The checkpoint that a contestant opens: as it is, packed, or a copy of its own for one that maps it."""
    if name in PEERS:
        return Path(shutil.copytree(model, scratch / f"{model.name}-{name}"))
    return packed(model) if FOREBAY[name].weights == "w4" else model


def plan_cell(case: OffloadCase, model: str, cell: Cell, order: Row, processes: Mapping[str, Forked], fits: Row
              ) -> list[Row]:
    """What everybody plans for a cell, with what it was asked (`order_given`)."""
    def shaped(name: str) -> Row:
        limited = settings(name)["ram"] or name == IN_RAM
        return order | settings(name) | {
            "batch": min(cell.batch, RAM_BATCH) if limited else cell.batch, "prompt": cell.prompt, "new": cell.new,
            "steps": 1 if settings(name)["order"] == "row" else case.steps, "rows": min(cell.batch, 64),
            "label": cell.name}

    key = f"{cell.prompt}+{cell.new}"
    if case.fits and key not in fits:
        fits[key] = processes["fits"].ask("fits", **shaped("forebay bf16 zigzag"))["device"]
        note(f"{model}: {fits[key]} sequences of {key} fit with their cache on the device")

    def planned(name: str) -> Row:
        asked = shaped(name)
        if name in OFFLOADED:
            asked["batch"] = max(1, min(cell.batch, fits.get(key, cell.batch)))
        return processes[name].ask("plan", **asked) | {"name": name, "cell": cell.name, "order_given": asked}

    with ThreadPoolExecutor(os.cpu_count()) as pool:  # nothing is timed yet
        return list(pool.map(planned, case.contestants.split(",")))


def run_cell(case: OffloadCase, title: str, cell: Cell, plans: list[Row], processes: Mapping[str, Forked], model: str,
             until: float) -> list[Row]:
    """The turns of a cell: those that begin before the time `until`."""
    turns: list[Row] = []
    before: Row = {}
    for r in range(case.rounds):
        for plan in plans[r % len(plans) :] + plans[: r % len(plans)]:
            if time.monotonic() > until:
                break
            name, asked = plan["name"], plan["order_given"]
            before = before or processes["link"].ask("turn", **asked | {"model": model})
            turn = processes[name].ask("turn", **asked)
            after = processes["link"].ask("turn", **asked | {"model": model})
            link, before = around(before, after), after
            if name in FOREBAY:
                turn |= processes[name].ask("predicted", **asked | {rate: link[rate] for rate in RATES})
            turns.append(turn | {"name": name, "cell": cell.name, "round": r, "link": link})
            predicted = f" of {turn['predicted_step_s']:.3f} predicted" if "predicted_step_s" in turn else ""
            note(f"{title}, {name}: step {median(turn['steps_s']):.3f} s{predicted}, reads "
                 f"{link['bytes_per_s'] / 1e9:.2f} GB/s, pace {link['pace']:.2f}")
    for plan in plans:
        processes[plan["name"]].ask("close", label=cell.name)
    return turns


def note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
