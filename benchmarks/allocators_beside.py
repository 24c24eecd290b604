"""Heights of the static allocator beside SuperMalloc's, on the sources of instances that come with it.

    python -m venv peer && peer/bin/pip install omnimalloc==1.0.0
    python -m benchmarks.allocators_beside --peer peer/bin/python

Each instance is made by the peer and shuffled, for some arrive in packing order; the two take turns, which of them is
first alternates, and both have the same limit. SuperMalloc uses every core, the allocator one.
"""

from __future__ import annotations

import argparse
import json
import subprocess
from collections.abc import Iterator

from forebay.passes.allocators import Buffer, allocate, check, lower_bound
from forebay.passes.allocators.native import load

COUNTS = (500, 2000, 5000, 20_000, 100_000)
SLOW_SOURCES = {"tiling": 20_000, "pinwheel": 5000}  # the most that these make in seconds
SOURCES = ("tiling", "pinwheel", "random", "uniform", "power", "contention", "sequential", "zipf", "bimodal",
           "dominant")
PEER = """
import json, random, sys, time
from omnimalloc.allocators.supermalloc import SupermallocAllocator
from omnimalloc.benchmark import sources as s
skewed = lambda kind: lambda n: s.SkewedSource(n, kind)
made = dict(tiling=s.TilingSource, pinwheel=lambda n: s.PinwheelSource(n - (n - 1) % 4), random=s.RandomSource,
            uniform=s.UniformSource, power=s.PowerOf2Source, contention=s.HighContentionSource,
            sequential=s.SequentialSource, zipf=skewed("zipf"), bimodal=skewed("bimodal"), dominant=skewed("dominant"))
for line in sys.stdin:
    name, count, limit_s = json.loads(line)
    if name:
        found = list(made[name](count).get_allocations())
        random.Random(0).shuffle(found)
        print(json.dumps([(a.start, a.end, a.size) for a in found]), flush=True)
    else:
        began = time.perf_counter()
        peak = SupermallocAllocator(timeout=limit_s).solve(tuple(found)).peak
        print(json.dumps([peak, time.perf_counter() - began]), flush=True)
"""


class PeerProcess:
    """The peer's process, which keeps the instance that it made last."""

    def __init__(self, python: str) -> None:
        self.process = subprocess.Popen([python, "-c", PEER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(self, name: str, count: int = 0, limit_s: float = 0.0) -> list:
        assert self.process.stdin is not None and self.process.stdout is not None
        print(json.dumps((name, count, limit_s)), file=self.process.stdin, flush=True)
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError("the peer's process ended; is omnimalloc==1.0.0 installed for its python?")
        return json.loads(line)


def instances(peer: PeerProcess, names: list[str], counts: list[int]) -> Iterator[tuple[str, list[Buffer]]]:
    for name in names:
        for count in (c for c in counts if c <= SLOW_SOURCES.get(name, c)):
            rows = peer.ask(name, count)
            yield name, [Buffer(str(i), lower, upper, size) for i, (lower, upper, size) in enumerate(rows)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", required=True, help="a python that has omnimalloc==1.0.0")
    parser.add_argument("--time-limit", type=float, default=10.0, help="seconds for each")
    parser.add_argument("--source", nargs="*", default=list(SOURCES), choices=SOURCES)
    parser.add_argument("--count", nargs="*", type=int, default=list(COUNTS), help="buffers")
    arguments = parser.parse_args()
    limit_s, peer = arguments.time_limit, PeerProcess(arguments.peer)
    load()  # compiling is not part of any row
    lost = rows = 0
    print(f"{'source':12} {'buffers':>7} {'bound':>12} {'ours':>8} {'theirs':>8} {'ours s':>7} {'theirs s':>8}  by")
    for i, (name, buffers) in enumerate(instances(peer, arguments.source, arguments.count)):
        theirs = peer.ask("", 0, limit_s) if i % 2 else None
        found = allocate(buffers, time_limit_s=limit_s)
        peak, time_s = theirs or peer.ask("", 0, limit_s)
        check(buffers, found)
        bound, rows, lost = lower_bound(buffers), rows + 1, lost + (found.height > peak)
        print(f"{name:12} {len(buffers):7} {bound:12} {found.height / bound:8.4f} {peak / bound:8.4f} "
              f"{found.time_s:7.2f} {time_s:8.2f}  {found.method}{'   above' * (found.height > peak)}", flush=True)
    print(f"above the peer's in {lost} of {rows}")


if __name__ == "__main__":
    main()
