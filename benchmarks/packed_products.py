"""Packed matmuls on the CPU at one row of inputs, compared with memory's rate: `python -m benchmarks.packed_products`.

Each row is a format. Its calls go over matrices [4096, 4096] that are more than the caches hold together, by each
implementation there is. The ceiling is torch's sum over as many bytes of float32, which reads and adds alone. All take
turns, and each call is timed alone. The median of the rates counts, or the fastest where others used the machine
(`settled_rate`). Times of one thread are its own processor time.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from benchmarks.command import arguments, print_table, spread, write_json
from benchmarks.probes import processor
from forebay.kernels.formats import packing
from forebay.kernels.formats.table import weight_format
from forebay.kernels.products.linear_q import cpu
from forebay.runtime.measure.steady import settled_rate

SIZE = 4096
FORMATS = ("fp8", "mxfp4", "nvfp4", "nf4", "w8", "w4g32s")
FILL = 0x11  # in scales: a small number


def packing_of(format: str) -> packing.Packing:
    stored = weight_format(format)
    return packing.Packing(stored.bits, SIZE, stored.group_size, torch.bfloat16 if stored.codebook else torch.float16,
                           stored.symmetric, stored.codebook)


def made_calls(format: str, nbytes: int) -> dict[str, list[Callable[[], object]]]:
    """Products with matrices of so many bytes in all, by implementation."""
    rows = packing_of(format)
    codes = packing.codes_nbytes(SIZE, rows.bits, rows.group_size)
    x, out = torch.randn(1, SIZE), torch.empty(1, SIZE)
    made = torch.randint(0, 256, (SIZE, rows.row_nbytes), dtype=torch.uint8)
    made[:, codes:] = FILL
    if rows.codebook == "e4m3":
        made[(made & 127) == 127] = 1  # NaN
    weights = [made.clone() for _ in range(-(-nbytes // made.nbytes))]
    return {impl: [cpu.bind_linear_q(impl, x, each, None, out, rows) for each in weights]
            for impl in cpu.implementations(rows.bits, rows.codebook) if impl in ("int16", "flat")}


def main() -> None:
    args = arguments(__doc__, rounds=(15, "turns of each"), mib=(160, "of the matrices of a format"),
                     threads=(1, "of each"))
    torch.set_num_threads(args.threads)
    nbytes, piece = args.mib << 20, packing_of("mxfp4").row_nbytes * SIZE
    clock = time.thread_time if args.threads == 1 else time.perf_counter
    plain = torch.zeros(-(-nbytes // piece), piece // 4)
    turns: dict[tuple[str, str], list[Callable[[], object]]] = {("ceiling", "sum"): [part.sum for part in plain]}
    for format in FORMATS:
        turns |= {(format, impl): calls for impl, calls in made_calls(format, nbytes).items()}
    sizes = {key: piece if key[1] == "sum" else SIZE * packing_of(key[0]).row_nbytes for key in turns}
    rates: dict[tuple[str, str], list[float]] = {key: [] for key in turns}
    for number in range(args.rounds + 1):
        for key, calls in turns.items():
            for call in calls:
                began = clock()
                call()
                if number:  # the first turn is not counted
                    rates[key].append(sizes[key] / (clock() - began) / 1e9)
    rows = [{"format": format, "implementation": impl, "GB/s": settled_rate(found), "median (least to most)": spread(
        found), "share": settled_rate(found) / settled_rate(rates["ceiling", "sum"])}
        for (format, impl), found in rates.items()]
    print(f"{processor()}, threads: {args.threads}")
    print_table(rows)
    write_json(args, {"processor": processor(), "threads": args.threads, "rounds": args.rounds, "rows": rows})


if __name__ == "__main__":
    main()
