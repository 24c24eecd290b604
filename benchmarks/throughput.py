"""Many sequences through a small device, beside peers and ceilings, in one interleaved run:
`python -m benchmarks.throughput [--quick] [--json]`.

Random models of OPT's and Llama's shape whose weights and whose cache exceed the budget, a cell for each batch and
prompt. Contestants: Forebay within the budget, its block in each order, with weights and cache as they are (bf16), with
weights of 4 bits (w4) and with both (w4+kv4); the same Forebay wholly in memory, which is what the processor allows
(compute bound); transformers' and Accelerate's disk offload, with the largest batch whose cache fits the same budget.
With `--hybrid` the block that keeps checkpoints for shares of the tokens, of none and of all, takes their place. Each
lives in a process of its own with equal threads and GOMP_SPINCOUNT=0, and they take turns. Around every turn
plain reads and writes and products are timed: the bytes of the plan at these rates are the link bound, and with these
rates the turn's step is predicted.

Answers are sampled (`block_contestants`), with --quick they are run whole. Peak memory is anonymous memory above what
the process had when it had planned; beside it stands what planning left there: graphs, plans, modules imported on the
way (for peers both are above their imports).

`--json` prints all that was measured, with `holds` (which aims were met, null where no cell could say) and `summary`.
`--sweep` sets forced blocks of models of 0.2 GB (with --quick of the small ones) beside the planner's instead, and
each beside its prediction.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import shutil
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

os.environ.setdefault("GOMP_SPINCOUNT", "0")  # before torch loads OpenMP

from benchmarks.block_contestants import RATES, around, block_worker, import_libraries
from benchmarks.block_sweep import SWEEPING, sweep
from benchmarks.disk_offload import note
from benchmarks.forked import Forked, forked
from benchmarks.shaped_models import LARGE, MEDIUM, SMALL, Sizes, make_shaped
from benchmarks.throughput_cells import FOREBAY, HYBRID, OURS, PEERS, Cell, cells
from benchmarks.throughput_figures import figures, report, verdicts
from forebay.kernels.build.cache_folder import make_cache_folder
from forebay.rewriter.ir.byte_sizes import parse_nbytes

ASIDE = ("link", "fits")  # processes that take no turns: one measures the machine, one asks the planner
MOST = 4096  # sequences that are looked for when asking what fits

Row = dict[str, Any]


def main() -> None:
    args = arguments()
    result = {"processor": processor(), "arguments": {k: str(v) for k, v in vars(args).items()}, "models": []}
    sizes = SMALL if args.quick else MEDIUM if args.sweep else LARGE
    chosen = [s for s in sizes if s.family in args.models.split(",")]
    names = SWEEPING if args.sweep else (*ASIDE, *args.contestants.split(","))
    import_libraries(names)
    processes = forked(names, args.threads, block_worker)
    try:
        with folder(args.folder) as scratch:
            result["models"] = [(swept if args.sweep else measure)(args, each, scratch, processes) for each in chosen]
    finally:
        for process in processes.values():
            process.close()
    if args.sweep:
        if args.json:
            write_json(result, args.json)
        return
    result["rows"] = [row for model in result["models"] for row in figures(model)]
    result["holds"], result["summary"] = verdicts(result["rows"], result["models"])
    if args.json:
        write_json(result, args.json)
    if args.json != "-":
        report(result)


def write_json(result: Row, where: str) -> None:
    text = json.dumps(result, indent=1)
    print(text) if where == "-" else Path(where).write_text(text + "\n")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small models, whole answers; under five minutes")
    parser.add_argument("--models", default="llama,opt", help="comma-separated")
    parser.add_argument("--cells", help="BATCHxPROMPT+NEW, comma-separated; default 1x128+32,32x128+32,128x512+32")
    parser.add_argument("--contestants", default=",".join((*OURS, *PEERS)), help="comma-separated")
    parser.add_argument("--hybrid", action="store_true", help="shares of checkpoints alone")
    parser.add_argument("--budget", help="device budget; default 400MB, sweep 60MB, quick 24MB")
    parser.add_argument("--ram-batch", type=int, default=64, help="sequences of the runs in memory, at most")
    parser.add_argument("--steps", type=int, default=3, help="decode steps of a sampled answer")
    parser.add_argument("--prefill", action="store_true", help="sample the prefill too")
    parser.add_argument("--no-fits", action="store_true", help="do not look for the largest batches")
    parser.add_argument("--sweep", action="store_true", help="forced blocks of the first cell, in bf16")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--limit", type=float, default=float("inf"), help="seconds after which no turn begins")
    parser.add_argument("--wait", action="store_true", help="wait for Enter between planning and measuring")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--machine", type=Path, help="a saved profile; measured at the start if not given")
    parser.add_argument("--folder", type=Path, help="where models are made and kept; default: removed afterwards")
    parser.add_argument("--json", nargs="?", const="-", help="print JSON, or write it to this file beside the report")
    args = parser.parse_args()
    args.budget = args.budget or ("24MB" if args.quick else "60MB" if args.sweep else "400MB")
    args.cells = args.cells or (
        "24x96+8" if args.quick else "48x256+32" if args.sweep else "1x128+32,32x128+32,128x512+32")
    args.contestants = ",".join(HYBRID) if args.hybrid else args.contestants
    unknown = set(args.contestants.split(",")) - {*FOREBAY, *PEERS}
    if unknown:
        parser.error(f"--contestants: {', '.join(sorted(unknown))}; there are {', '.join((*FOREBAY, *PEERS))}")
    return args


@contextlib.contextmanager
def folder(kept: Path | None) -> Iterator[Path]:
    if kept is not None:
        kept.mkdir(parents=True, exist_ok=True)
        yield kept
        return
    with tempfile.TemporaryDirectory(prefix="throughput-", dir=make_cache_folder()) as made:
        yield Path(made)


def swept(args: argparse.Namespace, sizes: Sizes, scratch: Path, processes: dict[str, Forked]) -> dict[str, Any]:
    """Forced blocks of one model beside the planner's."""
    return sweep(sizes.family, cells(args.cells)[0], {
        "model": str(made(sizes, scratch, [])["bf16"]), "scratch": str(scratch), "vocab": sizes.vocab,
        "budget": parse_nbytes(args.budget), "machine": str(args.machine or scratch / "machine.json"),
        "steps": args.steps, "prefill": True}, processes, args.rounds)


