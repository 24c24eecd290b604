"""Tokens per second where everything fits in RAM: `python -m benchmarks.decode_in_ram` (Linux).

Batch 1, a prompt of random tokens (`--prompt`) and 32 new ones, greedy, two threads each. `--model demo` is
SmolLM2-135M in Q4_1, or with `--kind Q8_0` so quantised by llama.cpp's own code; 1b and 3b are random Llamas of so many
parameters in `--kind` Q4_0 or Q8_0 (random_gguf.py). Forebay runs within a budget that holds all of it, on the file
repacked bit for bit (`forebay quantize --weights keep --head --embeddings`): computing in float32 ("packed") or in bf16
(`--dtype bfloat16`), with activations as they are and rounded to 8 bits; and with `--more` (the demo) on weights of
bf16 and float32. Peers, where installed: llama.cpp (xllamacpp) and OpenVINO GenAI, as it comes (activations in 8 bits)
and with products in bf16, both on the GGUF itself and by their own clocks, with `--more` OpenVINO on the file in fp16,
and transformers in bf16; onnxruntime-genai on the model that its own builder makes in 4 bits, of Q8_0 in 8 (`pip
install onnx_ir`). Each has a process of its own and waits idle while another has its turn; a round gives each one turn.
Decode is the mean time of a token after the first, prefill the time to the first.

With `--processor haswell` (or skylake-avx512: AVX-512 without VNNI and bf16) Forebay's kernels are compiled for that
kind of processor, whose speed its plans guess, and torch and oneDNN are held to its instructions, OpenVINO's too, which
then starts in float32 alone; onnxruntime cannot be held, and llama.cpp's wheel has AVX2 alone.

`ceiling` is the bytes of weights that a token reads over the memory's rate, the best of sums over 256 MiB. Memory is
resident bytes, files mapped into memory included: at most while generating, and above what the process held before it
loaded the model.
"""

from __future__ import annotations

import os

os.environ.setdefault("GOMP_SPINCOUNT", "0")  # before torch loads OpenMP: as forebay runs

import argparse
import importlib
import importlib.util
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks.ram_contestants import (
    CONTESTANTS,
    MODULES,
    NEW,
    ask,
    build_onnx,
    forget_peak,
    onnx_nbytes,
    resident,
    some_ids,
    started,
)

MB = 1e6
PACKED = ("forebay packed", "forebay packed int8", "forebay in bf16", "forebay in bf16 int8")
NAMES = (*PACKED, "forebay bf16", "forebay float32", "llama.cpp", "openvino", "openvino bf16", "openvino float32",
         "openvino bf16 of fp16", "onnxruntime", "transformers bf16")
# Processors that are simulated: what oneDNN and torch call their instructions.
LESSER = {"haswell": ("AVX2", "avx2"), "skylake-avx512": ("AVX512_CORE", "avx512")}


