"""Which implementation of a linear layer runs for y [M, N] = x [M, K] W^T: a table of inflection points made offline.

After FlashDecoding++Next, section IV: for given N and K one implementation is the fastest up to some M, another from
there on. `choose` only reads a table; `benchmarks.gpu` times `candidates`, `fit` makes the table of the times, and
`save_table` puts it beside this file, where `table_of` finds it by the device's name from then on.
The answer is a name for the Plan: "<implementation>_<BN>x<BK>[x<BM>]_s<splits>", say "flat_64x256_s4", or the
implementation alone, which stands for its first setting; without splits it has `default_splits`.
"""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from forebay.kernels.products.linear import raw_layout

KINDS = ("linear", "linear_w4", "linear_w8")  # of weights, as tables name them: of 16 bits, and packed rows
KIND_OF_BITS = {4: "linear_w4", 8: "linear_w8"}
IMPLEMENTATIONS = ("gemv", "flat", "large", "raw")
RAW = "raw"  # of packed rows, over codes as they are: what no table names is not taken
# torch's product, cuBLAS on NVIDIA: a candidate at more rows than this; fewer wait for the weight. Packed weights are
# dequantized first: they are written and read once more in 16 bits.
ATEN, ATEN_ABOVE = "aten", {"linear": 16, "linear_w4": 255, "linear_w8": 255}
MAX_SPLITS = 32
L2_SUMS_NBYTES = 8 << 20  # of an L2 of 40 MiB or more (A100, H100, H200), for sums that are read soon after
# Multiprocessors where the device is not known: an H100's or H200's.
SM_COUNT = 132
COUNTERS_ALIGN = 16
# Rows of x in flat's tile, where M is no more; AMD's matrix instructions take 16 (packed weights: twice 8).
NARROW, AMD_NARROW = 8, 16
AMD = torch.version.hip is not None
# Zeroed memory that each stream keeps: a launch whose counters fit finds them 0 and leaves them 0.
HELD_COUNTERS_NBYTES = 16 << 10


@dataclass(frozen=True)
class Setting:
    """One configuration: columns of the result and elements of K in a tile, warps, stages, rows of x in a tile."""

    bn: int
    bk: int
    warps: int
    stages: int
    bm: int = 0  # 0: as many as M asks

    @property
    def name(self) -> str:
        return f"{self.bn}x{self.bk}" + (f"x{self.bm}" if self.bm else "")


# linear: a stage is 8 to 16 KiB of weight; 132 SMs need 36 KiB each in flight to cover 1 us of latency at 4.8 TB/s.
# Small BN serve small N; the deep pipelines large N, where one program reads all of K.
# linear_w4 and linear_w8: a stage is 4 to 16 KiB of codes; a warp with 32 columns reads x for fewer of them.
SETTINGS: dict[tuple[str, str], tuple[Setting, ...]] = {
    ("linear", "gemv"): (Setting(8, 512, 4, 1), Setting(16, 512, 8, 1)),
    ("linear", "flat"): (Setting(64, 128, 4, 4), Setting(32, 128, 4, 5), Setting(128, 64, 4, 5), Setting(64, 64, 4, 6)),
    ("linear", "large"): (Setting(128, 64, 8, 3, 128), Setting(128, 64, 8, 4, 64)),
    ("linear_w4", "gemv"): (Setting(32, 512, 4, 1),),
    ("linear_w4", "flat"): (Setting(64, 256, 4, 4), Setting(64, 128, 2, 6), Setting(128, 128, 4, 4)),
    ("linear_w4", "large"): (Setting(128, 128, 8, 3, 64),),
    ("linear_w8", "gemv"): (Setting(32, 512, 4, 1),),
    ("linear_w8", "flat"): (Setting(128, 128, 4, 4), Setting(64, 128, 2, 5)),
    ("linear_w8", "large"): (Setting(128, 128, 8, 3, 64),),
    ("linear_w4", "raw"): (Setting(128, 128, 4, 5), Setting(64, 128, 4, 6)),
    ("linear_w8", "raw"): (Setting(64, 128, 4, 5), Setting(128, 128, 4, 4)),
}
WEIGHT_BITS = {"linear": 16, "linear_w4": 4, "linear_w8": 8}

# Rows from which on the next implementation is taken, where nothing was measured. gemv of packed weights spends 6
# instructions on a code and flat 3, so flat is taken from the first row; for plain weights gemv spends 2 per row.
Points = tuple[tuple[int, str], ...]


@dataclass(frozen=True)
class TableEntry:
    """For one shape of weight: (largest M, name) in the order of M; the last name serves every larger M too."""

    kind: str
    n: int
    k: int
    points: Points


# For GPUs that have no table: what was fastest for most shapes on an H100.
DEFAULT_TABLE: tuple[TableEntry, ...] = (
    TableEntry("linear", 4096, 4096, ((2, "gemv"), (16, "flat"), (1 << 30, ATEN))),
    TableEntry("linear_w4", 4096, 4096, ((16, "flat"), (255, "large"), (1 << 30, ATEN))),
    TableEntry("linear_w8", 4096, 4096, ((2, "gemv"), (16, "flat"), (255, "large"), (1 << 30, ATEN))),
)
TABLES = Path(__file__).parent


