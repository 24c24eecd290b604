"""What a user waits for before the first token: `python -m benchmarks.startup [CASE]`.

bundle   starts of `run` from a checkpoint and from a bundle of it, whose files are not cached. What reads take is
         listed too: all weights are resident under the budget, so each start reads them all.
kept     starts of `run`, `chat` and `serve`: the first with an empty cache of graphs and plans, and the second.
         Both cases count seconds to the first token, or until the server listens, of the processor and by the clock,
         in turn and with `import torch` alone.
compile  seconds to capture, plan, lower and prove Llamas of equal width and other depth. No weights are involved: the
         model is its config, the files are named and never opened. Each round compiles every depth from nothing, in
         turn, in one process whose imports and caches are warm.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch

import forebay
from benchmarks.command import arguments, print_table, spread, write_json
from benchmarks.models import RandomShape, config_of
from forebay.kernels.build.cache_folder import cache_folder
from forebay.rewriter.capture.language_model import capture_model
from forebay.rewriter.capture.step_graphs import step_graphs
from forebay.rewriter.checkpoints.resolve import resolve_model
from forebay.rewriter.ir.plan import Budget, Workload
from forebay.rewriter.ir.program import FileSlice
from forebay.rewriter.machine.profile import Machine
from forebay.rewriter.pipeline.rewrite_captured import rewrite_captured
from forebay.rewriter.pipeline.step_pipeline import Pipeline
from forebay.rewriter.planning.options import Options
from forebay.rewriter.switches import Switches
from forebay.runtime.disk.page_cache import drop_file

PROMPT = "The capital of France is"
STAGES = ("capture and fuse", "fix sizes", "plan, lower, prove")


def read_s(model: Path) -> float:
    """Seconds to read the weights once, plainly, not cached."""
    began = time.perf_counter()
    for path in model.glob("*.safetensors"):
        drop_file(str(path))
        with open(path, "rb", buffering=0) as file:
            while file.read(4 << 20):
                pass
        drop_file(str(path))
    return time.perf_counter() - began


def children_s() -> float:
    """Seconds of the processor that ended children have used."""
    times = os.times()
    return times.children_user + times.children_system


def started_s(command: list[str], env: dict[str, str]) -> tuple[float, float]:
    """Seconds of `forebay COMMAND`: of the processor, children included, and by the clock until the first token, or
    until a server listens."""
    before, began = children_s(), time.perf_counter()
    serves = command[0] == "serve"
    with subprocess.Popen([sys.executable, "-m", "forebay", *command], env=env, stdin=subprocess.PIPE, text=True,
                          stdout=subprocess.DEVNULL if serves else subprocess.PIPE,
                          stderr=subprocess.PIPE if serves else subprocess.DEVNULL) as process:
        assert process.stdin is not None
        process.stdin.write("Hi\n" if command[0] == "chat" else "")
        process.stdin.close()
        output = process.stderr if serves else process.stdout
        assert output is not None
        said = next((line for line in output if line.startswith("serving ")), "") if serves else output.read(1)
        taken = time.perf_counter() - began
        if said and serves:
            process.send_signal(signal.SIGTERM)
        output.read()
        if process.wait() or not said:
            raise SystemExit(f"forebay {' '.join(command)} failed; run it by hand")
    return children_s() - before, taken


def import_s() -> float:
    """Processor seconds of `import torch`."""
    before = children_s()
    subprocess.run([sys.executable, "-c", "import torch"], check=True)
    return children_s() - before


def starts(args: argparse.Namespace, commands: dict[str, list[str]], before: Callable[[str], object],
           env: dict[str, str]) -> dict[str, Any]:
    """Starts of all commands in turn; `before` prepares the one of a name."""
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in commands}
    imports: list[float] = []
    for _ in range(args.rounds):
        imports.append(import_s())
        for name, command in commands.items():
            before(name)
            found[name].append(started_s([*command, "--budget", args.budget], env))
    print_table([{"start": name, "processor, s": spread((cpu for cpu, _ in each), ".2f"),
                  "beyond torch, s": spread((cpu - b for (cpu, _), b in zip(each, imports, strict=True)), ".2f"),
                  "first token, s": spread((taken for _, taken in each), ".2f")} for name, each in found.items()])
    print(f"import torch: {spread(imports, '.2f')} s of the processor")
    return {"processor_and_clock_s": found, "import_torch_s": imports}


def bundle(args: argparse.Namespace) -> dict[str, Any]:
    """Starts from a checkpoint and from a bundle."""
    checkpoint, reads = resolve_model(args.model), list[float]()
    with tempfile.TemporaryDirectory(dir=checkpoint.parent) as folder:
        models = {"checkpoint": checkpoint,
                  "bundle": forebay.export(checkpoint, Path(folder) / "bundle", budget=args.budget)}
        commands = {name: ["run", str(model), PROMPT, "--new-tokens", "1"] for name, model in models.items()}
        found = starts(args, commands, lambda name: reads.append(read_s(models[name])), dict(os.environ))
    print(f"plain reads: {spread(reads, '.2f')} s")
    return found | {"read_s": reads}


def kept(args: argparse.Namespace) -> dict[str, Any]:
    """First and later starts of the commands that answer."""
    commands = {"run": ["run", args.model, PROMPT, "--new-tokens", "1"],
                "chat": ["chat", args.model, "--new-tokens", "1"], "serve": ["serve", args.model, "--port", "0"]}
    env = dict(os.environ)
    env.pop("PYTHONDONTWRITEBYTECODE", None)  # or each start compiles its modules
    with tempfile.TemporaryDirectory() as folder:
        for path in cache_folder().iterdir():
            if path.name not in ("graphs", "plans"):
                (Path(folder) / path.name).symlink_to(path)

        def forget(name: str) -> None:
            for each in ("graphs", "plans") if name.endswith("first") else ():
                shutil.rmtree(Path(folder) / each, ignore_errors=True)

        return starts(args, {f"{name}, {turn}": command for name, command in commands.items()
                             for turn in ("first", "second")}, forget, env | {"FOREBAY_CACHE": folder})


def compile_once(layers: int, hidden: int, workload: Workload) -> tuple[float, ...]:
    """Seconds per stage; the budget is half of the weights, so that the other half streams."""
    config = config_of(RandomShape(hidden, layers, hidden // 64, hidden // 128, hidden * 11 // 4, 4096), torch.float32)
    gc.collect()
    times = [time.perf_counter()]
    captured = rewrite_captured(capture_model(config), Switches())
    times.append(time.perf_counter())
    files, end = {}, 0
    for spec in captured.weights.values():
        files[spec.name] = FileSlice("model.safetensors", end, spec.nbytes)
        end += spec.nbytes
    source = step_graphs(captured, files, workload, "compile-time")
    pipeline = Pipeline(source, workload, Machine.default(), Switches())
    times.append(time.perf_counter())
    cache = sum(pipeline.needs.cache.values())
    plan = pipeline.plan(Budget(end // 2 + cache + min(16 << 20, end // 8)), Options())
    for tokens in {1, plan.schedule.prefill_chunk}:
        pipeline.program(plan, tokens)
    times.append(time.perf_counter())
    assert plan.prediction.streamed_nbytes > 0, "everything fits: transfers were not compiled"
    return tuple(b - a for a, b in itertools.pairwise(times))


def compiled(args: argparse.Namespace) -> dict[str, Any]:
    """Compilations of each depth."""
    depths, workload = args.layers, Workload(batch=4, prompt=64, new_tokens=64)
    compile_once(2, args.hidden, workload)  # imports, registrations, torch's own caches
    seen: dict[int, list[tuple[float, ...]]] = {n: [] for n in depths}
    for number in range(args.rounds):
        for n in depths if number % 2 else depths[::-1]:
            seen[n].append(compile_once(n, args.hidden, workload))
    first = [sum(times) for times in seen[depths[0]]]
    print_table([{"layers": str(n), "s": spread(map(sum, rounds), ".2f"),
                  "times the first": spread((sum(a) / b for a, b in zip(rounds, first, strict=True)), ".2f"),
                  **{stage: median(times) for stage, times in zip(STAGES, zip(*rounds, strict=True), strict=True)}}
                 for n, rounds in seen.items()])
    return {"layers": seen}


def main() -> None:
    args = arguments(__doc__, ("bundle", "kept", "compile"), model=("demo", "of all but compile"),
                     budget=("2GB", "of all but compile"),
                     layers=([12, 96], "depths to compile; ratios are to the first"),
                     hidden=(1024, "of the compiled module"), rounds=(3, "turns of each"))
    write_json(args, {"bundle": bundle, "kept": kept, "compile": compiled}[args.case](args))


if __name__ == "__main__":
    main()
