"""A model larger than its budget beside its peers, in one interleaved run: `python -m benchmarks.disk_offload`.

Contestants: `forebay` within the budget; `disk-map`, transformers with device_map="auto", a memory limit and disk
offload; `accelerate`, load_checkpoint_and_dispatch with the same; `ram`, the model wholly in memory (the ceiling).
Each lives in a process of its own with equal threads and GOMP_SPINCOUNT=0, and they take turns, so that all meet the
same state of the machine. Plain reads of the same file are measured between the turns.

The peers map the checkpoint into memory, and mapped pages cannot be dropped, so each peer reads a copy of its own.
Cold: before every step the pages of the model's files are dropped from the page cache. Warm (--warm adds it): dropped
before a turn only. Peak memory is anonymous memory above what the process had after its imports; page-cache bytes of
the model's files are counted after each step, apart.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.big_model import LlamaShape, big_model
from benchmarks.contestants import OURS
from forebay.rewriter.ir.byte_sizes import parse_nbytes

CONTESTANTS = ("forebay", "forebay-w4", "disk-map", "accelerate", "ram")
PEERS = ("disk-map", "accelerate")

Row = dict[str, Any]


class Process:
    """A contestant in its own process; `ask` sends one command and waits for the answer."""

    def __init__(self, name: str, threads: int, module: str = "benchmarks.contestants") -> None:
        self.name = name
        environment = os.environ | {
            "GOMP_SPINCOUNT": "0", "OMP_NUM_THREADS": str(threads), "TQDM_DISABLE": "1"}
        self._process = subprocess.Popen([sys.executable, "-m", module, name], env=environment,
                                         stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(self, do: str, **order: Any) -> dict[str, Any]:
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write(json.dumps({"do": do, **order}) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise SystemExit(f"{self.name} failed at {do!r}, exit code {self._process.wait()}; see above")
        return json.loads(answer)

    def close(self) -> None:
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", default="1,8,32", help="comma-separated")
    parser.add_argument("--prompt", type=int, default=64, help="tokens")
    parser.add_argument("--new", type=int, default=16, help="tokens; the first comes from the prefill")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--budget", default="500MB", help="Forebay's device budget")
    parser.add_argument("--peer-budget", default="500MiB", help='the peers\' max_memory={"cpu": …}')
    parser.add_argument("--warm", action="store_true", help="measure with a warm page cache too")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--contestants", default=",".join(CONTESTANTS), help="comma-separated")
    parser.add_argument("--machine", type=Path, help="a saved machine profile; measured at the start if not given")
    parser.add_argument("--json", type=Path, help="write everything measured to this file")
    args = parser.parse_args()
    batches = [int(b) for b in args.batches.split(",")]
    names = args.contestants.split(",")
    if args.new < 2 or not set(names) <= set(CONTESTANTS):
        parser.error(f"--new must be at least 2, --contestants among {', '.join(CONTESTANTS)}")
    result = measure(args, names, batches)
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    report(result)


def measure(args: argparse.Namespace, names: list[str], batches: list[int]) -> dict[str, Any]:
    """Run all rounds; everything measured, as JSON values."""
    model = str(big_model())
    processes: dict[str, Process] = {}
    turns: list[Row] = []
    ceilings: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="forebay-benchmark-", dir=Path(model).parent) as scratch:
        link = Process("link", args.threads)
        order = {"model": model, "scratch": scratch, "budget": parse_nbytes(args.budget), "batches": batches,
                 "peer_budget": args.peer_budget, "prompt": args.prompt, "new": args.new, "vocab": LlamaShape().vocab,
                 "machine": str(args.machine or Path(scratch) / "machine.json")}
        try:
            if args.machine is None:
                note("measuring the machine")
                link.ask("machine", **order)
            machine = json.loads(Path(order["machine"]).read_text())
            loads, folders = {}, {}
            for name in names:
                note(f"loading {name}")
                processes[name] = Process(name, args.threads)
                folders[name] = shutil.copytree(model, Path(scratch) / f"{name}-model") if name in PEERS else (
                    quantized(Path(model)) if name == "forebay-w4" else model)
                loads[name] = processes[name].ask("load", **order | {"model": str(folders[name])})
            for mode in ("cold", "warm") if args.warm else ("cold",):
                for r in range(args.rounds):
                    for batch in batches:
                        for name in names[r % len(names) :] + names[: r % len(names)]:
                            turn = order | {"batch": batch, "cold": mode == "cold"}
                            if name == "forebay":
                                ceilings.append(link.ask("ceilings", **turn) | {"batch": batch})
                            row = processes[name].ask("turn", **turn)
                            turns.append(row | {"name": name, "batch": batch, "mode": mode, "round": r})
                            note(f"{mode}, round {r + 1}, batch {batch}, {name}: prefill {row['prefill_s']:.2f} s, "
                                 f"step {median(row['steps_s']):.3f} s")
        finally:
            for process in (link, *processes.values()):
                process.close()
    return {"arguments": {k: str(v) for k, v in vars(args).items()}, "machine": machine, "loads": loads,
            "turns": turns, "ceilings": ceilings}


def quantized(model: Path) -> Path:
    """The model in w4g64, min-max, made once and kept beside it."""
    from forebay.rewriter.checkpoints.quantize import Wish, quantize_model

    folder = model.with_name(f"{model.name}-w4g64")
    note(f"quantising into {folder}")
    quantize_model(model, folder, Wish("w4g64"))
    return folder


def note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def spread(values: list[float], digits: int = 2) -> str:
    """Median (min..max)."""
    return f"{median(values):.{digits}f} ({min(values):.{digits}f}..{max(values):.{digits}f})"


def decode_rate(turn: Row) -> float:
    """Tokens per second of all steps after the prefill."""
    return turn["batch"] * len(turn["steps_s"]) / sum(turn["steps_s"])


def whole_rate(turn: Row) -> float:
    """Tokens per second, prefill included."""
    return turn["batch"] * (1 + len(turn["steps_s"])) / (turn["prefill_s"] + sum(turn["steps_s"]))


def agreement(ours: Row, reference: Row) -> str:
    """Of each row's answer the tokens before the first that differs, in sum over rows, and all."""
    same = 0
    for a, b in zip(zip(*ours["tokens"], strict=True), zip(*reference["tokens"], strict=True), strict=True):
        same += next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), len(a))
    return f"{same}/{len(ours['tokens']) * ours['batch']}"