def serve(name: str, path: str, prompt: int, threads: int, processor: str | None) -> None:
    """Load, then one turn for each line on stdin; an answer a line on stdout."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)  # libraries may print; the answers stay alone on the pipe
    kind = name.split()[0]
    peer = kind in MODULES
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet if peer else 2, 1)
    if peer:
        os.dup2(quiet, 2)
        importlib.import_module(MODULES[kind])
    else:
        import transformers.models.llama.modeling_llama

        import forebay.api  # noqa: F401
        from forebay.kernels.cpu_support import native

        if processor is not None:
            native.FLAGS = tuple(flag.replace("=native", f"={processor}") for flag in native.FLAGS)
        transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(threads)
    empty = resident("VmRSS")
    contestant = CONTESTANTS[kind](name, path, prompt, threads)
    ids = some_ids(prompt)
    contestant.turn(ids)
    forget_peak()
    print(json.dumps({"loaded": True}), file=answers)
    for _ in sys.stdin:
        prefill_s, time_s = contestant.turn(ids)
        peak = resident("VmHWM")
        print(json.dumps({"prefill_s": prefill_s, "time_s": time_s, "peak": peak, "above_empty": peak - empty}),
              file=answers)


def prepare(folder: Path, model: str, kind: str, more: bool, only: set[str]) -> dict[str, tuple[str, int]]:
    """What each contestant (of `only`, if it names any) opens, and the bytes of weights it reads a token: all but the
    embedding, whose matrix is the head's too in the demo."""
    import gguf
    import transformers

    from benchmarks.gguf_perplexity import write_file
    from benchmarks.llama_cpp import load_library
    from benchmarks.random_gguf import as_f16, make_gguf
    from forebay.rewriter.checkpoints.quantize import Wish, quantize_model
    from forebay.rewriter.checkpoints.resolve import demo_gguf, resolve_model

    if model == "demo" and kind == "Q8_0":
        write_file(load_library(), source := folder / f"demo-{kind}.gguf", kind)
    else:
        source = demo_gguf() if model == "demo" else make_gguf(model, kind)
    packed = quantize_model(source, folder / "packed", Wish("keep", head=True, embeddings=True))
    if not only or any("in bf16" in name for name in only):
        quantize_model(source, folder / "half", Wish("keep", head=True, embeddings=True, dtype=torch.bfloat16))
    sizes = {tensor.name: int(tensor.n_bytes) for tensor in gguf.GGUFReader(source).tensors}
    own = sum(sizes.values()) - (sizes["token_embd.weight"] if "output.weight" in sizes else 0)
    ours = packed.nbytes * own // sum(sizes.values())
    found = {name: (str(folder / ("half" if "in bf16" in name else "packed")), ours) for name in PACKED}
    found |= {name: (str(source), own) for name in ("llama.cpp", "openvino", "openvino bf16", "openvino float32")}
    builds = not only or "onnxruntime" in only
    if builds and importlib.util.find_spec(MODULES["onnxruntime"]) is not None:
        built = folder / "onnx"
        native = resolve_model("demo" if model == "demo" else source, dequantize=True)
        build_onnx(native, built, "int8" if kind == "Q8_0" else "int4", folder / "cache")
        found["onnxruntime"] = str(built), onnx_nbytes(built)
    if more and model == "demo":
        native = resolve_model("demo", dequantize=True)
        bf16 = transformers.AutoModelForCausalLM.from_pretrained(native, dtype=torch.bfloat16)
        bf16.save_pretrained(folder / "bf16")
        count = sum(parameter.numel() for parameter in bf16.parameters())
        as_f16(source, folder / "half.gguf")
        found |= {"forebay bf16": (str(folder / "bf16"), 2 * count), "forebay float32": (str(native), 4 * count),
                  "openvino bf16 of fp16": (str(folder / "half.gguf"), 2 * count),
                  "transformers bf16": (str(folder / "bf16"), 2 * count)}
    return {name: found[name] for name in NAMES if name in found and (not only or name in only)}


def measure(paths: dict[str, tuple[str, int]], prompt: int, rounds: int, threads: int, more: list[str]
            ) -> dict[str, list[dict[str, Any]]]:
    """Each contestant's answers, one a round; those run that are in `paths`."""
    processes: dict[str, subprocess.Popen[str]] = {}
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in paths}
    try:
        for name, (path, _) in paths.items():
            process = started("decode_in_ram", name, path, threads, "--prompt", str(prompt), *more)
            if process is None:
                print(f"{name}: does not load {path}")
            else:
                processes[name] = process
        for _ in range(rounds):
            for name, process in processes.items():
                answer = ask(process, "turn")
                if answer is None:
                    raise SystemExit(f"{name} ended: {process.wait()}")
                found[name].append(answer)
    finally:
        for process in processes.values():
            process.kill()
            process.wait()
    return found


