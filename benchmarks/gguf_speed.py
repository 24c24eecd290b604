"""Tokens per second over a GGUF file in RAM, or larger than its budget: `python -m benchmarks.gguf_speed` (Linux).

Batch 1, prompts of random tokens (`--prompt`), greedy, equal threads. `--model demo` is SmolLM2-135M in Q4_1, or with
`--kind Q8_0` so quantized by llama.cpp's own code; the others are random models of `--kind` (random_gguf.py). Forebay
runs the file repacked bit for bit. Each contestant has a process of its own and waits idle while another has its turn.

Without `--shares` all runs in RAM: Forebay computes in float32 ("packed") or bf16, with activations as they are and
rounded to 8 bits; peers, where installed, are llama.cpp (xllamacpp) and OpenVINO GenAI, as it comes (activations in 8
bits) and with products in bf16, both on the GGUF itself and by their own clocks, and onnxruntime-genai on the model
that its own builder makes in 4 bits, of Q8_0 in 8 (`pip install onnx_ir`). `--more` (the demo) adds weights of bf16 and
float32, OpenVINO on the file in fp16 and transformers in bf16; `--exported` what `forebay export` makes beside the
builder's, in float32 and 4 bits. `ceiling` is the bytes of weights that a token reads over the memory's rate.

`--shares 0.25,0.5` are budgets in the file's bytes. Peers: neurostream, and llama.cpp, which maps the file. Each may
take the budget and 150 MiB beside what it held before it opened the model, by a control group of the kernel's that
counts its pages of files too; so who maps the file has a copy that nobody else reads. Without root there is no such
group, and the page cache serves who maps files. The ceiling of streaming is the bytes that are not kept over the rate
of plain reads between the turns; "llama.cpp in RAM", which has no limit, is that of computing.

With `--processor haswell` (or skylake-avx512: AVX-512 without VNNI and bf16) Forebay's kernels are compiled for that
kind of processor, whose speed its plans guess, and torch and oneDNN are held to its instructions, OpenVINO's too, which
then starts in float32 alone; onnxruntime cannot be held, and llama.cpp's wheel has AVX2 alone.
"""

from __future__ import annotations

import os

os.environ.setdefault("GOMP_SPINCOUNT", "0")  # before torch loads OpenMP: as forebay runs

import argparse
import importlib.util
import json
import shutil
import tempfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from mmap import mmap
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch

from benchmarks.gguf_contestants import IN_RAM, LESSER, MODULES, Asked, Asking, build_onnx, onnx_nbytes, remove_limits
from benchmarks.probes import memory_bytes_per_s
from forebay.runtime.disk.page_cache import drop_file

MB = 1e6
PACKED = ("forebay packed", "forebay packed int8", "forebay in bf16", "forebay in bf16 int8")
WITHIN = ("forebay", "neurostream", "llama.cpp", "llama.cpp in RAM")
Paths = dict[str, tuple[str, int]]  # by contestant: what it opens, and the bytes of weights that it reads a token
Row = dict[str, Any]


