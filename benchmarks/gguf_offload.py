"""A GGUF file larger than its budget beside what streams such files: `python -m benchmarks.gguf_offload` (Linux).

A random model of Qwen3's shape of about 1 GB in `--kind` Q8_0 or Q4_K (random_gguf.py), batch 1, a prompt of 64 random
tokens and `--new` ones, within shares of the file's bytes (`--shares`). Forebay streams the file repacked bit for bit;
peers, where installed: neurostream (half of the budget for weights it keeps, a quarter for its buffers) and llama.cpp
(xllamacpp), which maps the file. Each has a process of its own and takes turns, and may take the budget and `ROOM`
beside what it held before it opened the model, by a control group of the kernel's that counts its pages of files too;
so who maps the file has a copy that nobody else reads. Without root there is no such group, and the page cache serves
who maps files. "llama.cpp in RAM" has no limit: the ceiling of computing. The ceiling of streaming is the bytes that
are not kept over the rate of plain reads between the turns.
"""

from __future__ import annotations

import os

os.environ.setdefault("GOMP_SPINCOUNT", "0")  # before torch loads OpenMP: as forebay runs

import argparse
import importlib
import importlib.util
import json
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.memory_limit import enter_limit, remove_limits
from benchmarks.ram_contestants import LlamaCpp, Turn, ask, forget_peak, resident, some_ids, started, timed_answer
from forebay.runtime.disk.page_cache import drop_file

PROMPT, ROOM, MB = 64, 150 << 20, 1e6
IMPORTS = {"forebay": "forebay.api", "neurostream": "neurostream.api", "llama.cpp": "xllamacpp",
           "llama.cpp in RAM": "xllamacpp"}
MODELS = {"Q8_0": "qwen3-1b", "Q4_K": "qwen3-2b"}


class ForebayOnGguf:
    def __init__(self, path: str, budget: int, new: int) -> None:
        import forebay.api

        self.new = new
        self.lm = forebay.api.wrap(path, {"device": budget}, batch=1, prompt=PROMPT, new_tokens=new)

    def turn(self, ids: list[int]) -> Turn:
        return timed_answer(self.lm, ids, self.new)