def report(result: dict[str, Any]) -> None:
    """Print the table, then streaming beside the link, then the ratios asked for."""
    turns, loads = result["turns"], result["loads"]
    head = ["batch", "cache", "contestant", "prefill s", "decode tok/s", "with prefill tok/s", "peak MB",
            "page cache MB", "tokens as ram"]
    rows = []
    groups: dict[tuple[str, int, str], list[Row]] = {}
    for turn in turns:
        groups.setdefault((turn["mode"], turn["batch"], turn["name"]), []).append(turn)
    for (mode, batch, name), found in groups.items():
        ram = groups.get((mode, batch, "ram"))
        peak = max(t["peak"] for t in found) - loads[name]["baseline"]
        rows.append([str(batch), mode, name, spread([t["prefill_s"] for t in found]),
                     spread(list(map(decode_rate, found))), spread(list(map(whole_rate, found))), f"{peak / 1e6:.0f}",
                     f"{max(t['cached_peak'] for t in found) / 1e6:.0f}",
                     agreement(found[0], ram[0]) if ram else ""])
    rows.sort(key=lambda row: (row[1], int(row[0])))
    print_table(head, rows)
    arguments = result["arguments"]
    print(f"Medians (min..max) of {arguments['rounds']} rounds; prompt {arguments['prompt']}, {arguments['new']} new "
          f"tokens; {arguments['threads']} threads, GOMP_SPINCOUNT=0; budgets: forebay {arguments['budget']}, peers "
          f"{arguments['peer_budget']}.")
    print("Peak: anonymous memory (RssAnon, sampled every 20 ms) above what the process had after its imports; "
          "page cache: the most bytes of the model's files found after a step.")
    dropped = {t["name"]: t["dropped_by"] for t in turns if t["mode"] == "cold"}
    print("Before every cold step: " + ", ".join(f"{name}: {how}" for name, how in dropped.items()) + ".")
    left = {name: max(t["left_after_drop"] for t in turns if t["name"] == name) / 1e6 for name in dropped}
    print("MB of the files that a drop left in the page cache, because they are mapped: " + ", ".join(
        f"{name} {nbytes:.0f}" for name, nbytes in left.items()) + ".")
    for (mode, batch, name), found in groups.items():
        if name in OURS:
            report_streaming(result, mode, batch, found)
            report_ratios(groups, mode, batch, name)
    if "forebay" in loads:
        f = loads["forebay"]
        print(f"forebay: capturing, planning and proving {arguments['batches']} took {f['load_s']:.1f} s and left "
              f"{(f['loaded'] - f['baseline']) / 1e6:.0f} MB of Python objects (part of its peak, outside the budget).")