def measure(args: argparse.Namespace, sizes: Sizes, scratch: Path, processes: dict[str, Forked]) -> dict[str, Any]:
    """All cells of one model: what is planned, and every turn, by processes that may have had another model before."""
    names = args.contestants.split(",")
    models = made(sizes, scratch, names)
    budget = parse_nbytes(args.budget)
    order: Row = {"scratch": str(scratch), "budget": budget, "peer_budget": budget, "vocab": sizes.vocab,
                  "machine": str(args.machine or scratch / "machine.json"), "whole": args.quick,
                  "steps": args.steps, "prefill": args.prefill or args.quick, "most": MOST}
    plans: list[Row] = []
    turns: list[Row] = []
    fits: Row = {}
    for name in ASIDE:
        processes[name].ask("load", **order | {"model": str(models["bf16"])})

    def load(name: str) -> int:
        ours = FOREBAY.get(name)
        return processes[name].ask("load", **order | {"model": str(models[ours.weights if ours else name])})["baseline"]

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        baselines = dict(zip(names, pool.map(load, names), strict=True))
    if not Path(order["machine"]).exists():
        note("measuring the machine")
        processes["link"].ask("machine", **order)
    planned = [(cell, plan_cell(args, sizes, cell, order, processes, fits)) for cell in cells(args.cells)]
    if args.wait:
        note("planned; press Enter to measure")
        input()
    until = time.monotonic() + args.limit
    for cell, options in planned:
        turns += run_cell(args, sizes, cell, options, processes, str(models["bf16"]), until)
        plans += [{k: v for k, v in wish.items() if k != "order_given"} for wish in options]
    return {"sizes": asdict(sizes), "weights_nbytes": nbytes_of(models["bf16"]), "budget": order["budget"],
            "baselines": baselines, "fits": fits, "plans": plans, "turns": turns,
            "machine": json.loads(Path(order["machine"]).read_text())}


