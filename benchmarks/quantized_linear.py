"""Packed 4- and 8-bit products against torch's own and the memory's ceiling: `python -m benchmarks.quantized_linear`.

For each shape and number of rows M, every contestant computes once in turn, over as many copies of its weight as exceed
the caches, and the round repeats: medians of one contestant share the machine's noise with those of the others. Besides
ours (see `kernels/products/linear_q`) stand torch's int4pack product (bf16, group 64), its dynamically quantised int8
linear (per tensor), its bf16 linear, and our bf16 `flat`. GB/s counts the bytes of the weight as that contestant stores
it; the ceiling is a sum over 256 MiB. Last comes one decoded token of SmolLM2-135M: all its products, without the head.
"""

from __future__ import annotations

import os

os.environ.setdefault("GOMP_SPINCOUNT", "0")  # before torch loads OpenMP: as forebay runs

import argparse
import json
import statistics
import time
import warnings
from pathlib import Path

import torch

from forebay.kernels.cpu_support import native
from forebay.kernels.formats import row_sizes
from forebay.kernels.formats.packing import Packing
from forebay.kernels.formats.table import WEIGHT_FORMATS
from forebay.kernels.operator import Call
from forebay.kernels.products.linear import cpu as linear
from forebay.kernels.products.linear_q.cpu import bind_linear_q, implementations

SHAPES = ((5632, 2048), (2048, 5632), (2048, 2048))  # (N, K) of a 1.1B Llama
SMOLLM2 = ((576, 576), (192, 576), (192, 576), (576, 576), (1536, 576), (1536, 576), (576, 1536))
SMOLLM2_LAYERS = 30
COLD_NBYTES = 96 << 20


def timed_s(call: Call) -> float:
    begin_s = time.perf_counter()
    call()
    return time.perf_counter() - begin_s


def ceiling_bytes_per_s(repeats: int) -> float:
    """Best rate of reading 256 MiB by all threads."""
    values = torch.ones(64 << 20)
    return values.nbytes / min(timed_s(values.sum) for _ in range(repeats))


