"""Decoding a model that fits the GPU: transformers eager and compiled by Inductor, and Forebay with and without graphs.

    PYTHONPATH=src python -m benchmarks.gpu_resident          under 9 minutes; from a bare checkout
    PYTHONPATH=src python -m benchmarks.gpu_resident --tiny   the same on small models, here on whatever torch has

Shapes are SmolLM2-135M's and Llama-3-8B's, with random weights in bf16. Writes JSON to $OUT (or benchmarks/results/)
after every job, and prints a line for each: tokens/s, and the bytes of weights that a step reads beside the rate at
which a sum reads the GPU's memory. Needs torch with CUDA and transformers. Jobs run in a process apart, so that one
that faults or hangs is one failed row; what the first job of a shape saves, its others read.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_cases.isolated import IsolatedWorker, check_gpu, serve
from benchmarks.gpu_cases.offloaded import saved_model, weights_nbytes

STARTED = time.monotonic()
LIMIT_S = 500.0  # of the whole run: a job that is begun late gets what is left of it
JOB_S = 200.0  # a job that says nothing for so long is killed; the first of the large shape saves 16 GB
LEAST_S = 15.0  # with less than this left none is begun
SHAPES = {
    "135M": {"hidden_size": 576, "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3,
             "intermediate_size": 1536, "vocab_size": 49152},
    "8B": {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
           "intermediate_size": 14336, "vocab_size": 128256},
    "8B, 8 layers": {"hidden_size": 4096, "num_hidden_layers": 8, "num_attention_heads": 32, "num_key_value_heads": 8,
                     "intermediate_size": 14336, "vocab_size": 128256},
}  # fmt: skip
TINY = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "intermediate_size": 128, "vocab_size": 512}  # fmt: skip
GPU = "cuda"
PROMPT, STEPS, WARM = 64, 32, 4  # tokens of a prompt, steps that are timed, steps before that
CONTESTANTS = ("eager", "inductor", "forebay, launches", "forebay, graphs")
Row = dict[str, Any]


def jobs(shapes: str) -> list[Row]:
    """Each contestant takes its turn at a shape and batch; what comes last may be left out. `shapes` is "tiny", or
    some of SHAPES by semicolon."""
    batches = (1,) if shapes == "tiny" else (1, 16)
    return [{"shape": shape, "batch": batch, "contestant": name}
            for shape in shapes.split(";") for batch in batches for name in CONTESTANTS]


def say(text: str) -> None:
    print(f"[{time.monotonic() - STARTED:6.1f} s] {text}", flush=True)


def shape_of(job: Row) -> dict[str, int]:
    return SHAPES.get(job["shape"], TINY)


def prompt_of(job: Row) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randint(3, shape_of(job)["vocab_size"], (job["batch"], PROMPT), generator=generator)


def by_transformers(folder: Path, job: Row) -> list[float]:
    """Times at which tokens came, through transformers' static cache; compiled by Inductor with CUDA graphs of its own
    where that is asked for (the first decode steps compile)."""
    from transformers import LlamaForCausalLM, StaticCache

    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).to(GPU).eval()
    cache = StaticCache(model.config, max_cache_len=PROMPT + WARM + STEPS + 1)
    step: Any = model
    if job["contestant"] == "inductor":
        how: Any = {"mode": "reduce-overhead"} if GPU == "cuda" else {"backend": "eager"}
        step = torch.compile(model, dynamic=False, **how)
    with torch.inference_mode():
        ids = prompt_of(job).to(GPU)
        token = model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1:].argmax(-1)
        times = []
        for _ in range(WARM + STEPS + 1):
            times.append(came(token))
            token = step(input_ids=token.clone(), past_key_values=cache, use_cache=True).logits[:, -1:].argmax(-1)
    return times


def came(token: torch.Tensor) -> float:
    """When a token is known on the host."""
    token.cpu()
    return time.perf_counter()


def by_forebay(folder: Path, machine: Any, job: Row) -> list[float]:
    """Times at which tokens came, with all weights on the GPU; AssertionError where the plan streams any."""
    from forebay.api import wrap

    os.environ["FOREBAY_GRAPHS"] = "1" if job["contestant"].endswith("graphs") else "0"
    nbytes = weights_nbytes(folder)
    budget = {"device": 2 * nbytes + (1 << 30), "host": nbytes + (1 << 30)}
    steps, times = WARM + STEPS + 1, list[float]()
    with wrap(folder, budget, batch=job["batch"], prompt=PROMPT, new_tokens=steps, machine=machine) as lm:
        assert lm.plan.prediction.streamed_nbytes == 0, "the plan streams weights of a model that fits"
        lm.generate(prompt_of(job), max_new_tokens=steps, eos_token_id=None,
                    on_token=lambda _: times.append(time.perf_counter()))
    return times


def measure(scratch: Path, machine: Any, job: Row) -> Row:
    """Decode steps of one contestant: their median and spread, and the weights' bytes that a step reads per second."""
    folder = saved_model(scratch, shape_of(job), torch.bfloat16)
    ours = job["contestant"].startswith("forebay")
    times = by_forebay(folder, machine, job) if ours else by_transformers(folder, job)
    steps = [after - before for before, after in itertools.pairwise(times)][WARM:]
    step_s, sizes = statistics.median(steps), shape_of(job)
    read_nbytes = weights_nbytes(folder) - 2 * sizes["vocab_size"] * sizes["hidden_size"]  # one row of the embedding
    return {"step_s": step_s, "spread_s": [min(steps), max(steps)], "tokens_per_s": job["batch"] / step_s,
            "weight_bytes_per_s": read_nbytes / step_s, "steps": len(steps)}  # fmt: skip


