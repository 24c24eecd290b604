"""Every operator on a GPU: checked against its reference, then timed beside its rivals and the GPU's ceilings.

    PYTHONPATH=src python -m benchmarks.gpu               under 8 minutes; needs torch with CUDA and Triton, no more
    PYTHONPATH=src python -m benchmarks.gpu --tiny        the checks alone, at tiny shapes: fit for compute-sanitizer
    PYTHONPATH=src python -m benchmarks.gpu --interpret   the same without a GPU, under Triton's interpreter
    PYTHONPATH=src python -m benchmarks.gpu --ops linear_w4 --match "M=(1|16) "    these shapes alone, and no table

Writes benchmarks/results/<gpu>-<date>.json, and the table of inflection points to selection-<gpu>.json in
kernels/products/linear, where plans for such a GPU find it from then on; the same to $OUT where it is set. Shapes that
were not timed keep what the table held for them. Times are medians of 30 CUDA graphs of calls over rotating buffers
that together exceed the L2 (`gpu_cases/timing.py`). An aim that is missed says so in the table of results. Cases run in
a process apart, so that one that faults or hangs is one failed row; results are written after each.
"""

from __future__ import annotations

import datetime
import functools
import importlib
import itertools
import json
import math
import os
import re
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.command import arguments, listed, write_json
from benchmarks.gpu_cases.case import Case, Place, Work
from benchmarks.isolated import IsolatedWorker, check_gpu, serve
from forebay.runtime.devices.cpu.kind import CPU
from forebay.runtime.devices.cuda.kind import CUDA

STARTED = time.monotonic()
LIMIT_S = 460.0
WARM_SHARE = 0.4  # of the limit, within which kernels are compiled ahead
CASE_S = 75.0  # a case that says nothing for so long is killed
# An empty kernel of a graph takes START_S too: a call of less than SHORT_S is held to its bytes over the rate and that.
SHORT_S, START_S = 10e-6, 2.5e-6
# Time for the checks and measurements of each module of gpu_cases, at most; what does not fit is left out and named.
BUDGET_S = {"norms": 15.0, "positions": 20.0, "sampling": 30.0, "quantization": 20.0, "attention": 60.0,
            "recurrences": 20.0, "experts": 20.0, "linear": 150.0}
RESULTS = Path(__file__).parent / "results"
Row = dict[str, Any]


def say(text: str) -> None:
    print(f"[{time.monotonic() - STARTED:6.1f} s] {text}", flush=True)


def all_cases(tiny: bool, ops: set[str]) -> dict[str, list[Case]]:
    """The cases by module, of these ops, or of all where none is named."""
    modules = {name: importlib.import_module(f"benchmarks.gpu_cases.{name}") for name in BUDGET_S}
    made = {name: [c for c in module.cases(tiny) if not ops or c.op in ops] for name, module in modules.items()}
    return {name: cases for name, cases in made.items() if cases}


def bandwidth_met(nbytes: int, time_s: float, bytes_per_s: float) -> float:
    """Share of a rate that a call reached; one of less than SHORT_S in the time that it took beyond START_S."""
    return nbytes / bytes_per_s / max(1e-9, time_s - (START_S if time_s < SHORT_S else 0.0))


def measure(case: Case, work: Work, ceilings: dict[str, float]) -> tuple[Row, dict[str, float]]:
    """The row of a case that has been checked, and the times of its candidates."""
    from benchmarks.gpu_cases.timing import time_s, uncaptured

    uncaptured.clear()
    times_s = {name: time_s(calls) for name, calls in work.candidates.items()}
    default_s = time_s(work.ours)
    best = min(times_s, key=times_s.__getitem__, default="")
    taken_s = min(default_s, times_s.get(best, default_s))
    rivals_s = {name: time_s(calls) for name, calls in work.rivals.items()}
    rate = max(filter(math.isfinite, (ceilings["copy_bytes_per_s"], ceilings["read_bytes_per_s"])), default=math.nan)
    share = work.nbytes / taken_s / rate
    got = {"bandwidth": bandwidth_met(work.nbytes, taken_s, rate)}
    got |= {name: rival_s / taken_s for name, rival_s in rivals_s.items()}
    aims = [{"what": a.what, "least": a.least, "got": got[a.what], "met": got[a.what] >= a.least} for a in work.aims]
    row = {"op": case.op, "shape": work.shape, "time_us": taken_s * 1e6, "default_us": default_s * 1e6, "best": best,
           "bytes_per_s": work.nbytes / taken_s, "share_of_rate": share, "flop_per_s": work.flops / taken_s,
           "rivals_us": {name: rival_s * 1e6 for name, rival_s in rivals_s.items()}, "aims": aims}  # fmt: skip
    return row | ({"by_events": uncaptured[-1]} if uncaptured else {}), times_s