def packed_calls(bits: int, group: int, impl: str, m: int, n: int, k: int) -> tuple[list[Call], int]:
    """One call per copy of a packed weight, and the bytes of one copy."""
    rows = torch.randint(0, 256, (n, row_sizes.row_nbytes(k, bits, group)), dtype=torch.uint8)
    rows[:, row_sizes.codes_nbytes(k, bits, group) :] = 0x11
    copies = max(2, COLD_NBYTES // rows.nbytes)
    x, out = torch.randn(m, k).bfloat16(), torch.empty(m, n, dtype=torch.bfloat16)
    calls: list[Call] = [
        bind_linear_q(impl, x, rows.clone(), None, out, Packing(bits, k, group)) for _ in range(copies)
    ]
    return calls, rows.nbytes


def int4pack_calls(m: int, n: int, k: int) -> tuple[list[Call], int]:
    codes = torch.randint(0, 16, (n, k), dtype=torch.int32)
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1)
    scales = torch.full((k // 64, n, 2), 0.01, dtype=torch.bfloat16)
    nbytes = packed.nbytes + scales.nbytes
    x = torch.randn(m, k).bfloat16()
    held = [(packed.clone(), scales.clone()) for _ in range(max(2, COLD_NBYTES // nbytes))]
    product = torch.ops.aten._weight_int4pack_mm_for_cpu
    return [lambda w=w, s=s: product(x, w, 64, s) for w, s in held], nbytes


def dynamic_int8_calls(m: int, n: int, k: int) -> tuple[list[Call], int]:
    x = torch.randn(m, k)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = torch.nn.Sequential(torch.nn.Linear(k, n, bias=False))
        held = [
            torch.ao.quantization.quantize_dynamic(model, {torch.nn.Linear}, torch.qint8)
            for _ in range(max(2, COLD_NBYTES // (n * k)))
        ]
    return [lambda w=w: w(x) for w in held], n * k


def bf16_calls(impl: str, m: int, n: int, k: int) -> tuple[list[Call], int]:
    weights = torch.randn(max(2, COLD_NBYTES // (2 * n * k)), n, k).bfloat16()
    x, out = torch.randn(m, k).bfloat16(), torch.empty(m, n, dtype=torch.bfloat16)
    return [linear.bind_linear(impl, x, weight, None, out) for weight in weights], 2 * n * k


def contestants(m: int, n: int, k: int, slow: bool) -> dict[str, tuple[list[Call], int]]:
    found = {}
    for name, (bits, group) in {"w4g64": (4, 64), "w8": (8, 128)}.items():
        for impl in implementations(bits):
            if slow or impl != "upcast" or m >= 64:
                found[f"{name} {impl}"] = packed_calls(bits, group, impl, m, n, k)
    found["torch int4pack"] = int4pack_calls(m, n, k)
    found["torch dynamic int8"] = dynamic_int8_calls(m, n, k)
    for impl in linear.implementations(torch.bfloat16):
        if impl != "upcast":
            found[f"bf16 {impl}"] = bf16_calls(impl, m, n, k)
    return found


def run_shape(m: int, n: int, k: int, repeats: int, slow: bool) -> list[dict]:
    """Medians of the contestants at one shape, interleaved."""
    entries = contestants(m, n, k, slow)
    times_s: dict[str, list[float]] = {name: [] for name in entries}
    with torch.inference_mode():
        for turn in range(repeats + 1):
            for name, (calls, _) in entries.items():
                time_s = timed_s(calls[turn % len(calls)])
                if turn:
                    times_s[name].append(time_s)
    return [
        {"name": name, "m": m, "n": n, "k": k, "nbytes": nbytes, "time_s": statistics.median(times_s[name]),
         "best_s": min(times_s[name])}
        for name, (_, nbytes) in entries.items()
    ]  # fmt: skip


def token_s(bits: int, group: int, impl: str, repeats: int) -> tuple[float, int]:
    """Median time_s of the products of all layers for one token of SmolLM2-135M, as one call, and their bytes."""
    calls, nbytes = [], 0
    for _ in range(SMOLLM2_LAYERS):
        for n, k in SMOLLM2:
            rows = torch.randint(0, 256, (n, row_sizes.row_nbytes(k, bits, group)), dtype=torch.uint8)
            rows[:, row_sizes.codes_nbytes(k, bits, group) :] = 0x11
            x, out = torch.randn(1, k).bfloat16(), torch.empty(1, n, dtype=torch.bfloat16)
            calls.append(bind_linear_q(impl, x, rows, None, out, Packing(bits, k, group)))
            nbytes += rows.nbytes
    steps = native.chained(calls)
    return statistics.median(timed_s(lambda: [step() for step in steps]) for _ in range(repeats)), nbytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 16, 64, 256])
    parser.add_argument("--shapes", type=int, default=len(SHAPES), help="how many of the shapes")
    parser.add_argument("--slow", action="store_true", help="torch's upcast at every M, too")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    ceiling = ceiling_bytes_per_s(args.repeats)
    print(f"{args.threads} threads, ceiling {ceiling / 1e9:.1f} GB/s")
    results = []
    for n, k in SHAPES[: args.shapes]:
        for m in args.rows:
            print(f"\nM {m}, N {n}, K {k}")
            repeats = args.repeats if m < 64 else max(3, args.repeats // 3)
            for result in run_shape(m, n, k, repeats, args.slow):
                rate, flops = result["nbytes"] / result["time_s"], 2 * m * n * k / result["time_s"]
                spent = f"{result['time_s'] * 1e6:9.0f} us (best {result['best_s'] * 1e6:8.0f})"
                share = f"{rate / 1e9:6.1f} GB/s {rate / ceiling:5.0%} of the ceiling"
                print(f"  {result['name']:20} {spent} {share} {flops / 1e9:6.0f} GFLOP/s")
                results.append(result)
    print("\nSmolLM2-135M, the products of one token without the head")
    tokens = []
    for name, bits, group in ((f.name, f.bits, f.group_size) for f in WEIGHT_FORMATS.values() if f.bits):
        for impl in implementations(bits):
            if impl != "upcast":
                time_s, nbytes = token_s(bits, group, impl, args.repeats)
                print(f"  {name:6} {impl:6} {time_s * 1e3:6.2f} ms {nbytes / time_s / 1e9:6.1f} GB/s")
                tokens.append({"format": name, "impl": impl, "time_s": time_s, "nbytes": nbytes})
    if args.json:
        settings = {"threads": args.threads, "torch": torch.__version__, "ceiling_bytes_per_s": ceiling}
        args.json.write_text(json.dumps(settings | {"products": results, "tokens": tokens}, indent=1))


if __name__ == "__main__":
    main()
