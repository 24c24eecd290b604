"""Tokens per second where everything fits in RAM: `python -m benchmarks.decode_in_ram` (Linux).

SmolLM2-135M, batch 1, a prompt of 64 random tokens and 64 new ones, greedy, two threads each. Forebay runs within a
budget that holds all of it: on the Q4_1 GGUF repacked bit for bit (`forebay quantize --weights keep --head
--embeddings`: Q4_1 as w4g32, Q8_0 as w8g32), and in bf16 and float32. Peers: llama.cpp on the GGUF itself (xllamacpp,
where installed), whose own clock is read, and transformers in bf16. Each has a process of its own and waits idle while
another has its turn; a round gives each one turn. A turn's figure is its mean time per token after the first.

`ceiling` is the bytes of weights that a token reads over the memory's rate, the best of sums over 256 MiB. Memory is
resident bytes, files mapped into memory included: at most while generating, and above what the process held before it
loaded the model.
"""

from __future__ import annotations

import os

os.environ.setdefault("GOMP_SPINCOUNT", "0")  # before torch loads OpenMP: as forebay runs

import argparse
import importlib.util
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

PROMPT, NEW, BUDGET = 64, 64, "1GB"
MB = 1e6
LIBGOMP_SPINS = "300000"  # its default, with which llama.cpp is several times faster than without spinning
NAMES = ("forebay w4", "forebay bf16", "forebay float32", "llama.cpp Q4_1", "transformers bf16")


