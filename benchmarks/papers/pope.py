"""Pope et al. 2022 on TPU v4: context lengths, latencies, efficiencies and layout switches; FlexGen's four T4s."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.papers.flexgen_pipeline import scaling
from benchmarks.papers.flexgen_pipeline import table_3 as flexgen_table_3
from benchmarks.papers.tables import Row
from forebay.rewriter.machine.presets import GIB, PRESETS
from forebay.rewriter.partition.collectives import ChipMesh, mesh_of
from forebay.rewriter.partition.layouts import (
    ChipLayout,
    Feedforward,
    PhaseWork,
    feedforward_nbytes,
    layer_cost,
    layouts,
    outside_cost,
)
from forebay.rewriter.partition.published_models import PUBLISHED_SHAPES, PublishedShape, palm
from forebay.rewriter.predict.estimator import MachineEstimator

# Tables D.2 to D.4. Of "ours" by table: tokens in and out; then batch, PaLM prefill, generate, total, and MT-NLG total,
# in milliseconds. Of "faster_transformer" by table and system: milliseconds and percent of peak, for rising batches.
# Columns of "tables_2_3": model, chips, batch, passes, layouts, weights, MFU, latency. Slices of 8, 16 and 32 have the
# TPU v4's topologies 2x2x2, 2x2x4 and 2x4x4. One pass is a prompt of 2048 tokens, 64 are decode steps.
TABLES: dict[str, Any] = json.loads(Path(__file__).with_name("pope_tables.json").read_text())
OURS, FASTER_TRANSFORMER = TABLES["ours"], TABLES["faster_transformer"]
MACHINE = PRESETS["tpu-v4"]
TIMES = MachineEstimator(MACHINE)
CUBE, CHIP_NBYTES, KV_SHARE = (4, 4, 4), 32 * GIB, 0.3  # section 4; Table 1 reserves 30 % for K and V
CONTEXT, CONTEXT_BOUND, LATENCY_BOUND, MEDIAN_BOUND = 2048, 0.10, 0.25, 0.15
STEP_ROW_S = 0.0369  # section 4.4: a token of PaLM 540B, bfloat16, 64 sequences; the one figure a constant comes from


def prompt(batch: int, tokens: int) -> PhaseWork:
    return PhaseWork("prefill", batch, tokens, tokens)


def step(batch: int, context: float) -> PhaseWork:
    return PhaseWork("decode", batch, 1, context)


def pass_s(shape: PublishedShape, mesh: ChipMesh, work: PhaseWork, feedforward: Feedforward, attention: str,
           weights: str = "bfloat16", parallel: bool | None = None) -> float:
    """Seconds of one forward pass with a feed-forward layout, over the best axes for it."""
    side_by_side = shape.parallel if parallel is None else parallel
    found = [sum(kind.count * layer_cost(kind, way, mesh, work, TIMES, parallel=side_by_side, weights=weights).time_s
                 for kind in shape.model.layers)
             for way in layouts(mesh, work) if (way.feedforward, way.attention) == (feedforward, attention)]
    return min(found) + outside_cost(shape.model, mesh, work.batch, TIMES, weights).time_s


def mfu(shape: PublishedShape, tokens: int, seconds: float, chips: int) -> float:
    """Model FLOPS utilisation (section 2): 2 operations for each parameter and token, padding not counted."""
    return 2 * shape.parameters * tokens / (seconds * chips * MACHINE.peak_flops)


def table_1() -> Iterator[Row]:
    """The longest context whose K and V fit the reserved share, by the cache a chip holds for one token."""
    mesh = mesh_of(MACHINE, CUBE)
    multihead = palm("palm-540b, multihead", 540e9, 118, 18432, 64, kv_heads=64, head_dim=128)
    multiquery = PUBLISHED_SHAPES["palm-540b"]
    paper = {"Multihead 128": (multihead, "heads", 1320, 330),
             "Baseline multiquery 256": (multiquery, "heads", 660, 165),
             "Optimized multiquery 256": (multiquery, "batch", 43000, 10700)}
    for name, (shape, attention, *lengths) in paper.items():
        for batch, length in zip((128, 512), lengths, strict=True):
            kind = shape.model.layers[0]
            held = layer_cost(kind, ChipLayout("2d", (0,), (), "batch" if attention == "batch" else "heads"), mesh,
                              step(batch, 1.0), TIMES, parallel=True).cache_nbytes * kind.count
            yield Row("Pope et al., Table 1", f"{name}, batch {batch}", "token", length, KV_SHARE * CHIP_NBYTES / held,
                      CONTEXT_BOUND)


def tables_2_3() -> Iterator[Row]:
    for table, columns in TABLES["tables_2_3"].items():
        for model, sides, batch, passes, feedforward, attention, weights, share, latency_s in columns:
            shape, mesh, decodes = PUBLISHED_SHAPES[model], mesh_of(MACHINE, tuple(sides)), passes > 1
            work = step(batch, CONTEXT + passes / 2) if decodes else prompt(batch, CONTEXT)
            seconds = passes * pass_s(shape, mesh, work, feedforward, attention, weights)
            name = f"{model}, {work.name}, batch {batch}, {mesh.chips} chips, {weights}"
            yield Row(f"Pope et al., {table}", f"{name}, latency", "s", latency_s, seconds, LATENCY_BOUND)
            yield Row(f"Pope et al., {table}", f"{name}, MFU", "share", share,
                      mfu(shape, batch * (passes if decodes else CONTEXT), seconds, mesh.chips), LATENCY_BOUND)


def switches_3() -> list[str]:
    """Figure 3: the layout of least volume, as tokens grow, on a cube, for a feed-forward of 16384 by 65536
    (assumed: the figure's own sizes are lost; crossings move in proportion to them, their order does not)."""
    mesh, order = mesh_of(MACHINE, CUBE), []
    gathered: dict[Feedforward, tuple[int, ...]] = {"2d": (), "x": (0,), "xy": (0, 1), "xyz": (0, 1, 2)}
    ways = [ChipLayout(name, (0,), axes, "heads") for name, axes in gathered.items()]
    for power in range(11, 24):
        best = min(ways, key=lambda way: feedforward_nbytes(way, mesh, 1 << power, 16384, 65536))
        order.append(best.feedforward)
    return list(dict.fromkeys(order))


def switches_7() -> list[str]:
    """Figure 7: the quickest layout for prompts of 2048 tokens of PaLM 540B on a cube, from 1 sequence to 512."""
    mesh, shape, order = mesh_of(MACHINE, CUBE), PUBLISHED_SHAPES["palm-540b"], []
    for power in range(10):
        work = prompt(1 << power, CONTEXT)
        best = min(layouts(mesh, work), key=lambda way: layer_cost(shape.model.layers[0], way, mesh, work, TIMES,
                                                                   parallel=True).time_s)
        order.append(best.feedforward)
    return list(dict.fromkeys(order))


def benchmark_s(model: str, batch: int, length: int, new_tokens: int) -> tuple[float, float]:
    """Seconds of prefill and of all decode steps of a FasterTransformer benchmark, on a cube, with 2D partitioning."""
    shape, mesh = PUBLISHED_SHAPES[model], mesh_of(MACHINE, CUBE)
    shared = "batch" if shape.model.layers[0].kv_heads == 1 else "heads"
    return (pass_s(shape, mesh, prompt(batch, length), "2d", "heads"),
            new_tokens * pass_s(shape, mesh, step(batch, length + new_tokens / 2), "2d", shared))


def appendix_d() -> Iterator[Row]:
    for table, ((length, new_tokens), lines) in OURS.items():
        for batch, *paper in lines:
            prefill, generate = benchmark_s("palm-540b", batch, length, new_tokens)
            found = (prefill, generate, prefill + generate, sum(benchmark_s("mt-nlg-530b", batch, length, new_tokens)))
            for name, printed, seconds in zip(("PaLM prefill", "PaLM generate", "PaLM total", "MT-NLG total"), paper,
                                              found, strict=True):
                yield Row(f"Pope et al., Table {table}", f"{length} + {new_tokens} tokens, batch {batch}, {name}", "ms",
                          printed, 1e3 * seconds)


def medians(rows: list[Row]) -> Iterator[Row]:
    """The median error of the 'Ours' columns, as a ratio."""
    for model in ("PaLM", "MT-NLG"):
        errors = [abs(r.error) for r in rows if f", {model} " in r.row]
        yield Row("Pope et al., Tables D.2 to D.4, median", f"{model}, {len(errors)} figures, 1 + median error",
                  "ratio", 1.0, 1 + statistics.median(errors), MEDIAN_BOUND)


def frontier(table: str, rows: list[Row], *, printed: bool, without: str = "") -> list[tuple[str, int]]:
    """The Pareto frontier of total time and MFU (Appendix D): system and batch, or place in the column of
    FasterTransformer, in the order of time. `without` leaves a system out."""
    (length, new_tokens), _ = OURS[table]
    points = [(seconds, -float(share), name, i) for name, column in FASTER_TRANSFORMER[table].items()
              for i, (seconds, share) in enumerate(column)]
    for row in rows:
        if row.table.endswith(table) and row.row.endswith(" total"):
            batch, system = int(row.row.split("batch ")[1].split(",")[0]), row.row.split(", ")[-1].split()[0]
            seconds = row.paper if printed else row.predicted
            shape = PUBLISHED_SHAPES["palm-540b" if system == "PaLM" else "mt-nlg-530b"]
            points.append((seconds, -100 * mfu(shape, batch * (length + new_tokens), seconds / 1e3, 64), system, batch))
    found: list[tuple[str, int]] = []
    best = 0.0
    for _, share, name, at in sorted(points):
        if name != without and -share > best:
            best = -share
            found.append((name, at))
    return found


def winners(rows: list[Row]) -> Iterator[Row]:
    """How many points of the printed frontier are on the predicted one: of all systems, and of those on MT-NLG."""
    for table in OURS:
        for name, without in (("all systems", ""), ("on MT-NLG", "PaLM")):
            paper, found = (frontier(table, rows, printed=p, without=without) for p in (True, False))
            yield Row("Pope et al., Tables D.2 to D.4, frontier", f"{table}, {name}: its points", "points", len(paper),
                      len(set(paper) & set(found)))


def sentences() -> Iterator[Row]:
    """What section 4.3 says of serial blocks, and section 4.4 of bfloat16 weights."""
    shape, mesh, work = PUBLISHED_SHAPES["palm-540b"], mesh_of(MACHINE, CUBE), step(512, CONTEXT + 32)
    serial, parallel = (pass_s(shape, mesh, work, "2d", "batch", parallel=p) for p in (False, True))
    yield Row("Pope et al., section 4", "serial to parallel blocks, decode, batch 512", "ratio", 1.14,
              serial / parallel)
    yield Row("Pope et al., section 4", "palm-540b, decode, batch 64, bfloat16", "ms", 1e3 * STEP_ROW_S,
              1e3 * pass_s(shape, mesh, step(64, CONTEXT + 32), "2d", "batch"), None, "fitted")
    yield Row("Pope et al., section 4", "palm-540b, decode, batch 512: 1D to 2D", "ratio", 1.0,
              pass_s(shape, mesh, work, "1d", "batch") / parallel, None, "Figure 6: above 1")


def rows() -> list[Row]:
    ours = list(appendix_d())
    return [*table_1(), *tables_2_3(), *medians(ours), *winners(ours), *ours, *sentences(), *flexgen_table_3(),
            *(Row("FlexGen, Table 3, scaling", f"{model}, decode, four machines to one", "ratio", *pair)
              for model, pair in scaling().items())]


def remarks() -> Iterator[str]:
    """Lines after the tables."""
    yield f"Layouts as tokens grow, Figure 3: {', '.join(switches_3())}"
    yield f"Layouts as tokens grow, Figure 7: {', '.join(switches_7())}"