def held_to(processor: str, scratch: Path) -> list[str]:
    """Sets the environment of processes to come, with kernels of their own; returns what `serve` is told besides."""
    instructions, torch_instructions = LESSER[processor]
    os.environ |= {"ONEDNN_MAX_CPU_ISA": instructions, "ATEN_CPU_CAPABILITY": torch_instructions,
                   "FOREBAY_CACHE": str(scratch / "kernels")}
    return ["--processor", processor]


def summary(name: str, answers: list[dict[str, Any]], prompt: int, nbytes: int, rate: float) -> dict[str, Any]:
    """Medians of a contestant's turns beside the ceiling, printed and returned with every turn."""
    decode_s, prefill_s = (statistics.median(a[key] for a in answers) for key in ("time_s", "prefill_s"))
    slowest, fastest = (f(a["time_s"] for a in answers) for f in (max, min))
    row = {"name": name, "time_s": [a["time_s"] for a in answers], "prefill_s": [a["prefill_s"] for a in answers],
           "tokens_per_s": 1 / decode_s, "prompt_tokens_per_s": prompt / prefill_s, "weights_nbytes": nbytes,
           "ceiling_tokens_per_s": rate / nbytes, "peak_nbytes": max(a["peak"] for a in answers),
           "above_empty_nbytes": max(a["above_empty"] for a in answers)}
    print(f"{name:<22} prefill {prompt / prefill_s:7.0f} tokens/s  decode {1 / decode_s:6.1f} ({1 / slowest:.1f} to "
          f"{1 / fastest:.1f})  {nbytes / MB:5.0f} MB a token, ceiling {rate / nbytes:6.1f} "
          f"({nbytes / rate / decode_s:4.0%})  peak {row['peak_nbytes'] / MB:5.0f} MB, "
          f"{row['above_empty_nbytes'] / MB:5.0f} for the model", flush=True)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=("demo", "1b", "3b"), default="demo")
    parser.add_argument("--kind", choices=("Q4_0", "Q8_0"), default="Q4_0", help="of the random models' matrices")
    parser.add_argument("--prompt", type=int, nargs="+", default=[64, 512])
    parser.add_argument("--more", action="store_true", help="the demo in bf16 and float32, and transformers, too")
    parser.add_argument("--only", help="names of contestants, with commas between them")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--processor", choices=LESSER, help="run as on a lesser one")
    parser.add_argument("--json", type=Path, help="write everything measured to this file")
    parser.add_argument("--serve", choices=NAMES, help=argparse.SUPPRESS)
    parser.add_argument("--path", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve(args.serve, args.path, args.prompt[0], args.threads, args.processor)
        return
    from benchmarks.ceilings import memory_bytes_per_s

    torch.set_num_threads(args.threads)
    rate = memory_bytes_per_s(9)
    print(f"{args.threads} threads, memory {rate / 1e9:.1f} GB/s")
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        paths = prepare(Path(scratch), args.model, args.kind, args.more, set(args.only.split(",") if args.only else ()))
        for peer, module in MODULES.items():
            if importlib.util.find_spec(module) is None:
                print(f"{peer}: not installed (pip install {module.replace('_', '-')})")
                paths = {name: path for name, path in paths.items() if name.split()[0] != peer}
        more = held_to(args.processor, Path(scratch)) if args.processor else []
        unfit = ("openvino", "openvino bf16") if args.processor else ("openvino float32",)
        paths = {name: path for name, path in paths.items() if name not in unfit}
        for prompt in args.prompt:
            print(f"\n{args.model}, prompt of {prompt}")
            found = measure(paths, prompt, args.rounds, args.threads, more)
            rows += [{"prompt": prompt} | summary(name, answers, prompt, paths[name][1], rate)
                     for name, answers in found.items() if answers]
    if args.json:
        kind = "Q4_1" if args.model == "demo" and args.kind == "Q4_0" else args.kind
        settings = {"model": args.model, "kind": kind, "threads": args.threads, "processor": args.processor,
                    "new": NEW, "memory_bytes_per_s": rate}
        args.json.write_text(json.dumps(settings | {"contestants": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
