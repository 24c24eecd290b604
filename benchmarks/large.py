"""Models of 8 to 32 billion weights within 2 to 8 GB, and peers: `python -m benchmarks.large --json FILE` (as root).

The cells are declared below. Every turn is a process of its own. It may take the budget and 150 MiB more than what it
held before it opened the model, by a control group that counts its pages of files too. A pass over the weights precedes
the timed answer. Contestants take turns, with plain reads before each. Turns that FILE holds are not repeated, so a
killed run goes on where it was. `link` is the share of the disk's rate: bytes that the kernel counted for a step over
its time, by the rate of plain reads. A turn that the kernel ended, or that took more than `--most` seconds, has no
figures.
"""

from __future__ import annotations

import os

os.environ.setdefault("GOMP_SPINCOUNT", "0")  # before torch loads OpenMP: as forebay runs

import argparse
import contextlib
import json
import threading
import time
from collections import defaultdict
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any

from benchmarks import peers
from benchmarks.contestants import CONTESTANTS, Contestant, group_peak, remove_limits, started
from benchmarks.models import model_folder, packed
from benchmarks.probes import processor
from benchmarks.random_gguf import make_gguf
from forebay.rewriter.checkpoints.resolve import resolve_model
from forebay.runtime.disk.page_cache import drop_file
from forebay.runtime.disk.reader import open_reader
from forebay.runtime.measure.copies import BUFFER_NBYTES
from forebay.runtime.measure.kept import cached_machine, machine_cache_path
from forebay.runtime.measure.machine import landing_memory, read_time_s

GB = 1e9
READ_NBYTES = 1 << 30  # of plain reads
SAMPLE_S = 0.02
Row = dict[str, Any]


@dataclass(frozen=True)
class LargeCell:
    """What contestants are asked in turns: `kind` is a GGUF type, or bf16 for a folder of safetensors. With `draw`
    tokens are drawn by their probabilities. Where `sampled`, the cache is filled with bytes that no prefill computed,
    and decode steps alone are timed."""

    model: str
    kind: str
    budget_gb: float
    contestants: str = "forebay,llama.cpp"
    batch: int = 1
    prompt: int = 64
    new: int = 8
    rounds: int = 3
    draw: bool = False
    sampled: bool = False

    @property
    def name(self) -> str:
        return f"{self.model} {self.kind}, {self.budget_gb} GB, {self.batch} x {self.prompt}"


