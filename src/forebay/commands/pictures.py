"""Pictures of a plan and of a run: the arena's addresses, a step's streams, memory over time, and a roofline."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forebay.commands.process_memory import MemoryWatch
from forebay.kernels.operators import find
from forebay.rewriter.ir.byte_sizes import format_nbytes
from forebay.rewriter.ir.plan import BufferPlacement, Plan, PlanError
from forebay.rewriter.ir.program import Program
from forebay.rewriter.machine.profile import Machine
from forebay.rewriter.predict.estimator import MachineEstimator
from forebay.rewriter.predict.item_costs import touched_nbytes
from forebay.rewriter.predict.simulate import simulate
from forebay.rewriter.report.explain import KIND_LETTERS, kind_nbytes, lasting, peak_nbytes, phases

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Okabe and Ito's palette, which color-blind readers can tell apart.
COLOURS = dict(zip(KIND_LETTERS, ("#0072B2", "#999999", "#E69F00", "#009E73", "#F0E442", "#000000", "#56B4E9",
                                  "#CC79A7", "#D55E00"), strict=True))
MIB = 1 << 20
MANY_ROWS = 512  # of a matmul that computation binds


def draw_memory(plan: Plan, path: str | Path, arena: str = "device") -> None:
    """Write a PNG with the whole arena as a bar, and the buffers of each phase over the steps of its graph.

    Raises PlanError for a plan without buffers in `arena`, and for a path whose ending matplotlib cannot write.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
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
    _save(figure, path)


def draw_step(plan: Plan, program: Program, machine: Machine, path: str | Path) -> None:
    """Write a picture of one decode step as predicted.

    Above the work of each stream over time. Below on the left the memory over the step, stacked by kind, with the
    budget; on the right the throughput that disk, memory and computation allow by the number of sequences. Experts that
    a router names have no such limits.

    Args:
        plan: The plan of the step.
        program: Its decode step.
        machine: The machine that it is predicted for.
        path: A file whose ending matplotlib can write.

    Raises:
        PlanError: For another ending.
    """
    figure, axes = _mosaic([["lanes", "lanes"], ["memory", "roofs"]], width_ratios=[1, 1], height_ratios=[2, 3])
    line = simulate(program, machine)
    streams = list(dict.fromkeys(stream for stream, *_ in line.spans))
    for lane, stream in enumerate(streams):
        colour = COLOURS["activation" if stream == "compute" else "slot"]
        bars = [(1e3 * start, 1e3 * (end - start)) for name, _, start, end in line.spans if name == stream]
        axes["lanes"].broken_barh(bars, (lane - 0.4, 0.8), facecolor=colour, edgecolor="white", linewidth=0.2)
    axes["lanes"].set_yticks(range(len(streams)), streams)
    axes["lanes"].set(title=f"a decode step of {1e3 * line.time_s:.0f} ms, bound by {line.bottleneck}", xlabel="ms",
                      xlim=(0, 1e3 * line.time_s))
    _draw_live(axes["memory"], plan)
    if any(w.routed for w in plan.weights):
        axes["roofs"].set_title("no roofline: what a step reads depends on its router", fontsize=10)
        axes["roofs"].set_axis_off()
    else:
        _draw_roofs(axes["roofs"], plan, throughput_roofs(plan, program, machine), line.time_s)
    _save(figure, path)


def draw_run(plan: Plan, memory: MemoryWatch, constant_nbytes: int, path: str | Path) -> None:
    """Write a picture of the memory that a run took over time, with the planned parts stacked beneath it.

    Args:
        plan: The plan that ran.
        memory: The samples of the run: anonymous memory of the process and cached pages of the model's files.
        constant_nbytes: Memory of the process in addition to the budget.
        path: A file whose ending matplotlib can write.

    Raises:
        PlanError: For another ending.
    """
    figure, axes = _mosaic([["memory"]])
    axis = axes["memory"]
    times = [time_s for time_s, _ in memory.samples]
    span, base = (0.0, max([*times, MemoryWatch.PERIOD_S])), constant_nbytes / MIB
    axis.fill_between(span, 0, base, color="#dddddd", label="Python and threads")
    for arena in plan.arenas:
        for kind, nbytes in kind_nbytes(plan, arena).items():
            label = kind if arena == "device" else f"{kind}, {arena}"
            axis.fill_between(span, base, base + nbytes / MIB, color=COLOURS[kind], alpha=0.7, label=label)
            base += nbytes / MIB
    axis.plot(times, [nbytes / MIB for _, nbytes in memory.samples], color="black", label="measured")
    limit = (constant_nbytes + plan.budget.device + (plan.budget.host or plan.arenas.get("host", 0))) / MIB
    axis.axhline(limit, color="#D55E00", linestyle="--", label="budget, Python and threads")
    axis.set(title="memory of the process: planned parts, measured total", xlabel="s", ylabel="MiB", xlim=span,
             ylim=(0, 1.05 * max([limit, *(nbytes / MIB for _, nbytes in memory.samples)])))
    axis.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
    _save(figure, path)