def answer(scratch: Path, shapes: str) -> None:
    """Do the jobs whose numbers come on standard input."""
    from forebay.rewriter.machine.profile import load_machine

    machine, known = load_machine(scratch / "machine.json"), jobs(shapes)
    serve(lambda number: measure(scratch, machine, known[number]), check_gpu if GPU == "cuda" else lambda: None)


def line(job: Row, row: Row, read_bytes_per_s: float) -> str:
    """A job and what came of it."""
    head = f"{job['shape']:5} batch {job['batch']:3} {job['contestant']:18}"
    if "failed" in row or "skipped" in row:
        return f"{head} {row.get('skipped') or 'FAILED: ' + row['failed']}"
    least, most = (1e3 * x for x in row["spread_s"])
    return (f"{head} {row['tokens_per_s']:9.1f} tokens/s, step {1e3 * row['step_s']:.2f} ms ({least:.2f}..{most:.2f}), "
            f"weights at {row['weight_bytes_per_s'] / 1e9:.0f} GB/s of {read_bytes_per_s / 1e9:.0f}")


def run(worker: IsolatedWorker, shapes: str, limit_s: float, keep: Callable[[Row, Row], None]) -> None:
    """All jobs in order; those that no time is left for are named."""
    for number, job in enumerate(jobs(shapes)):
        left = STARTED + limit_s - time.monotonic()
        row = worker.ask(number, JOB_S, left) if left > LEAST_S else {"skipped": "left out, no time left"}
        keep(job, row)


def main() -> int:
    global GPU
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="a small model; without a GPU nothing is compiled")
    parser.add_argument("--shapes", default="135M;8B", help=f"some of {'; '.join(SHAPES)}; default: %(default)s")
    parser.add_argument("--limit", type=float, default=LIMIT_S, help="seconds for the whole run")
    parser.add_argument("--answer", metavar="FOLDER", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not options.tiny and (unknown := set(options.shapes.split(";")) - set(SHAPES)):
        parser.error(f"--shapes: {'; '.join(sorted(unknown))} is none of {'; '.join(SHAPES)}")
    on_gpu = torch.cuda.is_available()
    if not on_gpu and not options.tiny:
        raise SystemExit("benchmarks.gpu_resident: torch finds no GPU here; --tiny runs without one")
    GPU = "cuda" if on_gpu else "cpu"
    shapes = "tiny" if options.tiny else options.shapes
    if options.answer:
        from benchmarks.gpu_cases import offloaded

        offloaded.GPU = GPU
        answer(options.answer, shapes)
        return 0
    from forebay.rewriter.machine.profile import Machine, save_machine
    from forebay.runtime.measure.machine import measure_machine

    name = torch.cuda.get_device_name() if on_gpu else "cpu"
    result: Row = {"gpu": name, "torch": torch.__version__, "date": datetime.date.today().isoformat(), "rows": []}
    folder = Path(os.environ.get("OUT") or "benchmarks/results")
    target = None if options.tiny else folder / f"{name.replace(' ', '-')}-resident-{result['date']}.json"
    with tempfile.TemporaryDirectory() as scratch:
        machine = measure_machine(scratch, quick=True) if on_gpu else Machine.default()
        save_machine(machine, Path(scratch) / "machine.json")
        rate = machine.tiers["device"].bandwidth_bytes_per_s
        asked = ["--shapes", shapes, *(["--tiny"] if options.tiny else [])]
        worker = IsolatedWorker([sys.executable, "-m", "benchmarks.gpu_resident", "--answer", scratch, *asked])

        def keep(job: Row, row: Row) -> None:
            result["rows"].append(job | row)
            say(line(job, row, rate))
            if target is not None:
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")

        try:
            run(worker, shapes, options.limit, keep)
        finally:
            worker.close()
    return int(any("failed" in row for row in result["rows"]))


if __name__ == "__main__":
    sys.exit(main())
