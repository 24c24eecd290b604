"""Height, lower bound and seconds of the static allocator: `python -m benchmarks.allocators [suite …]`.

Suites: `files` (MiniMalloc instances of a folder, at the capacity in each file's name), `packed` (generated: a
rectangle of time × bytes cut at random, so that an allocation without a gap exists), `networks` (lifetimes shaped like
those of layered networks) and `large` (10 000 buffers).
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator
from pathlib import Path

from forebay.passes.allocators import Buffer, allocate, check, read_csv
from forebay.passes.allocators.native import load

Instance = tuple[str, list[Buffer], int | None]  # name, buffers, capacity in bytes
DATA = Path(__file__).parent.parent / "tests" / "data" / "minimalloc"
CAPACITY = 1 << 20
GRAIN = 1024  # bytes, and time steps, that cuts fall on


def packed(n: int, seed: int, shrink: float, straight: float = 0.5) -> list[Buffer]:
    """`n` buffers that fit CAPACITY: random guillotine cuts, then a share `shrink` of them made up to 10 % smaller.

    `straight` is the chance that a cut divides bytes instead of time.
    """
    rng = random.Random(seed)
    cells = [(0, CAPACITY, 0, CAPACITY)]
    while len(cells) < n:
        areas = [(upper - lower) * (top - base) for lower, upper, base, top in cells]
        at = rng.choices(range(len(cells)), areas)[0]
        lower, upper, base, top = cells[at]
        across = rng.random() < straight
        extent = (top - base if across else upper - lower) // GRAIN
        if extent < 2:
            continue
        cut = (base if across else lower) + GRAIN * rng.randint(1, extent - 1)
        cells[at] = (lower, upper, base, cut) if across else (lower, cut, base, top)
        cells.append((lower, upper, cut, top) if across else (cut, upper, base, top))
    rng.shuffle(cells)
    buffers = []
    for i, (lower, upper, base, top) in enumerate(cells):
        size = top - base
        if rng.random() < shrink:
            size = max(GRAIN, size - GRAIN * rng.randint(0, size // GRAIN // 10))
        buffers.append(Buffer(str(i), lower, upper, size))
    return buffers


def decoder(layers: int, hidden: int, ffn: int, kv: int) -> list[Buffer]:
    """Forward pass of a decoder: norm, q, k, v, attention, projection, norm, gate, up, product, down per layer."""
    buffers, t, residual = [], 0, 0
    for layer in range(layers):
        # (name, bytes, first step, step after the last use)
        for name, size, first, after in (
            ("norm", hidden, 1, 5),
            ("q", hidden, 2, 6),
            ("k", kv, 3, 6),
            ("v", kv, 4, 6),
            ("attention", hidden, 5, 7),
            ("projection", hidden, 6, 8),
            ("sum", hidden, 7, 13),
            ("norm2", hidden, 8, 11),
            ("gate", ffn, 9, 12),
            ("up", ffn, 10, 12),
            ("product", ffn, 11, 13),
        ):
            buffers.append(Buffer(f"{layer}.{name}", t + first, t + after, size))
        buffers.append(Buffer(f"{layer}.input", residual, t + 8, hidden))
        residual, t = t + 12, t + 12
    return buffers


def unet(levels: int, width: int) -> list[Buffer]:
    """Encoder and decoder with skips: a level's output lives until its mirror image; sizes halve per level."""
    buffers = []
    for level in range(levels):
        size, mirror = width >> level, 8 * levels - 4 * level
        for step in range(4):
            end = mirror + 1 if step == 3 else 4 * level + step + 2
            buffers.append(Buffer(f"down{level}.{step}", 4 * level + step, end, size))
            buffers.append(
                Buffer(f"up{level}.{step}", mirror + step, mirror + step + 2, size * (2 if step == 0 else 1))
            )
    return buffers