def throughput_roofs(plan: Plan, program: Program, machine: Machine) -> dict[str, tuple[float, float]]:
    """The most tokens per second that each resource allows: a rate per sequence of the batch, and a limit.

    Args:
        plan: A plan whose steps read the same weights for every batch.
        program: Its decode step, of `plan.workload.batch` sequences.
        machine: The machine that it is predicted for.

    Returns:
        By name of the resource, (tokens/s per sequence, tokens/s at most); the first is infinite for computation, the
        second for bytes. Streams of weights come by the tier that they begin in.
    """
    times = MachineEstimator(machine)
    roofs: dict[str, tuple[float, float]] = {}
    streamed = [w for w in plan.weights if w.streams and not (w.gather and not w.tile_rows)]
    for tier in dict.fromkeys(w.tier for w in streamed):
        nbytes = sum(w.nbytes for w in streamed if w.tier == tier)
        to = machine.near_disk if tier == "disk" else "device"
        roofs[tier] = (1 / (nbytes * times.byte_s(tier, to)), math.inf)
    seconds = flops = read = 0.0
    for launch in program.launches():
        operator = find(launch.op)
        if operator is None or operator.implementations is None:
            continue
        dtype, m, n, k = operator.implementations.shape(launch)
        seconds += times.product_s(dtype, MANY_ROWS, n, k, nbytes=touched_nbytes(launch)) * m / MANY_ROWS
        flops += 2.0 * m * n * k
        read += touched_nbytes(launch)
    if seconds and flops:
        roofs["memory"] = (1 / (read / machine.tiers["device"].bandwidth_bytes_per_s), math.inf)
        roofs["compute"] = (math.inf, plan.workload.batch / seconds)
    return roofs


def _mosaic(panels: Any, **ratios: Any) -> tuple[Figure, dict[str, Any]]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # draws without a screen
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 6), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplot_mosaic(panels, **ratios)


def _save(figure: Figure, path: str | Path) -> None:
    try:
        figure.savefig(path, dpi=110)
    except ValueError as error:
        raise PlanError(f"cannot write the picture {path}: {error}") from error


def _draw_live(axis: Any, plan: Plan) -> None:
    """Bytes of the device arena that are live in each step of decode's graph, stacked by kind, under the budget."""
    moving = phases(plan, "device").get("decode", [])
    last = max((b.last for b in moving), default=0) + 1
    live: dict[str, list[int]] = {}
    for b in lasting(plan, "device"):
        live[b.kind] = [nbytes + b.nbytes for nbytes in live.get(b.kind, [0] * last)]
    for b in moving:
        row = live.setdefault(b.kind, [0] * last)
        for step in range(b.first, b.last + 1):
            row[step] += b.nbytes
    axis.stackplot(range(last), [[nbytes / MIB for nbytes in row] for row in live.values()], step="post",
                   colors=[COLOURS[kind] for kind in live], labels=list(live))
    axis.axhline(plan.budget.device / MIB, color="black", linestyle="--", linewidth=1, label="budget")
    axis.set(title="device memory over the step, live bytes", xlabel="step of the graph", ylabel="MiB",
             xlim=(0, max(1, last - 1)), ylim=(0, 1.25 * plan.budget.device / MIB))
    axis.legend(frameon=False, ncols=4, fontsize=8, loc="upper center")


def _draw_roofs(axis: Any, plan: Plan, roofs: dict[str, tuple[float, float]], time_s: float) -> None:
    batches = [2 ** n for n in range(13)]
    colours = {"disk": COLOURS["slot"], "host": COLOURS["io"], "memory": COLOURS["weight"],
               "compute": COLOURS["activation"]}
    for name, (each, most) in roofs.items():
        axis.plot(batches, [min(each * batch, most) for batch in batches], color=colours[name], label=name)
    axis.plot([plan.workload.batch], [plan.workload.batch / time_s], "o", color="black", label="this plan")
    axis.set(title="limit of each resource", xlabel="sequences in the batch", ylabel="tokens/s", xscale="log",
             yscale="log")
    axis.legend(frameon=False, fontsize=8)


def _draw_arena(axis: Any, plan: Plan, moving: dict[str, list[BufferPlacement]], arena: str) -> None:
    """Draw the buffers that live throughout, and one band for the stretch in which a phase's buffers come and go; a bar
    for each phase where they differ in what lives throughout."""
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
