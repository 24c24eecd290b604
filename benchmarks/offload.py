"""Models, peers and ceilings in turns, larger than their budget or in RAM: `python -m benchmarks.offload CASE`.

A case is declared below: models (`benchmarks.sources`), cells (sequences x prompt + new tokens), budgets (bytes, or a
share of the model's), contestants. Each contestant lives in a process of its own with equal threads, and they take
turns, so that all meet the same state of the machine. Around every turn plain reads and writes and products are timed:
the bytes of the plan at these rates are the link bound, and with these rates (and nothing else of the run) the turn's
steps are predicted. Peers that are not installed are left out. transformers and Accelerate hold the same budget
(`max_memory`); each maps a copy of the checkpoint of its own, as mapped pages cannot be dropped from the page cache,
which happens before each of their steps, outside its time.

benchmarks/README.md lists the cases. In addition:

blocks       the block in each order, weights and cache as they are, in 4 bits (w4) and in both (w4+kv4); the same
             wholly in memory; peers with the largest batch whose cache fits the budget
prediction   budgets in percent of the weights beside what the smallest plan takes
gguf, large  without root the kernel holds nobody to the budget, and the page cache serves who maps files
ram          Forebay computes in float32 ("packed") or bf16, activations as they are and rounded to 8 bits; llama.cpp
             and OpenVINO GenAI run by their own clocks
experts      tokens are drawn, because greedy answers of random weights repeat themselves; models stay open, and the
             first round answers until every slot of their pools holds an expert (`filling` of a plan: tokens, seconds)

`peak` is anonymous memory above what the process had when it had planned (`objects`; for peers both are above their
imports), `resident` the growth of the process, pages of files included.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import tempfile
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields, replace
from pathlib import Path
from statistics import median
from typing import Any

os.environ.setdefault("GOMP_SPINCOUNT", "0")  # before torch loads OpenMP

from benchmarks import peers
from benchmarks.command import arguments, note, write_json
from benchmarks.contestants import (
    BLOCKS,
    BUSY,
    CHECKPOINTS,
    CONTESTANTS,
    EXPERTS,
    LONG,
    OFFLOADED,
    PEERS,
    RATES,
    SHARES,
    Contestant,
    group_peak,
    remove_limits,
    started,
)
from benchmarks.isolated import IsolatedWorker
from benchmarks.offload_figures import figures, report, summary
from benchmarks.probes import ReadWatch, memory_bytes_per_s, processor
from benchmarks.sources import Sources, known
from forebay.kernels.build.cache_folder import make_cache_folder
from forebay.rewriter.ir.byte_sizes import parse_nbytes

MOST = 4096  # sequences that are looked for when asking what fits
RAM_BATCH = 64  # sequences of the runs in memory, at most

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
    capped: bool = False  # the kernel holds processes to the budget and 150 MiB
    draw: bool = False  # tokens are drawn by their probabilities
    warm: bool = False  # models stay open, and the first round is not counted: it fills the pools of experts
    most: int = 3600  # seconds of a turn


CASES = {
    "blocks-small": OffloadCase("llama-small,opt-small", "24x96+8", ",".join((*BLOCKS, *OFFLOADED)), "24MB",
                                whole=True, fits=True),
    "disk": OffloadCase("llama", "1x64+16,8x64+16,32x64+16", ",".join(
        ("forebay bf16 zigzag", "forebay w4 zigzag", *PEERS)), "500MB", 3, whole=True),
    "blocks": OffloadCase("llama,opt", "1x128+32,32x128+32,128x512+32", ",".join((*BLOCKS, *OFFLOADED)), fits=True),
    "prediction": OffloadCase("smollm2,llama", "1x16+8,8x16+8,32x16+8", ",".join(SHARES), rounds=5, whole=True),
    "gguf": OffloadCase("qwen3-1b:Q8_0", "1x64+9", "forebay,neurostream,llama.cpp,llama.cpp in RAM", "25%,50%",
                        whole=True, capped=True),
    "large": OffloadCase("llama3-8b:Q4_0,qwen3-14b:Q4_0,qwen3-32b:Q4_0", "1x64+8", "forebay,llama.cpp", "2GB,4GB,8GB",
                         3, whole=True, capped=True, most=600),
    "long": OffloadCase("llama3-8b of 8 layers", "1x32752+16", ",".join(("forebay w4 zigzag", *LONG)), "4GB", steps=14,
                        capped=True),
    "ram": OffloadCase("demo", "1x64+32,1x512+32", "forebay packed,forebay packed int8,forebay in bf16,forebay in bf16 "
                       "int8,llama.cpp in RAM,openvino,openvino bf16", rounds=5, whole=True),
    "checkpoints": OffloadCase("opt-small", "24x96+8", ",".join(CHECKPOINTS), "24MB", whole=True),
    "experts": OffloadCase("qwen3-moe", "1x1+8", ",".join(EXPERTS), "15%,30%,50%", 6, whole=True, draw=True, warm=True),
}


def main() -> None:
    args, case = asked()
    result: Row = {"processor": processor(), "case": args.case, "arguments": {k: str(v) for k, v in vars(args).items()},
                   "memory_bytes_per_s": memory_bytes_per_s(9), "models": []}
    with tempfile.TemporaryDirectory(prefix="offload-", dir=make_cache_folder()) as scratch:
        for model in case.models.split(","):
            sources = Sources(model, Path(scratch))
            for budget in case.budget.split(","):
                result["models"].append(measure(args, case, model, sources, budget))
                write_json(args, result)  # a long run may be ended
    result["rows"] = [row for model in result["models"] for row in figures(model, result["memory_bytes_per_s"])]
    result["summary"] = summary(result["rows"])
    report(result)
    write_json(args, result)


def asked() -> tuple[argparse.Namespace, OffloadCase]:
    """The command line, and its case with what it says otherwise."""
    kinds = {"str": str, "int": int, "bool": bool}
    args = arguments(
        __doc__, CASES, **{f.name: (kinds[str(f.type)], "default: the case's") for f in fields(OffloadCase)},
        limit=(math.inf, "seconds after which no turn begins"), threads=(2, "of each"),
        machine=(Path, "a saved profile; measured at the start if not given"))
    given = {f.name: getattr(args, f.name) for f in fields(OffloadCase) if getattr(args, f.name) is not None}
    case = replace(CASES[args.case], **given)
    unknown = {*case.contestants.split(",")} - {*CONTESTANTS}
    if unknown := unknown | {model for model in case.models.split(",") if not known(model)}:
        raise SystemExit(f"no such model or contestant: {', '.join(sorted(unknown))}; contestants are "
                         f"{', '.join(CONTESTANTS)}")
    return args, case


def cells(text: str) -> list[Cell]:
    return [Cell(*map(int, re.split("[x+]", cell))) for cell in text.split(",")]


def measure(args: argparse.Namespace, case: OffloadCase, model: str, sources: Sources, budget: str) -> Row:
    """All cells of one model within one budget: what is planned, and every turn."""
    parts = {name: CONTESTANTS[name] for name in case.contestants.split(",")
             if peers.installed(CONTESTANTS[name].engine)}
    folder = sources.folder
    nbytes = sources.nbytes * float(budget[:-1]) / 100 if budget.endswith("%") else parse_nbytes(budget)
    vocab = json.loads((folder / "config.json").read_text())["vocab_size"]
    order: Row = {"folder": str(folder), "scratch": str(sources.scratch), "vocab": vocab,
                  "dtype": "float32" if sources.file or model == "smollm2" else "bfloat16", "budget": int(nbytes),
                  "machine": str(args.machine or sources.scratch / "machine.json"), "whole": case.whole,
                  "steps": case.steps, "prefill": case.prefill, "most": MOST, "capped": case.capped, "draw": case.draw,
                  "warm": case.warm}
    processes = {name: started(name, args.threads) for name in (*aside(case), *parts)}
    try:
        return _measured(args, case, model, sources, order, parts, processes)
    finally:
        for process in processes.values():
            process.close()
        remove_limits()


def _measured(args: argparse.Namespace, case: OffloadCase, model: str, sources: Sources, order: Row,
              parts: Mapping[str, Contestant], processes: dict[str, IsolatedWorker]) -> Row:
    own = {name: settings(one) | {"path": str(sources.of(one.source, name).path)} for name, one in parts.items()}
    own |= {name: settings(Contestant(name)) | {"path": order["folder"], "capped": False} for name in aside(case)}
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        answers = pool.map(lambda name: ask(processes, name, "load", order | own[name]), own)
        loaded = dict(zip(own, answers, strict=True))
    baselines = {name: answer["baseline"] for name, answer in loaded.items() if answer}
    if not Path(order["machine"]).exists():
        note("measuring the machine")
        ask(processes, "link", "machine", order)
    fits: Row = {}
    planned = [(cell, plan_cell(case, model, cell, order, own, parts, processes, fits)) for cell in cells(case.cells)]
    until, plans, turns = time.monotonic() + args.limit, list[Row](), list[Row]()
    for cell, options in planned:
        turns += run_cell(case, f"{model}, {cell.name}", cell, options, processes, until)
        plans += [{k: v for k, v in plan.items() if k != "order_given"} for plan in options]
    return {"model": model, "budget": order["budget"], "baselines": baselines, "fits": fits, "plans": plans,
            "limited": sorted(name for name, answer in loaded.items() if answer and answer.get("limited")),
            "read_nbytes": {name: sources.of(one.source, name).read_nbytes for name, one in parts.items()},
            "turns": turns, "machine": json.loads(Path(order["machine"]).read_text())}


def aside(case: OffloadCase) -> tuple[str, ...]:
    """Processes that take no turns: one measures the machine, one asks the planner."""
    return ("link", "fits") if case.fits else ("link",)


def settings(one: Contestant) -> Row:
    """What a contestant is planned with."""
    return {"name": one.name, "options": dict(one.options), "ram": one.ram, "share": one.share}


def ask(processes: dict[str, IsolatedWorker], name: str, do: str, order: Row, most_s: float = math.inf) -> Row | None:
    """What a process answers; None where it has ended, after which it is asked no more."""
    if name not in processes:
        return None
    found = processes[name].ask({"do": do, **order}, most_s)
    if "failed" not in found:
        return found
    note(f"{name} failed at {do!r}: {found['failed']}")
    if name in ("link", "fits"):
        raise SystemExit(1)
    processes.pop(name).close()
    return None


def plan_cell(case: OffloadCase, model: str, cell: Cell, order: Row, own: Mapping[str, Row],
              parts: Mapping[str, Contestant], processes: dict[str, IsolatedWorker], fits: Row) -> list[Row]:
    """What everybody plans for a cell, with what it was asked (`order_given`)."""
    def shaped(one: Contestant) -> Row:
        given = order | own[one.name] | settings(one)
        return given | {
            "batch": min(cell.batch, RAM_BATCH) if one.ram else cell.batch, "prompt": cell.prompt, "new": cell.new,
            "steps": 1 if one.options.get("order") == "row" else case.steps, "rows": min(cell.batch, 64),
            "label": f"{cell.name}, {one.name}"}

    key = f"{cell.prompt}+{cell.new}"
    if case.fits and key not in fits:
        asker = Contestant("fits", options=BLOCKS["forebay bf16 zigzag"].options)
        fits[key] = (ask(processes, "fits", "fits", shaped(asker)) or {"device": 0})["device"]
        note(f"{model}: {fits[key]} sequences of {key} fit with their cache on the device")

    def planned(one: Contestant) -> Row | None:
        asked = shaped(one)
        if one.name in OFFLOADED:
            asked["batch"] = max(1, min(cell.batch, fits.get(key, cell.batch)))
        found = ask(processes, one.name, "plan", asked)
        if found is not None and "refused" in found:
            note(f"{model}, {cell.name}, {one.name}: {found['refused']}")
            return None
        return None if found is None else found | {
            "name": one.name, "cell": cell.name, "ram": one.ram, "formats": one.formats, "order_given": asked}

    with ThreadPoolExecutor(os.cpu_count()) as pool:  # nothing is timed yet
        return [plan for plan in pool.map(planned, parts.values()) if plan]


def run_cell(case: OffloadCase, title: str, cell: Cell, plans: list[Row], processes: dict[str, IsolatedWorker],
             until: float) -> list[Row]:
    """The turns of a cell: those that begin before the time `until`."""
    turns: list[Row] = []
    once = case.whole and not case.warm
    for r in range(case.rounds):
        for plan in plans[r % len(plans) :] + plans[: r % len(plans)]:
            if time.monotonic() > until:
                break
            name, asked = plan["name"], plan["order_given"]
            asked = asked | {busy: plan[busy] for busy in BUSY.values() if busy in plan}
            before = ask(processes, "link", "turn", asked) or {}
            turn = timed_turn(processes, name, asked, case.most, once)
            link = around(before, ask(processes, "link", "turn", asked) or {})
            if turn is None:
                continue
            if "planned_step_s" in plan:
                turn |= ask(processes, name, "predicted", asked | {rate: link[rate] for rate in RATES}) or {}
            if filling := turn.pop("filling", None):
                plan.setdefault("filling", filling)
            if r or not case.warm:
                turns.append(turn | {"name": name, "cell": cell.name, "round": r, "link": link})
            predicted = f" of {turn['predicted_step_s']:.3f} predicted" if "predicted_step_s" in turn else ""
            note(f"{title}, {name}: step {median(turn['steps_s']):.3f} s{predicted}, reads "
                 f"{link['bytes_per_s'] / 1e9:.2f} GB/s, pace {link['pace']:.2f}")
    for plan in plans:
        ask(processes, plan["name"], "close", plan["order_given"])
    return turns


def timed_turn(processes: dict[str, IsolatedWorker], name: str, order: Row, most_s: float, once: bool) -> Row | None:
    """A turn of a process, with the bytes that a step read from disk and the peak memory of its group; None if the
    process has ended. With `once` its memory is given back."""
    if name not in processes or (process := processes[name].process) is None:
        return None
    with ReadWatch(process.pid) as watch:
        turn = ask(processes, name, "turn", order, most_s)
    if turn is None:
        return None
    if once:
        ask(processes, name, "rest", order)
    return turn | {"group_peak": group_peak(watch.pid),
                   "step_read_nbytes": watch.step_nbytes(sum(turn["steps_s"]), len(turn["steps_s"]))}


def around(before: Row, after: Row) -> Row:
    """What the machine did around a turn, from what it did before and after it."""
    return {key: (before[key] + after[key]) / 2 for key in before}


if __name__ == "__main__":
    main()