def backward(layers: int, seed: int) -> list[Buffer]:
    """Forward and backward of a chain: activations wait for their gradients, so lifetimes nest."""
    rng = random.Random(seed)
    buffers = []
    for layer in range(layers):
        size = rng.choice((1, 2, 4)) << 16
        buffers.append(Buffer(f"a{layer}", layer, 2 * layers - layer, size))
        buffers.append(Buffer(f"g{layer}", 2 * layers - layer - 1, 2 * layers - layer + 1, size))
        buffers.append(Buffer(f"w{layer}", layer, layer + 1, rng.randint(1, 64) << 12))
    return buffers


def scattered(n: int, mean_lifetime: float, seed: int) -> list[Buffer]:
    """`n` buffers with uniform starts in n steps, exponential lifetimes, sizes from 64 B to 256 KiB."""
    rng = random.Random(seed)
    buffers = []
    for i in range(n):
        lower = rng.randrange(n)
        size = rng.randint(1, 64) << rng.choice((6, 8, 10, 12))
        buffers.append(Buffer(str(i), lower, lower + 1 + int(rng.expovariate(1 / mean_lifetime)), size))
    return buffers


def chain(n: int, seed: int) -> list[Buffer]:
    """`n` buffers read by the next step, one in fifty kept for up to 5 000 steps."""
    rng = random.Random(seed)
    return [
        Buffer(str(i), i, i + 2 + (rng.randint(0, 5000) if i % 50 == 0 else 0), rng.randint(1, 100) << 10)
        for i in range(n)
    ]


def instances(suite: str, folder: Path) -> Iterator[Instance]:
    """The instances of one suite, in a fixed order."""
    if suite == "files":
        for path in sorted(folder.glob("*.csv")):
            limit = path.name.split(".")[1]
            yield path.name, read_csv(path), int(limit) if limit.isdigit() else None
    elif suite == "packed":
        for n in (100, 200, 300, 500):
            for shrink in (0.0, 0.3):
                for seed in range(4):
                    yield f"packed {n} shrink {shrink} seed {seed}", packed(n, seed, shrink), CAPACITY
    elif suite == "networks":
        for tokens in (1, 37, 2048):
            yield f"decoder 32 layers {tokens} tokens", decoder(32, tokens * 8192, tokens * 28672, tokens * 2048), None
        for levels in (3, 5, 7):
            yield f"U-Net {levels} levels", unet(levels, 1 << 24), None
        for layers in (10, 100, 400):
            yield f"forward and backward {layers} layers", backward(layers, layers), None
    elif suite == "large":
        for lifetime in (5, 100, 3000):
            yield f"scattered 10000 lifetime {lifetime}", scattered(10_000, lifetime, 0), None
        yield "chain 10000", chain(10_000, 0), None
        yield "decoder 833 layers", decoder(833, 8192, 28672, 2048), None
        yield "forward and backward 3333 layers", backward(3333, 0), None


def main() -> None:
    suites = ("files", "packed", "networks", "large")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("suites", nargs="*", metavar="suite", default=list(suites), help=", ".join(suites))
    parser.add_argument("--time-limit", type=float, default=None, help="seconds per instance")
    parser.add_argument("--folder", type=Path, default=DATA, help="where `files` are")
    arguments = parser.parse_args()
    load()  # compiling the search is not part of any row
    print(f"{'instance':40} {'buffers':>7} {'height':>12} {'bound':>12} {'ratio':>7} {'fits':>4} {'s':>6}  method")
    for suite in arguments.suites:
        if suite not in suites:
            parser.error(f"unknown suite {suite!r}; choose from {', '.join(suites)}")
        for name, buffers, capacity in instances(suite, arguments.folder):
            found = allocate(buffers, capacity=capacity, time_limit_s=arguments.time_limit)
            check(buffers, found)
            fits = "" if capacity is None else "yes" if found.height <= capacity else "no"
            ratio = found.height / max(found.lower_bound, 1)
            print(
                f"{name:40} {len(buffers):7} {found.height:12} {found.lower_bound:12} {ratio:7.4f} {fits:>4}"
                f" {found.time_s:6.2f}  {found.method}",
                flush=True,
            )


if __name__ == "__main__":
    main()