def choose(kind: str, m: int, n: int, k: int, table: Sequence[TableEntry] = DEFAULT_TABLE) -> str:
    """The name that a table holds for the shape nearest to [n, k], or the default one for a kind it does not know.

    Nearest is by |log n - log n'| + |log k - log k'|. ValueError for an unknown kind or sizes below 1.
    """
    if kind not in KINDS:
        raise ValueError(f"selection: kind must be one of {KINDS}, got {kind!r}")
    if min(m, n, k) < 1:
        raise ValueError(f"selection: m, n and k must be positive, got {(m, n, k)}")
    entries = [e for e in table if e.kind == kind] or [e for e in DEFAULT_TABLE if e.kind == kind]
    entry = min(entries, key=lambda e: abs(math.log(e.n / n)) + abs(math.log(e.k / k)))
    name = next((name for limit, name in entry.points if m <= limit), entry.points[-1][1])
    return name


def serves(implementation: str, m: int) -> bool:
    """Return whether an implementation takes m rows: gemv 1 or 2, flat up to 16, raw up to 128."""
    return m <= {"gemv": 2, "flat": 16, RAW: 128}.get(implementation, m)


def candidates(kind: str, m: int, n: int, k: int, sm_count: int = SM_COUNT) -> list[str]:
    """Names worth timing for this shape: every setting, with the default number of splits, half and twice of it."""
    names = []
    for implementation in IMPLEMENTATIONS:
        if not serves(implementation, m) or (implementation == "large" and m <= 8):
            continue
        for setting in SETTINGS.get((kind, implementation), ()):
            typical = default_splits(kind, setting, m, n, k, sm_count)
            most = max(1, -(-k // setting.bk))
            for splits in sorted({max(1, typical // 2), typical, min(2 * typical, most, MAX_SPLITS)}):
                names.append(f"{implementation}_{setting.name}_s{splits}")
    return [*names, ATEN] if m > ATEN_ABOVE[kind] else names


def tile_rows(implementation: str, setting: Setting, m: int, amd: bool = False, group_size: int = 128) -> int:
    """Rows of x in a tile: M for gemv, 8 (not for AMD) or 16 for flat, 8 to 64 for raw, the setting's for large."""
    if implementation in ("gemv", RAW):
        return m if implementation == "gemv" else raw_layout.tile_rows(m, group_size)
    return setting.bm or (NARROW if m <= NARROW and not amd else AMD_NARROW)


def default_splits(kind: str, setting: Setting, m: int, n: int, k: int, sm_count: int = SM_COUNT) -> int:
    """Parts of K that keep two programs on every multiprocessor, as long as each part has four tiles of K.

    The parts' fp32 sums are written and read once: beyond two parts they may be 5 % of the weight's bytes. With tiles
    of many rows they may be as many as the L2 holds, until the GPU has a program for every multiprocessor.
    """
    tiles = -(-n // setting.bn) * (-(-m // setting.bm) if setting.bm else 1)
    cheap = max(2, k * WEIGHT_BITS[kind] // (1280 * max(1, m)))
    if setting.bm:
        cheap = max(cheap, min(sm_count // max(1, tiles), L2_SUMS_NBYTES // (4 * max(1, m * n))))
    return max(1, min(2 * sm_count // max(1, tiles), -(-k // setting.bk) // 4, cheap, MAX_SPLITS))


def parse(kind: str, name: str, m: int, n: int, k: int, sm_count: int = SM_COUNT) -> tuple[str, Setting, int]:
    """(implementation, setting, splits) of a name; ValueError where it is none, or does not take m rows."""
    implementation, *rest = name.split("_")
    settings = SETTINGS.get((kind, implementation), ())
    if not settings or not serves(implementation, m) or len(rest) > 2:
        raise ValueError(f"{kind}: impl must be one of {IMPLEMENTATIONS} that takes {m} rows, got {name!r}")
    found = [s for s in settings if not rest or s.name == rest[0]]
    if not found:
        raise ValueError(f"{kind}: impl must name a setting of {[s.name for s in settings]}, got {name!r}")
    if len(rest) < 2:
        return implementation, found[0], default_splits(kind, found[0], m, n, k, sm_count)
    splits = int(rest[1][1:]) if rest[1][:1] == "s" and rest[1][1:].isdecimal() else 0
    if not 1 <= splits <= MAX_SPLITS:
        raise ValueError(f"{kind}: impl must end in _s1 to _s{MAX_SPLITS}, got {name!r}")
    return implementation, found[0], splits


def for_group(setting: Setting, group_size: int) -> Setting:
    """The setting with tiles of K made of whole groups."""
    return replace(setting, bk=max(setting.bk, group_size))


@dataclass(frozen=True)
class Grid:
    """Tiles of one launch, and the scratch that its splits of K need."""

    rows: int
    columns: int
    splits: int
    tile_elements: int

    @property
    def counters_nbytes(self) -> int:
        return 0 if self.splits == 1 else -(-4 * self.rows * self.columns // COUNTERS_ALIGN) * COUNTERS_ALIGN

    @property
    def workspace_nbytes(self) -> int:
        partials = 0 if self.splits == 1 else 4 * self.rows * self.columns * self.splits * self.tile_elements
        return self.counters_nbytes + partials


def grid_of(implementation: str, setting: Setting, splits: int, m: int, n: int, k: int, amd: bool = False,
            group_size: int = 128, widths: Sequence[int] = ()) -> Grid:
    """The grid of a launch; splits without a tile of K are not made. `widths`: columns that have tiles of their own, n
    in sum."""
    bm = tile_rows(implementation, setting, m, amd, group_size)
    splits = max(1, min(splits, -(-k // setting.bk)))
    return Grid(-(-m // bm), sum(-(-width // setting.bn) for width in widths or (n,)), splits, bm * setting.bn)


def explicit(kind: str, name: str, m: int, n: int, k: int, sm_count: int = SM_COUNT) -> str:
    """The name in full, "flat_64x128_s4", which stands for one configuration whatever the defaults become."""
    if name == ATEN:
        return name
    implementation, setting, splits = parse(kind, name, m, n, k, sm_count)
    return f"{implementation}_{setting.name}_s{splits}"


def workspace_nbytes(
    kind: str, name: str, m: int, n: int, k: int, group_size: int = 0, sm_count: int = SM_COUNT,
    widths: Sequence[int] = (),
) -> int:
    """Bytes of a launch besides its operands: split sums, their counters, and x in the layout of `raw`. `widths` as of
    `grid_of`."""
    implementation, setting, splits = parse(kind, name, m, n, k, sm_count)
    amd = AMD and kind == "linear"
    laid = raw_layout.of(m, k, group_size).nbytes if implementation == RAW else 0
    grid = grid_of(implementation, for_group(setting, group_size), splits, m, n, k, amd, group_size, widths)
    return grid.workspace_nbytes + laid


def fit(times_s: Mapping[tuple[str, int, int, int], Mapping[str, float]]) -> tuple[TableEntry, ...]:
    """The table of inflection points from {(kind, m, n, k): {name: time_s}}: the fastest name at each M measured, and
    beyond the largest what DEFAULT_TABLE holds."""
    shapes = sorted({(kind, n, k) for kind, _, n, k in times_s})
    entries = []
    for kind, n, k in shapes:
        points: list[tuple[int, str]] = []
        for m in sorted(key[1] for key in times_s if (key[0], *key[2:]) == (kind, n, k)):
            times = times_s[kind, m, n, k]
            best = min(times, key=times.__getitem__)
            if points and points[-1][1] == best:
                points[-1] = (m, best)
            else:
                points.append((m, best))
        default = next(e for e in DEFAULT_TABLE if e.kind == kind)
        points += [point for point in default.points if point[0] > points[-1][0]]
        entries.append(TableEntry(kind, n, k, tuple(points)))
    return tuple(entries)


def table_path(device_name: str) -> Path:
    """Return the path of a device's table: next to this file, as selection-NVIDIA-H200.json for an "NVIDIA H200"."""
    return TABLES / f"selection-{re.sub(r'[^A-Za-z0-9.]+', '-', device_name)}.json"


@functools.cache
def table_of(device_name: str) -> tuple[TableEntry, ...]:
    """The table measured on a device of that name, or DEFAULT_TABLE where none was; read once in a process.

    ValueError where what lies there is no table of that device.
    """
    path = table_path(device_name)
    return load_table(device_name, path) if path.exists() else DEFAULT_TABLE


def save_table(device_name: str, entries: Sequence[TableEntry], path: Path) -> None:
    """Write the table of a device as JSON."""
    data = {"device": device_name, "entries": [[e.kind, e.n, e.k, e.points] for e in entries]}
    path.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


def load_table(device_name: str, path: Path) -> tuple[TableEntry, ...]:
    """Read what save_table wrote for that device; ValueError names what a table cannot hold."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        entries = tuple(TableEntry(kind, n, k, tuple((m, name) for m, name in points))
                        for kind, n, k, points in data["entries"])  # fmt: skip
        if data["device"] != device_name:
            raise ValueError(f"it is of {data['device']!r}")
        for entry in entries:
            _check(entry)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ValueError(
            f"selection: {path} is no table of {device_name!r} ({error}); remove it, and make it anew with "
            "`python -m benchmarks.gpu`"
        ) from error
    return entries


def _check(entry: TableEntry) -> None:
    """ValueError unless each name of an entry takes all rows that it is held for, and the last any number."""
    if entry.kind not in KINDS:
        raise ValueError(f"kind must be one of {KINDS}, got {entry.kind!r}")
    limits = [m for m, _ in entry.points]
    if min(entry.n, entry.k) < 1 or not limits or limits != sorted(set(limits)) or limits[0] < 1:
        raise ValueError(f"sizes must be positive and rows rise, got {entry}")
    for m, name in (*entry.points, (1 << 30, entry.points[-1][1])):
        explicit(entry.kind, name, m, entry.n, entry.k)