class NeuroStreamPeer:
    def __init__(self, path: str, budget: int, new: int) -> None:
        from neurostream.api import NeuroStream as Model

        self.new = new
        self.model = Model.load(path, device="cpu", mem_budget=budget // 4, ram_budget=budget // 2)

    def turn(self, ids: list[int]) -> Turn:
        for _ in self.model.generate(ids, max_tokens=self.new, temperature=0.0, stop_on_eos=False):
            pass
        stats = self.model.stats
        return stats.prefill_seconds, stats.decode_seconds / (self.new - 1)


def serve(name: str, path: str, budget: int, new: int, threads: int) -> None:
    """Load within the limit, then one turn for each line on stdin; an answer a line on stdout."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)  # libraries may print; the answers stay alone on the pipe
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    if "llama" in name:
        os.dup2(quiet, 2)
    importlib.import_module(IMPORTS[name])
    if name == "forebay":
        import transformers.models.qwen3.modeling_qwen3  # noqa: F401
    torch.set_num_threads(threads)
    empty = resident("VmRSS")
    limited = budget > 0 and enter_limit(budget + ROOM)
    contestant: Any
    if "llama" in name:
        contestant = LlamaCpp(name, path, PROMPT, threads)
    else:
        contestant = (ForebayOnGguf if name == "forebay" else NeuroStreamPeer)(path, budget, new)
    ids = some_ids(PROMPT)
    forget_peak()
    print(json.dumps({"loaded": True}), file=answers)
    for _ in sys.stdin:
        prefill_s, time_s = contestant.turn(ids)
        print(json.dumps({"prefill_s": prefill_s, "time_s": time_s, "limited": limited,
                          "above_empty": resident("VmHWM") - empty}), file=answers)


def plain_read_rate(path: str, nbytes: int = 400 << 20) -> float:
    """Bytes/s of reading the file's first bytes past the page cache, 4 MiB at a time, four at once."""
    from concurrent.futures import ThreadPoolExecutor
    from mmap import mmap

    step, fd = 4 << 20, os.open(path, os.O_RDONLY | os.O_DIRECT)
    count = min(nbytes, os.stat(path).st_size) // step
    buffers = [mmap(-1, step) for _ in range(count)]
    with ThreadPoolExecutor(4) as pool:
        began = time.perf_counter()
        list(pool.map(lambda i: os.preadv(fd, [buffers[i]], i * step), range(count)))
        took = time.perf_counter() - began
    os.close(fd)
    return count * step / took


def measure(source: str, paths: dict[str, str], budget: int, new: int, rounds: int, threads: int
            ) -> tuple[dict[str, list[dict[str, Any]]], list[float]]:
    """Each contestant's answers, one a round, and the rates of plain reads between them."""
    processes: dict[str, subprocess.Popen[str]] = {}
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in paths}
    rates: list[float] = []
    if "llama.cpp" in paths:
        drop_file(paths["llama.cpp"])  # pages that are there are nobody's who maps them
    try:
        for name, path in paths.items():
            process = started("gguf_offload", name, path, threads, "--new", str(new), "--budget",
                              str(0 if name.endswith("RAM") else budget))
            if process is None:
                print(f"{name}: does not run within {budget / MB:.0f} MB")
            else:
                processes[name] = process
        for _ in range(rounds):
            for name, process in list(processes.items()):
                rates.append(plain_read_rate(source))
                answer = ask(process, "turn")
                if answer is None:
                    print(f"{name}: ended within {budget / MB:.0f} MB")
                    del processes[name]
                    continue
                found[name].append(answer)
    finally:
        for process in processes.values():
            process.kill()
            process.wait()
        remove_limits()
    return found, rates


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", choices=tuple(MODELS), default="Q8_0")
    parser.add_argument("--shares", default="0.25,0.5", help="of the file's bytes, with commas between them")
    parser.add_argument("--new", type=int, default=9, help="tokens")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path, help="write everything measured to this file")
    parser.add_argument("--serve", choices=tuple(IMPORTS), help=argparse.SUPPRESS)
    parser.add_argument("--path", help=argparse.SUPPRESS)
    parser.add_argument("--budget", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve(args.serve, args.path, args.budget, args.new, args.threads)
        return
    from benchmarks.random_gguf import make_gguf
    from forebay.rewriter.checkpoints.resolve import resolve_model

    source = make_gguf(MODELS[args.kind], args.kind)
    size = source.stat().st_size
    paths = {name: str(resolve_model(source) if name == "forebay" else source) for name, module in IMPORTS.items()
             if importlib.util.find_spec(module.partition(".")[0]) is not None}
    if "llama.cpp" in paths:
        paths["llama.cpp"] = str(source.with_name(f"mapped-{source.name}"))
        if not Path(paths["llama.cpp"]).exists():
            shutil.copyfile(source, paths["llama.cpp"])
            os.sync()
    print(f"{source.name}: {size / MB:.0f} MB; {args.threads} threads; not installed: "
          f"{', '.join(name for name in IMPORTS if name not in paths) or 'none'}")
    rows = []
    for share in map(float, args.shares.split(",")):
        budget = int(share * size)
        found, rates = measure(str(source), paths, budget, args.new, args.rounds, args.threads)
        rate = statistics.median(rates) if rates else 0.0
        bound = rate / max(1, size - budget)
        print(f"\nwithin {budget / MB:.0f} MB ({share:.0%}); plain reads {rate / 1e9:.1f} GB/s, so at most {bound:.1f} "
              "tokens/s of what is not kept")
        for name, answers in found.items():
            if not answers:
                continue
            decode = sorted(1 / answer["time_s"] for answer in answers)
            prefill = statistics.median(answer["prefill_s"] for answer in answers)
            most = max(answer["above_empty"] for answer in answers)
            print(f"{name:<17} prefill {prefill:6.2f} s  decode {statistics.median(decode):6.2f} tokens/s "
                  f"({decode[0]:.2f} to {decode[-1]:.2f})  at most {most / MB:5.0f} MB"
                  f"{'' if answers[0]['limited'] else ', no limit'}", flush=True)
            rows.append({"name": name, "share": share, "budget": budget, "read_bytes_per_s": rate, "turns": answers})
    if args.json:
        settings = {"kind": args.kind, "nbytes": size, "prompt": PROMPT, "new": args.new, "threads": args.threads}
        args.json.write_text(json.dumps(settings | {"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