def prepare_in_ram(folder: Path, args: argparse.Namespace, only: set[str]) -> Paths:
    """What each contestant opens in RAM: of `only`, if it names any. A token reads all weights but the embedding's,
    whose matrix is the head's too in the demo."""
    import gguf
    import transformers

    import forebay
    from benchmarks.gguf_perplexity import write_file
    from benchmarks.llama_cpp import load_library
    from benchmarks.random_gguf import as_f16, make_gguf
    from forebay.rewriter.checkpoints.quantize import Wish, quantize_model
    from forebay.rewriter.checkpoints.resolve import demo_gguf, resolve_model

    def asked(*names: str) -> bool:
        return not only or bool(only & set(names))

    def installed(kind: str) -> bool:
        return importlib.util.find_spec(MODULES[kind].partition(".")[0]) is not None

    if args.model == "demo" and args.kind == "Q8_0":
        write_file(load_library(), source := folder / f"demo-{args.kind}.gguf", args.kind)
    else:
        source = demo_gguf() if args.model == "demo" else make_gguf(args.model, args.kind)
    sizes = {tensor.name: int(tensor.n_bytes) for tensor in gguf.GGUFReader(source).tensors}
    own = sum(sizes.values()) - (sizes["token_embd.weight"] if "output.weight" in sizes else 0)
    found: Paths = {}
    for names, kept, dtype in ((PACKED[:2], "packed", None), (PACKED[2:], "half", torch.bfloat16)):
        if asked(*names):
            made = quantize_model(source, folder / kept, Wish("keep", head=True, embeddings=True, dtype=dtype))
            found |= {name: (str(folder / kept), made.nbytes * own // sum(sizes.values())) for name in names}
    openvino = ("openvino float32",) if args.processor else ("openvino", "openvino bf16")
    found |= {name: (str(source), own) for name in ("llama.cpp", *openvino)}
    native = resolve_model("demo" if args.model == "demo" else source, dequantize=True)
    bits = "int8" if args.kind == "Q8_0" else "int4"
    for name, precision in (("onnxruntime", bits), ("onnxruntime float32", "fp32")):
        if asked(name) and installed("onnxruntime") and (args.exported or name == "onnxruntime"):
            build_onnx(native, folder / name, precision, folder / "cache")
            found[name] = str(folder / name), onnx_nbytes(folder / name)
    if args.exported:
        symmetric = folder / "symmetric"
        quantize_model(native, symmetric, Wish("w4g32", (), "symmetric", head=True))
        for name, model, more in (("exported", symmetric, {"activations": "int8"}), ("exported float32", native, {})):
            forebay.export(model, folder / name, "onnx", **more)
            found[name] = str(folder / name), onnx_nbytes(folder / name)
    if args.more:
        bf16 = transformers.AutoModelForCausalLM.from_pretrained(native, dtype=torch.bfloat16)
        bf16.save_pretrained(folder / "bf16")
        count = sum(parameter.numel() for parameter in bf16.parameters())
        as_f16(source, folder / "half.gguf")
        found |= {"forebay bf16": (str(folder / "bf16"), 2 * count), "forebay float32": (str(native), 4 * count),
                  "openvino bf16 of fp16": (str(folder / "half.gguf"), 2 * count),
                  "transformers bf16": (str(folder / "bf16"), 2 * count)}
    return {name: at for name, at in found.items() if asked(name) and installed(name.split()[0])}


def prepare_within(args: argparse.Namespace, only: set[str]) -> tuple[Path, Paths]:
    """The file, and what each contestant opens within a budget."""
    from benchmarks.random_gguf import make_gguf
    from forebay.rewriter.checkpoints.resolve import resolve_model

    source, found = make_gguf(args.model, args.kind), Paths()
    nbytes, mapped = source.stat().st_size, source.with_name(f"mapped-{source.name}")
    for name in WITHIN:
        if (only and name not in only) or not importlib.util.find_spec(MODULES[name.split()[0]].partition(".")[0]):
            continue
        if name == "llama.cpp" and not mapped.exists():
            shutil.copyfile(source, mapped)
            os.sync()
        path = resolve_model(source) if name == "forebay" else mapped if name == "llama.cpp" else source
        found[name] = str(path), nbytes
    return source, found


def plain_read_rate(path: Path, nbytes: int = 400 << 20) -> float:
    """Bytes/s of reading the file's first bytes past the page cache, 4 MiB at a time, four at once."""
    step, fd = 4 << 20, os.open(path, os.O_RDONLY | os.O_DIRECT)
    buffers = [mmap(-1, step) for _ in range(min(nbytes, path.stat().st_size) // step)]
    with ThreadPoolExecutor(4) as pool:
        began = perf_counter()
        list(pool.map(lambda i: os.preadv(fd, [buffers[i]], i * step), range(len(buffers))))
        took = perf_counter() - began
    os.close(fd)
    return len(buffers) * step / took


def measure(paths: Paths, args: argparse.Namespace, prompt: int, budget: int = 0, source: Path | None = None
            ) -> tuple[dict[str, list[Row]], list[float]]:
    """Each contestant's answers, one a round, and the rates of plain reads of `source` between them."""
    running: dict[str, Asking] = {}
    found: dict[str, list[Row]] = {name: [] for name in paths}
    rates: list[float] = []
    if "llama.cpp" in paths and budget:
        drop_file(paths["llama.cpp"][0])  # pages that are there are nobody's who maps them
    try:
        for name, (path, _) in paths.items():
            running[name] = Asking(Asked(name, path, prompt, args.new, args.threads,
                                         0 if name.endswith("RAM") else budget, args.processor))
        for _ in range(args.rounds):
            for name, process in running.items():
                if process.running and source is not None:
                    rates.append(plain_read_rate(source))
                if process.running and (answer := process.turn()) is not None:
                    found[name].append(answer)
    finally:
        for process in running.values():
            process.close()
        remove_limits()
    for name, answers in found.items():
        if len(answers) < args.rounds:
            print(f"{name}: {'ended' if answers else 'does not run'} within {(budget or IN_RAM) / MB:.0f} MB")
    return {name: answers for name, answers in found.items() if answers}, rates


def report(found: Mapping[str, list[Row]], prompt: int, bounds: Mapping[str, float]) -> list[Row]:
    """Medians of each contestant's turns beside its bound in tokens/s, printed and returned with every turn."""
    rows = []
    for name, answers in found.items():
        decode, prefill = sorted(1 / a["time_s"] for a in answers), median(prompt / a["prefill_s"] for a in answers)
        rate = median(decode)
        row = {"name": name, "prompt": prompt, "tokens_per_s": rate, "prompt_tokens_per_s": prefill,
               "ceiling_tokens_per_s": bounds[name], "limited": answers[0]["limited"],
               "peak_nbytes": max(a["peak"] for a in answers),
               "above_empty_nbytes": max(a["above_empty"] for a in answers), "turns": answers}
        print(f"{name:<22} prefill {prefill:7.0f} tokens/s  decode {rate:6.2f} ({decode[0]:.2f} to {decode[-1]:.2f})  "
              f"ceiling {bounds[name]:6.1f} ({rate / bounds[name]:4.0%})  peak {row['peak_nbytes'] / MB:5.0f} MB, "
              f"{row['above_empty_nbytes'] / MB:5.0f} for the model{', held' if row['limited'] else ''}", flush=True)
        rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=("demo", "1b", "3b", "qwen3-1b", "qwen3-2b"), default="demo")
    parser.add_argument("--kind", choices=("Q4_0", "Q8_0", "Q4_K"), default="Q4_0", help="of the random matrices")
    parser.add_argument("--shares", help="budgets in the file's bytes, with commas between them; default: in RAM")
    parser.add_argument("--prompt", type=int, nargs="+", default=[64, 512], help="tokens")
    parser.add_argument("--new", type=int, default=32, help="tokens")
    parser.add_argument("--more", action="store_true", help="the demo in 16 and 32 bits, and transformers")
    parser.add_argument("--exported", action="store_true", help="what forebay export makes of the demo, beside")
    parser.add_argument("--only", help="names of contestants, with commas between them")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--processor", choices=LESSER, help="run as on a lesser one")
    parser.add_argument("--json", type=Path, help="write everything measured to this file")
    args = parser.parse_args()
    if (args.shares and args.model == "demo") or ((args.more or args.exported) and args.model != "demo"):
        parser.error("--shares are for the random models, --more and --exported for the demo")
    torch.set_num_threads(args.threads)
    only = set(args.only.split(",") if args.only else ())
    memory, rows = memory_bytes_per_s(9), []
    print(f"{args.threads} threads, memory {memory / 1e9:.1f} GB/s")
    with tempfile.TemporaryDirectory() as scratch:
        if args.processor:
            os.environ["FOREBAY_CACHE"] = str(Path(scratch) / "kernels")
        if args.shares:
            source, paths = prepare_within(args, only)
        else:
            paths = prepare_in_ram(Path(scratch), args, only)
        print(f"{args.model}, contestants: {', '.join(paths)}; others are not installed or not asked for")
        for prompt in args.prompt:
            if not args.shares:
                print(f"\nin RAM, prompt of {prompt}")
                found, _ = measure(paths, args, prompt)
                rows += report(found, prompt, {name: memory / nbytes for name, (_, nbytes) in paths.items()})
                continue
            for share in map(float, args.shares.split(",")):
                budget = int(share * source.stat().st_size)
                found, rates = measure(paths, args, prompt, budget, source)
                bound = median(rates) / max(1, source.stat().st_size - budget)
                print(f"\nwithin {budget / MB:.0f} MB ({share:.0%}), prompt of {prompt}; plain reads "
                      f"{median(rates) / 1e9:.1f} GB/s")
                bounds = {name: memory / nbytes if name.endswith("RAM") else bound
                          for name, (_, nbytes) in paths.items()}
                rows += [row | {"share": share, "budget": budget, "read_bytes_per_s": median(rates)}
                         for row in report(found, prompt, bounds)]
    if args.json:
        settings = {key: value for key, value in vars(args).items() if key != "json"}
        settings |= {"memory_bytes_per_s": memory, "contestants": rows}
        args.json.write_text(json.dumps(settings, indent=1) + "\n")


if __name__ == "__main__":
    main()