def line(row: Row) -> str:
    """A row of the table."""
    head = f"{row['op']:18} {row['shape']:52}"
    if "skipped" in row or "failed" in row:
        return f"{head} {row.get('skipped') or 'FAILED: ' + row['failed']}"
    if "time_us" not in row:
        return f"{head} error {row['error']:.1e}"
    rivals = "".join(f"  {us / row['time_us']:5.2f}x {name}" for name, us in row["rivals_us"].items())
    missed = "".join(f"  MISSED {a['what']} {a['got']:.2f} < {a['least']:.2f}" for a in row["aims"] if not a["met"])
    speed = f"{row['time_us']:9.1f} us {row['bytes_per_s'] / 1e9:7.0f} GB/s {100 * row['share_of_rate']:4.0f} %"
    note = f"  ({row['by_events']})" if "by_events" in row else ""
    return f"{head} {speed}{rivals}{missed}{'  ' + row['best'] if row['best'] else ''}{note}"


def run_case(case: Case, place: Place, ceilings: dict[str, float], match: str = "") -> Row:
    """Check, then time; a case that raises or errs beyond its limit is a failed row and is not timed. A shape in which
    `match` is not found is left out."""
    try:
        work = case.make(place)
    except Exception as error:
        traceback.print_exc()
        return {"op": case.op, "shape": "", "failed": f"{type(error).__name__}: {error}"[:300]}
    row: Row = {"op": case.op, "shape": work.shape}
    if not re.search(match, work.shape):
        return row | {"skipped": "not asked for"}
    try:
        row |= {"error": work.verify(), "limit": work.limit}
        if not row["error"] <= work.limit:
            return row | {"failed": f"error {row['error']:.2e} is above {work.limit:.0e}"}
        if not place.tiny:
            measured, times_s = measure(case, work, ceilings)
            row |= measured
            if work.key:
                row |= {"key": work.key, "candidates_us": {name: s * 1e6 for name, s in times_s.items()}}
    except Exception as error:
        traceback.print_exc()
        return row | {"failed": f"{type(error).__name__}: {error}"[:300]}
    return row


def run_all(families: dict[str, list[Case]], ask: Callable[[int], Row], timed: bool, keep: Callable[[list[Row]], None],
            limit_s: float = LIMIT_S) -> list[Row]:
    """All rows, printed and kept as they are made; late cases are left out, never an op's first.
    `ask` gives the row of a case by its number."""
    rows: list[Row] = []
    numbers = itertools.count()
    for family, cases in families.items():
        begin, seen = time.monotonic(), set()
        for case in cases:
            number, now = next(numbers), time.monotonic()
            late = timed and (now - begin > BUDGET_S[family] or now - STARTED > limit_s)
            if late and case.op in seen:
                left = sum(c.op == case.op for c in cases) - sum(r["op"] == case.op for r in rows)
                if left:
                    rows += [{"op": case.op, "shape": "", "skipped": "left out, no time left"}] * left
                    print(line(rows[-1]), f"({left} cases)", flush=True)
                continue
            seen.add(case.op)
            row = {"op": case.op, "shape": ""} | ask(number)
            if row.get("skipped") == "not asked for":
                continue
            rows.append(row)
            print(line(row), flush=True)
            keep(rows)
    return rows


def warm(place: Place, cases: list[Case], match: str) -> None:
    """Run every call once, so that Triton's cache on disk holds the compiled kernels; failures show up later."""
    for case in cases:
        try:
            work = case.make(place)
            if not re.search(match, work.shape):
                continue
            if place.tiny:
                work.verify()
                continue
            for calls in (work.ours, *work.candidates.values(), *work.rivals.values()):
                calls[0]()
        except Exception:
            continue
        torch.cuda.empty_cache()


def warm_in_parallel(arguments: list[str], limit_s: float) -> None:
    """Compile in several processes, as one would take most of the time there is, for `limit_s` seconds at most."""
    count = max(1, min(12, (os.cpu_count() or 2) - 2))
    command = [sys.executable, "-m", "benchmarks.gpu", *arguments]
    workers = [subprocess.Popen([*command, "--warm", f"{i},{count}"]) for i in range(count)]
    try:
        for worker in workers:
            worker.wait(max(1.0, STARTED + limit_s - time.monotonic()))
    except subprocess.TimeoutExpired:
        say("compiling ahead takes long: the rest is compiled when it is needed")
    finally:
        for worker in workers:
            worker.terminate()
            worker.wait()