def plan_cell(
    args: argparse.Namespace, sizes: Sizes, cell: Cell, order: Row, processes: dict[str, Forked], fits: Row
) -> list[Row]:
    """What everybody plans for a cell, with the wish that it was planned for (`order_given`)."""
    def shaped(name: str) -> Row:
        ours = FOREBAY.get(name)
        batch = cell.batch if ours and not ours.ram else min(cell.batch, args.ram_batch)
        extra: Row = {"cache_format": "native", "order": "zigzag", "ram": False} if ours is None else {
            "cache_format": ours.cache_format, "order": ours.order, "ram": ours.ram,
            "checkpoints": ours.checkpoints}
        steps = 1 if extra["order"] == "row" else args.steps
        return order | extra | {"batch": batch, "prompt": cell.prompt, "new": cell.new, "steps": steps,
                                "rows": min(cell.batch, 64), "label": cell.name}

    key = f"{cell.prompt}+{cell.new}"
    if key not in fits and not args.no_fits:
        fits[key] = processes["fits"].ask("fits", **shaped("forebay bf16 zigzag"))["device"]
        note(f"{sizes.family}: {fits[key]} sequences of {key} fit with their cache on the device")

    def planned(name: str) -> Row:
        wish = shaped(name)
        if name in PEERS:
            wish["batch"] = max(1, min(cell.batch, fits.get(key, cell.batch)))
        found = processes[name].ask("plan", **wish) | {"name": name, "cell": cell.name, "order_given": wish}
        note(f"{sizes.family}, {cell.name}: planned {name}: " + ", ".join(
            f"{k} {v}" for k, v in found.items() if k in ("batch", "micro_batches", "cache", "prefill_chunk")))
        return found

    with ThreadPoolExecutor(os.cpu_count()) as pool:  # nothing is timed yet
        return list(pool.map(planned, [name for name in processes if name not in ASIDE]))


def run_cell(
    args: argparse.Namespace, sizes: Sizes, cell: Cell, plans: list[Row], processes: dict[str, Forked], model: str,
    until: float,
) -> list[Row]:
    """The turns of a cell: those that begin before the time `until`."""
    turns: list[Row] = []
    before: Row = {}
    for r in range(args.rounds):
        for plan in plans[r % len(plans) :] + plans[: r % len(plans)]:
            if time.monotonic() > until:
                break
            name, wish = plan["name"], plan["order_given"]
            before = before or processes["link"].ask("turn", **wish | {"model": model})
            turn = processes[name].ask("turn", **wish)
            after = processes["link"].ask("turn", **wish | {"model": model})
            link, before = around(before, after), after
            if name in FOREBAY:
                turn |= processes[name].ask("predicted", **wish | {rate: link[rate] for rate in RATES})
            turns.append(turn | {"name": name, "cell": cell.name, "round": r, "link": link})
            predicted = f" of {turn['predicted_step_s']:.3f} predicted" if "predicted_step_s" in turn else ""
            note(f"{sizes.family}, {cell.name}, {name}: step {median(turn['steps_s']):.3f} s{predicted}, reads "
                 f"{link['bytes_per_s'] / 1e9:.2f} GB/s, pace {link['pace']:.2f}")
    for plan in plans:
        processes[plan["name"]].ask("close", label=cell.name)
    return turns


def made(sizes: Sizes, scratch: Path, names: list[str]) -> dict[str, Path]:
    """The checkpoint, the packed one, and a copy for each peer: peers map it, and mapped pages cannot be dropped."""
    from forebay.rewriter.checkpoints.quantize import Wish, quantize_model

    note(f"making {sizes}")
    title = "-".join(map(str, asdict(sizes).values()))
    found = {"bf16": make_shaped(scratch / title, sizes), "w4": scratch / f"{title}-w4g64"}
    if any(name in OURS and OURS[name].weights == "w4" for name in names):
        quantize_model(found["bf16"], found["w4"], Wish("w4g64"))
    for name in set(names) & set(PEERS):
        found[name] = scratch / f"{title}-{name}"
        if not found[name].exists():
            shutil.copytree(found["bf16"], found[name])
    return found


def nbytes_of(model: Path) -> int:
    return sum(path.stat().st_size for path in model.glob("*.safetensors"))


def processor() -> str:
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        facts = {key.strip(): value for key, _, value in (line.partition(": ") for line in lines)}
        bf16 = [flag for flag in ("avx512_bf16", "amx_bf16") if flag in facts.get("flags", "").split()]
        return (f"{facts.get('model name', platform.processor())} (family {facts.get('cpu family')}, model "
                f"{facts.get('model')}), {os.cpu_count()} cores, bf16 instructions: {', '.join(bf16) or 'none'}")
    return platform.processor() or platform.machine()


if __name__ == "__main__":
    main()