CELLS = (
    *(LargeCell("llama3-8b", "Q4_0", budget) for budget in (2, 4, 8)),
    LargeCell("llama3-8b", "Q4_0", 2, batch=8),
    LargeCell("llama3-8b", "Q4_0", 2, prompt=2048, new=4),
    *(LargeCell("qwen3-14b", "Q4_0", budget, "forebay,llama.cpp,neurostream", new=6) for budget in (2, 4, 8)),
    *(LargeCell("llama3-8b", "bf16", budget, "forebay bf16 zigzag,forebay w4 zigzag,disk-map", new=4)
      for budget in (2, 4, 8)),
    *(LargeCell("qwen3-32b", "Q4_0", budget, new=4) for budget in (4, 8)),
    *(LargeCell("qwen3moe-5gb", "Q4_0", share * 5, "forebay,llama.cpp,neurostream", prompt=16, new=24, draw=True)
      for share in (0.15, 0.3, 0.5)),
    LargeCell("llama3-8b of 8 layers", "bf16", 4, "forebay w4 zigzag,forebay w4 cache on disk", prompt=32752, new=16,
              rounds=2, sampled=True),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", help="'llama3-8b Q4_0' and the like, with commas between them; default: all")
    parser.add_argument("--json", type=Path, required=True, help="file of results, which is read first")
    parser.add_argument("--most", type=float, default=600.0, help="seconds of a turn")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--table", action="store_true", help="print the rows of the file, measure nothing")
    args = parser.parse_args()
    result: Row = {"processor": processor(), "threads": args.threads, "turns": []}
    if args.json.exists():
        result = json.loads(args.json.read_text())
    if not args.table:
        for cell in CELLS:
            if not args.models or f"{cell.model} {cell.kind}" in args.models.split(","):
                measure(cell, args, result)
    report(result["turns"])


def measure(cell: LargeCell, args: argparse.Namespace, result: Row) -> None:
    """The turns of a cell that are not there yet."""
    done = {(turn["cell"], turn["name"], turn["round"]) for turn in result["turns"]}
    names = [name for name in cell.contestants.split(",") if peers.installed(CONTESTANTS[name].engine)]
    for number, name in ((number, name) for number in range(cell.rounds) for name in names):
        if (cell.name, name, number) in done:
            continue
        path = opened(cell, CONTESTANTS[name])
        files = [path] if path.is_file() else sorted(path.glob("*.safetensors"))
        for file in files:
            drop_file(str(file))
        turn: Row = {"cell": cell.name, "name": name, "round": number, **asdict(cell),
                     "read_bytes_per_s": plain_read_rate(max(files, key=os.path.getsize), len(result["turns"])),
                     "weights_nbytes": sum(map(os.path.getsize, files))}
        result["turns"].append(turn | take_turn(cell, CONTESTANTS[name], path, args))
        partial = args.json.with_suffix(".part")
        partial.write_text(json.dumps(result, indent=1) + "\n")
        partial.rename(args.json)
        print(cell.name, name, {k: v for k, v in result["turns"][-1].items() if k in ("steps_s", "failed")}, flush=True)


def opened(cell: LargeCell, contestant: Contestant) -> Path:
    """What a contestant opens, made on first use: a GGUF file repacked bit for bit is Forebay's."""
    if cell.kind == "bf16":
        folder = model_folder(cell.model)
        return packed(folder) if contestant.source == "w4" else folder
    path = make_gguf(cell.model, cell.kind)
    return resolve_model(path) if contestant.engine == "forebay" else path


def plain_read_rate(path: Path, turn: int) -> float:
    """Bytes/s of plain reads past the page cache by the engine that the profile chose, of another part of the file in
    each turn."""
    link = cached_machine(path.parent).link("disk", "device")
    nbytes = min(READ_NBYTES, path.stat().st_size) // BUFFER_NBYTES * BUFFER_NBYTES
    at = turn * nbytes % (path.stat().st_size - nbytes + 1) // BUFFER_NBYTES * BUFFER_NBYTES
    with contextlib.closing(open_reader(link.method, link.depth, link.chunk_nbytes)) as reader:
        return nbytes / read_time_s(reader, str(path), at, nbytes, landing_memory(BUFFER_NBYTES))


def take_turn(cell: LargeCell, contestant: Contestant, path: Path, args: argparse.Namespace) -> Row:
    """The figures of one process, or why there are none."""
    cached_machine(path.parent)
    order = {"name": contestant.name, "options": dict(contestant.options), "ram": False, "share": None,
             "path": str(path), "scratch": str(path.parent), "vocab": 32000, "budget": int(cell.budget_gb * GB),
             "machine": str(machine_cache_path(path.parent)), "whole": not cell.sampled, "once": False, "capped": True,
             "batch": cell.batch, "prompt": cell.prompt, "new": cell.new, "draw": cell.draw, "label": cell.name,
             "prefill": False, "steps": cell.new - 2}
    process = started(contestant.name, args.threads, None)
    began = time.monotonic()
    try:
        for do in ("load", "plan"):
            answer = process.ask(order | {"do": do}, most_s=args.most)
            if "failed" in answer or "refused" in answer:
                return {"failed": answer.get("failed") or answer["refused"]}
        opened_s = time.monotonic() - began
        assert process.process is not None
        with ReadWatch(process.process.pid) as watch:
            answer = process.ask(order | {"do": "turn"}, limit_s=args.most)
        if "failed" not in answer:
            answer["group_peak"] = group_peak(watch.pid)
            answer["step_read_nbytes"] = watch.step_nbytes(sum(answer["steps_s"]), len(answer["steps_s"]))
        return answer | {"opened_s": opened_s}
    finally:
        process.close()
        remove_limits()


class ReadWatch:
    """Looks every 20 ms at what a process had the disk read, page faults included, while it is entered."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.seen: list[tuple[float, int]] = []
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> ReadWatch:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._end.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._end.wait(SAMPLE_S):
            try:
                text = Path(f"/proc/{self.pid}/io").read_text()
            except OSError:
                return
            self.seen.append((time.monotonic(), int(text.partition("\nread_bytes: ")[2].split()[0])))

    def step_nbytes(self, took_s: float, steps: int) -> float:
        """Bytes that a step read, of so many at the end that took so long."""
        at, last = self.seen[-1]
        return (last - max(nbytes for then, nbytes in self.seen if then <= at - took_s)) / steps


def step_s(turn: Row) -> float:
    return mean(turn["steps_s"])


def first_token(turns: list[Row]) -> str:
    """The median time of a prompt, of turns that had one."""
    times = [turn["prefill_s"] for turn in turns if "prefill_s" in turn]
    return f"{median(times):.1f}" if times else "-"


def report(turns: list[Row]) -> None:
    """Medians of each cell's contestants, with the spread of decoding, as rows of a table."""
    rows: dict[tuple[str, str], list[Row]] = defaultdict(list)
    for turn in turns:
        rows[turn["cell"], turn["name"]].append(turn)
    print("| Cell | Engine | Decode, tokens/s | First token, s | GB read a step | link | Peak, GB |\n|" + "---|" * 7)
    for (cell, name), group in rows.items():
        measured = [turn for turn in group if "failed" not in turn]
        if not measured:
            print(f"| {cell} | {name} | {group[0]['failed']} | | | | |")
            continue
        speeds = sorted(turn["batch"] / step_s(turn) for turn in measured)
        links = [turn["step_read_nbytes"] / step_s(turn) / turn["read_bytes_per_s"] for turn in measured
                 if "read_bytes_per_s" in turn]
        share = f"{median(links):.0%}" if links else ""
        print(f"| {cell} | {name} | {median(speeds):.3g} ({speeds[0]:.3g} to {speeds[-1]:.3g}) | "
              f"{first_token(measured)} | "
              f"{median(turn['step_read_nbytes'] for turn in measured) / GB:.2f} | {share} | "
              f"{max(turn['group_peak'] for turn in measured) / GB:.2f} |")


if __name__ == "__main__":
    main()
