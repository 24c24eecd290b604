"""The memory of a plan as a picture: addresses upwards, time to the right, a colour per kind of buffer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from forebay.rewriter.ir.byte_sizes import format_nbytes
from forebay.rewriter.ir.plan import BufferPlacement, Plan, PlanError
from forebay.rewriter.predict.simulate import Timeline
from forebay.rewriter.report.explain import KIND_LETTERS, lasting, peak_nbytes, phases

# Okabe and Ito's palette, which colour-blind readers can tell apart.
COLOURS = dict(zip(KIND_LETTERS, ("#0072B2", "#999999", "#E69F00", "#009E73", "#F0E442", "#000000", "#56B4E9",
                                  "#CC79A7", "#D55E00"), strict=True))
MIB = 1 << 20


def draw_memory(plan: Plan, path: str | Path, arena: str = "device") -> None:
    """Write a PNG with the whole arena as a bar, and the buffers of each phase over the steps of its graph.

    Raises PlanError for a plan without buffers in `arena`, and for a path whose ending matplotlib cannot write.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # draws without a screen
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    moving = phases(plan, arena)
    if not lasting(plan, arena) and not moving:
        raise PlanError(f"this plan places no buffer in the {arena} arena, so there is nothing to draw")
    figure = Figure(figsize=(4 + 5 * len(moving), 6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, 1 + len(moving), width_ratios=[1, *[3] * len(moving)], squeeze=False)[0]
    _draw_arena(axes[0], plan, moving, arena)
    for axis, (phase, buffers) in zip(axes[1:], moving.items(), strict=True):
        _draw_phase(axis, phase, buffers)
    kinds = dict.fromkeys(b.kind for b in plan.buffers if b.arena == arena)
    figure.legend(handles=[Patch(color=COLOURS[kind], label=kind) for kind in kinds], loc="outside lower center",
                  ncols=len(kinds))
    figure.suptitle(f"{arena} arena of {format_nbytes(plan.arenas.get(arena, 0))}, budget "
                    f"{format_nbytes(plan.budget.device)}, batch {plan.workload.batch}")
    try:
        figure.savefig(path, dpi=120)
    except ValueError as error:
        raise PlanError(f"cannot write the picture {path}: {error}") from error


def draw_step(plan: Plan, line: Timeline, path: str | Path) -> None:
    """Write a PNG of one decode step as predicted: above what each stream does over time, below the device arena and
    what moves in it. PlanError for a path whose ending matplotlib cannot write."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    figure = Figure(figsize=(10, 6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplot_mosaic([["lanes", "lanes"], ["arena", "phase"]], width_ratios=[1, 4], height_ratios=[2, 3])
    streams = list(dict.fromkeys(stream for stream, *_ in line.spans))
    for lane, stream in enumerate(streams):
        colour = COLOURS["activation" if stream == "compute" else "slot"]
        bars = [(1e3 * start, 1e3 * (end - start)) for name, _, start, end in line.spans if name == stream]
        axes["lanes"].broken_barh(bars, (lane - 0.4, 0.8), facecolor=colour, edgecolor="white", linewidth=0.2)
    axes["lanes"].set_yticks(range(len(streams)), streams)
    axes["lanes"].set(title=f"a decode step of {1e3 * line.time_s:.0f} ms, bound by {line.bottleneck}", xlabel="ms",
                      xlim=(0, 1e3 * line.time_s))
    moving = {phase: buffers for phase, buffers in phases(plan, "device").items() if phase == "decode"}
    _draw_arena(axes["arena"], plan, moving, "device")
    if moving:
        _draw_phase(axes["phase"], "decode", moving["decode"])
    kinds = dict.fromkeys(b.kind for b in plan.buffers_of("decode") if b.arena == "device")
    figure.legend(handles=[Patch(color=COLOURS[kind], label=kind) for kind in kinds], loc="outside lower center",
                  ncols=len(kinds))
    try:
        figure.savefig(path, dpi=110)
    except ValueError as error:
        raise PlanError(f"cannot write the picture {path}: {error}") from error


def _draw_arena(axis: Any, plan: Plan, moving: dict[str, list[BufferPlacement]], arena: str) -> None:
    """What lives throughout, and one band for the stretch in which a phase's buffers come and go; a bar for each phase
    where they differ in what lives throughout."""
    bars = ["prefill", "decode"] if plan.prefill_overlays_kv_cache else ["decode"]
    for x, shown in enumerate(bars):
        for b in lasting(plan, arena, shown):
            axis.bar(x, b.nbytes / MIB, 1, b.offset / MIB, color=COLOURS[b.kind], edgecolor="white", linewidth=0.2)
        for phase, buffers in moving.items():
            if phase == shown or not plan.prefill_overlays_kv_cache:
                low, high = _stretch(buffers)
                axis.bar(x, (high - low) / MIB, 1, low / MIB, color=COLOURS["activation"])
    axis.set(title="whole arena", ylabel="address, MiB", xlim=(-0.5, len(bars) - 0.5),
             ylim=(0, max(plan.arenas.get(arena, 0), 1) / MIB))
    axis.set_xticks(range(len(bars)), bars if plan.prefill_overlays_kv_cache else [""])


def _draw_phase(axis: Any, phase: str, buffers: Sequence[BufferPlacement]) -> None:
    low, high = _stretch(buffers)
    for b in buffers:
        axis.broken_barh([(b.first, b.last - b.first + 1)], (b.offset / MIB, b.nbytes / MIB),
                         facecolor=COLOURS[b.kind], edgecolor="white", linewidth=0.2)
    axis.set(title=f"{phase}: {format_nbytes(high - low)}, {format_nbytes(peak_nbytes(buffers))} live at most",
             xlabel="step of the graph", xlim=(0, max(b.last for b in buffers) + 1), ylim=(low / MIB, high / MIB))


def _stretch(buffers: Sequence[BufferPlacement]) -> tuple[int, int]:
    return min(b.offset for b in buffers), max(b.offset + b.nbytes for b in buffers)