def resident(which: str) -> int:
    """Bytes of this process: VmRSS now, VmHWM at most since `forget_peak`."""
    found = re.search(rf"{which}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) << 10


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


class ForebayInRam:
    def __init__(self, folder: str, threads: int) -> None:
        from forebay.api import wrap

        self.lm = wrap(folder, {"device": BUDGET}, batch=1, prompt=PROMPT, new_tokens=NEW)
        streamed = self.lm.plan.prediction.streamed_nbytes
        if streamed > self.lm.captured.vocab_size:  # a row of the embedding comes from the file, and nothing else
            raise SystemExit(f"{BUDGET} do not hold {folder}: {streamed} bytes are streamed")

    def turn(self, ids: list[int]) -> float:
        seen: list[float] = []
        self.lm.generate(torch.tensor([ids]), max_new_tokens=NEW, eos_token_id=None,
                         on_token=lambda token: seen.append(time.perf_counter()))
        return (seen[-1] - seen[0]) / (NEW - 1)


class Transformers:
    def __init__(self, folder: str, threads: int) -> None:
        import transformers

        self.model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()

    @torch.inference_mode()
    def turn(self, ids: list[int]) -> float:
        """A bare loop over the model's forward: what transformers' generate does beside it is not counted."""
        token, cache, seen = torch.tensor([ids]), None, []
        for _ in range(NEW):
            result = self.model(input_ids=token, past_key_values=cache, use_cache=True, logits_to_keep=1)
            token, cache = result.logits[:, -1].argmax(-1, keepdim=True), result.past_key_values
            seen.append(time.perf_counter())
        return (seen[-1] - seen[0]) / (NEW - 1)


class LlamaCpp:
    def __init__(self, path: str, threads: int) -> None:
        import xllamacpp

        params = xllamacpp.CommonParams()
        params.model.path, params.n_ctx, params.n_parallel = path, 2 * (PROMPT + NEW), 1
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
        self.server = xllamacpp.Server(params)

    def turn(self, ids: list[int]) -> float:
        answer: Any = self.server.handle_completions(
            {"prompt": ids, "max_tokens": NEW, "temperature": 0.0, "ignore_eos": True, "cache_prompt": False})
        timings = answer["timings"]
        assert timings["predicted_n"] == NEW and timings["prompt_n"] == PROMPT
        return timings["predicted_ms"] / 1e3 / NEW


def serve(name: str, path: str, threads: int) -> None:
    """Load, then one turn for each line on stdin; an answer a line on stdout."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)  # libraries may print; the answers stay alone on the pipe
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet if name.startswith("llama") else 2, 1)
    if name.startswith("llama"):
        os.dup2(quiet, 2)
        import xllamacpp  # noqa: F401
    else:
        import transformers.models.llama.modeling_llama

        import forebay.api  # noqa: F401

        transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(threads)
    empty = resident("VmRSS")
    make = {"forebay": ForebayInRam, "llama.cpp": LlamaCpp, "transformers": Transformers}[name.split()[0]]
    contestant: Any = make(path, threads)
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(5, 49000, (PROMPT,), generator=generator).tolist()
    contestant.turn(ids)
    forget_peak()
    print(json.dumps({"loaded": True}), file=answers)
    for _ in sys.stdin:
        time_s = contestant.turn(ids)
        peak = resident("VmHWM")
        print(json.dumps({"time_s": time_s, "peak": peak, "above_empty": peak - empty}), file=answers)


def prepare(folder: Path) -> dict[str, tuple[str, int]]:
    """What each contestant opens, and the bytes of weights it reads a token: all but the embedding, whose matrix is
    the head's too."""
    import gguf
    import transformers

    from forebay.rewriter.checkpoints.quantize import Wish, quantize_model
    from forebay.rewriter.checkpoints.resolve import demo_gguf, resolve_model

    source, native = demo_gguf(), resolve_model("demo", dequantize=True)
    packed = quantize_model(source, folder / "packed", Wish("keep", head=True, embeddings=True))
    model = transformers.AutoModelForCausalLM.from_pretrained(native, dtype=torch.bfloat16)
    model.save_pretrained(folder / "bf16")
    count = sum(parameter.numel() for parameter in model.parameters())
    own = sum(int(tensor.n_bytes) for tensor in gguf.GGUFReader(source).tensors)
    return dict(zip(NAMES, (
        (str(folder / "packed"), packed.nbytes), (str(folder / "bf16"), 2 * count), (str(native), 4 * count),
        (str(source), own), (str(folder / "bf16"), 2 * count)), strict=True))


def ask(process: subprocess.Popen[str], line: str | None = None) -> dict[str, Any]:
    assert process.stdin is not None and process.stdout is not None
    if line is not None:
        print(line, file=process.stdin, flush=True)
    answer = process.stdout.readline()
    if not answer:
        raise SystemExit(f"{' '.join(map(str, process.args))} ended: {process.wait()}")  # type: ignore[arg-type]
    return json.loads(answer)


def measure(paths: dict[str, tuple[str, int]], rounds: int, threads: int) -> dict[str, list[dict[str, Any]]]:
    """Each contestant's answers, one a round; those run that are in `paths`."""
    processes: dict[str, subprocess.Popen[str]] = {}
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in paths}
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    try:
        for name, (path, _) in paths.items():
            command = [sys.executable, "-m", "benchmarks.decode_in_ram", "--serve", name, "--path", path,
                       "--threads", str(threads)]
            own = environment | ({"GOMP_SPINCOUNT": LIBGOMP_SPINS} if name.startswith("llama") else {})
            processes[name] = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                                               env=own)
            ask(processes[name])
        for _ in range(rounds):
            for name, process in processes.items():
                found[name].append(ask(process, "turn"))
    finally:
        for process in processes.values():
            process.kill()
            process.wait()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path, help="write everything measured to this file")
    parser.add_argument("--serve", choices=NAMES, help=argparse.SUPPRESS)
    parser.add_argument("--path", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve(args.serve, args.path, args.threads)
        return
    from benchmarks.quantized_linear import ceiling_bytes_per_s

    torch.set_num_threads(args.threads)
    rate = ceiling_bytes_per_s(9)
    print(f"{args.threads} threads, memory {rate / 1e9:.1f} GB/s")
    with tempfile.TemporaryDirectory() as scratch:
        paths = prepare(Path(scratch))
        if importlib.util.find_spec("xllamacpp") is None:
            print("llama.cpp: not installed (pip install xllamacpp)")
            del paths["llama.cpp Q4_1"]
        found = measure(paths, args.rounds, args.threads)
    rows = []
    for name, answers in found.items():
        times_s = [answer["time_s"] for answer in answers]
        median_s, nbytes = statistics.median(times_s), paths[name][1]
        rows.append({"name": name, "time_s": times_s, "tokens_per_s": 1 / median_s, "weights_nbytes": nbytes,
                     "ceiling_tokens_per_s": rate / nbytes, "peak_nbytes": max(a["peak"] for a in answers),
                     "above_empty_nbytes": max(a["above_empty"] for a in answers)})
        print(f"{name:<18} {1 / median_s:6.1f} tokens/s ({1 / max(times_s):.1f} to {1 / min(times_s):.1f})  "
              f"{nbytes / MB:4.0f} MB a token, ceiling {rate / nbytes:6.1f} ({nbytes / rate / median_s:4.0%})  "
              f"peak {rows[-1]['peak_nbytes'] / MB:5.0f} MB, {rows[-1]['above_empty_nbytes'] / MB:5.0f} for the model")
    if args.json:
        settings = {"threads": args.threads, "prompt": PROMPT, "new": NEW, "memory_bytes_per_s": rate}
        args.json.write_text(json.dumps(settings | {"contestants": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