def write(rows: list[Row], ceilings: dict[str, float], tables: bool = True, name: str = "") -> list[Path]:
    """Write the results so far, and with `tables` the table of inflection points where plans find it; both to $OUT too.
    All files."""
    import triton

    from forebay.kernels.products.linear import selection

    gpu, date = torch.cuda.get_device_name(), datetime.date.today().isoformat()
    out = [Path(os.environ["OUT"])] if os.environ.get("OUT") else []
    result = {"gpu": gpu, "date": date, "torch": torch.__version__, "triton": triton.__version__,
              "seconds": time.monotonic() - STARTED, "ceilings": ceilings, "rows": rows}  # fmt: skip
    files = [folder / f"{gpu.replace(' ', '-')}{name and '-'}{name}-{date}.json" for folder in (RESULTS, *out)]
    for file in files:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(result, indent=1) + "\n")
    times_s = {tuple(row["key"]): {name: us / 1e6 for name, us in row["candidates_us"].items()}
               for row in rows if "key" in row}
    if times_s and tables:
        place = selection.table_path(gpu)
        known = selection.load_table(gpu, place) if place.exists() else ()
        table = {(e.kind, e.n, e.k): e for e in (*known, *selection.fit(times_s))}
        for file in (place, *(folder / place.name for folder in out)):
            selection.save_table(gpu, list(table.values()), file)
            files.append(file)
    return files


def main() -> int:
    options = arguments(
        __doc__, interpret=(False, "check at tiny shapes under Triton's interpreter"),
        tiny=(False, "check at tiny shapes on the GPU, in this process"), ops=(listed(str), "only these"),
        match=("", "only shapes in which this regular expression is found; no table"),
        name=("", "what the file of results is called beside the GPU and the day"),
        limit=(LIMIT_S, "seconds after which no case is begun"), answer=(str, "ceilings, of a process that is asked"),
        warm=(listed(int), "first case and step, of a process that compiles"))
    ops = options.ops or []
    if options.interpret:
        os.environ["TRITON_INTERPRET"] = "1"  # before anything imports Triton
    tiny = options.interpret or options.tiny
    families = all_cases(tiny, set(ops))
    cases = [case for found in families.values() for case in found]
    if not options.interpret and not torch.cuda.is_available():
        print("benchmarks.gpu: no CUDA device; --interpret checks the kernels without one")
        return 0
    asked = ["--ops", ",".join(ops), "--match", options.match]
    device = torch.device(CPU.name) if options.interpret else torch.device(CUDA.name, 0)
    place = Place(device, tiny, 0 if tiny else torch.cuda.get_device_properties(0).L2_cache_size)
    if options.warm:
        first, step = options.warm
        warm(place, cases[first::step], options.match)
        return 0
    if tiny:
        if options.tiny:
            warm_in_parallel([*asked, "--tiny"], WARM_SHARE * options.limit)
        rows = run_all(families, lambda number: run_case(cases[number], place, {}, options.match), False,
                       functools.partial(write_json, options))
        return int(any("failed" in row for row in rows))
    if options.answer:
        known = json.loads(options.answer)
        serve(lambda number: run_case(cases[number], place, known, options.match), check_gpu)
        return 0
    from benchmarks.gpu_cases.timing import ceilings, uncaptured
    from forebay.kernels.products.linear import selection

    selection.table_of(torch.cuda.get_device_name())  # one that cannot be read, and so not added to, is refused now
    limits = ceilings()
    for note in uncaptured:
        say(note)
    torch.cuda.empty_cache()
    say(f"{torch.cuda.get_device_name()}: copy {limits['copy_bytes_per_s'] / 1e9:.0f} GB/s, reads "
        f"{limits['read_bytes_per_s'] / 1e9:.0f} GB/s, bf16 matmul "
        f"{limits['matmul_bf16_flop_per_s'] / 1e12:.0f} TFLOP/s, from pinned memory "
        f"{limits['host_to_device_bytes_per_s'] / 1e9:.1f} GB/s")  # fmt: skip
    warm_in_parallel(asked, WARM_SHARE * options.limit)
    say("compiled")
    worker = IsolatedWorker([sys.executable, "-m", "benchmarks.gpu", *asked, "--answer", json.dumps(limits)])
    keep = functools.partial(write, ceilings=limits, tables=not options.match, name=options.name)
    try:
        rows = run_all(families, lambda number: worker.ask(number, CASE_S), True, keep, options.limit)
    finally:
        worker.close()
    say("written: " + ", ".join(map(str, keep(rows))))
    write_json(options, rows)
    missed = sum(not a["met"] for row in rows for a in row.get("aims", []))
    failed, skipped = (sum(what in row for row in rows) for what in ("failed", "skipped"))
    say(f"{len(rows)} cases: {failed} failed, {skipped} left out, {missed} aims missed")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