def report_streaming(result: dict[str, Any], mode: str, batch: int, found: list[Row]) -> None:
    """Streamed bytes per second of decode over the best plain read of the same run; the machine's other ceilings."""
    here = [c for c in result["ceilings"] if c["batch"] == batch]
    engines = {e: median(c["read"][e] for c in here) for e in here[0]["read"]}
    best = max(engines, key=lambda e: engines[e])
    rates = [t["streamed_nbytes"] * len(t["steps_s"]) / sum(t["steps_s"]) for t in found]
    streamed, measured = found[0]["streamed_nbytes"], found[0]["disk_read_nbytes"]
    step_s = median(sum(t["steps_s"]) / len(t["steps_s"]) for t in found)
    print(f"\n{found[0]['name']}, batch {batch}, {mode}: {streamed / 1e6:.0f} MB per step at "
          f"{spread([r / 1e9 for r in rates])} GB/s; link utilisation {median(rates) / engines[best]:.2f} of the best "
          f"plain read ({best}: {engines[best] / 1e9:.2f})")
    print(f"  one answer read {measured / 1e6:.0f} MB from storage; step predicted "
          f"{found[0]['predicted_step_s']:.3f} s, measured {step_s:.3f} s; planned peak "
          f"{found[0]['planned_peak_nbytes']['device'] / 1e6:.0f} MB; {found[0]['slots']} slots of "
          f"{found[0]['slot_nbytes'] / 1e6:.1f} MB; prefill in chunks of {found[0]['prefill_chunk']}")
    print("  plain cold reads, GB/s: " + ", ".join(f"{e} {r / 1e9:.2f}" for e, r in engines.items()))
    memory = median(c["memory_bytes_per_s"] for c in here)
    gemm = {impl: median(c["gemm_s"][impl] for c in here) for impl in here[0]["gemm_s"]}
    n, k = 5632, 2048
    print(f"  memory {memory / 1e9:.1f} GB/s; bf16 [{batch}, {k}] x [{n}, {k}]^T: " + ", ".join(
        f"{impl} {2 * n * k / s / 1e9:.1f} GB/s of weights, {2 * batch * n * k / s / 1e9:.0f} GFLOP/s"
        for impl, s in gemm.items()))


def report_ratios(groups: dict[tuple[str, int, str], list[Row]], mode: str, batch: int, ours: str) -> None:
    def rate(name: str) -> float:
        return median(map(decode_rate, groups[mode, batch, name]))

    peers = [name for name in PEERS if (mode, batch, name) in groups]
    parts = []
    if peers:
        best = max(peers, key=rate)
        parts.append(f"{rate(ours) / rate(best):.2f} x the best peer ({best})")
    if (mode, batch, "ram") in groups:
        parts.append(f"{rate(ours) / rate('ram'):.2f} x the model in RAM")
    if ours != "forebay" and (mode, batch, "forebay") in groups:
        parts.append(f"{rate(ours) / rate('forebay'):.2f} x forebay in bf16")
    if parts:
        print(f"  decode: {ours} is {', '.join(parts)}")


def print_table(head: list[str], rows: list[list[str]]) -> None:
    """With rich where it is installed, else in plain columns."""
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
        for row in (head, *rows):
            print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)))
        return
    table = Table(*head)
    for row in rows:
        table.add_row(*row)
    console = Console()
    Console(width=max(console.width, 150)).print(table)


if __name__ == "__main__":
    main()
