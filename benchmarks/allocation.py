"""Static allocation of many buffers, compared with SuperMalloc: `python -m benchmarks.allocation`.

It needs omnimalloc. The problems are drawn by omnimalloc's own sources and put in random order: its tilings come in
the order in which they are packed. Both allocators have the same seconds and the same cores. A figure is the height
over the most bytes that live at once, which no packing is below. Of tilings 1.0 is known to be possible.
"""

from __future__ import annotations

import importlib
import random
import time
from collections.abc import Iterator

from benchmarks.command import arguments, note, print_table, write_json
from benchmarks.probes import processor
from forebay.passes.allocators import Allocation, Buffer, allocate, check, lower_bound

SOURCES = ("Random", "PowerOf2", "HighContention", "Skewed", "Sequential", "Uniform", "Tiling")


def drawn(source: str, count: int, seed: int) -> list[Buffer]:
    """So many buffers of a source, in random order."""
    sources = importlib.import_module("omnimalloc.benchmark.sources")
    found = list(getattr(sources, f"{source}Source")(num_allocations=count, seed=seed).get_pool().allocations)
    random.Random(seed).shuffle(found)
    return [Buffer(str(i), each.start, each.end, each.size) for i, each in enumerate(found)]


def supermalloc(buffers: list[Buffer], seconds: float) -> Allocation:
    """What SuperMalloc makes of them."""
    omnimalloc = importlib.import_module("omnimalloc")
    solver = importlib.import_module("omnimalloc.allocators.supermalloc").SupermallocAllocator(timeout=seconds)
    asked = tuple(omnimalloc.Allocation(id=i, size=each.size, start=each.lower, end=each.upper)
                  for i, each in enumerate(buffers))
    begin = time.perf_counter()
    placed = {each.id: each.offset
              for each in omnimalloc.allocate(omnimalloc.Pool(id="pool", allocations=asked), solver).allocations}
    took = time.perf_counter() - begin
    offsets = tuple(placed[i] for i in range(len(buffers)))
    return Allocation(offsets, max(o + each.size for o, each in zip(offsets, buffers, strict=True)), 0, "", took)


def compared(counts: list[int], sources: list[str], seeds: int, seconds: float) -> Iterator[dict[str, object]]:
    """A row for each problem."""
    for count in counts:
        for source in sources:
            for seed in range(1, seeds + 1):
                buffers = drawn(source, count, seed)
                theirs, ours = supermalloc(buffers, seconds), allocate(buffers, time_limit_s=seconds)
                for each in (theirs, ours):
                    check(buffers, each)
                least = lower_bound(buffers)
                yield {"buffers": str(count), "source": source, "seed": str(seed),
                       "SuperMalloc": f"{theirs.height / least:.4f}", "s": theirs.time_s,
                       "Forebay": f"{ours.height / least:.4f}", "Forebay, s": ours.time_s, "method": ours.method,
                       "lower": "Forebay" if ours.height < theirs.height else
                                "SuperMalloc" if theirs.height < ours.height else "as low"}


def main() -> None:
    args = arguments(__doc__, counts=([2000, 5000, 10_000, 20_000, 50_000, 100_000], "of buffers"),
                     sources=(list(SOURCES), "of omnimalloc"), seeds=(2, "problems of each"),
                     seconds=(5.0, "that each allocator has"))
    rows = []
    for row in compared(args.counts, args.sources, args.seeds, args.seconds):
        rows.append(row)
        note(" ".join(f"{value:.1f}" if isinstance(value, float) else str(value) for value in row.values()))
    print(f"{processor()}")
    print_table(rows)
    write_json(args, {"processor": processor(), "seconds": args.seconds, "rows": rows})


if __name__ == "__main__":
    main()
